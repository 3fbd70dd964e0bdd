"""The runs of a study -> one small result file each. Finished runs are skipped; interrupted ones resume."""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dino_sparo.runtime.cli import Group, Option, option_words, say
from dino_sparo.runtime.faults import MendableError
from dino_sparo.runtime.files import differences, git_hash, parse_object, read_log, write_json
from dino_sparo.weights.checkpoint import load_checkpoint
from studies.plans import CHOICE_SEED, STUDIES, Study

RESULTS = Path(__file__).parent / "results"
FOLDERS: Group = {
    "output_dir": Option(Path("output/studies"), "Folder of checkpoints and logs.", Path),
    "results": Option(RESULTS, "Folder of the result files of all studies.", Path),
}


@dataclass(frozen=True)
class Run:
    """One training run."""

    study: str
    variant: str
    lr: float
    seed: int

    @property
    def name(self) -> str:
        """Name of its folder and of its result file."""
        return f"{self.variant}_lr{self.lr:g}_seed{self.seed}"

    @property
    def only_chooses(self) -> bool:
        """Whether the run only chooses the learning rate; such runs are not evaluated."""
        return self.seed == CHOICE_SEED

    @property
    def options(self) -> dict[str, str]:
        """Options of the training command, except data and folder."""
        return STUDIES[self.study].options(self.variant, self.lr, self.seed)

    def result(self, results: Path) -> dict[str, Any] | None:
        """Its result, None before the run is finished; ValueError if it belongs to another recipe, or is damaged."""
        path = results / self.study / f"{self.name}.json"
        if not path.exists():
            return None
        result = parse_object(path.read_text(), str(path))
        self.require_recipe(result, path)
        return result

    def require_recipe(self, result: Mapping[str, Any], path: Path) -> None:
        """Refuse a result of other options than this run's."""
        if changed := differences(result["options"], self.options, "then", "now"):
            raise ValueError(
                f"{path} was made with another recipe ({'; '.join(changed)}); delete it, or give another --results"
            )


def choosing_runs(name: str) -> list[Run]:
    """The runs that choose the learning rate; none if there is only one."""
    study = STUDIES[name]
    if len(study.learning_rates) == 1:
        return []
    return [Run(name, variant, lr, CHOICE_SEED) for variant in study.variants for lr in study.learning_rates]


def chosen_rates(name: str, results: Path) -> dict[str, float]:
    """Best learning rate of each variant whose choosing runs are finished and did not all diverge."""
    study = STUDIES[name]
    if len(study.learning_rates) == 1:
        return dict.fromkeys(study.variants, study.learning_rates[0])
    chosen = {}
    for variant in study.variants:
        by_rate = {run.lr: run.result(results) for run in choosing_runs(name) if run.variant == variant}
        values = {lr: study.quality(result) for lr, result in by_rate.items() if result}
        if len(values) == len(study.learning_rates) and max(values.values()) > -math.inf:
            chosen[variant] = max(values, key=lambda lr: values[lr])
    return chosen


def reported_rows(name: str, results: Path) -> dict[str, tuple[str, float]]:
    """Row of the tables -> (variant, learning rate), for rows whose rate is chosen or given."""
    chosen = {variant: (variant, lr) for variant, lr in chosen_rates(name, results).items()}
    return {**chosen, **STUDIES[name].also}


def reported_runs(name: str, results: Path) -> list[Run]:
    """The runs of all seeds, without duplicates: all rows of one seed, then the next seed."""
    rows = dict.fromkeys(reported_rows(name, results).values())
    return [Run(name, variant, lr, seed) for seed in STUDIES[name].seeds for variant, lr in rows]


def make_runs(args: argparse.Namespace) -> None:
    """Make all runs of a study that have no result; runs that choose the learning rate come first."""
    from dino_sparo.__main__ import run

    folder, results = args.output_dir / args.name, args.results
    folder.mkdir(parents=True, exist_ok=True)
    train, evaluated = STUDIES[args.name].prepare(args.data_path, folder, run)
    for runs_of in (choosing_runs, partial(reported_runs, results=results)):  # the first choose the others' rates
        wanted = [one for one in runs_of(args.name) if not args.seeds or one.only_chooses or one.seed in args.seeds]
        missing = [one for one in wanted if one.result(results) is None]
        start_runs(missing, train, folder, evaluated, results, args.jobs)


def is_finished(folder: Path, run: Run) -> bool:
    """Whether a folder holds a checkpoint of the last epoch."""
    path = folder / "checkpoint.pth"
    return path.exists() and load_checkpoint(path)["epoch"] == int(run.options["epochs"])


