"""Trackers of experiments: TensorBoard, Weights & Biases, Trackio. Each gets scalars, options and pictures of a run.

`--report_to tensorboard wandb trackio` chooses them. A resumed run continues the same run of each tracker: its id lies
in trackers.json, next to the checkpoints. A tracker that fails is logged and left out; the training continues.
"""

import contextlib
import json
import logging
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from dino_sparo.runtime.cli import printable
from dino_sparo.runtime.faults import WORKER_SIGNS, UserError
from dino_sparo.runtime.files import write_json

logger = logging.getLogger(__name__)

PROJECT = "dino_sparo"  # unless the tracker's environment variable names another
START_S, FINISH_S = 60.0, 30.0  # wandb: for its servers to answer, and to upload what is left at the end


@dataclass(frozen=True)
class TrackedRun:
    """A run, as trackers see it.

    Attributes:
        folder: of its checkpoints.
        name: on the tracker's page; by default that of the folder.
        step: the step from which it starts or continues; None if steps are counted anew.
        options: without those that have no value.
        metrics: names of scalars to compare runs by.
    """

    folder: Path
    name: str | None = None
    step: int | None = 0
    options: Mapping[str, Any] | None = None
    metrics: Sequence[str] = ()

    @property
    def plain_options(self) -> dict[str, bool | int | float | str]:
        """Numbers as they are, everything else as printable text."""
        values = {name: value for name, value in (self.options or {}).items() if value is not None}
        return {
            name: value if isinstance(value, (bool, int, float)) else printable(str(value))
            for name, value in values.items()
        }

    @property
    def title(self) -> str:
        """The run's name, printable."""
        return printable(self.name or self.folder.resolve().name)

    @cached_property
    def run_id(self) -> str:
        """The id of the run, the same in all parts of the run; a run that starts over gets a new one."""
        path = self.folder / "trackers.json"
        if self.step == 0 or not path.is_file():
            write_json({"id": uuid.uuid4().hex[:8]}, path)
        return str(json.loads(path.read_text())["id"])


class TensorBoard:
    """Files in tensorboard/; its page HPARAMS compares runs by their options."""

    def __init__(self, run: TrackedRun) -> None:
        folder = str(run.folder / "tensorboard")
        if printable(folder) != folder:
            raise UserError(f"TensorBoard cannot write to a folder of this name: {folder}")
        # A resumed run declares that the events from a step on did not happen: these steps are taken again.
        self.writer = SummaryWriter(folder, purge_step=None if run.step is None else run.step + 1)
        # `SummaryWriter.add_hparams` would begin another run in a folder of its own.
        if run.options:
            for summary in hparams(run.plain_options, dict.fromkeys(run.metrics, 0.0)):
                self.writer._get_file_writer().add_summary(summary)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Named numbers of a step."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def image(self, name: str, picture: np.ndarray, step: int) -> None:
        """A picture (H, W, 3), 8 bit."""
        self.writer.add_image(name, picture, step, dataformats="HWC")

    def close(self) -> None:
        """Finish writing."""
        self.writer.close()


class WandB:
    """Weights & Biases; the environment may set WANDB_PROJECT, WANDB_ENTITY and WANDB_MODE=offline."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self.image_type: Any = wandb.Image
        self.run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=run.run_id,
            name=run.title,
            dir=run.folder,
            config=run.plain_options,
            allow_val_change=True,
            resume="allow",
            settings=wandb.Settings(console="off", init_timeout=START_S, finish_timeout=FINISH_S),
        )
        # Steps that a resumed run takes again are shown again; with wandb's own steps they would be dropped.
        self.run.define_metric("*", step_metric="step")

    def image(self, name: str, picture: np.ndarray, step: int) -> None:
        """A picture (H, W, 3), 8 bit."""
        self.scalars({name: self.image_type(picture)}, step)

    def scalars(self, values: Mapping[str, Any], step: int) -> None:
        """Named numbers, or pictures, of a step."""
        self.run.log({"step": step, **values})

    def close(self) -> None:
        """Finish writing and uploading."""
        self.run.finish()


class Trackio(WandB):
    """Trackio, which keeps runs on this machine; TRACKIO_PROJECT and TRACKIO_SPACE_ID name another destination."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        project, name = os.environ.get("TRACKIO_PROJECT", PROJECT), f"{run.title}-{run.run_id}"
        # Steps that a resumed run takes again have their old values; Trackio cannot replace them.
        logs = SQLiteStorage.get_logs(project, name) if run.step else []
        self.logged = {(entry["step"], key) for entry in logs for key in entry}
        self.image_type = trackio.Image
        self.run = trackio.init(
            project=project,
            name=name,  # by which Trackio finds a run
            config=run.plain_options,
            resume="allow",
            embed=False,
        )

    def scalars(self, values: Mapping[str, Any], step: int) -> None:
        """Named numbers, or pictures, of a step."""
        if new := {name: value for name, value in values.items() if (step, name) not in self.logged}:
            self.run.log(new, step=step)


# A tracker has the methods of `TensorBoard`.
TRACKERS: dict[str, Callable[[TrackedRun], Any]] = {"tensorboard": TensorBoard, "wandb": WandB, "trackio": Trackio}


class Trackers:
    """All trackers of a run. A tracker that fails is dropped from then on, so that its failure does not end the run."""

    def __init__(self, names: Sequence[str], run: TrackedRun) -> None:
        self.run, self.open = run, dict[str, Any]()
        for name in dict.fromkeys(names):
            with self._drop_on_failure(name):
                self.open[name] = TRACKERS[name](run)

    def each(self, call: Callable[[Any], None]) -> None:
        """Call every tracker that works."""
        for name, tracker in list(self.open.items()):
            with self._drop_on_failure(name):
                call(tracker)

    @contextlib.contextmanager
    def _drop_on_failure(self, name: str) -> Iterator[None]:
        """Within this context any failure is logged, and the tracker is dropped from then on."""
        try:
            yield
        except Exception as error:
            if any(sign in str(error) for sign in WORKER_SIGNS):  # torch raises it wherever this process is
                raise
            self.open.pop(name, None)
            logger.error(
                "--report_to %s failed, so training continues without %s; fix the cause and rerun to use it (%s: %s)",
                *(name, name, self.run.folder, " ".join(str(error).split()) or type(error).__name__),
            )
