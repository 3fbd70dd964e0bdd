import json
import logging
import math
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image
from small_models import save_small_encoder

import eval_knn
from dino_sparo.evaluation import knn
from dino_sparo.evaluation.features import Features
from dino_sparo.evaluation.knn import KNNResult
from dino_sparo.runtime.collectives import rank
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.launch import shutdown
from dino_sparo.weights.results import scores_of

CPU = torch.device("cpu")
TRAIN, TEST, WIDTH = 61, 13, 7
LABELS = (0, 2, 3, 11, 10**9)  # with gaps, as labels may have


def knn_classify(
    train: torch.Tensor,
    train_labels: torch.Tensor,
    test: torch.Tensor,
    test_labels: torch.Tensor,
    k: int | list[int],
    temperature: float = 0.07,
) -> Any:
    """The result of one number of neighbours, or of several by number."""
    sides = ((train, train_labels), (test, test_labels))
    shares = (Features(values, labels, torch.arange(len(labels))) for values, labels in sides)
    results = knn.classify_shards(*shares, k if isinstance(k, list) else [k], temperature, torch.device("cpu"))
    return results if isinstance(k, list) else results[k]


def knn_predict(
    train: torch.Tensor, train_labels: torch.Tensor, test: torch.Tensor, k: int, temperature: float = 0.07
) -> torch.Tensor:
    """The five best classes of each image, best first; -1 where fewer classes have a vote."""
    found = nearest(train, torch.nn.functional.normalize(test, dim=1), k)
    return knn.rank_classes(train_labels[found[1]], found[0], [k], temperature)[k]


