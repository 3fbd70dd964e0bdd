"""Linear probes on given features, and the views from which features are computed, against the reference's.

    python -m benchmarks.linear --reference dino --data_path imagenet/val

The reference trains one classifier for one learning rate and runs the encoder again in every epoch; ours trains all
learning rates side by side, on the fly or on features that were extracted once. Compared here is the classifier alone,
on features that both are given, and the preparation of images, the other part that both have.
"""

import argparse
import io
import tempfile
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision import transforms

from benchmarks.input_pipeline import write_images
from benchmarks.reference import Reference
from benchmarks.report import Bar, Check, Section, options, run
from benchmarks.timing import interleave
from dino_sparo.data.defaults import IMAGENET_MEAN, IMAGENET_STD
from dino_sparo.data.sources import IMAGE_EXTENSIONS, decode_image
from dino_sparo.data.views import EvalTransform
from dino_sparo.evaluation.linear.probe import MOMENTUM, LinearProbe, ProbeSGD, probe_accuracy, train_one_epoch

# Bars.
VIEW = 2.0
LEVELS = 255
# A view by torch's resize: most pixels are the same, some a level off.
MEAN_LEVELS_OFF, LEVELS_OFF = 0.05, 4.0


class Sizes(NamedTuple):
    """A probe's training: steps of a batch, and images to test."""

    dim: int
    classes: int = 1000
    batch: int = 256
    steps: int = 40
    test: int = 5_000
    rates: tuple[float, ...] = (0.003, 0.01, 0.03, 0.1, 0.3)


def features(sizes: Sizes, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training features (steps, B, F) and labels (steps, B), test features and labels, around class centers."""
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(sizes.classes, sizes.dim, generator=generator)
    labels = [
        torch.randint(sizes.classes, shape, generator=generator)
        for shape in ((sizes.steps, sizes.batch), (sizes.test,))
    ]
    made = [centers[which] + 2 * torch.randn(*which.shape, sizes.dim, generator=generator) for which in labels]
    return made[0].to(device), labels[0].to(device), made[1].to(device), labels[1].to(device)


def classifier(sizes: Sizes, device: str, reference: Reference | None) -> nn.Module:
    """The reference's classifier, or without a checkout torch's linear layer that it consists of."""
    if reference is not None:
        return reference.eval_linear.LinearClassifier(sizes.dim, sizes.classes).to(device)
    return nn.Linear(sizes.dim, sizes.classes).to(device)


def train_one_by_one(layer: nn.Module, rate: float, batches: Iterator[tuple[Tensor, Tensor]]) -> float:
    """The reference's loop over batches, `train` of its eval_linear.py, with torch's SGD."""
    optimizer = torch.optim.SGD(layer.parameters(), rate, momentum=MOMENTUM, weight_decay=0)
    last = 0.0
    for inputs, labels in batches:
        loss = nn.functional.cross_entropy(layer(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        last = loss.item()  # as its loop reads it, in every step
    return last


def check_probe(section: Section, sizes: Sizes, device: str, reference: Reference | None) -> None:
    """Weights and accuracy after some steps, of probes side by side and of one classifier for each rate."""
    inputs, labels, test, test_labels = features(sizes, device)
    probe = LinearProbe(sizes.dim, sizes.classes, len(sizes.rates)).to(device)
    start = probe.weight.detach().clone()
    train_one_epoch(probe, ProbeSGD(probe, sizes.rates), zip(inputs, labels, strict=True), repeat(1.0))
    accuracies = probe_accuracy(probe, test, test_labels)
    for number, rate in enumerate(sizes.rates):
        layer = classifier(sizes, device, reference)
        weight, bias = layer.parameters()
        with torch.no_grad():
            weight.copy_(start[number])
            bias.zero_()
        train_one_by_one(layer, rate, zip(inputs, labels, strict=True))
        section.check(
            f"weights after {sizes.steps} steps, lr {rate}, over their largest",
            probe.weight[number].detach() / weight.detach().abs().max(),
            weight.detach() / weight.detach().abs().max(),
            1e-4,
        )
        with torch.no_grad():
            right = 100 * (layer(test).argmax(dim=1) == test_labels).double().mean()
        section.check(f"top-1 %, lr {rate}", torch.tensor(accuracies[number]["top1"]).double(), right.cpu(), 0.1)


def time_probe(sizes: Sizes, device: str, rounds: int, reference: Reference | None) -> list[dict[str, Any]]:
    """Milliseconds per step for one learning rate and for all."""
    inputs, labels, _, _ = features(sizes, device)

    def one_by_one(rates: tuple[float, ...]) -> None:
        for rate in rates:
            train_one_by_one(classifier(sizes, device, reference), rate, zip(inputs, labels, strict=True))

    def side_by_side(rates: tuple[float, ...]) -> None:
        probe = LinearProbe(sizes.dim, sizes.classes, len(rates)).to(device)
        train_one_epoch(probe, ProbeSGD(probe, rates), zip(inputs, labels, strict=True), repeat(1.0))

    rows = []
    for rates in (sizes.rates[:1], sizes.rates):
        variants: dict[str, Callable[[], None]] = {
            "one by one": lambda rates=rates: one_by_one(rates),  # type: ignore[misc]
            "side by side": lambda rates=rates: side_by_side(rates),  # type: ignore[misc]
        }
        timings = interleave(variants, rounds, 0.0, device)
        rows.append({
            "numbers": sizes.dim,
            "learning rates": len(rates),
            **{f"{name}, ms per step": timings.time(name).scaled(1e3 / sizes.steps) for name in variants},
            "times faster": timings.ratio("one by one", "side by side"),
        })  # fmt: skip
    return rows


def jpegs(folder: str | None, number: int) -> list[bytes]:
    """Image files: from a folder, or built-in scenes."""
    with tempfile.TemporaryDirectory() as made:
        if folder is None:
            write_images(Path(made), number)
        paths = [path for path in Path(folder or made).rglob("*") if path.suffix.lower() in IMAGE_EXTENSIONS]
        if not paths:
            raise ValueError(f"--data_path {folder} holds no images; give a folder with some, or leave the option out")
        return [path.read_bytes() for path in sorted(paths)[:: max(1, len(paths) // number)]]


def reference_view(transform: Callable[[Image.Image], Tensor], data: bytes) -> Tensor:
    """Load as torchvision's ImageFolder does, then transform."""
    return transform(Image.open(io.BytesIO(data)).convert("RGB"))


def reference_transform() -> Callable[[Image.Image], Tensor]:
    """The reference's transform of an image for evaluation, written with torchvision as there."""
    return transforms.Compose([
        transforms.Resize(256, interpolation=transforms.InterpolationMode.BICUBIC),
        transforms.CenterCrop(224),
        transforms.ToTensor(),
        transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD),
    ])  # fmt: skip


