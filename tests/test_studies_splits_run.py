"""`python -m studies oc-splits`: which commands it runs, its report, how it continues, its curves."""

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from studies import __main__ as studies
from studies.oc_splits import data
from studies.oc_splits import run as splits
from studies.oc_splits.design import TESTS
from studies.oc_splits.run import MODELS, run_splits

ACCURACIES = {"train": 98.0, "seen_pair": 40.0, "unseen_order": 30.0, "unseen_pair": 70.0}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr(data, "MIN_TRAINING_IMAGES", 4)


class FakeRun:
    """Stands for the commands: writes a checkpoint of 7 numbers, answers with fixed accuracies."""

    def __init__(self) -> None:
        self.commands: list[tuple[str, dict[str, str]]] = []

    def __call__(self, name: str, words: Sequence[str]) -> Any:
        options = {word[2:]: value for word, value in zip(words[::2], words[1::2], strict=True)}
        self.commands.append((name, options))
        if name.startswith("train"):
            Path(options["output_dir"]).mkdir(parents=True)
            torch.save(
                {"model": {"a": torch.zeros(2, 3), "b": torch.zeros(())}}, options["output_dir"] + "/checkpoint.pth"
            )
            return None
        assert (name, options["benchmarks"]) == ("compositional", "sugarcrepe")
        assert Path(options["images"]).is_dir()
        is_shuffled = Path(options["data_root"]).name == "shuffled"
        tests = [path.stem for path in Path(options["data_root"]).glob("*.json")]
        found = {test: 50.0 if is_shuffled else ACCURACIES.get(test, 60.0) for test in tests}
        splits = {test: {"accuracy": value, "num_ties": 1, "num_questions": 4} for test, value in found.items()}
        return [{"benchmarks": {"SugarCrepe": {"splits": splits}}}]

    def trained(self) -> list[tuple[str, dict[str, str]]]:
        return [command for command in self.commands if command[0].startswith("train")]


def options(folder: Path, *more: str) -> Namespace:
    words = ["--num_images", "8", "--num_questions", "4", "--output_dir", str(folder), *more]
    return studies.parser_of("oc-splits").parse_args(words)


def test_all_models_get_the_same_towers_pictures_steps_and_optimiser_and_controls_their_options_alone(tmp_path):
    run = FakeRun()
    run_splits(options(tmp_path, "--models", *MODELS), run)
    own = {"output_dir", "graphs", *(key for model in MODELS.values() for key in model.options)}
    shared = [{key: value for key, value in words.items() if key not in own} for _, words in run.trained()]
    assert len(shared) == len(MODELS)
    assert all(words == shared[0] for words in shared)
    assert {"arch", "text_layers", "lr", "batch_size", "epochs", "seed", "warmup_steps", "data_path"} <= shared[
        0
    ].keys()
    trained = {Path(words["output_dir"]).name: {**words, "output_dir": ""} for _, words in run.trained()}
    differing = {name: dict(set(trained[name].items()) - set(trained["oc-clip"].items())) for name in MODELS}
    assert differing["oc-clip-no-rel"] == {"rel_loss_weight": "0"}
    assert differing["oc-clip-no-competition"] == {"competition": "keys", "num_default": "0"}
    assert differing["oc-clip-parsed"] == {"graphs": "templates"}
    assert trained["oc-clip"]["graphs"] == trained["oc-clip"]["data_path"]
    assert "graphs" not in trained["clip-cls"]
    asked = {
        Path(each["pretrained_weights"]).parent.name: each.get("graphs")
        for name, each in run.commands
        if name == "compositional"
    }
    assert asked["clip-sparo"] is None
    assert asked["oc-clip-parsed"] == "templates"
    assert asked["oc-clip"].endswith("tests/graphs.jsonl")


