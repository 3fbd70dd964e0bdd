"""Mutation testing: change one thing in a module at a time, and see whether the module's own tests notice.

    make mutants                                        a seeded sample of every module's mutants
    python tests/mutants.py distillation/loss models/readout --sample 0  all mutants of two modules
    python tests/mutants.py distillation/loss --again   once more those that survived, after writing tests for them

The mutants and the files of results are cosmic-ray's, so `cr-report` and `cr-html` read them. What differs is how a
mutant is tried: the libraries are imported once, every mutant is a fork of that process, and no file is changed.
Only tests that run a line of the mutated function are tried: those of the mutated line first, fast ones before slow
ones. A run that was ended goes on where it stood.
`tests/mutants.md` has the results.
"""

import argparse
import ast
import contextlib
import difflib
import gc
import hashlib
import importlib
import importlib.machinery
import inspect
import json
import math
import multiprocessing
import os
import random
import re
import resource
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, FrameType, FunctionType
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
    "models/readout": ["test_readout", "test_clip_readouts"],
    "models/encoder": ["test_encoder", "test_timm_start", "test_clip_model", "test_other_backbones"],
    "models/backbone": ["test_backbone", "test_timm_start", "test_init_from", "test_initialize"],
    "distillation/head": ["test_head"],
    "distillation/loss": ["test_loss", "test_collapse"],
    "training/optim": ["test_optim", "test_initialize"],
    "distillation/initialize": ["test_initialize"],
    "distillation/step": ["test_step", "test_dino_step", "test_recording", "test_initialize"],
    "data/crops": ["test_crops", "test_channels"],
    "data/augment": ["test_distort", "test_channels"],
    "weights/checkpoint": [
        "test_checkpoint",
        "test_checkpoint_folder",
        "test_export",
        "test_demo_encoder",
        "test_clip_convert",
    ],
    "weights/encoder": ["test_checkpoint", "test_timm_start", "test_demo_encoder"],
    "weights/entries": ["test_checkpoint", "test_init_from"],
    "weights/file": ["test_checkpoint", "test_checkpoint_folder", "test_export"],
    "weights/folder": ["test_checkpoint", "test_checkpoint_folder"],
    "weights/initialize": ["test_init_from", "test_checkpoint", "test_timm_start"],
    "evaluation/knn": ["test_knn"],
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

