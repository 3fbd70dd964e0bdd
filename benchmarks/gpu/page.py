"""The parts' reports -> the generated sections of docs/gpu.md, and all tables in benchmarks/gpu/README.md."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.report import table

BEGIN, END = "<!-- make gpu: {} -->", "<!-- end -->"


class Claim(NamedTuple):
    """A claim about the recorded step.

    Attributes:
        claim: in words, for the page.
        wanted: in words.
        part: that measures it.
        name: of the bar or the check in its report.
    """

    claim: str
    wanted: str
    part: str
    name: str


CLAIMS = [
    *(
        Claim(f"images/s against the reference's own loop, batch 64, `{readout}`", "at least 3.5x", "train_step", name)
        for readout in ("cls", "sparo")
        for name in [f"{readout}, recorded, times the images/s of the reference in its fp16, equal batches"]
    ),
    Claim("images/s, `sparo`, batch 64", "at least 1,850", "train_step", "sparo, recorded, images/s at batch 64"),
    *(
        Claim(f"recorded against compiled, `{readout}`", "at least 1.5x", "train_step", name)
        for readout in ("cls", "sparo")
        for name in [f"{readout}, recorded, times faster than compiled"]
    ),
    Claim(
        "time of a step with `sparo` over `cls`",
        "at most 1.05",
        "train_step",
        "time of a recorded step of DINO + SPARO over vanilla DINO's",
    ),
    *(
        Claim(f"weights after 20 steps, recorded and not, {form}", "difference 0", "recorded", name)
        for form in ("fp32", "fp32, stochastic depth", "fp32, stochastic depth, in regions")
        for name in [f"{form}: weights after 20 steps, recorded and not"]
    ),
    Claim(
        "losses of 20 steps, recorded and not, bf16",
        "difference at most 1e-4",
        "recorded",
        "bf16: losses of 20 steps, recorded and not",
    ),
    Claim(
        "a recorded run of 300 steps from JPEG files: share of the time that waits for data",
        "reported",
        "recipe_recorded",
        "share of the time that waits for data",
    ),
]


def claims(reports: dict[str, dict[str, Any]]) -> str:
    """Goals of the recorded step, and the measurements, with GPU and commit."""
    rows = []
    for claim in CLAIMS:
        report = reports.get(claim.part, {})
        found = {
            **{
                check["claim"]: check["difference"]
                for section in report.get("sections", [])
                for check in section["checks"]
            },
            **{bar["claim"]: bar["found"] for section in report.get("sections", []) for bar in section["bars"]},
        }
        value = found.get(claim.name)
        row = _part_row(claim.part, report or None)
        rows.append(
            {
                "claim": claim.claim,
                "wanted": claim.wanted,
                "measured": "not run" if value is None else value,
                "GPU": None if value is None else row["GPU"],
                "commit": None if value is None else row["commit"],
                "command": f'`make gpu ARGS="--part {claim.part}"`',
            }
        )
    return table(rows)


def read_reports(folder: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Name of a part -> its report with the runner's `seconds` and `result`; without parts that have not ended."""
    reports = {name: json.loads(path.read_text()) for name in names if (path := folder / f"{name}.json").is_file()}
    return {name: report for name, report in reports.items() if "result" in report}  # the runner adds it last


def page(reports: dict[str, dict[str, Any]]) -> str:
    """The machine and every failed check."""
    facts: dict[str, Any] = next((report for report in reports.values() if "hardware" in report), {})
    failed = [
        {"part": name, "check": check["claim"], "found": check["difference"], "allowed": check["limit"]}
        for name, section in _sections(reports)
        for check in section["checks"]
        if not check["passed"]
    ]
    lines = [
        "; ".join(
            f"{name}: {value}" for name, value in (facts.get("hardware", {}) | facts.get("versions", {})).items()
        ),
        f"this project: {facts.get('commit', 'unknown')}; reference: facebookresearch/dino "
        f"{next((report['reference'] for report in reports.values() if report.get('reference')), 'none given')}",
        f"Checks that failed:\n\n{table(failed)}" if failed else "No check failed.",
    ]
    return "\n\n".join(lines)


def tables(reports: dict[str, dict[str, Any]], names: list[str]) -> str:
    """Every part with its GPU and commit, every bar, then all measurements: step times, kernels, memory, ..."""
    bars = [
        {"part": name, "bar": bar["claim"], "wanted": ("<= " if bar["at_most"] else ">= ") + f"{bar['wanted']:g}",
         "measured": bar["found"], "": bar["verdict"]}
        for name, section in _sections(reports)
        for bar in section["bars"]
    ]  # fmt: skip
    measurements = [
        f"{name}, {title}\n\n{table([_flat(row) for row in rows])}"
        for name, section in _sections(reports)
        for title, rows in section["tables"].items()
        if rows
    ]
    parts = table([_part_row(name, reports.get(name)) for name in names])
    return "\n\n".join([parts, table(bars) if bars else "No bar was measured.", *measurements])


def status(reports: dict[str, dict[str, Any]]) -> str:
    """The page's first sentence: where it ran, and how many parts passed."""
    gpus = dict.fromkeys(
        report["hardware"]["gpu"] for report in reports.values() if "gpu" in report.get("hardware", {})
    )
    passed = sum(report["result"] == "done" for report in reports.values())
    return (
        f"`make gpu` ran on a GPU ({'; '.join(gpus) or 'unknown name'}): {passed} of {len(reports)} parts passed. "
        "`benchmarks/gpu/README.md` has the tables."
    )


def not_shown(reports: dict[str, dict[str, Any]], names: list[str]) -> str:
    """The parts that did not pass or did not run."""
    left = [f"`{name}`" for name in names if reports.get(name, {}).get("result") != "done"]
    return f"- These parts did not pass or did not run: {', '.join(left)}." if left else ""


def _part_row(name: str, report: dict[str, Any] | None) -> dict[str, Any]:
    if report is None:
        return {"part": name, "result": "not run", "checks": None, "s": None, "GPU": None, "commit": None}
    checks = [check for section in report.get("sections", []) for check in section["checks"]]
    passed = sum(check["passed"] for check in checks)
    return {
        "part": name,
        "result": report["result"],
        "checks": f"{passed} of {len(checks)} passed",
        "s": report["seconds"],
        "GPU": report.get("hardware", {}).get("gpu", "unknown").split(",")[0],
        "commit": str(report.get("commit", "unknown"))[:7],
    }


def _sections(reports: dict[str, dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Name of the part, section of its report."""
    return [(name, section) for name, report in reports.items() for section in report.get("sections", [])]


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """A row with medians in the place of spreads."""
    return {name: value["median"] if isinstance(value, dict) else value for name, value in row.items()}


def put_between_marks(texts: dict[str, str], path: Path) -> None:
    """Replace the text between the marks of a page.

    Args:
        texts: name of a mark -> what stands behind it.
        path: of the page.

    Raises:
        ValueError: the page has no such marks.
    """
    content = path.read_text(encoding="utf-8")
    for name, text in texts.items():
        before, begin, rest = content.partition(BEGIN.format(name))
        _, end, after = rest.partition(END)
        if not (begin and end):
            raise ValueError(f"{path} has no lines `{BEGIN.format(name)}` and `{END}` to write between")
        content = f"{before}{begin}\n\n{text}\n\n{end}{after}"
    path.write_text(content, encoding="utf-8")
