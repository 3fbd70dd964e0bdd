"""Several processes: measured on this machine's cores, and on paper for 8 to 64 GPUs.

    python -m benchmarks.scaling --ranks 1 2 4

Measured: steps of `dino_sparo.dino.step` with gloo, the same images per process. On paper: the bytes that a step sends,
how long they take, and from which batch on they pass while the backward pass computes.
"""

import argparse
import math
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

import main_dino
from benchmarks.reference import Reference
from benchmarks.report import Section, options, run
from benchmarks.timing import Spread
from dino_sparo.data.batch import Batch
from dino_sparo.dino.step import train_step
from dino_sparo.dino.train import DINOObjective
from dino_sparo.distillation.head import DINOHead
from dino_sparo.distillation.network import EncoderWithHead
from dino_sparo.models.encoder import create_encoder
from dino_sparo.runtime.collectives import barrier
from dino_sparo.runtime.launch import init_distributed, shutdown

EQUAL_LOSS = 1e-4  # nats
GLOBAL_IMAGES = 8  # of the steps whose losses are compared
SIZES = {"global_crops_size": 32, "local_crops_size": 16, "local_crops_number": 2}


@dataclass(frozen=True)
class Cluster:
    """Assumed speeds of a cluster, per GPU; options of the command change them.

    Attributes:
        tflops: sustained, bf16, of the whole step: about half of an H200's peak.
        node_gbytes: GB/s that a ring all-reduce moves within a node of eight.
        net_gbytes: GB/s that one GPU's share of the network moves between nodes.
        step_latency_us: of one all-reduce, per hop of the ring.
        buckets: all-reduces that the gradients are cut into.
    """

    tflops: float = 400.0
    node_gbytes: float = 360.0
    net_gbytes: float = 40.0
    step_latency_us: float = 5.0
    buckets: int = 4

    def all_reduce_seconds(self, num_bytes: float, gpus: int, calls: int = 1) -> float:
        """A ring: 2 (n - 1) / n of the bytes pass the slowest link; 2 (n - 1) hops."""
        rate = self.node_gbytes if gpus <= 8 else self.net_gbytes
        return 2 * (gpus - 1) / gpus * num_bytes / (rate * 1e9) + calls * 2 * (gpus - 1) * self.step_latency_us * 1e-6


# Measured.


def training_args(ranks: int, tiny: bool, steps: int) -> argparse.Namespace:
    """The options of a small run. SGD, whose steps do not amplify rounding."""
    words = {
        "data_path": f"scenes:{GLOBAL_IMAGES * steps}:32", "num_workers": 0,
        **SIZES, "arch": "vit_micro", "patch_size": 8, "out_dim": 64 if tiny else 4096, "sparo_slots": 4,
        "sparo_slot_dim": 8, "sparo_key_dim": 8, "drop_path_rate": 0, "optimizer": "sgd", "precision": "fp32",
        "device": "cpu", "epochs": 2, "warmup_epochs": 0, "freeze_last_layer": 1,
        "head_hidden_dim": 32 if tiny else 1024, "batch_size_per_gpu": GLOBAL_IMAGES // ranks,
    }  # fmt: skip
    flat = [word for name, value in words.items() for word in (f"--{name}", str(value))]
    return main_dino.get_args_parser().parse_args(flat)


def random_batch(number: int, first: int = 0) -> Batch:
    """Crops of `number` images, of which the first is the `first` of all."""
    sides = [SIZES["global_crops_size"]] * 2 + [SIZES["local_crops_size"]] * SIZES["local_crops_number"]
    views = [
        torch.stack([
            torch.randn(3, side, side, generator=torch.Generator().manual_seed(100 * crop + image))
            for image in range(first, first + number)
        ])
        for crop, side in enumerate(sides)
    ]  # fmt: skip
    return Batch(views, torch.zeros(number).long(), torch.arange(first, first + number), [])