# A machine that others use as well gives a process one second of computing in so many, at worst.
PATIENCE = 20


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
    """A program without annotations, docstrings, and the marks between its functions' parameters."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign):
            node.annotation = ast.Constant(None)
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        if isinstance(node, ast.arguments):  # by position or by name is no matter
            node.args = [*node.posonlyargs, *node.args, *node.kwonlyargs]
            node.defaults = [*node.defaults, *node.kw_defaults]
            node.posonlyargs, node.kwonlyargs, node.kw_defaults = [], [], []
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


def replacements(old: CodeType, new: CodeType) -> dict[CodeType, CodeType] | None:
    """The functions that differ between two programs, or None if what stands outside of functions differs."""
    if old == new:
        return {}
    pairs = [pair for pair in zip(old.co_consts, new.co_consts, strict=False) if isinstance(pair[0], CodeType)]
    found = {}
    if old.co_flags & inspect.CO_OPTIMIZED:  # a function, not a class or a module
        found[old] = new
    elif _without_functions(old) != _without_functions(new):
        return None
    for inner in pairs:
        changed = replacements(*inner) if isinstance(inner[1], CodeType) else {}
        if changed is None:
            return None
        found |= changed
    return found


def code_lines(code: CodeType) -> set[int]:
    """The lines of a function, of those inside it as well."""
    inner = [line for const in code.co_consts if isinstance(const, CodeType) for line in code_lines(const)]
    return {line for *_, line in code.co_lines() if line is not None}.union(inner)


def _without_functions(code: CodeType) -> CodeType:
    consts = tuple(None if isinstance(const, CodeType) else const for const in code.co_consts)
    return code.replace(co_consts=consts, co_linetable=b"")


class Plugin:
    """Pytest's plugin: it collects the tests once, and runs them in a fork for each mutant.

    Args:
        module: the name of the mutated module.
        path: its file.
        record: where it stands how long each test takes without a mutant, and which lines it runs.
        requests: mutants come and results go here; None runs the tests at once.
        log: where pytest writes, if `requests` is given.
    """

    def __init__(self, module: str, path: Path, record: Path, requests: Connection | None, log: Path) -> None:
        self.module, self.path, self.record, self.requests, self.log = module, str(path), record, requests, log
        self.is_recording, self.tests = False, {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        """Serve mutants; returns in the forks alone, which then run the tests as pytest does."""
        if self.requests is None:
            return
        functions = [each for each in gc.get_objects() if type(each) is FunctionType]
        functions = [each for each in functions if each.__code__.co_filename == self.path]
        gc.freeze()  # a collection in a fork would copy the memory
        loader = sys.modules[self.module].__spec__.loader
        original = loader.source_to_code(Path(self.path).read_bytes(), self.path)
        has_libraries = False
        while True:
            source, line, limit = self.requests.recv()
            changed: dict | None = {}
            if source is not None and not has_libraries:
                import_libraries(self.record)
                has_libraries = True
            if source is not None:
                changed = replacements(original, loader.source_to_code(source.encode(), self.path))
                patched = [each for each in functions if each.__code__ in (changed or {})]
                if not patched and source.encode() != Path(self.path).read_bytes():
                    self.requests.send(None)
                    continue
            child = fork(limit)
            if child == 0:
                break
            self.requests.send((wait(child, limit), self.log.read_text(errors="replace")))
            os.truncate(self.log, 0)
        if source is None:
            self.is_recording = True
        else:
            for each in patched:
                each.__code__ = changed[each.__code__]
            self.choose_tests(session, line, {number for code in changed or {} for number in code_lines(code)})

    def choose_tests(self, session: pytest.Session, line: int, mutated: set[int]) -> None:
        """Leave out the tests that run none of the mutated lines, and sort the others.

        All stay if there are no such lines, because what stands outside of functions changed. A test that shares a
        fixture with others stays too: the record names its lines for the first of them alone.
        """
        record = json.loads(self.record.read_text())["tests"]
        unknown = (0.0, list(mutated))

        def may_notice(item: Any) -> bool:
            fixtures = [found[-1] for found in item._fixtureinfo.name2fixturedefs.values()]
            shares = any(fixture.baseid and fixture.scope != "function" for fixture in fixtures)
            return not mutated or shares or not mutated.isdisjoint(record.get(item.nodeid, unknown)[1])

        chosen = [item for item in session.items if may_notice(item)]
        chosen.sort(
            key=lambda item: (line not in record.get(item.nodeid, unknown)[1], record.get(item.nodeid, unknown)[0])
        )
        session.items[:] = chosen

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        if not self.is_recording:
            return (yield)
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

    def pytest_sessionfinish(self) -> None:
        if self.is_recording:
            paths = {name: str(getattr(module, "__file__", None)) for name, module in sys.modules.items()}
            libraries = [name for name, path in paths.items() if "site-packages" in path]
            seconds = time.process_time()
            baseline = {"tests": self.tests, "seconds": seconds, "libraries": libraries}
            self.record.write_text(json.dumps(baseline))


class Runner:
    """Runs a module's tests on its mutants."""

    def __init__(self, module: str, folder: Path) -> None:
        self.module, self.path = f"dino_sparo.{module.replace('/', '.')}", ROOT / "dino_sparo" / f"{module}.py"
        self.folder, self.files = (
            folder,
            [str(path) for name in TESTS[module] for path in (ROOT / "tests").rglob(f"{name}.py")],
        )
        texts = [Path(path).read_bytes() for path in (str(self.path), *self.files)]
        self.record = folder / f"baseline-{hashlib.sha256(b''.join(texts)).hexdigest()[:8]}.json"
        self.requests, served = multiprocessing.Pipe()
        self.server = fork()
        if self.server == 0:
            self.requests.close()
            self.run_pytest(served, folder / "output.txt")
        served.close()
        is_new = not self.record.exists()
        if is_new:
            code, output = self.ask(None, 0, 3600)
            if code:
                raise SystemExit(f"the tests of {module} fail without any mutant:\n{output}")
        baseline = json.loads(self.record.read_text())
        self.limit = 10 + 3 * baseline["seconds"]
        import_libraries(self.record)
        if is_new:
            outcome, output = self.try_mutant(self.path.read_text(encoding="utf-8"), 0)
            if outcome != TestOutcome.SURVIVED:
                self.record.unlink()
                raise SystemExit(f"the tests of {module} fail in another order:\n{output}")

    def ask(self, source: str | None, line: int, limit: float) -> Any:
        self.requests.send((source, line, limit))
        try:
            return self.requests.recv()
        except (EOFError, ConnectionResetError):
            raise SystemExit(f"pytest failed:\n{(self.folder / 'output.txt').read_text()}") from None

    def try_mutant(self, source: str, line: int) -> tuple[TestOutcome, str]:
        """Run the tests with the module's source replaced: its functions, or if more changed the whole module."""
        answer = self.ask(source, line, self.limit)
        if answer is None:
            child = fork(30 + self.limit)
            log = self.folder / "import.txt"
            if child == 0:
                self.replace_source(source)
                self.run_pytest(None, log)
            answer = wait(child, 30 + self.limit), log.read_text(errors="replace")
        return (TestOutcome.KILLED if answer[0] else TestOutcome.SURVIVED), answer[1][-4000:]

    def replace_source(self, source: str) -> None:
        """Let this process import the module from a text."""
        original = importlib.machinery.SourceFileLoader.get_code

        def get_code(loader: Any, name: str) -> Any:
            if loader.path == str(self.path):
                return loader.source_to_code(source.encode(), loader.path)
            return original(loader, name)

        importlib.machinery.SourceFileLoader.get_code = get_code

    def run_pytest(self, requests: Connection | None, log: Path) -> NoReturn:
        code = 1
        try:
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            options = ["-x", "-q", "-p", "no:cacheprovider", "--assert=plain", "--tb=line"]
            options += ["-m", "not (slow or slurm or gpu)", "--basetemp", str(self.folder / "tmp"), *self.files]
            code = int(pytest.main(options, plugins=[Plugin(self.module, self.path, self.record, requests, log)]))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def close(self) -> None:
        """End the process that serves."""
        os.killpg(self.server, signal.SIGKILL)
        os.waitpid(self.server, 0)


