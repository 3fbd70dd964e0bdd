"""For tests of evaluations: a CLIP model whose features are known, a real one that is small, images of one colour."""

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from open_clip.tokenizer import SimpleTokenizer
from PIL import Image
from small_models import written_once
from torch import Tensor, nn
from torch.nn import functional as F

from dino_sparo.clip import CLIP, create_clip, tokenize
from dino_sparo.clip.config import CLIPConfig, infer_clip_config
from dino_sparo.clip.model import LoadedClip
from dino_sparo.commands import COMMANDS
from dino_sparo.data.defaults import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from dino_sparo.data.views import ClipView
from dino_sparo.image_text.scorer import DotProductScorer
from dino_sparo.runtime.launch import shutdown
from dino_sparo.weights.foreign import from_open_clip_names, open_clip_settings, to_open_clip_names

COLOURS = {"red": (1, 0, 0), "green": (0, 1, 0), "blue": (0, 0, 1), "yellow": (1, 1, 0), "cyan": (0, 1, 1)}
TOKENIZER = SimpleTokenizer()


def clip_description(
    config: CLIPConfig, mean: Iterable[float] = OPENAI_CLIP_MEAN, std: Iterable[float] = OPENAI_CLIP_STD
) -> dict[str, Any]:
    """What a checkpoint carries under `clip`."""
    return {**config.to_dict(), "mean": list(mean), "std": list(std)}


class ColourClip(nn.Module):
    """An image's feature is its mean colour, a caption's the sum of the colours it names, white if it names none."""

    def encode_image(self, images: Tensor, normalize: bool = True) -> Tensor:
        features = images.mean(dim=(2, 3))
        return F.normalize(features, dim=1) if normalize else features

    def encode_text(self, token_ids: Tensor, normalize: bool = True) -> Tensor:
        rows = []
        for ids in token_ids.tolist():
            words = TOKENIZER.decode(ids).replace(">", "> ").replace("<", " <").split()
            named = [COLOURS[word] for word in words if word in COLOURS] or [(1, 1, 1)]
            rows.append(torch.tensor(named).float().sum(dim=0))
        features = torch.stack(rows)
        return F.normalize(features, dim=1) if normalize else features


def colour_encoder(batch_size: int = 3) -> DotProductScorer:
    """`ColourClip` with pixels from 0 to 1."""
    view = ClipView(4, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    return DotProductScorer(ColourClip(), view, torch.device("cpu"), batch_size, tokenize=tokenize)


def dot_product_scorer(loaded: LoadedClip, batch_size: int = 6) -> DotProductScorer:
    """The scorer of a checkpoint, as the evaluations build it."""
    view = ClipView(loaded.model.config.image.img_size, loaded.mean, loaded.std)
    return DotProductScorer(loaded.model, view, torch.device("cpu"), batch_size, tokenize=tokenize)


def paint(path: Path, colour: str) -> None:
    """An image of one colour; without a known one, a file that is no image."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if colour in COLOURS:
        Image.new("RGB", (7, 5), tuple(255 * value for value in COLOURS[colour])).save(path)  # type: ignore[arg-type]
    else:
        path.write_bytes(b"no image")


SMALL_CLIP: dict[str, Any] = {
    **{"arch": "vit_micro", "patch_size": 8, "img_size": 32, "num_slots": 5, "slot_dim": 7, "key_dim": 3},
    **{"text_width": 24, "text_heads": 2, "text_layers": 3, "context_length": 9, "vocab_size": 53},
    **{"embed_dim": 11, "bottleneck_dim": 4, "num_codes": 17},
}


def small_clip(readout: str = "sparo", seed: int = 0, **changes: Any) -> CLIP:
    """A model in eval mode; every parameter is away from what it starts with."""
    if readout == "fdt":
        pytest.importorskip("entmax")
    torch.manual_seed(seed)
    model = create_clip(readout=readout, **{**SMALL_CLIP, **changes})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


def save_clip(network: CLIP, path: Path, **changes: Any) -> Path:
    """Write a model as CLIP's training does, with other entries if they are given."""
    path.parent.mkdir(parents=True, exist_ok=True)
    clip = clip_description(network.config)
    torch.save({"model": network.state_dict(), "clip": clip, "epoch": 3, **changes}, path)
    return path


@written_once
def small_checkpoint(path: Path, readout: str = "sparo", seed: int = 0) -> Path:
    """An untrained model in a checkpoint of CLIP training."""
    torch.manual_seed(seed)
    sizes = {"num_slots": 5, "slot_dim": 7, "key_dim": 3, "img_size": 32, "embed_dim": 11}
    text = {"text_width": 24, "text_heads": 2, "text_layers": 3}
    return save_clip(create_clip(arch="vit_micro", patch_size=8, readout=readout, **sizes, **text), path)


def parser_of(name: str) -> argparse.ArgumentParser:
    """The options of a command."""
    parser = COMMANDS[name].parser
    assert parser is not None
    return parser()


def call(name: str, words: Iterable[object]) -> dict[str, Any]:
    """Run a command without its catching of errors."""
    return COMMANDS[name].function(parser_of(name).parse_args([*map(str, words)]))


def evaluate(name: str, *options: Any) -> dict[str, Any]:
    """Run an evaluation in this process, on few images at a time, without its catching of errors."""
    try:
        fixed = ("--overwrite", "--device", "cpu", "--num_workers", "0", "--batch_size_per_gpu", "6")
        return call(name, [*options, *fixed])
    finally:
        shutdown()


def to_open_clip(config: CLIPConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights under open_clip's names, of a model that open_clip has."""
    open_clip_config(config)
    return to_open_clip_names(weights)


def open_clip_config(config: CLIPConfig) -> dict[str, Any]:
    """Arguments of open_clip's `CLIP` for the same model."""
    return open_clip_settings(config.to_dict())


def from_open_clip(
    weights: Mapping[str, Tensor], text_heads: int | None = None, quick_gelu: bool = False
) -> tuple[CLIPConfig, dict[str, Tensor]]:
    """open_clip's weights under our names, and the model that they fit."""
    renamed = from_open_clip_names(weights)
    return infer_clip_config(renamed, text_heads, quick_gelu), renamed
