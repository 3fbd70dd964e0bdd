"""The built-in scenes -> small copies of nine compositional benchmarks in their published layouts.

    python -m studies drawn-sets --output_dir output/drawn-sets
    dino-sparo compositional --data_root output/drawn-sets --short markdown plot --model runs/clip/checkpoint.pth ...

Each question is about a held-out scene with two objects. Captions are those of training; a false caption has the same
words (colours, or the whole objects, exchanged), or the opposite relation. A second image differs from the first in
this alone: light and patterns are the same. VisMin's counts and other parts that scenes cannot show are left out.
"""

import argparse
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dino_sparo.data.scenes.graphs import INDEPENDENT, OPPOSITES, RELATIONS, Relation, SceneDescription, place_pair
from dino_sparo.data.scenes.images import Scenes, draw_scene
from dino_sparo.data.scenes.patterns import SHAPES
from dino_sparo.evaluation.embed.store import write_csv
from dino_sparo.image_text.evaluation.compositional.sets.scene_pairs import swapped_attribute, swapped_objects
from dino_sparo.runtime.cli import Option, positive_int, say
from dino_sparo.runtime.lock import create_output_dir


def reworded(graph: SceneDescription) -> SceneDescription:
    """The same scene, with the other object as subject: a ring right of a star -> a star left of a ring."""
    (relation,) = graph.relations
    told = Relation(relation.object, OPPOSITES[relation.predicate], relation.subject)
    return replace(graph, relations=(told,))


def moved(graph: SceneDescription) -> SceneDescription:
    """The scene with its objects on opposite sides: the picture is mirrored along the relation."""
    (relation,) = graph.relations
    axis = RELATIONS.index(relation.predicate) // 2
    flip = lambda center: tuple(1 - value if number == axis else value for number, value in enumerate(center))  # noqa: E731
    objects = tuple(replace(thing, center=flip(thing.center)) for thing in graph.objects)
    opposite = replace(relation, predicate=OPPOSITES[relation.predicate])
    return replace(graph, objects=objects, relations=(opposite,))


def other_shape(graph: SceneDescription) -> SceneDescription:
    """The scene with another shape in place of the large object's."""
    first, *others = graph.objects
    unused = [shape for shape in SHAPES if shape not in {thing.shape for thing in graph.objects}]
    return replace(graph, objects=(replace(first, shape=unused[len(first.colour) % len(unused)]), *others))


