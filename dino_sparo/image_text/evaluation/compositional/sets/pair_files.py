"""What also has a command of its own: SugarCrepe, Winoground, and the built-in scenes in SugarCrepe's format."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from dino_sparo.data.sources.limits import parse_json
from dino_sparo.image_text.evaluation.compositional.benchmark import Outcome, Weights, equal_means
from dino_sparo.image_text.evaluation.questions import Answers, Question
from dino_sparo.image_text.evaluation.sugarcrepe import GROUPS
from dino_sparo.image_text.evaluation.winoground import SCORES, scores_of

SWAPPED = "swap_att.json"


def is_scene_pairs(folder: Path) -> bool:
    """Whether files in SugarCrepe's format are those of the command scene-pairs, which notes what it exchanged."""
    try:
        entries = parse_json((folder / SWAPPED).read_text(encoding="utf-8"))
        return "swapped" in next(iter(entries.values()))
    except (OSError, ValueError, AttributeError, StopIteration, TypeError):
        return False


def group_means(counts: Mapping[str, int]) -> dict[str, Weights]:
    """SPARO's average, the mean over splits, and the mean of each group of splits."""
    own = {group: [split for split in splits if split in counts] for group, splits in GROUPS.items()}
    groups = {group: dict.fromkeys(splits, 1 / len(splits)) for group, splits in own.items() if splits}
    return {**equal_means(counts), **groups}


def winoground_outcomes(questions: Sequence[Question], answers: Answers) -> list[Outcome]:
    """Text, image and group score of every question; a score is tied if two that it compares are equal."""
    strict = scores_of(answers)
    tied = answers.text_tied, answers.image_tied, answers.text_tied | answers.image_tied
    return [
        Outcome(score, number, bool(strict[number, column]), bool(tied[column][number]))
        for number in range(len(questions))
        for column, score in enumerate(SCORES)
    ]
