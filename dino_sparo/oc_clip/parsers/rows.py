"""Captions to parse: rows of a caption and optionally the file of its image. Images are not opened.

Any data with captions:

captions.txt                       a caption per line
table.csv, table.tsv, .jsonl       a column of captions, optionally a column of images
any other .json, .jsonl            every text under a key that captions usually have: COCO's annotations, Karpathy's
                                   splits, true and false captions of SugarCrepe, ARO, What'sUp, Winoground, ...
everything else                    data of `image_text.pairs.sources.open_pairs`: shards, scenes, class folders

Visual Genome's and GQA's annotations, with the graphs that people drew:

region_graphs.json            [{image_id, regions: [{phrase, objects: [{object_id, name}],
                                                     relationships: [{predicate, subject_id, object_id}]}]}]
train_sceneGraphs.json (GQA)  {image: {objects: {id: {name, relations: [{name, object}]}}}}

Captions follow OC-CLIP, appendix A.7: "A photo of a {region 1} and a {region 2}" for Visual Genome; for GQA "A photo of
{subject} {relation} {object}", and up to three objects for images without relations. The paper does not say how it
draws; we draw uniformly, and the draws depend on the seed and the image alone. A file is read as a whole, which takes
several times its size of memory.

GQA's format comes from its download page. Visual Genome's comes from published readers of the file; we have not seen
the file itself.
"""

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from dino_sparo.data.sources import CorruptImageError
from dino_sparo.data.sources.decode import IMAGE_EXTENSIONS
from dino_sparo.data.sources.folders import ALL
from dino_sparo.data.sources.image_source import FileSource
from dino_sparo.data.sources.tables import TABLE_ENDINGS, TableRows
from dino_sparo.image_text.pairs.sources import open_pairs
from dino_sparo.image_text.pairs.tables import CAPTIONS, IMAGES, coco_captions
from dino_sparo.oc_clip.graphs.files import hash_of, read_lines
from dino_sparo.oc_clip.graphs.graph import Relation, SceneGraph, comparable, spaced, without_article
from dino_sparo.oc_clip.parsers import Outcome, Parser
from dino_sparo.oc_clip.parsers.templates import parse_caption
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.files import parse_object, read_json
from dino_sparo.runtime.logs import progress

logger = logging.getLogger(__name__)

# For JSON that is not a table. There, "description" and "title" describe whole files.
CAPTION_KEYS = frozenset(
    (
        *("caption", "captions", "text", "sentence", "raw", "caption_0", "caption_1", "caption_options"),
        *("negative_caption", "true_caption", "false_caption", "POS", "NEG"),
    )
)
MAX_OBJECTS = 3
# Visual Genome's images come in two folders.
IMAGE_FOLDERS = ("", "VG_100K", "VG_100K_2")


class Row(NamedTuple):
    """A caption, which may be empty, and optionally the file of its image."""

    caption: str
    image: str | None = None


def open_rows(
    data_path: str,
    output_folder: Path,
    caption_key: str | None = None,
    image_key: str | None = None,
    image_folder: str | None = None,
    split: str = ALL,
) -> Iterator[Row]:
    """All rows.

    Args:
        data_path: see the list at the top of this file.
        output_folder: folder that the paths of images in the rows start from.
        caption_key: column or key of the captions; None takes the usual names, like `image_key`.
        image_folder: folder that the table's own paths start from; None: the table's folder. Rows of COCO's annotations
            have images only if it is given.
        split: rows, or part of a folder, to use.
    """
    ending = Path(data_path).suffix.lower()
    keys = CAPTION_KEYS if caption_key is None else frozenset((caption_key,))
    folder = seen_from(output_folder, image_folder or os.path.dirname(data_path))
    if not os.path.isfile(data_path) or ending not in (".txt", ".json", *TABLE_ENDINGS):
        yield from _pair_rows(data_path, output_folder, split, caption_key=caption_key, image_folder=image_folder)
    elif ending == ".txt":
        for _, _, line in read_lines(data_path):
            yield Row(line.decode("utf-8-sig", "replace").strip())
    elif ending == ".json":
        yield from _json_rows(data_path, keys, folder if image_folder else None)
    elif ending == ".jsonl" and not _is_table(data_path, caption_key):
        for number, _, line in read_lines(data_path):
            yield from map(Row, texts_in(parse_object(line, f"{data_path}:{number}"), keys))
    else:
        columns = replace(IMAGES, is_required=False).named(image_key), CAPTIONS.named(caption_key)
        for _, (image, caption) in TableRows(data_path, columns, split=split):
            yield Row(caption.strip(), os.path.join(folder, image.strip()) if image.strip() else None)


