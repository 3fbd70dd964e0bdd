"""A CLIP with slots -> scores, and the slots that prefer a caption to others.

    S(image, caption) = sum over slots l of cosine_l / L,   so the lead of a caption is a sum over slots, too

Source: SPARO, equation 2.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from dino_sparo.clip.model import CLIP
from dino_sparo.clip.pictures.words import Word, caption_words, word_attention
from dino_sparo.data.views import ClipView, view_pixels
from dino_sparo.draw.figure import PICTURE_HEIGHT, RAMP_ENDS, Tile, map_painter
from dino_sparo.draw.pixels import heat
from dino_sparo.evaluation.features import inference
from dino_sparo.image_text.scoring.dot_product import DotProductScorer
from dino_sparo.image_text.scoring.scorer import CaptionMaps, Explanation

MAX_SLOTS = 5  # shown per caption
EXPLANATION = (
    "The score is the mean of the slots' cosines, so the lead of a caption over the other one is a sum over slots. Of "
    "each caption the slots are shown that add most to its lead. A map glows where the slot looks in the image, and is "
    "grey where it gives no more than an even share of its attention. Below it: what the slot adds, and the word of "
    "the caption to which it gives most of its attention."
)


@dataclass(frozen=True)
class SlotScorer(DotProductScorer):
    """A `DotProductScorer` whose features are slots."""

    model: CLIP
    transform: ClipView

    def explain(self, image: Image.Image, captions: Sequence[str]) -> Explanation:
        """The slots that add most to each caption; see `ExplainableScorer`."""
        ids = self.tokenize(list(captions)).ids
        with inference(self.module, self.device, self.dtype):
            seen = self.model.image_output(self.views([image]).to(self.device))
            read = self.model.text_output(ids.to(self.device))
            leads = slot_leads(F.cosine_similarity(seen.slots.float(), read.slots.float(), dim=-1)).cpu().numpy()
        backbone = self.model.image.backbone
        view = self.transform.view(image, backbone.patch_size)
        picture = view_pixels(image, view, PICTURE_HEIGHT)
        grid = view.height // backbone.patch_size, view.width // backbone.patch_size
        maps = seen.attention[0, :, backbone.num_prefix_tokens :].float().cpu().numpy().reshape(-1, *grid)
        attention = read.attention.float().cpu().numpy()
        explained = []
        for caption, own_ids, own, lead in zip(captions, ids, attention, leads, strict=True):
            words = caption_words(caption, own_ids)
            shares = word_attention(own, words, own_ids).words
            tiles = [
                Tile(
                    picture,
                    caption,
                    map_painter(heat(maps[slot])),
                    f"slot {slot}",
                    notes=(f"{lead[slot]:+.3f}", _top_word(words, shares[slot])),
                )
                for slot in best_slots(lead)
            ]
            explained.append(CaptionMaps([lead_in_words(lead)], tiles))
        return Explanation(picture, explained, EXPLANATION, RAMP_ENDS)


def slot_leads(cosines: Float[Tensor, "captions L"]) -> Float[Tensor, "captions L"]:
    """Share of each slot in the lead of a caption over the mean of the others.

        lead_cl = (cosine_cl - mean over captions d other than c of cosine_dl) / L

    Args:
        cosines: of an image's slots and those of captions. For a single caption the result is its share in the score.
    """
    num_captions, num_slots = cosines.shape
    others = (cosines.sum(dim=0) - cosines) / max(1, num_captions - 1)
    return (cosines - others) / num_slots


def best_slots(lead: Float[np.ndarray, " L"]) -> list[int]:
    """The slots that add most to a caption, the greatest first."""
    order = np.argsort(-lead, kind="stable")[:MAX_SLOTS]
    return [int(slot) for slot in order if lead[slot] > 0]


def lead_in_words(lead: Float[np.ndarray, " L"]) -> str:
    """Number of slots that prefer a caption, and the sum of those that are shown."""
    shown = best_slots(lead)
    return f"{int((lead > 0).sum())} of {len(lead)} slots prefer it" + (
        f"; those below add {lead[shown].sum():+.3f}" if shown else ""
    )


def _top_word(words: Sequence[Word], shares: Float[np.ndarray, " words"]) -> str:
    """The word that gets most of a slot's attention."""
    if not len(shares):
        return ""
    best = int(shares.argmax())
    return f"{words[best].text} {100 * shares[best]:.0f}%"
