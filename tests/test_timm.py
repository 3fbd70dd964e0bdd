"""`timm.create_model("sparo_vit_...")` is our encoder: the same weights, outputs and layers, by timm's names."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from small_models import save_encoder
from timm.data import resolve_model_data_config

import dino_sparo.timm
from dino_sparo.models.encoder import Encoder, create_encoder
from dino_sparo.weights.export import export

SIZES: dict[str, Any] = {"num_slots": 5, "slot_dim": 3, "key_dim": 2, "img_size": 32}
NAMES = ["sparo_vit_tiny_patch16", "sparo_vit_small_patch16", "sparo_vit_small_patch8", "sparo_vit_base_patch16"]


@pytest.fixture
def encoder() -> Encoder:
    torch.manual_seed(0)
    return create_encoder("vit_tiny", 16, **SIZES).eval()


@pytest.mark.parametrize("kind", ["checkpoint", "clip", "safetensors", "huggingface"])
@torch.no_grad()
def test_a_model_of_timm_with_our_weights_gives_our_outputs(tmp_path: Path, encoder: Encoder, kind: str) -> None:
    path = save_encoder(tmp_path, encoder)
    if kind == "clip":
        weights = {f"image.{name}": value for name, value in encoder.state_dict().items()}
        torch.save({"model": {**weights, "logit_scale": torch.ones(()), "text.norm.bias": torch.ones(3)}}, path)
    elif kind != "checkpoint":
        path = export(path, tmp_path / "out", format=kind)
        path = path / "model.safetensors" if path.is_dir() else path
    model = timm.create_model("sparo_vit_tiny_patch16", checkpoint_path=path, **SIZES).eval()
    images = torch.randn(2, 3, 32, 32)
    tokens = model.forward_features(images)
    assert torch.equal(tokens, encoder.backbone(images))
    assert torch.equal(model.forward_head(tokens), encoder(images))
    assert torch.equal(model(images), encoder(images))
    assert (model.num_features, model.head_hidden_size, model.num_classes) == (192, 15, 0)
    for norm in (True, False):
        options = {"n": 2, "norm": norm, "reshape": True, "return_prefix_tokens": True}
        ours, theirs = (m.get_intermediate_layers(images, **options) for m in (encoder, model))
        torch.testing.assert_close(ours, theirs)


@torch.no_grad()
def test_a_classifier_is_added_replaced_and_removed(tmp_path: Path, encoder: Encoder) -> None:
    path, images = save_encoder(tmp_path, encoder), torch.randn(2, 3, 32, 32)
    model = timm.create_model("sparo_vit_tiny_patch16", checkpoint_path=path, num_classes=7, **SIZES).eval()
    assert model(images).shape == (2, 7)
    assert torch.equal(model.forward_head(model.forward_features(images), pre_logits=True), encoder(images))
    model.reset_classifier(4)
    assert model.get_classifier()(encoder(images)).shape == (2, 4)
    copy = timm.create_model("sparo_vit_tiny_patch16", num_classes=4, **SIZES).eval()
    copy.load_state_dict(model.state_dict())
    assert torch.equal(copy(images), model(images))
    model.reset_classifier(0)
    assert torch.equal(model(images), encoder(images))


def test_timm_lists_the_models_and_knows_their_images() -> None:
    assert sorted(timm.list_models("sparo_*")) == sorted(NAMES)
    with torch.device("meta"):
        models = {name: timm.create_model(name) for name in NAMES}
    assert [models[name].num_features for name in NAMES] == [192, 384, 384, 768]
    assert all(len(model.backbone.blocks) == 11 for model in models.values())
    assert models["sparo_vit_small_patch8"].backbone.patch_size == 8
    config = resolve_model_data_config(models["sparo_vit_small_patch16"])
    assert (config["input_size"], config["crop_pct"]) == ((3, 224, 224), 224 / 256)


def test_weights_of_other_sizes_and_published_weights_that_do_not_exist_are_refused(
    tmp_path: Path, encoder: Encoder
) -> None:
    path = save_encoder(tmp_path, encoder)
    with pytest.raises(RuntimeError, match=r"readout\.queries"):
        timm.create_model("sparo_vit_tiny_patch16", checkpoint_path=path, img_size=32)
    with pytest.raises(RuntimeError, match="No pretrained weights exist"):
        timm.create_model("sparo_vit_tiny_patch16", pretrained=True)
    assert dino_sparo.timm.default_cfgs.keys() == set(NAMES)
