"""Scene graph -> two false ones of the same entities: relations turned round, and relations between other entities.

The local loss asks that the true graph score above both; see `loss.relation_loss`.
"""

from collections.abc import Container
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dino_sparo.oc_clip.choices import RELATION_NEGATIVES
from dino_sparo.oc_clip.graphs.graph import Relation, SceneGraph, spaced


class Negatives(NamedTuple):
    """The false graphs of one graph; relation p of each is made of relation p of the true one.

    Attributes:
        swapped: subject and object exchanged.
        shuffled: subject and object drawn among the entities; a relation stays as it is if every other choice says
            something true.
        altered: relations that were to be altered; with 0 both graphs are the true one, and there is nothing to learn.
    """

    swapped: SceneGraph
    shuffled: SceneGraph
    altered: int


def draw_negatives(
    graph: SceneGraph, rng: np.random.Generator, relations: str = "all", symmetric: Container[str] = ()
) -> Negatives:
    """Exchange subject and object, and draw other subjects and objects.

        (s, o) -> (o, s)                                     swapped, equation 8
        (s, o) -> (j, i) with j != s, i != o, j != i         shuffled, equation 9; uniform over `shuffled_choices`

    The paper's j and i are any entities; j != i is our choice, since an entity has no relation with itself. With two
    entities both negatives are the same. The paper speaks of "a relationship" in section 3.3 and of indices in A.1: we
    alter all relations of a graph, or one that is drawn, the same in both negatives.

    Args:
        graph: the true graph.
        rng: the draws' source; what is drawn depends on it and on the graph alone.
        relations: a member of `RELATION_NEGATIVES`, which relations are altered.
        symmetric: predicates that are never altered, since they hold both ways, such as "next to"; the paper alters
            all.

    Raises:
        ValueError: an unknown choice of relations.
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
    turned, drawn = SceneGraph(graph.entities, tuple(swapped)), SceneGraph(graph.entities, tuple(shuffled))
    return Negatives(turned, drawn, len(altered))


def read_symmetric(path: Path) -> frozenset[str]:
    """The predicates of a text file, one per line, in the form that graphs have: lower case, single spaces.

    Raises:
        ValueError: there is no such file, it is no text, or it names no predicate.
    """
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

    For E entities of different phrases and one relation these are (E - 1)^2 - (E - 2). A pair is left out where the
    graph says the same of entities with these phrases: entities of one phrase have one slot, so such a relation would
    score exactly as the true one.
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
    """One of 0..number-1; the stream of `rng.random` is the same in every version of numpy."""
    return int(rng.random() * number)
