"""A folder -> the benchmarks below it, with their images, and a list of missing files."""

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
from dino_sparo.image_text.evaluation.protocol import (
    MAX_MISSING,
    ImageName,
    file_of,
    file_record,
    find_images,
    image_path,
    require_few_missing,
)
from dino_sparo.runtime.faults import UserError

logger = logging.getLogger(__name__)

MAX_DEPTH = 4  # folders below --data_root that are searched
MAX_ORIGINS = 3  # sets whose origins a message has
IMAGES_TRIED = 20  # the first images of a benchmark; a folder with one of them is the folder of its images
# Many files and no annotations.
IMAGE_FOLDERS = frozenset(
    ("images", "val2017", "val2014", "train2017", "train2014", "test2014", "vg_images", "VG_100K", "VG_100K_2")
) | {"controlled_images", "controlled_clevr", "flickr30k-images", "hake", "swig"}


@dataclass(frozen=True)
class LocalBenchmark:
    """A benchmark on disk: its questions, and its missing files.

    Attributes:
        benchmark: the benchmark.
        folder: folder of the annotations.
        title: title of the benchmark, with the folder if several folders hold the benchmark.
        images: folder that names of images start from.
        questions: questions with captions and image files; an image is an absolute path or a crop of such a file.
        with_missing_image: number of questions whose image file is missing, per split.
        with_empty_caption: number of questions with an empty caption, per split.
        missing: what is missing, a sentence each.
    """

    benchmark: Benchmark
    folder: Path
    title: str
    images: Path
    questions: list[Question]
    with_missing_image: Counter[str]
    with_empty_caption: Counter[str]
    missing: list[str]

    def file_records(self) -> dict[str, dict[str, str]]:
        """Path and hash of each annotation file, by its name."""
        return {name: file_record(self.folder / name) for name in self.benchmark.annotations(self.folder)}


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
        """The rules that the options give; `default_images` is used without --images."""
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
        raise UserError(f"--benchmarks {' '.join(sorted(unknown))} is unknown; there are {', '.join(BENCHMARKS)}")
    if not root.is_dir():
        raise UserError(f"--data_root {str(root)!r} is not a folder; give the folder that holds the benchmarks")
    candidates = list(folders_of(root, names))
    named = BENCHMARKS[names[0]]
    if not candidates and len(names) == 1 and named.other_files and named.annotations(root):
        candidates = [(named, root)]
    if not candidates:
        wanted = (f"{name} ({BENCHMARKS[name].origin})" if len(names) <= MAX_ORIGINS else name for name in names)
        raise UserError(
            f"--data_root {root} holds no benchmark; looked {MAX_DEPTH} folders deep for the annotations of "
            + "; ".join(wanted)
            + "; dino-sparo compositional --list says where to get each" * (len(names) > MAX_ORIGINS)
        )
    for name in set(names) - {benchmark.name for benchmark, _ in candidates} if len(names) < len(BENCHMARKS) else ():
        logger.warning("--data_root %s does not hold %s: get it %s", root, name, BENCHMARKS[name].origin)
    times = Counter(benchmark.name for benchmark, _ in candidates)
    local = []
    for benchmark, folder in candidates:
        suffix = f" ({folder.relative_to(root)})" * (times[benchmark.name] > 1)
        local.append(open_benchmark(benchmark, folder, rules, suffix))
        for sentence in local[-1].missing:
            logger.warning("%s: %s", local[-1].title, sentence)
    usable = [each for each in local if each.questions]
    if not usable:
        raise UserError(f"no benchmark below {root} has its images; {local[0].title}: {local[0].missing[-1]}")
    return usable


