"""A model's name and a seed -> a checkpoint, trained by a demo's recipe, the demo's scores of it, and its readings.

Readings are tokens, slots and entity slots of some images, by the trained model or an untrained one.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from dino_sparo.demo import run as demo
from dino_sparo.evaluation.embed.command import features_of
from dino_sparo.evaluation.encoders import OTHER_SEED, trained_encoder, untrained_encoder
from dino_sparo.image_text.towers import tokenize
from dino_sparo.oc_clip.load import load_oc_clip
from dino_sparo.oc_clip.model import OCCLIP, oc_clip_from_config
from dino_sparo.runtime.cli import option_words
from dino_sparo.weights.checkpoint import load_checkpoint
from studies.binding.probes import standardized
from studies.binding.scenes import PROBED_SHAPES
from studies.plans import DINO_RECIPE

NUM_DINO_TRAINING = int(str(DINO_RECIPE["data_path"]).split(":")[1])
DINO = "train"  # command
DEMO = demo.read_recipe("oc-clip")
PAIR_MODELS = {"OC-CLIP": "oc_clip", "CLIP cls": "cls", "CLIP sparo": "sparo"}  # names here and in the demo
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
    "DINO cls": Model(DINO, {**DINO_RECIPE, "readout": "cls"}, NUM_DINO_TRAINING),
    "DINO sparo": Model(DINO, {**DINO_RECIPE, "readout": "sparo"}, NUM_DINO_TRAINING),
    **{
        name: Model(options.pop("command"), {**DEMO["training"], **options}, int(DEMO["num_training_pairs"]))
        for name, options in ((name, {**DEMO["models"][key]}) for name, key in PAIR_MODELS.items())
    },
}


def train_model(name: str, seed: int, share: float, folder: Path, run: demo.RunCommand) -> None:
    """Train a model, or finish its training; a finished training returns at once.

    Args:
        name: a key of `MODELS`.
        seed: of the run.
        share: of the demo's training images and of its warmup steps; the epochs stay.
        folder: of the run; the training pairs lie in its parent folder.
        run: (command, words) -> what the command returns.
    """
    model, pairs = MODELS[name], folder.parent / "pairs"
    num_images = max(SMALLEST_NUM_IMAGES, round(share * model.num_images))
    options = {"seed": seed, "device": "cpu", "num_workers": 0, "precision": "fp32", "output_dir": folder}
    if model.command == DINO:
        options |= {"data_path": f"scenes:{num_images}:{demo.IMAGE_SIZE}", "knn_freq": 0}
    else:
        table = pairs / demo.TRAINING_TABLE
        warmup_steps = round(share * int(DEMO["training"]["warmup_steps"]))
        options |= {"data_path": table, "warmup_steps": max(1, warmup_steps)}
        if not table.is_file() or len(table.read_text().splitlines()) != num_images:
            demo.write_training_pairs(pairs, num_images)
    run(model.command, option_words({**model.options, **options}))


def demo_scores(name: str, seed: int, num_images: int, folder: Path, run: demo.RunCommand) -> dict[str, float]:
    """The demo's scores of a trained model on held-out scenes, in percent."""
    data_path = f"scenes:{num_images}:{demo.IMAGE_SIZE}"
    if MODELS[name].command == DINO:
        words = {"pretrained_weights": folder / "checkpoint.pth", "data_path": data_path, "device": "cpu", "seed": seed}
        shared = option_words({**words, "num_workers": 0, "nb_knn": 20})
        results = {"untrained": run("knn", [*shared, "--untrained"]), "trained": run("knn", shared)}
        return {f"20-NN, {state}": result["results"][0]["top1"] for state, result in results.items()}
    questions = folder.parent / "questions" / "pairs"
    if not questions.exists():
        demo.write_pairs(questions, num_images // 2, run)
    return demo.evaluate(DEMO, PAIR_MODELS[name], folder, {"images": data_path, "pairs": questions}, "cpu", run)


BATCH_SIZE = 250
# Name in our tables -> name in `features_of`.
TOKENS = {"class token": "cls", "mean of patches": "mean", "patches": "patches"}
SLOTS, ONE_SLOT, ENTITY_SLOTS = "all slots", "one slot", "entity slots"
Readings = dict[str, Tensor]  # name -> (B, parts, width)


def read_model(folder: Path, seed: int, is_untrained: bool, pixels: UInt8[Tensor, "B 3 H W"]) -> Readings:
    """All readings of a model; the untrained model has the same architecture and other random weights for each seed."""
    path = folder / "checkpoint.pth"
    subject = trained_encoder(str(path))
    names = dict(TOKENS) | ({SLOTS: "slots"} if subject.encoder.config.kind.has_slots else {})
    checkpoint = load_checkpoint(path)
    oc_clip = load_oc_clip(path, checkpoint).model if "oc_clip" in checkpoint else None
    if oc_clip is not None:
        if is_untrained:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed + OTHER_SEED)
                oc_clip = oc_clip_from_config(oc_clip.config)
        encoder, entity_slots = oc_clip.image, entity_reader(oc_clip.eval())
    else:
        if is_untrained:
            subject = untrained_encoder(subject.encoder.config, seed + OTHER_SEED, subject.mean, subject.std)
        encoder, entity_slots = subject.encoder, None

    def read(images: Float[Tensor, "B 3 H W"]) -> Readings:
        features = features_of(encoder.eval(), list(names.values()), images)
        readings = {name: features[key] for name, key in names.items()}
        return readings if entity_slots is None else {**readings, ENTITY_SLOTS: entity_slots(images)}

    shift, scale = (torch.tensor(values)[:, None, None] for values in (subject.mean, subject.std))
    with torch.no_grad():
        batches = [read((batch / 255 - shift) / scale) for batch in pixels.split(BATCH_SIZE)]
    joined = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    return {name: value if value.ndim == 3 else value[:, None] for name, value in joined.items()}


def entity_reader(model: OCCLIP) -> Callable[[Tensor], Float[Tensor, "B shapes dim"]]:
    """Images -> the slots of the entities "circle", "square", ..., each shape bound alone; the same for every image.

    An image's true phrases would give away its labels.
    """
    ids = tokenize(list(PROBED_SHAPES), model.config.text.context_length).ids
    with torch.no_grad():
        queries = model.binding.queries(model.encode_phrases(ids)[0][:, None])

    def read(images: Float[Tensor, "B 3 H W"]) -> Float[Tensor, "B shapes dim"]:
        patches = model.binding.project(*model.encode_images(images))
        return model.binding.chunk_slots(queries, patches)[:, :, 0]

    return read


def best_part(train: Float[Tensor, "B parts width"], y: Tensor, validation: Tensor, y_validation: Tensor) -> int:
    """The slot whose ridge regression leaves the smallest error of the validation images' bindings."""
    errors = []
    for part in range(train.shape[1]):
        z, z_validation = standardized([train[:, part], validation[:, part]])
        weights = torch.linalg.solve(z.t() @ z + torch.eye(z.shape[1]), z.t() @ (y - y.mean(dim=0)))
        errors.append((z_validation @ weights + y.mean(dim=0) - y_validation).square().mean().item())
    return errors.index(min(errors))
