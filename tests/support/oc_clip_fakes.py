"""For tests of OC-CLIP: a small model, graphs of unequal sizes in batches, an untrained checkpoint, a short run."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from objectives import bare
from runs import train_small
from small_models import written_once
from torch import Tensor, nn
from torch.nn import functional as F

from dino_sparo.data.defaults import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from dino_sparo.image_text.objective import param_groups
from dino_sparo.image_text.pairs.batches import PairItem
from dino_sparo.oc_clip.batches import (
    GraphItem,
    GraphPairBatch,
    batch_graphs,
    collate_graph_pairs,
    draw_negatives,
    mask_of,
    tokenize_phrases,
)
from dino_sparo.oc_clip.binding import Binding, BindingConfig
from dino_sparo.oc_clip.graphs.files import append_lines, graph_record
from dino_sparo.oc_clip.graphs.graph import LookupCounts, Relation, SceneGraph
from dino_sparo.oc_clip.model import OCCLIP, create_oc_clip
from dino_sparo.oc_clip.train import OCCLIPObjective
from dino_sparo.runtime.launch import wrap_ddp
from dino_sparo.training.optim import OPTIMIZERS
from dino_sparo.training.updater import Updater

COMMAND = "train-oc-clip"
IMG_SIZE, CONTEXT = 24, 9  # nine patches
PHRASES = ("red star", "blue ring", "green cross", "tall box", "dot")
PREDICATES = ("left of", "above", "on")
# Entities and relations of twelve graphs; the first six have other sums than the last six, and so have thirds.
SIZES = ((3, 2), (1, 0), (5, 4), (2, 1), (4, 0), (2, 2), (1, 0), (3, 3), (5, 1), (2, 0), (4, 2), (3, 1))


def run(output_dir: Path, **changes: object) -> Path:
    """Train six steps in this process; options without a value are given as ""."""
    return train_small(COMMAND, output_dir, **{"data_path": "scenes:20:32", "epochs": 2, **changes})


def small_model(seed: int = 0, context: int = CONTEXT, **binding: Any) -> OCCLIP:
    """No two sizes alike, and every parameter away from what it starts with."""
    torch.manual_seed(seed)
    sizes = {"dim": 12, "num_default": 3, "num_layers": 1, "num_heads": 2, "rel_dim": 7, **binding}
    text = {"text_width": 24, "text_heads": 2, "text_layers": 2, "context_length": context}
    model = create_oc_clip("vit_micro", 8, IMG_SIZE, binding=BindingConfig(**sizes), **text)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "coef" not in name and name != "logit_scale":
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


@written_once
def small_checkpoint(path: Path, seed: int = 0, **binding: Any) -> Path:
    """An untrained model in a checkpoint of OC-CLIP's training."""
    model = small_model(seed, context=20, **binding)
    statistics = {"mean": list(OPENAI_CLIP_MEAN), "std": list(OPENAI_CLIP_STD)}
    description = {**model.config.to_dict(), "graphs": {"parser": "templates"}, **statistics}
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"model": model.state_dict(), "oc_clip": description, "epoch": 3}, path)
    return path


def write_graphs(path: Path, rows: Iterable[tuple[str, SceneGraph, str | None]]) -> None:
    """A file of graphs, of captions, graphs and images."""
    with append_lines(path) as append:
        for caption, graph, image in rows:
            append(graph_record(caption, graph, image))


def bind_all(binding: Binding, entities: Tensor, mask: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The slots of all captions in all images, (B, U, E, dim); the slots of padding are 0."""
    slots = [
        binding.bind_matched(entities, mask, key.expand(len(mask), -1, -1), value.expand(len(mask), -1, -1))
        for key, value in zip(keys, values, strict=True)
    ]
    return torch.stack(slots)


def scores_by_equation(
    model: OCCLIP, keys: Tensor, values: Tensor, graphs: Iterable[SceneGraph], context: int = CONTEXT
) -> Tensor:
    """Equation 2 of every image, whose keys and values are given, with every graph alone, (B, U).

    From the slots and scores of relations that `test_oc_clip_core.py` compares.
    """
    scoring, columns = model.scoring, []
    for graph in graphs:
        batch = batch_graphs([graph])
        nodes, predicates = model.encode_phrases(tokenize_phrases(batch.phrases, context).ids)
        entities, relations = nodes[batch.entities], predicates[batch.predicates]
        column = []
        for slots in bind_all(model.binding, entities, mask_of(batch.entity_counts), keys, values):
            total = scoring.ent_coef * F.cosine_similarity(entities[0], slots[0], dim=-1).sum()
            if graph.relations:
                total = total + scoring.rel_coef * scoring.relation_scores(relations, *batch.ends[0], slots[None]).sum()
            column.append(total / (scoring.ent_coef * len(graph.entities) + scoring.rel_coef * len(graph.relations)))
        columns.append(torch.stack(column))
    return torch.stack(columns, dim=1)


def assert_same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Equal up to the order of sums in float64."""
    largest = max(float(value.abs().max()) for value in expected.values())
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-9, atol=1e-11 * largest, msg=lambda text, name=name: f"{name}: {text}"
        )


def graph_of_size(number: int, num_entities: int, num_relations: int) -> SceneGraph:
    """Phrases in another order in every graph."""
    entities = tuple(PHRASES[(number + m) % len(PHRASES)] for m in range(num_entities))
    relations = tuple(
        Relation(p % num_entities, PREDICATES[(number + p) % len(PREDICATES)], (p + 1) % num_entities)
        for p in range(num_relations)
    )
    return SceneGraph(entities, relations)


def some_graphs(without_relations: Sequence[int] = ()) -> list[SceneGraph]:
    """Twelve graphs; those that are named have no relations."""
    return [graph_of_size(i, e, 0 if i in without_relations else r) for i, (e, r) in enumerate(SIZES)]


def batch_of(graphs: Sequence[SceneGraph], numbers: Sequence[int]) -> GraphPairBatch:
    """Some of the graphs with their images; what an image and a false graph are depends on the number alone."""
    items = []
    for number in numbers:
        rng = np.random.default_rng(number)
        image = torch.from_numpy(rng.integers(256, size=(3, IMG_SIZE, IMG_SIZE), dtype=np.uint8))
        pair = PairItem(image, "words", number)
        negatives = draw_negatives(graphs[number], rng)
        items.append(GraphItem(pair, graphs[number], *negatives, LookupCounts(captions=1)))
    return collate_graph_pairs(items, CONTEXT)


def training_of(model: nn.Module, rel_loss_weight: float = 1.0) -> OCCLIPObjective:
    """What a step takes, inside DDP where there are several processes, in the model's precision."""
    device, dtype = torch.device("cpu"), next(model.parameters()).dtype
    optimizer = OPTIMIZERS["adamw"](param_groups(dict(model.named_parameters()), 0.2, (0.9, 0.98), 1e-6))
    updater = Updater(optimizer, [{"lr": np.full(100, 1e-3)}] * 2, list(model.parameters()), device)
    return bare(
        OCCLIPObjective,
        model=wrap_ddp(model, device),
        network=model,
        clip_grad=0.0,
        updater=updater,
        mean=torch.full((1, 3, 1, 1), 0.4, dtype=dtype),
        std=torch.full((1, 3, 1, 1), 0.3, dtype=dtype),
        rel_loss_weight=rel_loss_weight,
    )
