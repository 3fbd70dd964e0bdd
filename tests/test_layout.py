"""The project's shape: who imports whom, how many files, and that the README's map of files equals the disk."""

import ast
import builtins
import functools
import graphlib
import re
import symtable
from collections.abc import Iterator
from pathlib import Path

import pytest

from dino_sparo.clip.options import TOWERS
from dino_sparo.models.readouts import READOUTS

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "dino_sparo"
README = ROOT / "README.md"
MAP = ROOT / "docs" / "architecture.md"

# The rooms, each with the rooms that it may import besides itself. Whoever imports `dino_sparo` alone takes what its
# __init__ names, when it is used.
FLOORS = ("runtime", "data", "models", "weights", "draw", "evaluation", "training")
TOP = {
    "distillation": set(),
    "dino": {"distillation"},
    "simdino": {"distillation"},
    "ibot": {"distillation"},
    "image_text": set(),
    "clip": {"image_text"},
    "oc_clip": {"image_text"},
    "finetune": {"distillation"},
    "demo": set(),
}
ROOMS: dict[str, set[str]] = {
    **{room: {"_version", *FLOORS[:number]} for number, room in enumerate(FLOORS)},
    **{room: {"_version", *FLOORS} | others for room, others in TOP.items()},
}
ENTRIES = {"__main__", "api", "commands", "submit", "timm"}  # they know several rooms

# Beyond this the root is split into folders.
MAX_ROOT_FILES = 7
MAX_FUNCTION_LINES = 50
MAX_README_LINES, MAX_README_WORDS = 150, 1220


def modules() -> list[Path]:
    """The files of the package."""
    return files_below(PACKAGE)


@functools.cache
def files_below(folder: Path) -> list[Path]:
    """The Python files of a folder and its subfolders."""
    return sorted(folder.rglob("*.py"))


def room_of(name: str) -> str:
    """The room of a module, by its name below `dino_sparo`."""
    return name.split(".")[0]


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """The nodes of a file's syntax tree."""
    return list(ast.walk(parsed(path)))


def imported(path: Path) -> Iterator[str]:
    """Names below `dino_sparo` of what a file imports, anywhere in it."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = ".".join(package[: len(package) - node.level + 1]) + "." if node.level else ""
            base = (above + (node.module or "")).rstrip(".")
            names = [f"{base}.{alias.name}" for alias in node.names] if base == "dino_sparo" else [base]
        else:
            continue
        yield from (name.removeprefix("dino_sparo.") for name in names if name.startswith("dino_sparo."))


# Imports.


def test_every_module_has_a_room() -> None:
    names = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in modules()}
    unplaced = {name for name in names - ENTRIES - {"__init__", "_version"} if room_of(name) not in ROOMS}
    assert not unplaced, f"say in this file which room {sorted(unplaced)} belongs to"


def test_modules_import_only_what_their_room_allows() -> None:
    forbidden = {}
    for path in modules():
        if path.parent != PACKAGE:
            room = path.relative_to(PACKAGE).parts[0]
            allowed = ROOMS[room] | {room}
            forbidden[str(path)] = {name for name in imported(path) if not {room_of(name), name} & allowed}
    assert {path: names for path, names in forbidden.items() if names} == {}


def test_the_package_imports_nothing_from_scripts_tests_or_benchmarks() -> None:
    outside = {path.stem for path in ROOT.glob("*.py")} | {"tests", "benchmarks", "reference"}
    for path in modules():
        for node in nodes_of(path):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert not outside & {name.split(".")[0] for name in names}, path


def test_the_rule_catches_every_way_of_importing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    path = tmp_path / "dino_sparo" / "evaluation" / "knn.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "import torch, dino_sparo.dino.head\n"
        "from dino_sparo import clip\n"
        "from dino_sparo.dino.teacher import ema_update_\n"
        "def late():\n    from ..encoder import Encoder\n    from .features import extract\n"
    )
    assert sorted(imported(path)) == ["clip", "dino.head", "dino.teacher", "encoder", "evaluation.features"]
    assert [room_of(name) for name in sorted(imported(path))] == ["clip", "dino", "dino", "encoder", "evaluation"]


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports inside of functions count; imports for type checkers do not."""
    graph = {name: imported_files(name) for name in map(module_name, modules())}
    try:
        list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        pytest.fail(f"import circle: {' -> '.join(error.args[1])}")


