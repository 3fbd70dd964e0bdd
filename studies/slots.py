"""Encoders of the study `scenes`: how well their maps find objects, and what single slots encode.

    python -m studies maps --output_dir output/studies

`cls` is measured at its own learning rate and at that of `sparo`. Needs the checkpoints of `python -m studies scenes`
in that folder. Writes a small result file per run and prints tables.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dino_sparo.demo.run import RunCommand
from dino_sparo.evaluation.objects.measures import MEASURES
from dino_sparo.evaluation.objects.report import MEASURE_NAMES, ROW_NAMES
from dino_sparo.models.readouts import readout_kind
from dino_sparo.runtime.cli import Option, option_words
from dino_sparo.runtime.files import write_json
from studies.plans import EQUAL_RATE, STUDIES
from studies.report import differences, interval_table, markdown, mean_and_deviation
from studies.runs import FOLDERS, Run, is_finished, reported_rows

STUDY = "scenes"
WITH_MAPS = ("cls", EQUAL_RATE, "sparo")  # rows of the study's tables; `gap` averages all tokens
OBJECTS, LABELLED, IMG_SIZE = "scenes:2000:64", "scenes:4000:48", 32
NUM_MAPS = 4  # scored together: `cls` has four heads
COMPARED = ("untrained", "other_image", "moved")  # rows of slots score that are subtracted from the encoder's

OPTIONS = {"study": {**FOLDERS, "report": Option(False, "Measure nothing: the tables of the results so far.")}}
Found = dict[str, dict[int, dict[str, Any]]]  # row -> seed -> result


def measure(run: Run, folder: Path, partner: Path | None, command: RunCommand) -> dict[str, Any]:
    """Scores of one encoder's maps; for slots also their accuracy and their match with the slots of the next seed.

    Returns:
        `objects`: row -> measure -> percent; `kept`: state -> number of slots kept -> 20-NN of the best and of random
        slots; `match`: name -> mean linear CKA.
    """
    run_folder = folder / run.name
    shared = option_words({"pretrained_weights": run_folder / "checkpoint.pth", "device": "cpu", "num_workers": 0})
    # So each seed has another untrained encoder.
    shared += option_words({"seed": run.seed, "output_dir": run_folder / "slots"})
    words = option_words({"data_path": OBJECTS, "maps": NUM_MAPS})
    has_slots = readout_kind(run.options["readout"]).has_slots
    if partner is not None and has_slots:
        words += ["--match", str(partner / "checkpoint.pth")]
    scored = command("slots score", [*shared, *words])
    rows = {row: scored["measures"][row] for row in ("model", *COMPARED)}
    result: dict[str, Any] = {"run": run.name, "options": run.options}
    result["objects"] = {
        row: {measure: 100 * values[measure]["mean"] for measure in MEASURES} for row, values in rows.items()
    }
    if "match" in scored:
        names = ("matched", "untrained", "shuffled_images")
        result["match"] = {name: scored["match"][name]["mean"] for name in names}
        result["match"]["mean_of_all_pairs"] = scored["match"]["mean_of_all_pairs"]
    if has_slots:
        words = option_words({"data_path": LABELLED, "img_size": IMG_SIZE})
        studied = {
            "untrained": command("slots study", [*shared, *words, "--untrained"]),
            "trained": command("slots study", [*shared, *words]),
        }
        result["kept"] = {
            state: {
                str(row["num_kept"]): {"best": row["top1_held_out"], "random": row["random"]["mean"]}
                for row in found["curve"]
            }
            for state, found in studied.items()
        }
    return result


def runs_with_maps(results: Path) -> dict[str, list[Run]]:
    """Row of the study's tables -> its runs, one per seed, for rows whose learning rate is chosen."""
    rows = reported_rows(STUDY, results)
    return {row: [Run(STUDY, *rows[row], seed) for seed in STUDIES[STUDY].seeds] for row in WITH_MAPS if row in rows}


