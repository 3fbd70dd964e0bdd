"""Commands as calls from Python: results, refused keywords, interrupts, and a process that is left as it was."""

import logging
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import TINY

import dino_sparo
from dino_sparo.api import call

NOTEBOOK = """
import dino_sparo
run = dino_sparo.train(output_dir="run", epochs=1, **OPTIONS)
again = dino_sparo.train(output_dir="run", epochs=1, **OPTIONS)
assert len(run.history) == len(again.history) == 1
result = dino_sparo.knn(pretrained_weights=run.checkpoint, data_path="scenes:40:32", nb_knn=[5], num_workers=0)
print(result.results["results"][0]["k"], run.encoder().encoding_dim)
"""


def handlers() -> dict[int, Any]:
    """What a call may leave behind: signal handlers, log handlers besides those of commands before, the log's level."""
    root = logging.getLogger()
    signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)}
    return {**signals, 0: ([handler for handler in root.handlers if not is_ours(handler)], root.level)}


def is_ours(handler: logging.Handler) -> bool:
    """Whether a command has added this log handler."""
    return getattr(handler, "is_dino_sparo", False)


def test_two_trainings_and_evaluations_run_in_one_process_that_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their paths may begin in the home folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    before, weights = handlers(), set()
    for number in (1, 2):
        run = dino_sparo.train(output_dir=f"~/run{number}", epochs=number, seed=number, **TINY)
        assert run.checkpoint == tmp_path / f"run{number}" / "checkpoint.pth"
        assert [row["epoch"] for row in run.history] == list(range(number))
        assert run.results == run.history[-1]
        assert run.encoder()(torch.zeros(2, 3, 32, 32)).shape == (2, 15)
        weights.add(run.encoder("student").readout.queries.sum().item())
    assert len(weights) == 2
    evaluation = {"pretrained_weights": run.checkpoint, "num_workers": 0, "device": "cpu"}
    result = dino_sparo.knn(data_path="scenes:12:32", nb_knn=[3, 5], **evaluation)
    assert [row["k"] for row in result.results["results"]] == [3, 5]
    assert (result.history, result.options["temperature"]) == ([], 0.07)
    evaluation["pretrained_weights"] = "~/run2/checkpoint.pth"
    dino_sparo.embed(data_path="scenes:12:32", output_dir="~/embeddings", what=["encoding", "cls"], **evaluation)
    arrays = dino_sparo.load_embeddings("~/embeddings").arrays
    assert {name: len(rows) for name, rows in arrays.items()} == {"encoding": 12, "cls": 12}
    assert dino_sparo.load_encoder("~/run2/checkpoint.pth").encoding_dim == 15
    assert dino_sparo.load_checkpoint("~/run2/checkpoint.pth")["step"] == 6
    assert handlers() == before
    assert not any(map(is_ours, logging.getLogger().handlers))


def test_wrong_keywords_and_values_are_a_value_error_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    before = handlers()
    for keywords, message in (({"reedout": "sparo"}, "--reedout=sparo; did you mean"), ({}, "give --output_dir")):
        with pytest.raises(ValueError, match=message) as caught:
            dino_sparo.train(**TINY, **keywords)
        assert "\n" not in str(caught.value)
    assert handlers() == before
    assert "usage" not in capsys.readouterr().err


def test_an_interrupt_saves_and_raises_keyboard_interrupt(tmp_path: Path) -> None:
    before = handlers()

    def interrupt() -> None:
        while not (tmp_path / "run" / "log.txt").is_file():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    with pytest.raises(KeyboardInterrupt, match=r"after step \d+, which is saved"):
        dino_sparo.train(output_dir=tmp_path / "run", epochs=1000, **TINY)
    thread.join()
    saved = dino_sparo.load_checkpoint(tmp_path / "run" / "checkpoint.pth")
    assert 0 < saved["step"] < 3000
    assert handlers() == before


def test_a_failed_training_ends_its_workers_and_leaves_those_of_others(tmp_path: Path) -> None:
    theirs = iter(torch.utils.data.DataLoader(list(range(20)), num_workers=1))
    before = {child.pid for child in multiprocessing.active_children()}  # other tests may have left some
    assert {worker.pid for worker in theirs._workers} <= before
    options = {**TINY, "data_path": "scenes:4000:32", "num_workers": 1, "lr": 1e30, "precision": "fp32"}
    with pytest.raises(Exception, match="not finite") as caught:
        dino_sparo.train(output_dir=tmp_path / "run", epochs=3, **options)
    assert caught.tb is not None  # what a notebook keeps
    assert {child.pid for child in multiprocessing.active_children()} == before
    assert next(theirs).item() == 0


@pytest.mark.slow
def test_any_command_can_be_called_and_one_without_a_checkpoint_has_no_encoder(tmp_path: Path) -> None:
    result = call("knn", untrained=True, arch="vit_micro", data_path="scenes:40:32", num_workers=0, output_dir=tmp_path)
    assert result.results["encoder"]["untrained"]
    with pytest.raises(ValueError, match="knn was called without a checkpoint"):
        result.encoder()


@pytest.mark.slow
def test_a_notebook_trains_twice_and_evaluates(tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient", reason="the extra `test` is not installed")
    pytest.importorskip("ipykernel", reason="the extra `test` is not installed")
    from nbformat import v4

    root = Path(__file__).resolve().parents[1]
    cells = [f"import sys; sys.path.insert(0, {str(root)!r})\nOPTIONS = {TINY!r}", NOTEBOOK]
    notebook = v4.new_notebook(cells=[v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = [output["text"] for output in notebook.cells[1].outputs if output.get("name") == "stdout"]
    assert printed[-1].splitlines()[-1] == "5 15"
    errors = "".join(output["text"] for output in notebook.cells[1].outputs if output.get("name") == "stderr")
    assert "epoch 0: 100%" in errors
