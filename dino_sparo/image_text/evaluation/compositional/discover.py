"""A folder -> the benchmarks below it, with their images; what of them is missing, and where to get it."""

import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dino_sparo.image_text.evaluation.compositional.benchmark import Benchmark
from dino_sparo.image_text.evaluation.compositional.registry import BENCHMARKS
from dino_sparo.image_text.evaluation.questions import Question
from dino_sparo.image_text.scoring.image_files import ImageName, file_of, image_path

logger = logging.getLogger(__name__)

MAX_DEPTH = 4  # folders below --data_root that are looked into
IMAGES_TRIED = 20  # the first ones of a benchmark; the folder that holds one of them is that of its images
# Many files and no annotations.
IMAGE_FOLDERS = frozenset(
    ("images", "val2017", "val2014", "train2017", "train2014", "test2014", "vg_images", "VG_100K", "VG_100K_2")
) | {"controlled_images", "controlled_clevr", "flickr30k-images", "hake", "swig"}


@dataclass(frozen=True)
class LocalBenchmark:
    """A benchmark on disk: its questions, and what of it is missing.

    Attributes:
        benchmark: which.
        folder: of its annotations.
        title: the benchmark's, with the folder where it lies in several.
        images: folder that names of images start from.
        questions: those that have their captions and image files; an image is its absolute path, or a part of it.
        without_image: split -> questions whose image files are missing.
        with_empty_caption: split -> questions with an empty caption.
        lacks: what makes it incomplete, a sentence each.
    """

    benchmark: Benchmark
    folder: Path
    title: str
    images: Path
    questions: list[Question]
    without_image: Counter[str]
    with_empty_caption: Counter[str]
    lacks: list[str]


def folders_of(root: Path, names: Sequence[str]) -> Iterator[tuple[Benchmark, Path]]:
    """Benchmarks whose annotations lie at most `MAX_DEPTH` folders below a folder, in the order of their names.

    Args:
        root: where to look.
        names: of benchmarks.
    """
    folders: dict[str, Path] = {}  # by their real path: links may lead to a folder twice, or in a circle
    for folder, below, _ in os.walk(root, followlinks=True):
        is_deep = len(Path(folder).relative_to(root).parts) >= MAX_DEPTH
        is_known = Path(folder) != folders.setdefault(os.path.realpath(folder), Path(folder))
        below[:] = [] if is_deep or is_known else sorted(set(below) - IMAGE_FOLDERS)
    for name in names:
        yield from ((BENCHMARKS[name], folder) for folder in folders.values() if BENCHMARKS[name].is_in(folder))


def find_benchmarks(root: Path, names: Sequence[str], max_missing: float) -> list[LocalBenchmark]:
    """Read all benchmarks that lie below a folder.

    Args:
        root: where to look.
        names: of benchmarks.
        max_missing: share of the images that may be missing. What lacks all of its images is left out.

    Raises:
        ValueError: there is none; annotations that cannot be read; or more images are missing.
    """
    if not root.is_dir():
        raise ValueError(f"--data_root {str(root)!r} is no folder; give the one that holds the benchmarks")
    candidates = list(folders_of(root, names))
    if not candidates:
        wanted = (f"{name} ({BENCHMARKS[name].files[0]}, from {BENCHMARKS[name].source})" for name in names)
        raise ValueError(
            f"--data_root {root} holds no benchmark; looked {MAX_DEPTH} folders deep for the annotations of "
            + "; ".join(wanted)
        )
    times = Counter(benchmark.name for benchmark, _ in candidates)
    opened = []
    for benchmark, folder in candidates:
        title = benchmark.title + f" ({folder.relative_to(root)})" * (times[benchmark.name] > 1)
        opened.append(open_benchmark(benchmark, folder, title, root, max_missing))
    for each in opened:
        for sentence in each.lacks:
            logger.warning("%s: %s", each.title, sentence)
    usable = [each for each in opened if each.questions]
    if not usable:
        raise ValueError(f"no benchmark below {root} has its images; {opened[0].title}: {opened[0].lacks[-1]}")
    return usable