def test_a_circle_through_a_local_import_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path / "dino_sparo")
    (tmp_path / "dino_sparo" / "clip").mkdir(parents=True)
    (tmp_path / "dino_sparo" / "clip" / "a.py").write_text("from dino_sparo.clip import b\n")
    (tmp_path / "dino_sparo" / "clip" / "b.py").write_text("def late():\n    from dino_sparo.clip.a import x\n")
    with pytest.raises(pytest.fail.Exception, match=r"import circle: .*clip\.a"):
        test_no_files_import_each_other_in_a_circle()


def module_name(path: Path) -> str:
    """Name of a file's module below `dino_sparo`."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def imported_files(name: str) -> set[str]:
    """Modules that a module imports, by names below `dino_sparo`."""
    path = PACKAGE.joinpath(*name.split(".")).with_suffix(".py")
    nodes = nodes_of(path)
    guards = [node for node in nodes if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    skipped = {part for guard in guards for part in ast.walk(guard)}
    names = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node not in skipped and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import) and node not in skipped:
            names |= {alias.name for alias in node.names}
    known = {module_name(other) for other in modules()}
    found = {name.removeprefix("dino_sparo.") for name in names if name.startswith("dino_sparo.")} & known
    return found - {name}


# What a step may do, and how far the parsed options go.

STEP_FILES = (
    *("dino/step.py", "clip/loss.py"),
    *("simdino/loss.py", "simdino/train.py"),
    *("ibot/head.py", "ibot/loss.py", "ibot/step.py"),
    *(f"distillation/{name}.py" for name in ("head", "koleo", "loss", "network", "step")),
    "image_text/step.py",
    *("training/updater.py", "training/optim.py"),
    *("models/encoder.py", "models/backbone.py", "models/readout.py", "data/augment.py"),
    *("oc_clip/binding.py", "oc_clip/scoring.py", "oc_clip/loss.py"),
)
READS = re.compile(r"\.(item|tolist|cpu|numpy)\(\)")


def functions_that_read_the_device(path: Path) -> set[str]:
    """Functions and methods of a file in which a tensor's values are asked for."""
    text = path.read_text(encoding="utf-8")
    functions = [node for node in nodes_of(path) if isinstance(node, ast.FunctionDef)]
    return {node.name for node in functions if READS.search(ast.get_source_segment(text, node) or "")}


def test_a_step_reads_nothing_from_the_device_and_the_trainer_in_few_places() -> None:
    for name in STEP_FILES:
        tensors = functions_that_read_the_device(PACKAGE / name) - {"__init__"}  # numbers of blocks, at construction
        assert not tensors, name
    assert functions_that_read_the_device(PACKAGE / "training" / "loop.py") == {"read", "raise_nonfinite"}
    assert functions_that_read_the_device(PACKAGE / "runtime" / "preemption.py") == {"decide"}
    assert functions_that_read_the_device(PACKAGE / "runtime" / "logs.py") == {"means", "tick"}  # epochs, lines


COMPUTING_FILES = (
    *("data/*", "data/sources/*"),
    *(f"models/{name}" for name in ("backbone", "readout", "readouts", "pooling", "encoder")),
    *(f"weights/{name}" for name in ("checkpoint", "encoder", "entries", "file", "folder", "initialize", "foreign")),
    *(f"training/{name}" for name in ("loop", "updater", "optim", "compile")),
    *("simdino/loss", "ibot/head", "ibot/loss", "ibot/mask", "ibot/step"),
    *("dino/step", "clip/model", "clip/loss"),
    *(f"distillation/{name}" for name in ("head", "koleo", "loss", "network", "step")),
    *(f"oc_clip/{name}" for name in ("graphs/g*", "graphs/f*", "batches", "binding", "scoring", "model", "loss")),
    "image_text/step",
    *("evaluation/features", "evaluation/linear/probe"),
    *("evaluation/attention/maps", "evaluation/attention/atlas"),
    *(f"evaluation/objects/{name}" for name in ("measures", "slots", "layouts", "survey")),
)


def test_files_that_compute_take_named_parameters_not_parsed_options() -> None:
    files = {name: list(PACKAGE.glob(f"{name}.py")) for name in COMPUTING_FILES}
    assert [name for name, paths in files.items() if not paths] == []
    texts = {path: path.read_text(encoding="utf-8") for paths in files.values() for path in paths}
    commands = {PACKAGE / "data" / "statistics.py"}
    assert {path for path, text in texts.items() if "args: argparse.Namespace" in text} == commands


