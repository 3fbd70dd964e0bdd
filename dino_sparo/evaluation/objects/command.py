"""A checkpoint and images with masks -> how well its maps find objects: table, slot_score.json, plots.

    dino-sparo slots score --pretrained_weights output/checkpoint.pth --data_path scenes
    dino-sparo slots score --pretrained_weights output/checkpoint.pth --data_path VOCdevkit/VOC2012
    dino-sparo slots score --pretrained_weights output/checkpoint.pth --data_path val2017 --masks instances_val2017.json
    dino-sparo slots score --pretrained_weights seed0/checkpoint.pth --match seed1/checkpoint.pth --output_dir scores

For measures, controls and layouts see `docs/slot_score.md`.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dino_sparo.data.sources import require_channels
from dino_sparo.data.views import PatchView
from dino_sparo.draw.figure import describe_model
from dino_sparo.draw.sheet import require_matplotlib
from dino_sparo.evaluation.encoders import OTHER_SEED, EvaluatedEncoder, compared_encoder, untrained_encoder
from dino_sparo.evaluation.objects.layouts import ObjectSource, open_objects
from dino_sparo.evaluation.objects.report import draw_classes, draw_matching, draw_measures, table
from dino_sparo.evaluation.objects.slots import describe_maps, match_held_out
from dino_sparo.evaluation.objects.survey import MODEL, UNTRAINED, Survey, slot_values, survey_objects
from dino_sparo.evaluation.task import EncoderTask
from dino_sparo.runtime.cli import say
from dino_sparo.runtime.faults import UserError, require
from dino_sparo.runtime.launch import on_first_process
from dino_sparo.weights.results import Score

# With few images, slots of noise are similar: their linear CKA is 1 with two images, 0.43 with ten.
MIN_MATCH_IMAGES = 20
# Entry of a result, name of its plot, function that draws the plot.
PLOTS = (("measures", "score", draw_measures), ("classes", "classes", draw_classes), ("match", "match", draw_matching))


@on_first_process
def score_slots(args: argparse.Namespace) -> dict[str, Any]:
    """Score the maps of the encoder that the options name, write the result and the plots, print the table.

    Returns:
        The content of slot_score.json; {} on processes other than the first.
    """
    task = EncoderTask.start_alone(args)
    require_matplotlib()
    if args.match:
        require("scipy", "matched slots")
    subject, file = task.subject, task.open_result("slot_score")
    other = compared_encoder(args.match, args) if args.match else None
    check_has_maps(subject, other)
    source = open_objects(args.data_path, args.masks, task.limits)
    require_channels(source.images, task.limits)
    view = subject.patch_view(args.img_size and [args.img_size])
    control = untrained_encoder(subject.encoder.config, args.seed + bool(args.untrained), subject.mean, subject.std)
    survey = survey_objects(
        {MODEL: task.encoder, UNTRAINED: control.encoder.to(task.device)},
        source,
        choose_images(len(source.images), args.num_images),
        view,
        args.share,
        args.seed,
        args.num_workers,
        args.maps,
    )
    jaccards, untrained = (np.concatenate(survey.jaccards[row]) for row in (MODEL, UNTRAINED))
    result = {
        **describe_run(subject, source, survey, view, args),
        "measures": survey.measures(args.seed),
        "differences": survey.differences(args.seed),
        "redundancy": survey.mean_redundancy(),
        **describe_maps(jaccards, untrained, survey.classes, source.classes, args.seed),
    }
    if other is not None:
        result["match"] = match_models(survey, other, source, args, task.device)
    scores = result["measures"][MODEL].items()
    headline = [Score(name, each["mean"], "", *(each["interval_95"] or ())) for name, each in scores]
    written = file.write(result, table(result), headline=headline)
    say("\n".join(map(str, draw(result, task, file.path))))
    return written


def check_has_maps(subject: EvaluatedEncoder, other: EvaluatedEncoder | None) -> None:
    """Refuse an encoder that averages all tokens, and encoders without slots for --match."""
    config = subject.encoder.config
    if config.kind.shows == "average":
        raise UserError(f"slots score needs maps; readout={config.readout!r} averages all tokens and has none")
    for compared in (subject, other) if other is not None else ():
        if not compared.encoder.config.kind.has_slots:
            raise UserError(
                f"--match compares values of slots; readout={compared.encoder.config.readout!r} of "
                f"{compared.record['pretrained_weights']} has no slots. Leave --match out"
            )


def choose_images(count: int, num_images: int) -> list[int]:
    """At most `num_images` indices in a random, fixed order.

    Maps of the preceding image are a control, and folders and scenes are ordered by class.
    """
    return np.random.default_rng(0).permutation(count)[:num_images].tolist()


def describe_run(
    subject: EvaluatedEncoder, source: ObjectSource, survey: Survey, view: PatchView, args: argparse.Namespace
) -> dict[str, Any]:
    """Encoder, data and view, for the result."""
    config = subject.encoder.config
    return {
        "evaluation": "slot score",
        "kind": config.kind.shows,
        "num_maps": survey.jaccards[MODEL][0].shape[1],
        "maps_per_score": survey.subsets[1],
        "subsets_per_image": survey.subsets[0],
        "data": {
            "name": source.images.name,
            "masks": args.masks,
            "num_images": len(survey.classes),
            "num_objects": sum(map(len, survey.classes)),
            "objects_out_of_view": survey.out_of_view,
            "without_objects": len(survey.indices) - len(survey.classes),
            "unreadable": len(survey.left_out),
        },
        "view": {
            "exif": args.exif,
            "square": view.size[0],
            "patch_size": config.patch_size,
            "upsampling": "nearest",
            "mean": view.mean,
            "std": view.std,
        },
        "share": args.share,
        "seed": args.seed,
    }


def match_models(
    survey: Survey, other: EvaluatedEncoder, source: ObjectSource, args: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    """The best matching of the slots of two encoders, and controls."""
    count = len(survey.indices)
    if count < MIN_MATCH_IMAGES:
        raise UserError(f"--match needs at least {MIN_MATCH_IMAGES} images; {count} could be read")
    slots_of_model, size = np.concatenate(survey.values), args.img_size and [args.img_size]
    # Not the survey's untrained encoder, which may be the start of one of the two runs and so resemble its slots.
    start = untrained_encoder(other.encoder.config, args.seed + OTHER_SEED, other.mean, other.std)
    untrained, theirs = (
        slot_values(compared.encoder.to(device), source, survey.indices, compared.patch_view(size))
        for compared in (start, other)
    )
    shuffled = np.random.default_rng(args.seed).permutation(theirs)
    others = {"matched": theirs, "untrained": untrained, "shuffled_images": shuffled}
    matchings = {name: match_held_out(slots_of_model, values) for name, values in others.items()}
    pairs = {name: table[slots, partners] for name, (slots, partners, table) in matchings.items()}
    slots, partners, table = matchings["matched"]
    return {
        "encoder": other.record,
        "similarity": "linear CKA",
        "matching_images": len(slots_of_model[::2]),
        "num_images": len(slots_of_model[1::2]),
        "mean_of_all_pairs": float(table.mean()),
        **{
            name: {"mean": float(similarity.mean()), "pairs": np.sort(similarity)[::-1].tolist()}
            for name, similarity in pairs.items()
        },
        "partners": [
            {"slot": int(slot), "partner": int(partner), "similarity": float(value)}
            for slot, partner, value in zip(slots, partners, pairs["matched"], strict=True)
        ],
    }


def draw(result: dict[str, Any], task: EncoderTask, path: Path) -> list[Path]:
    """Write the plots of measures, classes and matched slots beside the result at `path`; returns their paths."""
    config = task.subject.encoder.config
    model = describe_model(task.weights, config, config.readout)
    paths = []
    for entry, name, plot in PLOTS:
        if entry in result:
            paths.append(path.with_name(path.name.replace("score", name, 1)).with_suffix(".png"))
            plot(result, model, paths[-1])
    return paths
