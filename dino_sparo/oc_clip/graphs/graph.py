"""A scene graph: checked, read from JSON, normalised, in canonical form. Without torch, for parsers and files.

Entities are phrases with their attributes ("large brown box"); relations are directed and join two entities.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dino_sparo.data.scenes.graphs import Relation as Relation
from dino_sparo.oc_clip.options import MAX_NODES, MAX_RELATIONS
from dino_sparo.runtime.faults import UserError

ARTICLES = ("a", "an", "the")


@dataclass(frozen=True)
class SceneGraph:
    """The entities of a caption and the relations between them.

    Attributes:
        entities: phrases. Two entities may have one phrase. Parsers may find no entity; see `normalize`.
        relations: (subject, predicate, object), with indices into the entities.
    """

    entities: tuple[str, ...]
    relations: tuple[Relation, ...] = ()

    def __post_init__(self) -> None:
        for number, phrase in enumerate(self.entities):
            if not phrase.strip():
                raise UserError(f"entity {number} is {phrase!r}; give a phrase, such as 'red apple'")
        for number, relation in enumerate(self.relations):
            ends = (relation.subject, relation.object)
            if not relation.predicate.strip() or not 0 <= min(ends) <= max(ends) < len(self.entities):
                raise UserError(
                    f"relation {number} is {relation}; give the predicate as words, and subject and object as indices "
                    f"of the {len(self.entities)} entities, counted from 0"
                )

    def to_json(self) -> dict[str, Any]:
        """The graph in the schema of `from_json`."""
        relations = [{"relationship": r.predicate, "subject": r.subject, "object": r.object} for r in self.relations]
        return {"entities": list(self.entities), "relationships": relations}

    @classmethod
    def from_json(cls, record: Any) -> "SceneGraph":
        """Read a graph in the schema of the paper's parser.

            {"entities": ["red apple", "car"],
             "relationships": [{"relationship": "left of", "subject": 0, "object": 1}]}

        Other keys, such as `caption`, are ignored. Source: OC-CLIP, appendix A.6.
        """
        try:
            entities, entries = record["entities"], record["relationships"]
            triples = [(entry["subject"], entry["relationship"], entry["object"]) for entry in entries]
        except (KeyError, TypeError):
            entities, triples = None, []
        types = {(int, str, int), *(tuple(map(type, triple)) for triple in triples)}  # JSON's true is of type bool
        if not isinstance(entities, list) or not all(isinstance(phrase, str) for phrase in entities) or len(types) > 1:
            raise UserError(
                'a scene graph is {"entities": [phrases], "relationships": [{"relationship": words, "subject": index, '
                f'"object": index}}]}}; found {record!r:.200}'
            )
        return cls(tuple(entities), tuple(Relation(*triple) for triple in triples))


class LookupCounts(NamedTuple):
    """Captions that were looked up, and the changes in their graphs.

    Attributes:
        captions: number of lookups.
        missing: captions without a graph in the file or the shard; each became one entity.
        whole_caption: captions that became one entity: the missing ones, and those without an entity.
        nodes: dropped entities, beyond the cap.
        dangling: dropped relations of dropped entities.
        loops: dropped relations of an entity with itself.
        relations: dropped relations, beyond the cap.
    """

    captions: int = 0
    missing: int = 0
    whole_caption: int = 0
    nodes: int = 0
    dangling: int = 0
    loops: int = 0
    relations: int = 0

    @classmethod
    def total(cls, counts: Iterable["LookupCounts"]) -> "LookupCounts":
        """The sum of several counts."""
        return cls(*map(sum, zip(*counts, strict=True)))

    def __str__(self) -> str:
        names = (
            *("captions", "missing", "as one entity", "entities beyond the cap", "relations of such entities"),
            *("relations of an entity with itself", "relations beyond the cap"),
        )
        shown = [(number, name) for number, name in zip(self, names, strict=True) if number or name == "captions"]
        return ", ".join(f"{number:,} {name}" for number, name in shown)


def normalize(
    graph: SceneGraph, caption: str, max_nodes: int = MAX_NODES, max_relations: int = MAX_RELATIONS
) -> tuple[SceneGraph, LookupCounts]:
    """Lower case, no leading articles, caps on the sizes, and at least one entity; returns the changes, too.

    Words are separated by single blanks. The first `max_nodes` entities and `max_relations` relations stay. Relations
    of dropped entities are dropped, and so are relations of an entity with itself: swapping their ends changes nothing.
    A graph without entities becomes one entity, the whole caption. The paper does not say how phrases are written or
    graphs bounded.
    """
    if not graph.entities and not caption.strip():
        raise UserError(f"a graph without entities becomes its caption, and the caption is {caption!r}; give its text")
    entities = tuple(without_article(spaced(phrase)) for phrase in graph.entities or (caption,))[:max_nodes]
    inside = [r for r in graph.relations if max(r.subject, r.object) < len(entities)]
    proper = [r for r in inside if r.subject != r.object]
    relations = tuple(Relation(r.subject, spaced(r.predicate), r.object) for r in proper[:max_relations])
    counts = LookupCounts(
        captions=1,
        whole_caption=int(not graph.entities),
        nodes=max(0, len(graph.entities) - max_nodes),
        dangling=len(graph.relations) - len(inside),
        loops=len(inside) - len(proper),
        relations=len(proper) - len(relations),
    )
    return SceneGraph(entities, relations), counts


def spaced(words: str) -> str:
    """Lower case, words separated by single blanks."""
    return " ".join(words.lower().split())


def without_article(phrase: str) -> str:
    """A phrase with single blanks, without its leading article; an article alone stays."""
    first, _, rest = phrase.partition(" ")
    return rest if rest and first.lower() in ARTICLES else phrase


# The canonical form. If a parser loses the difference between a true and a false caption, both have one canonical graph
# and an exact tie.


def canonical_form(graph: SceneGraph) -> SceneGraph:
    """The form that isomorphic graphs share, with one exception: entities and relations in a fixed order.

    Entities begin with the rank of their phrase as colour, which `_refined` splits by the colours around them, then by
    the number of entities that relations connect them to. As long as entities share a colour, the first of them gets a
    colour of its own. Which one does not matter if they are symmetric, as dogs without relations or in a ring are. The
    exception are graphs of equal entities that look alike without being symmetric: they may have several forms.
    """
    relations, entities = graph.relations, range(len(graph.entities))
    part = list(entities)
    for _ in entities:
        for r in relations:
            part[r.subject] = part[r.object] = min(part[r.subject], part[r.object])
    colours = _refined(graph.entities, relations)
    colours = _refined([(colours[entity], part.count(part[entity])) for entity in entities], relations)
    while shared := [colour for colour in colours if colours.count(colour) > 1]:
        first = colours.index(min(shared))
        colours = _refined([(colours[entity], entity != first) for entity in entities], relations)
    order = sorted(entities, key=colours.__getitem__)
    renumbered = sorted(Relation(colours[r.subject], r.predicate, colours[r.object]) for r in relations)
    return SceneGraph(tuple(graph.entities[entity] for entity in order), tuple(renumbered))


def comparable(graph: SceneGraph, caption: str) -> SceneGraph:
    """The canonical form of a caption's normalised graph, without caps: equal for two graphs that say the same."""
    normalised, _ = normalize(graph, caption, max(1, len(graph.entities)), len(graph.relations))
    return canonical_form(normalised)


def _refined(colours: Sequence[Any], relations: Sequence[Relation]) -> list[int]:
    """Ranks of colours, split by the colours around them until nothing changes; the order of the colours stays."""
    while True:
        around: list[list[tuple[bool, str, int]]] = [[] for _ in colours]
        for relation in relations:
            around[relation.subject].append((True, relation.predicate, colours[relation.object]))
            around[relation.object].append((False, relation.predicate, colours[relation.subject]))
        signatures = [(colour, sorted(near)) for colour, near in zip(colours, around, strict=True)]
        ordered = sorted(signatures)
        ranks = [bisect_left(ordered, signature) for signature in signatures]
        if len(set(ranks)) == len(set(colours)):
            return ranks
        colours = ranks
