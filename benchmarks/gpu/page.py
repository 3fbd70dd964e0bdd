"""The parts' reports -> a page, and its place in docs/gpu.md between two marks."""

import json
from pathlib import Path
from typing import Any

from benchmarks.report import table

BEGIN, END = "<!-- written by make gpu -->", "<!-- end -->"


def read_reports(folder: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Name of a part -> its report with the runner's `seconds` and `status`; without those that have not run."""
    return {name: json.loads(path.read_text()) for name in names if (path := folder / f"{name}.json").is_file()}


def page(reports: dict[str, dict[str, Any]], names: list[str]) -> str:
    """What ran on what, every check that failed, every bar, what a missed bar is made of, then all tables' files."""
    sections = [(name, section) for name, report in reports.items() for section in report.get("sections", [])]
    facts: dict[str, Any] = next((report for report in reports.values() if "hardware" in report), {})
    lines = [
        "; ".join(
            f"{name}: {value}" for name, value in (facts.get("hardware", {}) | facts.get("versions", {})).items()
        ),
        f"this project: {facts.get('commit', 'unknown')}; reference: facebookresearch/dino "
        f"{next((report['reference'] for report in reports.values() if report.get('reference')), 'none given')}",
        table([_part_row(name, reports.get(name)) for name in names]),
    ]
    failed = [
        {"part": name, "check": check["claim"], "found": check["difference"], "allowed": check["limit"]}
        for name, section in sections
        for check in section["checks"]
        if not check["passed"]
    ]
    bars = [
        {"part": name, "bar": bar["claim"], "wanted": ("<= " if bar["at_most"] else ">= ") + f"{bar['wanted']:g}",
         "measured": bar["found"], "": bar["verdict"]}
        for name, section in sections
        for bar in section["bars"]
    ]  # fmt: skip
    lines += ["### Checks that failed", table(failed) if failed else "None."]
    lines += ["### Bars", table(bars) if bars else "None was measured."]
    if any(bar[""] == "missed" for bar in bars):
        lines += ["### What a step is made of", *_step_tables(sections)]
    return "\n\n".join(lines)


def _part_row(name: str, report: dict[str, Any] | None) -> dict[str, Any]:
    if report is None:
        return {"part": name, "result": "not run", "checks": None, "s": None}
    checks = [check for section in report.get("sections", []) for check in section["checks"]]
    passed = sum(check["passed"] for check in checks)
    return {
        "part": name,
        "result": report["result"],
        "checks": f"{passed} of {len(checks)} passed",
        "s": report["seconds"],
    }


def _step_tables(sections: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """By which part a bar of speed is missed: the parts of ours and the reference's step, and the kinds of kernels."""
    wanted = (": a step", ": its parts", ": by kind")
    found = [(name, title, rows) for name, section in sections for title, rows in section["tables"].items()]
    return [
        f"{name}, {title}\n\n{table([_flat(row) for row in rows])}"
        for name, title, rows in found
        if name in ("train_step", "profile") and rows and any(word in title for word in wanted)
    ]


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """A row with medians in the place of spreads."""
    return {name: value["median"] if isinstance(value, dict) else value for name, value in row.items()}


def put_between_marks(text: str, path: Path) -> None:
    """Replace what stands between the marks of a page.

    Raises:
        ValueError: the page has no such marks.
    """
    before, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{path} has no lines `{BEGIN}` and `{END}` to write between")
    path.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")
