"""data.py: order, crops and batches are pure functions of their numbers, and bad images are replaced and named."""

import logging
import multiprocessing
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from two_ranks import TwoRanks

from dino_sparo.data import dataset as data_set
from dino_sparo.data import loader, ranks
from dino_sparo.data.batch import Batch, Item, collate_views
from dino_sparo.data.dataset import ImageDataset
from dino_sparo.data.labels import align_classes, require_labels
from dino_sparo.data.loader import create_loader
from dino_sparo.data.samplers import EpochSampler, ShardSampler, _epoch_rng, image_rng
from dino_sparo.data.sources import CorruptImageError
from dino_sparo.data.sources.folders import WITHOUT_LABELS
from dino_sparo.runtime import launch
from dino_sparo.runtime.faults import UserError


@dataclass
class NumberedImages:
    """Images whose red value is their index; those in `corrupt` cannot be read."""

    num_images: int
    corrupt: set[int] = field(default_factory=set)
    classes: list[str] | None = None
    labels: np.ndarray | None = None
    name: str = "numbered images"
    names: str = "of the images"

    def __len__(self) -> int:
        return self.num_images

    def read(self, index: int) -> Image.Image:
        if index in self.corrupt:
            raise CorruptImageError(self.location(index), "made so")
        return Image.new("RGB", (3, 2), (index, 0, 0))

    def location(self, index: int) -> str:
        return f"image-{index}"

    def fingerprint(self) -> str:
        return self.names


def draw_views(image: Image.Image, rng: np.random.Generator) -> list[torch.Tensor]:
    """Two crops of unequal size, the image's own value plus a random fraction."""
    value = image.getpixel((0, 0))[0]
    return [torch.full((3, size, size + 1), value + rng.random(), dtype=torch.float64) for size in (2, 5)]


def crops_by_index(num_workers: int, batch_size: int, world_size: int, seed: int = 3) -> dict[int, list[float]]:
    """What every image of epoch 4 looks like when the ranks read it in turn."""
    crops = {}
    for rank in range(world_size):
        sampler = EpochSampler(24, batch_size, rank, world_size, seed=seed)
        loader = create_loader(ImageDataset(NumberedImages(24), draw_views, seed), sampler, num_workers=num_workers)
        sampler.set_epoch(4)
        for batch in loader:
            for row, index in enumerate(batch.indices.tolist()):
                crops[index] = [view[row].flatten()[0].item() for view in batch.views]
    return crops


def test_crops_do_not_depend_on_workers_ranks_or_batch_size() -> None:
    expected = {}
    for index in range(24):
        rng = image_rng(3, 4, index)
        expected[index] = [index + rng.random(), index + rng.random()]
    assert crops_by_index(num_workers=0, batch_size=6, world_size=1) == expected
    assert crops_by_index(num_workers=2, batch_size=4, world_size=3) == expected


def test_crops_differ_between_seeds_epochs_and_images() -> None:
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (-1, 0, 0), (1 << 32, 0, 0), (-(1 << 63), 2, 5)]
    assert len({image_rng(*key).random() for key in keys}) == len(keys)
    assert image_rng(-1, 2, 3).random() == image_rng((1 << 64) - 1, 2, 3).random()
    assert image_rng(5 + (1 << 64), 2, 3).random() == image_rng(5, 2, 3).random()
    assert _epoch_rng(7, 2).random() != image_rng(7, 2, 0).random(), "the order is drawn apart from the crops"


@pytest.mark.parametrize("seed", [0, -5, 1 << 70])
def test_epoch_order_is_a_function_of_seed_and_epoch(seed: int) -> None:
    def order(epoch: int) -> list[int]:
        sampler = EpochSampler(13, 1, seed=seed)
        sampler.set_epoch(epoch)
        return [index for batch in sampler for _, index in batch]

    assert order(2) == order(2)
    assert order(2) != order(3)
    assert sorted(order(2)) == list(range(13))


