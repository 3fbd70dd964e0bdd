"""ARO: relations and attributes of Visual Genome, and the order of words in captions of COCO and Flickr30k.

    visual_genome_relation.json     [{"image_path", "bbox_x", "bbox_y", "bbox_w", "bbox_h", "true_caption",
                                      "false_caption", "relation_name"}], images are cropped to the box
    visual_genome_attribution.json  the same with "attributes": [first, second]
    coco_order.json, flickr_order.json  [{"image", "caption_options": [true caption, four shuffled ones]}]

The authors shuffle words anew in every run, without a random seed. `dino-sparo order-captions` writes the last two
files once:

    dino-sparo order-captions --captions coco_karpathy_test.json --output data/coco/coco_order.json
    dino-sparo order-captions --captions flickr30k_test.json --output data/flickr30k/flickr_order.json

The draw depends on the seed and the caption's number alone, and a file next to the output records the tools that tagged
the words. A caption whose words cannot be shuffled stays as it is, and is then a true caption among the false ones. The
command writes such questions, as the authors do, and counts them.

Source: Yuksekgonul et al., "When and why vision-language models behave like bags-of-words, and what to do about it?";
their dataset_zoo/aro_datasets.py with the notebook beside it, dataset_zoo/perturbations.py and retrieval.py
(`pre_caption`).
"""

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dino_sparo.image_text.evaluation.caption_sets import read_captions
from dino_sparo.image_text.evaluation.compositional.benchmark import Benchmark, Weights, equal_means
from dino_sparo.image_text.evaluation.compositional.questions import Question, json_reader, list_of
from dino_sparo.image_text.evaluation.protocol import Crop, file_record
from dino_sparo.image_text.towers import spacy_documents, spacy_record
from dino_sparo.runtime.cli import say
from dino_sparo.runtime.faults import INSTALL, MissingPackageError, require
from dino_sparo.runtime.files import versions, write_json, write_text
from dino_sparo.runtime.lock import create_output_dir
from dino_sparo.runtime.logs import progress, setup_logging

MIN_CASES = 25  # pairs of attributes with fewer questions do not count in the authors' mean
NUM_ORDERS = 5
REPOSITORY = "https://github.com/mertyg/vision-language-models-are-bows"

# Relations that do not count in the mean of the authors' notebook, which calls them symmetric: a part of the metric.
UNCOUNTED = frozenset(
    """adjusting|attached to|between|bigger than|biting|boarding|brushing|chewing|cleaning|climbing|close to
coming from|coming out of|contain|crossing|dragging|draped over|drinking|drinking from|driving|driving down|driving on
eating from|eating in|enclosing|exiting|facing|filled with|floating in|floating on|flying|flying above|flying in
flying over|flying through|full of|going down|going into|going through|grazing in|growing in|growing on|guiding
hanging from|hanging in|hanging off|hanging over|higher than|holding onto|hugging|in between|jumping off|jumping on
jumping over|kept in|larger than|leading|leaning over|leaving|licking|longer than|looking in|looking into|looking out
looking over|looking through|lying next to|lying on top of|making|mixed with|mounted on|moving|on the back of
on the edge of|on the front of|on the other side of|opening|painted on|parked at|parked beside|parked by|parked in
parked in front of|parked near|parked next to|perched on|petting|piled on|playing|playing in|playing on|playing with
pouring|reaching for|reading|reflected on|riding on|running in|running on|running through|seen through|sitting behind
sitting beside|sitting by|sitting in front of|sitting near|sitting next to|sitting under|skiing down|skiing on
sleeping in|sleeping on|smiling at|sniffing|splashing|sprinkled on|stacked on|standing against|standing around
standing behind|standing beside|standing in front of|standing near|standing next to|staring at|stuck in|surrounding
swimming in|swinging|talking to|topped with|touching|traveling down|traveling on|tying|typing on|underneath|wading in
waiting for|walking across|walking by|walking down|walking next to|walking through|working in|working on|worn on
wrapped around|wrapped in|by|of|near|next to|with|beside|on the side of|around""".replace("\n", "|").split("|")
)


