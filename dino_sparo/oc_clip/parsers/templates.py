"""Caption -> scene graph by closed word lists, without weights.

Exact on the captions of the built-in scenes; meant for captions made from templates, as the benchmarks have them:

    a red star left of a blue ring on sand        left of(star, ring)  on(star, sand)  on(ring, sand)
    a red star and a blue ring                    two entities, no relation
    a photo of a man riding a horse               riding(man, horse)
    a box with a toy in it                        with(box, toy)  in(toy, box)

A caption is split at its relation words, "and", commas and stops. The words between are an entity with all its
attributes. Only listed words are relations: other words become part of a phrase. So does a verb or a place without an
object ("a dog running", "a bench on the left"). No words of a caption are dropped, except openings ("a photo of",
"there is"), "is" before a relation, and pronouns.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import yaml

from dino_sparo.data.scenes.graphs import RELATIONS
from dino_sparo.data.scenes.patterns import BACKGROUNDS, COLOURS
from dino_sparo.oc_clip.graphs.graph import ARTICLES, Relation, SceneGraph
from dino_sparo.oc_clip.parsers import Outcome, Parser

# The words that the parser knows: relations, and words that are no nouns. The long lists are in `words.yaml`.


def _words(text: str) -> frozenset[str]:
    """The words of a text; `_` stands for a blank within one."""
    return frozenset(word.replace("_", " ") for word in text.split())


LISTS = yaml.safe_load(Path(__file__).with_name("words.yaml").read_text(encoding="utf-8"))
WORDS = {name: _words(text) for name, text in LISTS.items()}
SIDES = _words("left right")
_POSITIONS = sorted(_words("top front back side middle center centre edge bottom corner end"))

# The longest that fits is taken.
PREPOSITIONS = (
    frozenset(
        (
            *RELATIONS,
            *(f"{word} the {side}{of}" for word in ("to", "on", "at") for side in SIDES for of in (" of", " side of")),
            *(f"{word} {the}{name} of" for word in ("in", "on", "at") for the in ("", "the ") for name in _POSITIONS),
        )
    )
    | WORDS["prepositions"]
)
VERBS, PARTICIPLES = WORDS["verbs"], WORDS["participles"]
COPULAS = _words("am are be been being is was were")
# After these "and" joins a second object ("with a hat and a coat"); after other relations it begins anew.
SHARING = _words("between eating has have having holding holds in_between wearing wears with without")

AND = _words("& and but or plus")
SPLITTING = _words(", as while")
WHICH = _words("that which who")
IT = _words("him it them")  # "her" is also a determiner
EACH_OTHER = _words("each_other herself himself itself one_another themselves")
DETERMINERS = frozenset(ARTICLES) | _words("another four her his its many some that their these this those three two")
ADJECTIVES = frozenset(COLOURS) | _words("big black brown gold gray grey large little old silver small tall young")
# Places in the picture, not things in it: they stay in the phrase.
PLACES = SIDES | _words("back background bottom center centre distance foreground front middle top")

_WORD = re.compile(r"[^\W_]+(?:['’.-][^\W_]+)*|[,;:.!?&]")
_OPENING = re.compile(
    r"\s*(?:(?:this is )?(?:an? |the )?(?:\w+ )?(?:photo|photograph|picture|image|close[- ]?up) (?:of|showing)"
    r"|there (?:is|are)|this is)\s",
    re.IGNORECASE,
)
_LONGEST = max(len(words.split()) for words in PREPOSITIONS)
_STOPS = frozenset(";:.!?")


class TemplateParser(Parser):
    """Captions -> graphs by `parse_caption`."""

    def __init__(self) -> None:
        self.record = {"parser": "templates"}

    def parse_all(self, captions: Iterator[str]) -> Iterator[Outcome]:
        """The outcome of every caption, in order."""
        return map(Outcome, map(parse_caption, captions))


def parse_caption(caption: str) -> SceneGraph:
    """The entities and relations of a caption in English, not normalised; no entity if the caption has no word.

    The subject of a relation, where several entities precede the relation:

        after "is", or after a verb or "with" and their object    the subject of the sentence
            a man riding a horse on a beach                       riding(man, horse)  on(man, beach)
        after a preposition and its object                        that object
            a mug on a table in a kitchen                         on(mug, table)  in(table, kitchen)
        entities joined by "and" before their relation            each of them
        "and" and an entity whose relation is of the same kind    that entity: a new sentence begins
            a man with a dog and a woman with a cat               with(man, dog)  with(woman, cat)
            a dog and a cat on a mat                              on(dog, mat)  on(cat, mat)
        before a background of the scenes, without article        all of it: it lies behind subject and object
            a star above a ring on snow                           above(star, ring)  on(star, snow)  on(ring, snow)

    The first rule follows the paper's prompt (appendix A.6): in "a X with a Y in Z" it is X that is in Z.
    """
    words = [word.lower() for word in _WORD.findall(_after_opening(caption))]
    clause = _Clause()
    position = 0
    while position < len(words):
        position += clause.take(words, position)
    clause.end()
    return SceneGraph(tuple(clause.phrases), tuple(clause.relations))


@dataclass
class _Clause:
    """State of reading a caption word by word.

    Attributes:
        phrases: the entities so far.
        relations: the relations so far.
        noun: words of the entity that is being read.
        predicate: a relation that waits for its object.
        subjects: entities that the sentence is about.
        current: subjects of the next relation.
        objects: objects of the last relation.
        mentioned: objects of the sentence before, the meaning of "it" if there are no objects.
        last: the last relation with an object; "" while the subjects are being listed.
        joined: whether "and" or a comma was the last word.
        is_placed: whether the last entity has a place of its own ("a bear on the left"), so that no entity joins it.
    """

    phrases: list[str] = field(default_factory=list)
    relations: list[Relation] = field(default_factory=list)
    noun: list[str] = field(default_factory=list)
    predicate: str = ""
    subjects: list[int] = field(default_factory=list)
    current: list[int] = field(default_factory=list)
    objects: list[int] = field(default_factory=list)
    mentioned: list[int] = field(default_factory=list)
    last: str = ""
    joined: bool = False
    is_placed: bool = False

    def take(self, words: list[str], position: int) -> int:
        """Read the next words; returns their number."""
        word = words[position]
        if word in _STOPS:
            self.end()
        elif word in AND and self.is_between_attributes(words[position + 1 : position + 2]):
            self.noun.append(word)
        elif word in AND or word in SPLITTING:
            self.close_noun()
            self.joined = True
        elif word in WHICH and self.noun:
            self.close_noun()
            self.current = [len(self.phrases) - 1] if self.phrases else []
            self.last = ""
        elif length := self.relation_length(words, position):
            self.begin_relation(words[position : position + length], words[position + length : position + length + 2])
            return length
        else:
            self.noun.append(word)
        return 1

    def relation_length(self, words: list[str], position: int) -> int:
        """Number of words of the relation that begins here; 0 if none does."""
        start = position
        while start < len(words) and words[start] in COPULAS:
            start += 1
        end = start
        word = words[end] if end < len(words) else ""
        is_verb = word in VERBS and self.may_be_verb(words, position, start)
        end += is_verb or (word in PARTICIPLES and _preposition_length(words, end + 1) > 0)
        while length := _preposition_length(words, end):
            end += length
        return end - position if end > start else 0

    def is_between_attributes(self, following: list[str]) -> bool:
        """Whether "and" joins two attributes of one thing, as in "a black and white cat"."""
        attributes = set(self.noun) - DETERMINERS
        return bool(attributes) and attributes <= ADJECTIVES | AND and not set(following) <= DETERMINERS

    def may_be_verb(self, words: list[str], position: int, verb: int) -> bool:
        """Whether a word in -ing follows a noun, a comma, "is", or "and" after a whole relation."""
        if verb > position:
            return True
        if self.noun:
            return not set(self.noun) <= DETERMINERS | ADJECTIVES
        follows_subject = not self.joined or bool(self.last) or words[position - 1] == ","
        return bool(self.current) and not self.predicate and follows_subject

    def begin_relation(self, words: list[str], following: list[str]) -> None:
        """Begin a relation; `words` include a leading "is"."""
        had_noun = bool(self.noun)
        is_sentence = words[0] in COPULAS
        predicate = " ".join(word for word in words if word not in COPULAS)
        self.close_noun(is_subject=self.joined and _are_parallel(self.last, predicate))
        if self.predicate:
            self.predicate = f"{self.predicate} {predicate}"
            return
        if self.last:
            if self.last in RELATIONS and predicate == "on" and _is_background(following):
                self.current = [*self.subjects, *self.objects]
            elif is_sentence or (self.joined and not had_noun) or _leads_back(self.last):
                self.current = self.subjects
            else:
                self.current = self.objects[-1:]
        self.predicate, self.joined = predicate, False

    def close_noun(self, is_subject: bool = False) -> None:
        """End the noun: an entity (of a new sentence if `is_subject`), a pronoun, or part of the entity before."""
        words, self.noun = self.noun, []
        phrase = " ".join(words)
        content = [word for word in words if word not in ARTICLES]
        if not words:
            return
        if self.predicate and phrase in IT:
            self.close_pronoun(phrase)
        elif self.predicate and self.phrases and phrase in EACH_OTHER:
            self.extend(self.current[-1:], phrase)
        elif self.predicate and self.phrases and content and set(content) <= PLACES:
            self.extend([len(self.phrases) - 1], phrase)
            self.is_placed = True
        elif phrase not in IT:
            self.add(phrase, is_subject)

    def close_pronoun(self, pronoun: str) -> None:
        """Relate the last objects to the subject of the sentence, which the pronoun means.

        Without objects the pronoun means the entity mentioned before: "a fork left of a plate and a knife right of it".
        """
        if self.current and not self.objects and not self.mentioned:
            self.extend(self.current[-1:], pronoun)
            return
        means_mentioned = self.current and not self.objects
        ends = (self.current, self.mentioned[-1:]) if means_mentioned else (self.objects, self.subjects[:1])
        self.relations += [Relation(subject, self.predicate, other) for subject, other in product(*ends)]
        self.predicate = ""

    def add(self, phrase: str, is_subject: bool = False) -> None:
        """A new entity: an object, a further object, a further subject, or the subject of a new sentence."""
        entity = len(self.phrases)
        # "in a suit and tie" is one pair, "on a mat and a cat ..." begins anew
        has_fewer_articles = bool(self.objects) and _has_article(self.phrases[-1]) and not _has_article(phrase)
        self.phrases.append(phrase)
        is_shared = has_fewer_articles or (not is_subject and (self.last in SHARING or self.last.endswith(" with")))
        if self.predicate and self.current:
            self.objects = []
            self.relate(entity)
        elif self.predicate:
            self.phrases[entity] = f"{self.predicate} {phrase}"
            self.subjects, self.current, self.predicate = [entity], [entity], ""
        elif self.joined and self.last and is_shared:
            self.predicate = self.last
            self.relate(entity)
        elif self.joined and not self.last and not self.is_placed:
            self.subjects = [*self.subjects, entity]
            self.current = [*self.current, entity]
        else:
            self.mentioned = self.objects
            self.subjects, self.current, self.objects, self.last = [entity], [entity], [], ""
        self.joined = self.is_placed = False

    def relate(self, entity: int) -> None:
        """Relate all current subjects to the entity, by the waiting relation."""
        self.relations += [Relation(subject, self.predicate, entity) for subject in self.current]
        self.objects, self.last, self.predicate = [*self.objects, entity], self.predicate, ""

    def extend(self, entities: list[int], words: str = "") -> None:
        """Append a relation without an object to the phrase of its subject, by default the last entity."""
        entity = entities[0] if entities else len(self.phrases) - 1
        self.phrases[entity] = " ".join((self.phrases[entity], self.predicate, words)).strip()
        self.predicate = ""

    def end(self) -> None:
        """End the sentence."""
        self.close_noun()
        if self.predicate and self.phrases:
            self.extend(self.current[-1:])
        elif self.predicate:
            self.phrases.append(self.predicate)
        self.predicate, self.last, self.joined, self.is_placed = "", "", False, False
        self.subjects, self.current, self.objects, self.mentioned = [], [], [], []


def _after_opening(caption: str) -> str:
    match = _OPENING.match(caption)
    rest = caption[match.end() :] if match else ""
    return rest if rest.strip() else caption


def _preposition_length(words: list[str], start: int) -> int:
    """Number of words of the longest preposition that begins here."""
    lengths = range(min(_LONGEST, len(words) - start), 0, -1)
    return next((length for length in lengths if " ".join(words[start : start + length]) in PREPOSITIONS), 0)


def _leads_back(relation: str) -> bool:
    """Whether the next relation has the subject of this one: after verbs and "with"."""
    first = relation.split()[0]
    return first in VERBS or first in PARTICIPLES or relation in SHARING


def _are_parallel(relation: str, other: str) -> bool:
    """Whether two relations have different subjects: the same words, or two verbs in -ing."""
    if not relation or not other:
        return False
    return relation == other or {relation.split()[0], other.split()[0]} <= VERBS


def _is_background(words: list[str]) -> bool:
    """Whether a caption of the scenes ends with these words."""
    return bool(words) and words[0] in BACKGROUNDS and set(words[1:]) <= _STOPS


def _has_article(phrase: str) -> bool:
    return phrase.split()[0] in DETERMINERS
