"""OC-CLIP's scores of all images and captions, `score_all_pairs` against the paper's listing: time and memory.

    python -m benchmarks.binding
    python -m benchmarks.binding --device cuda --precision bf16

The listing (OC-CLIP, figure 9) binds the captions of a batch padded to one size, with the default tokens as further
queries; for all pairs its softmax has (B, B, E + 4, N) numbers. Here two mistakes are mended: `default_tokens` without
`self.`, and not expanded over the batch. What the listing leaves out is added: the norm of the queries (table 11), the
mask of the padding, the similarity (equations 2 and 3). It is not slowed down: keys and values are projected once per
image, queries once per caption, and each product is one batched matrix product.
"""

import argparse
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.readout import EQUAL, PRECISIONS
from benchmarks.reference import Reference
from benchmarks.report import Bar, Section, options, run
from benchmarks.timing import Spread, interleave, peak_memory
from dino_sparo.oc_clip.batches import EncodedGraphs, batch_graphs, mask_of
from dino_sparo.oc_clip.binding import EPSILON, Binding, BindingConfig
from dino_sparo.oc_clip.graphs.graph import Relation, SceneGraph
from dino_sparo.oc_clip.options import MAX_NODES, MAX_RELATIONS
from dino_sparo.oc_clip.scoring import Scoring, score_all_pairs

Scores = Callable[[Binding, Scoring, EncodedGraphs, Tensor, Tensor], Tensor]
BATCHES = [16, 64, 128]
# Bars, against the listing padded to 16: speed and memory on a CPU, and on a GPU, whose training pads the captions.
BAR_BATCH, BARS = 64, {"cpu": (5.0, 0.1), "cuda": (1.0, 0.4)}


@dataclass(frozen=True)
class Sizes:
    """B images of N patches of width `image_dim`, and as many captions."""

    batch: int
    patches: int = 196
    image_dim: int = 768
    dim: int = 256
    rel_dim: int = 128


QUICK = {"patches": 7, "image_dim": 20, "dim": 12, "rel_dim": 8}


def draw_graphs(number: int) -> list[SceneGraph]:
    """1 + Poisson(3) entities and, where there are two, Poisson(2) relations, cut at the caps; equal in every run."""
    generator = torch.Generator().manual_seed(0)
    rates = torch.tensor([3.0, 2.0]).expand(number, 2)
    graphs = []
    for further, related in torch.poisson(rates, generator).int().tolist():
        entities = min(1 + further, MAX_NODES)
        relations = min(related, MAX_RELATIONS) if entities > 1 else 0
        ends = [torch.randperm(entities, generator=generator)[:2].tolist() for _ in range(relations)]
        names = tuple(f"entity {entity}" for entity in range(entities))
        graphs.append(SceneGraph(names, tuple(Relation(subject, "near", other) for subject, other in ends)))
    return graphs


def encode(graphs: Sequence[SceneGraph], sizes: Sizes, full: bool) -> EncodedGraphs:
    """Graphs with random numbers as text encodings, padded to the largest graph, or fully, to the caps."""
    batch = batch_graphs(graphs)
    nodes, relations = (MAX_NODES, MAX_RELATIONS) if full else (batch.entities.shape[1], batch.predicates.shape[1])
    generator = torch.Generator().manual_seed(1)  # the same numbers however much is padded
    entities = torch.randn(len(graphs), MAX_NODES, sizes.dim, generator=generator)[:, :nodes]
    predicates = torch.randn(len(graphs), MAX_RELATIONS, sizes.rel_dim, generator=generator)[:, :relations]

    def padded(tensor: Tensor, width: int) -> Tensor:
        return F.pad(tensor, (0, width - tensor.shape[1]))

    return EncodedGraphs(
        entities=entities.clone(),
        entity_mask=padded(mask_of(batch.entity_counts), nodes),
        relations=predicates.clone(),
        subjects=padded(batch.ends[0, 0], relations),
        objects=padded(batch.ends[0, 1], relations),
        relation_mask=padded(mask_of(batch.relation_counts), relations),
        entity_counts=batch.entity_counts,
        relation_counts=batch.relation_counts,
    )


