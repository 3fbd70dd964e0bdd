import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image
from small_models import save_small_encoder
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as TF

import eval_linear
from dino_sparo.data.crops import sample_box
from dino_sparo.data.dataset import ImageDataset
from dino_sparo.data.loader import create_loader
from dino_sparo.data.scenes.images import Scenes
from dino_sparo.data.views import EvalTransform
from dino_sparo.evaluation.features import Features
from dino_sparo.evaluation.linear import command as linear_command
from dino_sparo.evaluation.linear.probe import (
    LinearProbe,
    ProbeRun,
    ProbeSampler,
    ProbeSGD,
    cached_batches,
    live_batches,
    probe_accuracy,
    reference_heads,
    scaled_learning_rates,
    train_one_epoch,
)
from dino_sparo.models.encoder import create_encoder
from dino_sparo.runtime.launch import shutdown
from dino_sparo.weights.results import scores_of

CPU = torch.device("cpu")
IMAGES, WIDTH, CLASSES = 23, 5, 7
RATES = (0.1, 2.0, 0.7)


def separable_features(seed: int = 0) -> Features:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(IMAGES) % CLASSES
    centers = torch.randn(CLASSES, WIDTH, generator=generator)
    features = centers[labels] + 0.3 * torch.randn(IMAGES, WIDTH, generator=generator)
    return Features(features, labels, torch.arange(IMAGES))


def run_probes(rates: tuple[float, ...], epochs: int = 3, path: Path | None = None, **changes: object) -> ProbeRun:
    probe = LinearProbe(WIDTH, CLASSES, len(rates), seed=1)
    optimizer = ProbeSGD(probe, scaled_learning_rates(rates, 4))
    return ProbeRun(probe, optimizer, rates, epochs, {"lr": list(rates), "epochs": epochs, **changes}, path)


def train(run: ProbeRun) -> ProbeRun:
    features = separable_features()
    run.train(cached_batches(features, CPU, batch_size=4, seed=2), features)
    return run


# --- one epoch


