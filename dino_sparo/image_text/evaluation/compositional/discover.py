"""A folder -> the benchmarks below it, with their images, and a list of what is missing."""

import argparse
import logging
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dino_sparo.image_text.evaluation.compositional.benchmark import Benchmark
from dino_sparo.image_text.evaluation.compositional.questions import Question
from dino_sparo.image_text.evaluation.compositional.sets import BENCHMARKS
from dino_sparo.image_text.evaluation.protocol import MAX_MISSING, file_of, find_images, image_path

logger = logging.getLogger(__name__)

MAX_DEPTH = 4  # folders below --data_root that are searched
IMAGES_TRIED = 20  # the first images of a benchmark; a folder with one of them is the folder of its images
# Many files and no annotations.
IMAGE_FOLDERS = frozenset(
    ("images", "val2017", "val2014", "train2017", "train2014", "test2014", "vg_images", "VG_100K", "VG_100K_2")
) | {"controlled_images", "controlled_clevr", "flickr30k-images", "hake", "swig"}


@dataclass(frozen=True)
class LocalBenchmark:
    """A benchmark on disk: its questions, and what is missing.

    Attributes:
        benchmark: the benchmark.
        folder: folder of the annotations.
        title: title of the benchmark, with the folder if several folders hold the benchmark.
        images: folder that names of images start from.
        questions: questions with captions and image files; an image is an absolute path or a crop of such a file.
        without_image: number of questions without image file, per split.
        with_empty_caption: number of questions with an empty caption, per split.
        lacks: what is missing, a sentence each.
    """

    benchmark: Benchmark
    folder: Path
    title: str
    images: Path
    questions: list[Question]
    without_image: Counter[str]
    with_empty_caption: Counter[str]
    lacks: list[str]


@dataclass(frozen=True)
class ImageRules:
    """Folders of images, and the share that may be missing.

    Attributes:
        root: `--data_root`, where images may lie, too.
        images: folder of the images; None: try the folders of the benchmark.
        max_missing: largest share of missing files in a part of the images. A part without any image is left out.
        allow_outside: whether annotations may name files outside of `root` and `images`.
    """

    root: Path
    images: Path | None = None
    max_missing: float = MAX_MISSING
    allow_outside: bool = False

    @classmethod
    def of(cls, args: argparse.Namespace, root: Path, default_images: Path | None = None) -> "ImageRules":
        """The rules that the options give; `default_images` takes the place of --images."""
        images = Path(args.images) if args.images else default_images
        return cls(root, images, args.max_missing, args.allow_outside)


def folders_of(root: Path, names: Sequence[str]) -> Iterator[tuple[Benchmark, Path]]:
    """Benchmarks whose annotations lie at most `MAX_DEPTH` folders below a folder, in the order of `names`."""
    folders: dict[str, Path] = {}  # by their real path: links may lead to a folder twice, or in a circle
    for folder, below, _ in os.walk(root, followlinks=True):
        is_deep = len(Path(folder).relative_to(root).parts) >= MAX_DEPTH
        is_known = Path(folder) != folders.setdefault(os.path.realpath(folder), Path(folder))
        below[:] = [] if is_deep or is_known else sorted(set(below) - IMAGE_FOLDERS)
    for name in names:
        yield from ((BENCHMARKS[name], folder) for folder in folders.values() if BENCHMARKS[name].is_in(folder))


def find_benchmarks(names: Sequence[str], rules: ImageRules) -> list[LocalBenchmark]:
    """Read all benchmarks of these names that lie below a folder."""
    root = rules.root
    if unknown := set(names) - set(BENCHMARKS):
        raise ValueError(f"--benchmarks {' '.join(sorted(unknown))} is unknown; there are {', '.join(BENCHMARKS)}")
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
    local = []
    for benchmark, folder in candidates:
        suffix = f" ({folder.relative_to(root)})" * (times[benchmark.name] > 1)
        local.append(open_benchmark(benchmark, folder, rules, suffix))
        for sentence in local[-1].lacks:
            logger.warning("%s: %s", local[-1].title, sentence)
    usable = [each for each in local if each.questions]
    if not usable:
        raise ValueError(f"no benchmark below {root} has its images; {local[0].title}: {local[0].lacks[-1]}")
    return usable


