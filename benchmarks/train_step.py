"""One step of DINO, vanilla and with SPARO, ours and the reference's: total, by part, memory.

    python -m benchmarks.train_step --reference dino

Two global and eight local crops per image, noise, 65,536 prototypes. Ours is what `dino/train.py` builds and
`dino/step.py` runs; the reference's networks, loss, clipping and moving average are its own, called in the order of its
`train_one_epoch`, with its DDP, and on a GPU with its fp16 scaler and cuDNN's search for the fastest algorithms.

A step begins with what the loader hands over, on a GPU in page-locked memory, and each side copies it as it does in
training. On a GPU ours are 8-bit crops, which the step distorts (`--distort_on auto`); the reference's are finished.
"""

import argparse
import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import main_dino
from benchmarks.readout import ListedSparo
from benchmarks.reference import Reference
from benchmarks.report import Bar, Section, measured_precisions, options, run
from benchmarks.timing import Spread, Timings, alone, interleave, on_host, synchronize, with_cudnn_benchmark
from dino_sparo.data.augment import Distortions
from dino_sparo.data.batch import Batch
from dino_sparo.data.crops import MultiCropAugmentation, sample_crop
from dino_sparo.data.defaults import IMAGENET_MEAN, IMAGENET_STD
from dino_sparo.data.loader import to_device
from dino_sparo.dino.step import apply, compute, train_step
from dino_sparo.dino.train import DINOObjective
from dino_sparo.distillation.options import REFERENCE_BATCH
from dino_sparo.distillation.step import compute_gradients, crops_on_device, ema_update_
from dino_sparo.models.architectures import ARCHITECTURES
from dino_sparo.models.readout import Sparo
from dino_sparo.runtime.launch import Distributed
from dino_sparo.training.compile import CompileError, compile_failures_named, compile_networks
from dino_sparo.training.optim import clip_gradients_, cosine_schedule, gradient_norms
from dino_sparo.training.recording import WARM_UP_CALLS, Record, Recorder

