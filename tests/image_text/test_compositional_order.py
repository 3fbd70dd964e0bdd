"""ARO's order benchmarks: captions shuffled as its own code does, written once."""

import json
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from clip_fakes import call
from compositional_files import TAGGED_CAPTIONS, tagged, write_json

from dino_sparo.image_text.evaluation.caption_sets import read_captions
from dino_sparo.image_text.evaluation.compositional.sets import BENCHMARKS
from dino_sparo.image_text.evaluation.compositional.sets.aro import cleaned, options_of
from dino_sparo.runtime.faults import MissingPackageError

OFFICIAL = json.loads((Path(__file__).parents[1] / "reference" / "compositional.json").read_text())


def reversing(x: int) -> Any:
    """Draws the reversed order, as the recorder of the official captions does."""
    return np.arange(x)[::-1]


def words_of(caption: str) -> tuple[list[tuple[str, str]], list[str]]:
    pairs = tagged(caption)
    return pairs, [word for word, _ in pairs]


def text_of(caption: str) -> str:
    return " ".join(word for word, _ in tagged(caption))


def test_shuffled_captions_are_those_of_aros_own_code_for_the_same_tags_and_draws():
    options = [options_of(text_of(caption), *words_of(caption), reversing) for caption in TAGGED_CAPTIONS]
    assert options == OFFICIAL["aro"]["order_captions"]


def test_a_draw_keeps_what_it_should_and_moves_the_rest():
    words = words_of(TAGGED_CAPTIONS[0])
    drawn = [options_of("x", *words, np.random.default_rng(seed).permutation) for seed in range(40)]
    _, nouns, others, within, groups = (set(column) for column in zip(*drawn, strict=True))
    assert nouns == {f"a {a} {n} left of a {b} {m}" for a, b in (("red", "blue"), ("blue", "red"))
                     for n, m in (("star", "ring"), ("ring", "star"))}  # fmt: skip
    kept = {tuple(word for word in caption.split() if word in ("red", "star", "blue", "ring")) for caption in others}
    assert kept == {("red", "star", "blue", "ring")}
    assert len(others) > 5
    assert all(sorted(caption.split()[:3]) == ["a", "red", "star"] for caption in within)
    assert all("a red star" in caption and "left of a" in caption for caption in groups)


def test_captions_are_cleaned_as_the_authors_do():
    assert cleaned('A "Red"  star;\n(left)  of #1~ it: *yes*!\n') == "a red star left of 1 it yes"
    assert cleaned("it's a, b-c?") == "it's a, b-c?"
    assert len(cleaned("word " * 40).split()) == 30


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for spaCy and nltk, which find the tags of `TAGGED_CAPTIONS`."""
    known = {text_of(caption): tagged(caption) for caption in TAGGED_CAPTIONS}

    def document(text: str) -> Any:
        tokens = [SimpleNamespace(text=word, tag_=tag) for word, tag in known[text]]

        class Document(list[Any]):
            pass

        found = Document(tokens)
        found.text = text  # type: ignore[attr-defined]
        return found

    spacy, nltk = ModuleType("spacy"), ModuleType("nltk")
    for module in (spacy, nltk):
        module.__spec__ = ModuleSpec(module.__name__, None)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    spacy.__version__, nltk.__version__ = "3.8", "3.9"  # type: ignore[attr-defined]
    spacy.util = SimpleNamespace(is_package=lambda name: True, get_package_version=lambda name: "3.8.0")  # type: ignore[attr-defined]

    def pipe(texts: Iterable[str]) -> Any:
        return map(document, texts)

    spacy.load = lambda model, exclude: SimpleNamespace(pipe=pipe)  # type: ignore[attr-defined]
    nltk.data = SimpleNamespace(find=lambda name: name)  # type: ignore[attr-defined]
    nltk.word_tokenize = lambda text: [word for word, _ in known[text]]  # type: ignore[attr-defined]


@pytest.fixture
def captions(tmp_path: Path) -> Path:
    """Salesforce's layout: some captions of some images; an empty one."""
    texts = [text_of(caption) for caption in TAGGED_CAPTIONS]
    images = [{"image": "val2014/a.jpg", "caption": [*texts[:2], " "]}, {"image": "b.jpg", "caption": texts[2]}]
    return write_json(tmp_path / "coco_karpathy_test.json", [*images, {"image": "b.jpg", "caption": texts[4:]}])


def run(*options: object) -> Any:
    return call("order-captions", options)


def test_the_written_file_is_read_as_the_benchmark_and_the_record_says_how_it_was_made(tools, captions, tmp_path):
    output = tmp_path / "coco" / "coco_order.json"
    record = run("--captions", captions, "--output", output)
    questions = list(BENCHMARKS["coco-order"].read(output.parent))
    assert [question.images[0] for question in questions] == ["val2014/a.jpg", "val2014/a.jpg", "b.jpg", "b.jpg"]
    assert all(len(question.captions) == 5 for question in questions)
    assert questions[0].captions[0] == "a red star left of a blue ring"
    assert (record["num_questions"], record["num_empty"], record["seed"]) == (4, 1, 0)
    assert record["num_unchanged"]["nouns and adjectives"] >= 2  # one noun alone; the same nouns and adjectives
    assert record["tools"] == {"spacy": "3.8", "model": "en_core_web_sm 3.8.0", "nltk": "3.9"}
    assert json.loads((tmp_path / "coco" / "coco_order.json.summary.json").read_text()) == record


def test_a_seed_gives_one_file_and_a_caption_is_shuffled_alike_whatever_comes_after_it(tools, captions, tmp_path):
    def options(name: str, *more: object) -> list[list[str]]:
        run("--captions", captions, "--output", tmp_path / name, *more)
        return [entry["caption_options"] for entry in json.loads((tmp_path / name).read_text())]

    first = options("a.json")
    assert first == options("b.json") != options("c.json", "--seed", 1)
    write_json(captions, json.loads(captions.read_text())[:1])
    assert options("d.json") == first[:2]


def test_what_cannot_be_shuffled_is_refused_with_what_to_install_or_give(captions, tmp_path, monkeypatch, tools):
    with pytest.raises(ValueError, match="a list of image and caption"):
        run("--captions", write_json(tmp_path / "odd.json", [{"image": "a"}]), "--output", "x.json")

    def missing(name: str) -> None:
        raise LookupError(name)

    monkeypatch.setattr(sys.modules["nltk"], "data", SimpleNamespace(find=missing), raising=False)
    with pytest.raises(MissingPackageError, match=r"need nltk's punkt_tab; .*python -m nltk.downloader punkt_tab"):
        run("--captions", captions, "--output", tmp_path / "x.json")
    monkeypatch.setattr(sys.modules["spacy"].util, "is_package", lambda name: False)
    with pytest.raises(MissingPackageError, match=r"shuffled words need spaCy's model .*python -m spacy download"):
        run("--captions", captions, "--output", tmp_path / "x.json")


def test_salesforces_copies_of_karpathys_splits_are_read_as_captions_of_images(captions):
    assert list(map(len, read_captions(captions)[0].values())) == [3, 2]