def open_benchmark(benchmark: Benchmark, folder: Path, rules: ImageRules, suffix: str = "") -> LocalBenchmark:
    """Read one benchmark with the annotations in `folder`, and find its images."""
    title = benchmark.title + suffix
    questions = list(benchmark.read(folder))
    names = list(dict.fromkeys(file_of(image) for question in questions for image in question.images))
    images = rules.images or image_folder(benchmark, folder, rules.root, names).resolve()
    roots = None if rules.allow_outside else (images, rules.root.resolve())
    try:
        paths = find_images(images, names, roots)
    except ValueError as error:
        raise ValueError(f"{title} in {folder}: {error}") from error
    lacks = _missing_annotations(benchmark, folder, questions)
    parts: dict[str, set[str]] = defaultdict(set)  # part -> the files that it needs
    for question in questions:
        parts[benchmark.part_of(question)].update(map(file_of, question.images))
    absent = set()
    for part, needed in parts.items():
        gone = sorted(needed - set(paths))
        if len(gone) == len(needed):
            absent.add(part)
            lacks.append(
                f"left out what needs {part}: none of {len(needed)} images, such as {gone[0]!r}, lies in {images}"
                + ("" if rules.images else f", or in {', '.join(benchmark.images)} beside the annotations, above them")
                + f" or in --data_root; get them from {benchmark.source}"
            )
        elif len(gone) > rules.max_missing * len(needed):
            raise ValueError(
                f"{title}: of {part} {len(gone)} of {len(needed)} files, such as {gone[0]!r}, are missing in {images}; "
                f"at most {rules.max_missing:.3g} of them may be. Get them from {benchmark.source}, or raise "
                "--max_missing"
            )
    local = LocalBenchmark(benchmark, folder, title, images, [], Counter(), Counter(), lacks)
    for question in questions:
        if benchmark.part_of(question) in absent:
            continue
        if not all(text.strip() for text in question.captions):
            local.with_empty_caption[question.split] += 1
        elif not all(file_of(image) in paths for image in question.images):
            local.without_image[question.split] += 1
        else:
            local.questions.append(_located(question, images, paths))
    without, empty = local.without_image.total(), local.with_empty_caption.total()
    if empty or without:
        lacks.append(f"left out {without} questions without image, {empty} with an empty caption")
    if not local.questions and not absent:
        lacks.append(f"none of {len(questions)} questions is left")
    return local


def _located(question: Question, folder: Path, paths: Mapping[str, str]) -> Question:
    """The question with absolute paths as names of its images."""
    names = [str((folder / paths[file_of(image)]).absolute()) for image in question.images]
    images = (
        name if isinstance(image, str) else image._replace(name=name)
        for image, name in zip(question.images, names, strict=True)
    )
    return question._replace(images=tuple(images))


def image_folder(benchmark: Benchmark, folder: Path, root: Path, names: Sequence[str]) -> Path:
    """The folder of the images: the first folder of the benchmark that has one of the first few images."""
    tries = [start / name for start in (folder, folder.parent, root) for name in benchmark.images]
    there = [path for path in tries if path.is_dir()]
    seen = (path for path in there if any(image_path(path, name) for name in names[:IMAGES_TRIED]))
    return next(seen, (there or tries)[0])


def _missing_annotations(benchmark: Benchmark, folder: Path, questions: Sequence[Question]) -> list[str]:
    """Missing and incomplete annotations, a sentence each."""
    lacks = []
    if missing := [name for name in benchmark.files if not (folder / name).is_file()]:
        first = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        lacks.append(
            f"{folder} lacks {len(missing)} of {len(benchmark.files)} files: {first}; get them from {benchmark.source}"
        )
    counts = Counter(question.split for question in questions)
    expected = {f"{split} has": (counts[split], number) for split, number in benchmark.counts.items() if counts[split]}
    if benchmark.total is not None:
        expected["it has"] = (len(questions), benchmark.total)
    wrong = [f"{what} {here} questions, not {number}" for what, (here, number) in expected.items() if here != number]
    if wrong:
        lacks.append("; ".join(wrong) + f"; compare with {benchmark.source}")
    return lacks