def nearest(train: torch.Tensor, images: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    return knn.nearest(train, train.norm(dim=1), images, k)


def clusters(seed: int = 0, labels: tuple[int, ...] = LABELS, train: int = TRAIN) -> tuple[torch.Tensor, ...]:
    """Overlapping classes, so that some votes are right and some are wrong."""
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(len(labels), WIDTH, generator=generator)
    sets = []
    for size in (train, TEST):
        which = torch.randint(len(labels), (size,), generator=generator)
        scale = 0.1 + 10 * torch.rand(size, 1, generator=generator)
        sets += [(centers[which] + torch.randn(size, WIDTH, generator=generator)) * scale, torch.tensor(labels)[which]]
    return sets[0], sets[1], sets[2], sets[3]


def votes_by_loop(train, train_labels, image, k, temperature) -> list[int]:
    """Classes by their votes, written from the equation, in double precision."""
    similarities = []
    for other, label in zip(train.double(), train_labels.tolist(), strict=True):
        cosine = float(image.double() @ other) / float(image.double().norm() * other.norm())
        similarities.append((cosine, label))
    votes: dict[int, float] = {}
    for cosine, label in sorted(similarities, reverse=True)[:k]:
        votes[label] = votes.get(label, 0.0) + math.exp(cosine / temperature)
    return sorted(votes, key=lambda label: -votes[label])


@pytest.mark.parametrize(
    ("chunks", "ks"), [((3, 5), [2]), ((3, 5), [17, 1, 5]), ((1000, 1000), [17, 1, 2, 3, 5, TRAIN])]
)
def test_votes_and_accuracies_of_several_k_in_blocks_of_any_size_equal_a_loop_over_the_equation(
    chunks, ks, monkeypatch
):
    """A block of training images is at least as long as the largest k."""
    monkeypatch.setattr(knn, "TEST_CHUNK", chunks[0])
    monkeypatch.setattr(knn, "TRAIN_CHUNK", chunks[1])
    train, train_labels, test, test_labels = clusters()
    results = knn_classify(train, train_labels, test, test_labels, ks, 0.07)
    assert list(results) == ks
    for k, result in results.items():
        rankings = [votes_by_loop(train, train_labels, image, k, 0.07) for image in test]
        pairs = list(zip(rankings, test_labels.tolist(), strict=True))
        top1 = 100 * sum(ranking[0] == label for ranking, label in pairs) / TEST
        top5 = 100 * sum(label in ranking[:5] for ranking, label in pairs) / TEST
        assert result == pytest.approx((top1, top5), abs=1e-9)
        predicted = knn_predict(train, train_labels, test[: chunks[0]], k).tolist()
        expected = [ranking[:5] for ranking in rankings[: chunks[0]]]
        assert [[label for label in row if label >= 0] for row in predicted] == expected


def test_no_intermediate_is_larger_than_a_block(monkeypatch):
    monkeypatch.setattr(knn, "TEST_CHUNK", 3)
    monkeypatch.setattr(knn, "TRAIN_CHUNK", 5)
    largest = 0
    topk = torch.Tensor.topk

    def measuring_topk(tensor, k):
        nonlocal largest
        largest = max(largest, tensor.numel())
        return topk(tensor, k)

    monkeypatch.setattr(torch.Tensor, "topk", measuring_topk)
    knn_classify(*clusters(), 2, 0.07)
    assert 0 < largest <= 3 * (5 + 2)


def test_a_class_without_votes_is_no_hit_among_the_five():
    """The reference fills the first five up with classes that nobody voted for."""
    features = torch.eye(3, WIDTH)
    assert knn_classify(features, torch.tensor([1, 1, 1]), features[:1], torch.tensor([0]), 3, 0.07).top5 == 0


def test_more_neighbours_than_training_images_means_all_of_them(caplog):
    sets = clusters()
    with caplog.at_level(logging.WARNING):
        knn_classify(*sets, [TRAIN], 0.07)
        assert caplog.text == ""
        result = knn_classify(*sets, [200], 0.07)
    assert result[200] == knn_classify(*sets, TRAIN, 0.07)
    assert "k=[200] is more than the 61 training images" in caplog.text


def test_of_equal_votes_the_smaller_label_comes_first_and_six_classes_give_five():
    train = torch.ones(6, WIDTH)  # all equally similar
    found = knn_predict(train, torch.tensor([11, 3, 7, 0, 5, 2]), train[:1], 6)
    assert found.tolist() == [[0, 2, 3, 5, 7]]
    assert knn_predict(train[:2], torch.tensor([4, 1]), train[:1], 2).tolist() == [[1, 4, -1, -1, -1]]
    many = torch.ones(61, WIDTH)  # a sort that is not stable shows above sixteen or so
    assert knn_predict(many, torch.arange(61).roll(17), many[:1], 61).tolist() == [[0, 1, 2, 3, 4]]


def test_a_vote_that_underflows_is_still_a_vote_and_ranks_its_class():
    train = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    assert knn_predict(train, torch.tensor([6, 2]), train[:1], 2, 1e-6).tolist() == [[6, 2, -1, -1, -1]]
    cosines = torch.tensor([1.0, 0.6, 0.0])  # votes of 1, 4e-18 and 4e-44
    train = torch.stack([cosines, (1 - cosines**2).sqrt()], dim=1)
    assert knn_predict(train, torch.tensor([6, 9, 2]), train[:1], 3, 0.01).tolist() == [[6, 9, 2, -1, -1]]


def test_a_feature_of_zeros_is_similar_to_none():
    train = torch.tensor([[0.0, 0.0], [-1.0, 0.0], [0.6, 0.8]])
    images = torch.tensor([[1.0, 0.0]])
    similarities, indices = nearest(train, images, 3)
    torch.testing.assert_close(similarities, torch.tensor([[0.6, 0.0, -1.0]]))
    assert indices.tolist() == [[2, 0, 1]]


def test_neighbours_of_features_with_a_graph_have_none():
    train, _, test, _ = clusters()
    images = torch.nn.functional.normalize(test, dim=1).requires_grad_()
    similarities, _ = nearest(train.requires_grad_(), images, 3)
    assert not similarities.requires_grad


def test_no_temperature_overflows():
    sets = clusters()
    # So cold a vote is the nearest neighbour's alone.
    assert knn_classify(*sets, 20, 1e-4).top1 == knn_classify(*sets, 1, 0.07).top1
    assert knn_classify(*sets, 20, 1e6).top1 > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_features": torch.empty(0, WIDTH), "train_labels": torch.empty(0).long()}, "train_features are empty"),
        ({"test_features": torch.empty(0, WIDTH), "test_labels": torch.empty(0).long()}, "test_features are empty"),
        ({"test_features": torch.ones(TEST, WIDTH + 1)}, "7 numbers per image and test_features 8"),
        ({"train_labels": torch.full((TRAIN,), -3)}, "train_labels hold -3; labels are non-negative"),
        ({"train_features": torch.full((TRAIN, WIDTH), math.inf)}, "train_features of image 0 are not finite"),
        ({"test_labels": torch.full((TEST,), -1)}, "test_labels hold -1"),
        (
            {"test_features": torch.ones(TEST, WIDTH).index_fill(0, torch.tensor(4), torch.nan)},
            "of image 4 are not fin",
        ),
    ],
)
def test_bad_input_is_refused(changes, message):
    names = ("train_features", "train_labels", "test_features", "test_labels")
    arguments = dict(zip(names, clusters(), strict=True)) | changes
    with pytest.raises(ValueError, match=message):
        knn_classify(*arguments.values(), [3])


