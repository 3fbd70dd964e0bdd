"""The rules over dependency trees, without spaCy: the trees are written down as its English models give them."""

import pickle
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest

from dino_sparo.image_text.towers import SPACY_MODEL
from dino_sparo.oc_clip.graphs.files import open_graphs
from dino_sparo.oc_clip.graphs.graph import SceneGraph
from dino_sparo.oc_clip.parsers import Outcome
from dino_sparo.oc_clip.parsers.spacy_rules import SpacyParser, Word, graph_of_words
from dino_sparo.runtime.faults import MissingPackageError


def tree(text: str) -> list[Word]:
    """Words from `text/POS/dependency/head`, heads counted from 0."""
    parts = [word.split("/") for word in text.split()]
    return [Word(word, pos, dep, int(head)) for word, pos, dep, head in parts]


def words_of(text: str) -> str:
    graph = graph_of_words(tree(text))
    relations = (f"{r.predicate}({graph.entities[r.subject]}, {graph.entities[r.object]})" for r in graph.relations)
    return " | ".join([", ".join(graph.entities), *relations])


TREES = """
a/DET/det/2 red/ADJ/amod/2 mug/NOUN/ROOT/2 on/ADP/prep/2 a/DET/det/6 coffee/NOUN/compound/6 table/NOUN/pobj/3 -> a red
mug, a coffee table | on(a red mug, a coffee table)

a/DET/det/1 man/NOUN/ROOT/1 riding/VERB/acl/1 a/DET/det/4 horse/NOUN/dobj/2 on/ADP/prep/2 a/DET/det/7 beach/NOUN/pobj/5
-> a man, a horse, a beach | riding(a man, a horse) | riding on(a man, a beach)

The/DET/det/1 dog/NOUN/nsubj/2 is/AUX/ROOT/2 to/ADP/prep/2 the/DET/det/5 left/NOUN/pobj/3 of/ADP/prep/5 the/DET/det/8
cat/NOUN/pobj/6 -> the dog, the cat | to the left of(the dog, the cat)

a/DET/det/1 photo/NOUN/ROOT/1 of/ADP/prep/1 a/DET/det/4 cup/NOUN/pobj/2 of/ADP/prep/4 tea/NOUN/pobj/5 -> a cup of tea

the/DET/det/1 boy/NOUN/nsubj/3 is/AUX/aux/3 wearing/VERB/ROOT/3 a/DET/det/5 hat/NOUN/dobj/3 and/CCONJ/cc/5 a/DET/det/8
coat/NOUN/conj/5 -> the boy, a hat, a coat | wearing(the boy, a hat) | wearing(the boy, a coat)

dog/NOUN/nsubj/3 and/CCONJ/cc/0 cat/NOUN/conj/0 sitting/VERB/ROOT/3 on/ADP/prep/3 mat/NOUN/pobj/4 -> dog, cat, mat |
sitting on(dog, mat) | sitting on(cat, mat)

a/DET/det/1 woman/NOUN/ROOT/1 who/PRON/nsubj/4 is/AUX/aux/4 holding/VERB/relcl/1 a/DET/det/6 phone/NOUN/dobj/4 -> a
woman, a phone | holding(a woman, a phone)

train/NOUN/ROOT/0 parked/VERB/acl/0 next/ADV/advmod/1 to/ADP/prep/2 platform/NOUN/pobj/3 -> train, platform | parked
next to(train, platform)

the/DET/det/4 red/ADJ/amod/4 and/CCONJ/cc/1 white/ADJ/conj/1 bus/NOUN/ROOT/4 with/ADP/prep/4 a/DET/det/9
salt/NOUN/compound/9 shaker/NOUN/compound/9 rack/NOUN/pobj/5 -> the red and white bus, a salt shaker rack | with(the red
and white bus, a salt shaker rack)

a/DET/det/4 salt/NOUN/compound/4 and/CCONJ/cc/1 pepper/NOUN/conj/1 shaker/NOUN/ROOT/4 -> a salt and pepper shaker

The/DET/det/1 dog/NOUN/nsubj/2 is/AUX/ROOT/2 brown/ADJ/acomp/2 and/CCONJ/cc/2 the/DET/det/6 cat/NOUN/nsubj/7
is/AUX/conj/2 not/PART/neg/7 black/ADJ/acomp/7 -> the dog is brown, the cat is not black

the/DET/det/1 box/NOUN/nsubj/2 is/AUX/ROOT/2 full/ADJ/acomp/2 of/ADP/prep/3 toys/NOUN/pobj/4 -> the box, toys | full
of(the box, toys)

a/DET/det/1 person/NOUN/ROOT/1 not/PART/neg/3 wearing/VERB/acl/1 a/DET/det/5 helmet/NOUN/dobj/3 -> a person, a helmet |
not wearing(a person, a helmet)

a/DET/det/1 man/NOUN/poss/4 's/PART/case/1 red/ADJ/amod/4 hat/NOUN/ROOT/4 -> a man's red hat

There/PRON/expl/1 is/VERB/ROOT/1 a/DET/det/3 cat/NOUN/attr/1 on/ADP/prep/1 the/DET/det/6 table/NOUN/pobj/4 -> a cat, the
table | on(a cat, the table)

a/DET/det/1 cat/NOUN/ROOT/1 on/ADP/prep/1 a/DET/det/4 mat/NOUN/pobj/2 and/CCONJ/cc/2 under/ADP/conj/2 a/DET/det/8
table/NOUN/pobj/6 -> a cat, a mat, a table | on(a cat, a mat) | under(a cat, a table)

a/DET/det/1 dog/NOUN/ROOT/1 running/VERB/acl/1 -> a dog running

a/DET/det/1 bench/NOUN/ROOT/1 on/ADP/prep/1 the/DET/det/4 left/NOUN/pobj/2 -> a bench on the left

red/ADJ/amod/1 star/NOUN/ROOT/1 and/CCONJ/cc/1 blue/ADJ/amod/4 ring/NOUN/conj/1 -> red star, blue ring

a/DET/det/1 ball/NOUN/ROOT/1 that/PRON/dobj/6 the/DET/det/4 man/NOUN/nsubj/6 is/AUX/aux/6 holding/VERB/relcl/1 -> a
ball, the man | holding(the man, a ball)
"""