def relation_means(counts: Mapping[str, int]) -> dict[str, Weights]:
    """The authors' macro average: all relations except `UNCOUNTED` have the same weight."""
    return equal_means([relation for relation in counts if relation not in UNCOUNTED])


def attribute_means(counts: Mapping[str, int]) -> dict[str, Weights]:
    """The authors' macro average: all pairs of attributes with at least `MIN_CASES` questions count the same."""
    return equal_means([pair for pair, count in counts.items() if count >= MIN_CASES])


def attributes_of(entry: Any) -> str:
    """Split of an entry about attributes: its first two attributes, in their order."""
    first, second = list_of(entry["attributes"])[:2]
    return "_".join((first, second))


def crop_question(split_of: Callable[[Any], str], _: str, entry: Any) -> Question:
    """A question about a crop of one of Visual Genome's images; `split_of` an entry is its split."""
    left, top, width, height = (float(entry[f"bbox_{side}"]) for side in "xywh")
    image = Crop(entry["image_path"], (left, top, left + width, top + height))
    return Question(split_of(entry), (image,), (entry["true_caption"], entry["false_caption"]))


def order_question(_: str, entry: Any) -> Question:
    """A caption and its shuffled words, as `write_order` writes them."""
    return Question("order", (entry["image"],), tuple(list_of(entry["caption_options"], NUM_ORDERS)))


def crops(name: str, file: str, split_of: Callable[[Any], str], split_field: str, **more: Any) -> Benchmark:
    """VG-Relation or VG-Attribution; `split_of` reads the field `split_field`."""
    expected = f"image_path, bbox_x, bbox_y, bbox_w, bbox_h, true_caption, false_caption and {split_field}"
    read = json_reader({"": file}, partial(crop_question, split_of), expected)
    return Benchmark(
        f"aro-{name.lower()}",
        f"ARO VG-{name}",
        (file,),
        read,
        ("images",),
        REPOSITORY,
        licence="MIT; images: CC BY 4.0",
        size="1.2 GB",
        accepts=lambda folder: not (folder.parent / "swapped_data").is_dir(),  # a file of the hard positives
        **more,
    )


def order(name: str, folders: tuple[str, ...], total: int, size: str) -> Benchmark:
    """COCO-Order or Flickr-Order."""
    file = f"{name.lower()}_order.json"
    source = f"{REPOSITORY}; dino-sparo order-captions writes it from the captions"
    read = json_reader({"": file}, order_question, f"image and caption_options, {NUM_ORDERS} texts")
    return Benchmark(
        *(f"{name.lower()}-order", f"ARO {name}-Order", (file,), read, folders, source),
        licence="that of the captions and images",
        size=size,
        chance=20.0,
        total=total,
        tie_credit=1.0,
    )


BENCHMARKS = (
    crops(
        *("Relation", "visual_genome_relation.json", lambda entry: entry["relation_name"], "relation_name"),
        total=23_937,
        means=relation_means,
    ),
    crops(
        *("Attribution", "visual_genome_attribution.json", attributes_of, "attributes"),
        total=28_748,
        means=attribute_means,
    ),
    order("COCO", (".", "coco", "coco/images", "images", "val2014"), 25_010, "images 6 GB"),
    order("Flickr", (".", "flickr30k", "flickr30k-images", "images"), 5_000, "images 4 GB"),
)


# The order benchmarks' files.

NOUNS, ADJECTIVES = ("NN", "NNS", "NNP", "NNPS"), ("JJ", "JJR", "JJS")  # the Penn Treebank's tags
GROUP = 3  # words that are shuffled among themselves, or together
MAX_WORDS = 30
PURPOSE = "captions with shuffled words"
PERTURBATIONS = ("nouns and adjectives", "all but nouns and adjectives", "within trigrams", "trigrams")


