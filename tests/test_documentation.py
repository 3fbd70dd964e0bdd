"""What documentation, docstrings and messages name exists: commands parse, options are options, files are files."""

import argparse
import ast
import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import get_args_parser as gpu_parser
from dino_sparo.__main__ import find_command
from dino_sparo.commands import COMMANDS
from dino_sparo.submit import get_submission_parser
from studies.__main__ import EXPERIMENTS
from studies.__main__ import parser_of as parser_of_study

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "dino_sparo"
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
MAP = ROOT / "docs" / "architecture.md"  # its lines begin with files, not with commands
CODE = [*sorted(ROOT.glob("*.py")), *sorted(PACKAGE.rglob("*.py")), *sorted((ROOT / "benchmarks").glob("*.py"))]
SCRIPTS = {
    "main_dino.py": "train",
    "run_with_submitit.py": "submit",
    "eval_knn.py": "knn",
    "eval_linear.py": "linear",
    "eval_finetune.py": "finetune",
    "eval_image_retrieval.py": "image-retrieval",
    "eval_copy_detection.py": "copy-detection",
    "visualize_attention.py": "attention",
    "eval_video_segmentation.py": "video-segmentation",
    "video_generation.py": "video",
}
# A command as it is typed; group 1 is its name, group 2 its options.
COMMAND = re.compile(
    r"(?:torchrun [^#]*?|srun [^#]*?python |python )?"
    r"(?:dino-sparo|-m dino_sparo|-m studies(?= (?:oc-splits|sweep))"
    rf"|(?={'|'.join(map(re.escape, SCRIPTS))}))\s*([\w.-]+)(.*)",
    re.DOTALL,
)
# Options of programs that are not ours: torchrun, Slurm, zip, git, pip, CLIP benchmark.
FOREIGN_OPTIONS = {
    *("index-url", "nproc_per_node", "nnodes", "rdzv_backend", "rdzv_endpoint", "master_port", "to", "max-restarts"),
    *("kill-on-bad-exit", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "time", "requeue", "signal"),
    *("open-mode", "pty", "jobs", "help", "version", "extend-exclude", "sparse", "logdir", "reduce_cov", "model"),
    *("model_type", "pretrained", "dataset", "dataset_root", "no_amp", "task"),
}
NEED_IMAGES = {"knn", "linear", "slots study"}  # and have none of their own
FOREIGN_FILES = {
    *("vision_transformer.py", "transformer.py", "utils.py", "tokenizer.py", "model.py", "hf_model.py"),
    *("main_pretrain.py", "simdino/vision_transformer.py", "modeling_sparo.py", "vicreg.py", "nearest_mean.py"),
    *("my_backbone.py", "my_readout.py", "my_source.py", "my_benchmark.py", "my_model.py"),
}


def str_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def commands_in(text: str) -> Iterator[str]:
    """The commands in indented and fenced blocks, one per line, and in code spans."""
    blocks = re.findall(r"^```[a-z]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    lines = "\n".join([*blocks, *re.findall(r"^ {4,}.*$", prose, re.MULTILINE)]).replace("\\\n", " ")
    yield from (line.strip() for line in lines.splitlines())
    yield from (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose))


