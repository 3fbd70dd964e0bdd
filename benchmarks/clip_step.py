"""One step of CLIP and its input, ours and OpenCLIP's: time, and equal losses first.

    python -m benchmarks.clip_step
    python -m benchmarks.clip_step --readouts cls --batch 256 --device cuda --logits bf16

OpenCLIP is the installed package, so no checkout is needed: `--reference` is of no use here. Its step is that of its
`train_one_epoch`: zero the gradients, encode, `ClipLoss`, backward, AdamW, bound the temperature. It has no SPARO:
there its towers, one block shorter, are read out in the order of the paper's listing. The input is a JPEG, decoded and
cropped on one core.
"""

import argparse
import copy
import itertools
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import open_clip
import torch
from open_clip.transform import image_transform
from PIL import Image
from timm.data import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from torch import Tensor, nn

from benchmarks.input_pipeline import one_thread, open_images, rows_of
from benchmarks.readout import ListedSparo
from benchmarks.reference import Reference
from benchmarks.report import Section, measured_precisions, options, run
from benchmarks.timing import interleave, on_host, with_cudnn_benchmark
from dino_sparo.clip.model import CLIP, normalize_slots
from dino_sparo.clip.options import PRODUCTS, check_options
from dino_sparo.clip.options import get_args_parser as training_parser
from dino_sparo.clip.train import CLIPObjective
from dino_sparo.data.dataset import ImageDataset
from dino_sparo.data.loader import to_device
from dino_sparo.data.sources import ImageSource
from dino_sparo.image_text.objective import param_groups
from dino_sparo.image_text.pairs.batches import PairBatch, PairTransform
from dino_sparo.image_text.step import train_step
from dino_sparo.image_text.towers import CONTEXT_LENGTH, VOCAB_SIZE, end_token_mask
from dino_sparo.runtime.launch import Distributed
from dino_sparo.runtime.precision import PRECISIONS
from dino_sparo.training.compile import compile_networks
from dino_sparo.weights.foreign import open_clip_settings, to_open_clip_names

EQUAL = 2e-5  # of a loss of some nats, after some steps in fp32
CHECKED_STEPS = 3
STEPS = 10_000  # of the schedule; only the first few are taken


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and the batch of a step."""

    arch: str = "vit_base"
    patch_size: int = 32
    img_size: int = 224
    text_width: int = 512
    text_heads: int = 8
    text_layers: int = 12
    batch: int = 8


QUICK = Sizes("vit_micro", 8, 32, 64, 1, 2, 5)


def noise_pairs(sizes: Sizes) -> PairBatch:
    """Images of noise and captions of 4 to 20 tokens, as a loader gives them."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(256, (sizes.batch, 3, sizes.img_size, sizes.img_size), generator=generator)
    ids = torch.randint(1, VOCAB_SIZE - 2, (sizes.batch, CONTEXT_LENGTH), generator=generator)
    ends = torch.randint(4, 20, (sizes.batch, 1), generator=generator)
    places = torch.arange(CONTEXT_LENGTH)
    ids = ids.masked_fill(places == ends, VOCAB_SIZE - 1).masked_fill(places > ends, 0)
    return PairBatch(images.byte(), ids, torch.arange(sizes.batch), [], 0)


def our_training(sizes: Sizes, readout: str, precision: str, args: argparse.Namespace) -> CLIPObjective:
    """The objective of `clip.train`."""
    words = {
        "arch": sizes.arch, "patch_size": sizes.patch_size, "img_size": sizes.img_size, "text_width": sizes.text_width,
        "text_heads": sizes.text_heads, "text_layers": sizes.text_layers, "readout": readout, "precision": precision,
        "batch_size": sizes.batch, "epochs": 1, "warmup_steps": 0, "logits": args.logits, "num_workers": 0,
        "data_path": f"scenes:{STEPS * sizes.batch}:{sizes.img_size}",
    }  # fmt: skip
    parsed = training_parser().parse_args([word for name, value in words.items() for word in (f"--{name}", str(value))])
    check_options(parsed)
    return CLIPObjective(parsed, Distributed(0, 1, torch.device(args.device)))


