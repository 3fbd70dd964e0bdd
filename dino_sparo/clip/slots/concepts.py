"""Pairs of image and caption -> the attention of each slot to both, and the slots and pairs that are worth a picture.

Everything here is numbers. `fits` measures what the paper asks of a slot that is shown. The paper shows examples, so
the choice of several slots and pairs together is ours. Source: SPARO, section 5.5.

The tokenizer cuts words into pieces and marks the last piece of each; a word is what lies between two marks. Its words
are those of the caption as written, but punctuation stands alone, and so do endings after an apostrophe.

h, w are rows and columns of the patch grid.
"""

import html
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress, islice
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn import functional as F

from dino_sparo.clip.model import CLIP
from dino_sparo.clip.options import Criteria
from dino_sparo.data.sources.image_source import spread_out
from dino_sparo.data.views import PatchView
from dino_sparo.evaluation.attention.maps import mass_mask
from dino_sparo.image_text.pairs.batches import PairSource
from dino_sparo.image_text.picture_pairs import view_pairs
from dino_sparo.image_text.towers import simple_tokenizer

logger = logging.getLogger(__name__)

FOCUS_SHARE = 0.5  # of a slot's attention on words: the fewest words that hold it are those it attends to
BATCH_SIZE = 16
END_OF_WORD = "</w>"


class Word(NamedTuple):
    """A word of a caption.

    Attributes:
        text: as the caption has it; where the tokenizer changed more than its case, as the tokenizer has it.
        has_space: whether a space precedes it.
        first: place of its first token; the start token is 0.
        end: place after its last token.
    """

    text: str
    has_space: bool
    first: int
    end: int


@dataclass(frozen=True)
class PairAttention:
    """Attention of a model to image and caption of one pair.

    Attributes:
        index: place in the source.
        name: where the image lies.
        caption: in words.
        words: those that the model sees.
        maps: (L, h, w), attention over the patches; the rest is the class token's.
        word_shares: (L, words), attention over the words; the rest is that of start and end token.
        start: (L,), attention to the caption's start token.
        end: (L,), attention to its end token.
        cosines: (L,), of slot l of the image and slot l of the caption.
    """

    index: int
    name: str
    caption: str
    words: list[Word]
    maps: Float[np.ndarray, "L h w"]
    word_shares: Float[np.ndarray, "L words"]
    start: Float[np.ndarray, " L"]
    end: Float[np.ndarray, " L"]
    cosines: Float[np.ndarray, " L"]

    def shares(self, slot: int) -> list[tuple[Word, float]]:
        """Each word, and its share of a slot's attention."""
        return list(zip(self.words, self.word_shares[slot].tolist(), strict=True))

    @property
    def sharpness(self) -> Float[np.ndarray, " L"]:
        """The largest attention share of any word."""
        return self.word_shares.max(axis=1, initial=0.0)

    @property
    def focus(self) -> Bool[np.ndarray, "L words"]:
        """The words that a slot attends to: the smallest set that gets half of the slot's attention to words."""
        return np.stack([mass_mask(shares[None], FOCUS_SHARE)[0] for shares in self.word_shares])


class Choice(NamedTuple):
    """Slots and pairs to show.

    Attributes:
        slots: numbers of slots, one row each.
        pairs: places among the pairs that were seen, one column each.
        num_fitting: slots, from the first, that meet the criteria in `num_common` pairs at once.
        num_common: those pairs.
    """

    slots: list[int]
    pairs: list[int]
    num_fitting: int
    num_common: int