def start_runs(missing: Sequence[Run], data_path: str, folder: Path, evaluated: str, results: Path, jobs: int) -> None:
    """Make runs, each in its own process: two small runs side by side are faster than two threads.

    Raises:
        MendableError: a run failed; the others save and stop, as after Ctrl-C.
    """
    waiting, running = list(missing), list[tuple[Run, subprocess.Popen[bytes]]]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                one = waiting.pop(0)
                running.append((one, _start(one, data_path, folder / one.name, evaluated, results)))
            time.sleep(0.2)
            for one, process in [(one, process) for one, process in running if process.poll() is not None]:
                running.remove((one, process))
                if process.returncode:
                    log = folder / one.name / "console.txt"
                    raise MendableError(f"{one.study} {one.name} ended with status {process.returncode}; see {log}")
                say(f"{one.name}: done, {len(waiting) + len(running)} left")
    finally:
        for _, process in running:
            process.terminate()
        for _, process in running:
            process.wait()


def _start(one: Run, data_path: str, folder: Path, evaluated: str, results: Path) -> subprocess.Popen[bytes]:
    """Start the process of one run; its output goes to console.txt in the run's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    options, begun = {**one.options, "data_path": data_path}, folder / "options.json"
    changed = differences(json.loads(begun.read_text()), options, "then", "now") if begun.exists() else []
    if changed:
        raise ValueError(
            f"{folder} holds a run that was begun with another recipe ({'; '.join(changed)}); delete the folder, or "
            f"give another --output_dir"
        )
    write_json(options, begun)
    task = {"run": asdict(one), "options": options, "evaluated": evaluated}
    words = [sys.executable, "-m", "studies.runs", json.dumps(task), str(folder), str(results)]
    with (folder / "console.txt").open("ab") as console:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(words, stdout=console, stderr=subprocess.STDOUT, env=environment)


def make_run(one: Run, options: Mapping[str, str], folder: Path, evaluated: str) -> dict[str, Any]:
    """Train and evaluate.

    Returns:
        Options, scores, curves, and versions. A run that diverged has no scores; "diverged" says at which step and why.
    """
    import torch

    from dino_sparo import load_encoder
    from dino_sparo.__main__ import run
    from dino_sparo.training.loop import NonFiniteLossError

    study: Study = STUDIES[one.study]
    resumed, before = (folder / "checkpoint.pth").exists(), _processor_seconds()
    diverged = ""
    words = {**{name: text.split() for name, text in options.items()}, "data_path": options["data_path"]}
    try:
        run(study.commands.get(one.variant, study.command), option_words({**words, "output_dir": folder}))
    except SystemExit as end:  # the command has said why, in one line
        if not isinstance(end.__context__, NonFiniteLossError):
            raise
        diverged = str(end.__context__)
    seconds, epochs = _processor_seconds() - before, read_log(folder)
    columns = ("step", "train_loss", "knn_20", "val_loss")
    result: dict[str, Any] = {
        "run": one.name,
        "options": {name: value for name, value in options.items() if name != "data_path"},
        "scores": {},
        "epochs": [{key: epoch[key] for key in columns if key in epoch} for epoch in epochs],
        "training_processor_s": None if resumed else round(seconds),
        "commit": git_hash(),
        "torch": str(torch.__version__),
    }
    if diverged:
        return {**result, "diverged": diverged}
    if not one.only_chooses:
        before = _processor_seconds()
        result["scores"] = study.evaluate(folder, one.variant, one.seed, evaluated, run)
        result["evaluation_processor_s"] = round(_processor_seconds() - before)
    optimizer = load_checkpoint(folder / "checkpoint.pth")["optimizer"]
    return {
        **result,
        "encoder_parameters": sum(p.numel() for p in load_encoder(folder / "checkpoint.pth").parameters()),
        "trained_parameters": sum(state["exp_avg"].numel() for state in optimizer["state"].values()),
    }


def _processor_seconds() -> float:
    """Processor time of this process and of its finished loading processes, independent of other load."""
    return sum(os.times()[:4])  # the fifth is the time of the clock


def main() -> None:
    """Make the run that the command line describes, and write its result."""
    task, folder, results = json.loads(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    one = Run(**task["run"])
    result = make_run(one, task["options"], folder, task["evaluated"])
    path = results / one.study / f"{one.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(result, path)


if __name__ == "__main__":
    main()
