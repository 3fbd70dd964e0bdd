"""sources/indexes.py: damaged shards, interrupted and repeated starts."""

import json
import multiprocessing
import os
import tarfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from image_files import OLD, write_tar

from dino_sparo.data.ranks import opened_together
from dino_sparo.data.samplers import EpochSampler
from dino_sparo.data.sources import indexes, open_source, tars
from dino_sparo.data.sources.indexes import (
    DamagedShardError,
    Member,
    Piece,
    cache_path,
    index_shards,
    load_index,
    member_name,
    open_index,
    save_index,
    shard_samples,
    tar_members,
)
from dino_sparo.runtime.faults import FaultError
from dino_sparo.runtime.launch import CONTROL_FACTOR, init_distributed

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "the cache"
    monkeypatch.setenv("DINO_SPARO_CACHE", str(folder))
    return folder


def write_shards(folder: Path, counts: list[int]) -> list[str]:
    """Shards of so many pairs each; contents are no images, since only their places matter here."""
    return [
        str(
            write_tar(
                folder / f"s-{number:03}.tar",
                [(f"{i:03}.{end}", f"{number} {i} {end}".encode()) for i in range(count) for end in ("jpg", "txt")],
            )
        )
        for number, count in enumerate(counts)
    ]


def header(name: bytes, size: bytes, kind: bytes) -> bytes:
    """A tar header with a valid checksum; `size` is its field of 12 bytes."""
    block = bytearray(512)
    block[: len(name)], block[124:136], block[156:157], block[257:265] = name, size, kind, b"ustar\x0000"
    block[148:156] = b"%06o\0 " % (sum(block) + 8 * 32)
    return bytes(block)


def octal(size: int) -> bytes:
    return b"%011o\0" % size


def binary(size: int) -> bytes:
    return b"\x80" + size.to_bytes(11, "big")


def blocks(content: bytes) -> bytes:
    return content + bytes(-len(content) % 512)


def pax(record: bytes) -> bytes:
    return header(b"x", octal(len(record)), b"x") + blocks(record)


MEMBER = header(b"a.jpg", octal(3), b"0") + blocks(b"abc") + header(b"a.txt", octal(3), b"0") + blocks(b"abc")
# What the shard begins with, and up to which size it is a hole.
DAMAGED = {
    "chain_of_long_names": (5000 * (header(b"n", octal(1), b"L") + blocks(b"n")), 0),
    "chain_of_pax_headers": (5000 * pax(b"8 a=bcd\n"), 0),
    "size_of_2_to_60": (header(b"a.jpg", binary(1 << 60), b"0"), 0),
    "pax_size_of_2_to_60": (pax(b"28 size=%d\n" % (1 << 60)) + MEMBER, 0),
    "pax_header_of_nothing": (MEMBER + pax(b"14 path=b.jpg\n"), 0),
    "long_name_of_nothing": (MEMBER + header(b"n", octal(1), b"L") + b"n", 0),
    "pax_size_of_5000_digits": (pax(b"5011 size=" + b"9" * 5000 + b"\n") + MEMBER, 0),
    "pax_length_of_5000_digits": (pax(b"9" * 5000 + b" path=a\n") + MEMBER, 0),
    "zeros_of_a_failed_download": (b"", 1 << 20),
    "a_second_tar_behind_the_end": (MEMBER + bytes(1024) + MEMBER, 0),
    "flipped_bit": (MEMBER[:130] + b"\1" + MEMBER[131:], 0),
    "flipped_bit_of_the_second_header": (MEMBER[:1154] + b"\1" + MEMBER[1155:], 0),
    "truncated": (MEMBER[:532], 0),
    "scrambled_header": (MEMBER[:1024] + b"?" * 1024, 0),
    "zeros_in_place_of_a_header": (MEMBER[:1024] + bytes(512) + MEMBER[1024:], 0),
    "negative_size": (MEMBER[:124] + b"-0000000512\0" + MEMBER[136:], 0),
    "negative_size_with_its_checksum": (header(b"a.jpg", b"-0000000512\0", b"0"), 0),
    "sparse": (header(b"a.jpg", octal(3), b"S") + blocks(b"abc"), 0),
    "compressed": (b"\x1f\x8b" + MEMBER, 0),
    "megabytes_of_zeros_behind_the_end": (MEMBER, 2 << 20),
    "no_tar": (b"no tar" * 200, 0),
    "nothing": (b"", 0),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_shard_is_refused_in_one_line_that_names_it(what: str, tmp_path: Path) -> None:
    content, hole = DAMAGED[what]
    path = tmp_path / "evil.tar"
    path.write_bytes(content)
    if hole:
        os.truncate(path, len(content) + hole)
    pair_sources = pytest.importorskip("dino_sparo.image_text.pairs.sources")
    for open_it in (open_source, pair_sources.open_pairs):
        with pytest.raises(ValueError, match=r"tar shard .*evil.tar' is damaged.*; fetch or write it anew") as caught:
            open_it(str(path))
        assert "\n" not in str(caught.value)


def test_a_tar_larger_than_its_index_can_count_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexes, "MAX_TAR_BYTES", 5000)
    with pytest.raises(DamagedShardError, match="of 10,240 do not end a tar"):
        list(tar_members(str(write_tar(tmp_path / "a.tar", [("a.jpg", b"a")]))))


