"""Mutation testing: change one thing in a module at a time, and see whether the module's own tests notice.

    make mutants                                        a seeded sample of every module's mutants
    python tests/mutants.py optim loss --sample 0       all mutants of two modules
    python tests/mutants.py optim --again               once more those that survived, after writing tests for them

The mutants and the files of results are cosmic-ray's, so `cr-report` and `cr-html` read them. What differs is how a
mutant is tried: the libraries are imported once, every mutant is a fork of that process, and no file is changed.
Tests that run the mutated line come first, fast ones before slow ones. A run that was ended goes on where it stood.
`tests/mutants.md` has the results.
"""

import argparse
import ast
import difflib
import hashlib
import importlib
import importlib.machinery
import json
import os
import random
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

os.environ["OMP_NUM_THREADS"] = "1"  # threads do not survive a fork

import cosmic_ray.operators.provider
import parso
import pytest
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec, TestOutcome, WorkerOutcome, WorkItem, WorkResult

ROOT = Path(__file__).resolve().parents[1]

# A module of the package -> its own tests.
TESTS: dict[str, list[str]] = {
    "readout": ["test_readout"],
    "encoder": ["test_encoder"],
    "backbone": ["test_backbone"],
    "head": ["test_head"],
    "loss": ["test_loss", "test_collapse"],
    "optim": ["test_optim"],
    "teacher": ["test_teacher"],
    "crops": ["test_crops"],
    "distort": ["test_distort"],
    "checkpoint": ["test_checkpoint"],
    "evaluation/knn": ["test_knn"],
    "evaluation/neighbours": ["test_knn"],
}

# One replacement for each operator of the language is enough: a test that sees + become - sees it become * as well.
OPERATORS = re.compile(
    r"ReplaceBinaryOperator_(Add_Sub|Sub_Add|Mul_Div|Div_Mul|FloorDiv_Mul|Mod_Mul|Pow_Mul|RShift_LShift|LShift_RShift)"
    r"|ReplaceBinaryOperator_(BitAnd_BitOr|BitOr_BitAnd)"
    r"|ReplaceComparisonOperator_(Lt_LtE|LtE_Lt|Gt_GtE|GtE_Gt|Eq_NotEq|NotEq_Eq|Is_IsNot|IsNot_Is)"
    r"|ReplaceUnaryOperator_Delete_(Not|USub|Invert)|Replace(TrueWithFalse|FalseWithTrue|AndWithOr|OrWithAnd)"
    r"|Replace(BreakWithContinue|ContinueWithBreak)"
    r"|AddNot|ExceptionReplacer|NumberReplacer|RemoveDecorator|ZeroIterationForLoop"
)


class TextForValue(Operator):
    """A word in place of a value in an f-string, so in most cases in an error's message."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        if node.type == "fstring_expr":
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        return parso.python.tree.FStringString("mutant", node.start_pos)

    @classmethod
    def examples(cls) -> tuple:
        return ()


def operators() -> dict[str, Operator]:
    """The kinds of change, by name."""
    provider = cosmic_ray.operators.provider.OperatorProvider()
    chosen = {name: provider[name]() for name in provider if OPERATORS.fullmatch(name)}
    return {**chosen, TextForValue.__name__: TextForValue()}


def work_items(path: Path, seed: int) -> list[WorkItem]:
    """All mutants of a file, shuffled: the first n are a sample of n."""
    nodes = list(ast_nodes(get_ast(path.read_text(encoding="utf-8"))))
    specs = []
    for name, operator in operators().items():
        positions = [position for node in nodes for position in operator.mutation_positions(node)]
        specs += [MutationSpec(path.relative_to(ROOT), name, n, *position) for n, position in enumerate(positions)]
    random.Random(f"{seed} {path.stem}").shuffle(specs)
    return [WorkItem.single(f"{number:05d}", spec) for number, spec in enumerate(specs)]


def behaviour(source: str) -> str:
    """A program without its annotations and docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign):
            node.annotation = ast.Constant(None)
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        if ast.get_docstring(node) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) else False:
            node.body[0] = ast.Pass()
    return ast.dump(tree)


def mutated(source: str, spec: MutationSpec) -> str | None:
    """The mutant's source, or None if it is no program or behaves as before."""
    code = mutate_code(source, operators()[spec.operator_name], spec.occurrence)
    try:
        return None if code is None or behaviour(code) == behaviour(source) else code
    except SyntaxError:
        return None


