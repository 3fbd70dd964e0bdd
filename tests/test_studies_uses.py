"""The study of uses: its drawn data, the commands that it asks for, and its table."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dino_sparo.commands import parser_of
from dino_sparo.data.sources import DEFAULT_LIMITS
from dino_sparo.evaluation.retrieval.datasets import open_copydays
from dino_sparo.evaluation.video.davis import open_davis, read_annotations
from studies import __main__ as studies
from studies import drawn_uses, runs, uses

ROOT = Path(__file__).resolve().parents[1]


def test_drawn_copies_and_clips_have_the_layouts_that_the_commands_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, number in (("NUM_ROWS", 7), ("NUM_ORIGINALS", 3), ("NUM_CLIPS", 2), ("NUM_FRAMES", 30)):
        monkeypatch.setattr(drawn_uses, name, number)
    folder = drawn_uses.draw_data(tmp_path)
    copies = open_copydays(str(folder / "copies"), DEFAULT_LIMITS)
    answers = [query.positives.tolist() for query in copies.protocols["strong"]]
    assert answers == [[0]] * 3 + [[1]] * 3 + [[2]] * 3
    for video in open_davis(str(folder / "clips"), "val"):
        numbers, _ = read_annotations(video.annotations)
        assert (len(numbers), sorted(np.unique(numbers))) == (30, [0, 1, 2])
        places = [np.argwhere(frame == 1).mean(axis=0) for frame in numbers]
        steps = np.abs(np.diff(places, axis=0)) / drawn_uses.CLIP_SIZE
        assert steps.max() < drawn_uses.SPEED[1] + 0.05  # where the small object hides a part, the middle moves more
        # The background is still, up to shadows and compression.
        first, last = (np.asarray(Image.open(path), dtype=int) for path in (video.frames[0], video.frames[-1]))
        is_still = (numbers[0] == 0) & (numbers[-1] == 0)
        assert np.median(np.abs(first - last)[is_still]) < 5


def test_every_part_of_an_encoder_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def command(name: str, words: Sequence[str]) -> dict[str, Any] | None:
        args = parser_of(name).parse_args(words)  # refuses unknown options
        if name == "search":
            Path(args.folder).mkdir()
            (Path(args.folder) / "search.csv").write_text("query,label\na,star\na,ring\nb,ring\nb,ring\n")
            return {}
        asked.append((name, str(args.pretrained_weights)))
        rows = {score: row for use in uses.USES if use.command == name for row in use.rows.values() for score in row}
        result = {"headline": [{"name": score, "value": 0.5, "unit": "" if "R2" in score else "%"} for score in rows]}
        if name == "finetune":
            Path(args.output_dir).mkdir()
            (Path(args.output_dir) / "finetune_a_b.json").write_text(json.dumps(result))
            return None
        return result

    store = SimpleNamespace(index={"path": ["a", "b"], "label": ["star", "ring"]})
    monkeypatch.setattr(uses, "draw_data", lambda folder: folder)
    monkeypatch.setattr(uses, "load_embeddings", lambda folder: store)
    monkeypatch.setattr(uses, "is_finished", lambda folder, run: run.seed == 1)
    monkeypatch.setattr(uses, "with_random_slots", lambda weights, folder, seed: folder / "random.pth")
    monkeypatch.setattr(uses, "reported_rows", lambda *_: {row: (row[:3], 0.008) for row in uses.READ})
    words = ["--output_dir", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    args = studies.parser_of("uses").parse_args(words)
    uses.measure_missing(args, command)
    table = uses.report(args.results)
    assert len(list((tmp_path / "results" / "uses").iterdir())) == 3
    by_weights = {weights: [name for name, other in asked if other == weights] for _, weights in asked}
    cls, sparo, random = by_weights.values()
    assert set(sparo) == set(cls) == {use.command for use in uses.USES} | {"embed"}
    assert sparo.count("video-segmentation") == 2
    assert cls.count("video-segmentation") == 1
    assert random.count("segment") == 1
    cells = {line.split(" | ")[0][2:]: line.split(" | ")[1:] for line in table.splitlines()[2:]}
    assert cells["table-probe, position: R²"] == ["50.0", "50.0", "50.0", "+0.0 (one seed)", "+0.0 (one seed) |"]
    assert cells[uses.SEARCH][0] == "75.0"
    assert cells["segment, 20 masks: mIoU"][2] == ""
    uses.measure_missing(args, command)  # the results are there: nothing is asked again
    assert len(asked) == len(cls) + len(sparo) + len(random)


def test_the_page_shows_the_table_of_the_result_files() -> None:
    assert uses.report(runs.RESULTS) in (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
