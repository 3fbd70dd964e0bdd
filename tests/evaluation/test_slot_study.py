"""Slots alone and together: the numbers of `eval_knn --slots`, a ranking that the validation images have no say in."""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
import torch
from refusals import refused
from small_models import command, save_small_encoder

from dino_sparo import create_encoder
from dino_sparo.data.samplers import ShardSampler
from dino_sparo.evaluation.features import Features, load_features
from dino_sparo.evaluation.linear.probe import LinearProbe, ProbeRun, ProbeSGD, cached_batches
from dino_sparo.evaluation.slots.choice import KeptSlots, SlotSelection, open_selection
from dino_sparo.evaluation.slots.command import (
    StudyImages,
    accuracy_curve,
    choosing_rows,
    describe,
    kept_numbers,
    knn_accuracies,
    probe_slots,
    random_orders,
    rank_slots,
    slot_columns,
    spread,
    table,
)
from dino_sparo.evaluation.slots.options import slot_study_parser
from dino_sparo.evaluation.task import EncoderTask
from dino_sparo.runtime.files import file_sha256
from dino_sparo.runtime.launch import shutdown

SLOTS, SLOT_DIM = 5, 3
ON_CPU = ("--device", "cpu", "--num_workers", 0, "--batch_size_per_gpu", 16)
SCENES = ("--data_path", "scenes:40:24", *ON_CPU)
STUDY = (*SCENES, "--numbers", 2, "--draws", 2, "--nb_knn", 3, "--probe", "--epochs", 1, "--lr", 0.1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder with slots."""
    return save_small_encoder(tmp_path_factory.mktemp("run") / "checkpoint.pth")


@pytest.fixture(scope="module")
def study(checkpoint: Path) -> dict[str, Any]:
    """The study of that encoder, with probes."""
    return command("slots study", "--pretrained_weights", checkpoint, *STUDY)


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    yield
    shutdown()


def knn_of(checkpoint: Path, slots: object, *words: object) -> dict[str, Any]:
    options = (*SCENES, "--nb_knn", 3, "--slots", slots, "--overwrite", *words)
    return command("knn", "--pretrained_weights", checkpoint, *options)


# --- the choice


def test_an_encoder_with_chosen_slots_gives_their_values_alone() -> None:
    torch.manual_seed(0)
    encoder = create_encoder("vit_micro", 8, "sparo", num_slots=SLOTS, slot_dim=SLOT_DIM, key_dim=2, img_size=16).eval()
    kept = KeptSlots(encoder.readout, (4, 0), SLOT_DIM)
    tokens = torch.randn(2, 7, 128)
    whole, some = encoder.readout(tokens), kept(tokens)
    assert torch.equal(some.slots, torch.stack([whole.slots[:, 4], whole.slots[:, 0]], dim=1))
    assert torch.equal(some.attention, torch.stack([whole.attention[:, 4], whole.attention[:, 0]], dim=1))
    assert kept.encoding_dim == 2 * SLOT_DIM


def test_slots_are_named_by_numbers_or_by_a_file_of_select(tmp_path: Path) -> None:
    assert open_selection("0,3,7", None, 8) == open_selection("0, 3, 7", None, 8)
    assert open_selection("0,3,7", None, 8)[0] == SlotSelection((0, 3, 7))
    path = tmp_path / "slots.json"
    path.write_text(json.dumps(SlotSelection((3, 0), 5, "ab").to_dict()))
    assert open_selection(str(path), "ab", 5)[0] == SlotSelection((3, 0), 5, "ab")


@pytest.mark.parametrize(
    ("text", "content", "message"),
    [
        ("1,x", None, "slots='1,x' does not exist; give a file of dino-sparo slots, or numbers"),
        ("slots.json", '{"mask": [0.5]}', r"slots\.json is a mask; give .* Masks are for evaluations of a CLIP"),
    ],
)
def test_what_is_no_selection_is_refused(text: str, content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / text).write_text(content)
    with pytest.raises(ValueError, match=message):
        open_selection(text if content is None else str(tmp_path / text), None, 5)


def test_slots_that_the_encoder_does_not_have_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    other = tmp_path / "slots.json"
    other.write_text(json.dumps(SlotSelection((0,), SLOTS, "0" * 64).to_dict()))
    for slots, message in (
        (f"0,{SLOTS}", f"slot {SLOTS}, which does not exist"),
        (other, "slots of different trainings"),
    ):
        with refused(message):
            knn_of(checkpoint, slots)


def test_encoders_without_slots_are_refused_before_the_images_are_opened(tmp_path: Path) -> None:
    weights = ("--pretrained_weights", save_small_encoder(tmp_path / "checkpoint.pth", "gap"), "--data_path", "nowhere")
    for words in (("slots study", *weights), ("knn", *weights, "--slots", "0"), ("linear", *weights, "--slots", "0")):
        with refused("readout 'gap' has no slots to choose among"):
            command(*words, *ON_CPU)


def test_results_of_some_slots_stand_beside_those_of_all(checkpoint: Path, tmp_path: Path) -> None:
    folder = ("--output_dir", tmp_path)
    cache = ("--dump_features", tmp_path / "cache")
    result = knn_of(checkpoint, "1,4", *folder, *cache)
    (file,) = tmp_path.glob("knn_*_checkpoint_scenes-40-24_slots_1-4.json")
    assert json.loads(file.read_text()) == result
    assert result["feature"]["dim"] == 2 * SLOT_DIM
    assert result["encoder"]["slots"] == {"kind": "selection", "slots": [1, 4]}
    for part in load_features(tmp_path / "cache")[:2]:
        torch.testing.assert_close(part.features.norm(dim=1), torch.ones(40))
    cached = command("knn", "--load_features", tmp_path / "cache", "--nb_knn", 3, *folder, *ON_CPU)
    assert {**cached, "options": None} == {**result, "options": None}
    assert (tmp_path / "knn_scenes-40-24_slots.json").is_file()


def test_probes_of_some_slots_see_fewer_features_and_are_not_continued_with_others(
    checkpoint: Path, tmp_path: Path
) -> None:
    words = ("--pretrained_weights", checkpoint, *SCENES, "--output_dir", tmp_path)
    words += ("--fast", "--epochs", 1, "--lr", 0.1)
    result = command("linear", *words, "--n_last_blocks", 2, "--slots", "0,3")
    assert result["feature"]["dim"] == 128 + 2 * SLOT_DIM
    (file,) = tmp_path.glob("linear_*_checkpoint_scenes-40-24_slots_0-3.json")
    assert json.loads(file.read_text()) == result
    command("linear", *words, "--n_last_blocks", 2, "--slots", "0,4")
    assert len([*tmp_path.glob("linear_*_slots_0-?.json")]) == 2


# --- the study


def test_the_study_finds_the_bits_of_eval_knn_with_the_same_slots(
    study: dict[str, Any], checkpoint: Path, tmp_path: Path
) -> None:
    order = [row["slot"] for row in study["ranking"]]
    assert sorted(order) == list(range(SLOTS))
    best, two = study["ranking"][0], study["curve"][0]
    for slots, top1 in (([best["slot"]], best["top1_held_out"]), (order[:2], two["top1_held_out"])):
        chosen = ",".join(map(str, sorted(slots)))
        assert knn_of(checkpoint, chosen, "--output_dir", tmp_path)["results"][0]["top1"] == top1
    whole = command("knn", "--pretrained_weights", checkpoint, *SCENES, "--nb_knn", 3, "--output_dir", tmp_path)
    assert whole["results"][0]["top1"] == study["top1_all"] == study["curve"][-1]["top1_held_out"]


def test_the_studys_file_is_a_choice_of_slots(study: dict[str, Any], checkpoint: Path, tmp_path: Path) -> None:
    path = checkpoint.with_name("slot_study_checkpoint_scenes-40-24.json")
    assert json.loads(path.read_text()) == study
    result = knn_of(checkpoint, path, "--output_dir", tmp_path)
    assert result["results"][0]["top1"] == study["top1_selected"]
    origin = {"path": str(path), "sha256": file_sha256(path)}
    assert result["encoder"]["slots"] == {**origin, "kind": "selection", "slots": study["slots"]}
    assert matplotlib.image.imread(path.with_suffix(".png")).shape[2] >= 3


def test_the_study_says_what_it_measured(study: dict[str, Any]) -> None:
    assert [row["num_kept"] for row in study["curve"]] == [2, 5]
    assert [row["num_kept"] for row in study["probe"]["curve"]] == [2, 5]
    images = study["images"]
    assert (images["num_train"], images["num_val"], images["num_choosing"]) == (40, 40, 8)
    alone = [row["top1_choosing"] for row in study["ranking"]]
    assert alone == sorted(alone, reverse=True)
    for row in study["curve"]:
        assert len(row["random"]["draws"]) == 2
        assert 0 <= row["random"]["mean"] <= 100
    last = study["curve"][-1]
    assert last["random"]["draws"] == [last["top1_held_out"]] * 2  # all slots are all slots, in any order


def test_the_table_shows_the_curve_on_held_out_images(study: dict[str, Any]) -> None:
    curve = [{**row, "top1_held_out": 12.25, "top1_choosing": 87.5} for row in study["curve"]]
    lines = [line.split()[:2] for line in table({**study, "curve": curve}).splitlines()]
    assert ["2", "12.25"] in lines


def test_the_choosing_images_are_the_same_for_any_number_of_processes() -> None:
    def share(rank: int, world_size: int) -> torch.Tensor:
        indices = torch.tensor([index for batch in ShardSampler(61, 7, rank, world_size) for index in batch])
        features = Features(torch.zeros(len(indices), 2), torch.zeros(len(indices)).long(), indices)
        return choosing_rows(features, 61, 1000, seed=3)

    whole = share(0, 1)
    assert int(whole.sum()) == 61 // 5
    assert torch.equal(torch.cat([share(rank, 3) for rank in range(3)]), whole)
    with pytest.raises(ValueError, match="choosing_images=0 of 61 images"):
        choosing_rows(Features(torch.zeros(1, 2), torch.zeros(1).long(), torch.zeros(1).long()), 61, 0, seed=3)


def test_random_orders_are_seeded_and_differ() -> None:
    orders = random_orders(11, 3, seed=1)
    assert all(sorted(order) == list(range(11)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    assert orders == random_orders(11, 3, seed=1) != random_orders(11, 3, seed=2)
    assert spread([1.0, 3.0]) == {"mean": 2.0, "std": pytest.approx(2**0.5), "draws": [1.0, 3.0]}
    assert spread([1.0])["std"] is None


def test_numbers_of_slots_are_checked() -> None:
    assert kept_numbers(None, None, 16) == [1, 2, 4, 8, 16]
    assert kept_numbers(None, 3, 5) == [1, 2, 3, 4, 5]
    assert kept_numbers([7, 3], None, 11) == [3, 7, 11]
    with pytest.raises(ValueError, match="keep=12 of num_slots=11"):
        kept_numbers(None, 12, 11)
    with pytest.raises(ValueError, match="numbers=0 of num_slots=11"):
        kept_numbers([0], None, 11)


# --- slots whose knowledge is known

CLASSES, NOTHING, PARITY, ALL, TRAIN_ONLY = 4, 0, 1, 2, 3  # what the slots of `images_of_known_slots` know


def images_of_known_slots(val_shift: int = 0) -> StudyImages:
    """Slots of three numbers: noise; the parity of the class; the class; the class, of training images alone.

    Args:
        val_shift: added to the labels of the validation images.
    """
    generator = torch.Generator().manual_seed(0)

    def features(number: int, knows_all: bool, shift: int = 0) -> Features:
        labels = torch.arange(number) % CLASSES
        corners = torch.tensor([[1.0, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]])  # equally far from each other
        values = 0.2 * torch.randn(number, 4, 3, generator=generator)
        values[:, NOTHING] *= 5
        values[:, PARITY] += corners[labels % 2]
        values[:, ALL] += corners[labels]
        values[:, TRAIN_ONLY] += corners[
            labels if knows_all else torch.randint(CLASSES, (number,), generator=generator)
        ]
        return Features(values.flatten(1), (labels + shift) % CLASSES, torch.arange(number))

    train = features(400, knows_all=True)
    chooses = choosing_rows(train, 400, 80, seed=0)
    return StudyImages(train, features(200, False, val_shift), chooses, 4, CLASSES, torch.device("cpu"))


def test_slots_are_ranked_by_what_the_choosing_images_show_of_them() -> None:
    ranked = rank_slots(knn_accuracies(images_of_known_slots(), 5, 0.07), 4)
    assert [row["slot"] for row in ranked] == [ALL, TRAIN_ONLY, PARITY, NOTHING]
    choosing = {row["slot"]: row["top1_choosing"] for row in ranked}
    held_out = {row["slot"]: row["top1_held_out"] for row in ranked}
    assert choosing[ALL] == held_out[ALL] == choosing[TRAIN_ONLY] == 100
    assert choosing[PARITY] == pytest.approx(50, abs=15)
    assert held_out[TRAIN_ONLY] == pytest.approx(25, abs=10)
    assert held_out[NOTHING] == pytest.approx(25, abs=10)
    shifted = rank_slots(knn_accuracies(images_of_known_slots(val_shift=1), 5, 0.07), 4)
    assert [{**row, "top1_held_out": None} for row in shifted] == [{**row, "top1_held_out": None} for row in ranked]
    assert next(row["top1_held_out"] for row in shifted if row["slot"] == ALL) == 0


def test_the_choosing_images_choose_how_many_slots_are_kept(checkpoint: Path) -> None:
    options = slot_study_parser().parse_args(["--pretrained_weights", str(checkpoint)])
    curve = [
        {"num_kept": number, "top1_choosing": choosing, "top1_held_out": held_out}
        for number, choosing, held_out in ((1, 30.0, 50.0), (2, 40.0, 20.0), (3, 40.0, 60.0))
    ]
    ranking = [{"slot": slot} for slot in (2, 0, 1)]
    result = describe(EncoderTask(options, torch.device("cpu")), ranking, curve, None)
    assert (result["slots"], result["top1_selected"]) == ([0, 2], 20.0)


def test_probes_are_not_trained_on_the_images_that_choose() -> None:
    images, settings = images_of_known_slots(), {"epochs": 3, "learning_rates": (1.0,)}
    labels = torch.where(images.chooses, (images.train.labels + 1) % CLASSES, images.train.labels)
    spoilt = replace(images, train=replace(images.train, labels=labels))
    of_both = [probe_slots(one, [PARITY], **settings) for one in (images, spoilt)]
    assert of_both[0]["top1_held_out"] == of_both[1]["top1_held_out"]
    assert of_both[0]["top1_choosing"] != of_both[1]["top1_choosing"]


def test_a_probe_of_few_images_is_that_of_the_linear_evaluation() -> None:
    images, settings = images_of_known_slots(), {"epochs": 3, "learning_rates": (0.3,), "seed": 2}
    few = replace(images, chooses=images.chooses | (torch.arange(400) >= 100))
    slots = [NOTHING, PARITY]
    train = slot_columns(few.train, slots, few.num_slots, ~few.chooses)
    probe = LinearProbe(6, CLASSES, 1, seed=2)
    run = ProbeRun(probe, ProbeSGD(probe, (0.3,)), (0.3,), 3, {})
    batches = cached_batches(train, few.device, batch_size=256, seed=2)
    run.train(batches, slot_columns(few.val, slots, few.num_slots))
    assert len(train.features) < 100
    assert probe_slots(few, slots, **settings)["top1_held_out"] == run.table()[0]["top1"]


def test_probes_learn_what_the_slots_know_and_the_validation_images_choose_nothing() -> None:
    images, settings = images_of_known_slots(), {"epochs": 10, "learning_rates": (1e-6, 1.0)}
    knows_all, knows_parity = probe_slots(images, [ALL], **settings), probe_slots(images, [PARITY], **settings)
    assert knows_all == {"lr": 1.0, "top1_choosing": 100, "top1_held_out": 100}
    assert knows_parity["top1_held_out"] == pytest.approx(50, abs=10)
    shifted = probe_slots(images_of_known_slots(val_shift=1), [ALL], **settings)
    assert shifted == {**knows_all, "top1_held_out": 0}
    (row,) = accuracy_curve(
        partial(probe_slots, images, **settings), [[ALL, PARITY], [PARITY, ALL], [ALL, PARITY]], [1]
    )
    assert row == {"num_kept": 1, **knows_all, "random": spread([knows_parity["top1_held_out"], 100.0])}
