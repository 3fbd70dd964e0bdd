"""Each study's variants, recipe, seeds, learning rates, scores of a finished run, and rows of tables.

Controls are scores for the width of the encoding and for random weights.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from dino_sparo.demo.run import RunCommand, evaluate, read_recipe, write_pairs
from dino_sparo.evaluation.embed.store import write_csv
from dino_sparo.runtime.cli import option_words

# State of the weights -> score -> percent.
Scores = dict[str, dict[str, float]]

DINO_DEMO, CLIP_DEMO = read_recipe("dino"), read_recipe("clip")
(PROBE,) = (
    option_words({name: value for name, value in step["options"].items() if name not in ("data_path", "seed")})
    for step in DINO_DEMO["evaluations"]
    if step["command"] == "linear"
)

ENCODING_PROBE = "linear probe, encoding alone"
WIDTH_CONTROL = "20-NN, 4 blocks"
RANDOM_SLOTS, RANDOM_SLOTS_PROBE = "20-NN, random slots", "linear probe, random slots"
# The last block left out, so that they read as many blocks as SPARO does.
SHALLOW_SLOTS, SHALLOW_SLOTS_PROBE = f"{RANDOM_SLOTS}, one block less", f"{RANDOM_SLOTS_PROBE}, one block less"
# Whether the last block is left out, folder, scores.
RANDOM_CONTROLS = (
    (False, "random_slots", RANDOM_SLOTS, RANDOM_SLOTS_PROBE),
    (True, "shallow_slots", SHALLOW_SLOTS, SHALLOW_SLOTS_PROBE),
)
# Field of the encoder's configuration -> option of the recipe.
SLOT_SIZES = {"num_slots": "sparo_slots", "slot_dim": "sparo_slot_dim", "key_dim": "sparo_key_dim"}
RANDOM_READERS = ("cls", "gap", "sparo")  # the variants whose blocks are also read by random slots


def with_random_slots(weights: Path | str, folder: Path, seed: int, one_block_less: bool = False) -> Path:
    """Checkpoint of the trained blocks with a randomly initialized SPARO read-out: wide, untrained slots.

    With `sparo` the new read-out replaces the trained one. With `one_block_less` it replaces the last block of `cls` or
    `gap`; otherwise all their blocks are kept. The checkpoint is written to a subfolder of `folder`.
    """
    from dino_sparo.evaluation.encoders import OTHER_SEED, trained_encoder, untrained_encoder
    from dino_sparo.weights.entries import encoder_description
    from dino_sparo.weights.folder import save_checkpoint

    source = trained_encoder(str(weights))
    path = folder / ("shallow_slots" if one_block_less else "random_slots") / "checkpoint.pth"
    base = source.encoder.config
    sizes: Any = {name: int(str(DINO_DEMO["training"][option])) for name, option in SLOT_SIZES.items()}
    config = replace(base, readout="sparo", replace_block=base.replaces_block or one_block_less, **sizes)
    encoder = untrained_encoder(config, seed + OTHER_SEED).encoder
    blocks, names = source.encoder.backbone.state_dict(), encoder.backbone.state_dict()
    encoder.backbone.load_state_dict({name: blocks[name] for name in names})
    path.parent.mkdir(exist_ok=True)
    description = encoder_description(config, source.mean, source.std)
    save_checkpoint({"teacher": encoder.state_dict(), "encoder": description}, path)
    return path


def dino_scores(folder: Path, variant: str, seed: int, data: str, run: RunCommand) -> Scores:
    """20-NN and linear probes of the trained and of the untrained encoder of a run, whose folder is given.

    The paper's probe reads four layers, whose width differs between encoders; `ENCODING_PROBE` reads the encoding
    alone. `DINO_CONTROLS` has encodings as wide as SPARO's.
    """
    shared = option_words({"data_path": data, "device": "cpu", "seed": seed, "num_workers": 1, "img_size": 32})

    def knn(path: Path, part: str, *words: str) -> float:
        place = option_words({"pretrained_weights": path, "output_dir": folder / part})
        return float(run("knn", [*shared, *place, *words, "--nb_knn", "20"])["results"][0]["top1"])

    def probe(path: Path, part: str, *words: str) -> float:
        place = option_words({"pretrained_weights": path, "output_dir": folder / part})
        return float(run("linear", [*shared, *place, *words, *PROBE])["best"]["top1"])

    path, alone, four = folder / "checkpoint.pth", ("--n_last_blocks", "1"), ("--n_last_blocks", "4")

    def measures(*state: str) -> dict[str, float]:
        scores = {
            "20-NN": knn(path, "encoding", *state),
            "linear probe": probe(path, "blocks", *state),
            ENCODING_PROBE: probe(path, "encoding", *state, *alone),
        }
        return scores | ({WIDTH_CONTROL: knn(path, "blocks", *state, *four)} if variant == "cls" else {})

    found = {"untrained": measures("--untrained"), "trained": measures()}
    for one_block_less, name, nearest, linear in RANDOM_CONTROLS:
        if variant in RANDOM_READERS and not (one_block_less and variant == "sparo"):
            random = with_random_slots(path, folder, seed, one_block_less)
            found["trained"] |= {nearest: knn(random, name), linear: probe(random, name, *alone)}
    return found


def clip_scores(folder: Path, variant: str, seed: int, data: str, run: RunCommand) -> Scores:
    """Zero-shot accuracy, and accuracy on true against swapped captions."""
    data_path, pairs = data.split(maxsplit=1)
    values = {"images": data_path, "pairs": pairs}
    return {"trained": evaluate(CLIP_DEMO, variant, folder, values, "cpu", run)}


@dataclass(frozen=True)
class Study:
    """A comparison of variants that differ in a few options and share all others.

    Attributes:
        question: shown in `--help`.
        command: training command.
        commands: variant -> its training command, where this is another one.
        variants: name -> options of this variant; None leaves an option of the recipe out.
        baseline: variant that the others are compared with.
        also: name -> (variant, learning rate): rows at a rate that was not chosen.
        controls: name -> (variant, score of a table -> score of the variant that replaces it).
        control_scores: scores that only controls show.
        differences: (row, other row), controls included: the second is subtracted from the first; by default every row
            is compared with the baseline.
        recipe: options that all variants share, the budget included.
        seeds: one run of each variant for each seed.
        learning_rates: candidates, of which each variant takes the best.
        choose: last line of log.txt -> quality of a learning rate; larger is better.
        prepare: (--data_path, folder, run of a command) -> (training data, evaluation data).
        evaluate: (folder, variant, seed, evaluation data, run of a command) -> all scores.
    """

    question: str
    command: str
    variants: Mapping[str, Mapping[str, object]]
    baseline: str
    recipe: Mapping[str, object]
    seeds: Sequence[int]
    learning_rates: Sequence[float]
    choose: Callable[[Mapping[str, Any]], float]
    prepare: Callable[[str | None, Path, RunCommand], tuple[str, str]]
    evaluate: Callable[[Path, str, int, str, RunCommand], Scores]
    commands: Mapping[str, str] = field(default_factory=dict)
    also: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    controls: Mapping[str, tuple[str, Mapping[str, str]]] = field(default_factory=dict)
    control_scores: Sequence[str] = ()
    differences: Sequence[tuple[str, str]] = ()

    def options(self, variant: str, lr: float, seed: int) -> dict[str, str]:
        """All options of a run except its data and its folder; several values of one are words of a text."""
        options = {**self.recipe, **self.variants[variant], "lr": lr, "seed": seed, "device": "cpu"}
        options = {name: " ".join(value) if isinstance(value, list) else value for name, value in options.items()}
        return {name: str(value) for name, value in options.items() if name != "data_path" and value is not None}

    def quality(self, result: Mapping[str, Any]) -> float:
        """Quality of a run that chooses a learning rate: `choose` of its last epoch; -inf if it diverged."""
        return -math.inf if "diverged" in result else self.choose(result["epochs"][-1])

    def with_epochs(self, epochs: int) -> "Study":
        """The same study with another number of epochs."""
        return replace(self, recipe={**self.recipe, "epochs": epochs})


# The seed of the runs that choose the learning rate; it is none of the reported ones.
CHOICE_SEED = 100
DINO_READOUTS = {name: {"readout": name} for name in RANDOM_READERS}
FOUR_BLOCKS, SLOTS, ONE_BLOCK_LESS = "4 blocks", "random slots", "random slots, one block less"
# Control -> column of the tables -> the score that stands in it. The class tokens of four blocks of `cls` are as wide
# as SPARO's encoding in these recipes: 512 numbers.
CONTROLS = {
    FOUR_BLOCKS: {"20-NN": WIDTH_CONTROL, ENCODING_PROBE: "linear probe"},
    SLOTS: {"20-NN": RANDOM_SLOTS, ENCODING_PROBE: RANDOM_SLOTS_PROBE},
    ONE_BLOCK_LESS: {"20-NN": SHALLOW_SLOTS, ENCODING_PROBE: SHALLOW_SLOTS_PROBE},
}


def controls_of(row: str, *names: str) -> dict[str, tuple[str, dict[str, str]]]:
    """The controls of a row of the tables, as `Study.controls`."""
    return {f"{row}, {name}": (row, CONTROLS[name]) for name in names}


DINO_CONTROLS = controls_of("cls", *CONTROLS) | controls_of("gap", SLOTS, ONE_BLOCK_LESS) | controls_of("sparo", SLOTS)
DINO_DIFFERENCES = (
    *(("cls, 4 blocks", "cls"), ("gap", "cls"), ("sparo", "cls"), ("sparo", "gap"), ("sparo", "cls, 4 blocks")),
    *(("sparo", f"{name}, {SLOTS}") for name in DINO_READOUTS),
    *(("sparo", f"{name}, {ONE_BLOCK_LESS}") for name in ("cls", "gap")),
)
DINO_TABLES: Any = {
    "controls": DINO_CONTROLS,
    "control_scores": (WIDTH_CONTROL, RANDOM_SLOTS, RANDOM_SLOTS_PROBE, SHALLOW_SLOTS, SHALLOW_SLOTS_PROBE),
    "differences": DINO_DIFFERENCES,
}
# In the scenes the choice gave `cls` another rate than the others; this row and its controls have theirs.
EQUAL_RATE = "cls, rate 0.008"
EQUAL_RATE_CONTROLS = controls_of(EQUAL_RATE, *CONTROLS)
EQUAL_RATE_DIFFERENCES = (
    *(("sparo", EQUAL_RATE), ("gap", EQUAL_RATE)),
    *(("sparo", control) for control in EQUAL_RATE_CONTROLS),
)


def _built_in(train: str, evaluated: str, data_path: str | None, folder: Path, run: RunCommand) -> tuple[str, str]:
    """`prepare` for scenes, which need no files."""
    if data_path:
        raise ValueError(f"--data_path {data_path} is not used: this study draws its own images; leave it out")
    return train, evaluated


def _photographs(data_path: str | None, folder: Path, run: RunCommand) -> tuple[str, str]:
    """`prepare` for class folders in train/ and val/; 5,000 images of each, balanced over classes, are evaluated."""
    if not data_path:
        raise ValueError(
            "this study needs photographs; give --data_path with the class folders of CIFAR-10 in train/ and val/"
        )
    rows = [("path", "label", "split")]
    for split, number in (("train", 2500), ("val", 500)):
        for label in sorted(path for path in Path(data_path, split).iterdir() if path.is_dir()):
            paths = sorted(label.iterdir())
            if len(paths) != number:
                raise ValueError(
                    f"{label} has {len(paths)} files; this study takes {number} photographs of each class in {split}/ "
                    f"(docs/small_photographs.md makes such folders)"
                )
            rows += [(str(path.resolve()), label.name, split) for path in paths[:500]]
    table = folder / "evaluated.csv"
    write_csv(table, rows)
    return str(Path(data_path, "train")), str(table)


def _scenes_with_captions(data_path: str | None, folder: Path, run: RunCommand) -> tuple[str, str]:
    """`prepare` for scenes with captions; writes a folder of true and false captions."""
    train, evaluated = _built_in(CLIP_DEMO["training"]["data_path"], "scenes:4000:48", data_path, folder, run)
    pairs = folder / "pairs"
    if not pairs.exists():
        write_pairs(pairs, 2000, run)
    return train, f"{evaluated} {pairs}"


# The demo's recipe when the results were measured; today's has KoLeo, and fewer and larger steps.
DINO_RECIPE = {name: value for name, value in DINO_DEMO["training"].items() if name != "koleo_weight"}
DINO_RECIPE |= {"batch_size_per_gpu": 16, "epochs": 7}
SHARED_DINO = {**DINO_RECIPE, "precision": "fp32", "num_workers": "1"}

CLIP_RECIPE = {name: value for name, value in CLIP_DEMO["training"].items() if not name.startswith("zero_shot")}
CLIP_RECIPE |= {"precision": "fp32", "val_share": "0.04"}

SCENES = partial(_built_in, "scenes:10000:48", "scenes:4000:48")
DINO_STUDY: Any = partial(
    Study,
    command="train",
    choose=lambda epoch: epoch["knn_20"],
    evaluate=dino_scores,
)

STUDIES: dict[str, Study] = {
    "scenes": DINO_STUDY(
        question="DINO on the built-in scenes: read-outs cls, gap and sparo",
        variants=DINO_READOUTS,
        baseline="cls",
        recipe={**SHARED_DINO, "epochs": 4},
        seeds=range(5),
        learning_rates=(0.002, 0.004, 0.008),
        prepare=SCENES,
        also={EQUAL_RATE: ("cls", 0.008)},
        **{
            **DINO_TABLES,
            "controls": {**DINO_CONTROLS, **EQUAL_RATE_CONTROLS},
            "differences": (*DINO_DIFFERENCES, *EQUAL_RATE_DIFFERENCES),
        },
    ),
    "cifar10": DINO_STUDY(
        question="DINO on CIFAR-10 photographs: read-outs cls, gap and sparo",
        variants=DINO_READOUTS,
        baseline="cls",
        # Patches of 4 of 32 pixels: 36 tokens in a global crop, 9 in a local one, 64 where the encoder is evaluated.
        recipe={**SHARED_DINO, "patch_size": 4, "global_crops_size": 24, "local_crops_size": 12, "epochs": 2},
        seeds=range(3),
        learning_rates=(0.002, 0.004, 0.008),
        prepare=_photographs,
        **DINO_TABLES,
    ),
    "slots": DINO_STUDY(
        question="DINO + SPARO on the built-in scenes: number L and width V of the slots",
        variants={
            f"L{slots}_V{dim}": {"readout": "sparo", "sparo_slots": slots, "sparo_slot_dim": dim}
            for slots in (4, 16, 64)
            for dim in (8, 32)
        },
        baseline="L16_V32",
        recipe={**SHARED_DINO, "epochs": 4},
        seeds=range(2),
        learning_rates=(0.004,),
        prepare=SCENES,
    ),
    "objectives": DINO_STUDY(
        question="SPARO on 2,000 built-in scenes, a short training: DINO, DINO with KoLeo, SimDINO",
        variants={
            "dino": {"readout": "sparo"},
            "dino_koleo": {"readout": "sparo", "koleo_weight": 0.1},
            "simdino": {"readout": "sparo", "out_dim": None, "freeze_last_layer": None},
        },
        commands={"simdino": "train-simdino"},
        baseline="dino",
        recipe={**SHARED_DINO, "epochs": 3},
        seeds=range(3),
        learning_rates=(0.004,),
        prepare=partial(_built_in, "scenes:2000:48", "scenes:2000:48"),
    ),
    "clip": Study(
        question="CLIP on the captions of the built-in scenes: read-outs cls, gap_image and sparo",
        command="train-clip",
        variants={name: {"readout": name} for name in ("cls", "gap_image", "sparo")},
        baseline="cls",
        differences=(("gap_image", "cls"), ("sparo", "cls"), ("sparo", "gap_image")),
        recipe=CLIP_RECIPE,
        seeds=range(3),
        learning_rates=(0.00075, 0.0015, 0.003),
        choose=lambda epoch: -epoch["val_loss"],
        prepare=_scenes_with_captions,
        evaluate=clip_scores,
    ),
}
