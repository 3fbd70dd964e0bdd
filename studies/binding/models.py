"""A model's name and a seed -> a checkpoint, trained by a demo's recipe, and the demo's own scores of the model."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from dino_sparo.dino.demo import TRAINING as DINO_TRAINING
from dino_sparo.image_text.demos import IMAGE_SIZE, scene_scores, write_pairs
from dino_sparo.oc_clip.demo import MODELS as PAIR_MODELS
from dino_sparo.oc_clip.demo import NUM_TRAINING, SHARED, TABLE, write_templates, write_training_pairs
from dino_sparo.runtime.demos import RunCommand, option_words

NUM_DINO_TRAINING = int(str(DINO_TRAINING["data_path"]).split(":")[1])
DINO = "train"  # command
SMALLEST_NUM_IMAGES = 64  # one batch of pairs


class Model(NamedTuple):
    """One model of the study.

    Attributes:
        command: training command.
        options: of this command, without data, seed and folder.
        num_images: training images of the demo's recipe.
    """

    command: str
    options: Mapping[str, object]
    num_images: int


MODELS = {
    "DINO cls": Model(DINO, {**DINO_TRAINING, "readout": "cls"}, NUM_DINO_TRAINING),
    "DINO sparo": Model(DINO, {**DINO_TRAINING, "readout": "sparo"}, NUM_DINO_TRAINING),
    **{
        name: Model(command, {**SHARED, **options}, NUM_TRAINING)
        for name, (command, options) in zip(("OC-CLIP", "CLIP cls", "CLIP sparo"), PAIR_MODELS.values(), strict=True)
    },
}


def train_model(name: str, seed: int, share: float, folder: Path, run: RunCommand) -> None:
    """Train a model, or finish its training; a finished one costs nothing.

    Args:
        name: a key of `MODELS`.
        seed: of the run.
        share: of the demo's training images and of its warmup steps; the epochs stay.
        folder: of the run; the training pairs lie beside it.
        run: (command, words) -> what the command returns.
    """
    model, pairs = MODELS[name], folder.parent / "pairs"
    num_images = max(SMALLEST_NUM_IMAGES, round(share * model.num_images))
    own = {"seed": seed, "device": "cpu", "num_workers": 0, "precision": "fp32", "output_dir": folder}
    if model.command == DINO:
        own |= {"data_path": f"scenes:{num_images}:{IMAGE_SIZE}", "knn_freq": 0}
    else:
        own |= {"data_path": pairs / TABLE, "warmup_steps": max(1, round(share * int(SHARED["warmup_steps"])))}
        table = pairs / TABLE
        if not table.is_file() or len(table.read_text().splitlines()) != num_images:
            write_training_pairs(pairs, num_images)
    run(model.command, option_words({**model.options, **own}))


def demo_scores(name: str, seed: int, num_images: int, folder: Path, run: RunCommand) -> dict[str, float]:
    """The demo's scores of a trained model on held-out scenes, in percent."""
    data_path = f"scenes:{num_images}:{IMAGE_SIZE}"
    if MODELS[name].command == DINO:
        words = {"pretrained_weights": folder / "checkpoint.pth", "data_path": data_path, "device": "cpu", "seed": seed}
        shared = option_words({**words, "num_workers": 0, "nb_knn": 20})
        found = {"untrained": run("knn", [*shared, "--untrained"]), "trained": run("knn", shared)}
        return {f"20-NN, {state}": result["results"][0]["top1"] for state, result in found.items()}
    questions = folder.parent / "questions" / "pairs"
    if not questions.exists():
        write_pairs(questions.parent, num_images // 2, run)
    templates = str(write_templates(folder)) if name == "OC-CLIP" else "auto"
    return scene_scores(folder, data_path, questions, "cpu", run, templates)
