"""Time that a run on many tar shards takes to start, for the first and for the second time.

    python -m benchmarks.start                                            # 400,000 synthetic pairs in 40 shards
    python -m benchmarks.start --shards 4 --pairs_per_shard 1000 --processes 1

Every start is that of CLIP's training up to its first batch: processes that join a group with a short time-out share
the indexing, and open the same pairs. The images are a few bytes and no images, since a start reads headers alone; so
the time per pair is that of a local disk, or of the memory in which the disk's content lies.
"""

import io
import json
import multiprocessing
import os
import sys
import tarfile
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks.timing import hardware
from dino_sparo.runtime.cli import Parser


def write_shards(folder: Path, num_shards: int, pairs_per_shard: int) -> None:
    """Shards of pairs in webdataset's form, with an image, a caption and a JSON each."""
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(num_shards):
        with tarfile.open(folder / f"{shard:05}.tar", "w", format=tarfile.GNU_FORMAT) as tar:
            for pair in range(pairs_per_shard):
                for ending, content in (("jpg", b"no image"), ("txt", b"a caption"), ("json", b"{}")):
                    info = tarfile.TarInfo(f"{shard:05}{pair:06}.{ending}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
        os.utime(folder / f"{shard:05}.tar", (1e9, 1e9))  # shards that have just been written are not cached


def private_memory() -> int:
    """Bytes of memory that only this process uses; Linux."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon"))


def start(number: int, count: int, folder: str, timeout_min: float) -> tuple[int, float, int, float]:
    """One process of a start: its number, seconds, pairs, and bytes of its private memory per pair."""
    from dino_sparo.data.ranks import opened_together
    from dino_sparo.image_text.pairs.sources import PairPath
    from dino_sparo.runtime.collectives import barrier
    from dino_sparo.runtime.launch import init_distributed, shutdown

    os.environ.update(RANK=str(number), WORLD_SIZE=str(count), LOCAL_RANK=str(number))
    init_distributed("cpu", f"file://{folder}/rendezvous", timeout_min)
    barrier()
    before, begin = private_memory(), time.perf_counter()
    pairs = PairPath(folder)
    with opened_together(pairs.kind, folder):
        source = pairs.open()
    report = number, time.perf_counter() - begin, len(source), (private_memory() - before) / len(source)
    barrier()
    shutdown()
    return report


def run_start(folder: Path, processes: int, timeout_min: float) -> list[tuple]:
    """Start this number of processes; returns their reports, by rank."""
    (folder / "rendezvous").unlink(missing_ok=True)
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as peers:
        reports = [peers.submit(start, number, processes, str(folder), timeout_min) for number in range(processes)]
        return [report.result() for report in reports]


def get_args_parser() -> Parser:
    """The options."""
    parser = Parser(description=__doc__)
    parser.add_argument("--shards", type=int, default=40, help="Number of tar shards.")
    parser.add_argument("--pairs_per_shard", type=int, default=10_000, help="Pairs in each.")
    parser.add_argument("--processes", type=int, default=2, help="Processes that share the indexing.")
    parser.add_argument("--timeout_min", type=float, default=1.0, help="Time-out of their collectives, minutes.")
    parser.add_argument("--folder", type=Path, default=None, help="Where the shards are kept for another measurement.")
    return parser


def main(argv: list[str] | None = None) -> dict[str, object]:
    """Measure the first and the second start, print a JSON object."""
    args = get_args_parser().parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary) / "shards"
        if not list(folder.glob("*.tar")):
            write_shards(folder, args.shards, args.pairs_per_shard)
        os.environ["DINO_SPARO_CACHE"] = str(Path(temporary) / "cache")
        starts = []
        for which in ("first", "second"):
            starts.append(run_start(folder, args.processes, args.timeout_min))
            seconds = max(seconds for _, seconds, _, _ in starts[-1])
            print(f"{which} start: {seconds:.3g} s", file=sys.stderr, flush=True)
        first, second = starts
        cached = sum(path.stat().st_size for path in (Path(temporary) / "cache").iterdir())
    pairs = first[0][2]
    report: dict[str, object] = {
        "pairs": pairs,
        "shards": args.shards,
        "processes": args.processes,
        "timeout_min": args.timeout_min,
        "first_start_s": round(max(seconds for _, seconds, _, _ in first), 2),
        "first_start_s_per_million": round(max(seconds for _, seconds, _, _ in first) / pairs * 1e6, 1),
        "second_start_s": round(max(seconds for _, seconds, _, _ in second), 3),
        "own_bytes_per_pair_and_process": round(max(memory for *_, memory in second), 2),
        "cache_bytes_per_pair": round(cached / pairs, 2),
        "hardware": hardware(),
    }
    sys.stdout.write(json.dumps(report, indent=2, default=str) + "\n")
    return report


if __name__ == "__main__":
    main()
