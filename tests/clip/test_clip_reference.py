"""CLIP+GAP and the discrete bottleneck against numbers recorded from the SPARO authors' code (tests/reference)."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("open_clip")

from dino_sparo.clip import create_clip
from dino_sparo.clip.config import CLIPConfig
from dino_sparo.clip.model import CLIP, clip_from_config

sys.path.insert(0, str(Path(__file__).parents[1] / "reference"))
import weights as w

# Their names -> ours, one after the other.
NAMES = (
    (r"^visual\.class_embedding$", "image.backbone.cls_token"),
    (r"^visual\.positional_embedding$", "image.backbone.pos_embed"),
    (r"^visual\.conv1\.", "image.backbone.patch_embed.proj."),
    (r"^visual\.ln_pre\.", "image.backbone.norm_pre."),
    (r"^visual\.ln_post\.", "image.readout.norm."),
    (r"^visual\.proj$", "image_proj.weight"),
    (r"^visual\.transformer\.resblocks\.", "image.backbone.blocks."),
    (r"^transformer\.resblocks\.", "text.blocks."),
    (r"^token_embedding\.", "text.token_embed."),
    (r"^positional_embedding$", "text.pos_embed"),
    (r"^ln_final\.", "text.norm."),
    (r"^text_projection$", "text_proj.weight"),
    (r"^space_dict$", "image.readout.codebook"),
    (r"^img_query_model\.q_map\.", "image.readout.query_map."),
    (r"^txt_query_model\.q_map\.", "text.readout.query_map."),
    (r"\.ln_([12])\.", r".norm\1."),
    (r"\.attn\.in_proj_", ".attn.qkv."),
    (r"\.attn\.out_proj\.", ".attn.proj."),
    (r"\.mlp\.c_fc\.", ".mlp.fc1."),
    (r"\.mlp\.c_proj\.", ".mlp.fc2."),
)


def our_name(theirs: str) -> str:
    for pattern, ours in NAMES:
        theirs = re.sub(pattern, ours, theirs)
    return theirs


def with_their_weights(readout: str, recorded: dict) -> CLIP:
    names = recorded[f"{readout}/names"].tolist()
    shapes = {
        name: json.loads(shape) for name, shape in zip(names, recorded[f"{readout}/shapes"].tolist(), strict=True)
    }
    text = {f"text_{name}": w.CLIP_TEXT[name] for name in ("width", "heads", "layers")}
    sizes = {name: w.CLIP_TEXT[name] for name in ("context_length", "vocab_size")}
    model = create_clip(
        "vit_micro", 8, readout, img_size=32, embed_dim=w.CLIP_EMBED_DIM, num_codes=w.CLIP_NUM_CODES, **text, **sizes
    )
    own = model.state_dict()
    weights = {}
    for theirs, value in w.clip_state(shapes).items():
        name = our_name(theirs)
        turned = torch.as_tensor(value).t() if name.endswith("_proj.weight") and "." not in name[:-12] else value
        weights[name] = torch.as_tensor(turned).reshape(own[name].shape)
    if readout == "fdt":
        weights["text.readout.codebook"] = weights["image.readout.codebook"]
    model.load_state_dict(weights)
    return model.eval()


@pytest.mark.parametrize("readout", ["gap_image", "fdt"])
def test_gap_and_codes_give_the_features_and_gradients_of_the_authors_code(readout: str) -> None:
    if readout == "fdt":
        pytest.importorskip("entmax")
    recorded = w.load("clip")
    model = with_their_weights(readout, recorded)
    images, ids = torch.from_numpy(w.images("clip", 3, 32, 32)), torch.from_numpy(w.clip_captions())
    encoded = {"image": model.encode_image(images, normalize=False), "text": model.encode_text(ids, normalize=False)}
    names = dict(model.named_parameters())
    for side, features in encoded.items():
        expected = torch.from_numpy(recorded[f"{readout}/{side}"])
        assert (features - expected).abs().max() < 1e-5 * expected.abs().max()
        direction = torch.from_numpy(w.normal(f"clip/direction/{side}", tuple(features.shape)))
        model.zero_grad()
        (features * direction).sum().backward()
        theirs = dict(
            zip(
                (our_name(name) for name in recorded[f"{readout}/{side}/grad_names"].tolist()),
                recorded[f"{readout}/{side}/grad_norms"].tolist(),
                strict=True,
            )
        )
        ours = {name: p.grad.norm().item() for name, p in names.items() if p.grad is not None}
        assert ours.keys() == theirs.keys()
        largest = max(theirs.values())
        for name, norm in ours.items():
            assert norm == pytest.approx(theirs[name], rel=1e-3, abs=1e-5 * largest), name
    normalized = torch.from_numpy(recorded[f"{readout}/image_normalized"])
    torch.testing.assert_close(model.encode_image(images), normalized, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_padding_competes_in_codes_whether_or_not_it_was_cut_off() -> None:
    """Batches lose columns that are padding for all their captions; features must not depend on the batch."""
    pytest.importorskip("entmax")
    model, ids = with_their_weights("fdt", w.load("clip")), torch.from_numpy(w.clip_captions())
    whole = model.encode_text(ids)
    for row, end in enumerate(w.CLIP_ENDS):
        torch.testing.assert_close(model.encode_text(ids[row : row + 1, : end + 1]), whole[row : row + 1])


# What encoders of earlier versions computed, sums of |features| of images and captions, recorded at commit 7f0d669.
EARLIER = {
    "gap": (8.253814697265625, 8.376420021057129),
    "gap_image": (8.253814697265625, 8.760150909423828),
    "fdt": (8.363202095031738, 8.370636940002441),
}


def filled(model: CLIP) -> CLIP:
    """Weights by name, so that nothing depends on how models are drawn."""
    weights = {name: torch.as_tensor(w.parameter(name, value.shape)) for name, value in model.state_dict().items()}
    if "text.readout.codebook" in weights:
        weights["text.readout.codebook"] = weights["image.readout.codebook"]
    model.load_state_dict(weights)
    return model.eval()


@torch.no_grad()
@pytest.mark.parametrize("readout", sorted(EARLIER))
def test_checkpoints_of_earlier_versions_keep_the_features_they_had(readout: str) -> None:
    if readout == "fdt":
        pytest.importorskip("entmax")
    towers = {"gap": ("gap", "gap"), "gap_image": ("gap", "eos"), "fdt": ("fdt", "fdt")}[readout]
    said = {
        "image": {"arch": "vit_micro", "patch_size": 8, "readout": towers[0], "img_size": 32, "pre_norm": True},
        "text": {**w.CLIP_TEXT, "readout": towers[1]},
        "readout": readout,
        "embed_dim": w.CLIP_EMBED_DIM,
        "num_codes": w.CLIP_NUM_CODES,
    }
    model = filled(clip_from_config(CLIPConfig.from_dict(said)))
    images, ids = torch.from_numpy(w.images("clip", 3, 32, 32)), torch.from_numpy(w.clip_captions())
    sums = tuple(encoded.abs().sum().item() for encoded in (model.encode_image(images), model.encode_text(ids)))
    assert sums == pytest.approx(EARLIER[readout], rel=1e-5)
    sizes = {"img_size": 32, "embed_dim": w.CLIP_EMBED_DIM, "text_width": 24, "text_heads": 2, "text_layers": 3}
    again = create_clip("vit_micro", 8, readout, **sizes, norm_first=True)
    assert (again.config.image.readout, again.config.text.readout) == towers