class Recorder:
    """Pytest's plugin for the first run: how long each test takes, and which lines of a file it runs."""

    def __init__(self, path: Path) -> None:
        self.path, self.tests = str(path), {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        lines: set[int] = set()

        def trace_line(frame: FrameType, event: str, _: object) -> Any:
            lines.add(frame.f_lineno)
            return trace_line

        start = time.perf_counter()
        sys.settrace(lambda frame, *_: trace_line if frame.f_code.co_filename == self.path else None)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            self.tests[item.nodeid] = (time.perf_counter() - start, sorted(lines))


class Order:
    """Pytest's plugin for a mutant: first the tests that run its line, fast ones first."""

    def __init__(self, tests: dict[str, tuple[float, list[int]]], line: int) -> None:
        self.tests, self.line = tests, line

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        unknown: tuple[float, list[int]] = (0.0, [])
        items.sort(key=lambda item: (self.line not in self.tests.get(item.nodeid, unknown)[1],
                                     self.tests.get(item.nodeid, unknown)[0]))


class Runner:
    """Runs a module's tests in forks of this process."""

    def __init__(self, module: str, folder: Path) -> None:
        self.path, self.folder = ROOT / "dino_sparo" / f"{module}.py", folder
        self.files = [str(ROOT / "tests" / f"{name}.py") for name in TESTS[module]]
        record = folder / "baseline.json"
        code, output = self.fork(lambda: self.record(record), limit=3600)
        if code:
            raise SystemExit(f"the tests of {module} fail without any mutant:\n{output}")
        baseline = json.loads(record.read_text())
        self.tests, self.limit = baseline["tests"], 20 + 3 * baseline["seconds"]
        for name in baseline["libraries"]:
            try:
                importlib.import_module(name)
            except Exception:  # in another order some fail; the forks import those
                continue
        outcome, output = self.try_mutant(self.path.read_text(encoding="utf-8"), line=0)
        if outcome != TestOutcome.SURVIVED:
            raise SystemExit(f"the tests of {module} fail in a fork without any mutant:\n{output}")

    def pytest(self, plugin: object) -> int:
        options = ["-x", "-q", "-p", "no:cacheprovider", "--assert=plain", "-m", "not (slow or slurm or gpu)"]
        return int(pytest.main([*options, "--basetemp", str(self.folder / "tmp"), *self.files], plugins=[plugin]))

    def record(self, path: Path) -> int:
        recorder, start = Recorder(self.path), time.perf_counter()
        code = self.pytest(recorder)
        paths = {name: str(getattr(module, "__file__", None)) for name, module in sys.modules.items()}
        libraries = [name for name, path in paths.items() if "site-packages" in path]
        seconds = time.perf_counter() - start
        path.write_text(json.dumps({"tests": recorder.tests, "seconds": seconds, "libraries": libraries}))
        return code

    def try_mutant(self, source: str, line: int) -> tuple[TestOutcome, str]:
        """Run the tests with the module's source replaced."""

        def run() -> int:
            original = importlib.machinery.SourceFileLoader.get_code

            def get_code(loader: Any, name: str) -> Any:
                if loader.path == str(self.path):
                    return loader.source_to_code(source.encode(), loader.path)
                return original(loader, name)

            importlib.machinery.SourceFileLoader.get_code = get_code
            return self.pytest(Order(self.tests, line))

        code, output = self.fork(run, self.limit)
        return (TestOutcome.KILLED if code else TestOutcome.SURVIVED), output[-4000:]

    def fork(self, run: Any, limit: float) -> tuple[int, str]:
        """The exit status of a function that runs in a child process, and what it wrote."""
        log = self.folder / "output.txt"
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            _be_child(run, log)
        end = time.monotonic() + limit
        while not (finished := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < end:
            time.sleep(0.02)
        try:
            os.killpg(child, signal.SIGKILL)  # also what the tests started
        except ProcessLookupError:
            pass
        if not finished[0]:
            os.waitpid(child, 0)
            return 1, "timeout"
        return finished[1], log.read_text(errors="replace")


def _be_child(run: Any, log: Path) -> NoReturn:
    code = 1
    try:
        os.setsid()
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        code = run()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def difference(source: str, code: str) -> str:
    lines = difflib.unified_diff(source.splitlines(), code.splitlines(), n=0, lineterm="")
    return "\n".join(list(lines)[2:])


def test_module(module: str, args: argparse.Namespace) -> None:
    """Try mutants until `args.sample` of them are judged, and print those that survived."""
    path = ROOT / "dino_sparo" / f"{module}.py"
    source = path.read_text(encoding="utf-8")
    digest = hashlib.sha256(source.encode()).hexdigest()[:8]
    folder = args.output_dir / module.replace("/", "-")
    folder.mkdir(parents=True, exist_ok=True)
    runner = None
    with use_db(str(folder / f"{digest}-{args.seed}.sqlite"), WorkDB.Mode.create) as session:
        if not session.num_work_items:
            session.add_work_items(work_items(path, args.seed))
        results: dict[str, WorkResult] = dict(session.results)
        judged = 0
        for item in sorted(session.work_items, key=lambda item: item.job_id):
            if args.sample and judged == args.sample:
                break
            spec, result = item.mutations[0], results.get(item.job_id)
            if result is None or (args.again and result.test_outcome == TestOutcome.SURVIVED):
                code = mutated(source, spec)
                if code is None:
                    result = WorkResult(WorkerOutcome.SKIPPED)
                else:
                    runner = runner or Runner(module, folder)
                    outcome, output = runner.try_mutant(code, spec.start_pos[0])
                    result = WorkResult(WorkerOutcome.NORMAL, output, outcome, difference(source, code))
                session.set_result(item.job_id, result)
                results[item.job_id] = result
                if result.test_outcome == TestOutcome.SURVIVED:
                    print(f"{path.relative_to(ROOT)} survived: {spec.operator_name}\n{result.diff}", flush=True)
            judged += result.worker_outcome == WorkerOutcome.NORMAL
        outcomes = [result.test_outcome for result in results.values() if result.test_outcome]
        killed = outcomes.count(TestOutcome.KILLED)
        print(f"{module}: {killed} of {len(outcomes)} mutants killed, of {session.num_work_items} there are", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", choices=[*TESTS, []], metavar="MODULE", help="default: all")
    parser.add_argument("--sample", type=int, default=40, help="mutants per module, 0 for all (default: 40)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--again", action="store_true", help="try once more those that survived")
    parser.add_argument("--output_dir", type=Path, default=ROOT / "output" / "mutants", help="results, to go on from")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    os.chdir(ROOT)
    for module in args.modules or TESTS:
        test_module(module, args)


if __name__ == "__main__":
    main()
