"""Crops in, encodings out: grouping, order, sizes, the probe's features, keys, and refused settings."""

import copy
import inspect
import math

import pytest
import torch
from reference import weights as recorded
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import dino_sparo
from dino_sparo import EncoderWithHead
from dino_sparo.models import architectures
from dino_sparo.models.backbone import Backbone
from dino_sparo.models.encoder import EncoderConfig, encoder_from_config
from dino_sparo.models.readouts import READOUTS, ReadoutKind


def small(readout: str = "sparo", **changed: object) -> nn.Module:
    """Four blocks, the last of them a read-out of 6 slots of 10 numbers if the read-out is sparo."""
    settings = {"num_slots": 6, "slot_dim": 10, "key_dim": 7, "group_size": 2, "patch_size": 8, "img_size": 32}
    return dino_sparo.create_encoder("vit_micro", readout=readout, **{**settings, **changed}).eval()


@pytest.fixture(scope="module", params=["sparo", "cls", "gap"])
def encoder(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    return small(request.param)


@torch.no_grad()
@pytest.mark.parametrize(
    ("sizes", "counts"),
    [
        ([(32, 32), (32, 32), (16, 16), (16, 16), (16, 16)], [3] * 5),
        ([(16, 16), (32, 32), (16, 16), (24, 24), (32, 32)], [3] * 5),
        ([(32, 24), (24, 32), (16, 24), (32, 24)], [3] * 4),
        ([(24, 16)], [3]),
        ([(32, 32), (32, 32), (16, 16)], [2, 1, 3]),
    ],
    ids=["globals then locals", "sizes interleaved", "equal widths, unequal heights", "one crop", "numbers of images"],
)
def test_crops_run_together_equal_crops_run_one_by_one_in_the_same_order(
    encoder, sizes: list[tuple[int, int]], counts: list[int]
) -> None:
    crops = [torch.randn(count, 3, *size) for count, size in zip(counts, sizes, strict=True)]
    together = encoder(crops)
    one_by_one = torch.cat([encoder(crop) for crop in crops])
    assert together.shape == (sum(counts), encoder.encoding_dim)
    torch.testing.assert_close(together, one_by_one, rtol=1e-4, atol=1e-5)
    # Crops differ, so a wrong order could not pass.
    assert torch.cdist(one_by_one, one_by_one).add(torch.eye(len(one_by_one))).min() > 1e-3


def test_equal_crops_take_one_pass_through_the_backbone(encoder) -> None:
    passes: list[int] = []
    handle = encoder.backbone.blocks[0].register_forward_hook(
        lambda _module, inputs, _output: passes.append(len(inputs[0]))
    )
    encoder([torch.randn(2, 3, size, size) for size in (32, 32, 16, 16, 16)])
    handle.remove()
    assert passes == [4, 6]


@torch.no_grad()
def test_encoding_is_the_slots_one_after_another(encoder) -> None:
    images = torch.randn(2, 3, 32, 24)
    slots = encoder.readout_output(images).slots
    expected = torch.cat([slots[:, slot] for slot in range(slots.shape[1])], dim=1)
    torch.testing.assert_close(encoder(images), expected)
    assert encoder.encoding_dim == expected.shape[1]


@pytest.mark.parametrize(
    ("arch", "readout", "blocks", "encoding_dim"),
    [
        ("vit_tiny", "sparo", 11, 4096),
        ("vit_tiny", "cls", 12, 192),
        ("vit_micro", "sparo", 3, 4096),
    ],
)
def test_sparo_replaces_the_last_block(arch: str, readout: str, blocks: int, encoding_dim: int) -> None:
    with recorded.SkipInitialisation():
        encoder = dino_sparo.create_encoder(arch, readout=readout)
    assert len(encoder.backbone.blocks) == blocks
    assert encoder.encoding_dim == encoding_dim
    assert [name for name in encoder.state_dict() if name.startswith("readout.")] == (
        ["readout.queries"] + [f"readout.{p}_proj.{w}" for p in ("key", "value") for w in ("weight", "bias")]
        if readout == "sparo"
        else []
    )


def test_the_vits_initialisation_does_not_overwrite_sparos() -> None:
    torch.manual_seed(0)
    readout = dino_sparo.create_encoder("vit_tiny").readout
    assert readout.queries.std().item() == pytest.approx(1, abs=0.05)
    xavier = math.sqrt(2 / (192 + 64 * 64))
    assert readout.key_proj.weight.std().item() == pytest.approx(xavier, rel=0.02)
    assert readout.value_proj.weight.std().item() == pytest.approx(1 / math.sqrt(3 * 64), rel=0.05)
    assert not readout.key_proj.bias.any()
    assert not readout.value_proj.bias.any()


@torch.no_grad()
def test_sparo_reads_the_final_layer_norms_output() -> None:
    torch.manual_seed(1)
    encoder = small()
    normalised: list[torch.Tensor] = []
    handle = encoder.backbone.norm.register_forward_hook(lambda _module, _inputs, output: normalised.append(output))
    encoding = encoder(torch.randn(2, 3, 32, 32))
    handle.remove()
    assert normalised[-1].shape == (2, 17, 128)
    torch.testing.assert_close(encoding, encoder.readout(normalised[-1]).slots.flatten(1))


def class_tokens_by_hand(encoder: nn.Module, images: torch.Tensor) -> list[torch.Tensor]:
    """The normalised class token after each block."""
    outputs: list[torch.Tensor] = []
    handles = [
        block.register_forward_hook(lambda _m, _i, output: outputs.append(output)) for block in encoder.backbone.blocks
    ]
    encoder.backbone(images)
    for handle in handles:
        handle.remove()
    return [encoder.backbone.norm(tokens)[:, 0] for tokens in outputs]


@torch.no_grad()
@pytest.mark.parametrize("n", [1, 2, 4])
def test_probe_features_are_the_last_class_tokens_and_with_a_readout_its_raw_encoding(encoder, n: int) -> None:
    with torch.random.fork_rng():
        randomised = copy.deepcopy(encoder)
        for parameter in randomised.backbone.norm.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    images = torch.randn(2, 3, 32, 16)
    features = randomised.probe_layers(images, n)[0]
    tokens = class_tokens_by_hand(randomised, images)
    kind = randomised.config.readout
    # The last feature stands for the last block: sparo replaces it, gap reads it.
    if kind == "cls":
        expected = tokens[-n:]
    elif kind == "gap":
        expected = [*tokens[len(tokens) - n : -1], randomised(images)]
    else:
        expected = [*tokens[len(tokens) - n + 1 :], randomised(images)]
    assert len(features) == n
    for feature, wanted in zip(features, expected, strict=True):
        torch.testing.assert_close(feature, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("n", [0, 5])
def test_more_features_than_blocks_are_refused(encoder, n: int) -> None:
    with pytest.raises(ValueError, match=rf"n={n} .*with 4( blocks|, read-out included)$"):
        encoder.probe_layers(torch.randn(1, 3, 32, 32), n)


@torch.no_grad()
@pytest.mark.parametrize(("readout", "passes"), [("sparo", [1, 1, 2, 3]), ("gap", [1, 2, 3, 4]), ("cls", [1, 2, 3, 4])])
def test_only_the_layers_that_are_asked_for_are_normalised(readout: str, passes: list[int]) -> None:
    encoder, calls = small(readout), []
    encoder.backbone.norm.register_forward_hook(lambda *_: calls.append(1))
    for n, expected in enumerate(passes, start=1):
        calls.clear()
        encoder.probe_layers(torch.randn(1, 3, 16, 16), n)
        assert len(calls) == expected


@torch.no_grad()
@pytest.mark.parametrize("n", [1, 3, [0, 2], [-1, 1]], ids=str)
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("reshape", [True, False])
def test_intermediate_layers_equal_those_of_timms_vision_transformer(n, norm: bool, reshape: bool) -> None:
    ours, sizes = small("cls"), {"embed_dim": 128, "depth": 4, "num_heads": 4}
    theirs = VisionTransformer(img_size=32, patch_size=8, num_classes=0, **sizes).eval()
    theirs.load_state_dict(ours.backbone.state_dict())
    images = torch.randn(2, 3, 32, 32)
    for pairs in (False, True):
        options = {"norm": norm, "reshape": reshape, "return_prefix_tokens": pairs}
        found = ours.get_intermediate_layers(images, n, **options)
        expected = theirs.get_intermediate_layers(images, n, **options)
        torch.testing.assert_close(found, tuple(map(tuple, expected)) if pairs else tuple(expected))


@pytest.mark.parametrize("n", [0, 5, [4], [-5], []], ids=str)
def test_intermediate_layers_that_do_not_exist_are_refused(n) -> None:
    with pytest.raises(ValueError, match="intermediate layers requested of a backbone with 4 blocks"):
        small("cls").get_intermediate_layers(torch.randn(1, 3, 32, 32), n)


@torch.no_grad()
def test_the_probe_is_given_four_layers_side_by_side_and_on_request_the_mean_patch(encoder) -> None:
    images = torch.randn(2, 3, 32, 16)
    layers = encoder.probe_layers(images, 4)[0]
    torch.testing.assert_close(encoder.probe_features(images), torch.cat(layers, dim=1))
    pooled = encoder.probe_features(images, n_last_blocks=3, avgpool_patchtokens=True)
    patches = encoder.backbone(images)[:, 1:]
    mean = sum(patches[:, n] for n in range(8)) / 8
    torch.testing.assert_close(pooled, torch.cat([*layers[-3:], mean], dim=1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("which", ["student", "teacher"])
def test_a_vanilla_networks_keys_and_shapes_are_the_references(which: str) -> None:
    reference = recorded.load_keys()["checkpoint"][which]
    shapes = {name.removeprefix("module."): tuple(shape) for name, shape in reference.items()}
    with recorded.SkipInitialisation():
        encoder = dino_sparo.create_encoder("vit_tiny", patch_size=16, readout="cls", img_size=32)
        network = EncoderWithHead(encoder, dino_sparo.DINOHead(192, recorded.STEPS["out_dim"]))
    assert {name: tuple(value.shape) for name, value in network.state_dict().items()} == shapes


def test_a_sparo_networks_keys_lie_below_backbone_readout_and_head() -> None:
    encoder = small()
    network = EncoderWithHead(encoder, dino_sparo.DINOHead(encoder.encoding_dim, 5, hidden_dim=7, bottleneck_dim=3))
    assert {name.split(".")[0] for name in network.state_dict()} == {"backbone", "readout", "head"}
    assert "head.last_layer.weight_v" in network.state_dict()


@torch.no_grad()
def test_the_network_is_the_head_on_the_encodings_of_all_crops() -> None:
    encoder = small()
    head = dino_sparo.DINOHead(encoder.encoding_dim, 5, hidden_dim=7, bottleneck_dim=3)
    crops = [torch.randn(2, 3, size, size) for size in (32, 32, 16)]
    logits = EncoderWithHead(encoder, head).eval()(crops)
    torch.testing.assert_close(logits, head(torch.cat([encoder(crop) for crop in crops])), rtol=1e-4, atol=1e-5)


def test_every_parameter_of_the_encoder_gets_a_gradient(encoder) -> None:
    encoder.zero_grad()
    encoder([torch.randn(2, 3, 32, 32), torch.randn(2, 3, 16, 16)]).square().sum().backward()
    without = [name for name, parameter in encoder.named_parameters() if parameter.grad is None]
    encoder.zero_grad()
    assert without == []


@torch.no_grad()
def test_pixels_beyond_the_last_whole_patch_are_left_out(encoder) -> None:
    crops = torch.randn(2, 3, 30, 21)
    torch.testing.assert_close(encoder(crops), encoder(crops[:, :, :24, :16]))


def test_an_empty_list_of_crops_is_refused(encoder) -> None:
    with pytest.raises((RuntimeError, ValueError), match="non-empty list"):  # which one depends on torch
        encoder([])


def test_a_config_leaves_mean_and_std_to_others_refuses_other_names_and_cannot_be_changed() -> None:
    config = EncoderConfig.from_dict({"arch": "vit_tiny", "group_size": 2, "mean": (0.5,), "std": (0.2,)})
    assert config == EncoderConfig(arch="vit_tiny", group_size=2)
    with pytest.raises(AttributeError):
        config.arch = "vit_base"
    with pytest.raises(ValueError, match="saved with depth, register_tokens, which this version does not know; update"):
        EncoderConfig.from_dict({"arch": "vit_tiny", "register_tokens": 4, "depth": 3})


def test_the_defaults_of_config_builder_and_backbone_are_the_same() -> None:
    with recorded.SkipInitialisation():
        encoder = dino_sparo.create_encoder()
    assert encoder.config == EncoderConfig()
    for name in ("patch_size", "img_size"):
        assert inspect.signature(Backbone).parameters[name].default == getattr(EncoderConfig(), name)
    assert all(isinstance(block.drop_path1, nn.Identity) for block in encoder.backbone.blocks)
    images = {"patch_size": 16, "img_size": 224, "in_chans": 3}
    slots = {"num_slots": 64, "slot_dim": 64, "key_dim": 64, "group_size": 1}
    unused = {"pre_norm": False, "replace_block": None, "quick_gelu": False, "num_codes": 0, "code_dim": 0}
    assert vars(EncoderConfig()) == {"arch": "vit_small", "readout": "sparo", **images, **slots, **unused}


@pytest.mark.parametrize(
    ("readout", "in_chans", "summary"),
    [
        ("sparo", 3, "vit_micro/8 at 32 px, sparo (6 slots of 10, keys of 7, 2 slots per key)"),
        ("gap", 1, "vit_micro/8 at 32 px of 1 channel, gap"),
        ("cls", 5, "vit_micro/8 at 32 px of 5 channels, cls"),
    ],
)
def test_the_log_describes_architecture_images_and_readout(readout: str, in_chans: int, summary: str) -> None:
    assert small(readout, in_chans=in_chans).summary == summary


def test_an_encoder_built_from_a_config_drops_no_branch_unless_asked() -> None:
    config = small().config
    rates = [
        [getattr(block.drop_path1, "drop_prob", 0.0) for block in encoder_from_config(config, *rate).backbone.blocks]
        for rate in ((), (0.3,))
    ]
    assert rates == [[0, 0, 0], pytest.approx([0, 0.1, 0.2])]


# Any read-out of the table, and those of others.


@torch.no_grad()
@pytest.mark.parametrize("name", sorted(name for name, kind in READOUTS.items() if not kind.reads_captions_only))
def test_every_read_out_says_the_width_of_its_encoding(name: str) -> None:
    if READOUTS[name].needs_codes:
        pytest.importorskip("entmax")
    sizes = {"num_slots": 4, "slot_dim": 32} if name == "attention" else {}  # its heads are as wide as a token together
    encoder = small(name, group_size=1, num_codes=17, code_dim=3, **sizes)
    assert encoder(torch.rand(2, 3, 32, 32)).shape == (2, encoder.encoding_dim)


def test_the_readouts_that_help_names_stand_in_the_table() -> None:
    assert set(architectures.DINO_READOUTS) <= READOUTS.keys()


def test_a_read_out_of_captions_is_refused_for_images() -> None:
    with pytest.raises(ValueError, match="'eos' reads captions only"):
        small("eos")


def test_an_unknown_read_out_says_how_to_run_a_command_with_a_registered_one() -> None:
    message = r"unknown readout 'mine'; choose one of \[.*'cls', .*'sparo'.*python YOUR_FILE.py COMMAND"
    with pytest.raises(ValueError, match=message):
        small("mine")


class FirstToken(nn.Module):
    """The first numbers of the class token, read by a class that this package does not know."""

    def __init__(self, encoding_dim: int) -> None:
        super().__init__()
        self.encoding_dim = encoding_dim

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> dino_sparo.ReadoutOutput:
        return dino_sparo.ReadoutOutput(tokens[:, :1, : self.encoding_dim], torch.ones_like(tokens[:, None, :, 0]))


@torch.no_grad()
def test_a_new_entry_of_the_table_declares_all_that_others_need(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = ReadoutKind(lambda sizes: FirstToken(sizes.embed_dim // 2), replaces_block=True, takes_raw_tokens=True)
    monkeypatch.setitem(READOUTS, "half", kind)
    encoder = small("half")
    assert encoder.encoding_dim == 64
    assert (len(encoder.backbone.blocks), type(encoder.backbone.norm)) == (3, nn.Identity)
    images = torch.rand(2, 3, 32, 32)
    assert torch.equal(encoder(images), encoder.backbone(images)[:, 0, :64])


@torch.no_grad()
def test_a_read_out_of_the_class_token_is_known_by_what_it_declares(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug: the encoder asked for one class of read-out, so that any other computed all tokens of the last block."""
    kind = ReadoutKind(lambda sizes: FirstToken(sizes.embed_dim), reads_class_token_only=True, shows="head")
    monkeypatch.setitem(READOUTS, "first", kind)
    ours, first = small("cls"), small("first")
    first.load_state_dict(ours.state_dict())
    images, normalised = torch.rand(2, 3, 32, 32), list[int]()
    first.backbone.norm.register_forward_hook(lambda *given: normalised.append(given[2].numel() // 128))
    assert torch.equal(first(images), ours(images))
    assert normalised == [2]
    assert torch.equal(first.probe_features(images), ours.probe_features(images))