class ListedClip(nn.Module):
    """OpenCLIP's towers without their last blocks, and SPARO as in the paper's listing, which computes all keys."""

    def __init__(self, towers: Any, image: ListedSparo, text: ListedSparo) -> None:
        super().__init__()
        self.towers, self.image_readout, self.text_readout = towers, image, text

    def forward(self, images: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Pairs -> normalised features and the inverse temperature."""
        towers: Any = self.towers
        tokens = towers.visual.ln_post(towers.visual.transformer(towers.visual._embeds(images)))
        words = towers.token_embedding(ids) + towers.positional_embedding
        words = towers.ln_final(towers.transformer(words, attn_mask=towers.attn_mask))
        slots = self.image_readout(tokens), self.text_readout(words, end_token_mask(ids))
        return normalize_slots(slots[0]), normalize_slots(slots[1]), towers.logit_scale.exp()


def their_model(ours: CLIP) -> nn.Module:
    """OpenCLIP's model, of the same weights."""
    if ours.config.readout == "cls":
        theirs: nn.Module = open_clip.model.CLIP(**open_clip_settings(ours.config.to_dict()))
        theirs.load_state_dict(to_open_clip_names(ours.state_dict()))
        return theirs
    # The towers of a `cls` model that is a block shorter; its projections are of no use.
    image, text = replace(ours.config.image, readout="cls"), replace(ours.config.text, readout="eos")
    plain = replace(ours.config, image=image, text=text, readout="cls", embed_dim=1)
    weights = {name: value for name, value in ours.state_dict().items() if ".readout." not in name}
    weights["image_proj.weight"] = torch.zeros(1, ours.image.backbone.embed_dim)
    weights["text_proj.weight"] = torch.zeros(1, text.width)
    towers = open_clip.model.CLIP(**open_clip_settings(plain.to_dict()))
    towers.load_state_dict(to_open_clip_names(weights))
    towers.visual.proj = towers.text_projection = None
    copies: list[Any] = [copy.deepcopy(side.readout) for side in (ours.image, ours.text)]
    return ListedClip(towers, *map(ListedSparo, copies))


def their_step(
    model: nn.Module, training: CLIPObjective, batch: PairBatch, precision: str, device: str
) -> Callable[[], Tensor]:
    """OpenCLIP's step, in the order of its `train_one_epoch`."""
    model.to(device).train()
    (schedule, _), weight_decay = training.updater.schedules, training.updater.optimizer.param_groups[0]["weight_decay"]
    groups = param_groups(dict(model.named_parameters()), weight_decay, (0.9, 0.98), 1e-6)
    optimizer, loss = torch.optim.AdamW(groups), open_clip.loss.ClipLoss(cache_labels=True)
    dtype = PRECISIONS[precision]
    whole: Any = getattr(model, "_orig_mod", model)  # of a compiled model
    towers: Any = getattr(whole, "towers", whole)
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (OPENAI_CLIP_MEAN, OPENAI_CLIP_STD))
    images = (batch.images.float() / 255 - mean) / std  # its loader's workers do this
    images = images.pin_memory() if device != "cpu" else images
    taken = 0

    def step() -> Tensor:
        nonlocal taken
        for group in optimizer.param_groups:
            group["lr"] = float(schedule["lr"][taken])
        pixels, ids = images.to(device, non_blocking=True), batch.token_ids.to(device, non_blocking=True)
        optimizer.zero_grad()
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            value: Tensor = loss(*model(pixels, ids))
        value.backward()
        optimizer.step()
        with torch.no_grad():
            towers.logit_scale.clamp_(0, math.log(100))
        taken += 1
        return value.detach()

    return with_cudnn_benchmark(step)


def check_equality(section: Section, readouts: list[str], args: argparse.Namespace) -> None:
    """Losses of a few steps in fp32, from equal weights."""
    for readout in readouts:
        training, batch = our_training(QUICK, readout, "fp32", args), noise_pairs(QUICK)
        theirs = their_step(their_model(training.network), training, batch, "fp32", args.device)
        their_losses = torch.stack([theirs() for _ in range(CHECKED_STEPS)])
        losses = torch.stack([train_step(training, [batch]).loss for _ in range(CHECKED_STEPS)])
        limit = EQUAL if args.logits == "fp32" else 0.02
        section.check(f"{readout}: losses of {CHECKED_STEPS} steps", losses, their_losses, limit)


