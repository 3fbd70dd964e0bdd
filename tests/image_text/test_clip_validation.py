"""Validation while training: what is held out, the numbers, and that nothing about it is random."""

from pathlib import Path

import pytest
import torch
from PIL import Image

pytest.importorskip("open_clip")

from clip_fakes import dot_product_scorer, small_checkpoint
from runs import assert_same_state, checkpoint_of, epochs_of
from test_clip_train import run

from dino_sparo.clip import load_clip
from dino_sparo.clip.options import get_args_parser
from dino_sparo.image_text.evaluation.validation import MAX_PAIRS, hold_out, validate, validation_pairs
from dino_sparo.image_text.objective import open_data
from dino_sparo.image_text.pairs.batches import collate_pairs
from dino_sparo.image_text.pairs.sources import open_pairs
from dino_sparo.runtime.launch import Distributed
from dino_sparo.weights.file import CheckpointError

CPU = torch.device("cpu")


def test_held_out_pairs_are_not_trained_on_and_are_the_same_every_time() -> None:
    source = open_pairs("scenes:50:32")
    train, val = hold_out(source, 0.2, seed=3)
    assert (len(train), len(val)) == (40, 10)
    places = [{part.location(index) for index in range(len(part))} for part in (train, val)]
    assert places[0] | places[1] == {source.location(index) for index in range(50)}
    assert not places[0] & places[1]
    assert [val.location(i) for i in range(10)] == [hold_out(source, 0.2, 3)[1].location(i) for i in range(10)]
    assert places[1] != {hold_out(source, 0.2, 4)[1].location(i) for i in range(10)}
    where = {source.location(index): index for index in range(50)}
    assert all(val.captions_of(i) == source.captions_of(where[val.location(i)]) for i in range(10))
    assert val.read(4).tobytes() == source.read(where[val.location(4)]).tobytes()


def test_scenes_to_validate_on_are_not_those_that_are_trained_on() -> None:
    """`--val_path scenes` gave the training scenes once more."""
    train, val = (open_pairs("scenes:9:32", default_split=split) for split in ("train", "val"))
    pictures = [{source.read(index).tobytes() for index in range(9)} for source in (train, val)]
    assert not pictures[0] & pictures[1]
    assert val.captions_of(3) == val.captions_of(3)
    asked = [open_pairs("scenes:9:32", split=split).read(0).tobytes() for split in (None, "all", "train", "val")]
    assert [image == val.read(0).tobytes() for image in asked] == [False, False, False, True]


def test_what_is_trained_on_does_not_validate_if_both_come_from_one_table(tmp_path: Path) -> None:
    """The bug: with --split train, --val_path of the same table gave its rows of training."""
    for name in "01":
        Image.new("RGB", (8, 8)).save(tmp_path / f"{name}.png")
    table = tmp_path / "t.csv"
    table.write_text("path,caption,split\n0.png,a,train\n1.png,b,val\n")
    words = ["--data_path", str(table), "--split", "train", "--val_path", str(table), "--batch_size", "1"]
    args = get_args_parser().parse_args([*words, "--num_workers", "0"])
    source, _, _, held_out = open_data(args, Distributed(0, 1, CPU), collate_pairs)
    assert [pairs.captions_of(0) for pairs in (source, held_out) if pairs is not None] == [["a"], ["b"]]
    assert (len(source), len(held_out or ())) == (1, 1)


@pytest.mark.parametrize("share", [0.001, 0.999])
def test_a_share_that_leaves_a_side_empty_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match=r"--val_share .* of 50 pairs is \d+ pairs; give a share"):
        hold_out(open_pairs("scenes:50:32"), share, 0)


def test_no_more_pairs_are_compared_than_every_epoch_can_bear() -> None:
    source = open_pairs(f"scenes:{3 * MAX_PAIRS}:32")
    assert [len(part) for part in hold_out(source, 0.5, 0)] == [2 * MAX_PAIRS, MAX_PAIRS]
    pairs = validation_pairs(source)
    assert len(pairs) == MAX_PAIRS
    assert pairs.location(MAX_PAIRS - 1) == source.location(3 * MAX_PAIRS - 1)


def test_a_model_is_validated_in_evaluation_mode_and_goes_on_training(tmp_path: Path) -> None:
    """That loss and recalls equal a loop is tested in test_clip_scorer.py."""
    loaded = load_clip(small_checkpoint(tmp_path / "clip.pth"))
    loaded.model.train()
    modes: list[bool] = []
    for part in (loaded.model.image.backbone, loaded.model.text.blocks[0]):
        part.register_forward_hook(lambda module, *_: modes.append(module.training))
    validate(dot_product_scorer(loaded), open_pairs("scenes:9:32"), torch.tensor(3.0), 100)
    assert len(modes) >= 2
    assert not any(modes)
    assert loaded.model.training


@pytest.mark.slow
def test_every_epoch_is_validated_and_a_resumed_run_gives_the_same_bits(tmp_path: Path) -> None:
    run(tmp_path / "whole", val_share=0.3, epochs=2)
    run(tmp_path / "parts", val_share=0.3, epochs=2, max_steps=4)
    run(tmp_path / "parts", val_share=0.3, epochs=2)
    states = checkpoint_of(tmp_path / "whole"), checkpoint_of(tmp_path / "parts")
    for key in ("model", "optimizer"):
        assert_same_state(states[0][key], states[1][key], key)
    names = {"val_loss", "val_text_r1", "val_image_r1"}
    whole, parts = (
        [{name: epoch[name] for name in names} for epoch in epochs_of(tmp_path / name)] for name in ("whole", "parts")
    )
    assert whole == parts
    assert len(whole) == 2
    assert checkpoint_of(tmp_path / "whole")["num_pairs"] == 18  # of 26
    with pytest.raises(CheckpointError, match="num_pairs was 18 and is now 26"):
        run(tmp_path / "parts", epochs=2)


@pytest.mark.slow
def test_validation_on_other_pairs_changes_no_weight(tmp_path: Path) -> None:
    run(tmp_path / "with", val_path="scenes:11:32", epochs=2)
    run(tmp_path / "without", epochs=2)
    found, expected = (checkpoint_of(tmp_path / name)["model"] for name in ("with", "without"))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert all("val_loss" in epoch for epoch in epochs_of(tmp_path / "with"))


def test_a_path_and_a_share_are_not_given_together(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--val_share 0.5 with --val_path scenes: give one of the two"):
        run(tmp_path, val_share=0.5, val_path="scenes")
