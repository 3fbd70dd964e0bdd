import json
import math
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from clip_fakes import small_checkpoint
from kills import killed_at
from PIL import Image
from runs import Ranks
from small_models import words_of
from torch import nn
from two_ranks import TwoRanks

from dino_sparo.__main__ import run
from dino_sparo.data.sources import CorruptImageError
from dino_sparo.data.views import EvalTransform
from dino_sparo.evaluation.features import (
    NEARLY_EQUAL,
    Features,
    check_features,
    disjoint_subsets,
    extract_split,
    inference,
    load_features,
    save_features,
)
from dino_sparo.models.encoder import create_encoder
from dino_sparo.runtime.launch import shutdown

CPU = torch.device("cpu")
TRANSFORM = EvalTransform(16)


class Noise:
    """Images of noise, some of which cannot be read."""

    name = "noise"

    def __init__(self, size: int, corrupt: tuple[int, ...] = ()) -> None:
        self.size, self.corrupt = size, corrupt
        self.classes = ["even", "odd"]
        self.labels = np.arange(size) % 2

    def __len__(self) -> int:
        return self.size

    def read(self, index: int) -> Image.Image:
        if index in self.corrupt:
            raise CorruptImageError(self.location(index), "torn")
        pixels = np.random.default_rng(index).integers(0, 256, (19, 23, 3), dtype=np.uint8)
        return Image.fromarray(pixels)

    def location(self, index: int) -> str:
        return f"noise[{index}]"


def test_what_was_compiled_for_training_is_not_compiled_anew() -> None:
    """The bug: the first evaluation of an OC-CLIP compiled its backbone twice more, in every run."""

    class Network(nn.Linear):  # torch 2.6 compiles no frame of torch's own modules
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, self.weight, self.bias)

    network, graphs = Network(3, 2), list[object]()

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(inputs)
        return graph.forward

    network.compile(backend=backend)
    expected = network(torch.ones(4, 3)).detach()
    assert len(graphs) == 1
    with inference(network, CPU, torch.float32):
        assert torch.equal(network(torch.ones(5, 3))[:4], expected)
    assert len(graphs) == 1
    network(torch.ones(4, 3))
    assert len(graphs) == 1


@pytest.fixture(scope="module")
def encoder() -> nn.Module:
    torch.manual_seed(0)
    return create_encoder("vit_micro", 8, num_slots=5, slot_dim=3, key_dim=2, img_size=16, drop_path_rate=0.5)


def shard(encoder: nn.Module, source: Noise, number: int, ranks: int, batch_size: int) -> Features:
    """The share of one of several processes."""
    module = "dino_sparo.data.shares"
    with mock.patch(f"{module}.rank", return_value=number), mock.patch(f"{module}.world_size", return_value=ranks):
        return extract_split(encoder, source, TRANSFORM, CPU, batch_size=batch_size, gather=False)


def test_features_equal_the_encoding_of_each_image_alone(encoder):
    source = Noise(11)
    found = extract_split(encoder, source, TRANSFORM, CPU, batch_size=4)
    with torch.no_grad():
        alone = torch.cat([encoder.eval()(TRANSFORM(source.read(i))[0][None]) for i in range(11)])
    torch.testing.assert_close(found.features, alone, rtol=1e-5, atol=1e-6)
    assert found.labels.tolist() == [i % 2 for i in range(11)]
    assert found.indices.tolist() == list(range(11))
    assert not found.features.is_inference()


@pytest.mark.parametrize("world_size", [2, 3, 13])
def test_every_image_has_the_same_bits_however_many_processes_share_the_work(encoder, world_size):
    source = Noise(11)
    one = shard(encoder, source, 0, 1, batch_size=4)
    parts = [shard(encoder, source, rank, world_size, batch_size=4) for rank in range(world_size)]
    assert torch.equal(torch.cat([part.features for part in parts if len(part.features)]), one.features)
    assert torch.equal(torch.cat([part.indices for part in parts]), one.indices)


def test_the_encoder_is_evaluated_and_left_as_it_was(encoder):
    source = Noise(5)
    encoder.train()
    first = extract_split(encoder, source, TRANSFORM, CPU, batch_size=2)
    second = extract_split(encoder, source, TRANSFORM, CPU, batch_size=2)
    assert torch.equal(first.features, second.features)  # stochastic depth would differ
    assert encoder.training


