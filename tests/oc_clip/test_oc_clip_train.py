"""oc_clip/train.py, loss.py, batches.py, gradients, a run and its files, resuming, graphs, and bad input."""

import argparse
import json
import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("open_clip")

import clip_fakes
from clip_fakes import clip_description, to_open_clip
from oc_clip_fakes import (
    CONTEXT,
    PHRASES,
    PREDICATES,
    SIZES,
    assert_same_gradients,
    batch_of,
    run,
    scores_by_equation,
    small_checkpoint,
    small_model,
    some_graphs,
    training_of,
    write_graphs,
)
from runs import assert_same_state, checkpoint_of, epochs_of
from test_clip_pairs import picture, write_tar

from dino_sparo.clip import create_clip, tokenize
from dino_sparo.data.loader import create_loader
from dino_sparo.data.samplers import EpochSampler
from dino_sparo.image_text.pairs.batches import PairDataset, PairTransform
from dino_sparo.image_text.pairs.sources import open_pairs
from dino_sparo.image_text.step import backward_at_once, backward_in_parts, train_step
from dino_sparo.models.encoder import create_encoder
from dino_sparo.oc_clip.batches import GraphPairBatch, GraphPairDataset, collate_graph_pairs
from dino_sparo.oc_clip.graphs.files import open_graphs
from dino_sparo.oc_clip.graphs.graph import LookupCounts, Relation, SceneGraph
from dino_sparo.oc_clip.load import load_oc_clip
from dino_sparo.oc_clip.model import OCCLIPConfig, create_oc_clip
from dino_sparo.oc_clip.options import check_options, get_args_parser
from dino_sparo.oc_clip.train import OCCLIPObjective
from dino_sparo.weights.file import CheckpointError

# ---- the model


def test_binding_scoring_and_projections_have_the_papers_number_of_parameters() -> None:
    with torch.device("meta"):
        model = create_oc_clip("vit_base", 16, 224, text_width=512, text_heads=8, text_layers=1)
    own = [p for name, p in model.named_parameters() if not name.startswith(("image.", "text."))]
    assert sum(parameter.numel() for parameter in own) == 2_026_371
    assert all(parameter.requires_grad for parameter in own)


def test_a_description_makes_the_same_configuration_again_and_what_is_unknown_is_named(tmp_path: Path) -> None:
    path = small_checkpoint(tmp_path / "a.pth", relation="mlp", competition="keys", num_default=0, logit_scale=False)
    config = load_oc_clip(path).model.config
    assert OCCLIPConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert (config.binding.relation, config.binding.competition, config.num_patches) == ("mlp", "keys", 9)
    content = torch.load(path)
    content["oc_clip"]["binding"]["sinkhorn"] = 3
    torch.save(content, path)
    with pytest.raises(ValueError, match="the binding was saved with sinkhorn, which this version does not"):
        load_oc_clip(path)
    del content["oc_clip"]["binding"]
    torch.save(content, path)
    with pytest.raises(CheckpointError, match="does not say binding of its OC-CLIP"):
        load_oc_clip(path)
    with pytest.raises(CheckpointError, match="holds no OC-CLIP: there is no `oc_clip`"):
        load_oc_clip(clip_fakes.small_checkpoint(tmp_path / "clip.pth"))


# ---- gradients


def gradients(model: torch.nn.Module, sizes: Sequence[int], weight: float = 1.0) -> dict[str, Tensor]:
    """Loss and gradients of the twelve pairs that are computed in parts of these sizes."""
    training, graphs, start = training_of(model, weight), some_graphs(), 0
    batches = []
    for size in sizes:
        batches.append(batch_of(graphs, range(start, start + size)))
        start += size
    model.zero_grad()
    loss, _ = (backward_at_once if len(batches) == 1 else backward_in_parts)(training, batches)
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"loss": loss, **{name: torch.zeros(()) if g is None else g.clone() for name, g in found.items()}}