@pytest.mark.parametrize(("batch_size", "world_size", "accum_steps"), [(12, 1, 1), (6, 2, 1), (3, 4, 1), (2, 2, 3)])
def test_global_batches_do_not_depend_on_ranks_and_accumulation(
    batch_size: int, world_size: int, accum_steps: int
) -> None:
    one = EpochSampler(41, 12, seed=5)
    one.set_epoch(2)
    samplers = [EpochSampler(41, batch_size, rank, world_size, accum_steps, seed=5) for rank in range(world_size)]
    for sampler in samplers:
        sampler.set_epoch(2)
        assert sampler.steps_per_epoch == 41 // 12
        assert len(sampler) == 41 // 12 * accum_steps
    micro_batches = [list(sampler) for sampler in samplers]
    for step, expected in enumerate(one):
        seen = []
        for own in micro_batches:
            for micro_batch in own[step * accum_steps : (step + 1) * accum_steps]:
                assert len(micro_batch) == batch_size
                seen += micro_batch
        assert sorted(seen) == sorted(expected)
        assert all(epoch == 2 for epoch, _ in seen)


def test_resuming_within_an_epoch_yields_exactly_the_remaining_batches() -> None:
    sampler = EpochSampler(41, 3, rank=1, world_size=2, accum_steps=2, seed=5)
    sampler.set_epoch(1)
    whole = list(sampler)
    sampler.set_epoch(1, start_step=2)
    assert list(sampler) == whole[2 * 2 :]
    assert len(sampler) == len(whole) - 2 * 2
    sampler.set_epoch(1, start_step=sampler.steps_per_epoch)
    assert list(sampler) == []


def test_persistent_workers_follow_set_epoch() -> None:
    sampler = EpochSampler(7, 3, seed=1)
    loader = create_loader(ImageDataset(NumberedImages(7), draw_views, 1), sampler, num_workers=1)
    for epoch, start_step in ((0, 0), (5, 1)):
        sampler.set_epoch(epoch, start_step)
        expected = [[index for _, index in batch] for batch in sampler]
        batches = list(loader)
        assert [batch.indices.tolist() for batch in batches] == expected
        index = expected[0][0]
        assert batches[0].views[0][0, 0, 0, 0].item() == index + image_rng(1, epoch, index).random()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere workers start as Python's default says")
def test_workers_are_forked_also_where_python_would_not() -> None:
    source = NumberedImages(7)
    source.read = lambda index: Image.new("RGB", (3, 2), (index, 0, 0))  # type: ignore[method-assign]  # no other process can be sent it
    loader = create_loader(ImageDataset(source, draw_views, 1), ShardSampler(7, 3), num_workers=1)
    default = multiprocessing.get_start_method()
    multiprocessing.set_start_method("forkserver", force=True)  # the default from Python 3.14 on
    try:
        assert [batch.indices.tolist() for batch in loader] == [[0, 1, 2], [3, 4, 5], [6]]
    finally:
        multiprocessing.set_start_method(default, force=True)


def test_too_few_images_for_one_step_is_an_error() -> None:
    with pytest.raises(
        ValueError, match=r"23 images are too few .* 4 images .* 3 process.* 2 accumulation.* = 24; use a"
    ):
        EpochSampler(23, 4, world_size=3, accum_steps=2)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("num_images", [0, 1, 3, 13])
def test_shards_cover_every_image_once_in_order(num_images: int, world_size: int) -> None:
    samplers = [ShardSampler(num_images, 2, rank, world_size) for rank in range(world_size)]
    batches = [list(sampler) for sampler in samplers]
    assert [len(sampler) for sampler in samplers] == [len(own) for own in batches]
    assert [index for own in batches for batch in own for index in batch] == list(range(num_images))
    sizes = [sum(map(len, own)) for own in batches]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_hold_crops_labels_indices_and_corrupt_images(num_workers: int) -> None:
    source = NumberedImages(5, corrupt={1}, classes=["a", "b"], labels=np.array([0, 1, 1, 0, 1]))
    loader = create_loader(ImageDataset(source, draw_views, 0), ShardSampler(5, 3), num_workers=num_workers)
    first, last = list(loader)
    assert isinstance(first, Batch)
    assert [tuple(view.shape) for view in first.views] == [(3, 3, 2, 3), (3, 3, 5, 6)]
    assert first.labels.tolist() == [0, 1, 1]
    assert first.indices.tolist() == [0, 2, 2]  # image 2 stands in for image 1
    assert first.corrupt == [("image-1", "made so")]
    assert first.parameters is None  # finished crops have none
    assert last.indices.tolist() == [3, 4]
    assert last.corrupt == []
    moved = first.to("cpu")
    assert torch.equal(moved.views[1], first.views[1])
    assert (moved.corrupt, moved.parameters) == (first.corrupt, None)


