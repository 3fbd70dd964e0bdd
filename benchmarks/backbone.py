"""Time that the backbone saves: only the class token in the last block, positions by a matrix.

    python -m benchmarks.backbone --reference dino

A student's forward and backward pass on the crops of a batch, in the forms that
`dino_sparo.models.backbone` offers, which give equal numbers, and the reference's backbone.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.reference import Reference
from benchmarks.report import Section, measured_precisions, options, run
from benchmarks.timing import interleave
from dino_sparo.models.backbone import GRID_OFFSET, Backbone
from dino_sparo.models.encoder import EncoderConfig, create_backbone
from dino_sparo.runtime.precision import PRECISIONS, prefers_fused_attention, use_fused_attention

EQUAL = 1e-11  # float64, numbers around one


def forms(backbone: Backbone, reference: nn.Module | None, crops: list[Tensor]) -> dict[str, Callable[[], Tensor]]:
    """Name -> crops to class tokens."""
    ours: dict[str, Callable[[], Tensor]] = {
        "plain": lambda: torch.cat([backbone(images)[:, 0] for images in crops]),
        "class token": lambda: torch.cat([backbone.class_tokens(images) for images in crops]),
    }
    return ours if reference is None else {"reference": lambda: torch.cat([reference(c) for c in crops]), **ours}


def crops_of(batch: int, sizes: dict[int, int], device: str, dtype: torch.dtype) -> list[Tensor]:
    """Noise: for each side in pixels as many crops per image as the dict says."""
    return [torch.randn(batch * number, 3, side, side, device=device, dtype=dtype) for side, number in sizes.items()]


def check_equality(section: Section, reference: Reference | None) -> None:
    """Class tokens and gradients in float64, with stochastic depth unless the reference is compared."""
    for rate in (0.0, 0.3):
        torch.manual_seed(0)
        backbone: Any = create_backbone(EncoderConfig("vit_micro", 8, "cls", img_size=32), rate).double().train()
        crops = crops_of(3, {32: 2, 16: 4}, "cpu", torch.float64)
        other = None
        if reference is not None and rate == 0:
            other = reference.vision_transformer.VisionTransformer(
                img_size=[32], patch_size=8, embed_dim=128, depth=4, num_heads=4, qkv_bias=True,
                norm_layer=lambda width: nn.LayerNorm(width, eps=1e-6),
            ).double().train()  # fmt: skip
            other.load_state_dict(backbone.state_dict())
        results = {}
        for name, run_crops in forms(backbone, other, crops).items():
            torch.manual_seed(1)
            tokens = run_crops()
            parameters = dict((other if name == "reference" and other else backbone).named_parameters())
            loss = (tokens * torch.linspace(-1, 1, tokens.numel(), dtype=tokens.dtype).view_as(tokens)).sum()
            gradients = torch.autograd.grad(loss, [parameters[key] for key in sorted(parameters)])
            results[name] = torch.cat([tokens.flatten(), *(g.flatten() / g.abs().max() for g in gradients)])
        against = "reference" if "reference" in results else "plain"
        for name in (name for name in results if name != against):
            claim = f"{name} against {against}: class tokens and gradients, stochastic depth {rate}"
            section.check(claim, results[name].detach(), results[against].detach(), EQUAL)


def check_positions(section: Section) -> None:
    """Resampled positions in fp32 against torch's interpolation."""
    backbone: Any = create_backbone(EncoderConfig("vit_small", 16, "cls"))
    for side in (96, 480):
        ours, plain = backbone.position_embedding(side, side), interpolated(backbone, side)
        section.check(f"positions of {side} px images, fp32", ours.detach(), plain.detach(), 1e-6)


def interpolated(backbone: Backbone, side: int) -> Tensor:
    """The positions by the reference's interpolation."""
    grid_size, patches = backbone.img_size // backbone.patch_size, side // backbone.patch_size
    grid = backbone.pos_embed[:, 1:].unflatten(1, (grid_size, grid_size)).permute(0, 3, 1, 2)
    scale = (patches + GRID_OFFSET) / grid_size
    resampled = F.interpolate(grid, scale_factor=(scale, scale), mode="bicubic").flatten(2).transpose(1, 2)
    return torch.cat((backbone.pos_embed[:, :1], resampled), dim=1)


def measure(args: argparse.Namespace, reference: Reference | None) -> Section:
    """Equality, then the student's pass in fp32 and bf16, then the positions."""
    arch, patch_size, sizes = ("vit_micro", 8, {32: 2, 16: 4}) if args.quick else ("vit_small", 16, {224: 2, 96: 8})
    batch, rounds = args.batch or (1 if args.quick else 4), 1 if args.quick else 9
    section = Section(
        "Backbone: forms with equal results",
        f"{arch}/{patch_size}, batch {batch}, crops per image and side in pixels "
        f"{', '.join(f'{number}x{side}' for side, number in sizes.items())}, forward and backward, on {args.device}; "
        f"{rounds} rounds, median (quartiles).",
    )
    check_equality(section, reference)
    check_positions(section)
    backbone: Any = create_backbone(EncoderConfig(arch, patch_size, "cls", img_size=max(sizes))).to(args.device)
    other = None
    if reference is not None and not args.quick:
        other = reference.vision_transformer.vit_small(patch_size=patch_size).to(args.device)
    crops = crops_of(batch, sizes, args.device, torch.float32)
    rows = []
    for precision in measured_precisions(section, args.device):
        dtype = PRECISIONS[precision]
        use_fused_attention(backbone, prefers_fused_attention(torch.device(args.device), dtype))
        variants = {
            name: _step(run_crops, args.device, dtype) for name, run_crops in forms(backbone, other, crops).items()
        }
        timings = interleave(variants, rounds, 0.0, args.device)
        first = next(iter(variants))
        rows += [
            {"precision": precision, "form": name, "ms": timings.time(name).scaled(1e3),
             f"times faster than {first}": timings.ratio(first, name)}
            for name in variants
        ]  # fmt: skip
    section.tables["Forward and backward of the student's backbone"] = rows
    section.tables["Positions of 96 px images, forward and backward"] = [_positions(args.device, rounds)]
    return section


def _step(run_crops: Callable[[], Tensor], device: str, dtype: torch.dtype) -> Callable[[], None]:
    def step() -> None:
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            tokens = run_crops()
        tokens.float().sum().backward()

    return step


def _positions(device: str, rounds: int) -> dict[str, Any]:
    backbone: Any = create_backbone(EncoderConfig("vit_small", 16, "cls")).to(device)
    variants = {
        "interpolated": lambda: interpolated(backbone, 96).sum().backward(),
        "by matrices": lambda: backbone.position_embedding(96, 96).sum().backward(),
    }
    timings = interleave(variants, rounds, 0.02, device)
    times = {f"{name}, ms": timings.time(name).scaled(1e3) for name in variants}
    return {**times, "times faster": timings.ratio("interpolated", "by matrices")}


def get_args_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = options("The backbone's forms with equal results, and the reference's.")
    parser.add_argument("--batch", type=int, default=None, help="Images per step; by default 4, of 10 crops each.")
    return parser


def main(argv: list[str] | None = None) -> Section:
    """Parse the options, measure, print."""
    return run(measure, get_args_parser(), argv)


if __name__ == "__main__":
    main()
