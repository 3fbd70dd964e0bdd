"""SPARO against loops written from equation 1 and against the paper's listing, in float64, with every gradient."""

import inspect
import math
import re

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dino_sparo
from dino_sparo import Sparo
from dino_sparo.models.readouts import ReadoutSizes, readout_kind

B, N, D, L, V, A = 2, 7, 13, 6, 11, 5


def forward_unchecked(sparo: Sparo, *inputs: object) -> object:
    """Sparo's forward without the shape checks that only run in tests, to see the error that a user sees."""
    return inspect.unwrap(type(sparo).forward)(sparo, *inputs)


def random_sparo(group_size: int, num_slots: int = L) -> Sparo:
    """Float64, every parameter away from zero."""
    sparo = Sparo(D, num_slots, V, A, group_size=group_size).double()
    with torch.no_grad():
        for parameter in sparo.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return sparo


def random_mask() -> torch.Tensor:
    """True where a token may be attended: every image keeps at least one token, each a different number."""
    return torch.tensor(
        [[True, False, True, True, False, True, False], [False, False, False, True, False, False, False]]
    )


def equation_1(sparo: Sparo, tokens: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """slot_l = W k_l(H)^T softmax(k_l(H) q_l / sqrt(A)) + b_W with k_l(h) = K_l h + b_l, one number at a time."""
    groups = L // (sparo.key_proj.out_features // A)
    weight = sparo.key_proj.weight.reshape(-1, A, D)
    bias = sparo.key_proj.bias.reshape(-1, A)
    slots, attention = [], []
    for image in range(tokens.shape[0]):
        for slot in range(L):
            key = slot // groups
            allowed = [n for n in range(tokens.shape[1]) if mask is None or bool(mask[image, n])]
            keys = {n: weight[key] @ tokens[image, n] + bias[key] for n in allowed}
            scores = {n: (sparo.queries[slot] * keys[n]).sum() / math.sqrt(A) for n in allowed}
            largest = max(score.item() for score in scores.values())
            total = sum((score - largest).exp() for score in scores.values())
            share = {n: (scores[n] - largest).exp() / total for n in allowed}
            pooled = sum(share[n] * keys[n] for n in allowed)
            slots.append(sparo.value_proj.weight @ pooled + sparo.value_proj.bias)
            zero = tokens.new_zeros(())
            attention.append(torch.stack([share.get(n, zero) for n in range(tokens.shape[1])]))
    return torch.stack(slots).reshape(-1, L, V), torch.stack(attention).reshape(-1, L, tokens.shape[1])


class ListedReadout(nn.Module):
    """The read-out in the order of the paper's listing (appendix 0.A): project every token, attend, project again."""

    def __init__(self, sparo: Sparo, group_size: int) -> None:
        super().__init__()
        self.sparo, self.group_size = sparo, group_size

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        batch, number, _ = tokens.shape
        keys = self.sparo.key_proj(tokens).reshape(batch, number, -1, A)
        keys = keys.repeat_interleave(self.group_size, dim=2).movedim(2, 1)
        scores = torch.einsum("la, blna -> bln", self.sparo.queries / math.sqrt(A), keys)
        pooled = torch.einsum("bln, blna -> bla", scores.softmax(dim=-1), keys)
        return self.sparo.value_proj(pooled)


def gradients(loss: torch.Tensor, sparo: Sparo, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    named = {**dict(sparo.named_parameters()), "tokens": tokens}
    found = torch.autograd.grad(loss, list(named.values()))
    return dict(zip(named, found, strict=True))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("group_size", [1, 2, 3])
def test_slots_attention_and_every_gradient_equal_a_loop_over_equation_1(group_size: int, masked: bool) -> None:
    torch.manual_seed(group_size)
    sparo = random_sparo(group_size)
    mask = random_mask() if masked else None
    tokens = torch.randn(B, N, D, dtype=torch.float64, requires_grad=True)
    slot_weights, attention_weights = torch.randn(B, L, V).double(), torch.randn(B, L, N).double()

    output = sparo(tokens, mask)
    slots, attention = equation_1(sparo, tokens, mask)

    torch.testing.assert_close(output.slots, slots, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(output.attention, attention, rtol=1e-11, atol=1e-11)
    ours = gradients((output.slots * slot_weights).sum() + (output.attention * attention_weights).sum(), sparo, tokens)
    loop = gradients((slots * slot_weights).sum() + (attention * attention_weights).sum(), sparo, tokens)
    expected = {"queries", "key_proj.weight", "key_proj.bias", "value_proj.weight", "value_proj.bias", "tokens"}
    assert set(ours) == expected
    for name, gradient in ours.items():
        torch.testing.assert_close(
            gradient, loop[name], rtol=1e-10, atol=1e-10, msg=lambda text, n=name: f"{n}: {text}"
        )
        assert gradient.abs().max() > 1e-3, name


def test_float32_is_as_accurate_as_the_papers_listing() -> None:
    torch.manual_seed(0)
    sparo = random_sparo(1)
    tokens = torch.randn(B, N, D, dtype=torch.float64)
    exact = sparo(tokens).slots
    sparo = sparo.float()
    ours = sparo(tokens.float()).slots
    listed = ListedReadout(sparo, 1)(tokens.float())
    assert (ours - exact).abs().max() < 3 * (listed - exact).abs().max() + 1e-6


def test_initialisation_is_the_papers() -> None:
    torch.manual_seed(0)
    embed_dim, num_slots, slot_dim, key_dim, group_size = 97, 64, 31, 29, 2
    sparo = Sparo(embed_dim, num_slots, slot_dim, key_dim, group_size=group_size)
    assert sparo.queries.shape == (num_slots, key_dim)
    assert abs(sparo.queries.mean().item()) < 0.1
    assert sparo.queries.std().item() == pytest.approx(1, abs=0.05)
    bound = math.sqrt(6 / (embed_dim + num_slots // group_size * key_dim))
    assert sparo.key_proj.weight.abs().max().item() == pytest.approx(bound, rel=1e-3)
    assert sparo.key_proj.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    assert sparo.value_proj.weight.shape == (slot_dim, key_dim)
    # The listing leaves the value weight as nn.Linear draws it: uniform within one over the root of its inputs.
    assert sparo.value_proj.weight.abs().max().item() == pytest.approx(1 / math.sqrt(key_dim), rel=0.05)
    assert sparo.value_proj.weight.std().item() == pytest.approx(1 / math.sqrt(3 * key_dim), rel=0.07)
    assert not sparo.key_proj.bias.any()
    assert not sparo.value_proj.bias.any()


class LargestOutput(TorchDispatchMode):
    """Remembers the largest memory, in numbers, behind any tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.numel = max(self.numel, leaf.untyped_storage().nbytes() // leaf.element_size())
        return result


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("group_size", [1, 2])
def test_no_tensor_of_all_tokens_keys_is_formed_forward_or_backward(group_size: int, masked: bool) -> None:
    batch, number, width, slots, slot_width, key_width = 3, 101, 17, 14, 5, 19
    sparo = Sparo(width, slots, slot_width, key_width, group_size=group_size)
    tokens = torch.randn(batch, number, width, requires_grad=True)
    mask = torch.rand(batch, number) < 0.7 if masked else None
    with LargestOutput() as seen:
        output = sparo(tokens, mask)
        (output.slots.square().sum() + output.attention.square().sum()).backward()
    assert tokens.grad is not None
    forbidden = batch * number * slots // group_size * key_width
    needed = max(batch * number * width, batch * slots * number, slots * key_width * width, batch * slots * width)
    assert seen.numel < forbidden
    assert seen.numel <= needed


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"group_size": 4}, r"group_size=4 does not divide num_slots=6.*choose one of \[1, 2, 3, 6\]"),
        ({"group_size": 0}, "group_size=0 is not a valid size"),
        ({"num_slots": 0}, "num_slots=0 is not a valid size"),
        ({"slot_dim": -1}, "slot_dim=-1 is not a valid size"),
        ({"key_dim": 0}, "key_dim=0 is not a valid size"),
        ({"embed_dim": 0}, "embed_dim=0 is not a valid size"),
    ],
)
def test_sizes_that_cannot_be_built_are_named(changed: dict[str, int], message: str) -> None:
    sizes = {"embed_dim": D, "num_slots": L, "slot_dim": V, "key_dim": A, "group_size": 1, **changed}
    with pytest.raises(ValueError, match=message):
        Sparo(**sizes)


def test_every_size_may_be_one() -> None:
    output = Sparo(1, 1, 1, 1, group_size=1)(torch.ones(B, N, 1))
    assert output.slots.shape == (B, 1, 1)
    torch.testing.assert_close(output.attention, torch.full((B, 1, N), 1 / N))
    for name in ("cls", "gap"):
        assert readout_kind(name).build(ReadoutSizes(1))(torch.ones(B, N, 1)).slots.eq(1).all()


@pytest.mark.parametrize("shape", [(B, N, D + 4), (N, D), (B, 1, N, D)])
def test_tokens_of_another_shape_are_refused_with_the_width_they_need(shape: tuple[int, ...]) -> None:
    message = f"tokens have shape {shape}; SPARO was built for (B, N, {D})"
    with pytest.raises(ValueError, match=re.escape(message)):
        forward_unchecked(Sparo(D, L, V, A), torch.randn(shape), None)


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(B, N),
        torch.ones(B, N, dtype=torch.long),
        torch.ones(B, N + 1, dtype=torch.bool),
        torch.ones(N, dtype=torch.bool),
    ],
    ids=["float", "integer", "too long", "without batch"],
)
def test_a_mask_of_another_shape_or_type_is_refused(mask: torch.Tensor) -> None:
    given = f"mask has dtype {mask.dtype} and shape {tuple(mask.shape)}; give a bool tensor of shape {(B, N)}"
    for readout in ("sparo", "cls", "gap"):
        with pytest.raises(ValueError, match=re.escape(given)):
            forward_unchecked(readout_kind(readout).build(ReadoutSizes(D, L, V, A)), torch.randn(B, N, D), mask)


def test_gap_averages_what_the_mask_allows_and_cls_takes_the_class_token_all_the_same() -> None:
    tokens, mask = torch.randn(B, N, D, dtype=torch.float64), random_mask()
    averaged = readout_kind("gap").build(ReadoutSizes(D))(tokens, mask)
    for image in range(B):
        chosen = [n for n in range(N) if mask[image, n]]
        expected = sum(tokens[image, n] for n in chosen) / len(chosen)
        torch.testing.assert_close(averaged.slots[image, 0], expected)
        weights = [1 / len(chosen) if n in chosen else 0.0 for n in range(N)]
        torch.testing.assert_close(averaged.attention[image, 0], torch.tensor(weights, dtype=torch.float64))
    assert torch.equal(readout_kind("cls").build(ReadoutSizes(D))(tokens, mask).slots, tokens[:, :1])


def test_a_readout_has_the_papers_sizes_unless_others_are_given() -> None:
    readout = readout_kind("sparo").build(ReadoutSizes(D))
    sizes = (readout.embed_dim, readout.num_slots, readout.slot_dim, readout.key_dim, readout.group_size)
    assert sizes == (D, 64, 64, 64, 1)
    assert Sparo(D, L, V, A).group_size == 1


def small_encoder(readout: str) -> nn.Module:
    torch.manual_seed(0)
    return dino_sparo.create_encoder("vit_micro", patch_size=8, readout=readout, img_size=32).eval()


@torch.no_grad()
def test_cls_reads_the_class_token_with_one_hot_attention() -> None:
    encoder = small_encoder("cls")
    images = torch.randn(2, 3, 24, 32)
    output, tokens = encoder.readout_output(images), encoder.backbone(images)
    torch.testing.assert_close(output.slots, tokens[:, :1])
    expected = torch.zeros(2, 1, 1 + 3 * 4)
    expected[:, :, 0] = 1
    torch.testing.assert_close(output.attention, expected)


@torch.no_grad()
@pytest.mark.parametrize("readout", ["cls", "gap", "sparo"])
def test_attention_is_given_in_training_mode_too_or_left_out_as_none(readout: str) -> None:
    encoder = small_encoder(readout).train()
    output = encoder.readout_output(torch.randn(2, 3, 16, 16))
    assert output.slots.ndim == 3
    assert output.attention is None or output.attention.shape == (2, output.slots.shape[1], 5)