@pytest.mark.parametrize(
    "binding",
    [{}, {"logit_scale": False}, {"relation": "mlp"}, {"competition": "keys", "num_default": 0}],
    ids=str,
)
def test_gradients_in_parts_are_those_of_the_whole_batch(binding: dict[str, Any]) -> None:
    model = small_model(**binding).double()
    whole = gradients(model, [12])
    assert_same_gradients(gradients(model, [2, 9, 1]), whole)
    for name in ("scoring.ent_coef", "scoring.rel_coef", "logit_scale", "relation_proj.weight"):
        assert name not in whole or whole[name].abs().max() > 1e-6, name


def test_the_loss_is_that_of_the_equations() -> None:
    """Every image is bound with every graph alone."""
    model, graphs = small_model().double(), some_graphs()
    batch = batch_of(graphs, range(12))
    keys, values = model.encode_images((batch.images.double() / 255 - 0.4) / 0.3)

    def false_graph(number: int, ends: Tensor) -> SceneGraph:
        pairs = zip(graphs[number].relations, *(end[number].tolist() for end in ends), strict=False)
        return SceneGraph(graphs[number].entities, tuple(Relation(s, r.predicate, o) for r, s, o in pairs))

    scale = model.logit_scale.exp()
    table = scale * scores_by_equation(model, keys, values, graphs)
    own = table.diagonal()
    contrast = ((table.logsumexp(0) - own) + (table.logsumexp(1) - own)).mean() / 2
    local = []
    for i, graph in enumerate(graphs):
        if graph.relations:
            false = [false_graph(i, ends) for ends in batch.graphs.ends[1:]]
            logits = scale * scores_by_equation(model, keys[i : i + 1], values[i : i + 1], (graph, *false))[0]
            local.append(logits.logsumexp(0) - logits[0])
    assert len(local) == sum(relations > 0 for _, relations in SIZES) < 12
    for weight in (0.0, 1.0, 3.0):
        found = gradients(model, [12], weight)["loss"]
        torch.testing.assert_close(found, (contrast + weight * sum(local) / 12 / 2).detach())
    training = training_of(model)
    _, scalars = training.loss(training.encode(model, batch), [batch])
    assert scalars["itc_loss"].item() == pytest.approx(contrast.item())
    assert scalars["rel_loss"].item() == pytest.approx((sum(local) / len(local)).item())
    accuracy = (table.argmax(dim=1) == torch.arange(12)).double().mean().item()
    assert scalars["batch_accuracy"].item() == pytest.approx(accuracy)


def test_temperature_and_coefficients_stay_in_their_ranges() -> None:
    model = small_model()
    training = training_of(model)
    for schedule in training.updater.schedules:
        schedule["lr"][:] = 0.5
    model.logit_scale.data.fill_(math.log(100) - 0.01)
    model.logit_scale.register_hook(lambda gradient: torch.full_like(gradient, -1))
    for coef in (model.scoring.ent_coef, model.scoring.rel_coef):
        coef.data.fill_(0.1)
        coef.register_hook(lambda gradient: torch.ones_like(gradient))
    train_step(training, [batch_of(some_graphs(), range(12))])
    assert model.logit_scale.item() == pytest.approx(math.log(100))
    assert [model.scoring.ent_coef.item(), model.scoring.rel_coef.item()] == pytest.approx([1e-3, 1e-3])
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    _, spared = training.updater.optimizer.param_groups
    assert spared["weight_decay"] == 0
    assert {"logit_scale", "scoring.ent_coef", "scoring.rel_coef"} <= {names[id(p)] for p in spared["params"]}


@pytest.mark.slow
def test_steps_teach_which_graph_belongs_to_which_image_and_which_relations_are_true() -> None:
    training, batch = training_of(small_model()), batch_of(some_graphs(), range(12))
    reports = [train_step(training, [batch]) for _ in range(60)]
    assert reports[-1].scalars["itc_loss"] < reports[0].scalars["itc_loss"] / 2
    assert reports[-1].scalars["rel_loss"] < 0.6 < 1 < reports[0].scalars["rel_loss"]


