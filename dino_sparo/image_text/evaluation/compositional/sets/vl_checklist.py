"""VL-CheckList: one object, attribute or relation of a phrase replaced, in 56 files.

    Attribute/vg/color.json  [["VG_100K/2376832.jpg", {"POS": ["brown knob"], "NEG": ["teal knob"]}]]
    images in vg/, hake/, swig/

Of several texts the authors take the first. Their chart averages files within a data set, data sets within a dimension
(colour, large, action); the means over dimensions, of Attribute, Object and Relation and of these three, are ours.
Source: Zhao et al., "VL-CheckList: evaluating pre-trained vision-language models with objects, attributes and
relations"; corpus/v1, corpus.json and radar.py of their repository.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from dino_sparo.image_text.evaluation.compositional.benchmark import Benchmark, Weights
from dino_sparo.image_text.evaluation.compositional.questions import Question, json_reader, list_of
from dino_sparo.image_text.evaluation.protocol import file_of


def _files() -> dict[str, str]:
    """Split, `KIND/DIMENSION/DATA SET[/PART]`, -> file below `data/`."""
    files = {
        f"Attribute/{name}/{data}": f"Attribute/{data}/{name}.json"
        for name in ("color", "material", "size", "state", "action")
        for data in ("vg", "vaw")
    }
    for kind, dimensions in {"Size": ("large", "medium", "small"), "Location": ("center", "mid", "margin")}.items():
        folder = f"Object/{kind}"
        for name in dimensions:
            for part in ("obj", "subj"):
                files[f"Object/{name}/vg/{part}"] = f"{folder}/vg_{kind.lower()}/vg_{part}_{name}.json"
            for part in ("agent", "destination", "item", "tool"):
                path = f"{folder}/swig_{kind.lower()}/swig_{part}/swig_{part}_{name}.json"
                files[f"Object/{name}/swig/{part}"] = path
            files[f"Object/{name}/hake"] = f"{folder}/hake_{kind.lower()}/hake_obj_{name}.json"
    relations = {"action/vg": "vg/action", "action/swig": "swig_action", "action/hake": "hake_action"}
    return files | {f"Relation/{s}": f"Relation/{f}.json" for s, f in {**relations, "spatial/vg": "vg/spatial"}.items()}


FILES = _files()
IMAGES = {"vg": "vg", "vaw": "vg", "hake": "hake", "swig": "swig"}  # data set -> folder of its images

# Questions of the 46 files that we could read, at the commit in tests/reference/compositional.json.
_COUNTS = """
Attribute/color: vg 11569
Attribute/material: vg 2470 vaw 11835
Attribute/size: vg 2695 vaw 15321
Attribute/state: vg 941 vaw 4939
Attribute/action: vg 1892 vaw 3039
Object/large: vg/subj 26167 swig/destination 1520 swig/item 5070 swig/tool 4643
Object/medium: vg/obj 30725 vg/subj 20930 swig/agent 442 swig/destination 109 swig/item 742 swig/tool 1452 hake 30910
Object/small: vg/obj 13702 vg/subj 10554 swig/agent 48 swig/destination 9 swig/item 154 swig/tool 308 hake 6210
Object/center: vg/subj 25383 swig/destination 1063 swig/item 4163 swig/tool 4056
Object/mid: vg/subj 26294 swig/agent 5074 swig/destination 530 swig/item 1715 swig/tool 2226
Object/margin: vg/obj 8291 vg/subj 5974 swig/agent 260 swig/destination 45 swig/item 88 swig/tool 121 hake 10062
Relation/action: vg 12733 swig 25150
Relation/spatial: vg 30650
"""


def _counts() -> dict[str, int]:
    """Split -> number of questions."""
    counts: dict[str, int] = {}
    for line in _COUNTS.strip().splitlines():
        dimension, words = line.split(": ")
        pairs = words.split()
        counts |= {f"{dimension}/{part}": int(count) for part, count in zip(pairs[::2], pairs[1::2], strict=True)}
    return counts


COUNTS = _counts()


def _question(split: str, entry: Any) -> Question:
    """The question of an entry; the name of its image begins with `vg/`, `hake/` or `swig/`."""
    name, texts = list_of(entry, 2)
    images = IMAGES[split.split("/")[2]]
    return Question(split, (f"{images}/{name}",), (list_of(texts["POS"])[0], list_of(texts["NEG"])[0]))


def image_set(question: Question) -> str:
    """The folder of images that a question needs: `vg`, `hake` or `swig`."""
    return file_of(question.images[0]).split("/")[0]


def means(counts: Mapping[str, int]) -> dict[str, Weights]:
    """Macro average, and the mean of each kind; on every level of the splits' names all parts count the same."""
    kinds = dict.fromkeys(split.split("/")[0] for split in counts)
    splits_of = {kind: [split for split in counts if split.startswith(f"{kind}/")] for kind in kinds}
    return {"macro": nested(list(counts)), **{kind: nested(splits) for kind, splits in splits_of.items()}}


def nested(splits: Sequence[str], depth: int = 0) -> Weights:
    """Weights of a mean of means: parts of one level count the same, whatever is below them.

    Args:
        splits: names with a slash between levels.
        depth: the level to begin with.
    """
    if len(splits) == 1:
        return {splits[0]: 1.0}
    parts: dict[str, list[str]] = {}
    for split in splits:
        parts.setdefault(split.split("/")[depth], []).append(split)
    return {split: weight / len(parts) for part in parts.values() for split, weight in nested(part, depth + 1).items()}


BENCHMARKS = (
    Benchmark(
        "vl-checklist",
        "VL-CheckList",
        tuple(FILES.values()),
        json_reader(FILES, _question, "[image, {POS: [text], NEG: [text]}]"),
        (".", "images"),
        "https://github.com/om-ai-lab/VL-CheckList, DATASETS.md for the images",
        counts=COUNTS,
        means=means,
        part_of=image_set,
    ),
)