def test_unreadable_images_are_left_out_counted_and_named(encoder, caplog):
    whole = extract_split(encoder, Noise(11), TRANSFORM, CPU, batch_size=4)
    found = extract_split(encoder, Noise(11, corrupt=(2, 3, 10)), TRANSFORM, CPU, batch_size=4)
    kept = [0, 1, 4, 5, 6, 7, 8, 9]
    assert found.num_corrupt == 3
    assert found.indices.tolist() == kept
    assert torch.equal(found.features, whole.features[kept])
    assert "left out 3 images" in caplog.text
    assert "noise[10] (torn)" in caplog.text


def test_lower_precision_stays_close(encoder):
    exact = extract_split(encoder, Noise(5), TRANSFORM, CPU, batch_size=5)
    rough = extract_split(encoder, Noise(5), TRANSFORM, CPU, batch_size=5, dtype=torch.bfloat16)
    assert rough.features.dtype == torch.float32
    assert not torch.equal(rough.features, exact.features)
    torch.testing.assert_close(rough.features, exact.features, rtol=0, atol=0.05 * float(exact.features.abs().max()))


def test_subsets_share_no_image_and_never_change():
    source = Noise(30)
    large, small = disjoint_subsets(source, (20, 7))
    again, _ = disjoint_subsets(source, (20, 7))
    places = [subset.location(i) for subset in (large, small) for i in range(len(subset))]
    assert (len(large), len(small), len(set(places))) == (20, 7, 27)
    assert [again.location(i) for i in range(20)] == places[:20]
    assert set(large.labels.tolist()) == {0, 1}
    assert [len(subset) for subset in disjoint_subsets(source, (80, 40))] == [20, 10]
    with pytest.raises(ValueError, match="too few to split"):
        disjoint_subsets(Noise(3), (100, 1))


def test_cached_features_come_back_as_they_were(tmp_path):
    train = Features(torch.randn(7, 3), torch.arange(7), torch.arange(7), num_corrupt=2).normalize_()
    val = Features(torch.randn(5, 3), torch.arange(5), torch.arange(5)).normalize_()
    save_features(tmp_path / "cache", train, val, {"encoder": {"epoch": 3}, "view": {"exif": "apply"}})
    loaded_train, loaded_val, record = load_features(tmp_path / "cache")
    assert torch.equal(loaded_train.features, train.features)
    assert torch.equal(loaded_val.labels, val.labels)
    assert (loaded_train.num_corrupt, loaded_val.num_corrupt) == (2, 0)
    assert record == {"encoder": {"epoch": 3}, "view": {"exif": "apply"}}
    # The reference's script reads the same files, and takes the features as they are.
    saved = torch.load(tmp_path / "cache" / "trainfeat.pth", weights_only=True)
    torch.testing.assert_close(saved.norm(dim=1), torch.ones(7))

    (tmp_path / "cache" / "features.json").unlink()  # the reference writes none
    assert load_features(tmp_path / "cache")[2] == {}


def test_a_cache_that_cannot_be_used_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no cached features at"):
        load_features(tmp_path)
    features = Features(torch.ones(7, 3), torch.arange(7), torch.arange(7))
    save_features(tmp_path, features, features, {})
    torch.save(torch.arange(7) + 1, tmp_path / "testlabels.pth")
    with pytest.raises(ValueError, match=r"testlabels\.pth is missing, damaged or of another run"):
        load_features(tmp_path)
    (tmp_path / "features.json").unlink()  # the reference writes none
    torch.save(torch.arange(5), tmp_path / "testlabels.pth")
    with pytest.raises(ValueError, match=r"shape \(7, 3\) and testlabels.pth \(5,\)"):
        load_features(tmp_path)
    (tmp_path / "trainfeat.pth").write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match=r"trainfeat\.pth is truncated or not a checkpoint"):
        load_features(tmp_path)
    torch.save({"a": 1}, tmp_path / "trainfeat.pth")
    with pytest.raises(ValueError, match="holds a dict, not a tensor"):
        load_features(tmp_path)
    (tmp_path / "testfeat.pth").unlink()
    (tmp_path / "testfeat.pth").mkdir()
    with pytest.raises(ValueError, match="could not write"):
        save_features(tmp_path, features, features, {})


