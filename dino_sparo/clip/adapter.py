"""Our checkpoints -> what LAION's CLIP benchmark (package `clip_benchmark`) expects of a model.

    pip install clip-benchmark requests
    dino-sparo clip-benchmark eval --model_type dino_sparo --model normalized \
        --pretrained output/checkpoint.pth --dataset cifar10 --dataset_root data --no_amp

Arguments and numbers are CLIP benchmark's. It normalises each feature as a whole and takes dot products, which are our
cosines: every slot has length one over sqrt(L) (SPARO, equation 2). `--model normalized:FILE.json` takes the slots of a
file of dino-sparo slots select or mask.
"""

import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int64
from PIL import Image
from torch import Tensor

from dino_sparo.clip.model import CLIP, load_clip
from dino_sparo.clip.subsets import ReducedClip, open_slots
from dino_sparo.data.sources.decode import to_rgb
from dino_sparo.data.views import ClipView
from dino_sparo.image_text.text import tokenize
from dino_sparo.runtime.exits import errors_in_one_line
from dino_sparo.runtime.faults import require

logger = logging.getLogger(__name__)

MODEL_TYPE = "dino_sparo"
NORMALIZED = "normalized"


def transform_image(view: ClipView, image: Image.Image) -> Float[Tensor, "C H W"]:
    """An image of any kind as our evaluations see it."""
    return view(to_rgb(image))[0]


def tokenize_texts(context_length: int, texts: str | Sequence[str]) -> Int64[Tensor, "B N"]:
    """The token ids of a caption or of captions; longer captions are cut off."""
    return tokenize([texts] if isinstance(texts, str) else list(texts), context_length).ids


def load_for_benchmark(
    model_name: str = NORMALIZED, pretrained: str = "", cache_dir: str | None = None, device: str | torch.device = "cpu"
) -> tuple[CLIP | ReducedClip, Callable[..., Tensor], Callable[..., Tensor]]:
    """Load a checkpoint for CLIP benchmark, which names the arguments: the model, its transform and its tokenizer.

    `model_name` is `normalized`, perhaps with `:FILE.json`; `cache_dir` is unused.
    """
    kind, _, slots = model_name.partition(":")
    if kind != NORMALIZED:
        raise ValueError(
            f"model {model_name!r} is unknown; give --model {NORMALIZED}, and the checkpoint as --pretrained"
        )
    loaded = load_clip(pretrained)
    config = loaded.model.config
    model = open_slots(slots, loaded)[0].to(device).eval()
    view = ClipView(config.image.img_size, loaded.mean, loaded.std)
    # Partial functions can be pickled, for the workers of a loader.
    return model, partial(transform_image, view), partial(tokenize_texts, config.text.context_length)


def register() -> Callable[[], Any]:
    """Make `--model_type dino_sparo` known to CLIP benchmark; returns its command."""
    require("clip_benchmark", "CLIP benchmark's evaluations")
    require("requests", "CLIP benchmark's data sets")  # which it does not declare
    from clip_benchmark import models

    models.TYPE2FUNC[MODEL_TYPE] = load_for_benchmark
    if MODEL_TYPE not in models.MODEL_TYPES:
        models.MODEL_TYPES.append(MODEL_TYPE)
    # Imported only now, since its options list the model types there are.
    from clip_benchmark.cli import main as benchmark

    return benchmark


def main(argv: Sequence[str] | None = None) -> None:
    """CLIP benchmark's command, which also knows our checkpoints; `argv`: None takes the command line's options."""
    if argv is not None:
        sys.argv[1:] = argv  # it parses the command line itself
    with errors_in_one_line(logger):
        register()()
