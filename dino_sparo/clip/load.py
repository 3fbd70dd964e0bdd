"""A CLIP checkpoint -> the scorer that evaluations use, and the model that LAION's CLIP benchmark takes.

    S(image, caption) = sum over slots l of cosine_l / L,   so the lead of a caption is a sum over slots, too

    pip install clip-benchmark requests
    dino-sparo clip-benchmark eval --model_type dino_sparo --model normalized \\
        --pretrained output/checkpoint.pth --dataset cifar10 --dataset_root data --no_amp

Arguments and numbers are CLIP benchmark's. It normalises each feature as a whole and takes dot products, which are our
cosines: every slot has length one over sqrt(L) (SPARO, equation 2). `--model normalized:FILE.json` takes the slots of a
file of dino-sparo slots select or mask.
"""

import argparse
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from PIL import Image
from torch import Tensor

from dino_sparo.clip.model import CLIP, load_clip
from dino_sparo.clip.slots.concepts import Word, caption_words, see, word_shares
from dino_sparo.clip.slots.subsets import ReducedClip, open_slots
from dino_sparo.data.views import ClipView, view_pixels
from dino_sparo.draw.figure import PICTURE_HEIGHT, RAMP_ENDS, Band, Tile, map_painter
from dino_sparo.draw.pixels import heat
from dino_sparo.evaluation.features import inference
from dino_sparo.evaluation.task import view_record
from dino_sparo.image_text.scorer import DotProductScorer, Explanation, computation_of
from dino_sparo.image_text.towers import tokenize
from dino_sparo.runtime.exits import errors_in_one_line
from dino_sparo.runtime.faults import UserError, require
from dino_sparo.runtime.files import versions

logger = logging.getLogger(__name__)

MODEL_TYPE = "dino_sparo"
NORMALIZED = "normalized"
MAX_SLOTS = 5  # shown per caption
EXPLANATION = (
    "The score is the mean of the slots' cosines, so the lead of a caption over the other caption is a sum over slots. "
    "Each caption has the slots that add most to its lead. A map is bright where the slot attends in the image, and "
    "grey where the slot gives no more than an even share of its attention. Below the map: the part of the lead that "
    "the slot adds, and the word of the caption to which the slot attends most."
)


@dataclass(frozen=True)
class SlotScorer(DotProductScorer):
    """A `DotProductScorer` whose score is the mean of the slots' cosines."""

    model: CLIP
    transform: ClipView

    def explain(self, image: Image.Image, captions: Sequence[str]) -> Explanation:
        """The slots that add most to each caption; see `ExplainableScorer`."""
        ids = self.tokenize(list(captions)).ids
        with inference(self.model, self.device, self.dtype):
            (maps,), attention, cosines = see(self.model, self.views([image]), ids, self.device)
        view = self.transform.view(image, self.model.image.backbone.patch_size)
        picture = view_pixels(image, view, PICTURE_HEIGHT)
        explained = []
        leads = slot_leads(torch.from_numpy(cosines)).numpy()
        for caption, token_ids, slot_attention, lead in zip(captions, ids, attention, leads, strict=True):
            words = caption_words(caption, token_ids)
            shares = word_shares(slot_attention, words)
            tiles = []
            for slot in leading_slots(lead):
                notes = (f"{lead[slot]:+.3f}", _top_word(words, shares[slot]))
                tiles.append(Tile(picture, caption, map_painter(heat(maps[slot])), f"slot {slot}", notes=notes))
            explained.append(Band(lines=[lead_in_words(lead)], tiles=tiles))
        return Explanation(picture, explained, EXPLANATION, RAMP_ENDS)


def slot_leads(cosines: Float[Tensor, "captions L"]) -> Float[Tensor, "captions L"]:
    """Share of each slot in the lead of a caption over the mean of all other captions.

        lead_cl = (cosine_cl - mean over captions d other than c of cosine_dl) / L

    Args:
        cosines: of an image's slots and those of captions. For a single caption the result is its share in the score.
    """
    num_captions, num_slots = cosines.shape
    others = (cosines.sum(dim=0) - cosines) / max(1, num_captions - 1)
    return (cosines - others) / num_slots


def leading_slots(lead: Float[np.ndarray, " L"]) -> list[int]:
    """The slots that add most to a caption, the greatest first."""
    order = np.argsort(-lead, kind="stable")[:MAX_SLOTS]
    return [int(slot) for slot in order if lead[slot] > 0]


