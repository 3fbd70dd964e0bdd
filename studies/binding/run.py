"""`python -m studies binding`: train the encoders, probe their tokens and slots for bindings, print the tables.

    python -m studies binding                                  # five models, seeds 0 to 2, the demos' recipes
    python -m studies binding --share 0.1 --seeds 0 1 2        # a tenth of the demos' training images and warmup
    python -m studies binding --short                          # a minute, to see that all parts work

A finished model or probe is skipped; an interrupted training resumes. Writes binding.json, binding.md and binding.png.
"""

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dino_sparo.demo.run import IMAGE_SIZE, RunCommand, start_demo
from dino_sparo.draw.plots import FAINT, colour_of
from dino_sparo.draw.sheet import require_matplotlib
from dino_sparo.runtime.cli import Option, say
from dino_sparo.runtime.files import versions, write_json
from dino_sparo.runtime.logs import setup_logging
from studies import report
from studies.binding import probes, scenes
from studies.binding.models import MODELS, ONE_SLOT, SLOTS, Readings, best_part, demo_scores, read_model, train_model
from studies.binding.scenes import NUM_COLOURS, NUM_SHAPES

MEASURES = ("shapes", "colours", "binding", "shuffled", "true - shuffled")
# Width, capacity and labels of a probe -> column of the tables.
COLUMNS = {
    **{("equal", capacity, "true"): capacity for capacity in probes.CAPACITIES},
    ("native", "linear", "true"): "linear, own width",
    ("equal", probes.MAIN, "true"): "binding",
    ("equal", probes.MAIN, "shuffled"): "shuffled",
}
# Model and reading, minus another model and reading, both trained.
COMPARED = (
    ("DINO sparo, all slots", "DINO cls, class token"),
    ("DINO sparo, all slots", "DINO cls, patches"),
    ("CLIP sparo, all slots", "CLIP cls, class token"),
    ("CLIP sparo, all slots", "CLIP cls, patches"),
    ("DINO sparo, one slot", "DINO sparo, all slots"),
    ("CLIP sparo, one slot", "CLIP sparo, all slots"),
    ("OC-CLIP, entity slots", "OC-CLIP, mean of patches"),
    ("OC-CLIP, entity slots", "OC-CLIP, patches"),
    ("OC-CLIP, entity slots", "CLIP cls, class token"),
    ("OC-CLIP, entity slots", "CLIP sparo, all slots"),
)
ENTROPY_SHAPES, ENTROPY_COLOURS = (math.log2(math.comb(number, 2)) for number in (NUM_SHAPES, NUM_COLOURS))

Results = Sequence[Mapping[str, Any]]
# Model with reading, state of the weights -> column -> seed -> percent.
Values = dict[tuple[str, str], dict[str, dict[int, float]]]


def values_of(results: Results, entropy: float) -> Values:
    """All measures in percent of the entropy, the largest possible information."""
    values: Values = {}
    for result in results:
        for name, losses in result["probes"].items():
            state, reading, width, capacity, labels = name.split(", ")
            column, seed = COLUMNS[width, capacity, labels], result["seed"]
            row = reading if reading == result["model"] else f"{result['model']}, {reading}"
            measures = values.setdefault((row, state), {})
            loss_f = losses["loss_shapes"] + losses["loss_colours"]
            measures.setdefault(column, {})[seed] = 100 * probes.binding_ratio(losses["loss_y"], loss_f, entropy)
            if column == "binding":
                measures.setdefault("shapes", {})[seed] = 100 * (1 - losses["loss_shapes"] / ENTROPY_SHAPES)
                measures.setdefault("colours", {})[seed] = 100 * (1 - losses["loss_colours"] / ENTROPY_COLOURS)
    for measures in values.values():
        measures["true - shuffled"] = report.differences(measures.get("binding", {}), measures.get("shuffled", {}))
    return values


def tables(results: Results, entropy: float) -> str:
    """All tables."""
    values = values_of(results, entropy)

    def table(columns: Sequence[str]) -> str:
        head = ["", "weights", "seeds", *columns]
        rows = []
        for row, measures in values.items():
            cells = [report.mean_and_deviation([*measures.get(column, {}).values()]) for column in columns]
            rows.append([*row, str(len(measures["binding"])), *cells])
        return report.markdown(head, rows)

    parts = {
        "The demos' scores, %:": score_table(results),
        f"Information in % of the entropy, {probes.MAIN}, equal width:": table(MEASURES),
        f"Binding ratio in % by capacity, equal width; binding: {probes.MAIN}:": table(
            [column for column in COLUMNS.values() if column != "shuffled"]
        ),
        "Differences of these percentages, paired by seed:": difference_table(values),
    }
    return "\n\n".join(text for part in parts.items() for text in part)


def difference_table(values: Values) -> str:
    """Trained minus untrained of each reading, and `COMPARED`."""
    pairs = {f"{row}: trained - untrained": ((row, "trained"), (row, "untrained")) for row, _ in values}
    pairs |= {f"{one} - {other}": ((one, "trained"), (other, "trained")) for one, other in COMPARED}
    rows = {
        name: [report.differences(values[one].get(column, {}), values[other].get(column, {})) for column in MEASURES]
        for name, (one, other) in pairs.items()
        if one in values and other in values
    }
    return report.interval_table("difference", MEASURES, rows)