# --- several processes


def tied_sets() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Many equal similarities: 150 training images are copies of 12, in classes that copies do not share."""
    generator = torch.Generator().manual_seed(3)
    kinds = torch.randn(12, 1000, generator=generator)
    train = kinds[torch.randint(12, (150,), generator=generator)]
    train_labels = torch.randint(7, (150,), generator=generator)
    test = kinds[torch.randint(12, (29,), generator=generator)] + 0.5 * torch.randn(29, 1000, generator=generator)
    return train, train_labels, test, torch.randint(7, (29,), generator=generator)


def own_share(features: torch.Tensor, labels: torch.Tensor, first: int) -> Features:
    """The first images on rank 0 of two, the other images on rank 1."""
    rows = slice(first, None) if rank() else slice(first)
    own = features[rows] if len(labels[rows]) else torch.empty(0, 0)
    return Features(own, labels[rows], torch.arange(len(labels))[rows])


def classify_own_share(first: int) -> dict[int, KNNResult]:
    train, train_labels, test, test_labels = tied_sets()
    shares = own_share(train, train_labels, first), own_share(test, test_labels, first)
    with mock.patch.object(knn, "TRAIN_CHUNK", 50):
        return knn.classify_shards(*shares, [1, 3, 20, 140], 0.07, CPU)


def classify_not_finite() -> None:
    broken = own_share(torch.full((9, 2), torch.nan), torch.zeros(9).long(), 5)
    knn.classify_shards(broken, broken, [1], 0.07, CPU)


def test_ranks_with_uneven_or_no_shares_and_many_ties_find_what_one_process_finds_and_fail_together(two_ranks):
    expected = knn_classify(*tied_sets(), [1, 3, 20, 140], 0.07)
    assert len({result.top1 for result in expected.values()}) > 1
    for first in (5, 0):
        assert two_ranks(classify_own_share, first) == [expected] * 2
    assert all("not finite" in error for error in two_ranks.errors(classify_not_finite))


def test_of_equally_similar_images_the_first_are_the_nearest(monkeypatch):
    """torch's topk takes any of them."""
    monkeypatch.setattr(knn, "TRAIN_CHUNK", 64)
    train = torch.eye(2, WIDTH)[torch.arange(400) % 3 % 2]  # rows 1, 4, 7, ... are the second unit vector
    _, indices = nearest(train, torch.eye(2, WIDTH), 9)
    assert indices.tolist() == [[0, 2, 3, 5, 6, 8, 9, 11, 12], [1, 4, 7, 10, 13, 16, 19, 22, 25]]


@pytest.mark.parametrize("kinds", [1, 3, 40, 10**6])
@pytest.mark.parametrize("k", [1, 7, 53])
def test_the_largest_of_many_equal_values_are_those_of_a_stable_sort(kinds, k):
    values = torch.randint(kinds, (11, 53), generator=torch.Generator().manual_seed(k)).float()
    values[::2, :20] = -math.inf
    expected = values.sort(dim=1, descending=True, stable=True)
    largest, positions = knn.first_largest(values, k)
    assert torch.equal(largest, expected.values[:, :k])
    assert torch.equal(positions, expected.indices[:, :k])


def test_a_similarity_has_the_same_bits_in_a_small_block():
    train = torch.randn(131, 1000, generator=torch.Generator().manual_seed(0))
    images = torch.nn.functional.normalize(train[:29], dim=1)
    whole, order = nearest(train, images, 131)
    part, own_order = nearest(train[17:30], images[3:8], 13)
    by_place = torch.empty_like(whole).scatter_(1, order, whole)
    assert torch.equal(by_place[3:8, 17:30], torch.empty_like(part).scatter_(1, own_order, part))


# --- the script