@pytest.mark.parametrize("written", range(4))
def test_a_dump_killed_over_an_older_one_leaves_no_mix_of_two_encoders(tmp_path, monkeypatch, written):
    """The bug: training features of one encoder lay beside validation features of another, and were accepted."""
    old, new = (Features(torch.full((5, 3), value), torch.arange(5), torch.arange(5)) for value in (1.0, 2.0))
    save_features(tmp_path, old, old, {"encoder": {"epoch": 1}, "view": {"exif": "apply"}})
    monkeypatch.setattr(torch, "save", killed_at(written + 1, torch.save))
    with pytest.raises(KeyboardInterrupt):
        save_features(tmp_path, new, new, {"encoder": {"epoch": 2}, "view": {"exif": "apply"}})
    monkeypatch.undo()
    with pytest.raises(ValueError, match="no cached features at"):
        load_features(tmp_path)
    save_features(tmp_path, new, new, {"encoder": {"epoch": 2}, "view": {"exif": "apply"}})
    train, val, record = load_features(tmp_path)
    assert float(train.features[0, 0]) == float(val.features[0, 0]) == 2.0
    assert record == {"encoder": {"epoch": 2}, "view": {"exif": "apply"}}
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "features.json", "testfeat.pth", "testlabels.pth", "trainfeat.pth", "trainlabels.pth",
    ]  # fmt: skip


def test_a_flipped_bit_in_cached_features_is_refused_with_file_and_remedy(tmp_path):
    rng = np.random.default_rng(0)
    features = Features(torch.randn(7, 3), torch.arange(7), torch.arange(7))
    save_features(tmp_path, features, features, {"encoder": {"sha256": "ab12", "epoch": 3}})
    _, _, record = load_features(tmp_path)
    for path in sorted(tmp_path.iterdir()):
        whole = path.read_bytes()
        for place in rng.integers(len(whole), size=40).tolist():
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << int(rng.integers(8))]) + whole[place + 1 :])
            message = ""
            try:
                train, val, found = load_features(tmp_path)
            except ValueError as error:
                message = str(error)
            if message:
                assert str(tmp_path) in message
                assert "--dump_features" in message
            else:  # a byte that says nothing, such as a space or padding
                assert torch.equal(train.features, features.features)
                assert torch.equal(train.labels, features.labels)
                assert torch.equal(val.features, features.features)
                assert found == record
        path.write_bytes(whole)


ENCODER = {
    "embed": ["--output_dir", "."],
    "knn": ["--nb_knn", "3"],
    "linear": ["--image_encoder", "true", "--epochs", "1", "--lr", "0.1", "--fast", "true"],
    "slots study": ["--nb_knn", "3", "--draws", "1"],
}
IMAGE_TEXT = {"zero-shot": [], "retrieval": ["--k", "1"]}
QUICKLY = ["--num_workers", "0", "--device", "cpu"]
MAPS = {"attention": ["--image_encoder", "true", "--num_images", "2"], "slots score": ["--num_images", "9"]}
SAY_NOTHING = {
    name: ["--data_path", "scenes:45:32", *words] for name, words in {**ENCODER, **IMAGE_TEXT, **MAPS}.items()
}


def weights_that_say_nothing(folder: Path, scale: float) -> Path:
    """A CLIP whose patches are multiplied by a number."""
    path = small_checkpoint(folder / "clip.pth")
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["model"]["image.backbone.patch_embed.proj.weight"] *= scale
    torch.save(checkpoint, path)
    return path


@pytest.mark.parametrize("name", SAY_NOTHING)
def test_equal_features_are_named_in_the_log_and_in_the_result(name, tmp_path, monkeypatch, caplog):
    """The bug: an encoder whose features are all equal had 50 % of two classes without a word."""
    monkeypatch.chdir(tmp_path)
    for package in ("attention", "objects", "slots"):  # whose figures take most of the time
        monkeypatch.setattr(f"dino_sparo.evaluation.{package}.command.draw", lambda *_: [])
    weights = weights_that_say_nothing(tmp_path, 0)
    run(name, ["--pretrained_weights", str(weights), *SAY_NOTHING[name], *QUICKLY])
    shutdown()
    assert "nearly equal" in caplog.text
    results = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    [warnings] = [result["warnings"] for result in results if {"encoder", "model"} & result.keys()]
    assert warnings
    assert set(warnings) <= set(caplog.messages)


