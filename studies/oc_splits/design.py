"""Kind, seed and shares of a split -> the pairs of shapes to train on, their forms, and the questions about them.

Of the 45 pairs of shapes a share is seen in training, each pair in one form. A share of these, the hard ones, is seen
in the reversed form too. A question shows a picture of one form; its false caption describes the reversed form.

    kind       form of a pair                                       reversed
    attribute  one colour each: "a red star and a blue ring"        the colours exchanged
    spatial    one order per axis: "a red star left of a blue ring"  the objects exchanged; colours are drawn freely

    test                        what is shown
    train                       pairs seen in one form alone, in that form
    seen_pair, unseen_order     the same pairs in the reversed form
    other_colours               seen pairs in other colours
    unseen_pair                 pairs that are not seen
    single                      one object; the false caption names another colour
    shape                       one object; the false caption names another shape

Captions alone do not reveal the answers. Question k of `seen_pair` (`unseen_order`) is
question k of `train` with the two captions exchanged, so a scorer that ignores the image has a mean of 50 % over the
two tests. In the other tests questions 2k and 2k + 1 are each other's reverse, so it has 50 % in each. Ties count as
wrong and lower this.

Everything is a pure function of (kind, seed, shares). The pairs of a smaller share are among those of a larger one.
Source: OC-CLIP, section 4.1 and appendix A.5, where animals with textures take the place of shapes with colours.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any, NamedTuple, TypeVar

import numpy as np

from dino_sparo.data.scenes.graphs import OPPOSITES, with_article
from dino_sparo.data.scenes.patterns import COLOURS, SHAPES
from dino_sparo.oc_clip.graphs.graph import Relation, SceneGraph

PAIRS: tuple[tuple[str, str], ...] = tuple(combinations(SHAPES, 2))
AXES = ("left of", "above")

# Kind of split -> its tests; the second test asks the questions of the first in reverse.
TESTS: dict[str, tuple[str, ...]] = {
    "attribute": ("train", "seen_pair", "other_colours", "unseen_pair", "single", "shape"),
    "spatial": ("train", "unseen_order", "unseen_pair"),
}
T = TypeVar("T")


class Thing(NamedTuple):
    """One object in a caption; an empty colour is drawn for each use."""

    colour: str
    shape: str

    @property
    def phrase(self) -> str:
        """`red star`."""
        return f"{self.colour} {self.shape}".lstrip()


class Picture(NamedTuple):
    """Content of a picture and its caption.

    Attributes:
        things: one or two, in the caption's order.
        predicate: one of scenes.graphs.RELATIONS, from the first thing to the second; None: the caption names none.
    """

    things: tuple[Thing, ...]
    predicate: str | None = None

    @property
    def caption(self) -> str:
        """Words for things and relation; backgrounds, textures and sizes are never named."""
        return f" {self.predicate or 'and'} ".join(with_article(thing.phrase) for thing in self.things)

    @property
    def graph(self) -> SceneGraph:
        """The caption's true scene graph."""
        relations = () if self.predicate is None else (Relation(0, self.predicate, 1),)
        return SceneGraph(tuple(thing.phrase for thing in self.things), relations)

    @property
    def turned(self) -> "Picture":
        """The same picture with the other thing named first."""
        return Picture(self.things[::-1], OPPOSITES[self.predicate] if self.predicate else None)

    @property
    def reversed(self) -> "Picture":
        """The other form of the pair: objects exchanged if a relation is named, else colours exchanged."""
        first, second = self.things
        if self.predicate:
            return Picture((second, first), self.predicate)
        return Picture((Thing(second.colour, first.shape), Thing(first.colour, second.shape)))


class Question(NamedTuple):
    """A picture with a true and a false caption; the false caption is given as the picture that it describes."""

    true: Picture
    false: Picture


class SeenPairs(NamedTuple):
    """Pairs of shapes trained on in one form (`once`), in both forms (`hard`), and not at all (`unseen`)."""

    once: tuple[tuple[str, str], ...]
    hard: tuple[tuple[str, str], ...]
    unseen: tuple[tuple[str, str], ...]


def stream(seed: int, *names: str | int) -> np.random.Generator:
    """Random numbers for one purpose, which the names identify."""
    keys = (name if isinstance(name, int) else zlib.crc32(name.encode()) for name in names)
    return np.random.default_rng([seed, *keys])


# Only `rng.random` is used: its stream is the same in every version of numpy.


def choose(rng: np.random.Generator, items: Sequence[T]) -> T:
    """One of the items, all equally likely."""
    return items[int(rng.random() * len(items))]


def shuffled(rng: np.random.Generator, items: Sequence[T]) -> list[T]:
    """The items in random order."""
    keys = [rng.random() for _ in items]
    return [items[i] for i in sorted(range(len(items)), key=keys.__getitem__)]


def _two_colours(rng: np.random.Generator) -> tuple[str, str]:
    first = choose(rng, COLOURS)
    return first, choose(rng, [colour for colour in COLOURS if colour != first])