# Read-outs declare what others need to know; what is left are the names of a foreign format.
KNOW_READOUTS = {"models/readouts.py", "weights/foreign.py", "clip/config.py"}


def test_no_file_but_the_table_tests_the_name_of_a_read_out() -> None:
    names = {*READOUTS, *TOWERS}
    tests = []
    for path in modules():
        if str(path.relative_to(PACKAGE)) not in KNOW_READOUTS:
            compared = (node for node in nodes_of(path) if isinstance(node, ast.Compare))
            constants = (part for node in compared for part in ast.walk(node) if isinstance(part, ast.Constant))
            tests += [f"{path.relative_to(ROOT)}:{part.lineno}" for part in constants if part.value in names]
    assert not tests, f"let the read-out declare it, in {', '.join(tests)}"


# Functions.


def code_lines(function: ast.FunctionDef) -> int:
    """Lines of a function without its docstring, comments and blank lines."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    tokens = (node for part in [function.args, *function.decorator_list, *body] for node in ast.walk(part))
    return len({line for node in tokens if hasattr(node, "lineno") for line in range(node.lineno, node.end_lineno + 1)})


def test_functions_fit_a_screen() -> None:
    outside = [*ROOT.glob("*.py"), *files_below(ROOT / "studies")]
    long = [
        f"{path.relative_to(ROOT)}:{node.name} has {code_lines(node)} lines"
        for path in [*modules(), *outside]
        for node in nodes_of(path)
        if isinstance(node, ast.FunctionDef) and code_lines(node) > MAX_FUNCTION_LINES
    ]
    assert not long


SHARED_LINES = 6


def lines_of_logic(body: list[ast.stmt]) -> Iterator[str]:
    """The statements of some code without imports and docstrings; of one with a body, its first line and its body."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        ):
            continue
        inner = [part for name in ("body", "orelse", "finalbody") for part in getattr(node, name, [])]
        inner += [part for handler in getattr(node, "handlers", []) for part in handler.body]
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield f"<{node.name}>"
        else:
            yield ast.unparse(node).partition("\n")[0] if inner else ast.unparse(node)
        yield from lines_of_logic(inner)


def shared_runs(paths: list[Path]) -> dict[tuple[str, ...], set[str]]:
    """Runs of `SHARED_LINES` lines that stand in several rooms -> their files."""
    found: dict[tuple[str, ...], set[str]] = {}
    for path in paths:
        lines = list(lines_of_logic(parsed(path).body))
        for start in range(len(lines) - SHARED_LINES + 1):
            found.setdefault(tuple(lines[start : start + SHARED_LINES]), set()).add(str(path.relative_to(PACKAGE)))
    return {run: files for run, files in found.items() if len({file.split("/")[0] for file in files}) > 1}


def test_no_two_rooms_share_six_lines_of_logic() -> None:
    shared = {tuple(sorted(files)): run[0] for run, files in shared_runs(modules()).items()}
    assert not shared, f"move what both need one floor down: {shared}"