# ---- runs


def test_a_run_leaves_a_model_to_load(tmp_path: Path) -> None:
    run(tmp_path, max_steps=1)
    checkpoint = checkpoint_of(tmp_path)
    assert checkpoint["oc_clip"]["graphs"] == {"parser": "templates", "max_nodes": 16, "max_relations": 16}
    loaded = load_oc_clip(tmp_path / "checkpoint.pth")
    assert not loaded.model.training
    assert loaded.mean == pytest.approx((0.48145466, 0.4578275, 0.40821073))
    assert_same_state(dict(loaded.model.state_dict()), dict(checkpoint["model"]), "model")
    expected = {**loaded.model.config.to_dict(), "graphs": loaded.record["trained_on_graphs"]}
    assert {name: checkpoint["oc_clip"][name] for name in expected} == expected


def test_a_clip_checkpoint_is_not_resumed_and_other_graphs_are_another_run_not_another_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path / "run", max_steps=1, data_path=table_of_pairs(tmp_path))
    with caplog.at_level(logging.WARNING):
        run(tmp_path / "run", max_steps=2, data_path=tmp_path / "pairs.csv", graphs=tmp_path / "graphs.jsonl")
    assert "--graphs was templates and is now" in caplog.text
    assert "differ from those of" not in caplog.text
    lines = (tmp_path / "graphs.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "graphs.jsonl").write_text("".join(lines[::-1]))
    with caplog.at_level(logging.WARNING):
        run(tmp_path / "run", max_steps=3, data_path=tmp_path / "pairs.csv", graphs=tmp_path / "graphs.jsonl")
    assert "the graphs, or their order, differ from those of" in caplog.text
    clip_fakes.small_checkpoint(tmp_path / "clip" / "checkpoint.pth")
    with pytest.raises(CheckpointError, match="holds no OC-CLIP, so it cannot be resumed; choose another --output_dir"):
        run(tmp_path / "clip")


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "bf16"},
        {"rel_loss_weight": 0},
        {"logit_scale": "none", "rel_negatives": "one"},
        {"competition": "keys", "num_default": 0, "relation": "mlp"},
        {"bind_layers": 0, "max_relations": 0},
    ],
    ids=str,
)
def test_other_precisions_losses_and_bindings_train_and_validate(tmp_path: Path, changes: dict[str, object]) -> None:
    run(tmp_path, epochs=1, val_path="scenes:11:32", zero_shot_freq=1, **changes)
    (epoch,) = epochs_of(tmp_path)
    assert all(math.isfinite(value) for value in epoch.values())
    assert {"val_loss", "val_text_r1", "val_image_r1", "zero_shot"} <= epoch.keys()
    assert ("train_rel_loss" in epoch) == ("rel_loss_weight" not in changes)


def test_each_part_has_its_own_learning_rate_and_warm_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates: dict[str, list[float]] = {}

    def noted(training: OCCLIPObjective, batches: list[GraphPairBatch], epoch: int, is_last: bool) -> object:
        report = take_step(training, batches, epoch, is_last)
        rate = {id(p): group["lr"] for group in training.updater.optimizer.param_groups for p in group["params"]}
        for name, parameter in training.network.named_parameters():
            rates.setdefault(name, []).append(rate[id(parameter)])
        return report

    take_step = OCCLIPObjective.step
    monkeypatch.setattr(OCCLIPObjective, "step", noted)
    asked = {"lr": 0.01, "lr_image": 0.0001, "lr_text": 0.001, "warmup_steps": 2, "warmup_image": 4, "warmup_text": 3}
    run(tmp_path, **asked, min_lr=0.00003)

    def schedule(lr: float, warmup: int) -> list[float]:
        """OpenCLIP's: lr (i + 1) / warmup, then the cosine from its top."""
        rest = 6 - warmup
        cosine = [0.00003 + (lr - 0.00003) * (1 + math.cos(math.pi * i / rest)) / 2 for i in range(rest)]
        return [lr * (i + 1) / warmup for i in range(warmup)] + cosine

    expected = {"image": schedule(0.0001, 4), "text": schedule(0.001, 3)}
    parts = {name.split(".")[0] for name in rates}
    assert parts == {"image", "text", "node_proj", "relation_proj", "binding", "scoring", "logit_scale"}
    for name, found in rates.items():
        assert found == pytest.approx(expected.get(name.split(".")[0], schedule(0.01, 2))), name


