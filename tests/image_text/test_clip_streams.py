"""image_text/pairs/streams.py: batches of shards that webdataset reads from end to end; what repeats, what does not."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from image_files import encoded, write_tar
from PIL import Image
from torch.utils.data import default_convert

pytest.importorskip("open_clip")
pytest.importorskip("webdataset")

from runs import checkpoint_of
from test_clip_train import run

from dino_sparo.clip.options import check_options, get_args_parser
from dino_sparo.data.loader import create_loader
from dino_sparo.data.samplers import EpochSampler
from dino_sparo.image_text.objective import open_data
from dino_sparo.image_text.pairs.batches import PairBatch, PairTransform, collate_pairs
from dino_sparo.image_text.pairs.streams import PairStream
from dino_sparo.runtime.faults import MissingPackageError
from dino_sparo.runtime.launch import Distributed
from dino_sparo.weights.file import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # webdataset leaves its files to the collector


def write_shard(path: Path, value: int, count: int = 6, caption: str = "a caption") -> Path:
    """A shard whose images all have this red value."""
    sample = {"png": encoded(Image.new("RGB", (7, 5), (value, 0, 0))), "txt": caption.encode()}
    sample["json"] = b'{"alt": "other"}'
    members = [(f"{number}.{ending}", content) for number in range(count) for ending, content in sample.items()]
    return write_tar(path, members)


def stream(path: str, weights: list[float] | None = None, key: str | None = None, **place: int) -> PairStream:
    sampler = EpochSampler(24, 3, **place)
    return PairStream(path, weights, PairTransform(4), sampler, 9, key)


def values(batches: list[PairBatch]) -> list[int]:
    return [value for batch in batches for value in batch.images[:, 0, 0, 0].tolist()]


def shards(folder: Path, count: int = 20) -> str:
    for value in range(count):
        write_shard(folder / f"{value:03}.tar", value)
    return str(folder / f"{{000..{count - 1:03}}}.tar")


def test_an_epoch_has_the_pairs_that_were_asked_for_and_is_the_same_again(tmp_path: Path) -> None:
    path = shards(tmp_path)
    first, again = list(stream(path)), list(stream(path))
    assert [batch.images.shape for batch in first] == [(3, 3, 4, 4)] * 8
    assert first[0].token_ids.shape == (3, 9)
    assert values(first) == values(again)
    assert len(set(values(first))) > 5  # of several shards, mixed


def test_ranks_epochs_and_resumed_steps_have_streams_of_their_own(tmp_path: Path) -> None:
    path = shards(tmp_path)
    ranks = [values(list(stream(path, rank=rank, world_size=2))) for rank in range(2)]
    assert ranks[0] != ranks[1]
    later, resumed = stream(path), stream(path)
    later.sampler.set_epoch(1)
    resumed.sampler.set_epoch(0, 5)
    assert values(list(later)) != values(list(stream(path)))
    assert len(list(resumed)) == 3
    assert values(list(resumed)) != values(list(stream(path)))[15:]


@pytest.mark.slow
def test_workers_share_the_batches_of_an_epoch(tmp_path: Path) -> None:
    pairs = stream(shards(tmp_path))
    loader = create_loader(pairs, None, collate=default_convert, num_workers=2)
    first = values(list(loader))
    assert len(first) == 24
    pairs.sampler.set_epoch(1)
    assert values(list(loader)) != first


def test_sources_are_drawn_by_their_weights(tmp_path: Path) -> None:
    path = "::".join(str(write_shard(tmp_path / f"{value}.tar", value, 1)) for value in (10, 20, 30))
    drawn = values([batch for _ in range(5) for batch in stream(path, [3.0, 0.0, 1.0])])
    assert set(drawn) == {10, 30}
    assert drawn.count(10) > drawn.count(30)
    for weights in ([1.0], [1.0, -1.0, 1.0], [0.0, 0.0, 0.0]):
        with pytest.raises(ValueError, match=r"--shard_weights .*one number per source .*there are 3"):
            stream(path, weights)


def test_commands_are_read_through_a_pipe(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.tar", 40)
    write_shard(tmp_path / "b.tar", 50)
    assert set(values(list(stream(f"pipe:cat {tmp_path}/{{a,b}}.tar")))) == {40, 50}


def test_captions_come_from_a_key_of_the_json_too(tmp_path: Path) -> None:
    path = str(write_shard(tmp_path / "a.tar", 1))
    text, other = next(iter(stream(path))), next(iter(stream(path, key="alt")))
    assert not np.array_equal(text.token_ids, other.token_ids)


def test_samples_that_are_no_pairs_are_replaced_and_counted(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.tar", 1)
    write_shard(tmp_path / "b.tar", 2, caption=" ")
    batches = list(stream(str(tmp_path)))
    assert set(values(batches)) == {1}
    reasons = [reason for batch in batches for _, reason in batch.corrupt]
    assert len(reasons) > 3
    assert set(reasons) == {"the caption is missing or empty"}
    with pytest.raises(ValueError, match=r"64 samples in a row of stream .* are not pairs"):
        list(stream(str(tmp_path / "b.tar")))


def test_a_damaged_shard_is_named_and_the_stream_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_shard(tmp_path / "a.tar", 1)
    os.truncate(write_shard(tmp_path / "b.tar", 2), 700)
    assert set(values(list(stream(str(tmp_path))))) == {1}
    assert "the rest of a shard is left out" in caplog.text
    assert "b.tar" in caplog.text
    with pytest.raises(ValueError, match="64 errors in a row while reading stream"):
        list(stream(str(tmp_path / "b.tar")))


@pytest.mark.slow
def test_a_run_trains_on_a_stream_and_goes_on_with_another(tmp_path: Path) -> None:
    changes = {"data_path": shards(tmp_path), "shards": "streamed", "epoch_pairs": 12, "num_workers": 1}
    run(tmp_path / "run", **changes, max_steps=3)
    assert checkpoint_of(tmp_path / "run")["step"] == 3
    run(tmp_path / "run", **changes)
    assert checkpoint_of(tmp_path / "run")["step"] == 6
    with pytest.raises(CheckpointError, match="num_pairs was 12 and is now 18"):
        run(tmp_path / "run", **{**changes, "epoch_pairs": 18})


@pytest.mark.parametrize(("option", "reason"), [("--max_image_mpix", "pixels"), ("--max_image_mb", "MB")])
def test_images_of_a_stream_obey_the_limits(tmp_path: Path, option: str, reason: str) -> None:
    """The bug: the options had no effect."""
    words = f"--shards streamed --epoch_pairs 6 --batch_size 3 --num_workers 0 {option} 0.00001"
    args = get_args_parser().parse_args(["--data_path", str(write_shard(tmp_path / "0.tar", 5)), *words.split()])
    data = open_data(args, Distributed(0, 1, torch.device("cpu")), collate_pairs)
    with pytest.raises(ValueError, match=rf"in a row of .* are not pairs, .*{reason}"):
        next(iter(data[2]))


def test_a_stream_of_nothing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="is not a tar shard, a pattern of shards or a folder"):
        stream(str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    with pytest.raises(MissingPackageError, match="streamed shards need the package webdataset; install it with: pip"):
        stream(shards(tmp_path, 1))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--shards streamed", "streamed needs the number of pairs to call an epoch"),
        ("--epoch_pairs 9", "indexed takes none"),
        ("--shard_weights 1 2", "--shard_weights is only for --shards streamed"),
        ("--shards streamed --epoch_pairs 9 --caption_templates simple", "a stream has only written captions"),
        ("--shards streamed --epoch_pairs 9 --zero_shot_freq 1", "give labelled images with --zero_shot_path"),
    ],
)
def test_options_of_streams_that_do_not_fit_are_refused(words: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_options(get_args_parser().parse_args(words.split()))
