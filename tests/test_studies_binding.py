"""The study of binding: its scenes and labels, its probes against the authors' code, and one whole run."""

import json
import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from reference import weights as w

from dino_sparo.image_text.towers import tokenize
from dino_sparo.oc_clip.binding import BindingConfig
from dino_sparo.oc_clip.model import create_oc_clip
from studies import __main__ as studies
from studies.binding import run as binding
from studies.binding import scenes
from studies.binding.models import MODELS, entity_reader, train_model
from studies.binding.probes import (
    CAPACITIES,
    LinearProbe,
    MLPProbe,
    Split,
    binding_ratio,
    fit_probe,
    prior_logits,
    projected,
)
from studies.binding.run import tables, values_of

RECORD = json.loads((w.FOLDER / "binding.json").read_text())


def authors_probe(case: str, labels: str) -> torch.nn.Module:
    """One of our probes with the weights that the recorder gave to the authors' probe."""
    number, width, hidden = len(RECORD[labels][0]), 5, 7

    def drawn(name: str, *shape: int) -> torch.Tensor:
        return torch.from_numpy(w.normal(f"binding/{case}/{labels}/{name}", shape))

    if case == "linear":
        state = {"from_features.weight": drawn("Wz.weight", number, width), "from_features.bias": drawn("bias", number)}
        state["from_labels"] = drawn("Wy.weight", number, number)
        probe: torch.nn.Module = LinearProbe(width, number)
    else:
        first = drawn("W_in", width + number, hidden, number)
        state = {"from_features": first[:width].transpose(1, 2).flatten(1), "bias": drawn("b_in", hidden, number).t()}
        state["from_labels"] = first[width:].permute(2, 0, 1)
        state |= {"out": drawn("W_out", hidden, 1, number)[:, 0].t(), "out_bias": drawn("b_out", 1, number)[0]}
        probe = MLPProbe(width, number, hidden)
    probe.load_state_dict(state)
    return probe


@pytest.mark.parametrize("case", ["linear", "mlp"])
def test_logits_and_measures_equal_the_authors_code(case):
    recorded, bits = RECORD["cases"][case], {}
    z = torch.from_numpy(w.normal("binding/z", (len(RECORD["Y"]), 5)))
    for labels in ("Y", "F"):
        values, probe = torch.tensor(RECORD[labels]).float(), authors_probe(case, labels)
        with torch.no_grad():
            torch.testing.assert_close(probe(z, values), torch.tensor(recorded["logits"][labels]), rtol=1e-4, atol=1e-4)
            bits[labels] = Split(z, values, torch.zeros_like(values)).bits(probe).sum().item()
    entropy = scenes.entropy_of_bindings(torch.tensor(RECORD["Y"]), torch.tensor(RECORD["F"]))
    assert bits["Y"] == pytest.approx(recorded["test_lossY"], rel=1e-4)
    assert bits["F"] == pytest.approx(recorded["test_lossF"], rel=1e-4)
    ratio = binding_ratio(bits["Y"], bits["F"], entropy)
    assert ratio == pytest.approx(recorded["test_binding_ratio"], rel=1e-4)
    assert ratio * entropy == pytest.approx(recorded["test_binding_info"], rel=1e-4)


def test_one_bit_is_lacking_to_whoever_knows_all_features():
    support = scenes.all_objects()
    assert len(support) == 72
    assert scenes.entropy_of_bindings(scenes.bindings(support), scenes.features(support)) == 1


def test_a_scene_shows_the_objects_of_its_labels_and_is_drawn_again_alike():
    pixels, objects = scenes.draw_scenes(7, "val", 24)
    again, _ = scenes.draw_scenes(5, "val", 24)
    assert torch.equal(pixels[:5], again)
    assert not torch.equal(scenes.draw_scenes(5, "train", 24)[1], objects[:5])
    assert pixels.shape == (7, 3, 24, 24)
    assert scenes.bindings(objects).sum(dim=1).tolist() == [2] * 7
    assert scenes.features(objects).sum(dim=1).tolist() == [4] * 7
    assert (objects[:, 0] != objects[:, 1]).all()
    assert objects[..., 0].max() < scenes.NUM_SHAPES
    assert objects[..., 1].max() < scenes.NUM_COLOURS