def test_probes_trained_together_are_those_trained_alone_by_torch():
    """The oracle is torch's own linear layer, SGD and cosine schedule, one learning rate at a time."""
    together = train(run_probes(RATES))
    features = separable_features()
    batches = cached_batches(features, CPU, batch_size=4, seed=2)
    for number, rate in enumerate(RATES):
        alone = torch.nn.Linear(WIDTH, CLASSES)
        first = LinearProbe(WIDTH, CLASSES, 1, seed=1)
        alone.load_state_dict({"weight": first.weight[0], "bias": first.bias[0]})
        optimizer = torch.optim.SGD(alone.parameters(), lr=rate * 4 / 256, momentum=0.9, weight_decay=0)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3, eta_min=0)
        for epoch in range(3):
            for inputs, labels in batches(epoch):
                optimizer.zero_grad()
                F.cross_entropy(alone(inputs), labels).backward()
                optimizer.step()
            schedule.step()
        torch.testing.assert_close(together.probe.weight[number], alone.weight, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(together.probe.bias[number], alone.bias, rtol=1e-5, atol=1e-6)


def test_probes_start_alike_small_and_without_bias():
    probe = LinearProbe(1000, CLASSES, 3, seed=4)
    assert torch.equal(probe.weight[0], probe.weight[2])
    assert float(probe.weight.detach().std()) == pytest.approx(0.01, rel=0.05)
    assert not probe.bias.any()
    assert not torch.equal(LinearProbe(1000, CLASSES, 1, seed=5).weight[0], probe.weight[0])


def test_accuracies_equal_a_loop(monkeypatch):
    monkeypatch.setattr("dino_sparo.evaluation.linear.probe.TEST_ROWS", 5)
    features, probe = separable_features(), train(run_probes(RATES)).probe
    found = probe_accuracy(probe.requires_grad_(False), features.features, features.labels)
    for number in range(len(RATES)):
        top1 = top5 = loss = 0.0
        for image, label in zip(features.features, features.labels.tolist(), strict=True):
            scores = [float(image @ row + b) for row, b in zip(probe.weight[number], probe.bias[number], strict=True)]
            ranking = sorted(range(CLASSES), key=lambda c: -scores[c])
            top1, top5 = top1 + (ranking[0] == label), top5 + (label in ranking[:5])
            loss += math.log(sum(math.exp(score) for score in scores)) - scores[label]
        assert found[number]["top1"] == pytest.approx(100 * top1 / IMAGES)
        assert found[number]["top5"] == pytest.approx(100 * top5 / IMAGES)
        assert found[number]["loss"] == pytest.approx(loss / IMAGES, rel=1e-5)


def test_with_three_classes_top5_looks_at_all():
    probe = LinearProbe(WIDTH, 3)
    assert probe_accuracy(probe, torch.randn(4, WIDTH), torch.tensor([0, 1, 2, 0]))[0]["top5"] == 100
    with pytest.raises(ValueError, match="there are no images"):
        probe_accuracy(probe, torch.randn(0, WIDTH), torch.zeros(0, dtype=torch.int64))


def test_a_diverged_probe_is_never_right_and_leaves_the_others_alone():
    run = train(run_probes((0.5, 1e45)))
    good, bad = run.table()
    assert bad["top1"] == bad["top5"] == 0
    assert good["top1"] == train(run_probes((0.5,))).table()[0]["top1"]
    with pytest.raises(ValueError, match="every probe diverged"):
        train(run_probes((1e45,)))


# --- a whole training


def test_a_training_that_was_stopped_goes_on_as_if_it_had_not_been(tmp_path):
    whole = train(run_probes(RATES, epochs=4))
    stopped = run_probes(RATES, epochs=4, path=tmp_path / "linear.pth")
    features = separable_features()
    batches = cached_batches(features, CPU, batch_size=4, seed=2)

    def broken_batches(epoch: int):
        if epoch == 2:
            raise KeyboardInterrupt
        return batches(epoch)

    with pytest.raises(KeyboardInterrupt):
        stopped.train(broken_batches, features)
    again = run_probes(RATES, epochs=4, path=tmp_path / "linear.pth")
    again.resume()
    assert again.epoch == 2
    train(again)
    assert torch.equal(again.probe.weight, whole.probe.weight)
    assert again.table() == whole.table()


def test_validation_is_as_rare_as_asked_but_never_misses_the_end():
    run = run_probes(RATES, epochs=5)
    features = separable_features()
    run.train(cached_batches(features, CPU, batch_size=4), features, val_freq=3)
    assert [entry["epoch"] for entry in run.history] == [0, 3, 4]
    assert run.table()[0]["top1"] == run.history[-1]["test"][0]["top1"]


def test_the_highest_accuracy_on_the_way_is_told_with_its_epoch():
    run = run_probes((0.1,))
    tests = [{"top1": top1, "top5": 90.0, "loss": 0.5} for top1 in (10.0, 30.0, 20.0)]
    run.history = [{"epoch": epoch, "test": [test]} for epoch, test in enumerate(tests)]
    (row,) = run.table()
    assert (row["top1"], row["max_top1"], row["max_top1_epoch"]) == (20, 30, 1)
    training = {"mode": "none: saved probes"}
    shown = linear_command.table({"results": [row], "best": row, "selection": "", "training": training})
    assert "30.00 (2)" in shown  # people count epochs from 1


def test_probes_of_another_run_are_not_continued(tmp_path):
    train(run_probes(RATES, path=tmp_path / "linear.pth"))
    with pytest.raises(ValueError, match=r"another run: epochs 3 in the file, 9 now\. Give the same options"):
        run_probes(RATES, epochs=9, path=tmp_path / "linear.pth").resume()
    torch.save({"state_dict": {}}, tmp_path / "linear.pth")
    with pytest.raises(ValueError, match="holds no linear probes: counts, epoch, history"):
        run_probes(RATES, path=tmp_path / "linear.pth").resume()


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda: scaled_learning_rates([], 8), r"lr=\[\]; give one or more"),
        (lambda: run_probes((0.1, 0.1)), r"lr=\[0.1, 0.1\]; give one or more different"),
        (lambda: run_probes((0.1, 0.0)), r"lr=\[0.1, 0.0\]"),
        (lambda: run_probes(RATES).train(lambda _: [], separable_features()), "has no batch"),
    ],
)
def test_bad_input_is_refused(action, message):
    with pytest.raises(ValueError, match=message):
        action()


# --- batches


def augmented_batches(source: Scenes, augmentation: Callable, seed: int) -> DataLoader:
    dataset = ImageDataset(source, augmentation, seed=seed)
    return create_loader(dataset, ProbeSampler(len(source), 4, seed), num_workers=0)


