"""Learning a mask: its equation, its loss, the best epoch, relative changes, and the command."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("open_clip")

from clip_fakes import evaluate, paint, small_checkpoint, small_clip

from dino_sparo.clip.options import mask_parser
from dino_sparo.clip.slots import mask
from dino_sparo.clip.slots.mask import (
    Mask,
    fit_mask,
    masked_pairs,
    number_of_parts,
    pair_loss,
    part_products,
    relative_change,
    summary_of,
)
from dino_sparo.evaluation.slots.choice import SlotMask, parse_slots
from dino_sparo.image_text.evaluation.compositional.questions import EncodedQuestions, Question
from dino_sparo.image_text.evaluation.compositional.sets.scene_pairs import write_scene_pairs
from dino_sparo.image_text.scorer import DotProductScorer

PARTS, WIDTH = 5, 3
NUM_PAIRS = 17


def pairs_of(splits: list[str], images: torch.Tensor, texts: torch.Tensor) -> EncodedQuestions:
    """Questions with these features: all true captions, then all false ones; images are used in turns."""
    rows = torch.arange(len(splits))
    questions = [Question(split, ("",), ("", "")) for split in splits]
    text_of = torch.stack((rows, rows + len(rows)), dim=1)
    return EncodedQuestions(questions, images, texts, (rows % len(images))[:, None], text_of)


def random_pairs(seed: int = 0, num_images: int = 7) -> EncodedQuestions:
    """Pairs of two splits with random features of length one."""
    generator = torch.Generator().manual_seed(seed)
    images, texts = (
        F.normalize(torch.randn(n, PARTS * WIDTH, generator=generator), dim=1) for n in (num_images, 2 * NUM_PAIRS)
    )
    return pairs_of(["swap_obj" if i % 3 else "swap_att" for i in range(NUM_PAIRS)], images, texts)


def settings_of(**changed: object) -> dict:
    """The defaults of the options as arguments of `fit_mask`, some of them changed."""
    args = mask_parser().parse_args([])
    settings = {name: getattr(args, name) for name in ("epochs", "lr", "momentum", "seed")}
    return {**settings, "batch_size": args.mask_batch_size, "bound": args.mask_scale, **changed}


def macro(pairs: EncodedQuestions) -> float:
    return summary_of(pairs, DotProductScorer.score_pairs)["means"]["macro"]["accuracy"]


def run(*options: object) -> dict:
    return evaluate("slots mask", *options)


# --- the mask and its loss


@pytest.mark.parametrize(("bound", "scales"), [("min", [1.0, 99.0, 100.0]), ("max", [100.0, 100.0, 250.0])])
def test_the_mask_is_the_papers_sigmoid_with_either_bound(bound, scales):
    network = Mask(3, bound)
    with torch.no_grad():
        network.theta.copy_(torch.tensor([-0.02, 0.0, 0.5]))
        for alpha, scale in zip((0.0, math.log(99), math.log(250)), scales, strict=True):
            network.alpha.fill_(alpha)
            weights, found = network()
            assert float(found) == pytest.approx(scale)
            expected = [1 / (1 + math.exp(-scale / 4 * theta)) for theta in (-0.02, 0.0, 0.5)]
            assert weights.tolist() == pytest.approx(expected)


@pytest.mark.parametrize(("bound", "start"), [("min", 1 / 0.07), ("max", 100)])
def test_the_mask_starts_where_it_changes_nothing_and_everything_learns(bound, start):
    network = Mask(PARTS, bound)
    features = random_pairs()
    weights, scale = network()
    assert weights.tolist() == [0.5] * PARTS
    assert scale.item() == pytest.approx(start, rel=1e-5)
    torch.testing.assert_close(masked_pairs(features, weights.detach()).images, features.images)
    pair_loss(part_products(features, PARTS), weights, scale).backward()
    assert network.theta.grad is not None
    assert network.alpha.grad is not None
    assert network.theta.grad.abs().min() > 0
    assert network.alpha.grad.item() != 0


def test_the_mask_learns_by_default_and_saturates_above_chance_with_the_bound_that_the_paper_prints():
    """True and false captions that differ little, as SugarCrepe's do: half of the parts tell a little, half mislead."""
    generator = torch.Generator().manual_seed(3)
    number, parts, width = 400, 16, 8
    images = F.normalize(torch.randn(number, parts, width, generator=generator), dim=2)
    both = images + torch.randn(images.shape, generator=generator)
    true, false = (both + 0.3 * torch.randn(images.shape, generator=generator) for _ in range(2))
    tells = torch.tensor([0.1] * 8 + [-0.1] * 8)[None, :, None]
    true, false = F.normalize(true + tells * images, dim=2), F.normalize(false, dim=2)
    texts = torch.cat((true, false)).flatten(1) / parts**0.5
    features = pairs_of(["swap_obj"] * number, images.flatten(1) / parts**0.5, texts)
    found = {
        bound: fit_mask(features, parts, **settings_of(epochs=10, batch_size=50, bound=bound))
        for bound in ("min", "max")
    }
    assert found["min"][1]["losses"][-1] < math.log(2) < found["max"][1]["losses"][-1]
    saturated = {bound: int(((weights - 0.5).abs() > 0.499).sum()) for bound, (weights, _) in found.items()}
    assert saturated["min"] == 0 < saturated["max"]
    assert settings_of()["bound"] == "min"