EQUAL = 2e-5  # of a loss of about 10 nats, after some steps in fp32
CHECKED_STEPS = 3
# What a paper model of one H200 gives at batch 64, ms: every fusion that is possible, at the card's full rates.
FLOOR_BATCH, FLOOR_MS = 64, {"cls": 13.5, "sparo": 12.7}
COMPILED, REGIONS = "ours, {}, compiled", "ours, {}, compiled in regions"
RECORDED = "ours, {}, compiled and recorded"
STEPS = 10_000  # of the schedules; only the first few are taken
MIN_SECONDS = 0.5  # of steps one after the other, for one timing on a GPU


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and the batch of a step."""

    arch: str = "vit_small"
    patch_size: int = 16
    global_size: int = 224
    local_size: int = 96
    num_local: int = 8
    out_dim: int = 65536
    batch: int = 4


QUICK = Sizes("vit_micro", 8, 32, 16, 2, 61, 3)


@dataclass
class Stepper:
    """A way to take training steps, and to time their parts.

    Attributes:
        step: takes one; returns the loss, on the device.
        parts: the same in parts: name -> what to call, in order.
        halves: of our step: `compute`, which a GPU may record, and `apply`.
        networks: the student, then the teacher.
    """

    step: Callable[[], Tensor]
    parts: dict[str, Callable[[], Any]] = field(default_factory=dict)
    halves: dict[str, Callable[[], Any]] = field(default_factory=dict)
    networks: tuple[nn.Module, nn.Module] | None = None

    def recorded(self, recorder: Recorder, record: Record | None) -> "Stepper":
        """The same step, for which the recorder first gets this way to record; None: it calls the functions."""

        def bound(call: Callable[[], Any]) -> Callable[[], Any]:
            def called() -> Any:
                recorder.record = record
                return call()

            return called

        halves = {name: bound(call) for name, call in self.halves.items()}
        return Stepper(bound(self.step), self.parts, halves, self.networks)


def noise_batch(sizes: Sizes, seed: int) -> Batch:
    """Crops of noise, in main memory as a loader gives them."""
    generator = torch.Generator().manual_seed(seed)
    sides = [sizes.global_size] * 2 + [sizes.local_size] * sizes.num_local
    views = [torch.randn(sizes.batch, 3, side, side, generator=generator) for side in sides]
    return Batch(views, torch.full((sizes.batch,), -1), torch.arange(sizes.batch), [])


def deferred_batch(sizes: Sizes, seed: int) -> Batch:
    """8-bit crops of noise, and the parameters drawn for each crop, as a loader gives them for a GPU."""
    recipes = MultiCropAugmentation(
        local_crops_number=sizes.num_local, global_crops_size=sizes.global_size, local_crops_size=sizes.local_size
    ).recipes
    generator, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    views = [
        torch.randint(256, (sizes.batch, 3, recipe.size, recipe.size), generator=generator).byte() for recipe in recipes
    ]
    drawn = [[sample_crop(rng, 375, 500, recipe).packed() for _ in range(sizes.batch)] for recipe in recipes]
    number = torch.arange(sizes.batch)
    return Batch(views, torch.full_like(number, -1), number, [], torch.tensor(drawn))


def our_training(
    sizes: Sizes, readout: str, precision: str, device: str, drop_path_rate: float, cuda_graph: str = "off"
) -> DINOObjective:
    """The objective of main_dino.py."""
    words = {
        "arch": sizes.arch, "patch_size": sizes.patch_size, "global_crops_size": sizes.global_size,
        "local_crops_size": sizes.local_size, "local_crops_number": sizes.num_local, "out_dim": sizes.out_dim,
        "readout": readout, "precision": precision, "batch_size_per_gpu": sizes.batch,
        "drop_path_rate": drop_path_rate, "cuda_graph": cuda_graph, "epochs": 1, "warmup_epochs": 0,
        "freeze_last_layer": 0,
        "data_path": f"scenes:{STEPS * sizes.batch}:{sizes.global_size}", "num_workers": 0,
    }  # fmt: skip
    argv = [word for name, value in words.items() for word in (f"--{name}", str(value))]
    args = main_dino.get_args_parser().parse_args(argv)
    process = Distributed(rank=0, world_size=1, device=torch.device(device))
    training = DINOObjective(args, process)
    training.distort = Distortions(IMAGENET_MEAN, IMAGENET_STD).to(device)
    return training


def ours(training: DINOObjective, batch: Batch) -> Stepper:
    """Our step, whole and in parts."""
    found: dict[str, Any] = {}
    loader, weights = to_device(itertools.repeat(batch), training.updater.device), list(training.network.parameters())

    def crops() -> None:
        found["crops"] = crops_on_device(next(loader), training.distort, training.updater.device)

    def teacher() -> None:
        with training.updater.autocast(), torch.no_grad():
            found["teacher"] = training.teacher(found["crops"][:2])

    def student() -> None:
        training.updater.optimizer.zero_grad(set_to_none=True)
        with training.updater.autocast():
            # As the step calls it: otherwise the network would be compiled a second time.
            found["student"], _ = training.student(found["crops"], with_encodings=True)

    def loss() -> Tensor:
        found["loss"] = training.loss(found["student"], found["teacher"], 0, update_center=False)
        return found["loss"]

    def first_half() -> None:
        training.begin_step()
        call = partial(compute, training, 0)
        key = float(training.loss.teacher_temp_schedule[0])
        found["outputs"] = compute_gradients(training, call, [next(loader)], key)

    parts: dict[str, Callable[[], Any]] = {
        "crops": crops,
        "teacher forward": teacher,
        "student forward": student,
        "loss forward": loss,
        "backward": lambda: found["loss"].backward(),
        "clip": lambda: clip_gradients_(
            weights, training.clip_grad, gradient_norms(weights), training.updater.scale_gradients
        ),
        "optimizer": training.updater.optimizer.step,
        "moving average": lambda: ema_update_(training.teacher, training.network, 0.996),
    }
    halves = {"compute": first_half, "apply": lambda: apply(training, found["outputs"], 0, False)}
    networks = (training.network, training.teacher)
    return Stepper(lambda: train_step(training, [next(loader)], 0).loss, parts, halves, networks)


def compile_failure(training: DINOObjective, stepper: Stepper, in_regions: bool = False) -> str:
    """Compile the networks in a first step; the compiler's reason if that fails here, else empty."""
    compile_networks(training, in_regions)
    try:
        with compile_failures_named():
            stepper.step()
    except CompileError as error:
        return str(error)
    return ""


