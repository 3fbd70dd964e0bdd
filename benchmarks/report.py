"""Results of a benchmark -> Markdown and JSON; the options that all benchmarks share."""

import argparse
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.reference import Reference
from benchmarks.timing import Spread, hardware, software
from dino_sparo.runtime.cli import Parser
from dino_sparo.runtime.precision import set_tf32

BF16_TRIAL_SIDE = 384


def bf16_speed(device: torch.device) -> float:
    """Speed of a small matrix product in bf16, as a multiple of its speed in fp32.

    A CPU without bf16 instructions is a hundred times slower in bf16.
    """

    def seconds(dtype: torch.dtype) -> float:
        matrix, times = torch.ones(BF16_TRIAL_SIDE, BF16_TRIAL_SIDE, device=device, dtype=dtype), []
        for _ in range(4):  # the first is slower
            begin = time.monotonic()
            (matrix @ matrix).sum().item()
            times.append(time.monotonic() - begin)
        return min(times[1:])

    return seconds(torch.float32) / max(seconds(torch.bfloat16), 1e-9)


def measured_precisions(section: "Section", device: str, names: Sequence[str] = ("fp32", "bf16")) -> list[str]:
    """The precisions that are worth measuring; a note of the section says if bf16 is left out."""
    # A GPU takes longer to launch so small a product than to compute it.
    speed = bf16_speed(torch.device(device)) if "bf16" in names and device == "cpu" else 1
    if speed >= 1:
        return list(names)
    section.notes.append(f"bf16 is left out: this {device} multiplies matrices at {speed:.2g} times its speed in fp32.")
    return [name for name in names if name != "bf16"]


@dataclass(frozen=True)
class Check:
    """A check of equality: the difference of two results, and its limit.

    Attributes:
        claim: what equals what.
        difference: the largest.
        limit: the largest allowed.
    """

    claim: str
    difference: float
    limit: float

    @property
    def passed(self) -> bool:
        """Whether they are equal within the limit; never for NaN."""
        return self.difference <= self.limit


@dataclass(frozen=True)
class Bar:
    """A promise and its measurement.

    Attributes:
        claim: of what, in which unit.
        wanted: the promise.
        found: the measurement, or None if it needs the reference or another machine.
        at_most: the smaller the better.
    """

    claim: str
    wanted: float
    found: float | None
    at_most: bool = False

    @property
    def verdict(self) -> str:
        """met, missed, or not measured."""
        if self.found is None:
            return "not measured"
        is_met = self.found <= self.wanted if self.at_most else self.found >= self.wanted
        return "met" if is_met else "missed"


