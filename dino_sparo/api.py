"""Commands as calls from Python and notebooks: keywords -> a `Result`.

    import dino_sparo

    run = dino_sparo.train(data_path="scenes:640:48", output_dir="runs/first", readout="sparo", epochs=2)
    run.history[-1]["train_loss"]
    dino_sparo.knn(pretrained_weights=run.checkpoint, data_path="scenes:640:48").results

Keywords are the options of the command of the same name (`dino-sparo train-clip` for `train_clip`), with the same
checks and defaults; an option with several values takes a list. The functions raise exceptions where a command ends the
process.
"""

import contextlib
import logging
import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dino_sparo.commands import COMMANDS, command_for, parse_keywords
from dino_sparo.runtime.faults import UserError, explain_full_memory
from dino_sparo.runtime.files import read_log

if TYPE_CHECKING:
    from dino_sparo.models.encoder import Encoder


TRAININGS = [name for name, command in COMMANDS.items() if "objective_class" in command.needs]


@dataclass(frozen=True)
class Result:
    """Result of a call.

    Attributes:
        command: the command of `dino-sparo`.
        checkpoint: the newest checkpoint of a training; otherwise the weights that were evaluated, None without any.
        results: content of the result file of an evaluation; the last row of `history` of a training.
        options: all options of the command, defaults included.
    """

    command: str
    checkpoint: Path | str | None
    results: Any = field(repr=False)
    options: dict[str, Any] = field(repr=False)

    def encoder(self, which: str = "teacher") -> "Encoder":
        """The encoder of the checkpoint in eval mode, on the CPU; `which` is teacher or student."""
        from dino_sparo.weights.encoder import load_encoder

        if self.checkpoint is None:
            raise UserError(f"{self.command} was called without a checkpoint, so there is no encoder")
        return load_encoder(self.checkpoint, which)

    @property
    def history(self) -> list[dict[str, Any]]:
        """The rows of a training's log.txt, one per epoch; empty for other commands."""
        return read_log(Path(self.options["output_dir"])) if self.command in TRAININGS else []


def call(command: str, **options: Any) -> Result:
    """Run any command of `dino-sparo`, for example `call("zero-shot", pretrained_weights=..., data_path=...)`.

    Args:
        command: its name.
        options: names of its options, with underscores, and their values.

    Raises:
        ValueError: one line; an unknown option comes with the nearest known one.
        KeyboardInterrupt: a training was interrupted; it has saved, and the same call resumes it.
    """
    command = command_for(command, [f"--{name}={value}" for name, value in options.items()])
    args = parse_keywords(command, options)
    with _process_left_as_it_was(), explain_full_memory(vars(args)):
        results = COMMANDS[command].function(args)
    options = vars(args)
    if command not in TRAININGS:
        return Result(command, options.get("pretrained_weights") or None, results, options)
    folder = Path(args.output_dir)
    return Result(command, folder / "checkpoint.pth", (read_log(folder) or [{}])[-1], options)


@contextlib.contextmanager
def _process_left_as_it_was() -> Iterator[None]:
    """Run a command in a process that lives on, such as a notebook's.

    Afterwards the logger is as before, the process group is closed, and after an error no process loads images any
    more: a notebook keeps the traceback, and with it everything that the failed call had opened.
    """
    # Here, not above: they import torch.
    from dino_sparo.runtime.exits import end_workers
    from dino_sparo.runtime.launch import shutdown
    from dino_sparo.runtime.preemption import RunStopped

    root = logging.getLogger()
    handlers, level, children = list(root.handlers), root.level, multiprocessing.active_children()
    try:
        yield
    except BaseException as error:
        end_workers(keep=children)
        if isinstance(error, RunStopped) and error.is_interrupt:
            raise KeyboardInterrupt(str(error)) from None
        raise
    finally:
        for handler in [handler for handler in root.handlers if handler not in handlers]:
            root.removeHandler(handler)
            handler.close()
        root.setLevel(level)
        shutdown()


def train(**options: Any) -> Result:
    """Train an encoder with DINO on images, or resume from the last checkpoint in `output_dir`.

    An interrupt (Ctrl-C, or a notebook's stop button) saves and raises KeyboardInterrupt; the same call resumes.

    Args:
        options: of `dino-sparo train`: data_path, output_dir, readout, epochs, arch, ...
    """
    return call("train", **options)


def train_simdino(**options: Any) -> Result:
    """Train an encoder with SimDINO on images; see `train`.

    Args:
        options: of `dino-sparo train-simdino`.
    """
    return call("train-simdino", **options)


def train_ibot(**options: Any) -> Result:
    """Train an encoder with iBOT on images; see `train`.

    Args:
        options: of `dino-sparo train-ibot`.
    """
    return call("train-ibot", **options)


def train_clip(**options: Any) -> Result:
    """Train image and text encoders with CLIP on images with captions, by options of `dino-sparo train-clip`."""
    return call("train-clip", **options)


def train_oc_clip(**options: Any) -> Result:
    """Train OC-CLIP on images with captions and scene graphs, by options of `dino-sparo train-oc-clip`."""
    return call("train-oc-clip", **options)


def embed(**options: Any) -> Result:
    """Embed any images into files, by options of `dino-sparo embed`; `load_embeddings(output_dir)` opens them."""
    return call("embed", **options)


def knn(**options: Any) -> Result:
    """Weighted k-NN accuracy of a checkpoint on labelled images, by options of `dino-sparo knn`."""
    return call("knn", **options)


def linear(**options: Any) -> Result:
    """Accuracy of linear probes of a checkpoint on labelled images, by options of `dino-sparo linear`."""
    return call("linear", **options)


def attention(**options: Any) -> Result:
    """Draw the attention map of every slot, or head, for some images, by options of `dino-sparo attention`."""
    return call("attention", **options)