def test_a_substitute_shows_other_crops_than_its_original() -> None:
    dataset = ImageDataset(NumberedImages(4, corrupt={3, 0}), draw_views, 0)
    item = dataset[(2, 3)]
    assert (item.index, item.label) == (1, -1)  # after the last image comes the first
    assert [location for location, _ in item.corrupt] == ["image-3"]  # image 0 is reported when it is asked for
    assert torch.equal(item.views[0], dataset[(2, 3)].views[0])
    assert not torch.equal(item.views[0], dataset[(2, 1)].views[0])


def test_a_plain_index_is_epoch_zero() -> None:
    dataset = ImageDataset(NumberedImages(4), draw_views, 6)
    assert torch.equal(dataset[2].views[0], dataset[(0, 2)].views[0])
    assert len(dataset) == 4


@pytest.mark.parametrize("index", [-1, 4])
def test_an_index_out_of_range_is_an_error(index: int) -> None:
    with pytest.raises(IndexError, match=f"index {index} of numbered images, which has 4"):
        ImageDataset(NumberedImages(4), draw_views)[index]


def test_only_corrupt_images_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = ImageDataset(NumberedImages(7, corrupt=set(range(7))), draw_views)
    with pytest.raises(ValueError, match=r"7 images in a row of numbered images cannot be read, .*image-2 \(made so\)"):
        dataset[2]
    monkeypatch.setattr(data_set, "MAX_CORRUPT_IN_A_ROW", 3)
    with pytest.raises(ValueError, match="3 images in a row"):
        dataset[5]


def test_a_long_run_of_corrupt_images_does_not_end_a_run() -> None:
    """The bug: a copy that was cut off left 64 empty files in a row, and every start ended there."""
    dataset = ImageDataset(NumberedImages(1000, corrupt=set(range(100, 300))), draw_views)
    found = [dataset[index].index for index in range(100, 300)]
    assert not set(found) & set(range(100, 300))
    assert len(set(found)) > 100  # not all of them the first behind the gap


def test_the_substitutes_in_a_large_set_are_eight_neighbours_and_then_far_away() -> None:
    tried = []

    def read(index: int) -> int:
        tried.append(index)
        if len(tried) < 12:
            raise CorruptImageError(f"image-{index}")
        return index

    source = NumberedImages(1000)
    _, index, corrupt = data_set.read_next(read, 995, source)
    assert tried[:8] == [995, 996, 997, 998, 999, 0, 1, 2]
    assert tried[8:] == [(995 + int(step * 0.6180339887 * 1000)) % 1000 for step in (8, 9, 10, 11)]
    assert index == tried[-1]
    assert [location for location, _ in corrupt] == [f"image-{number}" for number in tried[:-1]]


def test_in_a_small_set_every_image_is_tried_before_giving_up() -> None:
    dataset = ImageDataset(NumberedImages(64, corrupt=set(range(64)) - {9}), draw_views)
    assert dataset[10].index == 9  # after 63 others
    assert [index for index in range(64) if dataset[index].index != 9] == []


def _open(sources: list[NumberedImages]) -> None:
    ranks.require_same_source(sources[launch.rank()])


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"num_images": 5}, "the number of images of numbered images: [4, 5], by rank"),
        ({"names": "other"}, "the names of the images"),
        ({"classes": ["b"]}, "the classes"),
        ({"labels": np.array([0, 0, 0, 1])}, "the labels"),
    ],
)
def test_ranks_that_have_opened_other_images_are_told(two_ranks: TwoRanks, other: dict[str, Any], what: str) -> None:
    """The bug: an evaluation on two machines with different copies gave a wrong accuracy without a word."""
    own = {"num_images": 4, "classes": ["a"], "labels": np.zeros(4, np.int64)}
    errors = two_ranks.errors(_open, [NumberedImages(**own), NumberedImages(**own | other)])
    assert all(f"the processes disagree on {what}" in error for error in errors)


def test_reading_batches_leaves_torchs_random_numbers_alone() -> None:
    loader = create_loader(ImageDataset(NumberedImages(4), draw_views), ShardSampler(4, 3), num_workers=0)
    before = torch.get_rng_state()
    list(loader)
    assert torch.equal(torch.get_rng_state(), before)


