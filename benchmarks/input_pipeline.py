"""Cost of ten crops from an image file: seconds per image on one core, on the device, and through a DataLoader.

    python -m benchmarks.input_pipeline --reference dino --data_path imagenet/val

Ours comes in two forms. `finished`: a core decodes, cuts and distorts, and gives floats, pixel for pixel what
torchvision makes of PIL images. `deferred`: a core decodes and cuts, and gives 8-bit pixels; the device distorts.
"""

import argparse
import math
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as TF

from benchmarks.reference import Reference
from benchmarks.report import Bar, Check, Section, options, run
from benchmarks.timing import Spread, Timings, interleave
from dino_sparo.data.augment import Distortions, channel_constant
from dino_sparo.data.batch import collate_views
from dino_sparo.data.crops import CropParameters, MultiCropAugmentation, apply_crop, cut_crop, sample_crop
from dino_sparo.data.dataset import ImageDataset
from dino_sparo.data.defaults import IMAGENET_MEAN, IMAGENET_STD
from dino_sparo.data.loader import create_loader, usable_cores
from dino_sparo.data.samplers import EpochSampler, image_rng
from dino_sparo.data.scenes.images import Scenes
from dino_sparo.data.sources import ImageSource, open_source

# Bars: times the reference's speed per core, and levels of 255.
DEFERRED_SPEEDUP, FINISHED_SPEEDUP, LEVELS_APART = 6.0, 1.2, 0.5
CROPS: dict[str, Any] = {"global_crops_scale": (0.4, 1.0), "local_crops_scale": (0.05, 0.4), "local_crops_number": 8}
WORKERS = 2
CARD_IMAGES_PER_S = 1850.0  # of an H100, a recorded step of ViT-S/16 with SPARO at batch 64
# Made where no images are given: the sides and the file size of a typical image of ImageNet.
WIDTH, HEIGHT, JPEG_QUALITY, GRAIN = 500, 375, 90, 20.0


def write_images(folder: Path, number: int) -> None:
    """Scenes as JPEG files, with grain so that they are as hard to decode as photographs."""
    scenes, rng = Scenes(number, image_size=WIDTH), np.random.default_rng(0)
    for index in range(number):
        pixels = np.asarray(scenes.read(index))[:HEIGHT] + rng.normal(0, GRAIN, (HEIGHT, WIDTH, 1))
        image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
        image.save(folder / f"{index:04}.jpg", quality=JPEG_QUALITY)


ENHANCERS: dict[str, Any] = {
    "brightness": ImageEnhance.Brightness,
    "contrast": ImageEnhance.Contrast,
    "saturation": ImageEnhance.Color,
}


def apply_with_pillow(image: Image.Image, crop: CropParameters, size: int) -> Tensor:
    """The oracle: the reference's operations on PIL images, with the numbers that were drawn; levels (3, H, W)."""
    view = TF.resized_crop(image, *crop.box, [size, size], InterpolationMode.BICUBIC)
    view = TF.hflip(view) if crop.flip else view
    for name, factor in crop.jitter:
        view = TF.adjust_hue(view, factor) if name == "hue" else ENHANCERS[name](view).enhance(factor)
    view = TF.to_grayscale(view, 3) if crop.grayscale else view
    view = view.filter(ImageFilter.GaussianBlur(crop.blur_radius)) if crop.blur_radius else view
    view = ImageOps.solarize(view) if crop.solarize else view
    return TF.pil_to_tensor(view).float()