def list_benchmarks(names: Sequence[str], rules: ImageRules) -> str:
    """One line per benchmark: its questions and missing files if a copy was found, otherwise where to get it."""
    folders = list(folders_of(rules.root, names)) if str(rules.root) != "." else []
    lines = []
    for name in names:
        copies = [folder for benchmark, folder in folders if benchmark.name == name]
        for folder in copies:
            local = open_benchmark(BENCHMARKS[name], folder, rules)
            gaps = "complete" if not local.missing else "incomplete: " + "; ".join(local.missing)
            lines.append(f"{name:<16} {len(local.questions):>9,} questions in {folder}, {gaps}")
        if not copies:
            lines.append(f"{name:<16} not found; get it {BENCHMARKS[name].origin}")
    return "\n".join(lines)


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
        raise UserError(f"{title} in {folder}: {error}") from error
    missing = _missing_annotations(benchmark, folder, questions)
    files_of_part: dict[str, set[str]] = defaultdict(set)
    for question in questions:
        files_of_part[benchmark.part_of(question)].update(map(file_of, question.images))
    missing_parts = set()
    for part, files in files_of_part.items():
        missing_files = sorted(files - set(paths))
        if len(missing_files) == len(files):
            missing_parts.add(part)
            example = missing_files[0]
            missing.append(
                f"left out what needs {part}: none of {len(files)} images, such as {example!r}, lies in {images}"
                + ("" if rules.images else f", or in {', '.join(benchmark.images)} beside the annotations, above them")
                + f" or in --data_root; get them from {benchmark.source}"
            )
        elif missing_files:
            problem = f"files, such as {missing_files[0]!r}, are missing in {images}"
            data, remedy = f"{title}: of {part} ", f"Get them from {benchmark.source}, or raise --max_missing"
            require_few_missing(len(missing_files), len(files), problem, rules.max_missing, data, remedy)
    local = LocalBenchmark(benchmark, folder, title, images, [], Counter(), Counter(), missing)
    for question in questions:
        if benchmark.part_of(question) in missing_parts:
            continue
        if not all(text.strip() for text in question.captions):
            local.with_empty_caption[question.split] += 1
        elif not all(file_of(image) in paths for image in question.images):
            local.with_missing_image[question.split] += 1
        else:
            located = tuple(_located(image, images, paths) for image in question.images)
            local.questions.append(question._replace(images=located))
    num_missing, num_empty = local.with_missing_image.total(), local.with_empty_caption.total()
    if num_missing or num_empty:
        missing.append(f"left out {num_missing} questions without image, {num_empty} with an empty caption")
    if not local.questions and not missing_parts:
        missing.append(f"none of {len(questions)} questions is left")
    return local


def _located(image: ImageName, folder: Path, paths: Mapping[str, str]) -> ImageName:
    """An image of a question with the absolute path of its file as name."""
    name = str((folder / paths[file_of(image)]).absolute())
    return name if isinstance(image, str) else image._replace(name=name)


def image_folder(benchmark: Benchmark, folder: Path, root: Path, names: Sequence[str]) -> Path:
    """The folder of the images: the first folder of the benchmark that has one of the first few images."""
    tries = [start / name for start in (folder, folder.parent, root) for name in benchmark.images]
    there = [path for path in tries if path.is_dir()]
    hits = (path for path in there if any(image_path(path, name) for name in names[:IMAGES_TRIED]))
    return next(hits, (there or tries)[0])


def _missing_annotations(benchmark: Benchmark, folder: Path, questions: Sequence[Question]) -> list[str]:
    """Missing and incomplete annotations, a sentence each."""
    missing = []
    if missing_files := [name for name in benchmark.files if not (folder / name).is_file()]:
        first = ", ".join(missing_files[:3]) + (", ..." if len(missing_files) > 3 else "")
        missing.append(
            f"{folder} lacks {len(missing_files)} of {len(benchmark.files)} files: {first}; get them from "
            f"{benchmark.source}"
        )
    counts = Counter(question.split for question in questions)
    expected = {f"{split} has": (counts[split], number) for split, number in benchmark.counts.items() if counts[split]}
    if benchmark.total is not None:
        expected["it has"] = (len(questions), benchmark.total)
    wrong = [f"{what} {here} questions, not {number}" for what, (here, number) in expected.items() if here != number]
    if wrong:
        missing.append("; ".join(wrong) + f"; compare with {benchmark.source}")
    return missing