# ---- false graphs


def false_ends(num_workers: int, epoch: int, seed: int = 0, micro_batch: int = 5) -> dict[int, tuple[list, ...]]:
    """Both false graphs of every scene of an epoch, by the scene's number."""
    source = open_pairs("scenes:40:32", "", "")
    pairs = PairDataset(source, PairTransform(16), seed)
    dataset = GraphPairDataset(pairs, open_graphs("templates"))
    sampler = EpochSampler(len(source), micro_batch, 0, 1, 1, seed=3)
    sampler.set_epoch(epoch)
    collate = partial(collate_graph_pairs, context_length=CONTEXT)
    loader = create_loader(dataset, sampler, collate=collate, num_workers=num_workers)
    found = {}
    for batch in loader:
        for row, index in enumerate(batch.indices.tolist()):
            width = batch.graphs.relation_counts[row]
            found[index] = tuple(end[row, :width].tolist() for end in batch.graphs.ends[1:].flatten(0, 1))
    return found


def test_false_graphs_follow_from_seed_epoch_and_index_whatever_loads_them() -> None:
    one = false_ends(0, 2)
    assert len(one) == 40
    assert one == false_ends(2, 2, micro_batch=8)


def test_epochs_and_seeds_draw_other_false_relations() -> None:
    """Over graphs with three entities and more, which leave a choice."""
    graphs, source = some_graphs(), open_pairs("scenes:12:32", "", "")

    def shuffled(epoch: int, seed: int) -> list[Any]:
        pairs = PairDataset(source, PairTransform(16), seed)
        dataset = GraphPairDataset(pairs, open_graphs("templates"))
        dataset.graph_of = lambda item: (graphs[item.index], LookupCounts())  # type: ignore[method-assign]
        return [dataset[epoch, index].shuffled for index in range(12)]

    assert shuffled(1, 0) == shuffled(1, 0)
    assert shuffled(0, 0) != shuffled(1, 0) != shuffled(1, 1)


# ---- graphs of a run


CAPTIONS = [f"{PHRASES[i % 5]} number {i}" for i in range(12)]
COLOURS = list(clip_fakes.COLOURS)


def table_of_pairs(folder: Path, missing: Sequence[int] = (), extra: Mapping[int, SceneGraph] | None = None) -> Path:
    """Twelve images with captions in `pairs.csv`, the captions' graphs in `graphs.jsonl`, without some."""
    rows = ["image,caption"]
    for number, caption in enumerate(CAPTIONS):
        clip_fakes.paint(folder / "images" / f"{number}.png", COLOURS[number % 5])
        rows.append(f"images/{number}.png,{caption}")
    (folder / "pairs.csv").write_text("\n".join(rows))
    graphs = {number: graph for number, graph in enumerate(some_graphs()) if number not in missing} | (extra or {})
    write_graphs(folder / "graphs.jsonl", [(CAPTIONS[number], graph, None) for number, graph in graphs.items()])
    return folder / "pairs.csv"


COUNTERS = ("missing_graphs", "whole_caption_graphs", "dropped_entities", "dropped_relations")


