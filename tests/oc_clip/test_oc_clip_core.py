"""Binding, structured similarity and losses of OC-CLIP against loops written from the equations, in float64.

All sizes differ, and every gradient is compared. The loops know nothing of masks: each text has its own entities
and relations.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jaxtyping
import pytest
import torch
from oc_clip_fakes import bind_all
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F

from dino_sparo.image_text.step import contrastive_loss
from dino_sparo.oc_clip import binding as oc_binding
from dino_sparo.oc_clip.batches import EncodedGraphs
from dino_sparo.oc_clip.binding import Binding, BindingConfig
from dino_sparo.oc_clip.loss import relation_loss
from dino_sparo.oc_clip.scoring import MIN_COEF, Scoring, score_all_pairs

# B images, U texts, E entities, R relations, N patches; the blocks' two heads divide DIM.
B, U, E, R, N, DEFAULTS, DIM, REL_DIM, IMAGE_DIM = 2, 3, 5, 4, 7, 2, 12, 13, 17
ENTITIES, RELATIONS = (5, 1, 3), (2, 0, 4)
EXACT: dict[str, float] = {"rtol": 0, "atol": 1e-12}


class Problem(NamedTuple):
    """Modules with all parameters away from zero, and inputs that ask for gradients."""

    binding: Binding
    scoring: Scoring
    graphs: EncodedGraphs
    patches: Tensor

    def leaves(self) -> dict[str, Tensor]:
        parameters = {**dict(self.binding.named_parameters()), **dict(self.scoring.named_parameters())}
        inputs = {"entities": self.graphs.entities, "relations": self.graphs.relations, "patches": self.patches}
        return {name: tensor for name, tensor in (parameters | inputs).items() if tensor.numel()}


def mask_of(counts: Sequence[int], width: int) -> Tensor:
    return torch.arange(width) < torch.tensor(counts)[:, None]


def problem(num_default: int = DEFAULTS, competition: str = "queries", chunk_mb: float = 256) -> Problem:
    torch.manual_seed(0)
    sizes = BindingConfig(DIM, num_default, 2, 2, competition=competition, rel_dim=REL_DIM, ent_coef=1.3, rel_coef=0.7)
    binding, scoring = Binding(IMAGE_DIM, N, sizes).double(), Scoring(sizes).double()
    binding.chunk_mb = chunk_mb
    with torch.no_grad():
        for parameter in [*binding.parameters(), *scoring.subject.parameters(), *scoring.object.parameters()]:
            parameter.copy_(torch.randn_like(parameter) * 0.5)
    subjects, objects = torch.randint(0, E, (2, U, R))
    counts = torch.tensor(ENTITIES)[:, None]
    graphs = EncodedGraphs(
        entities=torch.randn(U, E, DIM, dtype=torch.float64, requires_grad=True),
        entity_mask=mask_of(ENTITIES, E),
        relations=torch.randn(U, R, REL_DIM, dtype=torch.float64, requires_grad=True),
        subjects=subjects % counts,
        objects=objects % counts,
        relation_mask=mask_of(RELATIONS, R),
        entity_counts=ENTITIES,
        relation_counts=RELATIONS,
    )
    return Problem(binding, scoring, graphs, torch.randn(B, N, IMAGE_DIM, dtype=torch.float64, requires_grad=True))


def gradients(case: Problem, output: Tensor) -> dict[str, Tensor]:
    """d sum(output * fixed random numbers) / d every parameter and input; zeros where nothing arrives."""
    weights = torch.randn(output.shape, dtype=output.dtype, generator=torch.Generator().manual_seed(1))
    leaves = case.leaves()
    found = torch.autograd.grad((output * weights).sum(), list(leaves.values()), retain_graph=True, allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(leaves.items(), found, strict=True)
    }


def assert_same(case: Problem, ours: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(ours, expected, **EXACT)
    torch.testing.assert_close(gradients(case, ours), gradients(case, expected), **EXACT)


# The equations, one number or vector at a time.


def layer_norm(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    return F.layer_norm(x, x.shape, norm.weight, norm.bias, eps=1e-5)


def attention_block(tokens: list[Tensor], block: Any) -> list[Tensor]:
    """x + Attention(LN(x)), then x + MLP(LN(x)), by torch: two heads, MLP ratio 2."""
    layer = nn.TransformerEncoderLayer(
        DIM, 2, 2 * DIM, dropout=0.0, activation="gelu", layer_norm_eps=1e-5, batch_first=True, norm_first=True
    )
    parts = (block.attn, block.mlp, block.norm1, block.norm2)  # in torch's order
    weights = [weight for part in parts for weight in part.parameters()]
    named = {name: weight for (name, _), weight in zip(layer.named_parameters(), weights, strict=True)}
    return [*torch.func.functional_call(layer, named, torch.stack(tokens)[None])[0]]


def encoded_patches(binding: Binding, patches: Tensor) -> tuple[Tensor, Tensor]:
    keys, values = [], []
    first, _, last = binding.patch_mlp
    for image in patches:
        tokens = [last(F.gelu(first(x))) + binding.positions[n] for n, x in enumerate(image)]
        for block in binding.blocks:
            tokens = attention_block(tokens, block)
        both = [binding.to_keys_values(x) for x in tokens]
        keys.append(torch.stack([layer_norm(x[:DIM], binding.key_norm) for x in both]))
        values.append(torch.stack([layer_norm(x[DIM:], binding.value_norm) for x in both]))
    return torch.stack(keys), torch.stack(values)


def shares(binding: Binding, entities: list[Tensor], keys: Tensor) -> list[list[Tensor]]:
    """a of one text in one image: a number per entity or default token, and patch."""
    queries = [binding.query_proj.weight @ layer_norm(entity, binding.query_norm) for entity in entities]
    queries += [binding.query_proj.weight @ token for token in binding.default_tokens]
    projected = [binding.key_proj.weight @ key for key in keys]
    powers = [[(q @ k / math.sqrt(DIM)).exp() for k in projected] for q in queries]
    if binding.competition == "keys":
        return [[power / sum(row) for power in row] for row in powers]
    return [[row[n] / sum(other[n] for other in powers) for n in range(N)] for row in powers]


def slots_of(binding: Binding, entities: list[Tensor], keys: Tensor, values: Tensor) -> list[Tensor]:
    slots = []
    for row in shares(binding, entities, keys)[: len(entities)]:
        weights = [(share + 1e-8) / sum(other + 1e-8 for other in row) for share in row]
        slots.append(sum(w * (binding.value_proj.weight @ value) for w, value in zip(weights, values, strict=True)))
    return slots


def cosine(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum() / ((x * x).sum().sqrt() * (y * y).sum().sqrt())


def fit(scoring: Scoring, relation: Tensor, subject: Tensor, other: Tensor) -> Tensor:
    """f of equation 3."""
    ends = ((scoring.subject, subject), (scoring.object, other))
    return cosine(relation, sum(f[2](F.gelu(f[0](torch.cat([relation, s])))) for f, s in ends))


def texts_of(graphs: EncodedGraphs) -> Iterator[tuple[list[Tensor], list[tuple[Tensor, int, int]]]]:
    """Each text's own entities and relations."""
    for text in range(len(graphs.entities)):
        subjects, objects = graphs.subjects[text].tolist(), graphs.objects[text].tolist()
        relations = [(graphs.relations[text, p], subjects[p], objects[p]) for p in range(graphs.relation_counts[text])]
        yield [graphs.entities[text, m] for m in range(graphs.entity_counts[text])], relations


