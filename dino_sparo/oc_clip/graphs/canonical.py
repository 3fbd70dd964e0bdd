"""Scene graph -> its canonical form: the same for all graphs that differ only in the order of entities and relations.

If a parser loses the difference between a true and a false caption, both have one canonical graph and an exact tie.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from dino_sparo.oc_clip.graphs.graph import Relation, SceneGraph

# Bounds the search: trials times the size of the graph. 16 entities with 16 relations never reach the bound.
MAX_WORK = 100_000

# The colour of an entity is a number that does not depend on the order of the entities.
Colours = dict[int, int]


def canonical(graph: SceneGraph) -> SceneGraph:
    """The canonical form alone; see `canonical_form`."""
    return canonical_form(graph)[0]


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
        signatures = {entity: (colour, sorted(around[entity])) for entity, colour in colours.items()}
        ranks: list[Any] = []
        for signature in sorted(signatures.values()):
            if not ranks or ranks[-1] != signature:
                ranks.append(signature)
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
        if len(part) == 1:
            entities = part
        elif len(part) < len(colours):
            entities = _ordered(inside, relations, budget)
        else:
            shared = min((sizes[colour], colour) for colour in set(inside.values()))[1]
            first = [entity for entity in part if inside[entity] == shared]
            trials = [
                _ordered({**inside, entity: -1}, relations, budget)
                for entity in first
                if entity == first[0] or next(budget, None) is not None
            ]
            entities = min(trials, key=lambda trial: _encoding(trial, inside, relations))
        parts.append(entities)
    # Parts of one encoding can be exchanged without a difference.
    parts.sort(key=lambda entities: _encoding(entities, colours, relations))
    return order + [entity for entities in parts for entity in entities]


def _connected(entities: Sequence[int], relations: Iterable[Relation]) -> list[list[int]]:
    """The entities in groups that relations among them connect."""
    group = {entity: [entity] for entity in entities}
    for relation in relations:
        if (
            relation.subject in group
            and relation.object in group
            and (group[relation.subject] is not group[relation.object])
        ):
            joined = group[relation.subject] + group[relation.object]
            group.update(dict.fromkeys(joined, joined))
    return list({id(members): members for members in group.values()}.values())
