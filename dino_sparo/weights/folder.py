"""The checkpoints of a run: each one is written completely or not at all; the last few are kept.

`checkpoint.py` describes and reads their content.
"""

import contextlib
import logging
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from dino_sparo.runtime.exits import ends_unnoticed
from dino_sparo.runtime.faults import retry
from dino_sparo.weights.file import CheckpointError, verify_checkpoint

logger = logging.getLogger(__name__)


def save_checkpoint(
    checkpoint: Mapping[str, Any], path: Path, previous: Sequence[Path] = (), copies: Sequence[Path] = ()
) -> None:
    """Write a checkpoint so that every name always holds a complete file, the old or the new one.

    All steps that can fail come first, under temporary names: the new file is written, flushed to the disk and
    verified, and the other names are prepared as hard links. Then the temporary files are renamed, `path` first. A
    failed save therefore changes nothing, and a kill at any moment never leaves two names for one checkpoint.

    Args:
        checkpoint: content.
        path: new file.
        previous: new names of the files before it, the most recent first.
        copies: further names of the new file.

    Raises:
        CheckpointError: the disk is full or the folder is read-only; nothing has changed.
        FaultError: the disk or the file server cannot write at the moment, also at the third try; nothing has changed.
    """
    retry(lambda: _save(checkpoint, path, previous, copies))


def _save(checkpoint: Mapping[str, Any], path: Path, previous: Sequence[Path], copies: Sequence[Path]) -> None:
    temporary = {name: name.with_name(f".{name.name}.tmp") for name in (path, *previous, *copies)}
    try:
        for name in temporary.values():
            name.unlink(missing_ok=True)
        with temporary[path].open("xb") as file:
            torch.save(dict(checkpoint), file)
            file.flush()
            os.fsync(file.fileno())
        verify_checkpoint(temporary[path])
        sources = {}
        for before, name in pairwise((path, *previous)):
            if not before.is_file():
                break  # a gap is filled, and what is behind it stays
            sources[name] = before
        sources |= dict.fromkeys(copies, temporary[path])
        for name, source in sources.items():
            _link(source, temporary[name])
        os.replace(temporary[path], path)
    except (OSError, RuntimeError, CheckpointError) as error:
        kept = "the previous checkpoint is kept" if path.exists() else "there was no previous checkpoint"
        # torch hides the system's error behind a RuntimeError.
        is_hidden = isinstance(error, RuntimeError) and isinstance(error.__context__, OSError)
        raise CheckpointError(
            f"could not write {path} ({error.__context__ if is_hidden else error}); {kept}; free some space, make the "
            "folder writable, and start again"
        ) from error
    else:
        _rename({temporary[name]: name for name in sources}, path)
    finally:
        for name in temporary.values():
            with contextlib.suppress(OSError):
                name.unlink()
    _sync_folder(path.parent)


def _link(path: Path, link: Path) -> None:
    """Give a file a second name; copy it where the file system has no hard links."""
    try:
        os.link(path, link)
    except OSError:
        shutil.copyfile(path, link)
        with link.open("rb") as copy:
            os.fsync(copy.fileno())


def _rename(names: Mapping[Path, Path], saved: Path) -> None:
    """Give prepared files their names, up to the first failure: a later file would repeat the previous checkpoint.

    The new checkpoint has its name already, so a failure does not end the run.
    """
    try:
        for temporary, name in names.items():
            os.replace(temporary, name)
    except OSError as error:
        logger.error("%s is saved, but %s could not be replaced (%s)", saved, name, error)


def _sync_folder(folder: Path) -> None:
    """Make a renaming survive a power cut, where folders can be flushed."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class CheckpointFolder:
    """The checkpoints of a run: `checkpoint.pth`, the newest, and those before it, `checkpoint_previous1.pth`, ...

    Args:
        folder: an existing folder.
        keep: number of checkpoints, the newest included; at least 1.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep
        self.newest = folder / "checkpoint.pth"

    def previous(self, number: int) -> Path:
        """Path of the checkpoint `number` saves before the newest."""
        return self.folder / f"checkpoint_previous{number}.pth" if number else self.newest

    def save(self, checkpoint: Mapping[str, Any], copies: Iterable[str] = (), replaces_newest: bool = False) -> None:
        """Write a checkpoint; earlier ones are renamed, and the oldest one is deleted.

        A failed save changes nothing. A kill leaves `keep` different complete checkpoints if there were as many before,
        `checkpoint.pth` among them.

        Args:
            checkpoint: content.
            copies: names of copies, which later saves do not overwrite.
            replaces_newest: replace the newest checkpoint and keep those before it; for a second save of the same step.
        """
        with contextlib.suppress(OSError):
            for remains in self.folder.glob(".checkpoint*.tmp"):  # of a killed save; they take space
                remains.unlink()
        previous = [] if replaces_newest else [self.previous(number) for number in range(1, self.keep)]
        # Workers end some time after SIGTERM, possibly before a large file is written.
        with ends_unnoticed():
            save_checkpoint(checkpoint, self.newest, previous, [self.folder / copy for copy in copies])

    def find(self) -> Path | None:
        """The newest undamaged checkpoint, None if there is none; newer, damaged checkpoints are reported and renamed.

        Raises:
            CheckpointError: all checkpoints are damaged.
            FaultError: the file system cannot read the newest one at the moment.
        """
        candidates = [path for number in range(self.keep) if (path := self.previous(number)).is_file()]
        candidates += sorted(
            set(self.folder.glob("checkpoint_previous*.pth")) - set(candidates),
            key=lambda path: (len(path.name), path.name),  # 2 before 10
        )
        reasons = []
        for path in candidates:
            try:
                retry(partial(verify_checkpoint, path))
            except CheckpointError as error:
                reasons.append((path, str(error)))
                continue
            # Renamed: otherwise the next save would drop a whole checkpoint and keep a damaged one.
            for damaged, reason in reasons:
                os.replace(damaged, damaged.with_name(f"{damaged.name}.damaged"))
                logger.error("%s; it is %s.damaged now, and the run resumes from %s", reason, damaged.name, path)
            return path
        if reasons:
            causes = "; ".join(reason for _, reason in reasons)
            raise CheckpointError(f"{causes}; none is left to resume from. Choose another --output_dir")
        return None
