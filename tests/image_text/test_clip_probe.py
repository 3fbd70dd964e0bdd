"""The linear probe: AdamW side by side, the search for a weight decay, the command."""

import json
import math

import numpy as np
import pytest
import torch
from clip_fakes import parser_of
from torch.nn import functional as F

pytest.importorskip("open_clip")

from clip_fakes import evaluate, small_checkpoint

from dino_sparo.evaluation.features import Features
from dino_sparo.evaluation.linear.probe import LinearProbe, ProbeSampler
from dino_sparo.image_text.evaluation.probe import (
    WEIGHT_DECAYS,
    ProbeSettings,
    choose_weight_decay,
    probe_result,
    search_weight_decay,
    train_probes,
)

CLASSES, WIDTH = 3, 7


def clusters(number: int, seed: int = 0, noise: float = 0.5) -> Features:
    """Features of length one around a center for each class."""
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(5))
    labels = torch.randint(CLASSES, (number,), generator=generator)
    features = centers[labels] + noise * torch.randn(number, WIDTH, generator=generator)
    return Features(F.normalize(features, dim=1), labels, torch.arange(number))


def run(*options: object) -> dict:
    return evaluate("clip-probe", *options)


# --- training


def test_probes_side_by_side_are_torchs_adamw_each():
    train = clusters(61)
    rows = torch.randperm(61, generator=torch.Generator().manual_seed(1))[:47]
    settings = ProbeSettings(CLASSES, lr=0.1, epochs=3, batch_size=11, seed=2)
    decays = [1e-6, 0.03, 2.0]
    together = train_probes(train, rows, decays, settings)
    for number, decay in enumerate(decays):
        alone = LinearProbe(WIDTH, CLASSES, 1, seed=2, torch_init=True)
        optimizer = torch.optim.AdamW(alone.parameters(), lr=0.1, weight_decay=decay)
        sampler = ProbeSampler(47, 11, seed=2)
        step, steps = 0, 3 * 5
        for epoch in range(3):
            sampler.epoch = epoch
            for keys in sampler:
                optimizer.param_groups[0]["lr"] = 0.1 * (1 + math.cos(math.pi * step / steps)) / 2
                chosen = rows[[index for _, index in keys]]
                optimizer.zero_grad()
                F.cross_entropy(alone(train.features[chosen])[0], train.labels[chosen]).backward()
                optimizer.step()
                step += 1
        assert step == steps
        torch.testing.assert_close(together.weight[number], alone.weight[0], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(together.bias[number], alone.bias[0], rtol=1e-4, atol=1e-6)


def test_the_probe_starts_as_clip_benchmarks_and_takes_its_batches():
    """Its train(): torch.manual_seed(seed), torch.nn.Linear(input_shape, output_shape); its --batch_size is 64."""
    untrained = train_probes(clusters(5), torch.arange(5), [0.0, 1.0], ProbeSettings(CLASSES, lr=1e-30, seed=4))
    torch.manual_seed(4)
    linear = torch.nn.Linear(WIDTH, CLASSES)
    for number in range(2):
        torch.testing.assert_close(untrained.weight[number], linear.weight)
        torch.testing.assert_close(untrained.bias[number], linear.bias)
    assert ProbeSettings(CLASSES).batch_size == parser_of("clip-probe").parse_args([]).probe_batch_size == 64


def test_a_probe_that_diverges_leaves_the_others_alone():
    train, settings = clusters(61), ProbeSettings(CLASSES, lr=1.0, epochs=4, batch_size=11)
    rows = torch.arange(61)
    with_it = train_probes(train, rows, [1e-3, 1e4], settings)
    assert not with_it.weight[1].isfinite().all()
    torch.testing.assert_close(with_it.weight[0], train_probes(train, rows, [1e-3], settings).weight[0])
    with pytest.raises(ValueError, match="the probe has diverged; give a smaller --lr"):
        probe_result(train_probes(train, rows, [1e4], settings), train)


def test_fewer_images_than_a_batch_are_one_step():
    train = clusters(5)
    found = train_probes(train, torch.arange(5), [1e-4], ProbeSettings(CLASSES, epochs=20, batch_size=64))
    assert probe_result(found, train)["top1"] == 100.0


# --- the search


@pytest.mark.parametrize("peak", [0, 1, 5, 48, 50, 77, 95, 96])
def test_the_search_finds_the_peak_of_a_curve_with_one_peak_in_few_trainings(peak):
    batches = []

    def accuracies_of(places):
        batches.append(places)
        return [float(-abs(place - peak)) for place in places]

    best, tried = search_weight_decay(accuracies_of)
    assert best == peak
    assert batches[0] == [0, 16, 32, 48, 64, 80, 96]  # a logspace of seven
    assert list(tried) == sorted(tried)
    assert len(tried) == sum(map(len, batches)) <= 7 + 4 * 2  # nothing is trained twice


def test_of_equal_decays_the_smallest_is_chosen():
    best, _ = search_weight_decay(lambda places: [1.0 for _ in places])
    assert best == 0


def test_the_decays_are_clip_benchmarks():
    assert np.allclose(np.log10(WEIGHT_DECAYS), -6 + np.arange(97) / 12)


def test_the_decay_is_chosen_on_images_that_were_not_trained_on():
    """Labels without meaning: a probe with little decay learns its own images by heart, which must not count."""
    train = clusters(200, noise=1.5)
    settings = ProbeSettings(CLASSES, epochs=3, batch_size=32)
    decay, sweep = choose_weight_decay(train, 0.25, settings)
    assert sweep["num_val"] == 50
    tried = sweep["tried"]
    assert decay == next(row["weight_decay"] for row in tried if row["top1"] == max(r["top1"] for r in tried))
    order = torch.from_numpy(np.random.default_rng(0).permutation(200))
    rows, val = order[50:].sort().values, order[:50].sort().values
    alone = probe_result(
        train_probes(train, rows, [decay], settings), Features(train.features[val], train.labels[val], val)
    )
    assert alone["top1"] == max(row["top1"] for row in tried)


@pytest.mark.parametrize("share", [0.0, 1.0, 0.001])
def test_a_share_that_leaves_nothing_is_refused(share):
    with pytest.raises(ValueError, match="of 20 training images leaves none on one side"):
        choose_weight_decay(clusters(20), share, ProbeSettings(CLASSES))


# --- the result


def test_accuracies_by_hand():
    test = Features(torch.eye(4)[[0, 0, 0, 1, 2]], torch.tensor([0, 0, 1, 1, 3]), torch.arange(5))
    found = LinearProbe(4, 7)
    with torch.no_grad():
        found.weight.copy_(torch.eye(7, 4)[None] + 0.01 * torch.arange(7)[None, :, None])
    result = probe_result(found, test)
    assert result["top1"] == 60.0  # the third is taken for 0, the fifth for 2
    assert result["mean_per_class_recall"] == pytest.approx(100 * (1 + 1 / 2 + 0) / 3)
    assert result["top5"] == 80.0  # of 0's five best only 0, 6, 5, 4, 3; of 2's 2, 6, 5, 4, 3


def test_the_result_file_tells_the_whole_protocol_and_cached_features_give_the_same(tmp_path, capsys):
    weights = small_checkpoint(tmp_path / "run" / "checkpoint.pth")
    options = ("--data_path", "scenes:50:32", "--epochs", 2, "--probe_batch_size", 8)
    result = run("--pretrained_weights", weights, *options, "--dump_features", tmp_path / "cache")
    path = tmp_path / "run" / "probe_checkpoint_scenes-50-32.json"
    assert json.loads(path.read_text()) == result  # its content is compared in test_evaluation_records.py
    assert len(result["model"]["sha256"]) == 64
    assert "weight decay" in capsys.readouterr().out

    run("--load_features", tmp_path / "cache", *options, "--output_dir", tmp_path / "again")
    assert (tmp_path / "again" / "probe_scenes-50-32.json").read_bytes() == path.read_bytes()
    one = run("--load_features", tmp_path / "cache", *options, "--output_dir", tmp_path / "b", "--weight_decay", 0.5)
    assert (one["weight_decay"], one["sweep"]) == (0.5, None)

    other = small_checkpoint(tmp_path / "other.pth", seed=1)
    with pytest.raises(ValueError, match="were not made with"):
        run("--load_features", tmp_path / "cache", "--pretrained_weights", other)
    with pytest.raises(ValueError, match="--slots chooses slots of a model, but --load_features has features"):
        run("--load_features", tmp_path / "cache", "--slots", tmp_path / "slots.json")