@dataclass(frozen=True)
class Split:
    """One split; see the top of this module.

    Attributes:
        kind: a key of TESTS.
        seed: random seed of everything drawn.
        seen: percent of the pairs that are trained on.
        hard: percent of these that are trained on in both forms.
    """

    kind: str
    seed: int
    seen: int
    hard: int

    @cached_property
    def pairs(self) -> SeenPairs:
        """The pairs, drawn; shares are rounded down: 20, 50, 80 % of the 45 pairs are 9, 22, 36 pairs."""
        num_seen = self.seen * len(PAIRS) // 100
        num_hard = self.hard * num_seen // 100
        order = shuffled(stream(self.seed, self.kind, "pairs"), PAIRS)
        return SeenPairs(tuple(order[num_hard:num_seen]), tuple(order[:num_hard]), tuple(order[num_seen:]))

    @cached_property
    def forms(self) -> dict[tuple[str, str], tuple[Picture, ...]]:
        """Seen pair -> its forms in all training pictures: one picture for `attribute`; for `spatial` one per axis.

        The forms of `spatial` have no colours.
        """
        return {pair: self._forms_of(pair) for pair in (*self.pairs.once, *self.pairs.hard)}

    def _forms_of(self, pair: tuple[str, str]) -> tuple[Picture, ...]:
        rng = stream(self.seed, self.kind, "form", *pair)
        if self.kind == "attribute":
            return (_coloured(rng, _colourless(pair)),)
        return tuple(choose(rng, [form, form.reversed]) for form in (_colourless(pair, axis) for axis in AXES))

    @property
    def tests(self) -> tuple[str, ...]:
        """Names of the tests of this kind."""
        return TESTS[self.kind]

    @cached_property
    def training_forms(self) -> list[Picture]:
        """All forms to train on; hard pairs also have the reversed form."""
        hard = [form.reversed for pair in self.pairs.hard for form in self.forms[pair]]
        return [form for forms in self.forms.values() for form in forms] + hard

    def training_pair(self, number: int) -> Picture:
        """Training picture `number` of two objects: all forms equally often, either object named first."""
        forms = self.training_forms
        return self._worded(stream(self.seed, self.kind, "train", number), forms[number % len(forms)])

    def question(self, test: str, number: int) -> Question:
        """Question `number`, counted from 0, of a test."""
        if test in self.tests[:2]:
            question, is_reverse = self._draw("train", number), test != "train"
        else:
            question, is_reverse = self._draw(test, number // 2), number % 2 == 1
        return Question(question.false, question.true) if is_reverse else question

    def _draw(self, test: str, number: int) -> Question:
        rng = stream(self.seed, self.kind, test, "question", number)
        if test == "single":
            shape = SHAPES[number % len(SHAPES)]
            true, false = (Picture((Thing(colour, shape),)) for colour in _two_colours(rng))
            return Question(true, false)
        if test == "shape":
            true, false = (Picture((Thing(choose(rng, COLOURS), shape),)) for shape in shuffled(rng, SHAPES)[:2])
            return Question(true, Picture((Thing(true.things[0].colour, false.things[0].shape),)))
        pools = {"train": self.pairs.once, "unseen_pair": self.pairs.unseen}
        pool = pools.get(test, (*self.pairs.once, *self.pairs.hard))
        pair = pool[number % len(pool)]
        if test == "other_colours":
            (trained,) = self.forms[pair]
            form = trained
            while {thing.colour for thing in form.things} == {thing.colour for thing in trained.things}:
                form = _coloured(rng, trained)
        elif test == "unseen_pair" and self.kind == "attribute":
            form = _coloured(rng, _colourless(pair))
        elif test == "unseen_pair":
            form = _colourless(pair, choose(rng, AXES))
        else:
            form = choose(rng, self.forms[pair])
        picture = self._worded(rng, form)
        return Question(picture, picture.reversed)

    def _worded(self, rng: np.random.Generator, form: Picture) -> Picture:
        """One picture of a form: missing colours are drawn, and either thing is named first."""
        picture = form if form.things[0].colour else _coloured(rng, form)
        return choose(rng, [picture, picture.turned])

    def to_json(self) -> dict[str, Any]:
        """The draw, for split.json."""
        shares = {"split": self.kind, "seed": self.seed, "seen_percent": self.seen, "hard_percent": self.hard}
        pairs = {name: [" ".join(pair) for pair in value] for name, value in self.pairs._asdict().items()}
        numbers = {name: len(value) for name, value in pairs.items()}
        return {**shares, "num_pairs": numbers, "pairs": pairs, "forms": [form.caption for form in self.training_forms]}


def _colourless(pair: tuple[str, str], predicate: str | None = None) -> Picture:
    return Picture(tuple(Thing("", shape) for shape in pair), predicate)


def _coloured(rng: np.random.Generator, form: Picture) -> Picture:
    """The same shapes in two new colours."""
    shapes = [thing.shape for thing in form.things]
    return Picture(tuple(Thing(*both) for both in zip(_two_colours(rng), shapes, strict=True)), form.predicate)