def test_six_shared_lines_are_found_whatever_their_comments_and_docstrings(tmp_path: Path) -> None:
    lines = [f"    a{number} = {number}" for number in range(SHARED_LINES - 1)]
    for room, between in (("clip", "    # why"), ("dino", '    """Why."""')):
        (tmp_path / room).mkdir()
        (tmp_path / room / "a.py").write_text("\n".join(["import os", "def f():", *lines[:2], between, *lines[2:]]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "PACKAGE", tmp_path)
        assert list(shared_runs(modules()).values()) == [{"clip/a.py", "dino/a.py"}]


def test_a_docstring_begins_with_what_the_thing_is() -> None:
    """Not "What ...", "Of ..." or "Likewise": such a line cannot be read alone."""
    unclear = re.compile(r"(What|Of) |[Ll]ikewise\.?$")
    found = [
        f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"
        for path in [*modules(), *files_below(ROOT / "studies")]
        for node in nodes_of(path)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        and unclear.match(ast.get_docstring(node) or "")
    ]
    assert not found, f"begin with a noun or a verb in {', '.join(found)}"


# Files.


def test_the_packages_root_stays_small() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= MAX_ROOT_FILES


def test_no_file_is_named_after_nothing() -> None:
    names = {path.stem for path in python_files()}
    assert not names & {"util", "utils", "misc", "helpers", "common"}


def python_files() -> list[Path]:
    """All the project's Python files."""
    folders = [ROOT / name for name in ("dino_sparo", "tests", "benchmarks", "studies", "docs")]
    return sorted([*ROOT.glob("*.py"), *(path for folder in folders for path in files_below(folder))])


def undefined_names(path: Path) -> Iterator[str]:
    """Names that a file uses and nobody defines. Linters must not look for them: shapes are strings of such names."""
    module = symtable.symtable(path.read_text(encoding="utf-8"), str(path), "exec")
    known = {*dir(builtins), "__file__", "__path__", *(symbol.get_name() for symbol in module.get_symbols())}
    unassigned = {s.get_name() for s in module.get_symbols() if not (s.is_assigned() or s.is_imported())}
    tables = [module]
    for table in tables:
        tables += table.get_children()
        for symbol in table.get_symbols():
            name = symbol.get_name()
            is_free = symbol.is_global() or table is module
            if is_free and symbol.is_referenced() and (name not in known or name in unassigned - set(dir(builtins))):
                yield name


def test_every_name_is_defined() -> None:
    found = {str(path.relative_to(ROOT)): sorted(set(undefined_names(path))) for path in python_files()}
    own = {"__file__", "__name__", "__doc__", "__path__"}
    assert {path: names for path, names in found.items() if set(names) - own} == {}


def test_scripts_do_nothing_when_imported() -> None:
    definitions = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
    for path in ROOT.glob("*.py"):
        _docstring, *statements = parsed(path).body
        for statement in statements:
            guarded = isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test)
            assert guarded or isinstance(statement, definitions), f"{path.name}:{statement.lineno}"


def test_the_package_does_not_print() -> None:
    for path in modules():
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                line = f"{path.relative_to(ROOT)}:{node.lineno}"
                assert node.func.id != "print", f"{line} prints; use the module's logger, or say() for a result"


def test_no_file_names_a_folder_of_somebodys_machine() -> None:
    anywhere = [f"/{name}/" for name in ("home", "work", "root", "Users", "mnt", "scratch")]
    texts = [*python_files(), *(path for path in ROOT.iterdir() if path.suffix in {".md", ".toml", ".cff", ".yaml"})]
    texts += [path for path in (ROOT / "Makefile", ROOT / ".ci" / "run") if path.is_file()]
    texts += [path for path in PACKAGE.rglob("*") if path.suffix in {".html", ".css", ".js"}]
    for path in texts:
        text = path.read_text(encoding="utf-8")
        folders = anywhere + ["/tmp/"] * (PACKAGE in path.parents)
        # A path begins after a quote, a space or a bracket; within a longer path such a name is nobody's machine.
        found = [folder for folder in folders if re.search(rf"(?<![\w.}}/-]){folder}\w", text)]
        assert not found, f"{path.relative_to(ROOT)} names {found}"


# The README.


def listed_paths(text: str) -> list[str]:
    """The paths in the map of the folders: the first word of every line of its indented block.

    A line indented more than the block goes on with the description of the line above it.
    """
    section = re.search(r"^## Map of the folders\n(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    assert section
    return re.findall(r"^    (\S+)", section[1], re.MULTILINE)


def test_every_path_of_the_map_exists() -> None:
    listed = listed_paths(MAP.read_text(encoding="utf-8"))
    assert not [name for name in listed if not list(ROOT.glob(name.rstrip("/")))]


def test_every_script_and_room_is_in_the_map() -> None:
    scripts = {path.name for path in ROOT.glob("*.py")}
    rooms = {f"dino_sparo/{path.name}/" for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    assert sorted((scripts | rooms) - set(listed_paths(MAP.read_text(encoding="utf-8")))) == []


def test_what_the_readme_tells_to_read_is_as_long_as_it_says() -> None:
    text = README.read_text(encoding="utf-8")
    match = re.search(r"read ((?:\[`[\w/]+\.py`\]\([\w/.]+\)[, and\n]*)+), (\d+)\s+lines", text)
    assert match
    files = re.findall(r"`([\w/]+\.py)`", match[1])
    lines = sum(len((PACKAGE / name).read_text(encoding="utf-8").splitlines()) for name in files)
    assert 0.75 * int(match[2]) <= lines <= 1.05 * int(match[2])


def test_the_files_that_the_readme_links_to_exist() -> None:
    links = re.findall(r"\]\(([^)#\s]+)", README.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (ROOT / link).exists()]
    assert not missing


def test_the_readme_is_short() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_README_LINES
    assert len(text.split()) <= MAX_README_WORDS