def test_an_empty_tar_has_no_members_and_is_not_damaged(tmp_path: Path) -> None:
    assert list(tar_members(str(write_tar(tmp_path / "a.tar", [])))) == []


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_are_those_that_tarfile_finds_and_each_can_be_named_from_its_place(
    tmp_path: Path, tar_format: int
) -> None:
    names = ["a.jpg", "x" * 90 + "/" + "y" * 90 + ".png", "b/c.txt"]
    names += [] if tar_format == tarfile.USTAR_FORMAT else ["ü" * 300 + ".jpg", "z" * 100]
    shard = str(write_tar(tmp_path / "a.tar", [(name, b"x" * 700 * i) for i, name in enumerate(names)], tar_format))
    with tarfile.open(shard) as tar:
        expected = [(os.fsencode(info.name), info.offset_data, info.size) for info in tar]
    members = list(tar_members(shard))
    assert [(member.name, member.offset, member.size) for member in members] == expected
    assert [member_name(shard, member.start) for member in members] == [os.fsencode(name) for name in names]


# ---- order


def pairs_by_tarfile(shards: list[str]) -> list[tuple[str, int, int, int, int]]:
    """The pairs in the order that runs begun with `tarfile`'s index count on: a loop over its members."""
    found = []
    for shard in shards:
        samples: list[tuple[str, dict[str, tarfile.TarInfo]]] = []
        with tarfile.open(shard) as tar:
            for info in filter(tarfile.TarInfo.isreg, tar):
                folder, slash, base = info.name.rpartition("/")
                stem, dot, ending = base.partition(".")
                if not stem:
                    continue
                if not samples or samples[-1][0] != folder + slash + stem or dot + ending.lower() in samples[-1][1]:
                    samples.append((folder + slash + stem, {}))
                samples[-1][1][dot + ending.lower()] = info
        for _, members in samples:
            image = next((info for ending, info in members.items() if ending.endswith((".jpg", ".png"))), None)
            if image is not None and ".txt" in members:
                text = members[".txt"]
                found.append((f"{shard}!{image.name}", image.offset_data, image.size, text.offset_data, text.size))
    return found