@pytest.fixture
def folders(tmp_path) -> Path:
    """Class folders: 3 classes told apart by their brightness, 5 + 2 images each, of unequal sizes."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 5), ("val", 2)):
        for number, name in enumerate(("ape", "bee", "cow")):
            folder = tmp_path / "data" / split / name
            folder.mkdir(parents=True)
            for image in range(count):
                pixels = rng.integers(80 * number, 80 * number + 40, (19 + image, 23, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{image}.png")
    return tmp_path / "data"


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    return save_small_encoder(tmp_path / "run" / "checkpoint.pth")


def evaluate(*options: object) -> dict:
    arguments = [*map(str, options), "--device", "cpu", "--num_workers", "0", "--batch_size_per_gpu", "4"]
    try:
        return knn.evaluate_checkpoint(eval_knn.get_args_parser().parse_args(arguments))
    finally:
        shutdown()


def test_more_layers_are_searched_side_by_side(folders, checkpoint):
    options = ("--pretrained_weights", checkpoint, "--data_path", folders, "--nb_knn", 3)
    one, three = (evaluate(*options, "--n_last_blocks", n) for n in (1, 3))
    assert one["feature"] == {"name": "encoding", "n_last_blocks": 1, "dim": 5 * 3, "precision": "fp32"}
    results = {path.name: json.loads(path.read_text()) for path in checkpoint.parent.glob("knn*.json")}
    assert results == {"knn_checkpoint_data.json": one, "knn_3blocks_checkpoint_data.json": three}
    assert three["feature"]["name"] == "class tokens of 3 layers, the last of them the encoding"
    assert three["feature"]["dim"] == 2 * 128 + 5 * 3
    with pytest.raises(ValueError, match="n=9 layers requested"):
        evaluate(*options, "--n_last_blocks", 9)


def test_the_result_file_tells_the_whole_protocol(folders, checkpoint, capsys):
    result = evaluate("--pretrained_weights", checkpoint, "--data_path", folders, "--nb_knn", 2, 100)

    assert json.loads((checkpoint.parent / "knn_checkpoint_data.json").read_text()) == result
    assert [score.name for score in scores_of(result)] == ["2-NN", "100-NN"]
    assert [(row["k"], row["neighbours"]) for row in result["results"]] == [(2, 2), (100, 15)]
    assert result["results"][0]["top1"] == 100.0  # brightness survives any encoder
    assert result["temperature"] == 0.07
    assert result["encoder"]["epoch"] == 7
    assert result["encoder"]["checkpoint_key"] == "teacher"
    assert len(result["encoder"]["sha256"]) == 64
    assert (result["encoder"]["arch"], result["encoder"]["readout"]) == ("vit_micro", "sparo")
    assert result["feature"] == {"name": "encoding", "n_last_blocks": 1, "dim": 15, "precision": "fp32"}
    assert (result["view"]["resize"], result["view"]["crop"], result["view"]["interpolation"]) == (18, 16, "bicubic")
    assert result["view"]["mean"] == [0.4, 0.5, 0.6]
    images = result["images"]
    assert (images["num_train"], images["num_val"], images["num_classes"]) == (15, 6, 3)
    assert {"torch", "torchvision", "timm", "dino_sparo"} <= result["versions"].keys()
    printed = capsys.readouterr().out
    assert "knn_checkpoint_data.json" in printed
    rows = [line.split() for line in printed.splitlines()]
    assert all([f"{one['k']}", f"{one['top1']:.2f}", f"{one['top5']:.2f}"] in rows for one in result["results"])


def test_the_same_command_and_cached_features_give_the_same_file(folders, checkpoint, tmp_path):
    options = ("--nb_knn", 1, 3, "--output_dir")
    model = ("--pretrained_weights", checkpoint, "--data_path", folders)
    evaluate(*model, *options, tmp_path / "one")
    evaluate(*model, *options, tmp_path / "two", "--dump_features", tmp_path / "cache")
    evaluate("--load_features", tmp_path / "cache", *options, tmp_path / "three")
    files = ("one/knn_run_checkpoint_data.json", "two/knn_run_checkpoint_data.json", "three/knn_data.json")
    one, two, three = ((tmp_path / name).read_bytes() for name in files)
    assert one == two == three

    cached = ("--load_features", tmp_path / "cache", *options, tmp_path / "three")
    evaluate(*cached, "--data_path", folders)
    others = [
        ("--data_path", "nowhere"),
        ("--n_last_blocks", 3),
        ("--untrained",),
        ("--img_size", 32),
        ("--exif", "ignore"),
    ]
    for words in (*others, ("--slots", 0), ("--dump_features", tmp_path / "again")):
        with pytest.raises(ValueError, match=rf"{words[0]} .* with --load_features: leave out one of the two"):
            evaluate(*cached, *words)

    torch.save({"teacher": {}}, tmp_path / "other.pth")
    with pytest.raises(ValueError, match="were not made with"):
        evaluate("--load_features", tmp_path / "cache", "--pretrained_weights", tmp_path / "other.pth")


@pytest.mark.parametrize(("precision", "products"), [("fp32", "highest"), ("tf32", "high")])
def test_fp32_is_exact_where_the_environment_allows_tf32(folders, checkpoint, tmp_path, precision, products):
    """As NVIDIA's containers do; nothing had set it."""
    model = ("--pretrained_weights", checkpoint, "--data_path", folders, "--nb_knn", 1, "--output_dir", tmp_path)
    torch.set_float32_matmul_precision("medium")
    try:
        result = evaluate(*model, "--precision", precision)
        assert torch.get_float32_matmul_precision() == products
        assert torch.backends.cudnn.allow_tf32 is (precision == "tf32")
        assert result["feature"]["precision"] == precision
    finally:
        torch.set_float32_matmul_precision("highest")