def open_benchmark(benchmark: Benchmark, folder: Path, title: str, root: Path, max_missing: float) -> LocalBenchmark:
    """Read one benchmark and look for its images.

    Args:
        benchmark: which.
        folder: of its annotations.
        title: for messages.
        root: images may lie there, too.
        max_missing: as for `find_benchmarks`.

    Raises:
        ValueError: as for `find_benchmarks`.
    """
    questions = list(benchmark.read(folder))
    names = list(dict.fromkeys(file_of(image) for question in questions for image in question.images))
    images = image_folder(benchmark, folder, root, names)
    paths = {name: image_path(images, name) for name in names}
    lacks = _missing_annotations(benchmark, folder, questions)
    absent = set()
    for part in dict.fromkeys(map(benchmark.part_of, questions)):
        own = (question for question in questions if benchmark.part_of(question) == part)
        needed = {file_of(image) for question in own for image in question.images}
        gone = sorted(name for name in needed if paths[name] is None)
        if len(gone) == len(needed):
            absent.add(part)
            lacks.append(
                f"left out what needs {part}: none of {len(needed)} images, such as {gone[0]}, lies in {images}, or in "
                f"{', '.join(benchmark.images)} beside the annotations, above them or in --data_root; get them from "
                f"{benchmark.source}"
            )
        elif len(gone) > max_missing * len(needed):
            raise ValueError(
                f"{title}: of {part} {len(gone)} of {len(needed)} files, such as {gone[0]}, are missing in {images}; "
                f"at most {max_missing:.3g} of them may be. Get them from {benchmark.source}, raise --max_missing, or "
                "leave the benchmark out with --benchmarks"
            )
    asked = [question for question in questions if benchmark.part_of(question) not in absent]
    worded = [question for question in asked if all(text.strip() for text in question.captions)]
    whole = [question for question in worded if all(paths[file_of(image)] for image in question.images)]
    empty = _fewer(asked, worded)
    without = _fewer(worded, whole)
    if empty or without:
        lacks.append(f"left out {without.total()} questions without image, {empty.total()} with an empty caption")
    located = [_located(question, images, paths) for question in whole]
    return LocalBenchmark(benchmark, folder, title, images, located, without, empty, lacks)


def image_folder(benchmark: Benchmark, folder: Path, root: Path, names: Sequence[str]) -> Path:
    """The folder in which images lie: the first of the benchmark's that has one of the first few.

    Args:
        benchmark: which.
        folder: of its annotations.
        root: images may lie there, too.
        names: of image files.
    """
    tries = [start / name for start in (folder, folder.parent, root) for name in benchmark.images]
    there = [path for path in tries if path.is_dir()]
    seen = (path for path in there if any(image_path(path, name) for name in names[:IMAGES_TRIED]))
    return next(seen, (there or tries)[0]).resolve()


def _missing_annotations(benchmark: Benchmark, folder: Path, questions: Sequence[Question]) -> list[str]:
    """What a download lacks, besides images."""
    lacks = []
    if missing := benchmark.missing_files(folder):
        first = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        lacks.append(
            f"{folder} lacks {len(missing)} of {len(benchmark.files)} files: {first}; get them from {benchmark.source}"
        )
    counts = Counter(question.split for question in questions)
    wrong = [
        f"{split} has {counts[split]} questions, not {count}"
        for split, count in benchmark.counts.items()
        if counts[split] not in (0, count)
    ]
    if benchmark.total not in (None, len(questions)):
        wrong.append(f"it has {len(questions)} questions, not {benchmark.total}")
    return lacks + ["; ".join(wrong) + f"; compare with {benchmark.source}"] * bool(wrong)


def _fewer(before: Sequence[Question], after: Sequence[Question]) -> Counter[str]:
    """How many questions of each split were left out."""
    return Counter(question.split for question in before) - Counter(question.split for question in after)


def _located(question: Question, folder: Path, paths: Mapping[str, str | None]) -> Question:
    """The question with absolute paths."""

    def path(image: ImageName) -> ImageName:
        whole = str(folder / (paths[file_of(image)] or ""))
        return whole if isinstance(image, str) else image._replace(name=whole)

    return question._replace(images=tuple(map(path, question.images)))