def test_exchanged_colours_change_half_of_the_bindings_and_no_feature():
    objects = scenes.all_objects().repeat(5, 1, 1)
    other = scenes.exchanged(objects, seed=0)
    assert torch.equal(scenes.features(other), scenes.features(objects))
    differing = (scenes.bindings(other) != scenes.bindings(objects)).any(dim=1).float().mean().item()
    assert 0.4 < differing < 0.6


def test_the_offset_is_the_log_odds_among_labels_that_agree_so_far():
    support = scenes.bindings(scenes.all_objects())
    row = support[11]
    offsets = prior_logits(support[11:12], support)[0]
    rows = [tuple(each) for each in support.tolist()]
    for k in range(len(row)):
        agreeing = Counter(each[k] for each in rows if each[:k] == tuple(row[:k].tolist()))
        share = agreeing[1.0] / agreeing.total()
        expected = math.log(share / (1 - share)) if 0 < share < 1 else math.copysign(9.21, share - 0.5)
        assert offsets[k].item() == pytest.approx(expected, abs=0.01)


def problem(width: int = 0) -> tuple[list[Split], list[Split]]:
    """Splits for Y and F whose z is the true objects, or with `width` noise."""
    generator = torch.Generator().manual_seed(0)
    support, y_splits, f_splits = scenes.all_objects(), [], []
    y_support, f_support = scenes.bindings(support), scenes.features(support).unique(dim=0)
    for number in (1500, 200, 300):
        objects = support[torch.randint(len(support), (number,), generator=generator)]
        z = torch.randn(number, width, generator=generator) if width else scenes.one_hot_objects(objects)
        y, f = scenes.bindings(objects), scenes.features(objects)
        y_splits.append(Split(z, y, prior_logits(y, y_support)))
        f_splits.append(Split(z, f, prior_logits(f, f_support)))
    return y_splits, f_splits


def measured(width: int, capacity: str) -> tuple[float, float]:
    """Losses of the probes for Y and F, bits."""
    y, f = (fit_probe(*splits, CAPACITIES[capacity], seed=0).sum().item() for splits in problem(width))
    return y, f


@pytest.mark.slow
def test_noise_has_no_information_and_true_objects_have_nearly_all():
    noise, known = measured(7, "MLP 32"), measured(0, "MLP 32")
    assert abs(binding_ratio(*noise, 1.0)) < 0.1
    assert noise[1] == pytest.approx(2 * math.log2(6), abs=0.1)
    assert binding_ratio(*known, 1.0) > 0.8


@pytest.mark.parametrize("width", [13, 60])
def test_the_projection_keeps_the_directions_of_largest_variance(width):
    torch.manual_seed(0)
    parts = tuple(torch.randn(number, width) * torch.linspace(5, 0.1, width) for number in (40, 7, 5))
    found = projected(parts, 3)
    centered = parts[0] - parts[0].mean(dim=0)
    expected = torch.linalg.svd(centered, full_matrices=False)[2][:3]
    for part, own in zip(parts, found, strict=True):
        reference = (part - parts[0].mean(dim=0)) @ expected.t()
        torch.testing.assert_close(own.flip(1).abs(), reference.abs(), rtol=1e-3, atol=1e-3)
    assert projected(parts, width) is parts


def test_entity_slots_are_those_of_each_shape_alone():
    torch.manual_seed(0)
    sizes = {"text_width": 32, "text_heads": 2, "text_layers": 1, "context_length": 7}
    model = create_oc_clip("vit_micro", 8, 24, BindingConfig(dim=16, num_heads=2, rel_dim=11), **sizes).eval()
    images = torch.randn(3, 3, 24, 24)
    with torch.no_grad():
        found = entity_reader(model)(images)
        entities = model.encode_phrases(tokenize(list(scenes.PROBED_SHAPES), 7).ids)[0]
        keys, values = model.encode_images(images)
        for shape, entity in enumerate(entities):
            alone = model.binding.bind_matched(
                entity.expand(3, 1, -1), torch.ones(3, 1, dtype=torch.bool), keys, values
            )
            torch.testing.assert_close(found[:, shape], alone[:, 0])