def listed_scores(binding: Binding, scoring: Scoring, graphs: EncodedGraphs, keys: Tensor, values: Tensor) -> Tensor:
    """S (B, U) in the listing's order, with everything that the graphs are padded with."""
    texts, width = graphs.entity_mask.shape
    defaults = binding.default_tokens.expand(texts, -1, -1)
    q = binding.query_proj(torch.cat([binding.query_norm(graphs.entities), defaults], dim=1)) * binding.dim**-0.5
    k, v = binding.key_proj(keys), binding.value_proj(values)
    logits = torch.bmm(q.flatten(0, 1).expand(len(k), -1, -1), k.transpose(1, 2)).unflatten(1, (texts, -1))
    padding = torch.cat([~graphs.entity_mask, defaults.new_zeros(defaults.shape[:2], dtype=torch.bool)], dim=1)
    attn = logits.masked_fill(padding[..., None], -math.inf).softmax(dim=-2) + EPSILON  # (B, U, E + defaults, N)
    attn = attn / attn.sum(dim=-1, keepdim=True)
    slots = torch.bmm(attn.flatten(1, 2), v).unflatten(1, (texts, -1))[:, :, :width]
    return _similarity(scoring, graphs, slots)


def _similarity(scoring: Scoring, graphs: EncodedGraphs, slots: Tensor) -> Tensor:
    """Equations 2 and 3, as they are written."""
    rows = torch.arange(len(graphs.subjects), device=slots.device)[:, None]
    relations = graphs.relations.expand(len(slots), -1, -1, -1)
    subjects, objects = (
        mlp(torch.cat([relations, slots[:, rows, ends]], dim=-1))
        for mlp, ends in ((scoring.subject, graphs.subjects), (scoring.object, graphs.objects))
    )
    cosines = F.cosine_similarity(graphs.entities, slots, dim=-1).masked_fill(~graphs.entity_mask, 0).sum(dim=-1)
    fits = F.cosine_similarity(graphs.relations, subjects + objects, dim=-1)
    fits = fits.masked_fill(~graphs.relation_mask, 0).sum(dim=-1)
    alpha, beta = scoring.ent_coef, scoring.rel_coef
    total = alpha * graphs.entity_mask.sum(dim=-1) + beta * graphs.relation_mask.sum(dim=-1)
    return (alpha * cosines + beta * fits) / total


# Name -> what scores, and whether graphs are padded to the caps instead of the largest of the batch.
FULL, LARGEST, OURS = f"listing, {MAX_NODES} + 4", "listing, largest + 4", "ours"
FORMS: dict[str, tuple[Scores, bool]] = {
    FULL: (listed_scores, True),
    LARGEST: (listed_scores, False),
    OURS: (score_all_pairs, False),
}
# On a GPU: ours as training compiles it, and the listing compiled for each of its sizes.
COMPILED, FULL_COMPILED = "ours, compiled", f"{FULL}, compiled"
GPU_FORMS = {COMPILED: FORMS[OURS], FULL_COMPILED: FORMS[FULL]}


def forms_on(device: str) -> dict[str, tuple[Scores, bool]]:
    """The forms that are measured."""
    return FORMS if device == "cpu" else {**FORMS, **GPU_FORMS}


def modules(sizes: Sizes, device: str = "cpu") -> tuple[Binding, Scoring]:
    """Binding and scoring as they are trained, of one seed."""
    torch.manual_seed(0)
    config = BindingConfig(sizes.dim, rel_dim=sizes.rel_dim)
    return Binding(sizes.image_dim, sizes.patches, config).to(device), Scoring(config).to(device)


def build(form: str, sizes: Sizes, precision: str, device: str) -> Callable[[], Any]:
    """The part of a step after patches and graphs are encoded: forward and backward, to parameters and inputs."""
    dtype, score, full = PRECISIONS[precision], *forms_on(device)[form]
    binding, scoring = modules(sizes, device)
    if form == COMPILED:
        binding.compile(dynamic=True)
        scoring.compile(dynamic=True)
    elif form == FULL_COMPILED:
        score = torch.compile(score, dynamic=False)
    features = torch.randn(2, sizes.batch, sizes.patches, sizes.dim, device=device)
    keys, values = (tensor.to(dtype).requires_grad_() for tensor in features)
    graphs = encode(draw_graphs(sizes.batch), sizes, full)
    on_device: dict[str, Any] = {
        name: part.to(device) for name, part in graphs._asdict().items() if torch.is_tensor(part)
    }
    on_device |= {name: on_device[name].to(dtype).requires_grad_() for name in ("entities", "relations")}
    graphs = graphs._replace(**on_device)

    def step(patches: tuple[Tensor, Tensor] = (keys, values)) -> None:
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            scores = score(binding, scoring, graphs, *patches)
        scores.float().sum().backward()
        for leaf in (keys, values, graphs.entities, graphs.relations, *binding.parameters(), *scoring.parameters()):
            leaf.grad = None

    if form not in GPU_FORMS:  # another number of images would be another form
        step((keys[:1], values[:1]))  # what libraries allocate once is not part of a step's memory
    else:
        step()
    return step