def test_live_and_cached_batches_take_the_images_in_the_same_order():
    """Without augmentation they are therefore the same training."""
    source = Scenes(13, image_size=24)
    torch.manual_seed(0)
    encoder = create_encoder("vit_micro", 8, num_slots=3, slot_dim=2, key_dim=2, img_size=16)
    transform = EvalTransform(16)
    with torch.no_grad():
        views = torch.stack([transform(source.read(i))[0] for i in range(13)])
        features = Features(encoder.eval()(views), torch.tensor(source.labels), torch.arange(13))
    live = live_batches(encoder, encoder, augmented_batches(source, transform, seed=3), CPU, torch.float32)
    cached = cached_batches(features, CPU, batch_size=4, seed=3)
    for epoch in (0, 1):
        pairs = list(zip(live(epoch), cached(epoch), strict=True))
        assert [len(labels) for (_, labels), _ in pairs] == [4, 4, 4, 1]
        for (live_features, live_labels), (cached_features, cached_labels) in pairs:
            assert torch.equal(live_labels, cached_labels)
            torch.testing.assert_close(live_features, cached_features, rtol=1e-4, atol=1e-5)
    probe = LinearProbe(encoder.encoding_dim, 10)
    assert math.isfinite(train_one_epoch(probe, ProbeSGD(probe, [0.1]), live(0), [1.0] * 4)[0])  # no inference tensors


def test_a_probes_view_is_a_random_box_resized_flipped_and_normalised():
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (31, 43, 3), dtype=np.uint8))
    mean, std = (0.4, 0.5, 0.6), (0.1, 0.2, 0.3)
    augmentation = linear_command.ProbeAugmentation(16, mean, std)
    for seed in range(7):
        rng = np.random.default_rng(seed)
        box = sample_box(rng, 31, 43, (0.08, 1.0))
        crop = TF.resized_crop(image, *box, [16, 16], InterpolationMode.BILINEAR)
        crop = TF.hflip(crop) if rng.random() < 0.5 else crop
        (view,) = augmentation(image, np.random.default_rng(seed))
        torch.testing.assert_close(view, TF.normalize(TF.to_tensor(crop), mean, std))


def test_the_seed_changes_the_crops_and_not_only_their_order():
    def draws(seed: int) -> list[float]:
        source = Scenes(12, image_size=24)
        loader = augmented_batches(source, lambda image, rng: [torch.full((1, 1, 1), rng.random())], seed)
        live = live_batches(torch.nn.Identity(), lambda views: views, loader, CPU, torch.float32)
        return sorted(float(draw) for views, _ in live(0) for draw in views)

    assert len(draws(3)) == 12
    assert draws(3) == draws(3)
    assert not set(draws(3)) & set(draws(4))


# --- the script


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    return save_small_encoder(tmp_path / "run" / "checkpoint.pth")


def probe(checkpoint: Path, *options: object) -> dict:
    fixed = ["--pretrained_weights", checkpoint, "--data_path", "scenes:24:24", "--device", "cpu", "--num_workers", 0]
    args = eval_linear.get_args_parser().parse_args([*map(str, (*fixed, "--batch_size_per_gpu", 8, *options))])
    try:
        return linear_command.probe_checkpoint(args)
    finally:
        shutdown()


def test_the_result_file_tells_the_whole_protocol(checkpoint, capsys):
    result, stem = probe(checkpoint, "--epochs", 2, "--lr", 0.1, 1), "linear_checkpoint_scenes-24-24"
    assert json.loads((checkpoint.parent / f"{stem}.json").read_text()) == result
    assert [score.name for score in scores_of(result)] == ["top-1", "top-5"]
    assert [row["lr"] for row in result["results"]] == [0.1, 1.0]
    assert result["best"]["top1"] == max(row["top1"] for row in result["results"])
    assert "chosen on the validation images" in result["selection"]
    assert result["training"]["mode"] == "random resized crops and flips"
    assert result["training"]["global_batch_size"] == 8
    # Three class tokens of 128 numbers and the encoding of 5 x 3, in place of a fourth.
    assert result["feature"]["dim"] == 3 * 128 + 15
    assert (result["encoder"]["epoch"], result["images"]["num_classes"]) == (7, 10)
    assert "chosen on the validation images" in capsys.readouterr().out
    log = (checkpoint.parent / f"{stem}_log.txt").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in log] == [0, 1]