@pytest.mark.parametrize("num_parts", [PARTS, PARTS * WIDTH])
def test_the_loss_follows_the_equation(num_parts):
    features = random_pairs()
    weights = torch.rand(num_parts, generator=torch.Generator().manual_seed(1))
    losses = []
    for pair in range(NUM_PAIRS):
        image = features.images[features.image_of[pair, 0]].tolist()
        masked = [value * float(weights[i * num_parts // len(image)]) for i, value in enumerate(image)]
        logits = []
        for number in features.text_of[pair]:
            caption = features.texts[number].tolist()
            dot = sum(a * b for a, b in zip(masked, caption, strict=True))
            logits.append(130 * dot / (math.hypot(*masked) * math.hypot(*caption)))
        losses.append(math.log(sum(math.exp(logit - logits[0]) for logit in logits)))
    found = pair_loss(part_products(features, num_parts), weights, torch.tensor(130.0))
    assert float(found) == pytest.approx(sum(losses) / NUM_PAIRS, rel=1e-4)


# --- the fit


def test_one_step_is_that_of_sgd():
    features = random_pairs()
    network = Mask(PARTS)
    pair_loss(part_products(features, PARTS), *network()).backward()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter -= 0.003 * parameter.grad
    weights, course = fit_mask(features, PARTS, **settings_of(epochs=1, lr=0.003, batch_size=NUM_PAIRS))
    torch.testing.assert_close(weights, network()[0].detach(), rtol=1e-4, atol=1e-6)
    assert (course["best_epoch"], len(course["losses"]), len(course["accuracies"])) == (1, 1, 1)


def test_the_part_that_tells_is_kept_and_the_one_that_misleads_is_not():
    """Part 0 is nearer to the true caption in every pair, part 1 to the false one and by more, part 2 to neither."""
    generator = torch.Generator().manual_seed(0)
    images = F.normalize(torch.rand(6, 3, 2, generator=generator) + 0.1, dim=2)
    near = images + 0.05 * torch.rand(6, 3, 2, generator=generator)
    far, farther = images + torch.tensor([0.0, -0.6]), images + torch.tensor([0.0, -0.9])
    positive = F.normalize(torch.stack((near[:, 0], farther[:, 1], near[:, 2]), dim=1), dim=2)
    negative = F.normalize(torch.stack((far[:, 0], near[:, 1], near[:, 2]), dim=1), dim=2)
    texts = torch.cat((positive, negative)).flatten(1) / 3**0.5
    features = pairs_of(["swap_obj"] * 6, images.flatten(1) / 3**0.5, texts)
    assert macro(features) < 100
    weights, course = fit_mask(features, 3, **settings_of(epochs=20, batch_size=4))
    assert course["accuracies"][course["best_epoch"] - 1] == 100
    assert weights[0] > 0.7
    assert weights[1] < 0.3
    assert course["losses"][-1] < course["losses"][0]


def test_the_first_of_the_best_epochs_is_kept():
    features = random_pairs(1)
    settings = settings_of(epochs=9, batch_size=5, seed=2)
    weights, course = fit_mask(features, PARTS, **settings)
    accuracies = course["accuracies"]
    assert course["best_epoch"] == accuracies.index(max(accuracies)) + 1
    assert (course["num_parts"], course["parts_above_half"]) == (PARTS, int((weights > 0.5).sum()))
    assert macro(masked_pairs(features, weights)) == max(accuracies)
    again, same_course = fit_mask(features, PARTS, **settings)
    assert torch.equal(again, weights)
    assert same_course == course
    _, other = fit_mask(features, PARTS, **settings_of(epochs=9, batch_size=5, seed=3))
    assert other["losses"] != course["losses"]


def test_a_mask_that_is_no_longer_finite_is_refused():
    features = random_pairs()
    features.images[2] = torch.nan
    with pytest.raises(ValueError, match="mask of epoch 1 has no finite weight above 0; give a smaller --lr"):
        fit_mask(features, PARTS, **settings_of(epochs=3))


# --- changes elsewhere


@pytest.mark.parametrize(
    ("fit", "elsewhere", "expected"),
    [
        # Rows of table 5 (SugarCrepe, then VTAB or ImageNet), whose accuracies are rounded to three digits.
        ((0.710, 0.764), (0.262, 0.272), 0.497),
        ((0.692, 0.732), (0.343, 0.292), -2.598),
        ((0.678, 0.771), (0.345, 0.250), -2.003),
        ((0.710, 0.881), (0.370, 0.328), -0.465),
        # There is none where nothing changed, or where there was nothing.
        ((50.0, 50.0), (10.0, 12.0), None),
        ((50.0, 60.0), (0.0, 12.0), None),
    ],
)
def test_relative_changes_are_the_papers(fit, elsewhere, expected):
    assert relative_change(*elsewhere, *fit) == (expected if expected is None else pytest.approx(expected, abs=0.05))


@pytest.mark.parametrize(
    ("readout", "parts", "expected"),
    [
        ("sparo", "slot", 5),
        ("sparo", "dimension", 35),
        ("attpool", "slot", 5),
        ("gap", "dimension", 12),
        ("gap", "4", 4),
    ],
)
def test_parts_are_slots_dimensions_or_a_number(readout, parts, expected):
    assert number_of_parts(parts, small_clip(readout, embed_dim=12).config) == expected


@pytest.mark.parametrize(
    ("readout", "parts", "message"),
    [
        ("gap", "slot", "parts=slot, but readout 'gap' has no slots"),
        ("gap", "5", "parts='5': give slot, dimension, or a number that divides the encoding's 12 numbers"),
        ("gap", "0", "parts='0'"),
        ("sparo", "patch", "parts='patch'"),
    ],
)
def test_parts_that_do_not_fit_are_refused(readout, parts, message):
    with pytest.raises(ValueError, match=message):
        number_of_parts(parts, small_clip(readout, embed_dim=12).config)


# --- the command


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scene_pairs(tmp_path_factory.mktemp("pairs"), num_pairs=13, image_size=32)


@pytest.mark.slow
def test_the_command_writes_a_mask_that_evaluations_take(pairs, tmp_path, capsys):
    weights = small_checkpoint(tmp_path / "run" / "checkpoint.pth")
    options = ["--pretrained_weights", weights, "--data_root", pairs]
    for folder, colours in (("three", ("red", "green", "blue")), ("two", ("red", "cyan"))):
        for colour in colours:
            paint(tmp_path / folder / colour / "0.png", colour)
    learn = [*options, "--epochs", 7, "--mask_batch_size", 11, "--evaluate", tmp_path / "three", tmp_path / "two"]
    result = run(*learn)
    out = capsys.readouterr().out
    assert "mean of these" in out
    assert f"epoch {result['fit']['best_epoch']}" in out
    path = next((tmp_path / "run").glob("mask_*.json"))
    assert json.loads(path.read_text()) == result
    assert parse_slots(str(path)) == SlotMask(tuple(result["mask"]), 35, result["model"]["sha256"])
    assert len(result["mask"]) == 5
    assert result["accuracy"]["masked"] == max(result["fit"]["accuracies"])

    here = [*options, "--output_dir", tmp_path / "there"]
    plain, masked = (
        evaluate("compositional", *here, *more)[0]["benchmarks"]["scene-pairs"]["means"]["macro"]["accuracy"]
        for more in ([], ["--slots", path])
    )
    assert plain == result["accuracy"]["initial"]
    assert masked == pytest.approx(result["accuracy"]["masked"])
    there = ["--pretrained_weights", weights, "--data_path", tmp_path / "three", "--output_dir", tmp_path / "there"]
    for name, more in (("initial", []), ("masked", ["--slots", path])):
        found = evaluate("zero-shot", *there, *more)
        assert result["elsewhere"][0][name] == found["top1"]
        mean = (result["elsewhere"][0][name] + result["elsewhere"][1][name]) / 2
        assert result["mean_elsewhere"][name] == pytest.approx(mean)


def test_wide_masks_are_drawn_as_an_area(tmp_path):
    weights = torch.rand(400, generator=torch.Generator().manual_seed(0))
    course = {"parts_above_half": int((weights > 0.5).sum()), "best_epoch": 2, "accuracies": [50.0, 60.0]}
    mask.draw_mask(weights, course, 45.0, tmp_path / "mask.png")
    assert (tmp_path / "mask.png").stat().st_size > 10_000


def test_a_command_without_pairs_is_refused(tmp_path):
    with pytest.raises(ValueError, match="--data_root is empty"):
        run("--pretrained_weights", small_checkpoint(tmp_path / "checkpoint.pth", "gap"))