def score_of(scoring: Scoring, entities: list[Tensor], relations: list, slots: list[Tensor]) -> Tensor:
    """Equation 2."""
    alpha, beta = scoring.ent_coef, scoring.rel_coef
    objects = sum(cosine(entity, slot) for entity, slot in zip(entities, slots, strict=True))
    fits = sum(fit(scoring, r, slots[s], slots[o]) for r, s, o in relations)
    return (alpha * objects + beta * fits) / (alpha * len(entities) + beta * len(relations))


def expected_scores(case: Problem, graphs: EncodedGraphs | None = None) -> Tensor:
    keys, values = encoded_patches(case.binding, case.patches)
    texts = list(texts_of(graphs or case.graphs))
    rows = []
    for image in range(B):
        pairs = [(*text, slots_of(case.binding, text[0], keys[image], values[image])) for text in texts]
        rows.append(torch.stack([score_of(case.scoring, *pair) for pair in pairs]))
    return torch.stack(rows)


KINDS = {"queries": {}, "no defaults": {"num_default": 0}, "keys": {"num_default": 0, "competition": "keys"}}


# Binding.


def test_patches_become_the_keys_and_values_of_the_equations() -> None:
    case = problem()
    ours, expected = (torch.stack(f) for f in (case.binding.encode_patches(case.patches), encoded_patches(*case[::3])))
    assert_same(case, ours, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_slots_are_those_of_the_equations(kind: str) -> None:
    case = problem(**KINDS[kind])
    keys, values = case.binding.encode_patches(case.patches)
    ours = bind_all(case.binding, case.graphs.entities, case.graphs.entity_mask, keys, values)
    zero = [torch.zeros(DIM, dtype=torch.float64)]
    expected = [
        torch.stack(slots_of(case.binding, entities, keys[image], values[image]) + zero * (E - len(entities)))
        for image in range(B)
        for entities, _ in texts_of(case.graphs)
    ]
    assert_same(case, ours, torch.stack(expected).unflatten(0, (B, U)))


def test_entities_may_stand_anywhere_in_their_row() -> None:
    case = problem()
    keys, values = case.binding.encode_patches(case.patches)
    order = torch.tensor([3, 0, 4, 2, 1])
    inputs = case.graphs.entities, case.graphs.entity_mask
    moved = bind_all(case.binding, *(tensor[:, order] for tensor in inputs), keys, values)
    torch.testing.assert_close(moved, bind_all(case.binding, *inputs, keys, values)[:, :, order], **EXACT)


@pytest.mark.parametrize("kind", KINDS)
def test_shares_are_those_of_the_equations_and_sum_to_one_over_the_competitors(kind: str) -> None:
    case = problem(**KINDS[kind])
    keys, _ = case.binding.encode_patches(case.patches)
    num_default = case.binding.num_default
    for own, _ in texts_of(case.graphs):
        for image in range(B):
            entities, defaults = case.binding.attention(torch.stack(own), keys[image])
            assert (entities.shape, defaults.shape) == ((len(own), N), (num_default, N))
            both = torch.cat([entities, defaults])
            total = both.sum(dim=1 if kind == "keys" else 0)
            torch.testing.assert_close(total, torch.ones_like(total), **EXACT)
            rows = [torch.stack(row) for row in shares(case.binding, own, keys[image])]
            torch.testing.assert_close(both, torch.stack(rows), **EXACT)


def test_the_slots_of_a_caption_without_entities_are_zero() -> None:
    mask = mask_of((2, 0, 1), E)
    tensors = torch.randn(U, E, DIM, dtype=torch.float64), mask, *torch.randn(2, B, N, DIM, dtype=torch.float64)
    binding = problem().binding
    slots = [bind_all(binding, *tensors)[:, 1], binding.bind_matched(tensors[0][:B], *(t[:B] for t in tensors[1:]))[1]]
    assert all(s.eq(0).all() for s in slots)
    found = torch.autograd.grad(sum(s.sum() for s in slots), [binding.default_tokens, binding.query_proj.weight])
    assert all(gradient.eq(0).all() for gradient in found)


# Scores.


@pytest.mark.parametrize("kind", KINDS)
def test_scores_of_all_pairs_are_those_of_the_equations(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded or not, with chunks that are kept, that are computed again, and that hold a single text."""
    case = problem(**KINDS[kind])
    expected = expected_scores(case)
    expected_gradients = gradients(case, expected)
    forms, chunks = [(True, ()), (True, ("cpu",)), (False, ("cpu",))], [(256, 1), (256, 0), (1e-9, 0)]
    for (training, pads_on), (chunk_mb, kept_share) in itertools.product(forms, chunks):
        monkeypatch.setattr(oc_binding, "KEPT_SHARE", kept_share)
        case.binding.train(training)
        case.binding.pads_on, case.binding.chunk_mb = pads_on, chunk_mb
        ours = score_all_pairs(case.binding, case.scoring, case.graphs, *case.binding.encode_patches(case.patches))
        torch.testing.assert_close(ours, expected, **EXACT)
        torch.testing.assert_close(gradients(case, ours), expected_gradients, **EXACT)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo looks at it
def test_the_padded_form_is_compiled_once_for_graphs_of_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the checks of shapes are no part of a graph
    case, counter = problem(), CompileCounter()
    case.binding.pads_on = ("cpu",)
    patches = [tensor.detach() for tensor in case.binding.encode_patches(case.patches)]
    narrow = [[tensor[:, :width].contiguous() for tensor in case.graphs.tensors] for width in (2, 3)]
    counts = tuple(tuple(min(count, width) for count in ENTITIES) for width in (2, 3))
    graphs = [
        case.graphs,
        *(EncodedGraphs(*t[:3], t[3] % 1, t[4] % 1, t[5], c, c) for t, c in zip(narrow, counts, strict=True)),
    ]
    expected = [score_all_pairs(case.binding, case.scoring, one, *patches) for one in graphs]
    for module in (case.binding, case.scoring):
        module.compile(dynamic=True, backend=counter)
    for one, scores in zip(graphs, expected, strict=True):
        torch.testing.assert_close(score_all_pairs(case.binding, case.scoring, one, *patches), scores, **EXACT)
    assert counter.frame_count == 2


def padded_scores(case: Problem, graphs: EncodedGraphs) -> Tensor:
    """Scores of the slots that `bind` keeps: no chunk, padding scored and masked."""
    slots = bind_all(case.binding, graphs.entities, graphs.entity_mask, *case.binding.encode_patches(case.patches))
    return case.scoring.scores(graphs, slots)


def test_scores_of_kept_slots_are_those_of_the_equations() -> None:
    case = problem()
    assert_same(case, padded_scores(case, case.graphs), expected_scores(case))


def test_texts_are_taken_together_by_number_of_entities_within_the_bound() -> None:
    binding = Binding(3, 10, BindingConfig(4, 2, num_layers=0))
    binding.chunk_mb = 2 * 4 * 10 * 3 * 4 / 2**20  # 2 texts of 3 entities, 4 images
    counts, none = [3, 1, 3, 2, 1, 3], [0] * 6
    assert binding.chunks(counts, none, num_images=4)[0] == [[1, 4], [3], [0, 2], [5]]
    assert binding.chunks(counts, none, num_images=1000)[0] == [[1], [4], [3], [0], [2], [5]]
    # A text with 30 relations of width 4 fills a chunk, and comes after those with fewer.
    assert binding.chunks(counts, [30, *none[1:]], num_images=4)[0] == [[1, 4], [3], [2, 5], [0]]
    # With padding, texts of similar numbers fill a chunk: three texts of two entities need as much as two of three.
    assert binding.chunks(counts, none, num_images=4, pads=True)[0] == [[1, 4, 3], [0, 2], [5]]
    assert binding.chunks(counts, none, num_images=1, pads=True)[0] == [[1, 4, 3, 0, 2, 5]]
    assert binding.chunks(counts, none, num_images=1000, pads=True)[0] == [[1], [4], [3], [0], [2], [5]]


def test_relations_of_texts_in_one_chunk_are_scored_without_padding() -> None:
    case = problem()
    graphs = case.graphs._replace(
        entity_mask=mask_of((3, 3, 3), E),
        subjects=case.graphs.subjects % 3,
        objects=case.graphs.objects % 3,
        entity_counts=(3, 3, 3),
    )
    sizes: list[int] = []
    case.scoring.subject[2].register_forward_hook(lambda module, inputs, output: sizes.append(inputs[0].numel()))
    scores = score_all_pairs(case.binding, case.scoring, graphs, *case.binding.encode_patches(case.patches))
    assert sizes == [B * sum(RELATIONS) * REL_DIM]
    assert_same(case, scores, expected_scores(case, graphs))


def test_a_small_batch_is_not_computed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    whole = Binding.chunk_slots
    monkeypatch.setattr(Binding, "chunk_slots", lambda self, *inputs: calls.append(1) or whole(self, *inputs))
    numbers = [max(own * max(N, DIM), related * DIM) for own, related in zip(ENTITIES, RELATIONS, strict=True)]
    largest = sum(numbers) * B * 8 / 2**20  # megabytes of all chunks together, in float64
    for chunk_mb, times in ((33 * largest, 1), (31 * largest, 2)):
        calls.clear()
        case = problem(chunk_mb=chunk_mb)
        scores = score_all_pairs(case.binding, case.scoring, case.graphs, *case.binding.encode_patches(case.patches))
        scores.sum().backward()
        assert len(calls) == times * len(set(ENTITIES))


def test_padded_texts_are_bound_in_few_chunks_while_training_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    whole = Binding.chunk_slots
    monkeypatch.setattr(Binding, "chunk_slots", lambda self, *inputs: calls.append(1) or whole(self, *inputs))
    for training, times in ((True, 1), (False, len(set(ENTITIES)))):
        calls.clear()
        case = problem()
        case.binding.train(training)
        case.binding.pads_on = ("cpu",)
        with torch.no_grad():
            score_all_pairs(case.binding, case.scoring, case.graphs, *case.binding.encode_patches(case.patches))
        assert len(calls) == times


def test_while_training_a_chunk_keeps_its_scores_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oc_binding, "KEPT_SHARE", 0)

    def kept(training: bool) -> int:
        case = problem()
        case.binding.train(training)
        keys, values = case.binding.encode_patches(case.patches)
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            score_all_pairs(case.binding, case.scoring, case.graphs, keys, values)
        return sum(sizes)

    assert kept(training=True) < kept(training=False) / 3


def test_padding_that_is_not_finite_stays_out_of_the_scores_of_chunks() -> None:
    case = problem()
    entities = case.graphs.entities.detach().masked_fill(~case.graphs.entity_mask[..., None], 1e300)
    scores = score_all_pairs(
        *case[:2], case.graphs._replace(entities=entities), *case.binding.encode_patches(case.patches)
    )
    torch.testing.assert_close(scores, expected_scores(case), **EXACT)


def test_without_relations_the_score_is_the_mean_cosine() -> None:
    case = problem()
    graphs = case.graphs
    slots = bind_all(case.binding, *graphs[:2], *case.binding.encode_patches(case.patches))
    names = ("relations", "subjects", "objects", "relation_mask")
    scores = case.scoring.scores(graphs._replace(**{name: getattr(graphs, name)[:, :0] for name in names}), slots)
    cosines = F.cosine_similarity(graphs.entities.expand(B, -1, -1, -1), slots, dim=-1)
    expected = torch.stack([cosines[:, text, :count].mean(dim=-1) for text, count in enumerate(ENTITIES)], dim=1)
    assert_same(case, scores, expected)


def test_coefficients_stay_positive() -> None:
    sizes = BindingConfig(DIM, num_heads=2, rel_dim=REL_DIM)
    scoring = Scoring(sizes)
    assert (scoring.ent_coef.item(), scoring.rel_coef.item()) == (1.5, 0.5)
    with torch.no_grad():
        scoring.rel_coef.fill_(-2.0)
    graphs, slots = problem().graphs, torch.randn(B, U, E, DIM)
    below = scoring.scores(graphs, slots)
    scoring.clamp_coefs_()
    assert scoring.rel_coef.item() == pytest.approx(MIN_COEF)
    at_the_bound = scoring.scores(graphs, slots)
    torch.testing.assert_close(at_the_bound, below)
    for scores in (below, at_the_bound):  # torch's clamp gives 0 below, and since 2.15 also at the bound
        (gradient,) = torch.autograd.grad(scores.sum(), scoring.rel_coef)
        assert gradient.abs() > 0


def test_under_autocast_slots_and_scores_are_those_without() -> None:
    case = problem()
    binding, scoring = case.binding.float(), case.scoring.float()
    graphs = EncodedGraphs(*(p.float() if torch.is_tensor(p) and p.is_floating_point() else p for p in case.graphs))
    keys, values = torch.randn(2, B, N, DIM)
    for function in (
        lambda: bind_all(binding, *graphs[:2], keys, values),
        lambda: binding.bind_matched(graphs.entities[:B], graphs.entity_mask[:B], keys, values),
        lambda: torch.cat(binding.attention(graphs.entities[0], keys[0])),
        lambda: scoring.scores(graphs, torch.ones(B, U, E, DIM).cumsum(-1)),
        lambda: score_all_pairs(binding, scoring, graphs, keys, values),
    ):
        expected = function()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(function(), expected)


def test_bfloat16_features_are_bound_and_scored_in_fp32() -> None:
    case = problem()
    binding, scoring = case.binding.float(), case.scoring.float()
    half = [tensor.bfloat16() for tensor in (case.graphs.entities, *torch.randn(2, B, N, DIM))]
    graphs = case.graphs._replace(entities=half[0], relations=case.graphs.relations.bfloat16())
    wide = graphs._replace(entities=half[0].float(), relations=graphs.relations.float())
    scores = score_all_pairs(binding, scoring, graphs, *half[1:])
    assert scores.dtype == torch.float32
    assert torch.equal(scores, score_all_pairs(binding, scoring, wide, half[1].float(), half[2].float()))


# Losses.


@pytest.mark.parametrize("learned", [True, False])
def test_the_losses_are_those_of_the_equations(learned: bool) -> None:
    scores, alternatives = (torch.randn(5, n, dtype=torch.float64, requires_grad=True) for n in (5, 3))
    has_relation = torch.tensor([True, False, True, True, False])
    scale = torch.tensor(2.3, dtype=torch.float64, requires_grad=True)
    leaves = [scores, alternatives, *([scale] if learned else [])]
    given, factor = (scale, scale) if learned else (None, 1.0)
    relation = relation_loss(alternatives, has_relation, given)
    ours = contrastive_loss(scores, given) + 0.7 * relation[0] / 2
    # Equation 5 times 1 / (2 B), and equation 6 over pairs with relations, divided by B.
    logits, with_relation = factor * scores, factor * alternatives[has_relation]
    contrastive = (logits.logsumexp(dim=0) + logits.logsumexp(dim=1) - 2 * logits.diagonal()).sum() / (2 * 5)
    local = (with_relation.logsumexp(dim=1) - with_relation[:, 0]).sum() / 5
    expected = contrastive + 0.7 * local / 2
    torch.testing.assert_close(ours, expected, **EXACT)
    torch.testing.assert_close(torch.autograd.grad(ours, leaves), torch.autograd.grad(expected, leaves), **EXACT)
    torch.testing.assert_close(relation[1], local.detach() * 5 / 3, **EXACT)
    assert not relation[1].requires_grad


def test_pairs_without_relations_have_no_part_in_the_local_loss() -> None:
    scores = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    some = torch.tensor([True, False, False, True])
    (gradient,) = torch.autograd.grad(relation_loss(scores, some)[0], scores)
    assert gradient[~some].eq(0).all()
    assert gradient[some].ne(0).all()
    nothing = relation_loss(scores, torch.zeros(4, dtype=torch.bool))
    assert (nothing[0].item(), nothing[1].item()) == (0, 0)
    assert torch.autograd.grad(nothing[0], scores)[0].eq(0).all()


def test_without_a_temperature_the_losses_cannot_fall_far() -> None:
    best = 2 * torch.eye(128, dtype=torch.float64) - 1
    assert contrastive_loss(best).item() == pytest.approx(2.90, abs=0.005)
    # Two entities and one relation: cosines 1, f = 1 for the true graph and -1 for both others; alpha 1.5, beta 0.5.
    true, false = ((1.5 * 2 + 0.5 * f) / (1.5 * 2 + 0.5) for f in (1, -1))
    scores = torch.tensor([[true, false, false]], dtype=torch.float64)
    assert relation_loss(scores, torch.tensor([True]))[0].item() == pytest.approx(0.92, abs=0.005)