def test_training_sees_the_encoders_colours_and_the_precision_and_seed_asked_for(checkpoint, monkeypatch):
    asked = mock.Mock(wraps=live_batches)
    monkeypatch.setattr(linear_command.probe, "live_batches", asked)
    probe(checkpoint, "--epochs", 1, "--lr", 0.1, "--precision", "bf16", "--seed", 3)
    loader, _, dtype = asked.call_args.args[2:]
    augmentation, sampler = loader.dataset.transform, loader.batch_sampler
    assert (augmentation.img_size, augmentation.mean, augmentation.std) == (16, (0.4, 0.5, 0.6), (0.1, 0.2, 0.3))
    assert (dtype, loader.dataset.seed, sampler.seed, sampler.batch_size) == (torch.bfloat16, 3, 3, 8)


def test_the_same_command_gives_the_same_file_afresh_and_when_finished(checkpoint, tmp_path):
    options = ("--epochs", 2, "--lr", 0.1, "--output_dir")
    for folder in ("one", "two", "two"):
        probe(checkpoint, *options, tmp_path / folder)
    one, two = (tmp_path / folder / "linear_run_checkpoint_scenes-24-24.json" for folder in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()
    log = two.with_name(f"{two.stem}_log.txt")
    assert len(log.read_text().splitlines()) == 2  # the third run trained nothing


def test_probes_of_as_many_images_of_other_pixels_are_not_continued(checkpoint):
    """The bug: the accuracy of the images before was reported under the name of the new ones."""
    probe(checkpoint, "--epochs", 1, "--lr", 0.1, "--fast")
    probe(checkpoint, "--evaluate", "--data_path", "scenes:24:32")  # saved probes may be tested on any images
    shutil.copy(*(checkpoint.with_name(f"linear_checkpoint_scenes-24-{side}.pth") for side in (24, 32)))
    others = ("--epochs", 1, "--lr", 0.1, "--fast", "--data_path", "scenes:24:32")
    with pytest.raises(ValueError, match=r"holds probes of another run: train_images .*24 px.*32 px.*; val_images"):
        probe(checkpoint, *others)
    probe(checkpoint, *others, "--overwrite")


@pytest.mark.parametrize(("option", "value"), [("readout", "gap"), ("patch_size", 4)])
def test_probes_of_another_untrained_encoder_are_not_continued(tmp_path, option, value):
    """The bug: encodings of equal width went for the same encoder, whose accuracy was reported."""
    words = ["--untrained", "--arch", "vit_micro", "--img_size", "16", "--data_path", "scenes:24:24", "--device", "cpu"]
    words += ["--num_workers", "0", "--epochs", "1", "--lr", "0.1", "--fast", "--output_dir", str(tmp_path)]
    args = eval_linear.get_args_parser().parse_args([*words, "--readout", "cls", "--patch_size", "8"])
    linear_command.probe_checkpoint(args)
    setattr(args, option, value)
    with pytest.raises(ValueError, match=rf"holds another result: {option} '?\w+'? in the file"):
        linear_command.probe_checkpoint(args)
    next(tmp_path.glob("*.json")).unlink()
    with pytest.raises(ValueError, match=rf"holds probes of another run: encoder {option} '?\w+'? in the file"):
        linear_command.probe_checkpoint(args)
    shutdown()


def test_unreadable_images_do_not_leave_too_few_for_a_step(checkpoint, tmp_path):
    """The bug: a set no larger than a batch, with a torn image, ended the fast probe after encoding."""
    for split in ("train", "val"):
        for number in range(6):
            path = tmp_path / "images" / split / str(number % 2) / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (24, 24), (number, 0, 0)).save(path)
    path.write_bytes(b"")
    (tmp_path / "images" / "train" / "0" / "0.png").write_bytes(b"")
    counts = probe(checkpoint, "--epochs", 1, "--lr", 0.1, "--fast", "--data_path", tmp_path / "images")["images"]
    assert (counts["num_train"], counts["num_corrupt_train"], counts["num_val"]) == (5, 1, 5)


def test_saved_probes_are_tested_again_with_the_same_result(checkpoint):
    pooled = ("--avgpool_patchtokens", "true")
    trained = probe(checkpoint, "--epochs", 2, "--lr", 0.1, 1, "--fast", *pooled)
    assert trained["training"]["mode"].startswith("fast")
    assert trained["feature"]["dim"] == 3 * 128 + 15 + 128  # the mean of the patch tokens
    tested = probe(checkpoint, "--evaluate", *pooled)
    for before, after in zip(trained["results"], tested["results"], strict=True):
        assert {name: before[name] for name in after} == after
    with pytest.raises(ValueError, match="n_last_blocks 4 in the file, 1 now"):
        probe(checkpoint, "--evaluate", *pooled, "--n_last_blocks", 1)