def score_table(results: Results) -> str:
    """The demos' scores of each model: mean and deviation over seeds."""
    scores: dict[tuple[str, str], list[float]] = {}
    for result in results:
        for score, value in result.get("scores", {}).items():
            scores.setdefault((result["model"], score), []).append(value)
    rows = [[*key, report.mean_and_deviation(each)] for key, each in scores.items()]
    return report.markdown(["model", "score", "%"], rows)


SHOWN_MEASURES = ("colours", "binding", "true - shuffled")
SHOWN_READINGS = ("true objects", "class token", "patches", "all slots", "entity slots")


def draw(results: Results, entropy: float, path: Path) -> None:
    """Draw information about colours and binding of the main readings; a mark per seed, a line at the mean."""
    values = values_of(results, entropy)
    shown = {key: measures for key, measures in values.items() if key[0].split(", ")[-1] in SHOWN_READINGS}
    rows = list(dict.fromkeys(row for row, _ in shown))[::-1]
    models = list(dict.fromkeys(row.split(", ")[0] for row in rows))
    colours = {row: colour_of(models.index(row.split(", ")[0]), len(models)) for row in rows}
    with report.talk_panels(path, 1, len(SHOWN_MEASURES), (15.0, 2.0 + 0.4 * len(rows))) as (axes,):
        for axis, measure in zip(axes, SHOWN_MEASURES, strict=True):
            for (row, state), measures in shown.items():
                report.draw_marks(axis, [*measures.get(measure, {}).values()], state, colours[row], rows.index(row))
            report.label_rows(axis, rows if axis is axes[0] else [""] * len(rows), [colours[row] for row in rows])
            axis.set_xlabel(f"{measure}, %")
            axis.axvline(0, color=FAINT, zorder=0)
        axes[0].set_title("hollow: untrained, filled: trained", loc="left")


EQUAL_WIDTH = 64  # inputs of a probe; only one slot is narrower
CEILING, PROBES = "true objects", "probes.json"


class Amount(NamedTuple):
    """Images that train, choose and test the probes; images of the demos' scores."""

    train: int
    validation: int
    test: int
    scored: int


FULL, SHORT = Amount(2000, 400, 600, 300), Amount(60, 40, 40, 60)
SHORT_SHARE = 0.01

OPTIONS = {
    "binding": {
        "models": Option(list(MODELS), "Models to train and probe.", choices=list(MODELS), nargs="+"),
        "seeds": Option([0, 1, 2], "One training run and one set of probes each."),
        "share": Option(None, "Share of the demos' training images and warm-up, for all models; by default 1.", float),
        "short": Option(False, "Train for seconds, to see that all parts work."),
        "output_dir": Option(None, "Folder of all files; by default in output/."),
    }
}


class Probe(NamedTuple):
    """One measurement: state of the weights, reading, width and capacity of the probe, and labels."""

    state: str  # trained, untrained
    reading: str
    width: str  # equal, native
    capacity: str
    labels: str = "true"  # true, shuffled

    @property
    def name(self) -> str:
        """Key in a result file."""
        return ", ".join(self)


class Labels:
    """Y and F of all probed images with their offsets, true and with colours exchanged, in three parts."""

    def __init__(self, amount: Amount) -> None:
        sizes = {"train": amount.train, "val": amount.validation + amount.test}
        drawn = {split: scenes.draw_scenes(number, split, IMAGE_SIZE) for split, number in sizes.items()}
        self.sizes = [amount.train, amount.validation, amount.test]
        self.pixels, self.objects = (torch.cat([drawn[split][i] for split in sizes]) for i in (0, 1))
        support = scenes.all_objects()
        y, f = scenes.bindings(support), scenes.features(support)
        self.entropy = scenes.entropy_of_bindings(y, f)
        shuffled = scenes.exchanged(self.objects, seed=0)
        self.y = {name: scenes.bindings(one) for name, one in (("true", self.objects), ("shuffled", shuffled))}
        self.f = scenes.features(self.objects)
        self.y_offset = {name: probes.prior_logits(labels, y) for name, labels in self.y.items()}
        self.f_offset = probes.prior_logits(self.f, f.unique(dim=0))

    def split(self, values: Tensor) -> list[Tensor]:
        """Training, validation and test part."""
        return list(values.split(self.sizes))


def probes_of(readings: Mapping[str, Tensor], state: str) -> Iterator[Probe]:
    """All measurements of a model's readings in one state of its weights."""
    for name, value in readings.items():
        yield Probe(state, name, "equal", probes.MAIN)
        yield Probe(state, name, "equal", probes.MAIN, "shuffled")
        if state == "trained":
            others = (capacity for capacity in probes.CAPACITIES if capacity != probes.MAIN)
            yield from (Probe(state, name, "equal", capacity) for capacity in others)
            if value.flatten(1).shape[1] > EQUAL_WIDTH:
                yield Probe(state, name, "native", "linear")