# A number -> the numbers below it in a drawn order, such as a numpy Generator's `permutation`.
Draw = Callable[[int], Any]


def options_of(caption: str, tagged: Sequence[tuple[str, str]], plain: Sequence[str], draw: Draw) -> list[str]:
    """The caption and its four shuffled versions, in the authors' order, which `PERTURBATIONS` has.

    Nouns change places with nouns and adjectives with adjectives; all other words; words within each three; threes, of
    which the last may be shorter. spaCy's words have their tags in the Penn Treebank; nltk's words are plain.
    """
    texts, tags = [text for text, _ in tagged], [tag for _, tag in tagged]
    swapped = _permuted(texts, [tag in NOUNS for tag in tags], draw)
    swapped = _permuted(swapped, [tag in ADJECTIVES for tag in tags], draw)
    others = _permuted(texts, [tag not in NOUNS + ADJECTIVES for tag in tags], draw)
    groups = [plain[start : start + GROUP] for start in range(0, len(plain), GROUP)]
    within = [group[number] for group in groups for number in draw(len(group))]
    moved = [word for number in draw(len(groups)) for word in groups[number]]
    return [cleaned(caption), *(cleaned(" ".join(each)) for each in (swapped, others, within, moved))]


def _permuted(texts: Sequence[str], is_moved: Sequence[bool], draw: Draw) -> list[str]:
    """Texts, some of which are exchanged with one another."""
    moved = [number for number, moves in enumerate(is_moved) if moves]
    result = list(texts)
    for target, source in zip(moved, draw(len(moved)), strict=True):
        result[target] = texts[moved[source]]
    return result


def cleaned(caption: str) -> str:
    """The authors' cleaning of a caption: lower case, no punctuation, at most 30 words."""
    spaced = re.sub(r"\s{2,}", " ", re.sub(r"[.!\"()*#:;~]", " ", caption.lower()))
    return " ".join(spaced.rstrip("\n").strip(" ").split(" ")[:MAX_WORDS])


def write_order(args: argparse.Namespace) -> dict[str, Any]:
    """Write the questions, and a record in the same folder; returns the record."""
    setup_logging()
    require("nltk", PURPOSE)
    tools = spacy_record(PURPOSE)
    import nltk

    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError as error:
        raise MissingPackageError(f"{PURPOSE} need nltk's punkt_tab; install it with: {INSTALL['nltk']}") from error
    captions_of, _, split = read_captions(Path(args.captions), args.split)
    pairs = [(image, text.strip()) for image, texts in captions_of.items() for text in texts if text.strip()]
    entries, unchanged = [], dict.fromkeys(PERTURBATIONS, 0)
    documents = spacy_documents(caption for _, caption in pairs)
    for number, document in enumerate(progress(documents, len(pairs), "shuffling")):
        image, caption = pairs[number]
        tagged, plain = [(token.text, token.tag_) for token in document], nltk.word_tokenize(document.text)
        options = options_of(caption, tagged, plain, np.random.default_rng([args.seed, number]).permutation)
        entries.append({"image": image, "caption_options": options})
        for name, option in zip(PERTURBATIONS, options[1:], strict=True):
            unchanged[name] += option == options[0]
    output = Path(args.output)
    create_output_dir(output.parent, "--output in ")
    write_text(json.dumps(entries) + "\n", output)
    record = {
        "captions": file_record(Path(args.captions)),
        "split": split,
        "seed": args.seed,
        "tools": {**tools, "nltk": nltk.__version__},
        "output": file_record(output),
        "num_questions": len(entries),
        "num_empty": sum(map(len, captions_of.values())) - len(pairs),
        "num_unchanged": unchanged,
        "versions": versions(),
    }
    write_json(record, output.with_name(output.name + ".summary.json"))
    same = ", ".join(f"{count:,} shuffled by {name}" for name, count in unchanged.items())
    say(f"{output}: {len(entries):,} questions; as the caption itself are {same}")
    return record