@pytest.mark.slow
def test_what_was_changed_in_graphs_is_counted_in_log_and_checkpoint(tmp_path: Path) -> None:
    large = SceneGraph(
        PHRASES, (Relation(0, "on", 1), Relation(1, "on", 0), Relation(0, "above", 4), Relation(1, "on", 1))
    )
    small = {number: SceneGraph(("dot",)) for number in range(12)}
    table = table_of_pairs(tmp_path, (2, 3), {**small, 0: large, 1: SceneGraph(())})
    lines = (tmp_path / "graphs.jsonl").read_text().splitlines()
    kept = [line for line in lines if json.loads(line)["caption"] not in (CAPTIONS[2], CAPTIONS[3])]
    (tmp_path / "graphs.jsonl").write_text("\n".join(kept) + "\n")
    asked = {"data_path": table, "graphs": tmp_path / "graphs.jsonl", "max_nodes": 3, "max_relations": 1}
    run(tmp_path / "whole", epochs=2, batch_size=4, **asked)
    for epoch in epochs_of(tmp_path / "whole"):
        # Two missing; three whole captions; entities 3 and 4; (0, above, 4), the loop, and the second relation.
        assert [epoch[f"train_{name}"] for name in COUNTERS] == [2, 3, 2, 3]
    run(tmp_path / "parts", epochs=2, batch_size=4, max_steps=5, **asked)
    names = ("num_missing_graphs", "num_whole_captions", "num_dropped_nodes", "num_dropped_relations")
    counted = checkpoint_of(tmp_path / "parts")
    assert all(0 <= counted[name] <= 3 for name in names)
    run(tmp_path / "parts", epochs=2, batch_size=4, **asked)
    assert epochs_of(tmp_path / "parts") == epochs_of(tmp_path / "whole")
    assert counted["oc_clip"]["graphs"].keys() == {"file", "sha256", "captions", "max_nodes", "max_relations"}


def test_too_many_captions_without_a_graph_stop_the_run(tmp_path: Path) -> None:
    table = table_of_pairs(tmp_path, missing=range(7))
    with pytest.raises(
        ValueError,
        match=r"\d of \d+ captions have no graph in .*graphs\.jsonl; at most 0\.2 of them may be missing\. "
        r"Parse these captions with dino-sparo parse; or raise .*--max_corrupt",
    ):
        run(tmp_path / "run", data_path=table, graphs=tmp_path / "graphs.jsonl", max_corrupt=0.2, batch_size=12)


def graph_shards(folder: Path, keys: Sequence[str] = ("graph",)) -> Path:
    """Two shards of six pairs, whose `.json` members hold caption and graph."""
    for shard in range(2):
        members = []
        for number in range(6 * shard, 6 * shard + 6):
            content = {"text": CAPTIONS[number], **{key: some_graphs()[number].to_json() for key in keys}}
            members += [(f"{number}.png", picture(20 * number)), (f"{number}.json", json.dumps(content).encode())]
        write_tar(folder / f"{shard}.tar", members)
    return folder


@pytest.mark.slow
def test_graphs_of_shards_train_as_the_same_graphs_of_a_file(tmp_path: Path) -> None:
    shards = graph_shards(tmp_path / "shards")
    table_of_pairs(tmp_path)
    asked = {"data_path": shards, "caption_key": "text", "epochs": 1}
    run(tmp_path / "key", graph_key="graph", **asked)
    run(tmp_path / "file", graphs=tmp_path / "graphs.jsonl", **asked)
    assert_same_state(checkpoint_of(tmp_path / "key")["model"], checkpoint_of(tmp_path / "file")["model"], "model")
    assert checkpoint_of(tmp_path / "key")["oc_clip"]["graphs"] == {
        "shards": str(shards), "graph_key": "graph", "max_nodes": 16, "max_relations": 16,
    }  # fmt: skip


