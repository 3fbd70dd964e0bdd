"""Images with a true and a false caption -> how often the true one has the greater score: SugarCrepe.

    dino-sparo sugarcrepe --pretrained_weights output/checkpoint.pth --data_path data/sugar-crepe/data \
        --images data/coco/val2017

The false caption differs from the true one in one object, attribute or relation that was replaced, swapped or added:
seven JSON files, each an object of `{"filename", "caption", "negative_caption"}`. A folder of such files under other
names is evaluated likewise; `scene_pairs.py` writes the format with pictures of its own. Prints a table and writes
sugarcrepe.json, the numbers with all that they depend on. Source: Hsieh et al., "SugarCrepe: fixing hackable benchmarks
for vision-language compositionality"; SPARO, section 4.1 and tables 4 and 0.B.1.
"""

import argparse
import logging
from pathlib import Path
from typing import Any

from dino_sparo.data.sources.limits import parse_json
from dino_sparo.evaluation.task import start_evaluation
from dino_sparo.image_text.evaluation.protocol import OpenModel, annotation_folders, file_record, report
from dino_sparo.image_text.evaluation.questions import (
    EncodedQuestions,
    Question,
    ScorePairs,
    SplitResult,
    answer,
    by_split,
    encode_questions,
    macro,
    micro,
)
from dino_sparo.image_text.scoring.scorer import Scorer

logger = logging.getLogger(__name__)

# Kinds of false captions by what was done to the true one, in the order of the paper's table.
GROUPS: dict[str, tuple[str, ...]] = {
    "replace": ("replace_obj", "replace_att", "replace_rel"),
    "swap": ("swap_obj", "swap_att"),
    "add": ("add_obj", "add_att"),
}


def read_pairs(folder: Path) -> list[Question]:
    """The pairs of all splits that lie in a folder: one image each, the true caption, the false one.

    Args:
        folder: holds `replace_obj.json` and so on; those of GROUPS that are there are read. Without any of them every
            `.json` file is a split.

    Returns:
        The pairs, by split.

    Raises:
        ValueError: there is no such file, or one holds something else.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; give the one that holds {', '.join(GROUPS['replace'])} and so on")
    names = [name for group in GROUPS.values() for name in group]
    there = [name for name in names if (folder / f"{name}.json").is_file()]
    splits = there or sorted(path.stem for path in folder.glob("*.json"))
    if not splits:
        raise ValueError(
            f"{folder} holds none of {', '.join(f'{name}.json' for name in names)}, nor any other JSON file; give the "
            "folder of them"
        )
    if 0 < len(there) < len(names):
        logger.warning("%s has %d of SugarCrepe's %d files: %s", folder, len(there), len(names), ", ".join(there))
    return [pair for split in splits for pair in _read_split(folder / f"{split}.json", split)]


def _read_split(path: Path, split: str) -> list[Question]:
    try:
        entries = parse_json(path.read_text(encoding="utf-8"))
        # Keys are numbers with gaps in some of the files; they say nothing.
        rows = entries.values() if isinstance(entries, dict) else entries
        return [Question(split, (row["filename"],), (row["caption"], row["negative_caption"])) for row in rows]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not SugarCrepe's: expected an object of filename, caption and negative_caption ({error!r})"
        ) from error


def split_results(pairs: EncodedQuestions, score_pairs: ScorePairs) -> dict[str, SplitResult]:
    """Accuracy per split: a pair is right if its true caption has a strictly greater score than its false one.

    Raises:
        ValueError: scores that are not finite.
    """
    answers = answer(pairs, score_pairs)
    return by_split(pairs.questions, answers.text, answers.text_tied)


def averages(results: dict[str, SplitResult]) -> dict[str, Any]:
    """What one may call the accuracy on SugarCrepe, in percent.

    Returns:
        `groups`: of each group the mean over its splits; `macro_groups`: the mean of those, left out where no split
        belongs to a group; `macro_splits`: the mean over splits, which SPARO's tables call average; `micro`: the share
        of all pairs.
    """
    groups = {
        group: [results[split].accuracy for split in splits if split in results] for group, splits in GROUPS.items()
    }
    means = {group: sum(values) / len(values) for group, values in groups.items() if values}
    return {
        "groups": means,
        **({"macro_groups": sum(means.values()) / len(means)} if means else {}),
        "macro_splits": macro(results),
        "micro": micro(results),
    }


def evaluate_checkpoint(args: argparse.Namespace, open_model: OpenModel) -> dict[str, Any]:
    """Evaluate what the options say, write the result, show the table.

    Raises:
        ValueError: options, files or data that do not fit; the message says what would.
    """
    process = start_evaluation(args)
    folder, images = annotation_folders(args, "of SugarCrepe's JSON files")
    pairs = read_pairs(folder)
    scorer = open_model(args, process)
    encoded = encode_questions(scorer, pairs, images)
    results = split_results(encoded, scorer.score_pairs)
    result = describe(results, describe_pairs(encoded, folder, images), scorer)
    return report(result, table(results), args, "sugarcrepe.json")


def describe_pairs(pairs: EncodedQuestions, folder: Path, images: Path) -> dict[str, Any]:
    """What a result file says about the pairs."""
    splits = dict.fromkeys(pair.split for pair in pairs.questions)
    return {
        "images": str(images),
        "files": {split: file_record(folder / f"{split}.json") for split in splits},
        "num_pairs": len(pairs.questions),
        "num_images": pairs.num_images,
        "num_without_image": pairs.num_without_image,
        "num_with_empty_caption": pairs.num_empty,
        "num_truncated_captions": pairs.num_truncated,
    }


def describe(results: dict[str, SplitResult], data: dict[str, Any], scorer: Scorer) -> dict[str, Any]:
    """Accuracies and protocol, as sugarcrepe.json holds them."""
    return {
        "evaluation": "SugarCrepe",
        "splits": {
            split: {"accuracy": result.accuracy, "num_pairs": result.num_questions, "num_ties": result.num_ties}
            for split, result in results.items()
        },
        **averages(results),
        "rule": f"right if the true caption's {scorer.measure} is strictly greater, in fp32; ties count as wrong",
        **scorer.record,
        "pairs": data,
    }


def table(results: dict[str, SplitResult]) -> str:
    """Accuracies for people."""
    lines = [f"{'split':<14}  {'accuracy %':>10}  {'pairs':>6}  {'ties':>5}"]
    lines += [
        f"{split:<14}  {r.accuracy:>10.2f}  {r.num_questions:>6}  {r.num_ties:>5}" for split, r in results.items()
    ]
    means = averages(results)
    lines += [f"{group:<14}  {value:>10.2f}" for group, value in means["groups"].items()]
    lines += [f"{name:<14}  {means[name]:>10.2f}" for name in means if name != "groups"]
    return "\n".join(lines)
