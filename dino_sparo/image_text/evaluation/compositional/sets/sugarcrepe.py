"""SugarCrepe: a false caption differs in one object, attribute or relation, which was replaced, swapped or added.

    replace_obj.json and six more   {"0": {"filename", "caption", "negative_caption"}}, images of COCO val2017

A folder of such files under other names is read too, one split per file. Source: Hsieh et al., "SugarCrepe: fixing
hackable benchmarks for vision-language compositionality"; SPARO, section 4.1 and tables 4 and 0.B.1.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dino_sparo.image_text.evaluation.compositional.benchmark import Benchmark, Weights, equal_means
from dino_sparo.image_text.evaluation.compositional.questions import Question, first_keys, json_reader
from dino_sparo.runtime.faults import UserError

# Kinds of false captions by the change to the true one, in the order of the paper's table -> number of questions.
COUNTS = {
    **{"replace_obj": 1652, "replace_att": 788, "replace_rel": 1406},
    **{"swap_obj": 245, "swap_att": 666, "add_obj": 2062, "add_att": 692},
}
GROUPS = {group: tuple(split for split in COUNTS if split.startswith(group)) for group in ("replace", "swap", "add")}
FILES = {split: f"{split}.json" for split in COUNTS}
COCO_IMAGES = "images of COCO val2017, http://images.cocodataset.org/zips/val2017.zip"
COCO_FOLDERS = ("val2017", "images", "coco/val2017", "coco/images/val2017")


def read(folder: Path) -> Iterator[Question]:
    """The questions of SugarCrepe's files in a folder; if there are none, of every JSON file in the folder."""
    files = {split: file for split, file in FILES.items() if (folder / file).is_file()}
    files = files or {path.stem: path.name for path in sorted(folder.glob("*.json"))}
    if not files:
        raise UserError(
            f"{folder} holds none of {', '.join(FILES.values())}, nor any other JSON file; give the folder of them"
        )
    return json_reader(files, _question, "filename, caption and negative_caption", keyed=True)(folder)


def _question(split: str, entry: Any) -> Question:
    return Question(split, (entry["filename"],), (entry["caption"], entry["negative_caption"]))


def is_scene_pairs(folder: Path) -> bool:
    """Whether files in SugarCrepe's format are by scene-pairs, whose entries name the attribute."""
    return "swapped" in first_keys(folder / FILES["swap_att"])


def is_sugarcrepe(folder: Path) -> bool:
    """Whether the files are neither of scene-pairs nor SugarCrepe++'s, nor the questions before they were refined."""
    is_pp = any("caption2" in first_keys(folder / file) for file in FILES.values())
    return folder.name != "data_unrefined" and not is_pp and not is_scene_pairs(folder)


def group_means(counts: Mapping[str, int]) -> dict[str, Weights]:
    """SPARO's average, the mean over splits, and the mean of each group of splits."""
    splits_of = {group: [split for split in splits if split in counts] for group, splits in GROUPS.items()}
    groups = {group: dict.fromkeys(splits, 1 / len(splits)) for group, splits in splits_of.items() if splits}
    return {**equal_means(counts), **groups}


BENCHMARKS = (
    Benchmark(
        "sugarcrepe",
        "SugarCrepe",
        tuple(FILES.values()),
        read,
        COCO_FOLDERS,
        f"https://github.com/RAIVNLab/sugar-crepe, {COCO_IMAGES}",
        counts=COUNTS,
        means=group_means,
        licence="MIT; images: COCO's terms",
        size="2 MB, images 0.8 GB",
        accepts=is_sugarcrepe,
        other_files="*.json",
    ),
)