def test_graphs_that_a_shard_lacks_are_counted_until_they_are_too_many(tmp_path: Path) -> None:
    shards = graph_shards(tmp_path / "shards", keys=("scene",))
    asked = {"data_path": shards, "caption_key": "text", "graph_key": "graph", "epochs": 1, "batch_size": 12}
    with pytest.raises(ValueError, match=r"(\d+) of \1 captions have no graph in .*shards; at most 0\.01 of them"):
        run(tmp_path / "run", **asked)
    run(tmp_path / "tolerant", max_corrupt=1.0, **asked)
    (epoch,) = epochs_of(tmp_path / "tolerant")
    assert epoch["train_missing_graphs"] == epoch["train_whole_caption_graphs"] == 12


def test_a_shards_graph_that_is_none_is_named(tmp_path: Path) -> None:
    shards = graph_shards(tmp_path / "shards")
    with pytest.raises(ValueError, match=r"\d\.tar, caption at byte \d+: a scene graph is"):
        run(tmp_path / "run", data_path=shards, caption_key="text", graph_key="text")


def test_pairs_whose_relations_all_hold_both_ways_have_no_local_loss(tmp_path: Path) -> None:
    (tmp_path / "symmetric.txt").write_text("\n".join(PREDICATES))
    asked = {"data_path": table_of_pairs(tmp_path), "graphs": tmp_path / "graphs.jsonl", "epochs": 1, "batch_size": 12}
    run(tmp_path / "run", symmetric=tmp_path / "symmetric.txt", **asked)
    run(tmp_path / "without", rel_loss_weight=0, **asked)
    assert epochs_of(tmp_path / "run")[0]["train_rel_loss"] == 0
    assert_same_state(checkpoint_of(tmp_path / "run")["model"], checkpoint_of(tmp_path / "without")["model"], "model")


@pytest.mark.slow
def test_a_checkpoint_from_before_an_option_is_resumed_with_its_default(tmp_path: Path) -> None:
    asked = {"data_path": table_of_pairs(tmp_path), "graphs": tmp_path / "graphs.jsonl"}
    run(tmp_path / "run", epochs=1, **asked)
    checkpoint = checkpoint_of(tmp_path / "run")
    del checkpoint["oc_clip"]["binding"]["position_std"]
    torch.save(checkpoint, tmp_path / "run" / "checkpoint.pth")
    run(tmp_path / "run", epochs=1, **asked)
    with pytest.raises(CheckpointError, match=r"binding\.position_std 1\.0 in the checkpoint, 0\.5 asked for"):
        run(tmp_path / "run", epochs=1, position_std=0.5, **asked)


@pytest.mark.slow
def test_validation_has_graphs_of_its_own(tmp_path: Path) -> None:
    table = table_of_pairs(tmp_path)
    run(tmp_path / "run", epochs=1, val_path=table, val_graphs=tmp_path / "graphs.jsonl")
    (epoch,) = epochs_of(tmp_path / "run")
    run(tmp_path / "own", epochs=1, val_path=table)
    (other,) = epochs_of(tmp_path / "own")
    assert epoch["train_loss"] == other["train_loss"]
    assert epoch["val_loss"] != other["val_loss"]


# ---- starting from other weights


@pytest.mark.parametrize("kind", ["ours", pytest.param("open_clip", marks=pytest.mark.slow)])
def test_both_towers_start_from_a_clip(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(7)
    sizes = {"img_size": 16, "text_width": 24, "text_heads": 2, "text_layers": 2, "context_length": 20}
    clip = create_clip("vit_micro", 8, "cls", embed_dim=11, **sizes).eval()
    for parameter in clip.requires_grad_(False).parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.1)
    path = tmp_path / "clip.pth"
    if kind == "ours":
        torch.save({"model": clip.state_dict(), "clip": clip_description(clip.config), "epoch": 3}, path)
    else:
        torch.save(to_open_clip(clip.config, clip.state_dict()), path)
    run(tmp_path / "run", max_steps=1, lr=0, init_clip=path)
    model = load_oc_clip(tmp_path / "run" / "checkpoint.pth").model.requires_grad_(False)
    images, ids = torch.randn(2, 3, 16, 16), tokenize(["red star", "a tall box on"], 20).ids
    torch.testing.assert_close(model.patches(images), clip.image.backbone(images)[:, 1:])
    torch.testing.assert_close(model.text.readout_output(ids).slots, clip.text.readout_output(ids).slots)
    assert model.logit_scale.exp().item() == pytest.approx(1 / 0.07)  # scores are not the file's