def check_equality(section: Section, source: ImageSource, device: str, number: int) -> None:
    """Equal random numbers through Pillow, through `finished`, and through `deferred`."""
    augmentation = MultiCropAugmentation(**CROPS, defer_color=True)
    distortions = Distortions(IMAGENET_MEAN, IMAGENET_STD).to(device)
    std = 255 * torch.from_numpy(channel_constant(IMAGENET_STD))
    exact = 0.0
    colors: list[float] = []
    whole: list[float] = []
    for index in range(number):
        image, rng = source.read(index), image_rng(0, 0, index)
        drawn = [sample_crop(rng, image.height, image.width, recipe) for recipe in augmentation.recipes]
        views, _ = augmentation(image, image_rng(0, 0, index))
        for crop, recipe, view in zip(drawn, augmentation.recipes, views, strict=True):
            truth, parameters = apply_with_pillow(image, crop, recipe.size), torch.tensor([crop.packed()]).to(device)
            exact = max(exact, float(np.abs(apply_crop(image, crop, recipe.size) - truth.numpy()).max()))
            normalized = TF.normalize(truth / 255, list(IMAGENET_MEAN), list(IMAGENET_STD))
            cut = torch.from_numpy(cut_crop(image, crop.box, recipe.size))
            for pixels, differences in ((cut, colors), (view, whole)):
                levels = distortions(pixels[None].to(device), parameters)[0].cpu()
                differences.append(((levels - normalized) * std).abs().mean().item())
    section.checks += [
        Check("finished: every pixel is torchvision's on PIL images (levels of 255)", exact, 0.0),
        Check("deferred: distortions of equal pixels, mean difference (levels)", float(np.mean(colors)), LEVELS_APART),
        Check("deferred: crops and distortions, mean difference (levels)", float(np.mean(whole)), LEVELS_APART),
    ]


class ReferenceImages(Dataset):
    """The reference's images: opened and converted as torchvision's ImageFolder does, then its augmentation.

    Args:
        paths: of the files.
        transform: the reference's.
    """

    def __init__(self, paths: Sequence[str], transform: Callable[[Image.Image], list[Tensor]]) -> None:
        self.paths, self.transform = paths, transform

    def __len__(self) -> int:
        """Number of images."""
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[list[Tensor], int]:
        """Crops and a label, as ImageFolder gives them."""
        with open(self.paths[index], "rb") as file:
            image = Image.open(file).convert("RGB")
        return self.transform(image), 0


def datasets(source: ImageSource, reference: Reference | None) -> dict[str, Any]:
    """Name -> data set; all others are compared with the first."""
    data_sets: dict[str, Any] = {}
    if reference is not None:
        augmentation = reference.main_dino.DataAugmentationDINO(*CROPS.values())
        data_sets["reference"] = ReferenceImages([source.location(index) for index in range(len(source))], augmentation)
    data_sets["finished"] = ImageDataset(source, MultiCropAugmentation(**CROPS))
    data_sets["deferred"] = ImageDataset(source, MultiCropAugmentation(**CROPS, defer_color=True))
    return data_sets


