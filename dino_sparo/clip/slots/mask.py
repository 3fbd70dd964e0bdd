"""True and false captions -> weights for a CLIP's slots that separate them, and the effect of these weights elsewhere.

    dino-sparo slots mask --pretrained_weights output/checkpoint.pth --data_root data/sugar-crepe/data \
        --images data/coco/val2017 --evaluate data/imagenet cifar10:data dtd:data

One weight in [0, 1] per slot, per dimension, or per equal part of an encoding is fitted to all pairs of SugarCrepe (or
of `dino-sparo scene-pairs`). The model itself stays as it is. Where slots are concepts, a choice among them that suits
one task should do little harm to others: --evaluate measures the harm. Prints a table, writes the mask, with all that
it depends on, as mask_WEIGHTS_DATA.json, which evaluations of a CLIP take as --slots, and a plot of that name. Source:
SPARO, section 5.2, table 5 and appendix 0.C.1.
"""

import argparse
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from dino_sparo.clip.config import CLIPConfig
from dino_sparo.clip.load import clip_scorer
from dino_sparo.clip.options import PER_DIMENSION, PER_SLOT
from dino_sparo.clip.slots.subsets import ReducedClip, mask_features
from dino_sparo.data.sources.decode import ImageLimits
from dino_sparo.draw.plots import ACCENT, panels, ranked_bars
from dino_sparo.draw.sheet import INK, SOFT, require_matplotlib
from dino_sparo.draw.tables import text_table
from dino_sparo.evaluation.slots.choice import SlotMask
from dino_sparo.evaluation.slots.curve import TITLE
from dino_sparo.image_text.evaluation.compositional.benchmark import summarize
from dino_sparo.image_text.evaluation.compositional.discover import ImageRules, LocalBenchmark, open_benchmark
from dino_sparo.image_text.evaluation.compositional.questions import (
    EncodedQuestions,
    ScorePairs,
    answers_to,
    encode_questions,
)
from dino_sparo.image_text.evaluation.compositional.sets import BENCHMARKS
from dino_sparo.image_text.evaluation.protocol import open_evaluation_images, require_few_missing
from dino_sparo.image_text.evaluation.task import ScorerTask
from dino_sparo.image_text.evaluation.zero_shot import evaluate_zero_shot
from dino_sparo.image_text.prompts import open_labelled
from dino_sparo.image_text.scorer import DotProductScorer
from dino_sparo.image_text.step import INITIAL_LOGIT_SCALE
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.launch import is_main
from dino_sparo.runtime.logs import progress
from dino_sparo.weights.results import scores_in_percent

SUGARCREPE = BENCHMARKS["sugarcrepe"]
MAX_BARS = 256  # more parts are drawn as an area
BOUND = 100.0
# How the inverse temperature is bounded -> where alpha starts. The paper prints max(100, exp(alpha)), "similar to
# CLIP", and does not say where alpha starts; CLIP's own is min(100, exp(alpha)) from ln(1 / 0.07). With max alpha
# starts where the bound begins to depend on it, a hair above, so that rounding does not decide whether it learns.
INITIAL_ALPHA = {"min": math.log(INITIAL_LOGIT_SCALE), "max": math.log(BOUND) + 1e-6}


class Mask(nn.Module):
    """Weights of the parts of an encoding, and the inverse temperature of their loss.

        scale = min(100, exp(alpha)),   m = sigmoid(scale / 4 * theta)

    theta, one number per part, starts at 0: m = 1/2 everywhere changes no cosine. (Where it starts is not in the
    paper.) Source: SPARO, appendix 0.C.1, which prints max(100, exp(alpha)): `bound="max"`. With max the sigmoid
    saturates in the first epochs, and a mask of slots stays at a larger loss (docs/clip.md has the numbers).

    Args:
        num_parts: number of parts.
        bound: `min` or `max`, of 100 and exp(alpha).
    """

    def __init__(self, num_parts: int, bound: str = "min") -> None:
        super().__init__()
        self.bound = bound
        self.theta = nn.Parameter(torch.zeros(num_parts))
        self.alpha = nn.Parameter(torch.tensor(INITIAL_ALPHA[bound]))

    def forward(self) -> tuple[Float[Tensor, " parts"], Float[Tensor, ""]]:
        """The weights m, and the scale."""
        exponential = self.alpha.exp()
        scale = exponential.clamp(max=BOUND) if self.bound == "min" else exponential.clamp(min=BOUND)
        return torch.sigmoid(scale / 4 * self.theta), scale