def texts_in(value: Any, keys: frozenset[str], is_caption: bool = True) -> Iterator[str]:
    """The texts under some keys anywhere in decoded JSON, except names of image files; `is_caption`: `value` counts."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from texts_in(item, keys, key in keys)
    elif isinstance(value, list):
        for item in value:
            yield from texts_in(item, keys, is_caption)
    elif isinstance(value, str) and is_caption and value.strip() and not value.lower().endswith(IMAGE_EXTENSIONS):
        yield value.strip()


def _json_rows(path: str, keys: frozenset[str], folder: str | None) -> Iterator[Row]:
    """The rows of one JSON value, which is held in memory."""
    content = read_json(path)
    if folder is not None or (isinstance(content, dict) and {"images", "annotations"} <= set(content)):
        files, captions_of, _ = coco_captions(content, path)
        for number, captions in captions_of.items():
            image = None if folder is None else os.path.join(folder, files[number])
            yield from (Row(caption, image) for caption in captions if caption)
        return
    yield from map(Row, texts_in(content, keys))


def _is_table(path: str, caption_key: str | None) -> bool:
    """Whether the first object has a column of captions."""
    first = next((parse_object(line, f"{path}:{number}") for number, _, line in read_lines(path)), {})
    return CAPTIONS.named(caption_key).find(list(first)) is not None


def _pair_rows(data_path: str, output_folder: Path, split: str, **keys: Any) -> Iterator[Row]:
    source = open_pairs(data_path, split=split, default_split="val" if split == "val" else "train", **keys)
    images = source.images if isinstance(source.images, FileSource) else None
    folder = "" if images is None else seen_from(output_folder, images.root)
    for index in range(len(source)):
        try:
            captions = source.captions_of(index)
        except CorruptImageError:
            continue  # training counts and names it
        image = None if images is None else os.path.join(folder, images.paths[index])
        yield from (Row(caption.strip(), image) for caption in captions)


def seen_from(start: Path, folder: str) -> str:
    """The relative path to a folder, so that both folders can be moved together; "" if they are the same."""
    path = os.path.relpath(os.path.realpath(folder or "."), os.path.realpath(start))
    return "" if path == "." else path


# Annotations.

Drawn = tuple[str, SceneGraph]
T = TypeVar("T")


class AnnotatedImages(Parser):
    """Captions drawn from annotations, with their graphs: rows (`images`) and parser of `command.parse_rows` in one.

    Args:
        path: the annotations.
        kind: a key of `DRAW`.
        image_folder: folder of `ID.jpg`; None: the rows have no images.
        output_folder: folder that the paths of images in the rows start from.
        seed: of the draws.
        captions_per_image: draws per image; equal ones count once.
        exclude_images: file of ids or file names of images to leave out, one per line.
    """

    def __init__(
        self,
        path: str,
        kind: str,
        image_folder: str | None,
        output_folder: Path,
        seed: int = 0,
        captions_per_image: int = 1,
        exclude_images: str | None = None,
    ) -> None:
        drawn = {"seed": seed, "captions_per_image": captions_per_image, "exclude_images": exclude_images}
        self.record = {"parser": kind, "file": os.path.basename(path), **drawn}
        self.folder, self.start = image_folder, output_folder
        self.graphs: dict[str, SceneGraph] = {}
        self.images: dict[Row, None] = {}
        excluded, counts = _stems(exclude_images), Counter[str]()
        for number, (image, content) in enumerate(progress(annotated_images(path, kind), desc=f"reading {path}")):
            counts["images"] += 1
            counts["excluded"] += image in excluded
            try:
                if image not in excluded:
                    self._draw(image, content, counts)
            except (KeyError, TypeError, AttributeError, ValueError) as error:
                raise UserError(
                    f"{path}: image {number}, {image!r}, is not annotated in the format of {kind} "
                    f"({type(error).__name__}: {error}); dino_sparo/oc_clip/parsers/rows.py describes the format"
                ) from error
        logger.info("%s: %s", path, ", ".join(f"{number:,} {name}" for name, number in counts.items()))

    def parse_all(self, captions: Iterator[str]) -> Iterator[Outcome]:
        """The graphs that the captions were drawn with."""
        return (Outcome(self.graphs[caption]) for caption in captions)

    def _draw(self, image: str, content: Any, counts: Counter[str]) -> None:
        """Draw the captions of an image; a caption that had another graph before is left out."""
        rng = np.random.default_rng([self.record["seed"], hash_of(image.encode())])
        draw = DRAW[self.record["parser"]]
        drawn = [pair for _ in range(self.record["captions_per_image"]) if (pair := draw(content, rng))]
        counts["without caption"] += not drawn
        for caption, graph in drawn:
            counts["captions"] += 1
            if comparable(self.graphs.setdefault(caption, graph), caption) == comparable(graph, caption):
                self.images[Row(caption, self._path(image))] = None
            else:
                counts["captions that had another graph before, left out"] += 1

    def _path(self, image: str) -> str | None:
        if self.folder is None:
            return None
        paths = [os.path.join(self.folder, folder, f"{image}.jpg") for folder in IMAGE_FOLDERS]
        chosen = next((path for path in paths if os.path.isfile(path)), paths[0])
        return os.path.join(seen_from(self.start, os.path.dirname(chosen)), f"{image}.jpg")


def annotated_images(path: str, kind: str) -> list[tuple[str, Any]]:
    """Id and annotations of every image of a file."""
    content = read_json(path)
    try:
        if kind == "gqa":
            return list(content.items())
        return [(str(image["image_id"]), image) for image in content]
    except (AttributeError, KeyError, TypeError) as error:
        forms = {"vg": "a list of images with image_id", "gqa": "an object with one entry per image"}
        raise UserError(f"{path} is not a file of {kind}, which is {forms[kind]}; found {content!s:.60}") from error


def draw_regions(content: Mapping[str, Any], rng: np.random.Generator) -> Drawn | None:
    """Two regions of an image of Visual Genome in one caption; None if fewer than two regions have words."""
    regions = [region for region in content["regions"] if _plain(region["phrase"])]
    if len(regions) < 2:
        return None
    chosen = _draw(rng, regions, 2)
    first, second = map(region_graph, chosen)
    start = len(first.entities)
    moved = [Relation(start + r.subject, r.predicate, start + r.object) for r in second.relations]
    graph = SceneGraph((*first.entities, *second.entities), (*first.relations, *moved))
    return "A photo of a {} and a {}".format(*(_plain(region["phrase"]) for region in chosen)), graph


def region_graph(region: Mapping[str, Any]) -> SceneGraph:
    """The graph of one region of Visual Genome; relations of an object that the region lacks are left out.

    The file keeps attributes elsewhere. So the phrase of an object is the entity of the region's phrase with the same
    noun ("white cat" for "cat"), by `templates.py`; else its name. A region without objects is one entity.
    """
    phrases = list(parse_caption(region["phrase"]).entities)
    number_of: dict[Any, int] = {}
    entities = list[str]()
    for thing in region["objects"]:
        name = spaced(str(thing["name"]))
        if not name or thing["object_id"] in number_of:
            continue
        phrase = next((phrase for phrase in phrases if f" {phrase}".endswith(f" {name}")), None)
        if phrase is not None:
            phrases.remove(phrase)
        number_of[thing["object_id"]] = len(entities)
        entities.append(phrase or name)
    relations = [
        Relation(number_of[r["subject_id"]], str(r["predicate"]).lower(), number_of[r["object_id"]])
        for r in region["relationships"]
        if r["subject_id"] in number_of and r["object_id"] in number_of and str(r["predicate"]).strip()
    ]
    return SceneGraph(tuple(entities) or (_plain(region["phrase"]),), tuple(dict.fromkeys(relations)))


def draw_relation(content: Mapping[str, Any], rng: np.random.Generator) -> Drawn | None:
    """One relation of an image of GQA, or up to three objects if it has none; None if it has no object.

    Attributes are left out, as in the paper's template.
    """
    names = {number: _plain(thing["name"]) for number, thing in content["objects"].items() if _plain(thing["name"])}
    triples = []
    for number, thing in content["objects"].items():
        listed = thing.get("relations") or []
        # The download page says a list, but its example is an object.
        for relation in listed.values() if isinstance(listed, dict) else listed:
            ends = number, str(relation["object"])
            if ends[0] != ends[1] and set(ends) <= set(names) and relation["name"].strip():
                triples.append((names[ends[0]], relation["name"].strip(), names[ends[1]]))
    if triples:
        subject, predicate, other = _draw(rng, triples, 1)[0]
        return f"A photo of {subject} {predicate} {other}", SceneGraph((subject, other), (Relation(0, predicate, 1),))
    chosen = _draw(rng, list(names.values()), min(MAX_OBJECTS, len(names)))
    return (f"A photo of {', '.join(chosen)}", SceneGraph(tuple(chosen))) if chosen else None


DRAW: dict[str, Callable[[Mapping[str, Any], np.random.Generator], Drawn | None]] = {
    "vg": draw_regions,
    "gqa": draw_relation,
}


def _draw(rng: np.random.Generator, items: Sequence[T], number: int) -> list[T]:
    """Different items; `rng.random` gives the same numbers in every version of numpy."""
    left = list(items)
    return [left.pop(int(rng.random() * len(left))) for _ in range(number)]


def _plain(phrase: str) -> str:
    """A phrase without leading article and without a stop at the end."""
    return without_article(" ".join(str(phrase).strip().rstrip(".").split()))


def _stems(path: str | None) -> set[str]:
    """Image ids of a list: file names without folder and ending."""
    lines = Path(path).read_text(encoding="utf-8-sig").splitlines() if path else []
    return {Path(line.strip()).stem for line in lines if line.strip()}