def test_faster_views_are_named_in_the_file(folders, checkpoint, tmp_path):
    options = ("--nb_knn", 1, 3, "--pretrained_weights", checkpoint, "--data_path", folders, "--output_dir")
    exact = evaluate(*options, tmp_path / "exact")
    fast = evaluate(*options, tmp_path / "fast", "--fast_views")
    assert (exact["view"]["exact"], fast["view"]["exact"]) == (True, False)
    assert fast["results"] == exact["results"]


def test_classes_are_matched_by_name_and_not_by_number(folders, checkpoint):
    shutil.rmtree(folders / "val" / "ape")  # bee and cow move up in the validation images' own numbering
    result = evaluate("--pretrained_weights", checkpoint, "--data_path", folders, "--nb_knn", 2)
    assert result["results"][0]["top1"] == 100.0

    shutil.rmtree(folders / "train" / "bee")
    with pytest.raises(ValueError, match="'bee'"):
        evaluate("--pretrained_weights", checkpoint, "--data_path", folders, "--nb_knn", 2)


def test_a_result_of_other_weights_or_options_names_the_difference(folders, checkpoint, monkeypatch):
    monkeypatch.chdir(folders)
    options = ("--pretrained_weights", checkpoint, "--data_path", ".", "--nb_knn")
    path = checkpoint.with_name("knn_checkpoint_data.json")
    evaluate(*options, 1)
    evaluate(*options, 1, "--batch_size_per_gpu", 3)
    with pytest.raises(UserError, match=r"another result: nb_knn \[1\] in the file, \[2\] now.*, or --overwrite"):
        evaluate(*options, 2)
    saved = torch.load(checkpoint, weights_only=True)
    torch.save({**saved, "epoch": 8}, checkpoint)  # trained further
    with pytest.raises(UserError, match=r"another result: weights \w{8}\.\.\. in the file, \w{8}\.\.\. now"):
        evaluate(*options, 1)
    path.write_text("[]")
    with pytest.raises(UserError, match="another result"):
        evaluate(*options, 1)


def test_an_untrained_encoder_is_asked_for_by_name_and_kept_apart(folders, checkpoint):
    model = ("--data_path", folders, "--nb_knn", 2, "--pretrained_weights")
    trained = evaluate(*model, checkpoint)
    untrained = evaluate(*model, checkpoint, "--untrained", "--seed", 3)
    assert untrained["encoder"]["untrained"]
    assert untrained["encoder"]["arch"] == "vit_micro"
    assert untrained["view"] == trained["view"]
    assert json.loads((checkpoint.parent / "knn_checkpoint_data.json").read_text()) == trained
    assert json.loads((checkpoint.parent / "knn_checkpoint_data_untrained.json").read_text()) == untrained

    built = ("--arch", "vit_micro", "--patch_size", 8, "--readout", "gap", "--img_size", 16)
    folder = ("--output_dir", checkpoint.parent)
    assert evaluate("--data_path", folders, "--untrained", *built, *folder)["feature"]["dim"] == 128
    with pytest.raises(ValueError, match="--readout gap beside --pretrained_weights: a checkpoint has a read-out"):
        evaluate(*model, checkpoint, "--readout", "gap")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_features_of_any_precision_are_classified(dtype: torch.dtype) -> None:
    features = torch.randn(30, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    labels = torch.arange(30) % 3
    assert knn_classify(features, labels, features, labels, 1) == KNNResult(100.0, 100.0)


def test_nothing_is_evaluated_without_weights_or_images(folders, checkpoint):
    with pytest.raises(ValueError, match="--pretrained_weights is empty"):
        evaluate("--data_path", folders, "--arch", "vit_micro")
    with pytest.raises(ValueError, match="--data_path is empty"):
        evaluate("--pretrained_weights", checkpoint)
    for split in ("train", "val"):
        (folders / "flat" / split).mkdir(parents=True)
        shutil.copy(folders / "train" / "ape" / "0.png", folders / "flat" / split / "0.png")
    with pytest.raises(ValueError, match="has no labels"):
        evaluate("--pretrained_weights", checkpoint, "--data_path", folders / "flat")