@contextmanager
def one_thread() -> Iterator[None]:
    """Within this context one thread computes, as in a worker of a loader."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def rows_of(timings: Timings, images: int, per: str) -> list[dict[str, Any]]:
    """Rows of a table: images per second, and their ratio to the first variant."""
    first = next(iter(timings.seconds))
    return [
        {
            "": name,
            "ms per image": timings.time(name).scaled(1e3 / images),
            f"images/s{per}": images / timings.time(name).median,
            f"times {first}": timings.ratio(first, name),
        }
        for name in timings.seconds
    ]


def time_core(source: ImageSource, sets: dict[str, Any], images: int, rounds: int) -> Timings:
    """One core, one thread: read, decode, ten crops."""

    def call(dataset: Any) -> None:
        for index in range(images):
            dataset[index]

    variants: dict[str, Callable[[], Any]] = {name: partial(call, dataset) for name, dataset in sets.items()}
    variants["decoding alone"] = lambda: [source.read(index) for index in range(images)]
    with one_thread():
        return interleave(variants, rounds, 0.0)


def time_device(dataset: ImageDataset, batch: int, device: str, rounds: int, compiled: bool) -> Timings:
    """Time the deferred distortions of a batch that lies on the device."""
    items = [dataset[index % len(dataset)] for index in range(batch)]
    views = [torch.stack(crops).to(device) for crops in zip(*(item.views for item in items), strict=True)]
    parameters = torch.stack([item.parameters for item in items if item.parameters is not None], dim=1).to(device)
    variants = {"eager": Distortions(IMAGENET_MEAN, IMAGENET_STD).to(device)}
    if compiled:
        variants["compiled"] = Distortions(IMAGENET_MEAN, IMAGENET_STD).to(device)
        variants["compiled"].compile(fullgraph=True, dynamic=False)
    calls = {name: partial(module.views, views, parameters) for name, module in variants.items()}
    return interleave(calls, rounds, 0.2, device)


def time_loader(sets: dict[str, Any], workers: int, batch: int, rounds: int) -> Timings:
    """Epochs out of DataLoaders whose workers are running already; between two epochs they have nothing to do."""

    def epoch(loader: DataLoader) -> None:
        for _ in loader:
            pass

    loaders = {}
    for name, dataset in sets.items():
        if isinstance(dataset, ImageDataset):
            loaders[name] = create_loader(dataset, EpochSampler(len(dataset), batch), num_workers=workers)
        else:
            loaders[name] = DataLoader(
                dataset, batch, shuffle=True, drop_last=True, num_workers=workers, persistent_workers=workers > 0
            )
    return interleave({name: partial(epoch, loader) for name, loader in loaders.items()}, rounds, 0.0)


def stages_of(source: ImageSource, rounds: int, batch: int) -> dict[str, float]:
    """One worker's processor seconds per image in each stage, the median of the rounds.

    A call does the work of all stages up to its own, so a stage is the difference of two calls. Processor time leaves
    out what other programs take, and waiting for a disk.
    """
    finished, deferred = (ImageDataset(source, MultiCropAugmentation(**CROPS, defer_color=on)) for on in (False, True))
    images = range(len(source))
    items = [deferred[index % len(source)] for index in range(batch)]
    calls: dict[str, Callable[[], Any]] = {
        "read": lambda: [Path(source.location(index)).read_bytes() for index in images],
        "decode": lambda: [source.read(index) for index in images],
        "crop and resize": lambda: [deferred[index] for index in images],
        "distort": lambda: [finished[index] for index in images],
        "collate": lambda: collate_views(items),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    with one_thread():
        for _ in range(rounds):
            for name, call in calls.items():
                begin = time.process_time()
                call()
                times[name].append(time.process_time() - begin)
    medians = {name: Spread.of(values).median for name, values in times.items()}
    collate = medians.pop("collate") / batch
    whole = {name: seconds / len(source) for name, seconds in medians.items()}
    before = dict(zip(whole, [0.0, *whole.values()], strict=False))
    return {**{name: seconds - before[name] for name, seconds in whole.items()}, "collate": collate}


def time_stages(source: ImageSource, workers: int, batch: int, rounds: int, device: str) -> list[dict[str, Any]]:
    """Stages of the input with all workers busy at once: ms per image, and the part of a worker's time.

    `distort` is a worker's work only without `--distort_on device`. The copy to a GPU is the main process' work.
    """
    if workers:
        with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
            reports = list(pool.map(stages_of, [source] * workers, [rounds] * workers, [batch] * workers))
    else:
        reports = [stages_of(source, rounds, batch)]
    seconds = {name: Spread.of([report[name] for report in reports]).median for name in reports[0]}
    whole = sum(value for name, value in seconds.items() if name != "distort")
    rows: list[dict[str, Any]] = [
        {"": name, "ms per image": 1e3 * value, "share": None if name == "distort" else value / whole}
        for name, value in seconds.items()
    ]
    rows.append({"": "a worker that leaves distortions to the GPU", "ms per image": 1e3 * whole, "share": 1.0})
    if device != "cpu":
        dataset = ImageDataset(source, MultiCropAugmentation(**CROPS, defer_color=True))
        loaded = collate_views([dataset[index % len(source)] for index in range(batch)])
        calls: dict[str, Callable[[], Any]] = {
            "page-locked memory": loaded.pin_memory,
            "copy to the GPU": partial(loaded.pin_memory().to, device),
        }
        copies = interleave(calls, rounds, 0.2, device)
        rows += [
            {"": name, "ms per image": copies.time(name).median * 1e3 / batch, "share": None} for name in copies.seconds
        ]
    return rows


def cores_for(rate: float, ms_per_image: float) -> str:
    """The number of cores that one GPU needs, in words."""
    return (
        f"A card that takes {rate:,.0f} images/s needs {math.ceil(rate * ms_per_image / 1e3)} cores: {rate:,.0f} "
        f"images/s x {ms_per_image:.3g} ms."
    )


def open_images(data_path: str | None, number: int, folder: Path) -> ImageSource:
    """`number` images, spread evenly over `data_path`, or made in `folder`."""
    if data_path is None:
        write_images(folder, number)
        return open_source(str(folder))
    source = open_source(data_path)
    chosen = np.linspace(0, len(source) - 1, min(number, len(source))).astype(int).tolist()
    images = folder / "images.txt"
    images.write_text("".join(f"{Path(source.location(index)).resolve()}\n" for index in chosen))
    return open_source(str(images))


def measure(args: argparse.Namespace, reference: Reference | None) -> Section:
    """Equality, then time on one core, on the device, and through loaders."""
    number, rounds, batch, checked = (4, 1, 2, 1) if args.quick else (args.images, args.rounds, 16, 20)
    with tempfile.TemporaryDirectory() as folder:
        source = open_images(args.data_path, number, Path(folder))
        kind = "built-in scenes with grain" if args.data_path is None else "given images"
        size = np.mean([Path(source.location(index)).stat().st_size for index in range(len(source))]) / 1e3
        section = Section(
            "Input: one decode and ten crops per image",
            f"{len(source)} {kind}, {size:.0f} kB on average, two crops of 224 and eight of 96 pixels; "
            f"{rounds} rounds, median (quartiles).",
        )
        check_equality(section, source, args.device, min(checked, len(source)))
        sets = datasets(source, reference)
        core = time_core(source, sets, len(source), rounds)
        section.tables["One core, one thread"] = rows_of(core, len(source), " and core")
        device_batch = batch if args.device == "cpu" else 64
        device = time_device(sets["deferred"], device_batch, args.device, rounds, compiled=not args.quick)
        section.tables[f"What is deferred, on {args.device}, batch {device_batch}"] = rows_of(device, device_batch, "")
        images = len(source) // batch * batch
        workers = 0 if args.quick else WORKERS
        loader = time_loader(sets, workers, batch, rounds)
        section.tables[f"DataLoader, {workers} workers, batch {batch}"] = rows_of(loader, images, "")
        busy = 0 if args.quick else usable_cores(os.environ)
        stages = time_stages(source, busy, batch, rounds, args.device)
        section.tables[f"Stages, {busy or 1} workers busy at once"] = stages
        total = next(row["ms per image"] for row in stages if row["share"] == 1.0)
        section.notes += [bytes_per_image(sets), cores_for(CARD_IMAGES_PER_S, total)]
    section.bars = bars(section, None if args.quick else core)
    return section


def bars(section: Section, core: Timings | None) -> list[Bar]:
    """The goals; a quick run has no numbers to compare with them."""
    compared = core if core is not None and "reference" in core.seconds else None
    found = [
        Bar(
            f"{name}: times the reference's images per second and core",
            wanted,
            None if compared is None else compared.ratio("reference", name).median,
        )
        for name, wanted in (("deferred", DEFERRED_SPEEDUP), ("finished", FINISHED_SPEEDUP))
    ]
    levels = None if core is None else section.checks[1].difference
    return [*found, Bar("deferred: levels from the reference's distortions", LEVELS_APART, levels, at_most=True)]


def bytes_per_image(sets: dict[str, Any]) -> str:
    """Size of an image that a worker hands over and that travels to the device, in words."""
    sizes = {name: sum(view.nbytes for view in sets[name][0].views) / 1e6 for name in ("finished", "deferred")}
    return ", ".join(f"{name}: {size:.2f} MB per image to the device" for name, size in sizes.items())


def get_args_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = options("Decoding and ten crops per image: one core, the device, a DataLoader.")
    parser.add_argument(
        "--data_path", default=None, help="Folder of image files; by default scenes are written as JPEG files."
    )
    parser.add_argument("--images", type=int, default=96, help="Number of images to use.")
    parser.add_argument("--rounds", type=int, default=7, help="How often everything is timed.")
    return parser


def main(argv: list[str] | None = None) -> Section:
    """Parse the options, measure, print."""
    return run(measure, get_args_parser(), argv)


if __name__ == "__main__":
    main()