def test_workers_are_capped_at_the_processors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says so once, although an evaluation makes many loaders."""
    monkeypatch.setattr(loader, "usable_cores", lambda environ: 2)
    loader._say_fewer.cache_clear()
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            capped = create_loader(ImageDataset(NumberedImages(4), draw_views), ShardSampler(4, 3), num_workers=10)
            assert capped.num_workers == 2
    assert caplog.text.count("num_workers: 2 instead of 10") == 1


@pytest.mark.parametrize(
    ("environ", "files", "cores"),
    [
        ({}, {}, 12),
        ({}, {"cpu.max": "max 100000"}, 12),
        ({}, {"cpu.max": "350000 100000"}, 4),
        ({}, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 12),
        ({}, {"cpu/cpu.cfs_quota_us": "500000", "cpu/cpu.cfs_period_us": "100000"}, 5),
        ({"LOCAL_WORLD_SIZE": "5"}, {}, 2),
        ({"LOCAL_WORLD_SIZE": "13"}, {}, 1),
        ({"SLURM_CPUS_PER_TASK": "8", "LOCAL_WORLD_SIZE": "2"}, {"cpu.max": "1000000 100000"}, 4),
        ({"SLURM_CPUS_PER_TASK": "40"}, {}, 12),
    ],
)
def test_usable_cores_follow_affinity_container_slurm_and_the_processes_of_the_node(
    environ: dict[str, str], files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bug: a container of two cores on a large node got ten loading processes for each of eight GPUs."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)), raising=False)
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr(loader, "CGROUP", tmp_path)
    assert loader.usable_cores(environ) == cores


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_are_pinned_and_reach_the_gpu() -> None:
    loader = create_loader(
        ImageDataset(NumberedImages(5), draw_views), ShardSampler(5, 3), num_workers=2, pin_memory=True
    )
    for batch in loader:
        assert isinstance(batch, Batch)
        assert all(tensor.is_pinned() for tensor in (*batch.views, batch.labels, batch.indices))
        assert batch.to("cuda").views[1].device.type == "cuda"


def test_missing_labels_are_an_error_that_tells_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"numbered images has no labels: .* one subfolder per class") as caught:
        require_labels(NumberedImages(3))
    assert str(caught.value).splitlines()[1:] == ["it holds 3 images, the first is image-0", WITHOUT_LABELS]
    source = NumberedImages(4, classes=["a"], labels=np.array([0, -1, 0, -1]))
    with pytest.raises(ValueError, match="2 of 4 images have no label, the first is image-1"):
        require_labels(source)
    source.labels = np.array([0, 0, 0, 0])
    assert require_labels(source) is source.labels


def test_classes_are_renumbered_as_in_training() -> None:
    val = NumberedImages(3, classes=["cat", "fox"], labels=np.array([1, 0, 1]))
    aligned = align_classes(val, ["ape", "cat", "dog", "fox"])
    assert aligned.labels.tolist() == [3, 1, 3]
    assert aligned.classes == ["ape", "cat", "dog", "fox"]
    assert val.labels.tolist() == [1, 0, 1]
    assert align_classes(val, ["cat", "fox"]) is val
    with pytest.raises(ValueError, match=r"lack, the first is 'fox'; the training images have 2: cat, dog; give"):
        align_classes(val, ["cat", "dog"])
    with pytest.raises(ValueError, match="1 classes that the training images lack, the first is 'elk'"):
        align_classes(NumberedImages(2, classes=["elk"], labels=np.array([0, 0])), ["cat", "dog"])
    # An unknown class without images does no harm.
    val = NumberedImages(2, classes=["ape", "cat", "elk"], labels=np.array([1, 1]))
    aligned = align_classes(val, ["cat", "dog"])
    assert aligned.labels.tolist() == [0, 0]
    assert aligned.classes == ["cat", "dog"]


def test_images_of_other_sizes_in_a_batch_are_named() -> None:
    items = [Item([torch.zeros(3, 5, width)], 0, 0) for width in (7, 9)]
    with pytest.raises(UserError, match="images of 7 x 5 and 9 x 5 pixels are in one batch; give"):
        collate_views(items)
