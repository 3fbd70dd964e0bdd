"""Captions of images -> the questions of ARO's order benchmarks: `dino-sparo order-captions`.

    dino-sparo order-captions --captions coco_karpathy_test.json --output data/coco/coco_order.json
    dino-sparo order-captions --captions flickr30k_test.json --output data/flickr30k/flickr_order.json

The authors shuffle anew in every run, without a random seed. Here the draw depends on the seed and the caption's number
alone, and a file beside the output records the tools that tagged the words. Each caption gets the authors' four false
captions:

    nouns change places with nouns, adjectives with adjectives      spaCy's words and tags
    all other words change places                                   spaCy's words and tags
    words change places within each three                           nltk's words
    threes change places                                            nltk's words

A caption whose words cannot be shuffled stays as it is, and is then a true caption among the false ones. The command
writes such questions, as the authors do, and counts them. Source: Yuksekgonul et al., "When and why vision-language
models behave like bags-of-words, and what to do about it?"; dataset_zoo/perturbations.py and retrieval.py
(`pre_caption`) of their code.
"""

import argparse
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dino_sparo.image_text.evaluation.caption_sets import read_captions
from dino_sparo.image_text.evaluation.protocol import file_record
from dino_sparo.image_text.spacy_model import SpacyModel
from dino_sparo.runtime.cli import say
from dino_sparo.runtime.faults import INSTALL, MissingPackageError, require
from dino_sparo.runtime.logs import progress, setup_logging
from dino_sparo.runtime.records import versions, write_json

NOUNS, ADJECTIVES = ("NN", "NNS", "NNP", "NNPS"), ("JJ", "JJR", "JJS")  # the Penn Treebank's tags
GROUP = 3  # words that are shuffled among themselves, or together
MAX_WORDS = 30
PURPOSE = "captions with shuffled words"


class Words(NamedTuple):
    """A caption in words.

    Attributes:
        tagged: spaCy's words, each with its tag in the Penn Treebank.
        plain: nltk's words.
    """

    tagged: Sequence[tuple[str, str]]
    plain: Sequence[str]


# A number -> the numbers below it in a drawn order, such as a numpy Generator's `permutation`.
Draw = Callable[[int], Any]


def shuffle_nouns_and_adjectives(words: Words, draw: Draw) -> str:
    """Nouns change places with nouns, then adjectives with adjectives."""
    texts = [text for text, _ in words.tagged]
    for tags in (NOUNS, ADJECTIVES):
        texts = _permuted(texts, [tag in tags for _, tag in words.tagged], draw)
    return " ".join(texts)


def shuffle_other_words(words: Words, draw: Draw) -> str:
    """All but nouns and adjectives change places."""
    texts = [text for text, _ in words.tagged]
    return " ".join(_permuted(texts, [tag not in NOUNS + ADJECTIVES for _, tag in words.tagged], draw))


def shuffle_within_groups(words: Words, draw: Draw) -> str:
    """Words change places within each three."""
    return " ".join(group[number] for group in _groups(words.plain) for number in draw(len(group)))


def shuffle_groups(words: Words, draw: Draw) -> str:
    """Threes change places; the last may be shorter."""
    groups = _groups(words.plain)
    return " ".join(word for number in draw(len(groups)) for word in groups[number])


# What is shuffled -> how; in the authors' order of the options.
PERTURBATIONS: dict[str, Callable[[Words, Draw], str]] = {
    "nouns and adjectives": shuffle_nouns_and_adjectives,
    "all but nouns and adjectives": shuffle_other_words,
    "within trigrams": shuffle_within_groups,
    "trigrams": shuffle_groups,
}


def _permuted(texts: Sequence[str], is_moved: Sequence[bool], draw: Draw) -> list[str]:
    """Texts, some of which change places with one another."""
    moved = [number for number, moves in enumerate(is_moved) if moves]
    result = list(texts)
    for target, source in zip(moved, draw(len(moved)), strict=True):
        result[target] = texts[moved[source]]
    return result


def _groups(words: Sequence[str]) -> list[Sequence[str]]:
    return [words[start : start + GROUP] for start in range(0, len(words), GROUP)]


def cleaned(caption: str) -> str:
    """The authors' cleaning of a caption: lower case, no punctuation, at most 30 words."""
    spaced = re.sub(r"\s{2,}", " ", re.sub(r"[.!\"()*#:;~]", " ", caption.lower()))
    return " ".join(spaced.rstrip("\n").strip(" ").split(" ")[:MAX_WORDS])


def options_of(caption: str, words: Words, draw: Draw) -> list[str]:
    """The caption and its four shuffled ones."""
    return [cleaned(caption), *(cleaned(shuffle(words, draw)) for shuffle in PERTURBATIONS.values())]


def write_order(args: argparse.Namespace) -> dict[str, Any]:
    """Write the questions, and a record beside them; returns the record."""
    setup_logging()
    tools = Tools()
    file = read_captions(Path(args.captions), args.split)
    captions = file.captions_of
    pairs = [(image, caption.strip()) for image, own in captions.items() for caption in own if caption.strip()]
    if not pairs:
        raise ValueError(f"--captions {args.captions} has no captions with words")
    num_empty = sum(map(len, captions.values())) - len(pairs)
    entries, unchanged = [], dict.fromkeys(PERTURBATIONS, 0)
    words = tools.words(caption for _, caption in pairs)
    for number, ((image, caption), own) in enumerate(zip(pairs, progress(words, len(pairs), "shuffling"), strict=True)):
        options = options_of(caption, own, np.random.default_rng([args.seed, number]).permutation)
        entries.append({"image": image, "caption_options": options})
        for name, option in zip(PERTURBATIONS, options[1:], strict=True):
            unchanged[name] += option == options[0]
    output = Path(args.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(entries) + "\n", encoding="utf-8")
    record = {
        "captions": file_record(Path(args.captions)),
        "split": file.split,
        "seed": args.seed,
        "tools": tools.record,
        "output": file_record(output),
        "num_questions": len(entries),
        "num_empty": num_empty,
        "num_unchanged": unchanged,
        "versions": versions(),
    }
    write_json(record, output.with_name(output.name + ".summary.json"))
    same = ", ".join(f"{count:,} shuffled by {name}" for name, count in unchanged.items())
    say(f"{output}: {len(entries):,} questions; as the caption itself are {same}")
    return record


class Tools:
    """spaCy's words and tags, nltk's words, and a record of the versions."""

    def __init__(self) -> None:
        require("nltk", PURPOSE)
        self.model = SpacyModel(PURPOSE)
        import nltk

        try:
            nltk.data.find("tokenizers/punkt_tab")
        except LookupError as error:
            raise MissingPackageError(f"{PURPOSE} need nltk's punkt_tab; install it with: {INSTALL['nltk']}") from error
        self.record = {**self.model.record, "nltk": nltk.__version__}
        self.tokenize: Callable[[str], list[str]] = nltk.word_tokenize

    def words(self, captions: Iterator[str]) -> Iterator[Words]:
        """The words of every caption, in order."""
        for document in self.model.documents(captions):
            yield Words([(token.text, token.tag_) for token in document], self.tokenize(document.text))