def part_products(pairs: EncodedQuestions, num_parts: int) -> Float[Tensor, "3 pairs parts"]:
    """Scalar products of normalised encodings, part by part; the number of parts divides M.

    They are of image and true caption, of image and false caption, and of the image with itself.
    """
    images = pairs.images[pairs.image_of[:, 0]]
    others = (pairs.texts[pairs.text_of[:, 0]], pairs.texts[pairs.text_of[:, 1]], images)
    return torch.stack([(images * other).unflatten(1, (num_parts, -1)).sum(dim=2) for other in others])


def pair_loss(
    products: Float[Tensor, "3 pairs parts"], weights: Float[Tensor, " parts"], scale: Float[Tensor, ""]
) -> Float[Tensor, ""]:
    """Cross-entropy of choosing the true caption of two, in nats.

        y' = m * y,   logits = scale * [y' . y_p / (|y'| |y_p|),  y' . y_n / (|y'| |y_n|)],   target: the first

    with y, y_p and y_n the normalised encodings of image, true and false caption, and the weights m. Source: SPARO,
    appendix 0.C.1.
    """
    lengths = (products[2] @ weights.square()).sqrt()
    cosines = torch.stack((products[0] @ weights, products[1] @ weights), dim=1) / lengths[:, None]
    return F.cross_entropy(scale * cosines, torch.zeros_like(lengths, dtype=torch.int64))


def masked_pairs(pairs: EncodedQuestions, weights: Float[Tensor, " parts"]) -> EncodedQuestions:
    """The same pairs with masked images."""
    return replace(pairs, images=mask_features(pairs.images, weights))


def summary_of(pairs: EncodedQuestions, score_pairs: ScorePairs) -> dict[str, Any]:
    """Accuracies of SugarCrepe's splits and their means, as `benchmark.summarize` gives them."""
    return summarize(SUGARCREPE, SUGARCREPE.outcomes(pairs.questions, answers_to(pairs, score_pairs)))


def fit_mask(
    pairs: EncodedQuestions,
    num_parts: int,
    epochs: int,
    lr: float,
    momentum: float,
    batch_size: int,
    seed: int,
    bound: str,
) -> tuple[Float[Tensor, " parts"], dict[str, Any]]:
    """Learn a mask on frozen encodings by SGD, and keep the mask of the best epoch.

    After every epoch the masked encodings are evaluated as SugarCrepe is: right if strictly nearer, averaged over the
    splits. Pairs of all splits are put together without balancing them.

    Returns:
        The weights after the epoch with the highest accuracy, of several the first; and the course of the fit, for the
        result: this epoch, from 1, the mean loss of every epoch, nats, and the accuracy after every epoch, percent.
    """
    products = part_products(pairs, num_parts)
    mask = Mask(num_parts, bound).to(pairs.images.device)
    optimizer = torch.optim.SGD(mask.parameters(), lr=lr, momentum=momentum)
    generator = torch.Generator().manual_seed(seed)
    masks, losses, accuracies = [], [], []
    for epoch in progress(range(1, epochs + 1), desc="mask"):
        total = torch.zeros((), device=pairs.images.device)
        order = torch.randperm(len(pairs.questions), generator=generator).to(pairs.images.device)
        for rows in order.split(batch_size):
            loss = pair_loss(products[:, rows], *mask())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach() * len(rows)
        weights = mask()[0].detach()
        if not (weights.isfinite().all() and weights.any()):
            raise UserError(f"the mask of epoch {epoch} has no finite weight above 0; give a smaller --lr")
        masks.append(weights)
        losses.append(float(total) / len(pairs.questions))
        summary = summary_of(masked_pairs(pairs, weights), DotProductScorer.score_pairs)
        accuracies.append(summary["means"]["macro"]["accuracy"])
    best = accuracies.index(max(accuracies))
    return masks[best], {
        "num_parts": num_parts,
        "parts_above_half": int((masks[best] > 0.5).sum()),
        "best_epoch": best + 1,
        "losses": losses,
        "accuracies": accuracies,
    }


def relative_change(initial: float, masked: float, fit_initial: float, fit_masked: float) -> float | None:
    """Relative change of an accuracy over the relative change where the mask was learned.

        ((masked - initial) / initial) / ((fit_masked - fit_initial) / fit_initial)

    1 if masking helps as much here as there, negative if it harms. Source: SPARO, table 5.

    Returns:
        The ratio; None where nothing has changed there, or an accuracy was 0.
    """
    if fit_masked == fit_initial or not initial or not fit_initial:
        return None
    return ((masked - initial) / initial) / ((fit_masked - fit_initial) / fit_initial)


