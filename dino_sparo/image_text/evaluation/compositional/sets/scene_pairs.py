"""The built-in scenes -> true and false captions in SugarCrepe's format, with their images: `dino-sparo scene-pairs`.

    dino-sparo scene-pairs --output_dir output/scene-pairs
    dino-sparo compositional --data_root output/scene-pairs --pretrained_weights output/checkpoint.pth

Only scenes with two objects are taken, and words only swapped: a caption and its negative have the same words, so that
the words alone do not give away the answer. Files, by what is exchanged between the two objects of a scene:

    swap_obj.json    the whole noun phrases:  a red striped star left of a blue dotted ring on sand
                                              a blue dotted ring left of a red striped star on sand
    swap_att.json    colours or textures:     a blue striped star left of a red dotted ring on sand
    images/          one PNG per scene

The same options write the same files.
"""

import argparse
import json
import logging
from dataclasses import replace
from itertools import islice
from pathlib import Path

from dino_sparo.data.scenes.graphs import INDEPENDENT, SceneDescription
from dino_sparo.data.scenes.images import DEFAULT_IMAGE_SIZE, Scenes
from dino_sparo.image_text.evaluation.compositional.benchmark import Benchmark
from dino_sparo.image_text.evaluation.compositional.sets.sugarcrepe import is_scene_pairs, read
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.lock import create_output_dir
from dino_sparo.runtime.logs import setup_logging

logger = logging.getLogger(__name__)

# A scene has two objects half of the time.
SCENES_PER_PAIR = 4
Entry = dict[str, str]


def swapped_objects(graph: SceneDescription) -> SceneDescription:
    """The graph with its two objects exchanged: each object takes the position of the other object in the sentence."""
    relation = graph.relations[0]
    return replace(graph, relations=(replace(relation, subject=relation.object, object=relation.subject),))


def swapped_attribute(graph: SceneDescription, attribute: str) -> SceneDescription:
    """The graph with an attribute, `colour` or `texture`, exchanged between its two objects."""
    pairs = zip(graph.objects, graph.objects[::-1], strict=True)
    exchanged = tuple(replace(one, **{attribute: getattr(other, attribute)}) for one, other in pairs)
    return replace(graph, objects=exchanged)


def scene_pairs(scenes: Scenes, num_pairs: int) -> tuple[list[int], dict[str, dict[str, Entry]]]:
    """False captions for the first scenes that have two objects.

    Colours and textures are exchanged in turns, except where both objects have the same texture.

    Returns:
        Numbers of the scenes, and for each file its entries by number.

    Raises:
        ValueError: there are fewer than `num_pairs`.
    """
    chosen: list[int] = []
    files: dict[str, dict[str, Entry]] = {"swap_obj": {}, "swap_att": {}}
    graphs = ((index, scenes.scene_graph(index)) for index in range(len(scenes)))
    related = ((index, graph) for index, graph in graphs if graph.relations)
    for number, (index, graph) in enumerate(islice(related, num_pairs)):
        first, second = graph.objects
        attribute = "texture" if number % 2 and first.texture != second.texture else "colour"
        entry = {"filename": f"{index:06d}.png", "caption": graph.caption}
        files["swap_obj"][str(number)] = {**entry, "negative_caption": swapped_objects(graph).caption}
        negative = swapped_attribute(graph, attribute).caption
        files["swap_att"][str(number)] = {**entry, "negative_caption": negative, "swapped": attribute}
        chosen.append(index)
    if len(chosen) < num_pairs:
        raise UserError(f"num_pairs={num_pairs}, but only {len(chosen)} of {len(scenes)} scenes have two objects")
    return chosen, files


def write_scene_pairs(
    folder: Path, num_pairs: int = 1000, image_size: int = DEFAULT_IMAGE_SIZE, split: str = "val", seed: int = 0
) -> Path:
    """Write entries and images of `num_pairs` scenes; returns the folder."""
    scenes = Scenes(SCENES_PER_PAIR * num_pairs + 100, image_size, split=split, seed=seed, ties=INDEPENDENT)
    chosen, files = scene_pairs(scenes, num_pairs)
    create_output_dir(folder / "images")
    for index in chosen:
        scenes.read(index).save(folder / "images" / f"{index:06d}.png")
    for name, entries in files.items():
        (folder / f"{name}.json").write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    logger.info("%s: %d scenes with %s", folder, num_pairs, " and ".join(files))
    return folder


def write_pairs(args: argparse.Namespace) -> None:
    """Write both files of `dino-sparo scene-pairs`."""
    setup_logging()
    folder = Path(args.output_dir)
    old = [path for pattern in ("swap_*.json", "images/*.png") for path in folder.glob(pattern)]
    if old and not args.overwrite:
        raise UserError(f"{old[0]} exists; give another --output_dir, or --overwrite to replace the pairs in {folder}")
    for path in old:
        path.unlink()
    write_scene_pairs(folder, args.num_pairs, args.img_size, args.split, args.seed)


BENCHMARKS = (
    Benchmark(
        "scene-pairs",
        "scene-pairs",
        ("swap_obj.json", "swap_att.json"),
        read,
        ("images",),
        "the command scene-pairs",
        accepts=is_scene_pairs,
    ),
    Benchmark(
        "oc-splits",
        "oc-splits",
        ("split.json",),
        lambda folder: read(folder / "tests"),
        ("tests/images",),
        "python -m studies oc-splits",
        accepts=lambda folder: (folder / "tests").is_dir(),
    ),
)
