"""The model: equation 2, masks, towers that fit each other, captions to ids, checkpoints."""

import ast
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from clip_fakes import SMALL_CLIP, clip_description, open_clip_config, save_clip, small_clip, to_open_clip
from torch import nn
from torch.nn import functional as F

import dino_sparo
from dino_sparo.clip import CLIPConfig, create_clip, load_clip, normalize_slots, tokenize
from dino_sparo.clip.model import clip_from_config
from dino_sparo.clip.options import TOWERS
from dino_sparo.image_text.towers import end_token_mask
from dino_sparo.models.readouts import READOUTS, readout_kind
from dino_sparo.runtime.precision import use_fused_attention
from dino_sparo.weights.file import CheckpointError
from dino_sparo.weights.folder import save_checkpoint

open_clip = pytest.importorskip("open_clip")

B, N, VOCAB, L, V, M = 3, 9, 53, 5, 7, 11


def pairs() -> tuple[torch.Tensor, torch.Tensor]:
    """Images (B, 3, 32, 32), and ids (B, N) of captions that end after 5, 9 and 3 tokens."""
    torch.manual_seed(5)
    images, ids = torch.randn(B, 3, 32, 32), torch.randint(1, VOCAB - 1, (B, N))
    for caption, end in enumerate((4, N - 1, 2)):
        ids[caption, end:] = 0
        ids[caption, end] = VOCAB - 1
    return images, ids


# Encodings.