class ListedEncoder(nn.Module):
    """The reference's ViT without its last block, and SPARO as in the paper's listing, which computes all keys."""

    def __init__(self, vit: Any, sparo: Sparo) -> None:
        super().__init__()
        self.vit, self.readout = vit, ListedSparo(sparo)
        self.fc = self.head = nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        """Images -> encodings (B, L*V)."""
        vit: Any = self.vit
        tokens = vit.prepare_tokens(images)
        for block in vit.blocks:
            tokens = block(tokens)
        return self.readout(vit.norm(tokens)).flatten(1)


def reference_networks(reference: Reference, sizes: Sizes, readout: str, rate: float) -> tuple[nn.Module, nn.Module]:
    """The reference's student and teacher, multi-crop wrapper and head included."""
    size = ARCHITECTURES[sizes.arch]
    networks = []
    for drop_path_rate in (rate, 0.0):
        vit = reference.vision_transformer.VisionTransformer(
            img_size=[sizes.global_size], patch_size=sizes.patch_size, embed_dim=size.embed_dim,
            depth=size.depth - (readout == "sparo"), num_heads=size.num_heads, mlp_ratio=4, qkv_bias=True,
            norm_layer=partial(nn.LayerNorm, eps=1e-6), drop_path_rate=drop_path_rate,
        )  # fmt: skip
        sparo = Sparo(size.embed_dim, 64, 64, 64)
        encoder = ListedEncoder(vit, sparo) if readout == "sparo" else vit
        width = 64 * 64 if readout == "sparo" else size.embed_dim
        head = reference.vision_transformer.DINOHead(width, sizes.out_dim, norm_last_layer=True)
        networks.append(reference.utils.MultiCropWrapper(encoder, head))
    return networks[0], networks[1]


def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Our weights under the reference's names."""
    weights = {}
    names = target.state_dict().keys()
    for name, value in source.state_dict().items():
        listed = name.replace("backbone.", "backbone.vit.") if name not in names else name
        weights[listed.replace("readout.", "backbone.readout.sparo.") if listed not in names else listed] = value
    target.load_state_dict(weights)


def reference_stepper(
    reference: Reference, networks: tuple[nn.Module, nn.Module], sizes: Sizes, batch: Batch, device: str
) -> Stepper:
    """The reference's step, whole and in parts; fp16 with its scaler on a GPU, fp32 on a CPU."""
    student = DistributedDataParallel(networks[0].to(device).train(), [device] if device != "cpu" else None)
    teacher = networks[1].to(device).train()
    teacher.requires_grad_(False)
    criterion = reference.main_dino.DINOLoss(sizes.out_dim, sizes.num_local + 2, 0.04, 0.04, 0, 1).to(device)
    optimizer = torch.optim.AdamW(reference.utils.get_params_groups(student))
    scaler = torch.amp.GradScaler("cuda") if device != "cpu" else None
    schedules, momenta = default_schedules(sizes)
    found: dict[str, Any] = {"step": 0}

    def crops() -> None:
        for index, group in enumerate(optimizer.param_groups):
            group.update({name: values[found["step"]] for name, values in schedules[index].items()})
        found["crops"] = [view.to(device, non_blocking=True) for view in batch.views]

    def teacher_forward() -> None:
        with torch.autocast(device, torch.float16, enabled=scaler is not None):
            found["teacher"] = teacher(found["crops"][:2])

    def student_forward() -> None:
        with torch.autocast(device, torch.float16, enabled=scaler is not None):
            found["student"] = student(found["crops"])

    def loss() -> None:
        with torch.autocast(device, torch.float16, enabled=scaler is not None):
            found["loss"] = criterion(found["student"], found["teacher"], 0)
        found["loss"].item()

    def backward() -> None:
        optimizer.zero_grad()
        (found["loss"] if scaler is None else scaler.scale(found["loss"])).backward()

    def clip() -> None:
        if scaler is not None:
            scaler.unscale_(optimizer)
        reference.utils.clip_gradients(student, 3.0)

    def update() -> None:
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()

    @torch.no_grad()
    def average() -> None:
        momentum = momenta[found["step"]]
        for ours, theirs in zip(student.module.parameters(), teacher.parameters(), strict=True):
            theirs.data.mul_(momentum).add_((1 - momentum) * ours.detach().data)
        synchronize(device)
        found["step"] += 1

    parts = {
        "crops": crops, "teacher forward": teacher_forward, "student forward": student_forward, "loss forward": loss,
        "backward": backward, "clip": clip, "optimizer": update, "moving average": average,
    }  # fmt: skip
    parts = {name: with_cudnn_benchmark(part) for name, part in parts.items()}

    def step() -> Tensor:
        for part in parts.values():
            part()
        return found["loss"].detach()

    return Stepper(step, parts, networks=(student.module, teacher))