def test_a_wrong_number_of_labels_is_refused(checkpoint):
    with pytest.raises(ValueError, match=r"--num_labels 1000, but the images have 10 classes"):
        probe(checkpoint, "--num_labels", 1000)


def test_a_set_smaller_than_the_batch_is_one_step_at_the_learning_rate_of_the_whole_batch(checkpoint, tmp_path):
    """As in the reference, which scales with --batch_size_per_gpu; the learning rate was that of 24 images."""
    large, small = (
        probe(checkpoint, "--epochs", 1, "--lr", lr, "--fast", "--batch_size_per_gpu", size, "--output_dir", folder)
        for lr, size, folder in ((0.1, 480, tmp_path / "large"), (2.0, 24, tmp_path / "small"))
    )
    assert large["training"]["global_batch_size"] == 480
    assert large["results"][0]["loss"] == pytest.approx(small["results"][0]["loss"], rel=1e-6)


def test_every_image_is_taken_once_per_epoch_and_the_last_batch_is_what_remains(monkeypatch):
    """The reference keeps the last incomplete batch; ours was dropped."""
    batches = list(ProbeSampler(23, 5, seed=1))
    assert [len(batch) for batch in batches] == [5, 5, 5, 5, 3]
    assert sorted(index for batch in batches for _, index in batch) == list(range(23))

    monkeypatch.setattr("dino_sparo.evaluation.linear.probe.world_size", lambda: 3)
    shares = []
    for rank in range(3):
        monkeypatch.setattr("dino_sparo.evaluation.linear.probe.rank", lambda rank=rank: rank)
        shares.append([[index for _, index in batch] for batch in ProbeSampler(23, 5, seed=1)])
        assert len(ProbeSampler(23, 5, seed=1)) == len(shares[-1]) == 2
    # As torch's DistributedSampler: 24 = 3 x 8 images, the first of the order twice.
    assert [[len(batch) for batch in share] for share in shares] == [[5, 3]] * 3
    every = [index for step in range(2) for share in shares for index in share[step]]
    order = [index for batch in batches for _, index in batch]
    assert every == [*order, order[0]]


@pytest.mark.parametrize("avgpool", [False, True])
def test_the_references_linear_head_is_read_with_its_columns_in_our_order(tmp_path, avgpool):
    """The oracle is the input that facebookresearch/dino's eval_linear.py builds, line by line."""
    torch.manual_seed(0)
    class_token, mean = torch.randn(3, 7), torch.randn(3, 7)
    output = class_token
    if avgpool:
        output = torch.cat((output.unsqueeze(-1), mean.unsqueeze(-1)), dim=-1)
        output = output.reshape(output.shape[0], -1)
    head = torch.nn.Linear(output.shape[1], CLASSES)
    state = {f"module.linear.{name}": value for name, value in head.state_dict().items()}
    torch.save({"epoch": 100, "state_dict": state, "best_acc": 77.0}, tmp_path / "linear.pth")
    probe = LinearProbe(output.shape[1], CLASSES)
    probe.load_state_dict(reference_heads(tmp_path / "linear.pth", avgpool))
    ours = torch.cat((class_token, mean), dim=1) if avgpool else class_token
    torch.testing.assert_close(probe(ours)[0], head(output))


def test_the_references_head_is_tested_on_our_features(checkpoint, capsys):
    head = torch.nn.Linear(128 + 15, 10)
    state = {f"module.linear.{name}": value for name, value in head.state_dict().items()}
    torch.save({"state_dict": state}, checkpoint.parent / "linear.pth")
    result = probe(checkpoint, "--evaluate", "--n_last_blocks", 2)
    assert (result["results"][0]["lr"] is None) or math.isnan(result["results"][0]["lr"])
    written = (checkpoint.parent / "linear_evaluate_checkpoint_scenes-24-24.json").read_text()
    assert json.loads(written)["best"]["lr"] is None
    assert "best: top-1" in capsys.readouterr().out.replace("lr nan, ", "")
    with pytest.raises(ValueError, match=r"linear\.pth"):
        probe(checkpoint, "--evaluate", "--n_last_blocks", 1, "--overwrite")