@dataclass
class Section:
    """The result of one script.

    Attributes:
        title: of its section.
        setting: what was measured: sizes, precision, repetitions.
        tables: name -> rows; every row has the same columns.
        checks: equalities, shown before any speed.
        bars: promises.
        notes: what the numbers do not say.
    """

    title: str
    setting: str
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        """Whether all checks of equality passed."""
        return all(check.passed for check in self.checks)

    def check(self, claim: str, ours: torch.Tensor, other: torch.Tensor, limit: float) -> None:
        """Compare two tensors by their largest absolute difference."""
        difference = (ours.double() - other.double()).abs().max().item() if ours.numel() else 0.0
        self.checks.append(Check(claim, difference, limit))

    def markdown(self) -> str:
        """The section as Markdown."""
        parts = [f"## {self.title}", self.setting]
        checks = [
            {"equal": check.claim, "largest difference": check.difference, "allowed": check.limit,
             "": "yes" if check.passed else "**NO**"}
            for check in self.checks
        ]  # fmt: skip
        bars = [
            {"bar": bar.claim, "wanted": ("<= " if bar.at_most else ">= ") + _cell(bar.wanted),
             "measured": None if bar.found is None else f"{bar.found:.4g}", "": bar.verdict}
            for bar in self.bars
        ]  # fmt: skip
        tables = {"Equality": checks, **self.tables, "Bars": bars}
        parts += [f"{name}\n\n{table(rows)}" for name, rows in tables.items() if rows]
        parts += [f"- {note}" for note in self.notes]
        return "\n\n".join(parts)

    def plain(self) -> dict[str, Any]:
        """The section as plain values, for JSON."""
        return {
            "title": self.title,
            "setting": self.setting,
            "equal": self.is_equal,
            "checks": [{**asdict(check), "passed": check.passed} for check in self.checks],
            "tables": {name: [_plain(row) for row in rows] for name, rows in self.tables.items()},
            "bars": [{**asdict(bar), "verdict": bar.verdict} for bar in self.bars],
            "notes": self.notes,
        }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows with equal keys -> a Markdown table."""
    lines = [" | ".join(rows[0]), " | ".join("---" for _ in rows[0])]
    lines += [" | ".join(_cell(value) for value in row.values()) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def _cell(value: Any) -> str:
    """A value as text; numbers have three digits, since more would be noise."""
    if value is None:
        return "-"
    if isinstance(value, Spread):
        return f"{_cell(value.median)} ({_cell(value.lower)}-{_cell(value.upper)})"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {
        name: asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
        for name, value in row.items()
    }


def options(description: str, what: Iterable[str] = ()) -> argparse.ArgumentParser:
    """The options of every script.

    Args:
        description: of the script.
        what: it measures one of these, which the first word names.
    """
    parser = Parser(description=description)
    if what:
        parser.add_argument("what", choices=sorted(what), help="Which.")
    parser.add_argument(
        "--reference", default=None, help="A checkout of facebookresearch/dino; without it only our code is measured."
    )
    parser.add_argument(
        "--json",
        default=None,
        help="File for the report with all numbers; a report in Markdown is written next to it, with the suffix .md.",
    )
    parser.add_argument(
        "--quick", action="store_true", help="Tiny sizes, to check that results are equal; do not quote the speeds."
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help="All sizes and forms; by default only sizes and forms that take less than five minutes on two cores.",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="Device: cpu or cuda.")
    parser.add_argument("--plots", default=None, help="Folder for the pictures; none are drawn without it.")
    return parser


def run(
    measure: Callable[[argparse.Namespace, Reference | None], Section],
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None = None,
) -> Section:
    """Run a script: parse the options, measure, publish.

    Args:
        measure: options and checkout, if one is given -> the script's section.
        parser: `options`, optionally with options of the script.
        argv: None: the command line.
    """
    args = parser.parse_args(argv)
    try:
        reference = open_reference(args.reference)
    except ValueError as error:
        parser.error(str(error))
    set_tf32(allowed=False)  # fp32 is exact, also where the environment allows TF32
    section = measure(args, reference)
    publish([section], reference, args)
    return section


def open_reference(path: str | None) -> Reference | None:
    """The checkout, if one is given."""
    return None if path is None else Reference(path)


def document(sections: Sequence[Section], reference: Reference | None, device: str) -> tuple[str, dict[str, Any]]:
    """All sections with the machine, the versions and the reference's commit, as Markdown and as plain values."""
    commit = None if reference is None else reference.commit
    machine, versions = hardware(device), software()
    gpu = [] if "gpu" in machine else ["Not measured on GPU."]
    facts = ["; ".join(f"{name}: {value}" for name, value in found.items()) for found in (machine, versions)]
    head = [*facts, f"reference: facebookresearch/dino {commit}" if commit else "reference: none given", *gpu]
    text = "\n\n".join([*head, *(section.markdown() for section in sections)])
    plain = {
        "hardware": machine,
        "versions": versions,
        "reference": commit,
        "sections": [section.plain() for section in sections],
    }
    return text, plain


def publish(sections: Sequence[Section], reference: Reference | None, args: argparse.Namespace) -> None:
    """Print the report, and write it to the file of the options, as JSON and as Markdown.

    Raises:
        SystemExit: results that should be equal are not.
    """
    print(save(sections, reference, args))
    unequal = [check.claim for section in sections for check in section.checks if not check.passed]
    if unequal:
        raise SystemExit(f"not equal: {'; '.join(unequal)}")


def save(sections: Sequence[Section], reference: Reference | None, args: argparse.Namespace) -> str:
    """Write the report to the file of the options, as JSON and as Markdown; returns the Markdown.

    Called after each check too, so that a script that is ended leaves what it has measured.
    """
    text, plain = document(sections, reference, args.device)
    if args.json:
        for path, content in (
            (Path(args.json), json.dumps(plain, indent=2)),
            (Path(args.json).with_suffix(".md"), text),
        ):
            unfinished = path.with_name(f"{path.name}.unfinished")
            unfinished.write_text(content + "\n", encoding="utf-8")
            unfinished.replace(path)
    return text
