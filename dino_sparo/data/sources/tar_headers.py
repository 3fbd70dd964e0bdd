"""One tar file -> name, offset and size of its members, from the headers alone."""

import os
import tarfile
from collections.abc import Iterator
from typing import NamedTuple

from dino_sparo.runtime.files import open_regular

BLOCK_BYTES = tarfile.BLOCKSIZE  # everything in a tar begins at a multiple of it
MAX_TAR_BYTES = BLOCK_BYTES << 32  # an index counts blocks in 32 bits
MAX_END_BYTES = 1 << 20  # of zeros behind the last member; more are a download that stopped


class DamagedShardError(ValueError):
    """A tar shard that is damaged, truncated or no tar; the message names it."""


class Member(NamedTuple):
    """A regular file in a tar.

    Attributes:
        name: its path there.
        start: where its first header begins, bytes.
        offset: where its content begins, bytes.
        size: of its content, bytes.
    """

    name: bytes
    start: int
    offset: int
    size: int


def tar_members(shard: str, position: int = 0) -> Iterator[Member]:
    """Walk a tar's headers; links, folders and devices are skipped.

    Args:
        shard: the file.
        position: where to begin, bytes; `Member.start` of some member.

    Raises:
        DamagedShardError: the file is no plain tar, is truncated, or its headers are absurd.
        OSError: it is no regular file, or cannot be read.
    """
    with open_regular(shard) as file:
        total = os.fstat(file.fileno()).st_size
        file.seek(position)
        try:
            with tarfile.open(fileobj=file, mode="r:") as tar:
                while (info := tar.next()) is not None:
                    tar.members = []  # type: ignore[attr-defined]  # else it would keep all
                    if info.issparse():
                        raise tarfile.TarError(f"{info.name!r} is sparse; write it without --sparse")
                    if info.offset_data + info.size > total:
                        raise tarfile.TarError(f"truncated within {info.name!r}")
                    if info.isfile():
                        yield Member(os.fsencode(info.name), info.offset, info.offset_data, info.size)
                end = tar.offset
        except OSError:
            raise
        except Exception as error:  # a damaged header makes tarfile raise anything
            raise DamagedShardError(f"tar shard {shard!r} is damaged ({error}); fetch or write it anew") from error
        # tarfile takes a damaged header for the end.
        file.seek(end)
        most = MAX_END_BYTES if end else tarfile.RECORDSIZE
        if total > MAX_TAR_BYTES or total - end > most or file.read().strip(b"\0"):
            raise DamagedShardError(
                f"tar shard {shard!r} is damaged: what follows byte {end:,} of {total:,} is no end of a tar; fetch or "
                "write it anew"
            )


def member_name(shard: str, start: int) -> bytes:
    """Name of the member whose first header begins at byte `start`; for `Raises` see `tar_members`."""
    return next(tar_members(shard, start)).name