def number_of_parts(parts: str, config: CLIPConfig) -> int:
    """The number of parts that `--parts` gives."""
    if parts == PER_DIMENSION:
        return config.embed_dim
    if parts == PER_SLOT:
        if not config.image.kind.has_slots:
            raise UserError(
                f"parts=slot, but readout {config.readout!r} has no slots; give a number of contiguous equal parts "
                "in place of slots (64 in the paper), or dimension"
            )
        return config.image.num_slots
    if not parts.isdecimal() or int(parts) < 1 or config.embed_dim % int(parts):
        raise UserError(
            f"parts={parts!r}: give slot, dimension, or a number that divides the encoding's {config.embed_dim} numbers"
        )
    return int(parts)


def change_elsewhere(
    scorer: DotProductScorer, mask: SlotMask, data_path: str, download: bool, limits: ImageLimits
) -> dict[str, Any]:
    """Zero-shot top-1 accuracy on a set of images with its own class names and templates, without and with the mask."""
    source = open_evaluation_images(data_path, None, download, limits)
    images, classes, templates = open_labelled(source, data_path)
    model = ReducedClip(scorer.model, mask).to(scorer.device)
    masked = DotProductScorer(**{**vars(scorer), "model": model})  # `scorer` may be one of whole models alone
    results = [evaluate_zero_shot(each, images, classes.names, templates) for each in (scorer, masked)]
    return {
        "data_path": data_path,
        "initial": results[0]["top1"],
        "masked": results[1]["top1"],
        "num_images": results[0]["images"]["num_images"],
        "num_classes": len(classes.names),
        "classnames": classes.origin,
        "templates": list(templates),
    }


def open_pairs(args: argparse.Namespace) -> LocalBenchmark:
    """The true and false captions in `--data_root`; their images lie in `--images`, by default in `images` there."""
    if not args.data_root:
        raise UserError("--data_root is empty; give the folder with the JSON files of SugarCrepe or scene-pairs")
    folder = Path(args.data_root)
    rules = ImageRules.of(args, folder, default_images=folder / "images")
    local = open_benchmark(SUGARCREPE, folder, rules)
    if not local.questions:
        raise UserError(f"{local.title}: {local.missing[-1]}")
    return local


def encode_pairs(
    scorer: DotProductScorer, local: LocalBenchmark, max_missing: float, limits: ImageLimits
) -> EncodedQuestions:
    """The questions, encoded once for all epochs.

    Raises:
        UserError: too many images are missing or cannot be read.
    """
    encoded = encode_questions(scorer, local.questions, limits)
    if encoded is None:
        raise UserError(f"{local.title}: none of the images in {local.images} can be read")
    total = len(local.questions) + local.with_missing_image.total()
    problem = f"questions' images in {local.images} are missing or cannot be read"
    require_few_missing(total - len(encoded.questions), total, problem, max_missing)
    return encoded


def learn_mask(args: argparse.Namespace) -> dict[str, Any]:
    """Learn the mask of the options, evaluate the mask, write mask and plot, show the table."""
    task = ScorerTask.start(args, clip_scorer)
    require_matplotlib()
    local = open_pairs(args)
    scorer = task.scorer
    file = task.open_result("mask")
    config: CLIPConfig = scorer.model.config
    num_parts = number_of_parts(args.parts, config)
    pairs = encode_pairs(scorer, local, args.max_missing, task.limits)
    before = summary_of(pairs, scorer.score_pairs)
    settings = args.epochs, args.lr, args.momentum, args.mask_batch_size, args.seed, args.mask_scale
    weights, course = fit_mask(pairs, num_parts, *settings)
    mask = SlotMask(tuple(weights.tolist()), config.embed_dim, task.weights["sha256"])
    after = summary_of(masked_pairs(pairs, weights), scorer.score_pairs)
    elsewhere = [change_elsewhere(scorer, mask, where, args.download, task.limits) for where in args.evaluate]
    result = {
        **mask.to_dict(),
        **describe(before, after, elsewhere),
        "fit": {
            "parts": args.parts,
            "optimizer": "SGD, constant learning rate, no weight decay",
            **{name: getattr(args, name) for name in ("lr", "momentum", "epochs", "seed")},
            "batch_size": args.mask_batch_size,
            "mask_scale": f"{args.mask_scale}({BOUND:.0f}, exp(alpha))",
            **course,
        },
        "pairs": {
            "images": str(local.images),
            "files": {file.removesuffix(".json"): record for file, record in local.file_records().items()},
            "num_pairs": len(pairs.questions),
            "num_without_image": local.with_missing_image.total() + len(local.questions) - len(pairs.questions),
            "num_with_empty_caption": local.with_empty_caption.total(),
            "num_truncated_captions": pairs.num_truncated,
        },
    }
    if is_main():
        draw_mask(weights, course, result["accuracy"]["initial"], file.path.with_suffix(".png"))
    names = {"initial": "accuracy without mask", "masked": "accuracy with mask"}
    return file.write(result, table(result), headline=scores_in_percent(result["accuracy"], names))


