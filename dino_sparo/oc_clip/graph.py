"""A scene graph: checked, read from JSON, normalised, in canonical form. Without torch, for parsers and files.

Entities are phrases with their attributes ("large brown box"); relations are directed and join two entities.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dino_sparo.data.scene_graphs import Relation as Relation
from dino_sparo.oc_clip.options import MAX_NODES, MAX_RELATIONS

ARTICLES = ("a", "an", "the")
# Bounds the search for a canonical form: trials times the size of the graph. 16 entities with 16 relations never reach
# the bound.
MAX_WORK = 100_000

# The colour of an entity is a number that does not depend on the order of the entities.
Colours = dict[int, int]


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
                raise ValueError(f"entity {number} is {phrase!r}; give a phrase, such as 'red apple'")
        for number, relation in enumerate(self.relations):
            ends = (relation.subject, relation.object)
            if not relation.predicate.strip() or not 0 <= min(ends) <= max(ends) < len(self.entities):
                raise ValueError(
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
            raise ValueError(
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
        not_canonical: graphs too symmetric for a canonical form, whose ties may go unnoticed.
    """

    captions: int = 0
    missing: int = 0
    whole_caption: int = 0
    nodes: int = 0
    dangling: int = 0
    loops: int = 0
    relations: int = 0
    not_canonical: int = 0

    def plus(self, other: "LookupCounts") -> "LookupCounts":
        """The sum."""
        return LookupCounts(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def to_json(self) -> dict[str, int]:
        """For result files; `not_canonical` is there only if it is not 0."""
        return {name: number for name, number in self._asdict().items() if number or name != "not_canonical"}

    def __str__(self) -> str:
        names = (
            *("captions", "missing", "as one entity", "entities beyond the cap", "relations of such entities"),
            *("relations of an entity with itself", "relations beyond the cap"),
            "graphs too symmetric for a canonical form",
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
        raise ValueError(f"a graph without entities becomes its caption, and the caption is {caption!r}; give its text")
    entities = tuple(_without_article(phrase) for phrase in graph.entities or (caption,))[:max_nodes]
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


def _without_article(phrase: str) -> str:
    first, _, rest = spaced(phrase).partition(" ")
    return rest if rest and first in ARTICLES else spaced(phrase)


# The canonical form. If a parser loses the difference between a true and a false caption, both have one canonical graph
# and an exact tie.


def canonical_form(graph: SceneGraph) -> tuple[SceneGraph, bool]:
    """Entities sorted by (phrase, incident relations), relations renumbered and sorted.

    Two graphs have one canonical form if and only if they are isomorphic: phrases, predicates and directions agree
    under some matching of the entities.

    Entities begin with the rank of their phrase as colour. Colours are refined by the colours of the entities around
    them until no colour is split further. An entity with a colour of its own has its position. The remaining entities
    fall apart into connected parts, which are ordered one by one. Where all colours of a part are shared, each entity
    of one colour is tried as the first of the part, and the smallest encoding is taken.

    Returns:
        The form, and whether the search was complete. A graph of extreme symmetry (ten entities that are all related
        to one another) exceeds `MAX_WORK`; its form then still depends on the order of the entities.
    """
    phrases = sorted(set(graph.entities))
    colours = {entity: phrases.index(phrase) for entity, phrase in enumerate(graph.entities)}
    refined = _refined(colours, graph.relations)
    budget = iter(range(1 + MAX_WORK // (1 + len(graph.entities) + len(graph.relations))))
    order = sorted(_ordered(refined, graph.relations, budget), key=refined.__getitem__)
    form = SceneGraph(tuple(graph.entities[entity] for entity in order), tuple(_renumbered(order, graph.relations)))
    return form, next(budget, None) is not None


def _renumbered(order: Sequence[int], relations: Iterable[Relation]) -> list[Relation]:
    """The relations among these entities, by their positions in the order, sorted."""
    position = {entity: number for number, entity in enumerate(order)}
    inside = (r for r in relations if r.subject in position and r.object in position)
    return sorted(Relation(position[r.subject], r.predicate, position[r.object]) for r in inside)


def _encoding(order: Sequence[int], colours: Colours, relations: Iterable[Relation]) -> Any:
    """Equal for two parts if and only if one can take the other's place, entity by entity."""
    return [colours[entity] for entity in order], _renumbered(order, relations)


def _refined(colours: Colours, relations: Sequence[Relation]) -> Colours:
    """Colours split by the colours around them until nothing changes; the order of the colours stays."""
    while True:
        around: dict[int, list[tuple[bool, str, int]]] = {entity: [] for entity in colours}
        for relation in relations:
            if relation.subject in colours and relation.object in colours:
                around[relation.subject].append((True, relation.predicate, colours[relation.object]))
                around[relation.object].append((False, relation.predicate, colours[relation.subject]))
        signatures = {entity: (colour, tuple(sorted(around[entity]))) for entity, colour in colours.items()}
        ranks = sorted(set(signatures.values()))
        if len(ranks) == len(set(colours.values())):
            return colours
        colours = {entity: ranks.index(signature) for entity, signature in signatures.items()}


def _ordered(colours: Colours, relations: Sequence[Relation], budget: Iterator[int]) -> list[int]:
    """The entities that have a colour, in an order that depends on the colours and relations among them alone.

    `budget` has an item per trial; without items the first entity is taken untried.
    """
    colours = _refined(colours, relations)
    sizes = Counter(colours.values())
    order = sorted((entity for entity, colour in colours.items() if sizes[colour] == 1), key=colours.__getitem__)
    rest = [entity for entity in colours if sizes[colours[entity]] > 1]
    parts = []
    for part in _connected(rest, relations):
        inside = {entity: colours[entity] for entity in part}
        if len(part) < len(colours):
            parts.append(_ordered(inside, relations, budget))
            continue
        shared = min((sizes[colour], colour) for colour in set(inside.values()))[1]
        first = [entity for entity in part if inside[entity] == shared]
        trials = [
            _ordered({**inside, entity: -1}, relations, budget)
            for entity in first
            if entity == first[0] or next(budget, None) is not None
        ]
        parts.append(min(trials, key=lambda trial: _encoding(trial, inside, relations)))
    # Parts of one encoding can be exchanged without a difference.
    parts.sort(key=lambda entities: _encoding(entities, colours, relations))
    return order + [entity for entities in parts for entity in entities]


def _connected(entities: Sequence[int], relations: Iterable[Relation]) -> list[list[int]]:
    """The entities in groups that relations among them connect."""
    group = {entity: [entity] for entity in entities}
    for relation in relations:
        ends = [group.get(relation.subject), group.get(relation.object)]
        if None not in ends and ends[0] is not ends[1]:
            joined = [*group[relation.subject], *group[relation.object]]
            group.update(dict.fromkeys(joined, joined))
    return list({id(members): members for members in group.values()}.values())