@pytest.mark.parametrize(
    ("words", "graph"), [" ".join(block.split()).split(" -> ") for block in TREES.strip().split("\n\n")]
)
def test_noun_phrases_are_entities_and_paths_between_them_relations(words: str, graph: str) -> None:
    assert words_of(words) == graph


def test_pronouns_are_no_entities() -> None:
    assert words_of("he/PRON/nsubj/1 runs/VERB/ROOT/1") == ""
    assert graph_of_words([]) == SceneGraph(())


def fake_spacy(words: list[Word]) -> ModuleType:
    """A stand-in for the package, whose pipeline finds these words in every caption."""
    spacy = ModuleType("spacy")
    spacy.__spec__ = ModuleSpec("spacy", None)
    spacy.__version__ = "3.8"
    spacy.util = SimpleNamespace(is_package=lambda name: True, get_package_version=lambda name: "3.8.0")
    tokens = [SimpleNamespace(text=w.text, pos_=w.pos, dep_=w.dep, head=SimpleNamespace(i=w.head)) for w in words]
    pipeline = SimpleNamespace(pipe=lambda captions: (tokens for _ in captions))
    spacy.load = lambda model, exclude: pipeline
    return spacy


def test_a_parser_says_its_model_and_goes_to_workers_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    words = tree("dog/NOUN/ROOT/0 on/ADP/prep/0 mat/NOUN/pobj/1")
    monkeypatch.setitem(sys.modules, "spacy", fake_spacy(words))
    parser = SpacyParser()
    assert parser.record == {"parser": "spacy", "spacy": "3.8", "model": "en_core_web_sm 3.8.0"}
    graph = graph_of_words(words)
    assert list(parser.parse_all(iter(["a", "b"]))) == [Outcome(graph), Outcome(graph)]
    assert pickle.loads(pickle.dumps(parser))("a") == graph
    assert open_graphs("spacy").record["model"] == "en_core_web_sm 3.8.0"


def test_without_its_model_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    spacy = pytest.importorskip("spacy", reason="pip install 'dino_sparo[parse]'")
    monkeypatch.setattr(spacy.util, "is_package", lambda name: False)
    with pytest.raises(MissingPackageError, match=f"python -m spacy download {SPACY_MODEL}"):
        SpacyParser()