def describe(before: dict[str, Any], after: dict[str, Any], elsewhere: list[dict[str, Any]]) -> dict[str, Any]:
    """Accuracies without and with the mask, of `summary_of` and elsewhere, as in table 5 of the paper."""
    accuracy = {name: each["means"]["macro"]["accuracy"] for name, each in (("initial", before), ("masked", after))}
    means = {n: sum(each[n] for each in elsewhere) / len(elsewhere) for n in ("initial", "masked") if elsewhere}
    for each in filter(None, [*elsewhere, means]):
        each["relative_change"] = relative_change(each["initial"], each["masked"], *accuracy.values())
    return {
        "evaluation": "mask of image encodings learned on true and false captions",
        "accuracy": accuracy,
        "splits": {
            split: {
                "initial": each["accuracy"],
                "masked": after["splits"][split]["accuracy"],
                "num_pairs": each["num_questions"],
                "num_ties": {"initial": each["num_ties"], "masked": after["splits"][split]["num_ties"]},
            }
            for split, each in before["splits"].items()
        },
        "elsewhere": elsewhere,
        "mean_elsewhere": means or None,
        "rule": {
            "accuracy": "SugarCrepe, percent, mean over the splits; the mask was learned on the same pairs",
            "elsewhere": "zero-shot top-1, percent",
            "relative_change": "of the accuracy elsewhere over that of `accuracy`, each relative to its initial value",
        },
    }


def table(result: dict[str, Any]) -> str:
    """The accuracies as a table to print."""
    named = [("pairs of the fit", result["accuracy"])]
    named += [(each["data_path"], each) for each in result["elsewhere"]]
    named += [("mean of these", result["mean_elsewhere"])] if len(result["elsewhere"]) > 1 else []
    rows = [("", "initial %", "masked %", "relative change")]
    for name, each in named:
        change = each.get("relative_change")
        changed = "" if change is None else f"{change:+.3f}"
        rows.append((name, f"{each['initial']:.2f}", f"{each['masked']:.2f}", changed))
    fit = result["fit"]
    above = f"{fit['parts_above_half']} of {fit['num_parts']} weights above 1/2, epoch {fit['best_epoch']}"
    return f"{text_table(rows, num_words=1)}\n{above}"


def draw_mask(values: Float[Tensor, " parts"], course: dict[str, Any], initial: float, path: Path) -> None:
    """Draw the course of the fit, and the weights, heaviest part first."""
    order = values.argsort(descending=True, stable=True).tolist()
    weights = values[order].tolist()
    above, epoch, accuracies = (course[name] for name in ("parts_above_half", "best_epoch", "accuracies"))
    best = accuracies[epoch - 1]
    with panels(path, 1, 2) as axes:
        fit, mask = axes[0]
        fit.axhline(initial, color=SOFT, linestyle=(0, (4, 3)), linewidth=1, label="without mask")
        fit.plot(range(1, len(accuracies) + 1), accuracies, color=INK, linewidth=1.4, label="masked")
        fit.plot([epoch], [best], "o", color=ACCENT, markersize=7, label=f"epoch {epoch}: {best:.1f} %")
        fit.set(xlabel="epoch", ylabel="right of the pairs, %")
        fit.set_title("Fit to true and false captions", **TITLE)
        fit.legend(frameon=False, loc="best")
        fit.locator_params(axis="x", integer=True)
        if len(weights) <= MAX_BARS:
            ranked_bars(mask, order, weights, above)
        else:
            mask.fill_between(range(1, len(weights) + 1), weights, color=ACCENT, linewidth=0)
        mask.set(xlabel="part of the encoding, heaviest first", ylabel="weight", ylim=(0, 1.02))
        mask.set_title(f"Mask: {above} of {len(weights)} above ½", **TITLE)