def test_the_text_encoder_can_start_from_a_clip_and_the_image_encoder_of_another_make_from_dinos(
    tmp_path: Path,
) -> None:
    """The bug: the paper's rows with DINOv2's B-14 could not be started, as CLIP's image tower has other patches."""
    torch.manual_seed(5)
    sizes = {"img_size": 16, "text_width": 24, "text_heads": 2, "text_layers": 2, "context_length": 20}
    clip = create_clip("vit_micro", 4, "cls", embed_dim=11, **sizes)
    torch.save({"model": clip.state_dict(), "clip": clip_description(clip.config), "epoch": 3}, tmp_path / "clip")
    encoder = create_encoder("vit_micro", 8, "cls", img_size=16)
    torch.save(encoder.state_dict(), tmp_path / "e")
    run(tmp_path / "run", max_steps=1, lr=0, pre_norm="false", init_clip=tmp_path / "clip", init_from=tmp_path / "e")
    found = checkpoint_of(tmp_path / "run")["model"]
    for name, value in encoder.state_dict().items():
        assert torch.equal(found[f"image.{name}"], value), name
    assert torch.equal(found["text.token_embed.weight"], clip.text.token_embed.weight)
    assert "image tower: not taken" in (tmp_path / "run" / "run.log").read_text()


def test_rates_for_trained_towers_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path / "run", max_steps=1, lr=1e-3, lr_image=1e-5, data_path=table_of_pairs(tmp_path))
    assert "the image encoder has random weights, but the learning rate of trained weights, 1e-05" in caplog.text
    assert "the text encoder" not in caplog.text


# ---- bad input

