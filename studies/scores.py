"""A finished run -> its scores, and controls for the width of the encoding and for random weights."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dino_sparo.dino.demo import PROBE
from dino_sparo.dino.demo import TRAINING as DINO_TRAINING
from dino_sparo.image_text.demos import scene_scores
from dino_sparo.runtime.demos import RunCommand, option_words

# State of the weights -> score -> percent.
Scores = dict[str, dict[str, float]]

ENCODING_PROBE = "linear probe, encoding alone"
WIDTH_CONTROL = "20-NN, 4 blocks"
RANDOM_SLOTS, RANDOM_SLOTS_PROBE = "20-NN, random slots", "linear probe, random slots"
# The last block left out, so that they read as many blocks as SPARO does.
SHALLOW_SLOTS, SHALLOW_SLOTS_PROBE = f"{RANDOM_SLOTS}, one block less", f"{RANDOM_SLOTS_PROBE}, one block less"
# Field of the encoder's configuration -> option of the recipe.
SLOT_SIZES = {"num_slots": "sparo_slots", "slot_dim": "sparo_slot_dim", "key_dim": "sparo_key_dim"}
RANDOM_READERS = ("cls", "gap", "sparo")  # the variants whose blocks are also read by random slots


@dataclass(frozen=True)
class Trained:
    """A finished training run."""

    folder: Path
    variant: str
    seed: int
    data: str


def with_random_slots(trained: Trained, one_block_less: bool = False, weights: Path | str | None = None) -> Path:
    """Checkpoint of the trained blocks with a randomly initialized SPARO read-out: wide slots that learned nothing.

    With `sparo` the new read-out replaces the trained one. With `one_block_less` it replaces the last block of `cls` or
    `gap`; otherwise all their blocks are kept. `weights` are those of the run, unless others are given.
    """
    from dino_sparo.evaluation.task import OTHER_SEED, trained_encoder, untrained_encoder
    from dino_sparo.weights.checkpoint import encoder_description
    from dino_sparo.weights.folder import save_checkpoint

    source = trained_encoder(str(weights or trained.folder / "checkpoint.pth"))
    path = trained.folder / ("shallow_slots" if one_block_less else "random_slots") / "checkpoint.pth"
    own = source.encoder.config
    sizes: Any = {name: int(str(DINO_TRAINING[option])) for name, option in SLOT_SIZES.items()}
    config = replace(own, readout="sparo", replace_block=own.replaces_block or one_block_less, **sizes)
    encoder = untrained_encoder(config, trained.seed + OTHER_SEED).encoder
    blocks, names = source.encoder.backbone.state_dict(), encoder.backbone.state_dict()
    encoder.backbone.load_state_dict({name: blocks[name] for name in names})
    path.parent.mkdir(exist_ok=True)
    description = encoder_description(config, source.mean, source.std)
    save_checkpoint({"teacher": encoder.state_dict(), "encoder": description}, path)
    return path


def dino_scores(trained: Trained, run: RunCommand, img_size: int = 32) -> Scores:
    """20-NN and linear probes of the trained and of the untrained encoder.

    The paper's probe reads four layers, whose width differs between encoders; `ENCODING_PROBE` reads the encoding
    alone. `plans.DINO_CONTROLS` has encodings as wide as SPARO's.
    """
    shared = option_words({"data_path": trained.data, "device": "cpu", "seed": trained.seed})
    shared += option_words({"num_workers": 1, "img_size": img_size})

    def knn(path: Path, folder: str, *words: str) -> float:
        place = option_words({"pretrained_weights": path, "output_dir": trained.folder / folder})
        return float(run("knn", [*shared, *place, *words, "--nb_knn", "20"])["results"][0]["top1"])

    def probe(path: Path, folder: str, *words: str) -> float:
        place = option_words({"pretrained_weights": path, "output_dir": trained.folder / folder})
        return float(run("linear", [*shared, *place, *words, *PROBE])["best"]["top1"])

    path, alone, four = trained.folder / "checkpoint.pth", ("--n_last_blocks", "1"), ("--n_last_blocks", "4")

    def measures(*state: str) -> dict[str, float]:
        found = {
            "20-NN": knn(path, "encoding", *state),
            "linear probe": probe(path, "blocks", *state),
            ENCODING_PROBE: probe(path, "encoding", *state, *alone),
        }
        return found | ({WIDTH_CONTROL: knn(path, "blocks", *state, *four)} if trained.variant == "cls" else {})

    found = {"untrained": measures("--untrained"), "trained": measures()}
    if trained.variant in RANDOM_READERS:
        random = with_random_slots(trained)
        found["trained"] |= {
            RANDOM_SLOTS: knn(random, "random_slots"),
            RANDOM_SLOTS_PROBE: probe(random, "random_slots", *alone),
        }
    if trained.variant in RANDOM_READERS and trained.variant != "sparo":
        shallow = with_random_slots(trained, True)
        found["trained"] |= {
            SHALLOW_SLOTS: knn(shallow, "shallow_slots"),
            SHALLOW_SLOTS_PROBE: probe(shallow, "shallow_slots", *alone),
        }
    return found


def clip_scores(trained: Trained, run: RunCommand) -> Scores:
    """Zero-shot accuracy, and accuracy on true against swapped captions."""
    data_path, pairs = trained.data.split()
    return {"trained": scene_scores(trained.folder, data_path, Path(pairs), "cpu", run)}