def default_schedules(sizes: Sizes) -> tuple[list[dict[str, np.ndarray]], np.ndarray]:
    """Learning rate and weight decay of both groups of parameters, and the momentum, as in `main_dino.py`."""
    args = main_dino.get_args_parser().parse_args([])
    lr = cosine_schedule(args.lr * sizes.batch / REFERENCE_BATCH, args.min_lr, STEPS)
    weight_decay = cosine_schedule(args.weight_decay, args.weight_decay_end, STEPS)
    momenta = cosine_schedule(args.momentum_teacher, 1.0, STEPS)
    return [{"lr": lr, "weight_decay": weight_decay}, {"lr": lr}], momenta


@contextlib.contextmanager
def process_group(device: str) -> Iterator[None]:
    """One process, for the reference's DDP and loss, which need a group."""
    store = dist.HashStore()
    dist.init_process_group("gloo" if device == "cpu" else "nccl", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def check_equality(section: Section, reference: Reference | None, sizes: Sizes, device: str) -> None:
    """Losses and teachers after a few steps in fp32, without stochastic depth; SPARO's against the listing."""
    for readout in ("cls", "sparo"):
        stepper = ours(our_training(sizes, readout, "fp32", device, 0.0), noise_batch(sizes, 1))
        for name in ("crops", "teacher forward", "student forward", "loss forward"):
            stepper.parts[name]()
        in_parts = stepper.parts["loss forward"]()
        section.check(f"{readout}: our loss, in parts and whole", in_parts.detach(), stepper.step(), 10 * EQUAL)
    if reference is None or device != "cpu":
        return
    for readout in ("cls", "sparo"):
        torch.manual_seed(0)
        training, batch = our_training(sizes, readout, "fp32", device, 0.0), noise_batch(sizes, 1)
        networks = reference_networks(reference, sizes, readout, 0.0)
        for source, target in zip((training.network, training.teacher), networks, strict=True):
            copy_weights(source, target)
        with process_group(device):
            theirs = reference_stepper(reference, networks, sizes, batch, device)
            steppers = ours(training, batch), theirs
            losses = [torch.stack([stepper.step() for _ in range(CHECKED_STEPS)]) for stepper in steppers]
        section.check(f"{readout}: losses of {CHECKED_STEPS} steps", losses[0], losses[1], EQUAL)
        teachers = [stepper.networks[1] for stepper in steppers if stepper.networks]
        summed = [torch.stack([p.double().sum() for p in network.parameters()]).sum() for network in teachers]
        section.check(f"{readout}: sum of the teacher's weights after them", summed[0], summed[1], 1e-2)


def measure(args: argparse.Namespace, reference: Reference | None) -> Section:
    """Equality, then the steps in turns, then their parts."""
    sizes = QUICK if args.quick else Sizes(batch=args.batch or (64 if args.device != "cpu" else 4))
    section = Section(
        "Training step",
        f"{sizes.arch}/{sizes.patch_size}, batch {sizes.batch}, 2x{sizes.global_size} + {sizes.num_local}x"
        f"{sizes.local_size} px, {sizes.out_dim} prototypes, on {args.device}; {args.rounds} rounds, "
        "median (quartiles).",
    )
    check_equality(section, reference, QUICK, args.device)
    timed: dict[str, Timings] = {}
    steps = forms(args, measured_precisions(section, args.device))
    for readout in args.readouts:
        timed[readout] = _measure_readout(section, reference, sizes, readout, args, steps)
    _add_bars(section, timed, args)
    return section


def _measure_readout(
    section: Section,
    reference: Reference | None,
    sizes: Sizes,
    readout: str,
    args: argparse.Namespace,
    steps: Sequence["Form"],
) -> Timings:
    """Times of all forms of one read-out; adds its tables."""
    finished = on_host(noise_batch(sizes, 1), args.device)
    batch = finished if args.device == "cpu" else on_host(deferred_batch(sizes, 1), args.device)
    steppers: dict[str, Stepper] = {}
    rows, part_rows, half_rows = [], [], []
    with process_group(args.device) if reference is not None else contextlib.nullcontext():
        if reference is not None:
            networks = reference_networks(reference, sizes, readout, 0.1)
            steppers["reference"] = reference_stepper(reference, networks, sizes, finished, args.device)
        for name, precision, compiles in steps:
            cuda_graph = "on" if compiles and args.device != "cpu" else "off"
            training = our_training(sizes, readout, precision, args.device, 0.1, cuda_graph)
            stepper = ours(training, batch)
            if not compiles:
                steppers[name] = stepper
                continue
            if reason := compile_failure(training, stepper, compiles == "regions"):
                section.notes.append(f"{readout}, {name}: left out. {reason}")
                continue
            # One network, compiled once, is timed in both forms.
            steppers[name] = stepper.recorded(training.recorder, None)
            if record := training.recorder.record:
                steppers[f"{name} and recorded"] = recorded = stepper.recorded(training.recorder, record)
                for _ in range(WARM_UP_CALLS + 1):  # the last call records
                    recorded.step()
        # On a GPU steps follow each other as in training: nothing waits for a single one.
        min_seconds = 0.0 if args.device == "cpu" or args.quick else MIN_SECONDS
        timings = interleave({name: s.step for name, s in steppers.items()}, args.rounds, min_seconds, args.device)
        first = next(iter(steppers))
        for name, stepper in steppers.items():
            time_of = timings.time(name)
            row = {
                "form": name, "ms": time_of.scaled(1e3), "images/s": sizes.batch / time_of.median,
                f"times faster than {first}": timings.ratio(first, name),
            }  # fmt: skip
            if args.device != "cpu":
                row["times the paper model's floor"] = (
                    time_of.median * 1e3 / (FLOOR_MS[readout] * sizes.batch / FLOOR_BATCH)
                )
            rows.append(row)
            if "recorded" not in name:  # its parts do not exist apart
                part_rows.append({"form": name, **_time_parts(stepper.parts, args.rounds, args.device)})
            if stepper.halves:
                half_rows.append({"form": name, **_time_parts(stepper.halves, args.rounds, args.device)})
    section.tables[f"{readout}: a step"] = rows
    section.tables[f"{readout}: its parts, ms, each waited for"] = part_rows
    section.tables[f"{readout}: compute and apply, ms, each waited for"] = half_rows
    training = our_training(sizes, readout, "fp32", args.device, 0.1)
    with _memory_of_step(training) as memory:
        train_step(training, [batch], 0)
    section.tables[f"{readout}: memory of our step in fp32, MiB"] = [
        {part: size / 2**20 for part, size in memory.items()}
    ]
    return timings


@contextlib.contextmanager
def _memory_of_step(training: DINOObjective) -> Iterator[dict[str, int]]:
    """Measure the step within this context; yields its parts, bytes by name, filled in at the end.

    Activations are the tensors that the forward passes of one micro-batch keep for the backward pass.
    """
    updater = training.updater
    weights = {parameter.untyped_storage().data_ptr() for parameter in updater.parameters}
    sizes_of: dict[int, int] = {}  # address of a storage -> its bytes
    parts: dict[str, int] = {}
    activations = 0

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes_of[storage.data_ptr()] = storage.nbytes()
        return tensor

    def release(tensor: Tensor) -> Tensor:
        nonlocal activations
        activations = max(activations, sum(sizes_of.values()))
        sizes_of.clear()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, release):
        yield parts
    parts |= {
        name: sum(t.nbytes for t in (*network.parameters(), *network.buffers()))
        for name, network in training.networks.items()
    }
    parts["gradients"] = sum(parameter.nbytes for parameter in updater.parameters if parameter.requires_grad)
    states = (value for state in updater.optimizer.state.values() for value in state.values())
    parts["optimizer"] = sum(value.nbytes for value in states if isinstance(value, Tensor))
    parts["activations"] = activations
    parts["sum"] = sum(parts.values())


