"""A choice among slots: selections and masks, the models they make, and their files."""

import copy
import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("open_clip")

import clip_fakes
from clip_fakes import small_checkpoint

from dino_sparo.clip import CLIP, load_clip, normalize_slots, tokenize
from dino_sparo.clip.slots.subsets import ReducedClip, check_normalized_per_slot, open_slots
from dino_sparo.evaluation.slots.choice import SlotMask, SlotSelection, parse_slots

SLOTS, WIDTH = 5, 7


small_clip = partial(clip_fakes.small_clip, embed_dim=12, vocab_size=49408, context_length=11)  # 4 parts without slots


@pytest.fixture(scope="module")
def model() -> CLIP:
    return small_clip()


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def token_ids() -> torch.Tensor:
    return tokenize(["a red star", "two rings on sand"], 11).ids


# --- selections


@torch.no_grad()
def test_features_are_the_kept_slots_over_the_root_of_their_number(model, images, token_ids):
    chosen = ReducedClip(model, SlotSelection((1, 3)))
    slots = model.image_output(images).slots
    expected = torch.cat([slots[:, slot] / slots[:, slot].norm(dim=1, keepdim=True) for slot in (1, 3)], 1)
    torch.testing.assert_close(chosen.encode_image(images), expected / math.sqrt(2))
    torch.testing.assert_close(chosen.encode_image(images).norm(dim=1), torch.ones(3))
    slots = model.text_output(token_ids).slots[:, [1, 3]]
    torch.testing.assert_close(chosen.encode_text(token_ids), normalize_slots(slots))
    assert chosen.encode_image(images).shape == (3, chosen.encoding_dim) == (3, 2 * WIDTH)


@torch.no_grad()
def test_all_slots_are_the_model(model, images, token_ids):
    chosen = ReducedClip(model, SlotSelection(tuple(range(SLOTS)), SLOTS))
    torch.testing.assert_close(chosen.encode_image(images), model.encode_image(images), rtol=0, atol=0)
    torch.testing.assert_close(chosen.encode_text(token_ids), model.encode_text(token_ids), rtol=0, atol=0)


@pytest.mark.parametrize("choice", [SlotSelection((1, 2)), SlotMask((0.5,) * SLOTS)])
@torch.no_grad()
def test_evaluations_take_the_reduced_model_as_a_model(model, choice, images, token_ids):
    chosen = ReducedClip(model, choice)
    for features in (chosen.encode_image(images), chosen.encode_text(token_ids)):
        assert torch.allclose(features.norm(dim=1), torch.ones(len(features)))
    assert chosen.config is model.config
    moved = copy.deepcopy(chosen).to("meta")
    assert all(value.is_meta for value in (*moved.parameters(), *moved.buffers()))


# --- masks