@pytest.mark.parametrize("name", [*SAY_NOTHING, "info"])
def test_features_that_are_not_finite_are_refused(name, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    weights = str(weights_that_say_nothing(tmp_path, math.nan))
    words = ["--pretrained_weights", weights, *SAY_NOTHING.get(name, []), *QUICKLY]
    with pytest.raises(SystemExit) as ended:
        run(name, [weights] if name == "info" else words)
    shutdown()
    assert ended.value.code == 1
    assert "not finite" in caplog.text


def test_the_spread_of_features_is_that_of_the_formula():
    rows = torch.randn(2_500, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    base = torch.ones(7, dtype=torch.float64)
    for scale, is_named in ((NEARLY_EQUAL * 0.99, True), (NEARLY_EQUAL * 1.01, False)):
        centered = rows - rows.mean(dim=0)
        noise = centered / centered.square().sum(dim=1).mean().sqrt() * base.norm()
        # |mean|^2 / mean |x|^2 = 1 / (1 + e^2), so spread = e / sqrt(1 + e^2)
        found = check_features(base + scale / (1 - scale**2) ** 0.5 * noise, "these")
        assert bool(found) == is_named
    assert check_features(torch.zeros(2, 3), "these")
    assert not check_features(torch.ones(1, 3), "one image")


# --- two processes


def split_of_noise() -> Features:
    encoder = create_encoder("vit_micro", patch_size=8, img_size=16, num_slots=3, slot_dim=5, key_dim=7)
    weights = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=weights))
    return extract_split(encoder.eval(), Noise(13, corrupt=(4, 9)), TRANSFORM, CPU, batch_size=3)


def test_two_ranks_extract_the_features_of_one_in_order(two_ranks: TwoRanks) -> None:
    one = split_of_noise()
    assert one.indices.tolist() == [index for index in range(13) if index not in (4, 9)]
    for each in two_ranks(split_of_noise):
        assert each.indices.tolist() == one.indices.tolist()
        assert each.labels.tolist() == one.labels.tolist() == [index % 2 for index in one.indices.tolist()]
        assert each.num_corrupt == one.num_corrupt == 2
        assert torch.equal(each.features, one.features)


def words_of_scenes(folder: Path, batch_size: int) -> list[list[str]]:
    """Commands for k-NN, of features from images and from files, a study of slots, and both kinds of probe."""
    device = ["--device", "cpu"]
    common = [*words_of({"untrained": "true", "arch": "vit_micro", "patch_size": 8, "img_size": 32}), *QUICKLY]
    scenes = [*common, "--data_path", "scenes:45:32", "--batch_size_per_gpu", "6"]
    neighbours, cache = ["--nb_knn", "3", "10"], str(folder / "cache")
    # Of 45 images two processes would take one twice.
    probe = [*common, "--data_path", "scenes:46:32", "--batch_size_per_gpu", str(batch_size)]
    probe += ["--epochs", "2", "--lr", "0.5", "2", "--n_last_blocks", "2", "--output_dir"]
    return [
        ["knn", *scenes, *neighbours, "--output_dir", str(folder), "--dump_features", cache],
        ["knn", *device, *neighbours, "--load_features", cache, "--output_dir", str(folder / "cached")],
        ["slots study", *scenes, "--numbers", "4", "--draws", "2", "--nb_knn", "3", "--output_dir", str(folder)],
        ["linear", *probe, str(folder / "live")],
        ["linear", *probe, str(folder / "fast"), "--fast"],
    ]


@pytest.mark.slow
def test_two_processes_find_what_one_finds(tmp_path):
    """k-NN to the last digit; probes, whose gradients are summed in another order, to rounding."""
    for command, *words in words_of_scenes(tmp_path / "one", 10):
        run(command, words)
        shutdown()
    for command, *words in words_of_scenes(tmp_path / "two", 5):
        with Ranks(tmp_path, words, command=command) as ranks:
            assert ranks.wait() == [0, 0], ranks.log()
    assert "top-1" in ranks.log(0)
    assert "top-1" not in ranks.log(1)  # rank 1 prints no table

    names = ("knn", "cached/knn", "slot_study")
    results = (*(f"{name}_scenes-45-32_untrained.json" for name in names), "cache/trainfeat.pth")
    for result in results:
        one, two = ((tmp_path / name / result).read_bytes() for name in ("one", "two"))
        assert one == two, result
    for mode in ("live", "fast"):
        files = [tmp_path / name / mode / "linear_scenes-46-32_untrained.json" for name in ("one", "two")]
        one, two = (json.loads(file.read_text()) for file in files)
        assert one["images"] == two["images"]
        assert one["training"] == two["training"]
        states = [torch.load(file.with_suffix(".pth"), weights_only=True)["state_dict"] for file in files]
        torch.testing.assert_close(states[0]["weight"], states[1]["weight"], rtol=1e-3, atol=1e-5)
        for row_one, row_two in zip(one["results"], two["results"], strict=True):
            assert row_one["loss"] == pytest.approx(row_two["loss"], rel=1e-4)