def measure(args: argparse.Namespace, reference: Reference | None) -> Section:
    """Equality, then the steps in turns, then the input in turns."""
    sizes = QUICK if args.quick else Sizes(batch=args.batch or (256 if args.device != "cpu" else 8))
    rounds = 1 if args.quick else args.rounds
    section = Section(
        "CLIP's step and input",
        f"{sizes.arch}/{sizes.patch_size}, batch {sizes.batch}, {sizes.img_size} px, logits {args.logits}, on "
        f"{args.device}, against open_clip {open_clip.__version__}; {rounds} rounds, median (quartiles).",
    )
    check_equality(section, args.readouts, args)
    batch = on_host(noise_pairs(sizes), args.device)
    precisions = measured_precisions(section, args.device)
    for readout in args.readouts:
        for precision in precisions:
            training = our_training(sizes, readout, precision, args)
            theirs = their_step(their_model(training.network), training, batch, precision, args.device)
            loader = to_device(itertools.repeat(batch), training.updater.device)
            calls: dict[str, Callable[[], Any]] = {"OpenCLIP": theirs, "ours": partial(step_of, training, loader)}
            if args.compile or (args.device != "cpu" and not args.quick and precision == precisions[-1]):
                calls |= compiled_calls(sizes, readout, precision, batch, args)
            timings = interleave(calls, rounds, 0.0, args.device)
            section.tables[f"{readout}, {precision}: a step"] = rows_of(timings, sizes.batch, "")
    with tempfile.TemporaryDirectory() as folder:
        source = open_images(args.data_path, 2 if args.quick else args.images, Path(folder))
        measure_input(section, source, rounds)
    return section


def compiled_calls(
    sizes: Sizes, readout: str, precision: str, batch: PairBatch, args: argparse.Namespace
) -> dict[str, Callable[[], Any]]:
    """Both steps with compiled networks: OpenCLIP's as its `--torchcompile` does, ours as `--compile on` does."""
    training = our_training(sizes, readout, precision, args)
    model: Any = torch.compile(their_model(training.network).to(args.device))
    theirs = their_step(model, training, batch, precision, args.device)
    compile_networks(training)
    loader = to_device(itertools.repeat(batch), training.updater.device)
    return {"OpenCLIP, compiled": theirs, "ours, compiled": partial(step_of, training, loader)}


def step_of(training: CLIPObjective, loader: Iterator[PairBatch]) -> Tensor:
    """Our step on the loader's next batch."""
    return train_step(training, [next(loader)]).loss


def measure_input(section: Section, source: ImageSource, rounds: int) -> None:
    """Decode and crop on one core: OpenCLIP's torchvision pipeline, ours with its pixels, ours as it is by default."""
    theirs: Any = image_transform(224, is_train=True, mean=OPENAI_CLIP_MEAN, std=OPENAI_CLIP_STD)

    def openclip() -> None:
        for index in range(len(source)):
            with open(source.location(index), "rb") as file:
                theirs(Image.open(file))

    def ours(transform: PairTransform) -> None:
        dataset = ImageDataset(source, transform)
        for index in range(len(source)):
            dataset[index]

    exact, fast = PairTransform(224, exact=True), PairTransform(224)
    with one_thread():
        calls: dict[str, Callable[[], Any]] = {
            "OpenCLIP": openclip,
            "ours, --exact_crops": partial(ours, exact),
            "ours": partial(ours, fast),
        }
        timings = interleave(calls, rounds, 0.0)
    section.tables["Input on one core, one thread"] = rows_of(timings, len(source), " and core")
    levels = [
        (ImageDataset(source, fast)[i].views[0].int() - ImageDataset(source, exact)[i].views[0].int()).abs().float()
        for i in range(len(source))
    ]
    pixels = torch.stack(levels)
    section.notes.append(
        f"ours against --exact_crops, whose pixels are OpenCLIP's: {100 * (pixels > 0).float().mean():.2g} % of the "
        f"values differ, by {pixels.max():.0f} level(s) of 255 at most"
    )


def get_args_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = options("A step of CLIP and its input, ours and OpenCLIP's.")
    parser.add_argument("--batch", type=int, default=None, help="Pairs per step; by default 8 on a CPU, 256 on a GPU.")
    parser.add_argument("--rounds", type=int, default=5, help="How often everything is timed.")
    parser.add_argument("--readouts", nargs="+", default=["cls", "sparo"], choices=["cls", "sparo"], help="Which.")
    parser.add_argument("--compile", action="store_true", help="Time compiled forms on a CPU too, which takes minutes.")
    parser.add_argument("--logits", default="fp32", choices=PRODUCTS, help="Precision of our products of features.")
    parser.add_argument(
        "--data_path", default=None, help="Folder of image files; by default scenes are written as JPEG files."
    )
    parser.add_argument("--images", type=int, default=48, help="Number of images to use.")
    return parser


def main(argv: list[str] | None = None) -> Section:
    """Parse the options, measure, print."""
    return run(measure, get_args_parser(), argv)


if __name__ == "__main__":
    main()
