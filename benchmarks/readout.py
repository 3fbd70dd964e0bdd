"""SPARO in the order of `dino_sparo.models.readout` against the paper's order: time, memory, growth.

    python -m benchmarks.readout

The listing (SPARO, appendix 0.A) projects every token to the key of every slot, a (N, L*A) tensor per image; ours takes
the same sums in an order that never forms it.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.reference import Reference
from benchmarks.report import Bar, Section, measured_precisions, options, run
from benchmarks.timing import interleave, peak_memory
from dino_sparo.models.readout import Sparo

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
EQUAL = 1e-12  # float64, numbers around one
# Bars, on a CPU in fp32.
SPEEDUP = {197: 15.0, 37: 4.0}
MEMORY_SHARE = 0.2


@dataclass(frozen=True)
class Sizes:
    """B images of N tokens of width D, read out as L slots of V numbers with keys of A numbers, G slots per key."""

    batch: int = 16
    tokens: int = 197
    width: int = 384
    slots: int = 64
    slot_dim: int = 64
    key_dim: int = 64
    group: int = 1


class ListedSparo(nn.Module):
    """Equation 1 in the listing's order, with the parameters of a `Sparo`: keys of all tokens, scores, sums, W."""

    def __init__(self, sparo: Sparo) -> None:
        super().__init__()
        self.sparo = sparo

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Tokens (B, N, D), and which of them (B, N) may be attended -> slots (B, L, V)."""
        sparo: Any = self.sparo
        keys = sparo.key_proj(tokens).unflatten(-1, (-1, 1, sparo.key_dim))  # (B, N, L/G, 1, A)
        keys = keys.expand(-1, -1, -1, sparo.group_size, -1).movedim(1, 3)  # (B, L/G, G, N, A)
        queries = sparo.queries.unflatten(0, (-1, sparo.group_size))[:, :, None] * sparo.key_dim**-0.5
        scores = queries @ keys.transpose(-2, -1)  # (B, L/G, G, 1, N)
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None, None], float("-inf"))
        attention = scores.softmax(dim=-1)
        return sparo.value_proj((attention @ keys).flatten(1, 3))


FORMS: dict[str, Callable[[Sparo], Callable[[Tensor], Tensor]]] = {
    "listing": ListedSparo,
    "ours": lambda sparo: lambda tokens: sparo(tokens).slots,
}


def build(form: str, sizes: Sizes, precision: str, device: str) -> Callable[[], Any]:
    """One step of the read-out: forward and backward, gradients of parameters and tokens."""
    torch.manual_seed(0)
    sparo = Sparo(sizes.width, sizes.slots, sizes.slot_dim, sizes.key_dim, sizes.group).to(device)
    read, dtype = FORMS[form](sparo), PRECISIONS[precision]
    tokens = torch.randn(sizes.batch, sizes.tokens, sizes.width, device=device, requires_grad=True)

    def step(images: Tensor = tokens) -> None:
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            slots = read(images)
        slots.float().sum().backward()
        sparo.zero_grad()
        tokens.grad = None

    step(tokens[:1, :2])  # what libraries allocate once is not part of a step's memory
    return step


def check_equality(section: Section, sizes: Sizes) -> None:
    """Slots and all gradients in float64."""
    torch.manual_seed(0)
    sparo = Sparo(sizes.width, sizes.slots, sizes.slot_dim, sizes.key_dim, sizes.group).double()
    with torch.no_grad():
        for bias in (sparo.key_proj.bias, sparo.value_proj.bias):
            bias.normal_()
    tokens = torch.randn(2, sizes.tokens, sizes.width, dtype=torch.float64, requires_grad=True)
    inputs = [tokens, *sparo.parameters()]
    results = {}
    for form, build_form in FORMS.items():
        slots = build_form(sparo)(tokens)
        weights = torch.linspace(-1, 1, slots.numel(), dtype=slots.dtype).view_as(slots)
        gradients = torch.autograd.grad((slots * weights).sum(), inputs)
        results[form] = [slots, *(gradient / gradient.abs().max() for gradient in gradients)]
    what = f"N={sizes.tokens} L={sizes.slots} V={sizes.slot_dim} A={sizes.key_dim} G={sizes.group}"
    section.check(f"slots, {what}", results["ours"][0], results["listing"][0], EQUAL)
    flat = [torch.cat([gradient.flatten() for gradient in results[form][1:]]) for form in ("ours", "listing")]
    section.check(f"gradients over their largest, {what}", flat[0], flat[1], EQUAL)


def measure(args: argparse.Namespace, reference: Reference | None) -> Section:
    """Equality, then time over N, precision and sizes, then memory."""
    base = Sizes(batch=2, width=24, slots=8, slot_dim=6, key_dim=4) if args.quick else Sizes()
    numbers, rounds = ((5, 7), 1) if args.quick else ((37, 197, 901), 9)
    section = Section(
        "Read-out: SPARO re-associated against the listing's order",
        f"Forward and backward, batch {base.batch}, D={base.width}, on {args.device}; {rounds} rounds, median "
        f"(quartiles).",
    )
    grid = [replace(base, tokens=number) for number in numbers]
    middle = replace(base, tokens=numbers[1])
    varied = [
        replace(middle, **{name: value})
        for name, factors in (("slots", (0.25, 0.5, 2)), ("slot_dim", (0.5, 2)), ("key_dim", (0.5, 2)))
        for value in (int(getattr(base, name) * factor) for factor in factors)
    ] + [replace(middle, group=group) for group in (2, 4, 8)]
    for sizes in (grid[0], replace(grid[0], group=4, slot_dim=3 * base.slot_dim)):
        check_equality(section, sizes)
    if not (args.full or args.quick):
        section.notes.append("Other L, V, A and G: --full.")
        varied = []
    precisions = measured_precisions(section, args.device)
    rows = {
        (sizes, precision): _timed(sizes, precision, args.device, rounds, args.quick)
        for sizes, precision in [*((s, p) for p in precisions for s in grid), *((s, "fp32") for s in varied)]
    }
    section.tables["Time of forward and backward"] = list(rows.values())
    memory = {
        (precision, form): peak_memory(
            build, form, middle, precision, args.device, device=args.device, fresh=not args.quick
        )
        for precision in precisions
        for form in FORMS
    }
    section.tables[f"Growth of memory in a step, N={middle.tokens}, MB"] = [
        {"precision": precision, **{form: memory[precision, form] / 1e6 for form in FORMS}} for precision in precisions
    ]
    share = memory["fp32", "ours"] / max(memory["fp32", "listing"], 1)
    section.bars = [
        Bar(f"times faster in fp32 at N={number}", wanted, _median(rows, replace(base, tokens=number), args))
        for number, wanted in SPEEDUP.items()
    ]
    is_measured = not args.quick and args.device == "cpu"
    section.bars.append(Bar("share of the memory in fp32", MEMORY_SHARE, share if is_measured else None, at_most=True))
    if args.plots:
        plot(list(rows.values()), Path(args.plots))
    return section


def _timed(sizes: Sizes, precision: str, device: str, rounds: int, quick: bool) -> dict[str, Any]:
    variants = {form: build(form, sizes, precision, device) for form in FORMS}
    timings = interleave(variants, rounds, 0.0 if quick else 0.2, device)
    return {
        "N": sizes.tokens,
        "L": sizes.slots,
        "V": sizes.slot_dim,
        "A": sizes.key_dim,
        "G": sizes.group,
        "precision": precision,
        **{f"{form}, ms": timings.time(form).scaled(1e3) for form in FORMS},
        "times faster": timings.ratio("listing", "ours"),
    }


def _median(rows: dict[tuple[Sizes, str], dict[str, Any]], sizes: Sizes, args: argparse.Namespace) -> float | None:
    row = rows.get((sizes, "fp32"))
    return row["times faster"].median if row and not args.quick and args.device == "cpu" else None


def plot(rows: list[dict[str, Any]], folder: Path) -> None:
    """Cost against N and against L, side by side: readout.png."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

    folder.mkdir(parents=True, exist_ok=True)
    base = rows[1]
    figure, panels = pyplot.subplots(1, 2, figsize=(7, 2.8), sharey=True, layout="constrained")
    for axes, letter, what in zip(panels, "NL", ("tokens N", "slots L"), strict=True):
        fixed = [name for name in ("N", "L", "V", "A", "G", "precision") if name != letter]
        shown = sorted((row for row in rows if all(row[name] == base[name] for name in fixed)), key=lambda r: r[letter])
        values = [row[letter] for row in shown]
        for form, name, colour in zip(
            FORMS, ("the paper's listing", "re-associated"), ("0.55", "tab:blue"), strict=True
        ):
            times = [row[f"{form}, ms"].median for row in shown]
            axes.plot(values, times, "o-", color=colour)
            end = (values[-1], times[-1])
            axes.annotate(name, end, (4, 8), textcoords="offset points", color=colour, ha="right")
        title = ", ".join(f"{name} = {base[name]}" for name in fixed[:-1])
        axes.set(xlabel=what, xscale="log", yscale="log")
        axes.set_title(f"{title}, {base['precision']}", fontsize="medium")
        axes.xaxis.set_major_locator(FixedLocator(values))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("forward and backward, ms")
    panels[0].margins(y=0.15)
    figure.savefig(folder / "readout.png", dpi=150)
    pyplot.close(figure)


def get_args_parser() -> argparse.ArgumentParser:
    """The options."""
    return options("SPARO re-associated against the order of the paper's listing.")


def main(argv: list[str] | None = None) -> Section:
    """Parse the options, measure, print."""
    return run(measure, get_args_parser(), argv)


if __name__ == "__main__":
    main()