def lead_in_words(lead: Float[np.ndarray, " L"]) -> str:
    """Number of slots that prefer a caption, and the sum of the slots that are shown."""
    shown = leading_slots(lead)
    added = f"; those below add {lead[shown].sum():+.3f}" if shown else ""
    return f"{int((lead > 0).sum())} of {len(lead)} slots prefer it{added}"


def _top_word(words: Sequence[Word], shares: Float[np.ndarray, " words"]) -> str:
    """The word that gets most of a slot's attention."""
    if not len(shares):
        return ""
    best = int(shares.argmax())
    return f"{words[best].text} {100 * shares[best]:.0f}%"


def clip_scorer(
    args: argparse.Namespace, device: torch.device, checkpoint: Mapping[str, Any] | None = None
) -> DotProductScorer:
    """The model of an evaluation, by its options.

    Raises:
        ValueError: no checkpoint is named, it holds no CLIP, or options do not fit it.
    """
    if not args.pretrained_weights:
        raise UserError(
            "--pretrained_weights is empty: there is nothing to evaluate; give a checkpoint of CLIP training"
        )
    require("open_clip", "captions")
    loaded = load_clip(args.pretrained_weights, args.text_heads, args.quick_gelu, checkpoint)
    config, border = loaded.model.config, getattr(args, "crop_border", 0)
    transform = ClipView(args.img_size or config.image.img_size, loaded.mean, loaded.std, border)
    model, slots = open_slots(getattr(args, "slots", None), loaded)
    dim = config.embed_dim if isinstance(model, CLIP) else model.encoding_dim
    record = {
        "model": loaded.record,
        "slots": slots,
        "feature": {"name": "normalised encoding", "dim": dim, "precision": args.precision},
        "view": {**view_record(transform, args.exif), "border": border},
        "versions": versions(open_clip="open_clip_torch"),
    }
    is_per_slot = isinstance(model, CLIP) and config.image.kind.normalized_per_slot
    kind: type[DotProductScorer] = SlotScorer if is_per_slot else DotProductScorer
    settings = computation_of(args)
    return kind(model.to(device), transform, device, tokenize=loaded.model.text.tokenize, record=record, **settings)


# LAION's CLIP benchmark.


def transform_image(view: ClipView, image: Image.Image) -> Float[Tensor, "C H W"]:
    """The view of an image of any kind, as in our evaluations."""
    return view.batch(image)[0]


def tokenize_texts(context_length: int, texts: str | Sequence[str]) -> Int64[Tensor, "B N"]:
    """The token ids of a caption or of captions; longer captions are cut off."""
    return tokenize([texts] if isinstance(texts, str) else list(texts), context_length).ids


def load_for_benchmark(
    model_name: str = NORMALIZED, pretrained: str = "", cache_dir: str | None = None, device: str | torch.device = "cpu"
) -> tuple[CLIP | ReducedClip, Callable[..., Tensor], Callable[..., Tensor]]:
    """Load a checkpoint for CLIP benchmark, which names the arguments: the model, its transform and its tokenizer.

    `model_name` is `normalized`, optionally with `:FILE.json`; `cache_dir` is unused.
    """
    kind, _, slots = model_name.partition(":")
    if kind != NORMALIZED:
        raise UserError(
            f"model {model_name!r} is unknown; give --model {NORMALIZED}, and the checkpoint as --pretrained"
        )
    loaded = load_clip(pretrained)
    config = loaded.model.config
    model = open_slots(slots, loaded)[0].to(device).eval()
    view = ClipView(config.image.img_size, loaded.mean, loaded.std)
    # Partial functions can be pickled, for the workers of a loader.
    return model, partial(transform_image, view), partial(tokenize_texts, config.text.context_length)


def run_clip_benchmark(argv: Sequence[str] | None = None) -> None:
    """CLIP benchmark's command, which also opens our checkpoints; `argv`: None takes the command line's options."""
    if argv is not None:
        sys.argv[1:] = argv  # it parses the command line itself
    with errors_in_one_line(logger):
        require("clip_benchmark", "CLIP benchmark's evaluations")
        require("requests", "CLIP benchmark's data sets")  # which it does not declare
        from clip_benchmark import models

        models.TYPE2FUNC[MODEL_TYPE] = load_for_benchmark
        if MODEL_TYPE not in models.MODEL_TYPES:
            models.MODEL_TYPES.append(MODEL_TYPE)
        # Imported only now, since its options list the model types there are.
        from clip_benchmark.cli import main

        main()