SHARD_KEYS = {"graph_key": "graph", "caption_key": "text"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shards": "streamed", "epoch_pairs": 20}, "--shards streamed: false graphs are drawn by a pair's number"),
        ({**SHARD_KEYS}, "--graph_key is for tar shards; .* has none. Give --graphs FILE"),
        ({**SHARD_KEYS, "val_share": 0.2}, "--graph_key with --val_share: give --val_path and --val_graphs"),
        ({**SHARD_KEYS, "val_path": "scenes:9:32"}, "--graph_key with --val_path .*give --val_graphs"),
        ({**SHARD_KEYS, "graphs": "graphs.jsonl"}, "--graph_key graph with --graphs graphs.jsonl: give one of the two"),
        ({"graph_key": "graph"}, "--graph_key graph reads .json members; give --caption_key"),
        ({"competition": "keys"}, "num_default=4 with competition='keys': .* give num_default=0"),
        ({"bind_heads": 5}, "num_heads=5 does not divide dim=12"),
        ({"init_clip": "nowhere.pt"}, "nowhere.pt"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises((ValueError, CheckpointError), match=message):
        run(tmp_path, **changes)
    assert not (tmp_path / "checkpoint.pth").exists()


# ---- options and presets


def parsed(*words: str) -> argparse.Namespace:
    args = get_args_parser().parse_args(list(words))
    args.patch_size = args.patch_size or 16  # as training fills it in before
    check_options(args)
    return args


# Where the paper (OC-CLIP) states it -> option -> values for oc-coco and oc-cc12m.
RECIPES: dict[str, dict[str, tuple[Any, Any]]] = {
    "A.8: batch, epochs": {"batch_size": (128, 4096), "epochs": (100, 20)},
    "A.8: learning rates of new modules, text and image": {
        "lr": (2e-4, 5e-4),
        "lr_text": (2e-5, 5e-4),
        "lr_image": (1e-6, 5e-4),
    },
    "A.8: warm-up; none is stated of the new modules when fine-tuned": {
        "warmup_steps": (0, 1000),
        "warmup_text": (1000, 1000),
        "warmup_image": (5000, 1000),
    },
    "A.8: Adam; beta1 of CC12M is OpenCLIP's": {"beta1": (0.9, 0.9), "beta2": (0.95, 0.98), "weight_decay": (0.2, 0.5)},
    "A.8: text encoders, OpenCLIP's (512, 12) and a small one": {
        "text_width": (512, 256),
        "text_layers": (12, 6),
        "text_heads": (8, 4),
        "context_length": (77, 20),
    },
    "section 4: ViT-B/16 at 224": {"arch": ("vit_base",) * 2, "patch_size": (16, 16), "img_size": (224, 224)},
    "table 11": {"bind_dim": (256, 256), "rel_dim": (128, 128), "bind_layers": (2, 2), "bind_heads": (4, 4)},
    "section 3 and table 7": {"num_default": (4, 4), "ent_coef": (1.5, 1.5), "rel_coef": (0.5, 0.5)},
    "ours": {"rel_loss_weight": (1.0, 1.0), "rel_negatives": ("all", "all"), "logit_scale": ("learned",) * 2},
    "the cosine ends at zero": {"min_lr": (0.0, 0.0)},
}


@pytest.mark.parametrize(("column", "name"), [(0, "oc-coco"), (1, "oc-cc12m")])
def test_every_value_of_the_papers_presets_is_where_the_paper_states_it(column: int, name: str) -> None:
    args = parsed("--preset", name)
    for part in ("warmup_image", "warmup_text"):
        setattr(args, part, args.warmup_steps if getattr(args, part) is None else getattr(args, part))
    for source, options_there in RECIPES.items():
        expected = {option: values[column] for option, values in options_there.items()}
        assert {option: getattr(args, option) for option in expected} == expected, source


def test_given_learning_rates_win_over_the_presets_and_lr_is_that_of_parts_without_their_own() -> None:
    args = parsed("--preset", "oc-coco", "--lr", "0.003", "--lr_text", "0.002")
    assert (args.lr, args.lr_text, args.lr_image) == (0.003, 0.002, 1e-6)
    args = parsed("--lr", "0.003")
    assert (args.lr, args.lr_text, args.lr_image) == (0.003, 0.003, 0.003)


def test_the_scenes_preset_builds_and_trains(tmp_path: Path) -> None:
    words = ["--preset", "oc-scenes", "--data_path", "scenes:8:48", "--batch_size", "4", "--max_steps", "1"]
    words += ["--num_workers", "0", "--device", "cpu", "--output_dir", str(tmp_path)]
    from dino_sparo.training.run import train

    train(get_args_parser().parse_args(words), OCCLIPObjective)
    assert load_oc_clip(tmp_path / "checkpoint.pth").model.config.binding.dim == 64


def test_every_tensor_of_a_batch_is_pinned_and_graphs_stay_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug: indices of graphs and false relations were copied from pageable memory, for which the host waits."""
    batch = batch_of(some_graphs(), range(3))
    graphs = batch.graphs
    tensors = [batch.images, batch.token_ids, batch.indices, graphs.entities, graphs.predicates, graphs.ends]
    pinned: list[int] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: (pinned.append(id(tensor)), tensor.clone())[1])
    copy = batch.pin_memory()
    assert sorted(pinned) == sorted(map(id, tensors))
    assert copy.graphs.ends is not graphs.ends
    assert torch.equal(copy.graphs.ends, graphs.ends)
    assert copy.graphs.phrases == graphs.phrases
    assert copy.to("meta").graphs.ends.device == torch.device("cpu")
    assert copy.to("meta").images.device == torch.device("meta")
