"""Scene graph -> two false graphs of the same entities: relations swapped, and relations between other entities.

The local loss, `loss.relation_loss`, trains the true graph to score above both.
"""

from collections.abc import Container
from pathlib import Path

import numpy as np

from dino_sparo.oc_clip.choices import RELATION_NEGATIVES
from dino_sparo.oc_clip.graphs.graph import Relation, SceneGraph, spaced


def draw_negatives(
    graph: SceneGraph, rng: np.random.Generator, relations: str = "all", symmetric: Container[str] = ()
) -> tuple[SceneGraph, SceneGraph]:
    """The swapped and the shuffled graph; relation p of each is made of relation p of the true graph.

        (s, o) -> (o, s)                                     swapped, equation 8
        (s, o) -> (j, i) with j != s, i != o, j != i         shuffled, equation 9; uniform over `shuffled_choices`

    The paper's j and i are any entities; j != i is our choice, since an entity has no relation with itself. With two
    entities both negatives are the same. A relation without a false choice is not shuffled. The paper speaks of "a
    relationship" in section 3.3 and of indices in A.1: by default all relations of a graph are altered.

    Args:
        graph: the true graph.
        rng: the draws depend on it and on the graph alone.
        relations: a member of `RELATION_NEGATIVES`; with "one", one relation is altered, the same in both negatives.
        symmetric: predicates that are never altered, since they hold both ways, such as "next to"; the paper alters
            all.
    """
    if relations not in RELATION_NEGATIVES:
        raise ValueError(f"relations={relations!r}; choose one of {', '.join(RELATION_NEGATIVES)}")
    altered = [number for number, relation in enumerate(graph.relations) if relation.predicate not in symmetric]
    if relations == "one" and altered:
        altered = [altered[_drawn(rng, len(altered))]]
    swapped, shuffled = list(graph.relations), list(graph.relations)
    for number in altered:
        relation = graph.relations[number]
        swapped[number] = Relation(relation.object, relation.predicate, relation.subject)
        if choices := shuffled_choices(graph, relation):
            subject, other = choices[_drawn(rng, len(choices))]
            shuffled[number] = Relation(subject, relation.predicate, other)
    return SceneGraph(graph.entities, tuple(swapped)), SceneGraph(graph.entities, tuple(shuffled))


def read_symmetric(path: Path) -> frozenset[str]:
    """The predicates of a text file, one per line, in the form that graphs have: lower case, single spaces."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--symmetric {path} cannot be read as text: {error}") from error
    predicates = frozenset(filter(None, map(spaced, lines)))
    if not predicates:
        raise ValueError(f"--symmetric {path} names no predicate; write one per line, such as: next to")
    return predicates


def shuffled_choices(graph: SceneGraph, relation: Relation) -> list[tuple[int, int]]:
    """The (subject, object) that a shuffled relation may take.

    Their number is (E - 1)^2 - (E - 2) for E entities of different phrases and one relation. Pairs of phrases that the
    graph relates in the same way are left out: entities with one phrase have one slot, so such a relation would score
    exactly like the true one.
    """
    phrases = graph.entities
    true = {(phrases[r.subject], phrases[r.object]) for r in graph.relations if r.predicate == relation.predicate}
    entities = range(len(phrases))
    return [
        (j, i)
        for j in entities
        for i in entities
        if j != relation.subject and i != relation.object and j != i and (phrases[j], phrases[i]) not in true
    ]


def _drawn(rng: np.random.Generator, number: int) -> int:
    """One of 0..number-1; `rng.random` gives the same numbers in every version of numpy."""
    return int(rng.random() * number)