@dataclass(frozen=True)
class Sample:
    """A scene of two objects, and its pictures.

    Attributes:
        number: from 0.
        graph: what the scene shows.
        seed: of the light and the patterns, which all pictures of the sample share.
        size: side of the pictures, pixels.
    """

    number: int
    graph: SceneDescription
    seed: tuple[int, ...]
    size: int

    def picture(self, graph: SceneDescription) -> Image.Image:
        """The picture of this scene, or of a variant of it."""
        return draw_scene(graph, np.random.default_rng(self.seed), self.size)

    def save(self, path: Path, graph: SceneDescription | None = None) -> str:
        """Save a picture; returns the file's name."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.picture(graph or self.graph).save(path)
        return path.name

    @property
    def recoloured(self) -> SceneDescription:
        """The scene with exchanged colours."""
        return swapped_attribute(self.graph, "colour")


def samples(num: int, size: int, seed: int) -> Iterator[Sample]:
    """The first `num` held-out scenes with two objects."""
    scenes = Scenes(4 * num + 100, size, split="val", seed=seed, ties=INDEPENDENT)
    graphs = (scenes.scene_graph(index) for index in range(len(scenes)))
    for number, graph in zip(range(num), (graph for graph in graphs if graph.relations), strict=False):
        yield Sample(number, graph, (seed, number), size)


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file, and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def write_caption_sets(root: Path, drawn: list[Sample]) -> None:
    """One image per question: SugarCrepe++, hard positives and VALSE."""
    pp: dict[str, list[Any]] = {"swap_obj": [], "swap_att": []}
    hard: dict[str, list[Any]] = {}
    valse: dict[str, Any] = {}
    for sample in drawn:
        true, other, opposite = sample.graph.caption, reworded(sample.graph).caption, moved(sample.graph).caption
        false = {"swap_obj": swapped_objects(sample.graph).caption, "swap_att": sample.recoloured.caption}
        name = sample.save(root / "scpp" / "val2017" / f"{sample.number:012}.png")
        for split, negative in false.items():
            entry = {"filename": name, "caption": true, "caption2": other, "negative_caption": negative}
            pp[split].append({"id": sample.number, **entry})
        sample.save(root / "hard_positives" / "data" / "VG_100K" / name)
        sample.save(root / "hard_positives" / "data" / "images" / name)
        box = {"bbox_x": 0, "bbox_y": 0, "bbox_w": sample.size, "bbox_h": sample.size}
        for file, path, negative, more in (
            ("visual_genome_attribution", name, false["swap_att"], box),
            ("vl_checklist_attributes", f"data/VG_100K/{name}", other_shape(sample.graph).caption, {}),
            ("vl_checklist_relations", f"data/VG_100K/{name}", opposite, {}),
        ):
            for folder, caption in (("data", true), ("swapped_data", other)):
                case = {"image_path": path, "true_caption": caption, "false_caption": negative, **more}
                hard.setdefault(f"{folder}/{file}.json", []).append(case)
        sample.save(root / "valse" / "data" / "relations" / "test_images" / name)
        votes: dict[str, Any] = {"mturk": {"foil": 0, "caption": 3 if sample.number % 4 else 1, "other": 0}}
        valse[f"relations:{sample.number}"] = {"image_file": name, "caption": true, "foil": opposite, **votes}
    for split, entries in pp.items():
        write_json(root / "scpp" / "data" / f"{split}.json", entries)
    for path, entries in hard.items():
        write_json(root / "hard_positives" / path, entries)
    write_json(root / "valse" / "data" / "relations.json", valse)


def write_pair_sets(root: Path, drawn: list[Sample]) -> None:
    """Two images and two captions per question, as files: ColorSwap, COLA and MMVP-VLM."""
    colours, cola, rows = [], [], [["Question ID", "Type", "Statement"]]
    for sample in drawn:
        graphs = sample.graph, sample.recoloured
        captions = [graph.caption for graph in graphs]
        names = [f"img_{sample.number}_{place}.png" for place in (1, 2)]
        for graph, name in zip(graphs, names, strict=True):
            sample.save(root / "colorswap" / "images" / name, graph)
            sample.save(root / "cola" / "images" / name, graph)
        texts = {f"caption_{place}": text for place, text in enumerate(captions, 1)}
        colours.append({**texts, **{f"image_{place}": f"images/{name}" for place, name in enumerate(names, 1)}})
        urls = [f"https://example.org/vg_gqa_images/{name}" for name in names]
        cola.append([urls[0], captions[0], urls[1], captions[1]])
        for graph in (sample.graph, moved(sample.graph)):
            rows.append([str(len(rows)), "Spatial", graph.caption])
            sample.save(root / "mmvp" / "MLLM_VLM Images" / "Spatial" / f"{rows[-1][0]}.jpg", graph)
    write_json(root / "colorswap" / "test.json", colours)
    write_json(root / "cola" / "COLA_multiobjects_matching_benchmark.json", cola)
    write_csv(root / "mmvp" / "Questions.csv", rows)


def write_tables(root: Path, drawn: list[Sample]) -> None:
    """Two images and two captions per row of a table: BiVLC (.parquet) and VisMin (.arrow)."""
    import pyarrow as pa
    from pyarrow import parquet

    def cell(sample: Sample, graph: SceneDescription) -> Any:
        sample.picture(graph).save(file := io.BytesIO(), format="PNG")
        return {"bytes": file.getvalue(), "path": None}

    bivlc, vismin = [], []
    for sample in drawn:
        true, kinds = sample.graph, {"attribute": sample.recoloured, "relation": moved(sample.graph)}
        kinds["object"] = other_shape(sample.graph)
        images = {"image": cell(sample, true), "negative_image": cell(sample, sample.recoloured)}
        texts = {"caption": true.caption, "negative_caption": sample.recoloured.caption}
        bivlc.append({**images, **texts, "type": "swap", "subtype": "att"})
        category = list(kinds)[sample.number % 3]
        both = {"image_0": cell(sample, true), "image_1": cell(sample, kinds[category])}
        vismin.append({**both, "text_0": true.caption, "text_1": kinds[category].caption, "category": category})
    folders = [root / "bivlc" / "data", root / "vismin" / "data" / "test"]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.Table.from_pylist(bivlc), folders[0] / "test-00000-of-00002.parquet", row_group_size=100)
    table = pa.Table.from_pylist(vismin)
    with pa.ipc.new_stream(str(folders[1] / "data-00000-of-00003.arrow"), table.schema) as stream:
        stream.write_table(table, max_chunksize=100)


def write_spec(root: Path, drawn: list[Sample]) -> None:
    """SPEC's relative positions: four captions of an image, and four images of a caption."""
    entries: dict[str, list[Any]] = {"image2text": [], "text2image": []}
    folder = root / "spec" / "relative_spatial"
    for sample in drawn:
        keys, captions = [], []
        for predicate in RELATIONS:
            circles = place_pair(np.random.default_rng(sample.seed), predicate)
            objects = tuple(
                replace(thing, center=circle.center, radius=circle.radius)
                for thing, circle in zip(sample.graph.objects, circles, strict=True)
            )
            graph = SceneDescription(objects, (Relation(0, predicate, 1),), sample.graph.background)
            path = folder / "images" / f"{sample.number}_{predicate.replace(' ', '_')}.png"
            keys.append(f"images/{sample.save(path, graph)}")
            captions.append(graph.caption)
        label = sample.number % len(RELATIONS)
        entries["image2text"].append({"query": keys[label], "keys": captions, "label": label})
        entries["text2image"].append({"query": captions[label], "keys": keys, "label": label})
    for direction, rows in entries.items():
        write_json(folder / f"{direction}.json", rows)


def draw_sets(root: Path, num: int, size: int, seed: int = 0) -> Path:
    """Write all nine sets; returns the folder."""
    create_output_dir(root)
    drawn = list(samples(num, size, seed))
    for write in (write_caption_sets, write_pair_sets, write_tables, write_spec):
        write(root, drawn)
    return root


OPTIONS = {
    "scenes": {
        "output_dir": Option(None, "Folder to write to.", is_required=True),
        "num": Option(500, "Questions per set and part.", positive_int),
        "img_size": Option(48, "Side of the pictures in pixels.", positive_int),
        "seed": Option(0, "Another seed gives other scenes."),
    }
}


def main(args: argparse.Namespace) -> None:
    """Write the sets of the options."""
    folder = draw_sets(Path(args.output_dir), args.num, args.img_size, args.seed)
    say(f"{folder}: nine benchmarks of {args.num} scenes")
