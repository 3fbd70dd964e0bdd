"""What slots attend to: words and their shares, looks at pairs, and the choice of slots and pairs."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("open_clip")

from clip_fakes import small_checkpoint

from dino_sparo.clip import load_clip, tokenize
from dino_sparo.clip.slots.concepts import (
    Choice,
    Criteria,
    PairAttention,
    Word,
    caption_words,
    choose,
    choose_pairs,
    fits,
    see_pairs,
    word_shares,
)
from dino_sparo.data.views import PatchView
from dino_sparo.image_text.pairs.sources import open_pairs

SLOTS = 5


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_checkpoint(tmp_path_factory.mktemp("concepts") / "checkpoint.pth")


# --- words


@pytest.mark.parametrize(
    ("caption", "expected"),
    [
        ("A Red star", "A Red star"),
        ("two  dogs,\n one cat!", "two dogs , one cat !"),
        ("the man's hat", "the man 's hat"),
        ("unbelievably red-striped", "unbelievably red - striped"),
        ("Größe, naïve 日本", "Größe , naïve 日本"),
        ("salt &amp; pepper", "salt & pepper"),
    ],
)
def test_pieces_become_words_as_written(caption, expected):
    words = caption_words(caption, tokenize([caption]).ids[0])
    assert " ".join(word.text for word in words) == expected
    written = "".join((" " if word.has_space else "") + word.text for word in words)
    assert written == " ".join(caption.replace("&amp;", "&").split())


def test_words_cover_all_tokens_between_start_and_end():
    ids = tokenize(["Größe of an unbelievable cat"], 20).ids[0]
    words = caption_words("Größe of an unbelievable cat", ids)
    assert words[0].end - words[0].first > 1  # several pieces
    assert words[0].first == 1
    assert words[-1].end == int(ids.argmax())
    assert all(before.end == after.first for before, after in itertools.pairwise(words))


def test_of_a_caption_that_was_cut_off_the_words_before_the_cut_remain():
    caption = "a red star on grass"
    words = caption_words(caption, tokenize([caption], 5).ids[0])
    assert [word.text for word in words] == ["a", "red", "star"]


def test_text_that_the_tokenizer_changed_is_shown_as_it_read_it():
    caption = "ﬁne ﬂowers"  # ligatures, which it may take apart
    words = caption_words(caption, tokenize([caption]).ids[0])
    assert "".join(word.text for word in words) in ("fineflowers", "ﬁneﬂowers")
    assert words[-1].end == int(tokenize([caption]).ids[0].argmax())


def test_shares_are_sums_over_a_words_tokens_and_sum_to_one():
    ids = tokenize(["Größe of cats"], 13).ids[0]
    words = caption_words("Größe of cats", ids)
    end = int(ids.argmax())
    attention = np.zeros((3, 13), dtype=np.float32)
    attention[:, : end + 1] = np.random.default_rng(0).dirichlet(np.ones(end + 1), size=3)
    found = word_shares(attention, words)
    for slot in range(3):
        for place, word in enumerate(words):
            expected = sum(float(attention[slot, token]) for token in range(word.first, word.end))
            assert found[slot, place] == pytest.approx(expected)
    np.testing.assert_allclose(found.sum(axis=1) + attention[:, 0] + attention[:, end], 1, rtol=1e-5)


# --- looks


def test_a_look_is_what_the_model_attends_to(weights):
    loaded = load_clip(weights)
    source = open_pairs("scenes:19:48", default_split="val")
    view = PatchView([32], 8, loaded.mean, loaded.std)
    looks = see_pairs(loaded.model, source, view, torch.device("cpu"), max_pairs=18)
    assert len(looks) == 18
    look = looks[17]
    caption = source.captions_of(look.index)[0]
    assert look.caption == caption
    with torch.no_grad():
        image = loaded.model.image_output(view(source.read(look.index))[0][None])
        text = loaded.model.text_output(tokenize([caption]).ids)
    np.testing.assert_allclose(look.maps.reshape(SLOTS, -1), image.attention[0, :, 1:], rtol=1e-4, atol=1e-6)
    cosines = F.cosine_similarity(image.slots, text.slots, dim=-1)[0]
    np.testing.assert_allclose(look.cosines, cosines, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(look.start, text.attention[0, :, 0], rtol=1e-4, atol=1e-6)
    assert look.maps.shape == (SLOTS, 4, 4)
    assert look.word_shares.shape == (SLOTS, len(caption.split()))


# --- the choice


def look(shares: list[list[float]], cosines: list[float]) -> PairAttention:
    """A pair on which slot l gives `shares[l]` to the words and the rest to the end token."""
    words = [Word(f"w{place}", place > 0, place + 1, place + 2) for place in range(len(shares[0]))]
    given = np.array(shares)
    maps, start, end = np.ones((len(given), 2, 3)) / 6, np.zeros(len(given)), 1 - given.sum(axis=1)
    return PairAttention(0, "image.png", "", words, maps, given, start, end, np.array(cosines))


# Slots: 0 sharp on w0; 1 sharp on w0, sharper; 2 sharp on w1; 3 spread; 4 sharp on w2, with a low cosine.
SHARES = [[0.6, 0.1, 0.0], [0.9, 0.0, 0.0], [0.1, 0.8, 0.0], [0.3, 0.3, 0.3], [0.0, 0.0, 0.9]]
COSINES = [0.8, 0.9, 0.8, 0.9, 0.7]


def test_criteria_are_a_greater_cosine_and_a_word_with_much_of_the_attention():
    found = fits([look([[0.5, 0.2], [0.49, 0.2], [0.5, 0.5]], [0.76, 0.9, 0.75])], Criteria())
    assert found.tolist() == [[True, False, False]]


def test_the_words_attended_to_are_the_fewest_with_half_of_what_words_get():
    found = look([[0.2, 0.1, 0.05], [0.1, 0.3, 0.3], [0.0, 0.0, 0.0]], [0.0] * 3)
    assert found.focus.tolist() == [[True, False, False], [False, True, True], [False] * 3]
    assert found.sharpness.tolist() == [0.2, 0.3, 0.0]


def test_slots_are_sharp_alike_and_attend_to_different_words():
    looks = [look(SHARES, COSINES) for _ in range(3)]
    found = choose(looks, num_slots=2, num_pairs=3, criteria=Criteria())
    assert found == Choice(slots=[1, 2], pairs=[0, 1, 2], num_fitting=2, num_common=3)


def test_what_is_missing_is_filled_up_by_what_comes_nearest():
    looks = [look(SHARES, COSINES) for _ in range(3)]
    found = choose(looks, num_slots=3, num_pairs=3, criteria=Criteria())
    assert (found.slots, found.num_fitting) == ([1, 2, 4], 2)  # 4 lacks a little cosine; 0 and 3 share a word
    everything = choose(looks, num_slots=9, num_pairs=3, criteria=Criteria())
    assert sorted(everything.slots) == [0, 1, 2, 3, 4]
    assert choose(looks, 2, 3, Criteria(min_cosine=0.99)).num_fitting == 0


def test_a_slot_that_fits_more_pairs_comes_first_and_pairs_where_all_fit_are_shown():
    good, poor = look(SHARES, COSINES), look(SHARES, [0.8, 0.1, 0.8, 0.9, 0.7])
    sharper = look([SHARES[0], SHARES[1], [0.0, 0.95, 0.0], *SHARES[3:]], [0.9, 0.1, 0.9, 0.1, 0.1])
    found = choose([poor, good, poor, sharper], num_slots=2, num_pairs=3, criteria=Criteria())
    assert found.slots[0] == 2  # fits 4 pairs as slot 0 does, and is sharper; slot 1 fits one alone
    assert found.slots[1] == 0
    assert (found.num_fitting, found.num_common) == (2, 4)
    assert found.pairs == [3, 0, 1]  # best first, of equals the first


def test_pairs_that_all_have_a_place_stay_in_order():
    looks = [look(SHARES, COSINES), look(SHARES, [0.9] * 5), look(SHARES, [0.1] * 5)]
    preferred = np.array([True, False, True])
    assert choose_pairs(looks, [1], 3, preferred) == [0, 1, 2]
    assert choose_pairs(looks, [1], 2, preferred) == [0, 2]
    assert choose_pairs(looks, [1], 2, np.ones(3, dtype=bool)) == [0, 1]
