"""A finished run -> its scores, with the controls that tell what width and random weights give."""

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
# Field of the encoder's configuration -> option of the recipe.
SLOT_SIZES = {"num_slots": "sparo_slots", "slot_dim": "sparo_slot_dim", "key_dim": "sparo_key_dim"}
RANDOM_READERS = ("cls", "gap", "sparo")  # the variants whose blocks are also read by random slots


@dataclass(frozen=True)
class Trained:
    """A finished training run, as `Study.evaluate` gets it.

    Attributes:
        folder: that holds its checkpoint.
        variant: name of the variant.
        seed: of the run.
        data: what is evaluated, see `Study.prepare`.
    """

    folder: Path
    variant: str
    seed: int
    data: str


def with_random_slots(trained: Trained) -> Path:
    """The trained blocks, read by a SPARO that was only initialised: slots that are wide and learned nothing.

    `cls` and `gap` keep all blocks; with `sparo` the new read-out takes the place of its own.

    Returns:
        A checkpoint in a folder of its own.
    """
    from dino_sparo.checkpoint import encoder_description
    from dino_sparo.checkpoint_folder import save_checkpoint
    from dino_sparo.evaluation.protocol import OTHER_SEED, trained_encoder, untrained_encoder

    source = trained_encoder(str(trained.folder / "checkpoint.pth"))
    path = trained.folder / "random_slots" / "checkpoint.pth"
    own = source.encoder.config
    sizes: Any = {name: int(str(DINO_TRAINING[option])) for name, option in SLOT_SIZES.items()}
    config = replace(own, readout="sparo", replace_block=own.replaces_block, **sizes)
    encoder = untrained_encoder(config, trained.seed + OTHER_SEED).encoder
    encoder.backbone.load_state_dict(source.encoder.backbone.state_dict())
    path.parent.mkdir(exist_ok=True)
    description = encoder_description(config, source.mean, source.std)
    save_checkpoint({"teacher": encoder.state_dict(), "encoder": description}, path)
    return path


def dino_scores(trained: Trained, run: RunCommand, img_size: int = 32) -> Scores:
    """20-NN and linear probes, of the trained encoder and of one that was only initialised.

    The paper's probe reads four layers of every encoder, which are not equally wide; the other one reads the encoding
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

    def scores(*state: str) -> dict[str, float]:
        found = {"20-NN": knn(path, "encoding", *state), "linear probe": probe(path, "blocks", *state)}
        found[ENCODING_PROBE] = probe(path, "encoding", *state, *alone)
        return {**found, WIDTH_CONTROL: knn(path, "blocks", *state, *four)} if trained.variant == "cls" else found

    found = {"untrained": scores("--untrained"), "trained": scores()}
    if trained.variant in RANDOM_READERS:
        random = with_random_slots(trained)
        found["trained"][RANDOM_SLOTS] = knn(random, "random_slots")
        found["trained"][RANDOM_SLOTS_PROBE] = probe(random, "random_slots", *alone)
    return found


def clip_scores(trained: Trained, run: RunCommand) -> Scores:
    """Zero-shot classification, and true against swapped captions."""
    data_path, pairs = trained.data.split()
    return {"trained": scene_scores(trained.folder, data_path, Path(pairs), "cpu", run)}