def fork(limit: float = 0) -> int:
    """A child in a process group of its own, which may compute for so many seconds."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        if limit:
            resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(limit), math.ceil(limit)))
    return child


def wait(child: int, limit: float) -> int:
    """A child's exit status; what it started ends with it, and both where it waits without computing."""
    end = time.monotonic() + PATIENCE * limit
    while not (finished := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < end:
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    return finished[1] if finished[0] else os.waitpid(child, 0)[1]


def import_libraries(record: Path) -> None:
    """Import the libraries that the tests import while they run, such as `torch._dynamo`, so that no fork has to."""
    for name in json.loads(record.read_text())["libraries"]:
        with contextlib.suppress(Exception):  # some cannot be imported alone
            importlib.import_module(name)
    gc.freeze()


def difference(source: str, code: str) -> str:
    lines = difflib.unified_diff(source.splitlines(), code.splitlines(), n=0, lineterm="")
    return "\n".join(list(lines)[2:])


def try_module(module: str, args: argparse.Namespace) -> None:
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
        if runner is not None:
            runner.close()
        outcomes = [result.test_outcome for result in results.values() if result.test_outcome]
        killed = outcomes.count(TestOutcome.KILLED)
        print(f"{module}: {killed} of {len(outcomes)} mutants killed; {session.num_work_items} there are", flush=True)


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
        try_module(module, args)
    sys.stdout.flush()
    os._exit(0)  # some libraries complain when a process ends that only imported them


if __name__ == "__main__":
    main()