def build_patches(sizes: Sizes, precision: str, device: str) -> Callable[[], Any]:
    """The part of a step that all forms share: images' patches to keys and values, forward and backward."""
    dtype, (binding, _) = PRECISIONS[precision], modules(sizes, device)
    patches = torch.randn(sizes.batch, sizes.patches, sizes.image_dim, device=device, requires_grad=True)

    def step() -> None:
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            keys, values = binding.encode_patches(patches)
        (keys.float().sum() + values.float().sum()).backward()
        binding.zero_grad()
        patches.grad = None

    return step


def check_equality(section: Section, sizes: Sizes) -> None:
    """Scores of all pairs, and all gradients, in float64."""
    binding, scoring = modules(sizes)
    for module in (binding, scoring):
        module.double()
    weight: Any = binding.query_proj.weight
    with torch.no_grad():
        weight.mul_(5)  # entities that compete for real
    drawn = draw_graphs(sizes.batch + 2)  # more captions than images
    keys, values = torch.randn(2, sizes.batch, sizes.patches, sizes.dim, dtype=torch.float64)
    parameters = {**dict(binding.named_parameters()), **dict(scoring.named_parameters())}
    results = {}
    for form, (score, full) in FORMS.items():
        graphs = encode(drawn, sizes, full)
        inputs = {"entities": graphs.entities.double(), "relations": graphs.relations.double()}
        graphs = graphs._replace(entities=inputs["entities"], relations=inputs["relations"])
        inputs |= {"keys": keys, "values": values}
        leaves = {name: tensor.requires_grad_() for name, tensor in (inputs | parameters).items()}
        scores = score(binding, scoring, graphs, keys, values)
        weights = torch.linspace(-1, 1, scores.numel(), dtype=scores.dtype).view_as(scores)
        gradients = torch.autograd.grad((scores * weights).sum(), list(leaves.values()), allow_unused=True)
        reached = {name: g for name, g in zip(leaves, gradients, strict=True) if g is not None}
        for name, mask in (("entities", graphs.entity_mask), ("relations", graphs.relation_mask)):
            reached[name] = reached[name][mask]
        results[form] = scores, reached
    expected, slopes = results[FULL]
    for form in (LARGEST, OURS):
        scores, found = results[form]
        section.check(f"{form}: scores", scores, expected, EQUAL)
        assert found.keys() == slopes.keys()
        largest = {name: slope.abs().max() for name, slope in slopes.items()}
        ours, listed = (torch.cat([(g[n] / largest[n]).flatten() for n in largest]) for g in (found, slopes))
        section.check(f"{form}: {len(largest)} gradients, over the listing's largest", ours, listed, EQUAL)


