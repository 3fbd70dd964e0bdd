"""Small files in the layout of every compositional benchmark, drawn from a seed; for tests and the recorder."""

import json
from pathlib import Path
from typing import Any

import numpy as np

COLOURS = ("red", "green", "blue")
THINGS = ("mug", "bowl", "cap", "tape", "lid", "fork", "pen", "book", "can", "plate", "lamp", "vase")
TIE_SHARE = 0.5


def write_json(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def captions(true: str, count: int) -> list[str]:
    """A true caption and different false ones."""
    return [f"a {true} thing", *(f"a {other} thing" for other in COLOURS * 2 if other != true)][:count]


def relation_entries(rng: np.random.Generator, names: tuple[str, ...], count: int) -> list[dict[str, Any]]:
    """ARO's entries; `names` are relations, and pairs of attributes where they hold a comma."""
    entries = []
    for _ in range(count):
        colour, name = str(rng.choice(COLOURS)), str(rng.choice(names))
        true, false = captions(colour, 2)
        box = {"bbox_x": 1, "bbox_y": 1, "bbox_w": 4, "bbox_h": 3}
        entry = {"image_path": f"{colour}.png", **box, "true_caption": true, "false_caption": false}
        entries.append(entry | ({"attributes": name.split(",")} if "," in name else {"relation_name": name}))
    return entries


def controlled_entries(prepositions: tuple[str, ...]) -> list[dict[str, Any]]:
    """What'sUp's: sets of four images of two objects."""
    words = {"left_of": "to the left of", "right_of": "to the right of", "in-front_of": "in front of", "on": "on"}
    words |= {"under": "under", "behind": "behind"}
    return [
        {
            "image_path": f"data/controlled/{thing}_{preposition}_table.jpeg",
            "caption_options": [
                f"A {thing} {words[other]} a table"
                for other in (preposition, *(other for other in prepositions if other != preposition))
            ],
        }
        for thing in THINGS
        for preposition in prepositions
    ]


CONTROLLED_A = ("on", "under", "left_of", "right_of")
CONTROLLED_B = ("in-front_of", "behind", "left_of", "right_of")
RELATIONS = ("above", "left of", "holding", "near")  # the last is not counted
ATTRIBUTES = ("red,old", "wet,dry", "rare,odd")


def random_scores(seed: int, questions: int, options: int) -> np.ndarray:
    """(questions, options), the true caption's first; many are tied with it."""
    rng = np.random.default_rng(seed)
    scores = rng.random((questions, options)).astype(np.float32)
    is_tied = rng.random(questions) < TIE_SHARE
    scores[is_tied, 1] = scores[is_tied].max(axis=1)
    scores[is_tied, 0] = scores[is_tied, 1]
    return scores


# Captions as `text/TAG` in the Penn Treebank's tags, as a tagger may give them.
TAGGED_CAPTIONS = (
    "A/DT red/JJ star/NN left/VBN of/IN a/DT blue/JJ ring/NN ./.",
    "Two/CD dogs/NNS do/VBP n't/RB chase/VB Tom/NNP 's/POS bigger/JJR \"/`` cats/NNS \"/'' !/.",
    "dog/NN",
    "running/VBG fast/RB",
    " ".join(["old/JJ houses/NNS and/CC the/DT"] * 9),
)


def tagged(text: str) -> list[tuple[str, str]]:
    """Words and tags of such a caption."""
    return [(word, tag) for word, _, tag in (part.rpartition("/") for part in text.split(" "))]