def test_pairs_come_in_the_order_that_older_runs_count_on(tmp_path: Path) -> None:
    pair_sources = pytest.importorskip("dino_sparo.image_text.pairs.sources")
    rng = np.random.default_rng(3)
    names = [
        f"{folder}{i}{end}" for folder in ("", "d/", "d.e/") for i in range(9) for end in (".JPG", ".txt", ".x.png")
    ]
    names += [".hidden.jpg", "lone.jpg", "lone.json", "7", "7.txt.gz"]
    shards = []
    for number in range(4):
        order = sorted(rng.integers(len(names), size=300) // 3 * 3) if number % 2 else range(len(names))
        drawn = (i + int(rng.integers(3)) for i in order)
        members = [(names[i % len(names)], b"x" * int(rng.integers(900))) for i in drawn]
        shards.append(str(write_tar(tmp_path / f"s-{number}.tar", members, tarfile.PAX_FORMAT)))
    source = pair_sources.open_pairs("::".join(shards), max_left_out=1.0)
    records = source.captions.index.records
    found = [
        (source.location(i), *(512 * int(row["block"]), int(row["size"])), 512 * int(row["caption_block"]),
         int(row["caption_size"]))
        for i, row in enumerate(records)
    ]  # fmt: skip
    assert found == pairs_by_tarfile(shards)
    assert len(found) > 50


@pytest.mark.parametrize("count", [1, 7, 1000, 70_000])
def test_an_epochs_order_is_that_of_64_bit_numbers(count: int) -> None:
    order = [index for batch in EpochSampler(count, 1, seed=11) for _, index in batch]
    from dino_sparo.data.samplers import _epoch_rng

    assert order == _epoch_rng(11, 0).permutation(count).tolist()


# ---- the cache


@pytest.fixture
def indexed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the shards whose headers are read, as it happens."""
    seen: list[str] = []

    def watched(shard: str) -> Iterator[tuple[bytes, dict[bytes, Member]]]:
        seen.append(os.path.basename(shard))
        yield from shard_samples(shard)

    monkeypatch.setattr(tars.indexes, "shard_samples", watched)
    return seen


def test_a_start_that_was_killed_goes_on_without_the_finished_shards(tmp_path: Path, indexed: list[str]) -> None:
    shards = write_shards(tmp_path, [2, 3, 5])

    def stop(shard: str) -> Piece:
        if shard == shards[2]:
            raise KeyboardInterrupt
        return tars.IMAGES.index(shard)

    with pytest.raises(KeyboardInterrupt):
        open_index(replace(tars.IMAGES, index=stop), shards)
    assert indexed == ["s-000.tar", "s-001.tar"]
    for _ in range(2):
        index, _ = open_index(tars.IMAGES, shards)
        assert indexed == ["s-000.tar", "s-001.tar", "s-002.tar"]
        assert index.counts.tolist() == [2, 3, 5]


@pytest.mark.parametrize("change", ["size", "time"])
def test_a_shard_that_changed_is_indexed_anew_alone(tmp_path: Path, indexed: list[str], change: str) -> None:
    shards = write_shards(tmp_path, [2, 3, 5])
    open_index(tars.IMAGES, shards)
    indexed.clear()
    if change == "size":
        write_tar(Path(shards[1]), [(f"{i}.jpg", b"new") for i in range(40)])
    else:
        os.utime(shards[1], (2e9 / 2 + 1, 1e9 + 1))
    index, _ = open_index(tars.IMAGES, shards)
    assert indexed == ["s-001.tar"]
    assert index.counts.tolist() == [2, 40 if change == "size" else 3, 5]


def test_starts_at_once_end_with_the_same_index_and_leave_nothing_behind(tmp_path: Path, cache: Path) -> None:
    shards, barrier = write_shards(tmp_path, [2, 3, 5]), threading.Barrier(4)

    def start(_: int) -> list:
        barrier.wait()
        return open_index(tars.IMAGES, shards)[0].records.tolist()

    with ThreadPoolExecutor(4) as threads:
        first, *others = threads.map(start, range(4))
    assert others == [first] * 3
    assert len(first) == 10
    assert not list(cache.glob("*.part"))
    assert len(list(cache.iterdir())) == 3


def test_shares_of_the_shards_are_the_whole(tmp_path: Path, indexed: list[str]) -> None:
    shards = write_shards(tmp_path, [1] * 7)
    for number in range(3):
        index_shards(tars.IMAGES, shards[number::3])
    assert sorted(indexed) == sorted(map(os.path.basename, shards))
    open_index(tars.IMAGES, shards)
    assert len(indexed) == 7


def test_a_cache_that_cannot_be_written_is_said_once(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.write_text("a file where the folder should be")
    index, _ = open_index(tars.IMAGES, write_shards(tmp_path, [2, 3, 5]))
    assert len(index.records) == 10
    assert caplog.text.count("the index is not cached") == 1


@pytest.mark.parametrize("damage", [b"", b"garbage", None])
def test_a_damaged_index_is_made_anew(tmp_path: Path, cache: Path, damage: bytes | None) -> None:
    shards = write_shards(tmp_path, [2, 3, 5])
    before = open_index(tars.IMAGES, shards)[0].records.tolist()
    path = min(cache.iterdir())
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2] if damage is None else damage)
    assert open_index(tars.IMAGES, shards)[0].records.tolist() == before
    assert path.read_bytes() == content


def flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_no_flipped_bit_of_a_cached_list_is_trusted(caplog: pytest.LogCaptureFixture) -> None:
    arrays = {"paths_blob": np.arange(50, dtype=np.uint8), "counts": np.arange(9), "stamps": np.array([[5, 6]])}
    assert save_index("key", arrays) == ""
    path = Path(cache_path("key"))
    content = path.read_bytes()
    for bit in range(0, 8 * len(content), 29):
        path.write_bytes(flipped(content, bit))
        caplog.clear()
        stored = load_index("key")
        if stored is None:
            assert "is damaged" in caplog.text
        else:  # the bit says nothing, such as one of a time
            assert {name: stored[name].tolist() for name in arrays} == {n: a.tolist() for n, a in arrays.items()}


# ---- damage


def damage_shard(shard: str) -> None:
    content = Path(shard).read_bytes()
    Path(shard).write_bytes(content[: 7 * 1024 + 514])  # within the eighth member
    os.utime(shard, OLD)


@pytest.mark.parametrize(("sizes", "lost"), [(None, 4), ({"s-001.tar": 9}, 9)])
def test_a_truncated_shard_is_named_and_left_out_within_max_corrupt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, sizes: dict[str, int] | None, lost: int, indexed: list[str]
) -> None:
    pair_sources = pytest.importorskip("dino_sparo.image_text.pairs.sources")
    shards = write_shards(tmp_path, [3, 7, 5])
    damage_shard(shards[1])
    if sizes is not None:
        (tmp_path / "sizes.json").write_text(json.dumps(sizes))
    pairs = pair_sources.open_pairs(str(tmp_path), max_left_out=0.6)
    assert [pairs.location(i)[-16:] for i in (0, 3)] == ["-000.tar!000.jpg", "-002.tar!000.jpg"]
    assert (len(pairs), pairs.left_out.total) == (8, lost)
    assert "s-001.tar' is damaged" in caplog.text
    with pytest.raises(ValueError, match=r"s-001.tar' is damaged.*--max_corrupt"):
        pair_sources.open_pairs(str(tmp_path), max_left_out=0.0)
    images = open_source(str(tmp_path), max_corrupt=0.6)
    assert (len(images), getattr(images, "num_left_out", None)) == (8, lost)
    with pytest.raises(ValueError, match=rf"s-001.tar' is damaged .*about {lost} of {8 + lost} images; at most 20"):
        open_source(str(tmp_path), max_corrupt=0.2)
    with pytest.raises(ValueError, match=r"s-001.tar' is damaged .*; fetch or write it anew \(1 of 3"):
        open_source(str(tmp_path))
    assert indexed.count("s-001.tar") == 2  # for pairs and for images; its damage is remembered too


def test_a_shard_that_cannot_be_read_now_is_tried_again_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = write_shards(tmp_path, [3, 7, 5])

    def fail(shard: str, position: int = 0) -> Iterator[Member]:
        if shard == shards[1]:
            raise OSError(5, "Input/output error")
        yield from tar_members(shard, position)

    with monkeypatch.context() as patch:
        patch.setattr(indexes, "tar_members", fail)
        with pytest.raises(ValueError, match=r"s-001.tar' cannot be read \(Input/output error\)"):
            open_source(str(tmp_path))
        assert len(open_source(str(tmp_path), max_corrupt=0.5)) == 8
    assert len(open_source(str(tmp_path))) == 15


# ---- several processes

TIMEOUT_S = 3.0


def slow_peer(number: int, folder: str, slow_s: float, fate: str, results: "multiprocessing.Queue") -> None:
    """One of two ranks that open shards of which each takes `slow_s` to index; rank 1 may die or hang at its second."""
    os.environ.update(RANK=str(number), WORLD_SIZE="2", LOCAL_RANK=str(number))
    place = init_distributed("cpu", dist_url=f"file://{folder}/rendezvous", timeout_min=TIMEOUT_S / 60)
    done: list[str] = []

    def slow(shard: str, position: int = 0) -> Iterator[Member]:
        if number == 1 and done and fate == "dies":
            os._exit(9)
        time.sleep(3600 if number == 1 and done and fate == "hangs" else slow_s)
        done.append(os.path.basename(shard))
        yield from tar_members(shard, position)

    indexes.tar_members = slow  # type: ignore[assignment]
    begin = time.monotonic()
    try:
        with opened_together(tars.IMAGES, f"{folder}/shards"):
            source = open_source(f"{folder}/shards")
        results.put((place.rank, done, len(source), time.monotonic() - begin))
    except FaultError as error:
        results.put((place.rank, done, str(error), time.monotonic() - begin))
    time.sleep(1)  # rank 0 may hold what the other reads last


def run_peers(tmp_path: Path, slow_s: float, fate: str, answers: int) -> list[tuple]:
    (tmp_path / "shards").mkdir()
    write_shards(tmp_path / "shards", [2] * 10)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    peers = [context.Process(target=slow_peer, args=(n, str(tmp_path), slow_s, fate, results)) for n in range(2)]
    for peer in peers:
        peer.start()
    found = sorted(results.get(timeout=120) for _ in range(answers))
    for peer in peers:
        if fate == "hangs":
            peer.join(2)
            peer.kill()
        peer.join(timeout=60)
    return found


@pytest.mark.alone
@pytest.mark.slow
def test_indexing_may_take_longer_than_a_collective_waits_and_is_shared(tmp_path: Path) -> None:
    first, second = run_peers(tmp_path, slow_s=1.2, fate="lives", answers=2)
    assert first[2] == second[2] == 20
    assert first[1] == [f"s-{number:03}.tar" for number in range(0, 10, 2)]
    assert second[1] == [f"s-{number:03}.tar" for number in range(1, 10, 2)]
    assert min(first[3], second[3]) > 1.9 * TIMEOUT_S


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize(("fate", "message"), [("dies", "another process died"), ("hangs", "did not answer for")])
def test_a_process_that_dies_or_hangs_while_indexing_ends_the_others(tmp_path: Path, fate: str, message: str) -> None:
    (found,) = run_peers(tmp_path, slow_s=0.3, fate=fate, answers=1)
    assert found[0] == 0
    assert message in found[2]
    assert found[3] < 5 * 0.3 + (2 + CONTROL_FACTOR) * TIMEOUT_S
