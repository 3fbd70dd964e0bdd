"""Two images and two captions of the same words -> how often images and captions are matched correctly: Winoground.

    dino-sparo winoground --pretrained_weights output/checkpoint.pth --data_path data/winoground

The data is read from disk as its authors publish it: `examples.jsonl`, one JSON object per line with `image_0`,
`image_1`, `caption_0`, `caption_1` and perhaps tags, and the folder `images`. Prints a table and writes
winoground.json, the numbers with all that they depend on. Source: Thrush et al., "Winoground: probing vision and
language models for visio-linguistic compositionality", section 3.2.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from dino_sparo.data.sources.limits import parse_json
from dino_sparo.evaluation.task import start_evaluation
from dino_sparo.image_text.choices import WINOGROUND_EXAMPLES
from dino_sparo.image_text.evaluation.protocol import OpenModel, annotation_folders, file_record, report
from dino_sparo.image_text.evaluation.questions import Answers, Question, answer, encode_questions

TAG = "collapsed_tag"  # Object, Relation or Both: what changes its place in the caption
SCORES = ("text", "image", "group")


def read_examples(path: Path) -> list[Question]:
    """The examples of a file: image 0 with caption 0, image 1 with caption 1; the split is the tag, perhaps empty.

    Raises:
        ValueError: there is no such file, or it holds something else.
    """
    if not path.is_file():
        raise ValueError(
            f"{path} does not exist; give the folder with Winoground's {WINOGROUND_EXAMPLES} and its folder images as "
            f"--data_path"
        )
    examples = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
            images, captions = ((row[f"{what}_0"], row[f"{what}_1"]) for what in ("image", "caption"))
            examples.append(Question(str(row.get(TAG, "")), images, captions, (0, 1)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path}, line {number + 1} is not Winoground's: expected an object with image_0, image_1, caption_0 "
                f"and caption_1 ({error!r})"
            ) from error
    if not examples:
        raise ValueError(f"{path} is empty")
    return examples


def scores_of(answers: Answers) -> Bool[Tensor, "examples 3"]:
    """Text, image and group score of every example.

        text   s(C0, I0) > s(C1, I0)  and  s(C1, I1) > s(C0, I1)     each image prefers its caption
        image  s(C0, I0) > s(C0, I1)  and  s(C1, I1) > s(C1, I0)     each caption prefers its image
        group  both

    Strictly greater: a model that cannot tell scores nothing. By chance 25, 25 and 16.7 % are right.
    """
    return torch.stack((answers.text, answers.image, answers.text & answers.image), dim=1)


def evaluate_checkpoint(args: argparse.Namespace, open_model: OpenModel) -> dict[str, Any]:
    """Evaluate what the options say, write the result, show the table.

    Raises:
        ValueError: options, files or data that do not fit; the message says what would.
    """
    process = start_evaluation(args)
    folder, images = annotation_folders(args, f"with Winoground's {WINOGROUND_EXAMPLES}")
    path = folder / WINOGROUND_EXAMPLES
    examples = read_examples(path)
    scorer = open_model(args, process)
    encoded = encode_questions(scorer, examples, images)
    answers = answer(encoded, scorer.score_pairs)
    right, tags = scores_of(answers), [example.split for example in encoded.questions]
    result = {
        "evaluation": "Winoground",
        **summary(right),
        "by_tag": {tag: summary(right[[own == tag for own in tags]]) for tag in sorted({*tags} - {""})},
        "rule": f"strictly greater {scorer.measure}s, in fp32",
        **scorer.record,
        "examples": {
            **file_record(path),
            "images": str(images),
            "num_ties": int((answers.text_tied | answers.image_tied).sum()),
            "num_left_out": encoded.num_empty + encoded.num_without_image,
            "num_truncated_captions": encoded.num_truncated,
        },
    }
    return report(result, table(result), args, "winoground.json")


def summary(right: Bool[Tensor, "examples 3"]) -> dict[str, float]:
    """The three scores in percent, and the number of examples."""
    means = (100 * right.double().mean(dim=0)).tolist()
    return {**dict(zip(SCORES, means, strict=True)), "num_examples": len(right)}


def table(result: dict[str, Any]) -> str:
    """Scores for people."""
    head = f"{'':<10}" + "".join(f"  {name + ' %':>8}" for name in SCORES) + f"  {'examples':>8}"
    rows = {"all": result, **result["by_tag"]}
    lines = [
        f"{name:<10}" + "".join(f"  {row[score]:>8.2f}" for score in SCORES) + f"  {row['num_examples']:>8}"
        for name, row in rows.items()
    ]
    return "\n".join([head, *lines])