@torch.no_grad()
@pytest.mark.parametrize("readout", ["sparo", "gap"])
@pytest.mark.parametrize("per_dimension", [False, True])
def test_masked_similarities_follow_the_equation(readout, per_dimension, images, token_ids):
    """Parts of `gap`, which has no slots, are contiguous and equal."""
    network = small_clip(readout)
    width = network.config.embed_dim
    parts = width if per_dimension else {"sparo": SLOTS, "gap": 4}[readout]
    values = torch.rand(parts, generator=torch.Generator().manual_seed(2)).tolist()
    masked = ReducedClip(network, SlotMask(tuple(values), width))
    found = masked.encode_image(images) @ masked.encode_text(token_ids).t()
    for i, image in enumerate(network.encode_image(images).tolist()):
        weighed = [value * values[place * parts // width] for place, value in enumerate(image)]
        for c, caption in enumerate(network.encode_text(token_ids).tolist()):
            dot = sum(a * b for a, b in zip(weighed, caption, strict=True))
            lengths = math.hypot(*weighed) * math.hypot(*caption)
            assert float(found[i, c]) == pytest.approx(dot / lengths, abs=1e-5)


# --- files


CHOICES = (
    *(SlotSelection((4, 1), 5, "abc"), SlotSelection((2,))),
    *(SlotMask((0.1, 0.25), 6, "abc"), SlotMask((1.0, 0.0, 1e-30))),
)
BY_HAND = [({"slots": [3, 0]}, SlotSelection((3, 0))), ({"mask": [1, 0, 1]}, SlotMask((1.0, 0.0, 1.0)))]


@pytest.mark.parametrize(("content", "choice"), [*((choice.to_dict(), choice) for choice in CHOICES), *BY_HAND])
def test_a_choice_comes_back_from_its_file_and_may_be_written_by_hand(content, choice, tmp_path):
    path = tmp_path / "slots.json"
    path.write_text(json.dumps({**content, "evaluation": "whatever"}))
    assert parse_slots(str(path)) == choice


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "is not valid JSON"),
        ("[1, 2]", "is not a JSON object"),
        ('{"slots": [1.5]}', "is not a choice of slots"),
        ('{"slots": [true]}', "is not a choice of slots"),
        ('{"mask": ["a"]}', "is not a choice of slots"),
        ('{"slots": []}', "keeps no slot"),
        ('{"slots": [1, 2, 1]}', "slot 1 twice"),
        ('{"slots": [1, 5], "num_slots": 5}', "slot 5, which does not exist: the model has num_slots=5"),
        ('{"slots": [-1], "num_slots": 5}', "slot -1, which does not exist"),
        ('{"slots": [1], "num_slots": "5"}', "slots.json: "),
        ('{"mask": [0.5, 1.5]}', r"mask holds 1.5; give weights in \[0, 1\]"),
        ('{"mask": [NaN]}', "mask holds nan"),
        ('{"mask": [0, 0]}', "no weight above 0"),
        ('{"mask": [0.5, 0.5, 0.5], "encoding_dim": 8}', "3 parts, which do not divide an encoding of 8"),
    ],
)
def test_files_that_are_no_choice_are_refused(text, message, tmp_path):
    (tmp_path / "slots.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        parse_slots(str(tmp_path / "slots.json"))


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (SlotSelection((0, 7)), "slot 7, which does not exist: the model has num_slots=5"),
        (SlotSelection((0,), 8), "among num_slots=8, the model has 5"),
        (SlotMask((0.5,) * 3), "3 parts, which do not divide an encoding of 35 numbers"),
        (SlotMask((0.5,) * 3, 48), "for encodings of 48 numbers, the model's have 35"),
    ],
)
def test_a_choice_that_does_not_fit_the_model_is_refused(choice, message, model):
    with pytest.raises(ValueError, match=message):
        ReducedClip(model, choice)


@pytest.mark.parametrize("readout", ["gap", "cls", "attpool"])
def test_models_without_slots_cannot_keep_some(readout):
    network = small_clip(readout)
    with pytest.raises(ValueError, match=f"readout '{readout}' has no slots to choose among"):
        ReducedClip(network, SlotSelection((0,)))
    check_normalized_per_slot(small_clip("separate_slotnorm_slotproj").config)


def test_a_checkpoint_is_opened_with_its_choice_and_no_other(tmp_path: Path):
    loaded = load_clip(small_checkpoint(tmp_path / "checkpoint.pth"))
    assert open_slots(None, loaded) == (loaded.model, None)
    path = tmp_path / "slots.json"
    path.write_text(json.dumps(SlotSelection((1, 4), 5, loaded.record["sha256"]).to_dict()))
    chosen, said = open_slots(path, loaded)
    assert chosen.encoding_dim == 2 * WIDTH
    assert (said["kind"], said["slots"], said["num_slots"], len(said["sha256"])) == ("selection", [1, 4], 5, 64)
    path.write_text(json.dumps(SlotMask((0.5, 1.0, 0.0, 0.5, 0.5), 35, loaded.record["sha256"]).to_dict()))
    _, said = open_slots(path, loaded)
    assert (said["kind"], said["num_parts"], said["mean_weight"]) == ("mask", 5, 0.5)
    path.write_text(json.dumps(SlotSelection((1, 4), 5, "0" * 64).to_dict()))
    with pytest.raises(ValueError, match="of a checkpoint with SHA-256 0000"):
        open_slots(path, loaded)
