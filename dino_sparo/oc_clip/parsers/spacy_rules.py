"""Caption -> scene graph by the dependency tree of spaCy: noun phrases are entities, paths through prepositions and
verbs are relations.

The rules read plain records (text, part of speech, dependency, head), so that they can be tested without spaCy.
`SpacyParser` makes the records. Labels are those of spaCy's English models (ClearNLP's dependencies).
"""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

from dino_sparo.image_text.towers import spacy_documents, spacy_record
from dino_sparo.oc_clip.graphs.graph import Relation, SceneGraph
from dino_sparo.oc_clip.parsers import Outcome, Parser
from dino_sparo.oc_clip.parsers.templates import COPULAS, PLACES

NOUNS = ("NOUN", "PROPN")
SUBJECTS = ("nsubj", "nsubjpass")
OBJECTS = ("dobj", "obj", "pobj", "dative")
PREPOSITIONS = ("prep", "agent")
# Dependents before a noun that are part of its phrase.
ATTRIBUTES = ("det", "amod", "compound", "nummod", "poss", "nmod", "advmod", "quantmod", "npadvmod", "case", "punct")
# Dependents of an attribute: "red and white", "man's".
ATTRIBUTES_AFTER = ("cc", "conj", "case", "punct")
RELATIVE = ("that", "which", "who", "whom")
# A verb with one of these has the subject of the verb or the noun above it.
BORROWING = ("acl", "relcl", "conj", "xcomp", "advcl", "ccomp", "pcomp", "prep")


class Word(NamedTuple):
    """One token of a parsed caption.

    Attributes:
        text: as written.
        pos: coarse part of speech, such as NOUN.
        dep: label of the dependency.
        head: index of the token on which the word depends; a root depends on itself.
    """

    text: str
    pos: str
    dep: str
    head: int


class SpacyParser(Parser):
    """Captions -> graphs with a model of spaCy's, which is loaded when the first caption is parsed."""

    def __init__(self) -> None:
        self.record = {"parser": "spacy", **spacy_record("graphs of the parser spacy")}

    def parse_all(self, captions: Iterator[str]) -> Iterator[Outcome]:
        """The outcome of every caption, in order; spaCy parses in batches, which is faster."""
        for document in spacy_documents(captions):
            words = [Word(token.text, token.pos_, token.dep_, token.head.i) for token in document]
            yield Outcome(graph_of_words(words))


def graph_of_words(words: Sequence[Word]) -> SceneGraph:
    """The entities and relations of a dependency tree; no entity if there is no noun.

        entity      noun with the attributes before it, and "of" with its noun ("cup of coffee")
        relation    noun - preposition - noun             a mug on a table
                    verb - object, of the verb's subject  a man riding a horse;  the boy is wearing a shirt
                    verb - preposition - noun             a dog sitting on a mat
                    across words of place                 to the left of the cat;  next to the cat

    "and" joins subjects and objects of one relation, and is not a relation. A verb, an adjective or a place without a
    second entity stays in the phrase of its entity ("dog running", "the dog is brown", "bench on the left"). "not"
    stays in the relation or phrase. Pronouns are not entities; a relative pronoun is the noun that its clause modifies.
    """
    return _Tree(words).graph()