def free_memory(device: str) -> int:
    """Free memory for this process, bytes."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def measure_memory(
    batches: Sequence[int], args: argparse.Namespace
) -> tuple[dict[tuple[str, int], float], dict[tuple[str, int], str]]:
    """Megabytes by form and batch; or a reason to skip, if the memory of the previous batch, times B^2, is too much."""
    growth, skipped = {}, {}
    for form in forms_on(args.device):
        expected = 0.0
        for before, batch in zip((batches[0], *batches), batches, strict=False):
            expected, free = expected * (batch / before) ** 2, free_memory(args.device)
            if expected > 0.9 * free:
                skipped[form, batch] = f"skipped: needs about {expected / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"
                continue
            sizes = sizes_of(batch, args.quick)
            expected = peak_memory(
                build, form, sizes, args.precision, args.device, device=args.device, fresh=not args.quick
            )
            growth[form, batch] = expected / 1e6
    return growth, skipped


def sizes_of(batch: int, quick: bool) -> Sizes:
    """At full width, or tiny."""
    return Sizes(batch, **QUICK) if quick else Sizes(batch)


def measure(args: argparse.Namespace, reference: Reference | None) -> Section:
    """Equality, then memory, then the time of the forms that fit, in turns."""
    usual = BATCHES if args.full or args.device != "cpu" else BATCHES[:2]
    batches, rounds = ([2, 3], 1) if args.quick else (sorted(args.batches or usual), args.rounds)
    section = Section(
        "OC-CLIP's binding and similarity of all pairs against the listing",
        f"Forward and backward of B x B pairs from encoded patches and graphs, {sizes_of(1, args.quick)}, "
        f"{args.precision}, on {args.device}; graphs of 1 + Poisson(3) entities and Poisson(2) relations; {rounds} "
        "rounds, median (quartiles). The network on the patches, which is the same in all forms, is timed by itself.",
    )
    check_equality(section, sizes_of(3, args.quick))
    growth, skipped = measure_memory(batches, args)
    forms, ours = forms_on(args.device), OURS if args.device == "cpu" else COMPILED
    shares = {
        batch: growth[ours, batch] / max(growth[FULL, batch], 1e-6)
        for batch in batches
        if {(ours, batch), (FULL, batch)} <= growth.keys()
    }
    times = {
        batch: _timed(batch, [form for form in forms if (form, batch) in growth], rounds, args) for batch in batches
    }
    section.tables["Time of forward and backward"] = list(times.values())
    section.tables["Growth of memory in a step, MB"] = [
        {"B": batch, **{form: (growth | skipped)[form, batch] for form in forms}, f"{ours} / {FULL}": shares.get(batch)}
        for batch in batches
    ]
    ratio = times.get(BAR_BATCH, {}).get(f"times {FULL}")
    speedup, memory_share = BARS[torch.device(args.device).type]
    section.bars = [
        Bar(f"times faster than the listing at B={BAR_BATCH}", speedup, ratio.median if ratio else None),
        Bar(f"share of the listing's memory at B={BAR_BATCH}", memory_share, shares.get(BAR_BATCH), at_most=True),
    ]
    return section


def _timed(batch: int, fitting: Sequence[str], rounds: int, args: argparse.Namespace) -> dict[str, Any]:
    sizes, graphs = sizes_of(batch, args.quick), batch_graphs(draw_graphs(batch))
    variants = {form: build(form, sizes, args.precision, args.device) for form in fitting}
    patches = "patches' network"
    variants[patches] = build_patches(sizes, args.precision, args.device)
    timings = interleave(variants, rounds, 0.0 if args.quick else 0.2, args.device)

    ours = OURS if args.device == "cpu" else COMPILED

    def times_faster(form: str) -> Spread | None:
        return timings.ratio(form, ours) if {form, ours} <= variants.keys() else None

    return {
        "B": batch,
        "entities": f"{sum(graphs.entity_counts) / batch:.1f}, at most {max(graphs.entity_counts)}",
        "relations": f"{sum(graphs.relation_counts) / batch:.1f}, at most {max(graphs.relation_counts)}",
        **{
            f"{name}, ms": timings.time(name).scaled(1e3) if name in variants else "skipped"
            for name in (*forms_on(args.device), patches)
        },
        **{f"times {form}": times_faster(form) for form in (FULL, LARGEST)},
    }


def get_args_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = options("OC-CLIP's scores of all pairs against the paper's listing.")
    parser.add_argument(
        "--batches",
        type=int,
        nargs="+",
        default=None,
        help=f"Images and captions per step: {BATCHES}; on a CPU without --full the first two.",
    )
    parser.add_argument("--rounds", type=int, default=5, help="How often everything is timed.")
    parser.add_argument(
        "--precision",
        default="fp32",
        choices=PRECISIONS,
        help="bf16: features come in bf16 and the step runs under autocast. The listing's products are bf16 then; ours "
        "stay fp32 by design.",
    )
    return parser


def main(argv: list[str] | None = None) -> Section:
    """Parse the options, measure, print."""
    return run(measure, get_args_parser(), argv)


if __name__ == "__main__":
    main()