def measure_rank(rank: int, ranks: int, port: int, images: int, steps: int, tiny: bool) -> dict[str, Any]:
    """One process: losses of equal steps on an equal global batch, seconds per step, bytes that DDP sends."""
    place_in = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    before, threads = dict(os.environ), torch.get_num_threads()
    os.environ.update({name: str(value) for name, value in place_in.items()})
    torch.set_num_threads(1)
    try:
        process = init_distributed("cpu")
        training = DINOObjective(training_args(ranks, tiny, 10 * steps + 10), process)
        share = GLOBAL_IMAGES // ranks
        losses = [_mean_loss(training, random_batch(share, rank * share), ranks) for _ in range(3)]
        batch, seconds = random_batch(images), []
        for _ in range(steps):
            barrier()
            start = time.perf_counter()
            train_step(training, [batch], epoch=1)
            barrier()
            seconds.append(time.perf_counter() - start)
        return {"losses": losses, "seconds": seconds, "gradient bytes": _gradient_bytes(training)}
    finally:
        shutdown()
        torch.set_num_threads(threads)
        os.environ.clear()
        os.environ.update(before)


def _mean_loss(training: DINOObjective, batch: Batch, ranks: int) -> float:
    """Mean loss of a step over all ranks, nats."""
    loss = train_step(training, [batch], epoch=1).loss.detach().clone()
    if ranks > 1:
        torch.distributed.all_reduce(loss)
    return float(loss) / ranks


def _gradient_bytes(training: DINOObjective) -> int:
    """Size of the gradients that DDP sends, by its own log; in a single process, that DDP would send."""
    if isinstance(training.student, DistributedDataParallel):
        return int(training.student._get_ddp_logging_data()["total_parameter_size_bytes"])
    return sum(p.numel() * p.element_size() for p in training.network.parameters() if p.requires_grad)


def measure_ranks(ranks: int, images: int, steps: int, tiny: bool) -> dict[str, Any]:
    """Measure with this number of processes; the results of rank 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    if ranks == 1:
        return measure_rank(0, 1, port, images, steps, tiny)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(ranks, mp_context=context) as pool:
        jobs = [pool.submit(measure_rank, rank, ranks, port, images, steps, tiny) for rank in range(ranks)]
        results = [job.result() for job in jobs]
    return results[0]


# On paper.


def network(readout: str, out_dim: int, device: str) -> EncoderWithHead:
    """ViT-S/16 with DINO's head, as pretrained."""
    with torch.device(device):
        encoder = create_encoder("vit_small", 16, readout)
        return EncoderWithHead(encoder, DINOHead(encoder.encoding_dim, out_dim))


def step_flops(readout: str, out_dim: int) -> float:
    """Multiplications and additions of a step for one image: student forward and backward, teacher forward."""
    student = network(readout, out_dim, "meta")
    crops = [torch.empty(number, 3, side, side, device="meta") for side, number in ((224, 2), (96, 8))]
    with FlopCounterMode(display=False) as counter:
        student(crops).sum().backward()
        with torch.no_grad():
            student(crops[:1])
    return float(counter.get_total_flops())


def paper(readout: str, out_dim: int, gpus: Sequence[int], cluster: Cluster) -> list[dict[str, Any]]:
    """For each number of GPUs: the seconds to send a step's bytes, and the batch whose backward pass hides them."""
    gradients = sum(p.numel() for p in network(readout, out_dim, "meta").parameters() if p.requires_grad)
    sent = {"gradients": 4 * gradients, "center": 4 * out_dim, "batch statistics": 8}
    flops = step_flops(readout, out_dim)
    # The student's backward pass is about two thirds of its own work.
    backward = 0.6 * flops / (cluster.tflops * 1e12)
    rows = []
    for number in gpus:
        seconds = cluster.all_reduce_seconds(sent["gradients"], number, cluster.buckets)
        # The last bucket is ready when the backward pass is over.
        shown = seconds / cluster.buckets
        rows.append({
            "read-out": readout,
            "GPUs": number,
            **{f"{what}, MB": size / 1e6 for what, size in sent.items()},
            "gradients, ms": 1e3 * seconds,
            "center, ms": 1e3 * cluster.all_reduce_seconds(sent["center"], number),
            "never hidden, ms": 1e3 * shown,
            "hidden from a batch per GPU of": math.ceil((seconds - shown) / backward),
            "step at batch 64, ms": 1e3 * 64 * flops / (cluster.tflops * 1e12),
        })  # fmt: skip
    return rows


