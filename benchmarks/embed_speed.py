"""Images per second of `dino-sparo embed`, compared with lightly-train's `embed` and with decoding and forward alone.

    python -m venv lightly && lightly/bin/pip install 'lightly-train==0.18.*'
    python -m benchmarks.embed_speed --lightly_python lightly/bin/python            # 512 built-in pictures as JPEG
    python -m benchmarks.embed_speed --data_path photographs --rounds 5

All embed the same images with an untrained ViT-S/16 at 224 pixels in fp32, in turns, each time in a new process. The
clock runs from the call to the last byte on disk; imports are not counted. The views differ: lightly-train squeezes an
image to a square with OpenCV; ours are resized with Pillow, or with torch (`fast_views`), and cut as for k-NN. `alone`
decodes, cuts and encodes as ours does, and writes nothing.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dino_sparo.runtime.cli import Parser

ROOT = Path(__file__).resolve().parents[1]
SIZE = (500, 375)  # of the built-in pictures, about ImageNet's


def write_images(folder: Path, number: int) -> None:
    """Built-in scenes as JPEG files."""
    from PIL import Image

    from dino_sparo.data.scenes.images import Scenes

    folder.mkdir()
    scenes = Scenes(number, image_size=128)
    for index in range(number):
        scenes.read(index).resize(SIZE, Image.Resampling.BICUBIC).save(folder / f"{index:06}.jpg", quality=90)


def write_checkpoint(path: Path) -> None:
    """An untrained ViT-S/16 with a class token."""
    import torch

    from dino_sparo.models.encoder import create_encoder
    from dino_sparo.weights.entries import encoder_description

    encoder = create_encoder("vit_small", 16, "cls")
    description = encoder_description(encoder.config, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    torch.save({"teacher": encoder.state_dict(), "encoder": description}, path)


def prepare_ours(args: argparse.Namespace, out: Path, *more: str) -> Callable[[], Any]:
    """`dino-sparo embed`."""
    from dino_sparo.commands import COMMANDS
    from dino_sparo.evaluation.embed.command import embed_images

    parser = COMMANDS["embed"].parser
    assert parser is not None
    words = ["--pretrained_weights", args.checkpoint, "--data_path", args.data_path, "--split", "all", *more]
    words += ["--batch_size_per_gpu", str(args.batch_size), "--num_workers", str(args.num_workers)]
    options = parser().parse_args([*words, "--output_dir", str(out), "--device", args.device])
    return lambda: embed_images(options)


def prepare_alone(args: argparse.Namespace, out: Path) -> Callable[[], Any]:
    """Decoding, cutting and encoding, without the rest of `dino-sparo embed`."""
    import torch

    from dino_sparo.data.shares import share_loader
    from dino_sparo.data.sources import open_source
    from dino_sparo.data.views import EvalTransform
    from dino_sparo.evaluation.features import inference
    from dino_sparo.weights.encoder import load_encoder

    def alone() -> None:
        encoder, device = load_encoder(args.checkpoint).to(args.device), torch.device(args.device)
        view = EvalTransform(224, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
        loader = share_loader(open_source(args.data_path, "all"), view, device, args.batch_size, args.num_workers)
        with inference(encoder, device, torch.float32):
            for batch in loader:
                encoder(batch.views[0].to(device, non_blocking=True)).cpu()

    return alone


def prepare_lightly(args: argparse.Namespace, out: Path) -> Callable[[], Any]:
    """lightly-train's `embed`, of timm's ViT-S/16; nothing else of this file is imported in its environment."""
    os.environ["LIGHTLY_TRAIN_EVENTS_DISABLED"] = "1"
    import lightly_train
    from lightly_train._checkpoint import Checkpoint, CheckpointLightlyTrain, CheckpointLightlyTrainModels
    from lightly_train._models import package_helpers
    from lightly_train._models.embedding_model import EmbeddingModel
    from lightly_train._transforms.transform import NormalizeArgs

    wrapped = package_helpers.get_wrapped_model(
        "timm/vit_small_patch16_224", num_input_channels=3, model_args={"pretrained": False}, load_weights=False
    )
    models = CheckpointLightlyTrainModels(wrapped.get_model(), wrapped, EmbeddingModel(wrapped))
    path = out.with_suffix(".ckpt")
    Checkpoint({}, CheckpointLightlyTrain.from_now(models, NormalizeArgs())).save(path)
    return lambda: lightly_train.embed(
        out=out.with_suffix(".pt"),
        data=args.data_path,
        checkpoint=path,
        image_size=224,
        batch_size=args.batch_size,
        num_workers=args.num_workers,
        accelerator="gpu" if args.device.startswith("cuda") else "cpu",
    )


PARTS: dict[str, Callable[[argparse.Namespace, Path], Callable[[], Any]]] = {
    "ours": prepare_ours,
    "ours, fast_views": lambda args, out: prepare_ours(args, out, "--fast_views"),
    "alone": prepare_alone,
    "lightly-train": prepare_lightly,
}


def seconds_of(part: str, args: argparse.Namespace, out: Path) -> float:
    """Seconds that a part takes, in a separate process."""
    is_lightly = part == "lightly-train"
    python = [args.lightly_python, __file__] if is_lightly else [sys.executable, "-m", "benchmarks.embed_speed"]
    options = {**vars(args), "part": part, "out": str(out)}
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # the other Python does not have this package
    process = subprocess.run(
        [*python, "--part", json.dumps(options)], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    if process.returncode:
        raise RuntimeError(f"{part} failed:\n{process.stderr[-3000:]}")
    return float(process.stdout.strip().splitlines()[-1])


def run_part(words: str) -> None:
    """Run a part in the process that `seconds_of` started."""
    args = argparse.Namespace(**json.loads(words))
    call = PARTS[args.part](args, Path(args.out))
    begin = time.perf_counter()
    call()
    print(time.perf_counter() - begin)


def get_args_parser() -> Parser:
    """The options."""
    parser = Parser(description=__doc__)
    parser.add_argument("--data_path", default=None, help="Folder of images; by default built-in pictures.")
    parser.add_argument("--num_images", type=int, default=512, help="Number of built-in pictures.")
    parser.add_argument("--lightly_python", default=None, help="Python with lightly-train; without it ours alone.")
    parser.add_argument("--rounds", type=int, default=5, help="Timings of each.")
    parser.add_argument("--batch_size", type=int, default=64, help="Images per batch.")
    parser.add_argument("--num_workers", type=int, default=2, help="Processes that load images.")
    parser.add_argument("--device", default="cpu", help="cpu or cuda.")
    return parser


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure in turns; print images per second, ratios and the overhead, medians of the rounds."""
    from benchmarks.timing import Spread, Timings, hardware

    args = get_args_parser().parse_args(argv)
    parts = [part for part in PARTS if part != "lightly-train" or args.lightly_python]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.data_path is None:
            args.data_path = str(folder / "images")
            write_images(folder / "images", args.num_images)
        args.data_path, args.checkpoint = str(Path(args.data_path).resolve()), str(folder / "vits16.pth")
        write_checkpoint(Path(args.checkpoint))
        seconds: dict[str, list[float]] = {part: [] for part in parts}
        for number in range(args.rounds):
            for position, part in enumerate(parts):
                seconds[part].append(seconds_of(part, args, folder / f"out-{number}-{position}"))
                print(f"round {number + 1}: {part} {seconds[part][-1]:.2f} s", file=sys.stderr, flush=True)
        num_images = sum(path.is_file() for path in Path(args.data_path).rglob("*"))
    timings = Timings(seconds)
    report: dict[str, Any] = {"hardware": hardware(), "num_images": num_images, "seconds": seconds}
    report["images_per_s"] = {part: num_images / Spread.of(values).median for part, values in seconds.items()}
    report["overhead_percent"] = 100 * (timings.ratio("ours", "alone").median - 1)
    if args.lightly_python:
        names = ("ours", "ours, fast_views")
        report["times_lightly_train"] = {name: timings.ratio("lightly-train", name).median for name in names}
    print(json.dumps(report, indent=2))
    return report


if __name__ == "__main__":
    if sys.argv[1:2] == ["--part"]:
        run_part(sys.argv[2])
    else:
        main()