@pytest.mark.parametrize("kind", list(TESTS))
def test_every_test_is_reported_with_the_mean_of_the_first_two_and_with_shuffled_pictures(tmp_path, capsys, kind):
    results = run_splits(options(tmp_path, "--split", kind, "--models", "clip-cls", "--seeds", "0", "1"), FakeRun())
    assert [result["seed"] for result in results] == [0, 1]
    assert all(result["num_parameters"] == 7 and set(result["tests"]) == set(TESTS[kind]) for result in results)
    assert json.loads((tmp_path / "splits.json").read_text())["results"] == results
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    reverse = ACCURACIES[TESTS[kind][1]]
    expected = ["98.0", f"{reverse:.1f}", f"{(98 + reverse) / 2:.1f}"]
    row = next(line for line in lines if line[:1] == ["clip-cls"])
    assert [word for word in row[1:] if word not in ("±", "0.0")][:3] == expected
    assert any(line[:3] == ["shuffled", "pictures", "50.0"] for line in lines)
    assert any(line[:7] == ["captions", "alone,", "at", "best", "100.0", "0.0", "50.0"] for line in lines)


def test_a_model_whose_result_is_there_is_not_trained_again_and_other_options_are_refused(tmp_path):
    first, second = FakeRun(), FakeRun()
    before = run_splits(options(tmp_path, "--models", "clip-cls"), first)
    after = run_splits(options(tmp_path, "--models", "clip-cls", "clip-sparo"), second)
    assert after[:1] == before
    assert [Path(words["output_dir"]).name for _, words in second.trained()] == ["clip-sparo"]
    with pytest.raises(ValueError, match="is the result of other options; give the same options, or another"):
        run_splits(options(tmp_path, "--models", "clip-cls", "--epochs", "3"), FakeRun())


def test_the_curve_has_the_loss_of_every_epoch_and_the_tests_of_kept_checkpoints(tmp_path):
    pytest.importorskip("matplotlib")

    class Logged(FakeRun):
        def __call__(self, name: str, words: Sequence[str]) -> Any:
            found = super().__call__(name, words)
            if name.startswith("train"):
                folder = Path(self.commands[-1][1]["output_dir"])
                (folder / "checkpoint0001.pth").touch()
                epochs = [{"epoch": i, "step": 3 * i, "train_loss": 9.0, "train_itc_loss": 2.0 - i} for i in range(2)]
                (folder / "log.txt").write_text("".join(json.dumps(epoch) + "\n" for epoch in epochs))
            return found

    run = Logged()
    words = ["--models", "oc-clip", "--curve"]
    (plain,) = run_splits(options(tmp_path, *words[:2]), run)
    assert "curve" not in plain
    results = run_splits(options(tmp_path, *words), run)  # of a finished run
    asked = {"train": 98.0, "seen_pair": 40.0}
    assert results == [{**plain, "curve": [{"step": 0, "loss": 2.0}, {"step": 3, "loss": 1.0, **asked}]}]
    assert len(run.trained()) == 1
    assert (tmp_path / "curves.png").is_file()


@pytest.mark.slow
def test_clips_run_from_pictures_to_the_table(tmp_path, capsys):
    pytest.importorskip("open_clip")
    models = ["--models", "clip-cls", "clip-swapped", "clip-sparo"]
    words = [*models, "--short", "--num_images", "64", "--num_questions", "10"]
    results = studies.main(["oc-splits", *words, "--num_workers", "0", "--output_dir", str(tmp_path)])
    for result in results:
        for part in ("tests", "shuffled"):
            assert set(result[part]) == set(TESTS["attribute"])
            assert all(0 <= each["accuracy"] <= 100 for each in result[part].values())
        assert result["training_s"] > 0
        assert 0.5 < result["num_parameters"] / results[0]["num_parameters"] < 2
    assert "clip-sparo" in capsys.readouterr().out
    assert (tmp_path / "splits.json").is_file()
    assert splits.count_parameters(tmp_path / "seen50_hard0_seed0" / "clip-cls" / "checkpoint.pth") > 0