def parsed_commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Name and options of each of our commands in a text; those that are only named are left out."""
    for line in commands_in(text):
        match = COMMAND.fullmatch(line)
        if match and not match[1].isupper():
            typed = re.sub(r"--config \S+", "", match[2])  # a file that is not there
            words = [word for word in shlex.split(typed, comments=True) if word not in ("...", "--help")]
            name = SCRIPTS.get(match[1], match[1])
            if words and name in ("slots", "train") and not words[0].startswith("-"):
                name, words = f"{name} {words[0]}", words[1:]
            if words:
                yield name, words


def docstring_of(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")), clean=False) or ""
    # What stands four blanks in is a block; a backslash there is written twice or not, as the string is.
    return docstring.replace("\\\\\n", "\\\n")


def parser_of(name: str, words: list[str]) -> argparse.ArgumentParser | None:
    if name == "submit":
        module = words[words.index("--module") + 1] if "--module" in words else "main_dino"
        return get_submission_parser(module)
    if name in EXPERIMENTS:
        return parser_of_study(name)
    found = find_command(name.split())
    assert found is not None, f"there is no command {name!r}"
    name = found[0]
    parsers = [command.parser for other, command in COMMANDS.items() if name in (other, command.instead_of)]
    for parser in [parser() for parser in parsers if parser is not None]:
        typed = {word[2:].partition("=")[0].replace("-", "_") for word in words if word.startswith("--")}
        if typed <= {string[2:] for string in parser._option_string_actions} or len(parsers) == 1:
            return parser
    assert parsers == [None], f"{(name, words)}: no command of that name takes these options"
    return None


def test_every_command_that_a_text_shows_can_be_typed() -> None:
    for path in [*DOCUMENTS, *CODE]:
        text = path.read_text(encoding="utf-8") if path.suffix == ".md" else docstring_of(path)
        assert "python -m dino_sparo." not in text, path
        for name, words in parsed_commands(text) if path != MAP else ():
            parser, line = parser_of(name, words), (str_of(path), name, words)
            if parser is not None:
                parser.error = lambda message, line=line: pytest.fail(f"{line}: {message}")  # type: ignore[method-assign]
                args = parser.parse_args(words)
                assert getattr(args, "data_path", None) != "" or name not in NEED_IMAGES, f"{line}: no --data_path"


def test_every_name_that_a_text_imports_exists() -> None:
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        for module, names in re.findall(r"^ *from (dino_sparo[\w.]*) import ([\w, ]+)$", text, re.MULTILINE):
            for name in names.split(", "):
                assert hasattr(importlib.import_module(module), name), f"{str_of(path)}: {module} has no {name}"


def test_commands_are_found_in_blocks_spans_and_behind_launchers() -> None:
    text = (
        "    dino-sparo knn --seed 1   # a comment\n"
        "    torchrun --nproc_per_node=8 -m dino_sparo linear --lr 1 \\\n        --seed 2\n"
        "    srun --x=1 python main_dino.py --seed 3\n"
        "Say `eval_knn.py --seed\n4`, not `dino-sparo COMMAND`, nor `main_dino.py`.\n"
    )
    found = [("knn", ["--seed", "1"]), ("linear", ["--lr", "1", "--seed", "2"]), ("train", ["--seed", "3"])]
    assert list(parsed_commands(text)) == [*found, ("knn", ["--seed", "4"])]


def known_options() -> set[str]:
    parsers: list[argparse.ArgumentParser] = [parser_of_study(name) for name in EXPERIMENTS]
    parsers += [command.parser() for command in COMMANDS.values() if command.parser is not None]
    parsers += [
        get_submission_parser(module) for module in ("main_dino", "dino_sparo.clip.train", "dino_sparo.oc_clip.train")
    ]
    parsers.append(gpu_parser())  # `make gpu` hands them on
    strings = {string for parser in parsers for action in parser._actions for string in action.option_strings}
    return {string.removeprefix("--") for string in strings} | FOREIGN_OPTIONS


def test_every_option_that_a_text_names_exists() -> None:
    unknown, known = {}, known_options() | {"no_such_option"}
    for path in [*DOCUMENTS, *CODE]:
        text = path.read_text(encoding="utf-8")
        if ROOT / "benchmarks" not in path.parents and "<style>" not in text:  # options of their own, CSS variables
            text = re.sub(r'style="--.*?"|var\(--[\w-]+\)', "", text)
            unknown[str_of(path)] = set(re.findall(r"(?<![\w-])--([a-zA-Z][\w-]*)", text)) - known
    assert {path: names for path, names in unknown.items() if names} == {}


def test_a_file_that_a_text_names_exists_and_is_the_only_one_of_that_name() -> None:
    skipped = {".venv", "__pycache__", "build"}
    files = {str_of(path) for path in ROOT.rglob("*.py") if not skipped & set(path.parts)}
    for path in [*DOCUMENTS, *CODE]:
        own = str(path.parent.relative_to(ROOT)) + "/"
        for name in re.findall(r"`([\w/]+\.py)(?:`|\.| )", path.read_text(encoding="utf-8")):
            near = {f"{own}{name}", f"dino_sparo/{name}", name} & files
            alike = [file for file in files if f"/{file}".endswith(f"/{name}")]
            line = f"{str_of(path)} names {name}: {alike or 'there is no such file'}"
            assert near or len(alike) == 1 or name in FOREIGN_FILES, line


def letters_of(docstring: str, title: str) -> set[str]:
    """The capital letters that a legend explains."""
    legend = docstring.split(title)[1].split(". Numbers")[0].split('"""')[0]
    return set(re.findall(r"\b([A-Z])(?=[ ,][ \w])", re.sub(r"L\*V", "", legend)))


LEGEND = letters_of(
    ast.get_docstring(ast.parse((PACKAGE / "__init__.py").read_text())) or "", "One letter, one meaning"
)


def test_one_letter_has_one_meaning_in_every_shape() -> None:
    assert set("BDKHWNLSPAVTCMFGERU") == LEGEND
    for path in sorted(PACKAGE.rglob("*.py")):
        shapes = re.findall(r'(?:Float|Bool|U?Int\d*|Shaped|Num)\[[^"\n]*"([^"]*)"', path.read_text(encoding="utf-8"))
        used = {letter for shape in shapes for letter in re.findall(r"(?<!\w)[A-Z](?!\w)", shape)}
        assert used <= LEGEND, str_of(path)
