"""A scene graph: checked, read from JSON, normalised.

Entities are phrases with their attributes ("large brown box"); relations are directed and join two entities. Without
torch, for parsers and files of graphs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from dino_sparo.data.scene_graphs import Relation as Relation
from dino_sparo.oc_clip.choices import MAX_NODES, MAX_RELATIONS

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
                raise ValueError(f"entity {number} is {phrase!r}; give a phrase, such as 'red apple'")
        for number, relation in enumerate(self.relations):
            if not relation.predicate.strip():
                raise ValueError(
                    f"the predicate of relation {number} is {relation.predicate!r}; give words, such as 'left of'"
                )
            for role, index in (("subject", relation.subject), ("object", relation.object)):
                if not 0 <= index < len(self.entities):
                    raise ValueError(
                        f"the {role} of relation {number} ({relation.predicate!r}) is {index}; give the index of one "
                        f"of the {len(self.entities)} entities, counted from 0"
                    )

    def to_json(self) -> dict[str, Any]:
        """The graph in the schema of `from_json`."""
        relations = [
            {"relationship": relation.predicate, "subject": relation.subject, "object": relation.object}
            for relation in self.relations
        ]
        return {"entities": list(self.entities), "relationships": relations}

    @classmethod
    def from_json(cls, record: Any) -> "SceneGraph":
        """Read a graph in the schema of the paper's parser.

            {"entities": ["red apple", "car"],
             "relationships": [{"relationship": "left of", "subject": 0, "object": 1}]}

        Other keys, such as `caption`, are ignored. Source: OC-CLIP, appendix A.6.
        """
        entities, relationships = (_list_of(record, key) for key in ("entities", "relationships"))
        for number, phrase in enumerate(entities):
            if not isinstance(phrase, str):
                raise ValueError(f"entity {number} is {phrase!r}; give a phrase in quotes")
        relations = []
        for number, entry in enumerate(relationships):
            keys = ("subject", "relationship", "object")
            values: list[Any] = [entry.get(key) if isinstance(entry, Mapping) else None for key in keys]
            if [type(value) for value in values] != [int, str, int]:  # JSON's true is an int for isinstance
                raise ValueError(
                    f"relationship {number} is {entry!r}; "
                    'give {"relationship": words, "subject": index, "object": index}'
                )
            relations.append(Relation(*values))
        return cls(tuple(entities), tuple(relations))


def _list_of(record: Any, key: str) -> list[Any]:
    if not isinstance(record, Mapping) or not isinstance(record.get(key), list):
        raise ValueError(
            f'a scene graph is {{"entities": [...], "relationships": [...]}}; there is no list {key!r} in {record!r}'
        )
    return record[key]


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
        names = {
            "missing": "missing",
            "whole_caption": "as one entity",
            "nodes": "entities beyond the cap",
            "dangling": "relations of such entities",
            "loops": "relations of an entity with itself",
            "relations": "relations beyond the cap",
            "not_canonical": "graphs too symmetric for a canonical form",
        }
        changed = [f"{getattr(self, field):,} {name}" for field, name in names.items() if getattr(self, field)]
        return ", ".join([f"{self.captions:,} captions", *changed])


def normalize(
    graph: SceneGraph, caption: str, max_nodes: int = MAX_NODES, max_relations: int = MAX_RELATIONS
) -> tuple[SceneGraph, LookupCounts]:
    """Lower case, no leading articles, caps on the sizes, and at least one entity; returns the changes, too.

    Words are separated by single blanks. The first `max_nodes` entities and `max_relations` relations stay. Relations
    of dropped entities are dropped. Relations of an entity with itself are dropped, since swapping their ends changes
    nothing. A graph without entities becomes one entity, the whole caption. The paper does not say how phrases are
    written or graphs bounded.
    """
    if max_nodes < 1 or max_relations < 0:
        raise ValueError(f"max_nodes={max_nodes}, max_relations={max_relations}; give at least 1 node and 0 relations")
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
    """The phrase in lower case, without its leading article if words follow."""
    first, _, rest = spaced(phrase).partition(" ")
    return rest if rest and first in ARTICLES else spaced(phrase)
