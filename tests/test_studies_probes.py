"""The study of probes: which encoders are probed, with which options, and its table."""

import json
from pathlib import Path
from typing import Any

from studies import probes, runs
from studies.__main__ import parser_of

ROOT = Path(__file__).resolve().parents[1]


def test_the_demo_encoder_is_probed_and_read_by_random_slots(tmp_path: Path) -> None:
    asked: list[tuple[str, list[str]]] = []

    def command(name: str, words: list[str]) -> dict[str, Any]:
        weights = words[words.index("--pretrained_weights") + 1]
        kinds = words[words.index("--probe") + 1 :]
        asked.append((weights, kinds))
        assert name == "linear"
        assert "--fast" in words
        row = {"parameters": 7, "readout_parameters": 3}
        tops = {"1": 50.0, "3": 60.0, "10": 40.0}
        return {
            "results": [
                {**row, "probe": kind, "lr": float(lr), "top1": top} for kind in kinds for lr, top in tops.items()
            ]
        }

    words = ["--output_dir", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    args = parser_of("probes").parse_args(words)
    probes.measure_missing(args, command)
    table = probes.report(args.results)
    random = tmp_path / "runs" / "demo" / "random_slots" / "checkpoint.pth"
    assert asked == [("demo", ["linear", "sparo", "ep", "attention"]), (str(random), ["linear"])]
    assert random.is_file()
    found = json.loads((tmp_path / "results" / "probes" / "demo.json").read_text())["probes"]
    assert found["random slots"] == {"lr": 3.0, "top1": 60.0, "parameters": 7, "readout_parameters": 3}
    assert table.splitlines()[2].startswith("| demo | 1 | 60.0")
    probes.measure_missing(args, command)  # the result is there: nothing is asked again
    assert len(asked) == 2


def test_the_page_shows_the_table_of_the_result_files() -> None:
    assert probes.report(runs.RESULTS) in (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