def measure_views(section: Section, args: argparse.Namespace, rounds: int) -> None:
    """Equality and milliseconds per image of the views, in one thread as in a loader's worker."""
    files, transform = jpegs(args.data_path, 2 if args.quick else args.images), reference_transform()
    forms = {"exact": EvalTransform(), "fast": EvalTransform(exact=False)}

    def view(name: str, data: bytes) -> Tensor:
        return forms[name](decode_image(data, "benchmark"))[0]

    wanted = [reference_view(transform, data) for data in files]
    scale = LEVELS * torch.tensor(IMAGENET_STD)[:, None, None]
    for name, mean_limit, limit in (("exact", 1e-4, 1e-4), ("fast", MEAN_LEVELS_OFF, LEVELS_OFF)):
        off = torch.stack(
            [(view(name, data) - other).mul(scale).abs() for data, other in zip(files, wanted, strict=True)]
        )
        section.checks += [
            Check(f"{name} view, mean difference in levels", float(off.mean()), mean_limit),
            Check(f"{name} view, largest difference in levels", float(off.max()), limit),
        ]
    variants = {
        "reference": lambda: [reference_view(transform, data) for data in files],
        **{name: lambda name=name: [view(name, data) for data in files] for name in forms},  # type: ignore[misc]
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        timings = interleave(variants, rounds, 0.0)
    finally:
        torch.set_num_threads(threads)
    sizes = np.mean([Image.open(io.BytesIO(data)).size for data in files], axis=0)
    section.tables[f"Views of {len(files)} images, mean {sizes[0]:.0f}x{sizes[1]:.0f} px, one thread"] = [
        {"": name, "ms per image": timings.time(name).scaled(1e3 / len(files)),
         "times faster": timings.ratio("reference", name)}
        for name in variants
    ]  # fmt: skip
    fast = None if args.quick else timings.ratio("reference", "fast").median
    section.bars.append(Bar("times faster, fast view against the reference's", VIEW, fast))


def measure(args: argparse.Namespace, reference: Reference | None) -> Section:
    """Equality, then the probes, then the views."""
    rounds = 1 if args.quick else args.rounds
    small = Sizes(13, classes=7, batch=5, steps=3, test=11, rates=(0.1, 0.3))
    section = Section(
        "Linear probes and views",
        f"On {args.device}; {rounds} rounds, median (quartiles). One by one: a training for each learning rate, with "
        f"{'the reference' if reference else 'torch'}'s classifier and torch's SGD.",
    )
    check_probe(section, small if args.quick else Sizes(384), args.device, reference)
    probed = [small] if args.quick else [Sizes(384), Sizes(4096)]
    section.tables["Training step on given features"] = [
        row for sizes in probed for row in time_probe(sizes, args.device, rounds, reference)
    ]
    measure_views(section, args, rounds)
    return section


def get_args_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = options("Linear probes on given features, and the views of images.")
    parser.add_argument(
        "--data_path", default=None, help="Folder of image files; by default scenes are written as JPEG files."
    )
    parser.add_argument("--images", type=int, default=96, help="Number of images to use.")
    parser.add_argument("--rounds", type=int, default=7, help="How often each variant is timed.")
    return parser


def main(argv: list[str] | None = None) -> Section:
    """Parse the options, measure, print."""
    return run(measure, get_args_parser(), argv)


if __name__ == "__main__":
    main()