@torch.no_grad()
@pytest.mark.parametrize("readout", sorted(TOWERS))
def test_every_read_out_gives_slots_attention_and_encodings_of_length_one(readout: str) -> None:
    model, (images, ids) = small_clip(readout), pairs()
    kind = readout_kind(TOWERS[readout].image)
    width = L * V if kind.has_slots else M
    assert model.config.embed_dim == width
    encoded = (
        (model.image_output(images), model.encode_image(images), model.encode_image(images, normalize=False), 1 + 16),
        (model.text_output(ids), model.encode_text(ids), model.encode_text(ids, normalize=False), N),
    )
    for output, normalized, plain, number in encoded:
        num_slots = L if kind.has_slots else 1
        assert output.slots.shape == (B, num_slots, width // num_slots)
        assert output.attention.shape == (B, num_slots, number)
        torch.testing.assert_close(output.attention.sum(dim=-1), torch.ones(B, num_slots))
        assert torch.equal(plain, output.slots.flatten(1))
        torch.testing.assert_close(normalized.norm(dim=-1), torch.ones(B))
        parts = output.slots if kind.normalized_per_slot else output.slots.flatten(1)[:, None]
        expected = torch.cat([part / part.norm(dim=-1, keepdim=True) for part in parts.unbind(1)], dim=1)
        torch.testing.assert_close(normalized, expected / math.sqrt(parts.shape[1]))
        assert plain.std(dim=0).min() > 0, "every pair has another encoding"


def test_slots_are_normalised_in_float32_at_least() -> None:
    slots = torch.randn(B, L, V)
    half = normalize_slots(slots.bfloat16())
    assert half.dtype == torch.float32
    torch.testing.assert_close(half.norm(dim=-1), torch.ones(B), rtol=0, atol=1e-6)
    assert normalize_slots(slots.double()).dtype == torch.float64
    with torch.autocast("cpu", torch.bfloat16):
        model, (images, ids) = small_clip(), pairs()
        output = model(images, ids)
    assert output.image_features.dtype == output.text_features.dtype == torch.float32


def test_forward_gives_both_sides_and_the_inverse_temperature() -> None:
    torch.manual_seed(0)
    model, (images, ids) = create_clip(readout="cls", **SMALL_CLIP).eval(), pairs()
    output = model(images, ids)
    assert torch.equal(output.image_features, model.encode_image(images))
    assert torch.equal(output.text_features, model.encode_text(ids))
    assert output.logit_scale.item() == pytest.approx(1 / 0.07)
    assert output.logit_scale.shape == ()


@pytest.mark.parametrize("readout", sorted(TOWERS))
def test_every_parameter_is_used(readout: str) -> None:
    model, (images, ids) = small_clip(readout).train(), pairs()
    image_features, text_features, scale = model(images, ids)
    F.cross_entropy(scale * image_features @ text_features.t(), torch.arange(B)).backward()
    unused = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert not unused


# The text tower.


@torch.no_grad()
@pytest.mark.parametrize("readout", sorted(TOWERS))
def test_what_follows_the_end_token_changes_nothing_and_gets_no_attention(readout: str) -> None:
    model, (_images, ids) = small_clip(readout), pairs()
    mask = end_token_mask(ids)
    assert mask.sum(dim=-1).tolist() == [5, 9, 3]
    changed = torch.where(mask, ids, torch.randint(1, VOCAB, ids.shape))
    assert not torch.equal(changed, ids)
    output, other = model.text_output(ids), model.text_output(changed)
    assert torch.equal(output.slots, other.slots)
    for seen in (output, other):
        assert seen.attention.movedim(1, 2)[~mask].eq(0).all()
    before_end = ids.clone()
    before_end[:, 1] = before_end[:, 1] % (VOCAB - 2) + 1
    assert (model.text_output(before_end).slots - output.slots).abs().amax(dim=(1, 2)).min() > 1e-6


@torch.no_grad()
def test_a_token_sees_itself_and_those_before_it() -> None:
    model, (_images, ids) = small_clip(), pairs()
    before = model.text(ids)
    changed = ids.clone()
    changed[1, 3] = ids[1, 3] % (VOCAB - 2) + 1
    moved = (model.text(changed) - before).abs().amax(dim=-1) > 1e-7
    assert moved[1].tolist() == [n >= 3 for n in range(N)]
    assert not moved[0].any()


@torch.no_grad()
def test_captions_need_no_padding_to_the_whole_context() -> None:
    model, (_images, ids) = small_clip(), pairs()
    torch.testing.assert_close(model.encode_text(ids[:1, :5]), model.encode_text(ids[:1]))


@torch.no_grad()
def test_plain_attention_gives_what_fused_attention_gives() -> None:
    model, (_images, ids) = small_clip(), pairs()
    fused = model.encode_text(ids)
    use_fused_attention(model.text, False)
    assert not any(block.attn.fused_attn for block in model.text.blocks)
    torch.testing.assert_close(model.encode_text(ids), fused)


# How the model is built.


def test_a_read_out_that_replaces_a_block_takes_one_from_each_tower() -> None:
    for readout in TOWERS:
        model = small_clip(readout)
        assert len(model.text.blocks) == 3 - (readout == "sparo"), readout
        assert len(model.image.backbone.blocks) == 4 - (readout == "sparo"), readout
    kept, replaced = small_clip(replace_block=False), small_clip("cls", replace_block=True)
    assert (len(kept.text.blocks), len(kept.image.backbone.blocks)) == (3, 4)
    assert (len(replaced.text.blocks), len(replaced.image.backbone.blocks)) == (2, 3)


@torch.no_grad()
def test_a_registered_read_out_with_slots_serves_both_towers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(READOUTS, "mine", replace(READOUTS["sparo"], replaces_block=False))
    model, (images, ids) = small_clip("mine"), pairs()
    assert len(model.text.blocks) == 3
    assert model.encode_image(images).shape == model.encode_text(ids).shape == (B, L * V)


@torch.no_grad()
def test_the_paper_averages_images_only_and_gap_both_sides() -> None:
    images, ids = pairs()
    both, images_only = small_clip("gap"), small_clip("gap_image")
    # The text tower's last LayerNorm follows the average in one and precedes the end token in the other.
    images_only.load_state_dict(
        {name.replace("text.readout.norm.", "text.norm."): value for name, value in both.state_dict().items()}
    )
    assert torch.equal(both.encode_image(images), images_only.encode_image(images))
    torch.testing.assert_close(both.image_output(images).attention, torch.full((B, 1, 17), 1 / 17))
    attention = torch.zeros(B, 1, N)
    attention[range(B), 0, [4, 8, 2]] = 1
    assert torch.equal(images_only.text_output(ids).attention, attention)
    assert torch.equal(both.text_output(ids).attention[0, 0], torch.tensor([0.2] * 5 + [0.0] * 4))


def test_both_towers_hold_one_codebook_that_images_read_without_class_token() -> None:
    model, (images, _ids) = small_clip("fdt"), pairs()
    assert model.image.readout.codebook is model.text.readout.codebook
    assert model.image.readout.codebook.shape == (17, M)
    assert sum(name.endswith("codebook") for name, _parameter in model.named_parameters()) == 1
    attention = model.image_output(images).attention
    assert attention[..., 0].eq(0).all()


def test_openais_activation_stands_in_every_block() -> None:
    plain, quick = small_clip("cls"), small_clip("cls", quick_gelu=True)
    quick.load_state_dict(plain.state_dict())
    for block in (*quick.image.backbone.blocks, *quick.text.blocks):
        numbers = torch.linspace(-3, 3, 13)
        torch.testing.assert_close(block.mlp.act(numbers), numbers * torch.sigmoid(1.702 * numbers))
    assert isinstance(plain.text.blocks[0].mlp.act, nn.GELU)


@pytest.mark.parametrize("readout", ["sparo", "cls"])
def test_grad_checkpointing_changes_neither_outputs_nor_gradients(readout: str) -> None:
    model, (images, ids) = small_clip(readout).train(), pairs()
    found = []
    for enable in (False, True, False):
        model.image.backbone.set_grad_checkpointing(enable)
        model.text.set_grad_checkpointing(enable)
        assert model.text.grad_checkpointing == model.image.backbone.grad_checkpointing == enable
        calls = []
        hooks = [
            block.register_forward_pre_hook(lambda *_, seen=calls: seen.append(1))
            for block in (*model.text.blocks, *model.image.backbone.blocks)
        ]
        output = model(images, ids)
        loss = F.cross_entropy(output.logit_scale * output.image_features @ output.text_features.t(), torch.arange(B))
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        for hook in hooks:
            hook.remove()
        assert len(calls) == len(hooks) * (2 if enable else 1)
        found.append((output, gradients))
    for (output, gradients), (other, other_gradients) in pairwise(found):
        assert torch.equal(output.image_features, other.image_features)
        assert torch.equal(output.text_features, other.text_features)
        for gradient, other_gradient in zip(gradients, other_gradients, strict=True):
            torch.testing.assert_close(gradient, other_gradient)


def test_weights_are_drawn_as_open_clip_draws_them() -> None:
    """Standard deviation of every weight, and its end if it is uniform, against the model that OpenCLIP itself builds.

    A read-out that replaces the last blocks leaves towers that are drawn as their own depth asks for.
    """
    torch.manual_seed(0)
    text = {"text_width": 96, "text_heads": 3, "text_layers": 6, "context_length": 77, "vocab_size": 499}
    ours = create_clip(readout="cls", replace_block=True, **{**SMALL_CLIP, **text, "embed_dim": 97})
    theirs = open_clip.model.CLIP(**open_clip_config(ours.config)).state_dict()
    for name, weight in to_open_clip(ours.config, ours.state_dict()).items():
        std, expected = (each.std(correction=0).item() for each in (weight, theirs[name]))
        assert std == pytest.approx(expected, rel=0.05 if weight.ndim > 1 else 0.25), name
        is_uniform = name.startswith("visual.") and "embedding" not in name and name != "visual.proj"
        if is_uniform and weight.numel() > 10_000:
            assert weight.abs().max().item() == pytest.approx(theirs[name].abs().max().item(), rel=0.02), name


def test_without_pre_norm_the_image_encoder_starts_as_dinos() -> None:
    torch.manual_seed(0)
    backbone = create_clip(readout="cls", **SMALL_CLIP, pre_norm=False).image.backbone
    for weight in (backbone.cls_token, backbone.pos_embed, backbone.blocks[1].mlp.fc1.weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.2)


def towers(**text: object) -> CLIPConfig:
    """The configuration of the small model, with another text tower."""
    config = small_clip().config
    return replace(config, text=replace(config.text, **text))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"layers": 1}, "no block"),
        ({"width": 25}, "width=25.*heads=2"),
        ({"heads": 0}, "heads=0"),
        ({"layers": 0}, "layers=0"),
        ({"context_length": 2}, "context_length=2.*at least 3"),
    ],
)
def test_towers_that_do_not_fit_are_refused(changed: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        towers(**changed)


def test_key_width_and_groups_may_differ_between_the_towers() -> None:
    images, ids = pairs()
    output = clip_from_config(towers(key_dim=4, group_size=5))(images, ids)
    assert output.image_features.shape == output.text_features.shape == (B, L * V)


def test_an_unknown_read_out_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown readout 'eos'.*'attpool', 'cls', 'ep', 'fdt'"):
        create_clip(readout="eos")
    with pytest.raises(
        ValueError, match=r"unknown readout 'gap_then_norm'.*; for images, --readout gap is gap_then_norm$"
    ):
        create_clip(readout="gap_then_norm")


# Captions -> ids.


def test_captions_become_open_clips_ids_and_losses_are_counted() -> None:
    texts = ["a red ring", "", "left of " * 5 + "it", "left of " * 3 + "it", "  ", "a"]
    tokens = tokenize(texts, context_length=N)
    assert torch.equal(tokens.ids, open_clip.tokenize(texts, context_length=N))
    # Seven words and two ends are exactly the nine that fit.
    assert (tokens.num_truncated, tokens.num_empty) == (1, 2)
    assert tokens.ids[2, -1] == tokens.ids[3, -1] == 49407
    assert end_token_mask(tokens.ids).sum(dim=-1).tolist() == [5, 2, N, N, 2, 3]
    assert tokenize(["a photo"]).ids.shape == (1, 77)
    assert tokenize([]).ids.shape == (0, 77)


def test_one_string_is_no_list_of_captions() -> None:
    with pytest.raises(ValueError, match="'a dog' is one caption"):
        tokenize("a dog")


def test_the_model_itself_needs_neither_open_clip_nor_entmax() -> None:
    folder = Path(dino_sparo.__file__).parent
    for name in (
        *(f"clip/{name}" for name in ("__init__", "config", "model")),
        *("image_text/towers", "models/readout", "models/pooling", "models/readouts"),
    ):
        for node in ast.parse((folder / f"{name}.py").read_text(encoding="utf-8")).body:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                assert not any(extra in ast.unparse(node) for extra in ("open_clip ", "open_clip.", "entmax"))


# Checkpoints.


@torch.no_grad()
@pytest.mark.parametrize("readout", ["attpool", "fdt", "gap", "linear", "sparo"])
def test_a_saved_model_comes_back_as_it_was(readout: str, tmp_path: Path) -> None:
    model, (images, ids) = small_clip(readout, quick_gelu=True), pairs()
    path = tmp_path / "checkpoint.pth"
    clip = clip_description(model.config, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    save_checkpoint({"model": model.state_dict(), "clip": clip, "epoch": 7, "optimizer": {}}, path)
    loaded = load_clip(path)
    assert loaded.model.config == model.config
    assert not loaded.model.training
    assert (loaded.mean, loaded.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    assert torch.equal(loaded.model.encode_image(images), model.encode_image(images))
    assert torch.equal(loaded.model.encode_text(ids), model.encode_text(ids))
    assert loaded.record["epoch"] == 7
    assert loaded.record["readout"] == readout
    assert loaded.record["text"]["context_length"] == N
    assert len(loaded.record["sha256"]) == 64


def test_weights_of_another_model_are_refused_by_name(tmp_path: Path) -> None:
    model = small_clip()
    weights = model.state_dict()
    weights.pop("text.norm.bias")
    with pytest.raises(CheckpointError, match=r"1 missing: text\.norm\.bias"):
        load_clip(save_clip(model, tmp_path / "a.pth", model=weights))
    other = clip_description(small_clip(num_slots=6).config)
    with pytest.raises(CheckpointError, match="of another shape"):
        load_clip(save_clip(model, tmp_path / "b.pth", clip=other))


def test_descriptions_that_are_not_understood_are_refused(tmp_path: Path) -> None:
    model = small_clip()
    clip = clip_description(model.config)
    with pytest.raises(ValueError, match="the model was saved with heads, rotary, which this version does not know"):
        load_clip(save_clip(model, tmp_path / "a.pth", clip={**clip, "rotary": 1, "heads": 2}))
    with pytest.raises(ValueError, match="the text encoder was saved with gated, which this version does not know"):
        load_clip(save_clip(model, tmp_path / "a.pth", clip={**clip, "text": {**clip["text"], "gated": 1}}))
    with pytest.raises(ValueError, match="saved with registers"):
        load_clip(save_clip(model, tmp_path / "b.pth", clip={**clip, "image": {**clip["image"], "registers": 4}}))
    del clip["mean"], clip["text"]
    with pytest.raises(CheckpointError, match="does not say mean, text"):
        load_clip(save_clip(model, tmp_path / "c.pth", clip=clip))


def test_a_file_without_clip_is_refused(tmp_path: Path) -> None:
    encoder = dino_sparo.create_encoder("vit_micro", 8, img_size=32)
    save_checkpoint({"teacher": encoder.state_dict()}, tmp_path / "dino.pth")
    with pytest.raises(CheckpointError, match=r"holds no CLIP.*load_encoder"):
        load_clip(tmp_path / "dino.pth")
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        load_clip(tmp_path / "none.pth")