@torch.no_grad()
def see_pairs(
    model: CLIP, source: PairSource, view: PatchView, device: torch.device, max_pairs: int
) -> list[PairAttention]:
    """Run a model over at most `max_pairs` pairs, evenly spread over the source; unreadable pairs are skipped.

    Of several captions of an image the first is taken.
    """
    results: list[PairAttention] = []
    num_truncated = 0
    pairs = view_pairs(source, spread_out(source, max_pairs), view)
    while batch := list(islice(pairs, BATCH_SIZE)):
        tokens = model.text.tokenize([pair.caption for pair in batch])
        num_truncated += tokens.num_truncated
        columns = see(model, torch.stack([pair.image for pair in batch]), tokens.ids, device)
        for pair, ids, maps, attention, cosines in zip(batch, tokens.ids, *columns, strict=True):
            words = caption_words(pair.caption, ids)
            start, end = attention[:, 0], attention[:, int(ids.argmax())]
            shares = word_shares(attention, words)
            results.append(PairAttention(pair.index, pair.name, pair.caption, words, maps, shares, start, end, cosines))
    if num_truncated:
        logger.warning("%s: %d captions are longer than the context and cut off", source.name, num_truncated)
    return results


def see(
    model: CLIP, images: Float[Tensor, "B C H W"], token_ids: Int64[Tensor, "U N"], device: torch.device
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Maps (B, L, h, w), attention over the tokens of U captions (U, L, N), and the slots' cosines (U, L).

    Caption i belongs to image i, or all captions to a single image.
    """
    image, text = model.image_output(images.to(device)), model.text_output(token_ids.to(device))
    backbone = model.image.backbone
    maps = image.attention[:, :, backbone.num_prefix_tokens :].unflatten(-1, backbone.grid(images))
    cosines = F.cosine_similarity(image.slots.float(), text.slots.float(), dim=-1)
    return maps.float().cpu().numpy(), text.attention.float().cpu().numpy(), cosines.cpu().numpy()


def fits(pairs: Sequence[PairAttention], criteria: Criteria) -> Bool[np.ndarray, "pairs L"]:
    """Whether each slot of each pair meets the criteria, regardless of all other slots."""
    cosines, sharpness = _stacked(pairs)
    return (cosines > criteria.min_cosine) & (sharpness >= criteria.min_sharpness)


def _stacked(pairs: Sequence[PairAttention]) -> tuple[Float[np.ndarray, "pairs L"], Float[np.ndarray, "pairs L"]]:
    """Cosines and sharpness of all pairs."""
    return np.stack([pair.cosines for pair in pairs]), np.stack([pair.sharpness for pair in pairs])


def choose(pairs: Sequence[PairAttention], num_slots: int, num_pairs: int, criteria: Criteria) -> Choice:
    """The slots and pairs to show: slots with sharp attention to different words, whose cosines are high.

    First `fitting_slots`; if these are too few, also `nearest_slots`, by nearness to the criteria in the pairs in which
    all fitting slots meet them:

        nearness = min(1, cosine / min_cosine) * min(1, sharpness / min_sharpness)

    For the pairs see `choose_pairs`.
    """
    cosines, sharpness = _stacked(pairs)
    focus = [pair.focus for pair in pairs]
    num_slots = min(num_slots, cosines.shape[1])
    fitting, common = fitting_slots(fits(pairs, criteria), sharpness, focus, num_slots, min(num_pairs, len(pairs)))
    nearness = np.clip(cosines / criteria.min_cosine, 0, 1) * np.minimum(1, sharpness / criteria.min_sharpness)
    slots = nearest_slots(fitting, nearness[common], list(compress(focus, common)), num_slots)
    chosen = choose_pairs(pairs, slots, num_pairs, common)
    return Choice(slots, chosen, len(fitting), int(common.sum()) if fitting else 0)


def fitting_slots(
    meets: Bool[np.ndarray, "pairs L"],
    sharpness: Float[np.ndarray, "pairs L"],
    focus: Sequence[Bool[np.ndarray, "L _"]],
    num_slots: int,
    num_pairs: int,
) -> tuple[list[int], Bool[np.ndarray, " pairs"]]:
    """At most `num_slots` slots that meet the criteria in at least `num_pairs` pairs at once, by a greedy choice.

    The next slot is the one that meets the criteria in most of the pairs in which all slots before it meet them,
    without attending to a word that a slot before it attends to; among equals the sharper one.

    Returns:
        The slots, and whether all of them meet the criteria in a pair.
    """
    common = np.ones(len(meets), dtype=bool)
    slots: list[int] = []
    while len(slots) < num_slots:
        good = meets & _apart(focus, slots) & common[:, None]
        counts = good.sum(axis=0)
        enough = counts >= num_pairs
        enough[slots] = False
        if not enough.any():
            break
        sharp = (sharpness * good).sum(axis=0) / np.maximum(counts, 1)
        slots.append(max(np.flatnonzero(enough).tolist(), key=lambda slot: (counts[slot], sharp[slot], -slot)))
        common = good[:, slots[-1]]
    return slots, common


def nearest_slots(
    slots: Sequence[int],
    nearness: Float[np.ndarray, "pairs L"],
    focus: Sequence[Bool[np.ndarray, "L _"]],
    num_slots: int,
) -> list[int]:
    """Add slots up to `num_slots`: by mean nearness to the criteria, zero where slots attend to the same words."""
    slots = [*slots]
    while len(slots) < num_slots:
        near = (nearness * _apart(focus, slots)).mean(axis=0)
        near[slots] = -1.0
        slots.append(int(near.argmax()))
    return slots


def choose_pairs(
    pairs: Sequence[PairAttention], slots: Sequence[int], num_pairs: int, preferred: Bool[np.ndarray, " pairs"]
) -> list[int]:
    """At most `num_pairs` pairs that show some slots best: by the mean of cosine times sharpness, best first.

    Pairs that are `preferred` come before all others. If all pairs have a place, they stay in their order.
    """
    if len(pairs) <= num_pairs:
        return list(range(len(pairs)))
    cosines, sharpness = _stacked(pairs)
    merit = (cosines * sharpness)[:, list(slots)].mean(axis=1)
    return sorted(range(len(pairs)), key=lambda pair: (not preferred[pair], -merit[pair], pair))[:num_pairs]


def _apart(focus: Sequence[Bool[np.ndarray, "L _"]], slots: Sequence[int]) -> Bool[np.ndarray, "pairs L"]:
    """Whether each slot of each pair attends to no word that one of `slots` attends to."""
    return np.stack([~(words & words[list(slots)].any(axis=0)).any(axis=1) for words in focus])


def caption_words(caption: str, token_ids: Int64[Tensor, " N"]) -> list[Word]:
    """The words of a caption that the model sees; in a truncated caption, the words before the cut."""
    tokenizer = simple_tokenizer()
    pieces = [tokenizer.decoder[number] for number in token_ids[1 : int(token_ids.argmax())].tolist()]
    written, cursor = html.unescape(html.unescape(caption)), 0
    words: list[Word] = []
    first, joined = 0, ""
    for index, piece in enumerate(pieces):
        joined += piece.removesuffix(END_OF_WORD)
        if not piece.endswith(END_OF_WORD) and index + 1 < len(pieces):
            continue
        text = bytearray(tokenizer.byte_decoder[letter] for letter in joined).decode("utf-8", "replace")
        start = len(written) - len(written[cursor:].lstrip())
        has_space, as_written = start > cursor, written[start : start + len(text)]
        if as_written.lower() == text:
            text, cursor = as_written, start + len(text)
        else:
            has_space = True
        words.append(Word(text, has_space and bool(words), first + 1, index + 2))
        first, joined = index + 1, ""
    return words


def word_shares(attention: Float[np.ndarray, "L N"], words: list[Word]) -> Float[np.ndarray, "L words"]:
    """The attention of a caption's tokens, merged to its words."""
    shares = [attention[:, word.first : word.end].sum(axis=1) for word in words]
    return np.stack(shares, axis=1) if shares else np.zeros((len(attention), 0), attention.dtype)