def measure(probe: Probe, reading: Tensor, labels: Labels, seed: int) -> dict[str, float]:
    """Losses in bits of the probes for F and Y; for F, shapes and colours are separate."""
    parts = [part.flatten(1) for part in labels.split(reading)]
    z = probes.standardized(probes.projected(parts, EQUAL_WIDTH) if probe.width == "equal" else parts)

    def fit(values: Tensor, offset: Tensor) -> Tensor:
        train, validation, test = map(probes.Split, z, labels.split(values), labels.split(offset))
        return probes.fit_probe(train, validation, test, probes.CAPACITIES[probe.capacity], seed)

    f = fit(labels.f, labels.f_offset)
    return {
        "width": z[0].shape[1],
        "loss_shapes": f[: scenes.NUM_SHAPES].sum().item(),
        "loss_colours": f[scenes.NUM_SHAPES :].sum().item(),
        "loss_y": fit(labels.y[probe.labels], labels.y_offset[probe.labels]).sum().item(),
    }


def probe_model(folder: Path, seed: int, labels: Labels, found: dict[str, Any]) -> None:
    """Add the missing measurements of a model to `found` and to the file in `folder`."""
    for state in ("trained", "untrained"):
        if state not in found["finished"]:
            readings = with_one_slot(read_model(folder, seed, state == "untrained", labels.pixels), labels)
            for probe in probes_of(readings, state):
                if probe.name not in found["probes"]:
                    found["probes"][probe.name] = measure(probe, readings[probe.reading], labels, seed)
                    write_json(found, folder / PROBES)
            found["finished"].append(state)
            write_json(found, folder / PROBES)


def with_one_slot(readings: Readings, labels: Labels) -> Readings:
    """The readings and, if there are slots, the slot that binds best on the validation images."""
    if SLOTS not in readings:
        return readings
    slots, y = labels.split(readings[SLOTS]), labels.split(labels.y["true"])
    return {**readings, ONE_SLOT: readings[SLOTS][:, best_part(slots[0], y[0], slots[1], y[1])]}


def model_result(
    name: str, seed: int, share: float, amount: Amount, labels: Labels, folder: Path, run: RunCommand
) -> dict[str, Any]:
    """Result of one model: read from its folder, or trained, scored and probed now.

    Raises:
        ValueError: the folder holds results of other options.
    """
    settings = {"model": name, "seed": seed, "share": share, "images": list(amount)}
    model_folder = folder / f"{name.lower().replace(' ', '_')}_seed{seed}"
    model_folder.mkdir(parents=True, exist_ok=True)
    begun = model_folder / "settings.json"
    if begun.is_file() and json.loads(begun.read_text()) != settings:
        raise ValueError(f"{begun} names other options than {settings}; give the same options, or another --output_dir")
    write_json(settings, begun)
    path = model_folder / PROBES
    record = json.loads(path.read_text()) if path.is_file() else {"probes": {}, "finished": []}
    if len(record["finished"]) < 2:
        train_model(name, seed, share, model_folder, run)
        if "scores" not in record:
            record["scores"] = demo_scores(name, seed, amount.scored, model_folder, run)
            write_json(record, path)
        probe_model(model_folder, seed, labels, record)
    return {**settings, **record}


def ceiling(labels: Labels, seed: int, path: Path) -> dict[str, Any]:
    """The probes' result on the true objects instead of an encoder."""
    if path.is_file():
        return dict(json.loads(path.read_text()))
    reading = {CEILING: scenes.one_hot_objects(labels.objects)}
    found = {probe.name: measure(probe, reading[CEILING], labels, seed) for probe in probes_of(reading, "trained")}
    result = {"model": CEILING, "seed": seed, "probes": found}
    write_json(result, path)
    return result


def run_binding(args: argparse.Namespace, run: RunCommand) -> list[dict[str, Any]]:
    """Train, score and probe all models with all seeds, print the tables; returns the results of binding.json."""
    require_matplotlib()
    share = args.share if args.share is not None else (SHORT_SHARE if args.short else 1.0)
    if not 0 < share <= 1:
        raise ValueError(f"--share {share} is not part of the demos' images; give a number above 0, up to 1")
    amount = SHORT if args.short else FULL
    start_demo(args, "binding")
    setup_logging()
    folder, labels, results = Path(args.output_dir), Labels(amount), []
    folder.mkdir(parents=True, exist_ok=True)
    for seed in dict.fromkeys(args.seeds):
        results.append(ceiling(labels, seed, folder / f"ceiling_seed{seed}.json"))
        for name in dict.fromkeys(args.models):
            results.append(model_result(name, seed, share, amount, labels, folder, run))
    path = folder / "binding.json"
    write_json({"study": "binding", "entropy": labels.entropy, "results": results, "versions": versions()}, path)
    text = tables(results, labels.entropy)
    path.with_suffix(".md").write_text(text + "\n")
    draw(results, labels.entropy, path.with_suffix(".png"))
    say(f"{text}\n\n{path}")
    return results