def test_all_models_get_the_same_share_of_their_recipe(tmp_path, monkeypatch):
    commands = {}
    monkeypatch.setattr(
        "dino_sparo.demo.run.write_training_pairs", lambda folder, number: commands.setdefault("pairs", number)
    )
    for name in MODELS:
        train_model(name, 3, 0.1, tmp_path / name, lambda _, words, name=name: commands.update({name: words}))
    assert commands.pop("pairs") == 1280
    images = {name: words[words.index("--data_path") + 1] for name, words in commands.items()}
    assert {value for name, value in images.items() if "DINO" in name} == {"scenes:1000:48"}
    assert len({value for name, value in images.items() if "CLIP" in name}) == 1
    assert all(words[words.index("--seed") + 1] == "3" for words in commands.values())


def losses(y: float) -> dict[str, float]:
    return {"width": 64, "loss_shapes": 0.0, "loss_colours": math.log2(6) / 2, "loss_y": y}


def test_tables_show_shares_of_the_entropy_and_differences_paired_by_seed():
    def result(seed: int, gain: float) -> dict:
        probes = {}
        for state, labels, own in (("trained", "true", gain), ("trained", "shuffled", 0.1), ("untrained", "true", 0.0)):
            name = binding.Probe(state, "patches", "equal", "MLP 32", labels).name
            probes[name] = losses(math.log2(6) / 2 + 1 - own)
        return {"model": "DINO cls", "seed": seed, "probes": probes, "scores": {"20-NN": 40.0 + seed}}

    results = [result(seed, gain) for seed, gain in enumerate((0.2, 0.3, 0.4))]
    own = values_of(results, 1.0)["DINO cls, patches", "trained"]
    assert own["shapes"][0] == 100
    assert own["colours"][0] == pytest.approx(50)
    assert own["binding"] == pytest.approx({0: 20, 1: 30, 2: 40})
    assert own["true - shuffled"] == pytest.approx({0: 10, 1: 20, 2: 30})
    text = tables(results, 1.0)
    assert "| DINO cls | 20-NN | 41.0 ± 1.0 |" in text
    interval = "| +0.0 [+0.0, +0.0] | +0.0 [+0.0, +0.0] | +30.0 [+5.2, +54.8] |"
    assert f"| DINO cls, patches: trained - untrained {interval}" in text


@pytest.mark.slow
def test_a_short_study_is_resumed_and_gives_the_same_numbers_again(tmp_path):
    from dino_sparo.__main__ import run

    def study(folder: Path) -> list:
        words = ["--short", "--seeds", "0", "--models", "CLIP sparo", "OC-CLIP", "--output_dir", str(folder)]
        return binding.run_binding(studies.parser_of("binding").parse_args(words), run)

    first = study(tmp_path / "first")
    readings = {name.split(", ")[1] for result in first for name in result["probes"]}
    assert {
        "true objects",
        "class token",
        "mean of patches",
        "patches",
        "all slots",
        "one slot",
        "entity slots",
    } == readings
    times = {path: path.stat().st_mtime for path in (tmp_path / "first").rglob("probes.json")}
    assert study(tmp_path / "first") == first
    assert {path: path.stat().st_mtime for path in times} == times
    again = study(tmp_path / "again")
    assert [each["probes"] for each in again] == [each["probes"] for each in first]
    assert (tmp_path / "first" / "binding.png").is_file()
    (tmp_path / "first" / "clip_sparo_seed0" / "settings.json").write_text("{}")
    with pytest.raises(ValueError, match="names other options"):
        study(tmp_path / "first")