def measure_missing(args: argparse.Namespace, command: RunCommand) -> None:
    """Measure the reported runs that have a checkpoint and no result yet."""
    folder, results = args.output_dir / STUDY, args.results
    for run in (run for runs in runs_with_maps(results).values() for run in runs if run.result(results)):
        path = results / STUDY / "slots" / f"{run.name}.json"
        if not path.exists() and is_finished(folder / run.name, run):
            following = folder / Run(STUDY, run.variant, run.lr, run.seed + 1).name
            partner = following if is_finished(following, run) else None
            path.parent.mkdir(exist_ok=True)
            write_json(measure(run, folder, partner, command), path)


def measured(results: Path) -> Found:
    """The results so far; ValueError if one belongs to another recipe."""
    found: Found = {row: {} for row in WITH_MAPS}
    for row, runs in runs_with_maps(results).items():
        for run in runs:
            path = results / STUDY / "slots" / f"{run.name}.json"
            if path.exists():
                found[row][run.seed] = json.loads(path.read_text())
                run.require_recipe(found[row][run.seed], path)
    return found


def report(results: Path) -> str:
    """All tables; `results` is the folder of all studies' results."""
    found = measured(results)
    if not all(found.values()):
        return ""
    return "\n\n".join([objects_table(found), objects_differences(found), kept_table(found), match_table(found)])


def _objects(by_seed: Mapping[int, Mapping[str, Any]], row: str, measure: str) -> dict[int, float]:
    return {seed: result["objects"][row][measure] for seed, result in by_seed.items()}


def objects_table(found: Found) -> str:
    """Rows of slots score: mean ± standard deviation over seeds, percent."""
    rows = []
    for variant, by_seed in found.items():
        for row in ("model", *COMPARED):
            name = f"{variant}, {'trained' if row == 'model' else ROW_NAMES[row]}"
            values = [list(_objects(by_seed, row, measure).values()) for measure in MEASURES]
            rows.append([name, str(len(by_seed)), *map(mean_and_deviation, values)])
    return markdown(["", "seeds", *MEASURE_NAMES.values()], rows)


def objects_differences(found: Found) -> str:
    """Trained encoders minus their controls, and sparo minus cls, paired by seed: mean and 95 % interval."""
    pairs = {
        f"{variant}, trained - {ROW_NAMES[row]}": ((by_seed, "model"), (by_seed, row))
        for variant, by_seed in found.items()
        for row in COMPARED
    }
    pairs |= {
        "sparo - cls, trained": ((found["sparo"], "model"), (found["cls"], "model")),
        f"sparo - {EQUAL_RATE}, trained": ((found["sparo"], "model"), (found[EQUAL_RATE], "model")),
        "sparo - cls, untrained": ((found["sparo"], "untrained"), (found["cls"], "untrained")),
    }
    rows = {
        name: [differences(_objects(*one, measure), _objects(*other, measure)) for measure in MEASURES]
        for name, (one, other) in pairs.items()
    }
    return interval_table("difference", [*MEASURE_NAMES.values()], rows)


def kept_table(found: Found) -> str:
    """20-NN of the best and of random slots against their number: mean ± standard deviation over seeds."""
    results = list(found["sparo"].values())
    columns = [(state, which) for state in ("trained", "untrained") for which in ("best", "random")]
    rows = [
        [
            number,
            *(mean_and_deviation([one["kept"][state][number][which] for one in results]) for state, which in columns),
        ]
        for number in results[0]["kept"]["trained"]
    ]
    return markdown(["slots kept", *(f"{which}, {state}" for state, which in columns)], rows)


def match_table(found: Found) -> str:
    """Linear CKA of the slots of neighbouring seeds."""
    names = {
        "matched": "matched slots",
        "mean_of_all_pairs": "all pairs of slots",
        "untrained": "matched with an untrained encoder",
        "shuffled_images": "matched, images shuffled",
    }
    rows = [
        [f"{seed}, {seed + 1}", *(f"{result['match'][name]:.2f}" for name in names)]
        for seed, result in found["sparo"].items()
        if "match" in result
    ]
    return markdown(["seeds", *names.values()], rows)