class Form(NamedTuple):
    """A form of our step; `compiles` is on, regions or empty."""

    name: str
    precision: str
    compiles: str = ""


def forms(args: argparse.Namespace, precisions: Sequence[str]) -> list[Form]:
    """Precisions, and compiled; on a GPU the compiled form is recorded too."""
    all_forms = [Form(f"ours, {precision}", precision) for precision in precisions]
    if not (args.quick or args.no_compile) and (args.full or args.device != "cpu"):
        all_forms.append(Form(COMPILED.format(precisions[-1]), precisions[-1], compiles="on"))
        all_forms.append(Form(REGIONS.format(precisions[-1]), precisions[-1], compiles="regions"))
    return all_forms


def _time_parts(parts: Mapping[str, Callable[[], Any]], rounds: int, device: str) -> dict[str, float]:
    """Medians, ms."""
    times: dict[str, list[float]] = {name: [] for name in parts}
    with alone():
        for _ in range(rounds):
            for name, part in parts.items():
                synchronize(device)
                begin = time.perf_counter()
                part()
                synchronize(device)
                times[name].append(time.perf_counter() - begin)
    return {name: 1e3 * Spread.of(values).median for name, values in times.items()}


def _add_bars(section: Section, timed: dict[str, Timings], args: argparse.Namespace) -> None:
    """Add the goals of a step; a quick run has no numbers to compare with them."""
    eager, compiled, recorded = "ours, bf16", COMPILED.format("bf16"), RECORDED.format("bf16")

    def ratio(readout: str, slow: str, fast: str) -> float | None:
        timings = timed.get(readout)
        is_measured = not args.quick and timings is not None and {slow, fast} <= timings.seconds.keys()
        return timings.ratio(slow, fast).median if is_measured and timings is not None else None

    def seconds(readout: str) -> float | None:
        times = timed[readout].seconds.get(recorded) if readout in timed else None
        return Spread.of(times).median if times and not args.quick else None

    if args.device == "cpu":
        bars = [
            ("vanilla DINO on a CPU, fp32, times faster than the reference", 1.2, ("cls", "reference", "ours, fp32")),
            (
                "vanilla DINO on a CPU, bf16 and compiled, times faster than the reference in fp32",
                3.0,
                ("cls", "reference", compiled),
            ),
        ]
        section.bars += [Bar(claim, wanted, ratio(*between)) for claim, wanted, between in bars]
        return
    for readout in ("cls", "sparo"):
        claim = f"{readout}, recorded, times the images/s of the reference in its fp16, equal batches"
        section.bars.append(Bar(claim, 3.5, ratio(readout, "reference", recorded)))
        claim = f"{readout}, recorded, times faster than compiled"
        section.bars.append(Bar(claim, 1.5, ratio(readout, compiled, recorded)))
    section.bars.append(Bar("cls, bf16, compiled, times faster than eager", 1.3, ratio("cls", eager, compiled)))
    with_sparo, without = seconds("sparo"), seconds("cls")
    batch = args.batch or FLOOR_BATCH
    if batch == FLOOR_BATCH:
        rate = batch / with_sparo if with_sparo else None
        section.bars.append(Bar(f"sparo, recorded, images/s at batch {batch}", 1850, rate))
    share = with_sparo / without if with_sparo and without else None
    claim = "time of a recorded step of DINO + SPARO over vanilla DINO's"
    section.bars.append(Bar(claim, 1.05, share, at_most=True))


def get_args_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = options("A training step, ours and the reference's.")
    parser.add_argument("--batch", type=int, default=None, help="Images per step; by default 4 on a CPU, 64 on a GPU.")
    parser.add_argument("--rounds", type=int, default=3, help="How often every form is timed.")
    parser.add_argument("--readouts", nargs="+", default=["cls", "sparo"], choices=["cls", "sparo"], help="Which.")
    parser.add_argument(
        "--no_compile",
        action="store_true",
        help="Leave out the compiled forms, which take minutes; on a CPU only --full has compiled forms.",
    )
    return parser


def main(argv: list[str] | None = None) -> Section:
    """Parse the options, measure, print."""
    return run(measure, get_args_parser(), argv)


if __name__ == "__main__":
    main()