def measure(args: argparse.Namespace, reference: Reference | None) -> Section:
    """Equal losses, then seconds, then the paper."""
    images, steps = (2, 2) if args.quick else (16, 15)
    cluster = Cluster(args.tflops, args.node_gbytes, args.net_gbytes)
    section = Section(
        "Several processes",
        f"Measured: vit_micro, {images} images per process and step, gloo, one thread each on {os.cpu_count()} cores, "
        f"{steps} steps. On paper: ViT-S/16, 2x224 + 8x96, {args.out_dim:,} prototypes, fp32 gradients in "
        f"{cluster.buckets} buckets; assumed {cluster.tflops:g} TFLOP/s, {cluster.node_gbytes:g} GB/s within a node of "
        f"8, {cluster.net_gbytes:g} GB/s and GPU between nodes, {cluster.step_latency_us:g} us per hop.",
    )
    found = {}
    for ranks in args.ranks:
        found[ranks] = measure_ranks(ranks, images, steps, args.quick)
        milliseconds = 1e3 * Spread.of(found[ranks]["seconds"][1:]).median
        print(f"{ranks} processes: {milliseconds:.3g} ms per step", file=sys.stderr, flush=True)
    first = found[args.ranks[0]]
    for ranks in args.ranks[1:]:
        losses, wanted = (torch.tensor(result["losses"]) for result in (found[ranks], first))
        section.check(f"losses of 3 steps, {ranks} processes against {args.ranks[0]}", losses, wanted, EQUAL_LOSS)
    rows = []
    for ranks, result in found.items():
        # The first steps also build DDP's buckets.
        spread = Spread.of(result["seconds"][1:])
        rows.append({
            "processes": ranks,
            "ms per step": spread.scaled(1e3),
            "images per second": ranks * images / spread.median,
            f"speed per process against {args.ranks[0]}": Spread.of(first["seconds"][1:]).median / spread.median,
            "gradients, MB": result["gradient bytes"] / 1e6,
        })  # fmt: skip
    section.tables["Measured"] = rows
    section.tables["On paper"] = [
        row for readout in ("cls", "sparo") for row in paper(readout, args.out_dim, (8, 16, 32, 64), cluster)
    ]
    section.notes = [
        f"More than {os.cpu_count()} processes share this machine's cores, so a step takes that much longer.",
        "On paper is a model, no measurement. Batch statistics: one loss and one flag; metrics travel once per epoch.",
    ]
    return section


def get_args_parser() -> argparse.ArgumentParser:
    """The options."""
    parser, cluster = options("Several processes, measured and on paper."), Cluster()
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="Numbers of processes to measure.")
    parser.add_argument("--out_dim", type=int, default=65536, help="K, prototypes, on paper.")
    parser.add_argument("--tflops", type=float, default=cluster.tflops, help="TFLOP/s of one GPU, sustained.")
    parser.add_argument("--node_gbytes", type=float, default=cluster.node_gbytes, help="GB/s within a node.")
    parser.add_argument("--net_gbytes", type=float, default=cluster.net_gbytes, help="GB/s per GPU between nodes.")
    return parser


def main(argv: list[str] | None = None) -> Section:
    """Parse the options, measure, print."""
    parser = get_args_parser()
    if odd := [ranks for ranks in parser.parse_args(argv).ranks if GLOBAL_IMAGES % ranks]:
        parser.error(f"--ranks {odd[0]} does not divide the batch of {GLOBAL_IMAGES} images")
    return run(measure, parser, argv)


if __name__ == "__main__":
    main()