class _Tree:
    """A caption's dependency tree.

    Attributes:
        words: the tokens.
        children: of each token, in order.
        entity_of: token of a noun -> number of its entity.
    """

    def __init__(self, words: Sequence[Word]) -> None:
        self.words = words
        self.children: list[list[int]] = [[] for _ in words]
        for number, word in enumerate(words):
            if word.head != number:
                self.children[word.head].append(number)
        heads = [number for number in range(len(words)) if self.is_entity(number)]
        self.entity_of = {token: number for number, token in enumerate(heads)}
        self.phrases = [self.phrase(token) for token in heads]

    def graph(self) -> SceneGraph:
        """All entities and relations."""
        relations: dict[Relation, None] = {}
        for token, word in enumerate(self.words):
            if word.dep not in OBJECTS or self.is_opening(token):
                continue
            predicate, subjects = self.path(word.head)
            objects = self.objects(token)
            for subject, other in product(subjects, objects if predicate else ()):
                if other != subject:
                    relations.setdefault(Relation(self.entity_of[subject], predicate, self.entity_of[other]))
            for subject in subjects if not objects and self.is_place(token) and not self.continues(token) else ():
                self.phrases[self.entity_of[subject]] += f" {predicate} {self.phrase(token)}"
        for token, word in enumerate(self.words):
            if self.leads_on(token) or not (word.pos == "VERB" or word.dep == "acomp"):
                continue
            verb = token if word.pos == "VERB" else word.head
            adjective = [] if verb == token else [*self.attributes(token, len(self.words)), token]
            words = self.text_of([verb, *self.dependents(verb, "neg"), *adjective])
            for subject in self.subjects(verb):
                self.phrases[self.entity_of[subject]] += f" {words}"
        return SceneGraph(tuple(self.phrases), tuple(relations))

    def is_entity(self, token: int) -> bool:
        """Whether a token is the head of an entity's phrase."""
        word = self.words[token]
        is_noun = word.pos in NOUNS and not self.is_inside(token)
        return is_noun and not self.is_place(token) and not self.is_of(word.head, token)

    def is_inside(self, token: int) -> bool:
        """Whether a noun is an attribute of another noun, or "and" joins it to one: "a salt and pepper shaker"."""
        word = self.words[token]
        if word.dep == "conj" and word.head != token:
            return self.words[word.head].pos in NOUNS and self.is_inside(word.head)
        return word.dep in ("compound", "nmod", "npadvmod", "poss") and self.words[word.head].pos in NOUNS

    def objects(self, token: int) -> list[int]:
        """The entities of an object: its head, entities joined to it, or the antecedent of a relative pronoun."""
        if token in self.entity_of:
            return self.joined(token)
        if self.words[token].text.lower() not in RELATIVE:
            return []
        while self.words[token].dep != "relcl":
            if self.words[token].head == token:
                return []
            token = self.words[token].head
        return [self.words[token].head] if self.words[token].head in self.entity_of else []

    def is_of(self, preposition: int, noun: int) -> bool:
        """Whether "of" makes a noun part of the noun before, as in "a cup of coffee" but not in "left of the cup"."""
        word = self.words[preposition]
        return (
            self.words[noun].dep == "pobj"
            and word.text.lower() == "of"
            and self.words[word.head].pos in NOUNS
            and not self.is_place(word.head)
            and not self.is_photo(word.head)
        )

    def is_place(self, token: int) -> bool:
        """Whether a noun is a place in the picture, a side of a thing, or the picture itself."""
        word = self.words[token]
        in_place = word.text.lower() in PLACES | {"side", "edge"} and word.dep == "pobj"
        return in_place or self.is_photo(token)

    def is_photo(self, token: int) -> bool:
        """Whether this is "photo" in "a photo of ..."."""
        is_first = self.words[token].text.lower() in ("photo", "picture", "image", "photograph")
        return is_first and self.words[token].dep == "ROOT" and self.continues(token)

    def is_opening(self, token: int) -> bool:
        """Whether a noun is the subject of "a photo of ..."."""
        return self.is_photo(self.words[self.words[token].head].head)

    def continues(self, token: int) -> bool:
        """Whether "of" follows a noun."""
        return any(self.words[child].text.lower() == "of" for child in self.children[token])

    def phrase(self, token: int) -> str:
        """A noun with its attributes, and with "of" and its noun."""
        words = [self.words[at].text.lower() for at in [*sorted(self.attributes(token, token)), token]]
        for child in self.children[token]:
            for noun in self.children[child]:
                if self.is_of(child, noun):
                    words += ["of", self.phrase(noun)]
        return " ".join(words).replace(" 's", "'s")

    def attributes(self, token: int, end: int) -> list[int]:
        """The attributes of a word before `end`, with attributes of attributes, and those that "and" joins to them."""
        tokens = []
        for child in self.children[token]:
            is_joined = token < child < end and self.words[child].dep in ATTRIBUTES_AFTER
            if is_joined or (child < token and self.words[child].dep in ATTRIBUTES):
                tokens += [*self.attributes(child, end), child]
        return tokens

    def dependents(self, token: int, *labels: str) -> list[int]:
        """The tokens that depend on a token with one of these labels."""
        return [child for child in self.children[token] if self.words[child].dep in labels]

    def joined(self, token: int) -> list[int]:
        """An entity and the entities that "and" joins to it."""
        further = [child for child in self.dependents(token, "conj") if child in self.entity_of]
        return [token, *(other for child in further for other in self.joined(child))]

    def path(self, token: int) -> tuple[str, list[int]]:
        """Predicate and subjects of a relation, from the word above its object upwards."""
        words: list[int] = []
        while True:
            word = self.words[token]
            if token in self.entity_of:
                return self.text_of(words), [token]
            if word.pos in ("VERB", "AUX"):
                words += [] if word.text.lower() in COPULAS else [token]
                words += self.dependents(token, "prt", "neg")
                return self.text_of(words), self.subjects(token)
            words.append(token)
            if self.is_place(token):
                words += self.dependents(token, "det")
            if word.head == token or word.pos not in ("ADP", "ADV", "ADJ", "SCONJ", "PART", *NOUNS):
                return self.text_of(words), []
            token = word.head
            while word.dep == "conj" and self.words[token].pos == word.pos == "ADP":  # "on a mat and under a table"
                word, token = self.words[token], self.words[token].head

    def text_of(self, tokens: list[int]) -> str:
        """Words in their order in the caption."""
        return " ".join(self.words[token].text.lower() for token in sorted(tokens)).replace(" n't", "n't")

    def subjects(self, verb: int) -> list[int]:
        """The subjects of a verb."""
        candidates = self.dependents(verb, *SUBJECTS)
        if self.dependents(verb, "expl"):  # "there is a cat on the table"
            candidates += self.dependents(verb, "attr", *OBJECTS)
        for child in candidates:
            if child in self.entity_of:
                return self.joined(child)
        word = self.words[verb]
        if word.dep not in BORROWING or word.head == verb:
            return []
        if word.head in self.entity_of:
            return [word.head]
        return self.subjects(word.head)

    def leads_on(self, verb: int) -> bool:
        """Whether a verb has an object, directly or behind a preposition."""
        steps = (*PREPOSITIONS, *OBJECTS, "advmod", "prt")
        return any(
            self.words[child].dep in OBJECTS or (self.words[child].dep in steps and self.leads_on(child))
            for child in self.children[verb]
        )
