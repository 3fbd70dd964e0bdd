"""Options: their names and defaults, frozen here; parsing that touches nothing; none that is parsed and ignored."""

import argparse
import builtins
import inspect
import json
import os
import pkgutil
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest
import torch
from options_read import Definition, options_read

import dino_sparo.clip
import main_dino
from dino_sparo import submit
from dino_sparo.__main__ import find_command, main, refuse_early
from dino_sparo.__main__ import run as run_command
from dino_sparo.commands import COMMANDS, command_for, parse_keywords, parser_of
from dino_sparo.image_text.evaluation.compositional.sets import BENCHMARKS
from dino_sparo.image_text.evaluation.options import BENCHMARK_NAMES
from dino_sparo.models import architectures
from dino_sparo.models.readouts import READOUTS
from dino_sparo.oc_clip.binding import BindingConfig
from dino_sparo.runtime import cli
from dino_sparo.runtime import options as runtime_options
from dino_sparo.runtime.cli import MAX_SHOWN, Parser, bool_flag
from dino_sparo.runtime.files import require_inputs
from dino_sparo.runtime.precision import PRECISIONS
from dino_sparo.runtime.trackers import TRACKERS
from dino_sparo.training import options as training_options
from dino_sparo.training.optim import OPTIMIZERS
from dino_sparo.weights import options as weights_options
from dino_sparo.weights.export import CLIP_FORMATS, WRITERS

# The options of facebookresearch/dino's main_dino.py with its defaults: commands written for it must go on working.
REFERENCE: dict[str, Any] = {
    **{"arch": "vit_small", "patch_size": 16, "drop_path_rate": 0.1},
    **{"out_dim": 65536, "norm_last_layer": True, "use_bn_in_head": False, "freeze_last_layer": 1},
    **{"momentum_teacher": 0.996, "warmup_teacher_temp": 0.04, "teacher_temp": 0.04, "warmup_teacher_temp_epochs": 0},
    **{"optimizer": "adamw", "lr": 0.0005, "min_lr": 1e-6, "warmup_epochs": 10, "clip_grad": 3.0},
    **{"weight_decay": 0.04, "weight_decay_end": 0.4, "use_fp16": True, "batch_size_per_gpu": 64, "epochs": 100},
    **{"global_crops_scale": (0.4, 1.0), "local_crops_number": 8, "local_crops_scale": (0.05, 0.4)},
    **{"data_path": "/path/to/imagenet/train/", "output_dir": ".", "saveckp_freq": 20, "seed": 0, "num_workers": 32},
    **{"dist_url": "env://", "local_rank": 0},
}

# Defaults that differ from the reference's on purpose.
CHANGED: dict[str, Any] = {
    "patch_size": None,  # 16; for timm/NAME the model's own
    "warmup_epochs": None,  # 10 in runs of 100 epochs and more, a tenth of shorter runs
    "freeze_last_layer": None,  # 1, or 0 in a run of one epoch
    "use_fp16": None,  # --precision auto decides: bf16 where the device computes in it
    "data_path": None,  # a training without data or folder is refused
    "output_dir": None,
}

# Accepted and ignored by the code: launchers of old pass the first, the environment says what counts; the parser
# reads the second, the choice of the command the third.
IGNORED = {"local_rank", "preset", "image_encoder"}
# Texts that are no paths. Any other text may be one, and its `~` becomes the home folder.
NO_PATHS = {
    *("account", "benchmarks", "binary", "caption", "caption_key", "centering", "checkpoint_key", "comment"),
    *("constraint", "device", "dist_url", "graph_key", "gres", "image_key", "label_column", "models", "name"),
    *("negative_key", "numbers", "partition", "parts", "path_column", "qos", "readout", "repository", "run_name"),
    *("server", "short", "slurm_additional", "split", "split_column", "tags", "val_split"),
}
# Of commands whose first process does all: launchers start them like others.
OF_PEERS = {"dist_url", "dist_timeout_min"}

ROOT = Path(main_dino.__file__).parent
SCRIPTS = (
    *("main_dino.py", "run_with_submitit.py", "eval_knn.py", "eval_linear.py", "eval_image_retrieval.py"),
    *("eval_copy_detection.py", "eval_finetune.py", "visualize_attention.py"),
    *("eval_video_segmentation.py", "video_generation.py"),
)
PARSERS = {name: partial(parser_of, name) for name, command in COMMANDS.items() if command.parser is not None}
OF_EVERY_PARSER = {"help", "help_all", "config", "print_config"}


def options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if action.dest not in OF_EVERY_PARSER]


def parse(command_line: str = "") -> argparse.Namespace:
    return main_dino.get_args_parser().parse_args(shlex.split(command_line))


# Names and defaults.


def test_the_references_options_have_its_defaults_but_for_those_that_are_listed_here() -> None:
    found = vars(parse())
    assert {name: found[name] for name in REFERENCE} == {**REFERENCE, **CHANGED}
    assert all(REFERENCE[name] != default for name, default in CHANGED.items())


def test_options_are_spelled_as_their_names_and_defaults_have_the_type_that_parsing_gives() -> None:
    for action in options(main_dino.get_args_parser()):
        assert action.option_strings == [f"--{action.dest}"]
        if action.default is None or action.nargs == 0:
            continue
        values = action.default if isinstance(action.default, tuple) else (action.default,)
        parsed = getattr(parse(f"--{action.dest} {' '.join(map(str, values))}"), action.dest)
        parsed = tuple(parsed) if isinstance(parsed, list) else (parsed,)
        assert parsed == values
        assert [type(value) for value in parsed] == [type(value) for value in values], action.dest


def test_a_command_line_of_the_reference_is_understood() -> None:
    args = parse(
        "--arch deit_small --patch_size 8 --out_dim 1024 --norm_last_layer false --use_fp16 False --lr 5e-4 "
        "--global_crops_scale 0.14 1. --local_crops_scale 0.05 0.14 --local_crops_number 0 --clip_grad 0 "
        "--data_path some/where --output_dir runs --use_bn_in_head on --optimizer lars --warmup_epochs 0"
    )
    assert (args.arch, args.patch_size, args.norm_last_layer, args.use_fp16) == ("vit_small", 8, False, False)
    assert (list(args.global_crops_scale), args.local_crops_number) == ([0.14, 1.0], 0)
    assert (args.use_bn_in_head, args.optimizer, args.clip_grad) == (True, "lars", 0.0)


# Values.


@pytest.mark.parametrize(
    ("words", "value"), [("true True TRUE on ON 1", True), ("false False off Off 0", False)], ids=["true", "false"]
)
def test_words_for_true_and_false(words: str, value: bool) -> None:
    assert [bool_flag(word) for word in words.split()] == [value] * len(words.split())


@pytest.mark.parametrize("word", ["", "yes", "2", "None", " true"])
def test_other_words_are_neither_true_nor_false(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"'{word}' is neither true nor false"):
        bool_flag(word)
    with pytest.raises(SystemExit):
        parse(f"--norm_last_layer {shlex.quote(word)}")
    assert f"argument --norm_last_layer: '{word}' is neither true nor false" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [
        ("train", "--optimizer adam", "invalid choice: 'adam'"),
        ("train", "--precision fp8", "invalid choice: 'fp8'"),
        ("train", "--lr fast", "'fast' is not a number; give 0 or more"),
        ("train", "--norm_mean 0.5 a 0.5", "'a' is not a number; give one such as 0.5"),
        ("train", "--global_crops_scale 0.4", "expected 2 arguments"),
        ("train", "--norm_mean", "expected at least one argument"),
        ("train", "--momentum_teacher 1.5", "1.5: give a number from 0 to 1"),
        ("train", "--patch_size 0", "0: give a positive number"),
        ("train", "--max_steps 0", "0: give a positive number"),
        ("train", "--lr -1", "-1: give 0 or more"),
        ("train", "--lr inf", "inf is not finite; give 0 or more"),
        ("train", "--norm_mean nan", "nan is not finite; give one such as 0.5"),
        ("train-clip", "--shard_weights 1 inf", "inf is not finite; give 0 or more"),
        ("train-clip", "--beta2 1", "1: give a number from 0 to below 1"),
        ("train-clip", "--max_corrupt nan", "nan is not finite; give a number from 0 to 1"),
        ("train-clip", "--batch_size 0", "0: give a positive number"),
        ("train-clip", "--preset cc4m", "invalid choice: 'cc4m' (choose from"),
        ("train-oc-clip", "--ent_coef 0", "0: give a positive number"),
        ("train-oc-clip", "--rel_loss_weight -1", "-1: give 0 or more"),
        ("train-oc-clip", "--bind_heads 1.5", "'1.5' is not a whole number; give a positive number"),
        ("knn", "--nb_knn 10 0", "0: give a positive number"),
        ("slots study", "--draws 0", "0: give a positive number"),
        ("slots select", "--keep 0", "0: give a positive number"),
        ("pictures", "--max_slots -1", "-1: give a positive number"),
        ("oc-pictures", "--pairs 0 -1", "-1: give 0 or more"),
        ("attention", "--threshold 1.5", "1.5: give a number above 0 and at most 1"),
        ("attention", "--threshold 0", "0: give a number above 0 and at most 1"),
        ("slots score", "--share 0", "0: give a number above 0 and at most 1"),
        ("pictures", "--min_cosine 0", "0: give a number above 0 and at most 1"),
        ("pictures", "--min_sharpness 1.5", "1.5: give a number above 0 and at most 1"),
    ],
)
def test_a_word_that_is_no_number_or_out_of_range_is_refused(
    command: str, words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parser_of(command).parse_args(words.split())
    assert f"argument {words.split()[0]}: {message}" in capsys.readouterr().err


# Help.


def test_the_options_of_training_stand_in_groups() -> None:
    parser = main_dino.get_args_parser()
    titles = [
        line
        for line in parser.format_help(everything=True).splitlines()
        if line.endswith(":") and not line.startswith(" ")
    ]
    assert len(titles) > 5
    assert {action.dest for action in parser._optionals._group_actions} == OF_EVERY_PARSER


def test_help_prints_defaults_unless_there_is_none() -> None:
    parser = Parser()
    parser.add_argument("--rate", default=0.5, help="A rate.")
    parser.add_argument("--steps", default=None, help="Some steps.")
    parser.add_argument("--name", default="", help="A name.")
    text = " ".join(parser.format_help().split())
    assert "A rate. (default: 0.5)" in text
    assert text.count("(default") == 1
    training = " ".join(main_dino.get_args_parser().format_help(everything=True).split())
    assert "(default: 65536)" in training
    assert "default: None" not in training


def test_help_does_not_repeat_a_default() -> None:
    for action in options(main_dino.get_args_parser()):
        if action.default is not None:  # else the help says what the default depends on
            assert "default" not in str(action.help).lower(), action.dest


def test_submit_shows_the_command_that_was_called_and_its_help_begins_as_that_of_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The bug: it began otherwise, and with the name of a script, whatever had been called."""
    with pytest.raises(SystemExit, match="0"):
        run_command("submit", ["--help"])
    usage, description, *_ = capsys.readouterr().out.split("\n\n")
    assert usage.startswith("usage: dino-sparo submit [options]")
    assert description == COMMANDS["submit"].summary
    for prog, other in (("dino-sparo submit", "run_with_submitit"), ("run_with_submitit.py", "dino-sparo")):
        description = str(submit.get_submission_parser(prog=prog).description)
        assert f"{prog} --nodes" in description
        assert other not in description


# Speed: the seconds that torch takes to import are not worth waiting for.


ANSWER = """
import json, runpy, sys
for line in sys.stdin:
    module, *words = json.loads(line)
    sys.argv = [module, *words]
    start = runpy.run_path if module.endswith(".py") else runpy.run_module
    try:
        start(module, run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        print(1 if isinstance(end.code, str) else end.code, "torch" in sys.modules, "END", sep="\\n", flush=True)
    print("END", file=sys.stderr, flush=True)
"""


def answers(*lines: list[str]) -> list[tuple[str, str]]:
    """What command lines write, all of them in one process that never imports torch; a program is the first word."""
    given = "".join(f"{json.dumps(line)}\n" for line in lines)
    environment = {**os.environ, "PYTHONWARNINGS": "ignore::RuntimeWarning"}  # runpy's, of a module that ran before
    done = subprocess.run(
        [sys.executable, "-c", ANSWER],
        **{"input": given, "cwd": ROOT, "env": environment, "capture_output": True, "text": True, "timeout": 100},
    )
    assert done.returncode == 0, done.stderr
    outputs, errors = (text.split("END\n")[:-1] for text in (done.stdout, done.stderr))
    assert len(outputs) == len(errors) == len(lines)
    assert all(output.splitlines()[-1] == "False" for output in outputs), "torch was imported"
    return list(zip(outputs, errors, strict=True))


def test_help_and_mistakes_are_answered_before_torch_is_imported() -> None:
    commands = [["dino_sparo", *name.split()] for name in ("train", "slots mask", "submit")] + [[s] for s in SCRIPTS]
    found = answers(*([*command, word] for command in commands for word in ("--help", "--no_such_option")))
    for command, (text, _), (status, error) in zip(commands, found[::2], found[1::2], strict=True):
        assert text.startswith(f"usage: {' '.join(command).replace('dino_sparo', 'dino-sparo')} ")
        assert "--help" in text
        assert text.splitlines()[-2:] == ["0", "False"]
        assert status.splitlines() == ["2", "False"]
        assert "--no_such_option" in error or "required" in error


REFUSED = (
    ("train", "give --data_path and --output_dir. Without data"),
    ("train --data_path no/folder --output_dir r", "--data_path no/folder does not exist (in "),
    ("train --data_path scenes --output_dir r --arch vit_smal", "--arch vit_smal is unknown; choose one of vit_base"),
    ("train --data_path scenes --output_dir r --readout spar", "--readout spar is unknown; choose one of attention"),
    ("train-simdino --data_path scenes --output_dir r --epochs 1 --warmup_epochs 2", "--warmup_epochs 2 is longer"),
    ("train-clip --data_path scenes --output_dir r --epoch_pairs 3", "--shards indexed with --epoch_pairs 3"),
    ("train-oc-clip --data_path scenes --output_dir r --val_share 0.5 --val_path scenes", "--val_share 0.5 with"),
    ("compositional --benchmarks unknown --data_root .", "--benchmarks unknown is unknown; choose one of aro-att"),
    ("knn --pretrained_weights no.pth --data_path scenes", "--pretrained_weights no.pth does not exist (in "),
    ("zero-shot --pretrained_weights demo --data_path /no/folder", "--data_path /no/folder does not exist (in "),
)


def test_wrong_values_are_refused_before_torch_is_imported() -> None:
    """Regression: each took the ten seconds of torch's import, and more."""
    found = answers(*(["dino_sparo", *words.split()] for words, _ in REFUSED))
    for (_, message), (status, error) in zip(REFUSED, found, strict=True):
        assert status.splitlines() == ["1", "False"]
        assert re.fullmatch(rf"\d\d:\d\d:\d\d E {re.escape(message)}.*\n", error)


def test_an_architecture_with_other_heads_is_not_refused_early() -> None:
    refuse_early(parser_of("knn").parse_args(["--arch", "vit_small_heads12"]), "knn")


def test_names_that_are_no_paths_are_no_missing_inputs(tmp_path: Path) -> None:
    names = ["demo", "timm/vit_tiny_patch16_224", "USER/name.v1", "", str(tmp_path)]
    for name in names:
        require_inputs({"pretrained_weights": name})
    others = ("scenes:8", "cifar10:no/folder", "no/{0..3}.tar", "no/*.tar", "https://no/a.tar", "pipe:cat no/a", "x")
    for name in others:
        require_inputs({"data_path": name, "val_path": None})
    require_inputs({"load_features": str(tmp_path), "data_path": "no/folder", "pretrained_weights": ["no.pth"]})
    with pytest.raises(ValueError, match=r"--pretrained_weights runs/b.pth does not exist"):
        require_inputs({"pretrained_weights": ["demo", "runs/b.pth"]})


def test_a_mistyped_option_is_answered_in_one_line_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    for words, expected in (
        (["train-clip", "--batchsize", "32"], "unrecognized arguments: --batchsize 32; did you mean --batch_size?"),
        (["train", "--img_size", "64"], "unrecognized arguments: --img_size 64"),
        (
            ["train", "--batch_size", "16"],
            "unrecognized arguments: --batch_size 16; did you mean --batch_size_per_gpu?",
        ),
        (
            ["train", "--sparo_slo", "16", "--lrate", "3"],
            "unrecognized arguments: --sparo_slo 16 --lrate 3; did you mean --sparo_slots or --sparo_slot_dim or --lr?",
        ),
        (
            ["knn", "--arch", "vit_micro", "--nb_knn", "many"],
            "argument --nb_knn: 'many' is not a whole number; give a positive number",
        ),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(words)
        assert capsys.readouterr().err == f"dino-sparo {words[0]}: {expected}; --help-all lists the options\n"


def test_every_parser_of_the_project_is_one_that_takes_no_abbreviations() -> None:
    """The bug: `--batch_size 16` was taken for `--batch_size_per_gpu 16`."""
    assert not any(make().allow_abbrev for make in PARSERS.values())
    for folder in ("dino_sparo", "studies", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            for call in re.findall(r"argparse\.ArgumentParser\([^)]*", path.read_text(encoding="utf-8")):
                assert "allow_abbrev=False" in call, f"{path}: make a Parser of runtime/cli.py"


# The one command.


def test_every_command_is_listed_in_a_section_with_what_it_turns_into_what(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    lines = capsys.readouterr().out.splitlines()
    for name, command in COMMANDS.items():
        is_listed = any(line.split() == [*name.split(), *command.summary.split()] for line in lines)
        assert is_listed != bool(command.instead_of), name
    titles = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert titles[:-1] == ["train:", "evaluate and use an encoder:", "slots:", "image and text:", "data:", "demos:"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("zeroshot --data_path x", "there is no command 'zeroshot'; did you mean zero-shot?"),
        ("slots", "did you mean slots study or slots score or slots select or slots mask?"),
        ("pictures", "there is no command 'pictures'"),  # its name in the table alone
    ],
)
def test_a_command_that_does_not_exist_is_named_with_the_nearest(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words.split())
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_command_imports_code_that_exists(name: str) -> None:
    command = COMMANDS[name]
    assert callable(command.function)
    parameters = inspect.signature(pkgutil.resolve_name(f"dino_sparo.{command.code}")).parameters
    assert command.needs.keys() <= parameters.keys()


def test_the_installed_script_and_the_module_are_the_same_command() -> None:
    version = f"dino_sparo {dino_sparo.__version__}\n"
    for words in ([str(Path(sys.executable).with_name("dino-sparo"))], [sys.executable, "-m", "dino_sparo"]):
        assert subprocess.run([*words, "--version"], capture_output=True, text=True, timeout=100).stdout == version


@pytest.mark.parametrize("package", [dino_sparo, dino_sparo.clip])
def test_what_a_package_offers_is_imported_when_it_is_used(package: ModuleType) -> None:
    imported_when_used = set(dir(package)) - vars(package).keys()
    assert set(package.__all__) == imported_when_used | ({"__version__"} & vars(package).keys())
    assert all(getattr(package, name) is not None for name in package.__all__)
    assert set(package.__all__) <= set(dir(package))
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        _ = package.no_such_name


@pytest.mark.parametrize(
    ("names", "table"),
    [
        (training_options.OPTIMIZERS, OPTIMIZERS),
        (training_options.TRACKERS, TRACKERS),
        (architectures.READOUTS, READOUTS),
        (BENCHMARK_NAMES, BENCHMARKS),
        (runtime_options.PRECISIONS, PRECISIONS),
        (weights_options.EXPORT_FORMATS, WRITERS | CLIP_FORMATS),
    ],
)
def test_the_names_to_choose_from_are_those_that_can_be_built(names: tuple[str, ...], table: dict[str, Any]) -> None:
    assert set(names) == set(table)


# Purity.


def test_parsing_opens_nothing_and_asks_no_device_or_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("parsing is pure")

    for owner, name in [
        (builtins, "open"),
        (os, "open"),
        (os, "makedirs"),
        (os, "mkdir"),
        (os, "listdir"),
        (os, "scandir"),
        (socket, "socket"),
        (subprocess, "Popen"),
        (torch.cuda, "is_available"),
        (torch.cuda, "device_count"),
        (torch.cuda, "init"),
        (torch.hub, "list"),
        (torch.hub, "load"),
    ]:
        monkeypatch.setattr(owner, name, forbidden)
    args = parse("--data_path no/such/folder --output_dir no/such/runs --device cuda:7 --arch what")
    monkeypatch.undo()
    assert (args.data_path, args.device, args.arch) == ("no/such/folder", "cuda:7", "what")


def test_parsing_does_not_depend_on_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    before = parse()
    for name, value in {"RANK": "3", "WORLD_SIZE": "7", "LOCAL_RANK": "2", "SLURM_PROCID": "5"}.items():
        monkeypatch.setenv(name, value)
    assert parse() == before


# Use.


def definitions(name: str) -> list[Definition]:
    paths = (COMMANDS[name].code, *COMMANDS[name].needs.values())
    return [(f"dino_sparo.{module}", value) for module, _, value in (path.partition(":") for path in paths)]


@pytest.mark.parametrize("name", PARSERS)
def test_every_option_of_a_command_is_read_by_its_code(name: str) -> None:
    """Regression: `select` and `mask` parsed --max_missing_graphs, and no code of theirs asked for it."""
    parsed = {action.dest for action in options(PARSERS[name]())}
    # OC-CLIP's model takes the options of the names of its fields.
    sizes = {one.name for one in fields(BindingConfig)} if name == "train-oc-clip" else set()
    ignored = IGNORED | sizes | (OF_PEERS if name in ("attention", "slots score") else set())
    assert parsed - options_read(*definitions(name)) <= ignored, "parsed but never used"


# Not attention, whose code has attributes of other objects that are called as methods of its task.
@pytest.mark.parametrize("name", ["train", "train-clip", "knn", "linear", "zero-shot", "compositional"])
def test_no_code_of_a_command_reads_an_option_that_it_has_not(name: str) -> None:
    read = options_read(*definitions(name), texts=False)
    assert read <= {action.dest for action in options(PARSERS[name]())}, "used but never parsed"


# Options from Python.


def test_keywords_are_parsed_as_the_command_line_is() -> None:
    words = "--data_path scenes --nb_knn 10 20 --use_cuda false --untrained --temperature 0.1 --max_value 4095"
    keywords = {
        "data_path": Path("scenes"),
        "nb_knn": [10, 20],
        "use_cuda": False,
        "untrained": True,
        "download": False,
        "temperature": 0.1,
        "max-value": 4095,
        "output_dir": None,
    }
    assert parse_keywords("knn", keywords) == PARSERS["knn"]().parse_args(words.split())
    assert parse_keywords("export", {"checkpoint": "a.pth", "out": "b"}).out == "b"


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"batch_size": 16}, "unrecognized arguments: --batch_size=16; did you mean --batch_size_per_gpu?"),
        ({"epochs": [1, 2]}, "argument --epochs: expected one value, not [1, 2]"),
        ({"epochs": {"a": 1}}, "argument --epochs: expected one value, not {'a': 1}"),
        ({"global_crops_scale": [0.4]}, "argument --global_crops_scale: expected 2 arguments"),
    ],
)
def test_a_wrong_keyword_is_a_value_error_of_one_line(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="argument") as error:
        parse_keywords("train", keywords)
    assert str(error.value) == message


# Configuration files.


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_options_come_from_a_file_and_the_command_line_overrides_it(tmp_path: Path) -> None:
    path = write(
        tmp_path / "run.yaml",
        "# A recipe.\ncommand: train\ndata_path: scenes:64:48\nlr: 5e-4\ncompile: off\nlocal_crops_scale: [0.1, 0.4]\n"
        "norm_last_layer: false\ndownload: true\nmax_steps: null\nbatch-size-per-gpu: 16\n",
    )
    args = parser_of("train").parse_args(["--epochs", "3", "--config", path, "--lr", "0.1", "--download", "false"])
    words = "--data_path scenes:64:48 --lr 0.1 --compile off --local_crops_scale 0.1 0.4 --norm_last_layer false"
    assert args == parse(f"{words} --batch_size_per_gpu 16 --epochs 3")


# Each list holds the one before ten times.
ALIASES = "a: &a [1]\n" + "".join(f"{b}: &{b} [{', '.join(10 * [f'*{a}'])}]\n" for a, b in pairwise("abcdefghijk"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epoch: 3", "unrecognized arguments: --epoch=3; did you mean --epochs?"),
        ("epochs: many", "argument --epochs: 'many' is not a whole number; give a positive number"),
        ("epochs: [1, 2]", "argument --epochs: expected one value, not ['1', '2']"),
        ("epochs: {a: 1}", "line 1 of the file gives neither `option: value` nor `option: [value, value]`"),
        ("epochs: 1\nlr: [[1]]", "line 2 of the file gives neither `option: value` nor `option: [value, value]`"),
        ("? [epochs]\n: 1", "line 1 of the file gives neither `option: value` nor `option: [value, value]`"),
        ("epochs: [1]", "argument --epochs: expected one value, not ['1']"),
        ("epochs: 1\nepochs: 2", "the file gives epochs twice; leave one of the lines out"),
        ("out-dim: 1\nout_dim: 1", "the file gives out_dim twice; leave one of the lines out"),
        ("lr: inf", "argument --lr: inf is not finite; give 0 or more"),
        ("global_crops_scale: [0.1, 0.2, 0.3]", "argument --global_crops_scale: expected 2 values, not ['0.1', '0.2'"),
        ("config: other.yaml", "unrecognized arguments: --config=other.yaml; did you mean --config?"),
        ("a: [" * 2000, "the file is nested too deeply; give lines like `epochs: 100`"),
        ("lr: " + "[" * 2000, "the file is nested too deeply; give lines like `epochs: 100`"),
        (ALIASES, "line 2 of the file gives neither `option: value` nor `option: [value, value]`"),
        ("".join(f"k{i}: 1\n" for i in range(300_000)), "the file is larger than 65536 bytes; is it a configuration?"),
        ("".join(f"k{i}: 1\n" for i in range(500)), "unrecognized arguments: --k0=1"),
        ("optimizer: adam", "argument --optimizer: invalid choice: 'adam' (choose from 'adamw', 'lars', 'sgd')"),
        ("command: train-clip", "the file is for the command train-clip"),
        ("- epochs", "the file holds no options; give lines like `epochs: 100`"),
        ("a: [", "the file cannot be read: while parsing a flow node"),
    ],
)
def test_a_mistake_in_a_configuration_is_one_line(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "run.yaml", text)
    with pytest.raises(SystemExit, match="2"):
        main(["train", "--config", path])
    error = capsys.readouterr().err
    assert error.startswith(f"dino-sparo train --config {path}: {message}")
    assert error.count("\n") == 1
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_keywords("train", {"config": path})


def test_an_option_under_two_names_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "run.yaml", "image_path: a.png\ndata_path: b.png")
    for keywords in ({"config": path}, {"image_path": "a.png", "data_path": "b.png"}):
        with pytest.raises(ValueError, match="argument --data_path: given twice"):
            parse_keywords("attention", keywords)


def test_positional_words_and_lists_of_a_configuration_leave_those_of_the_command_line_alone(tmp_path: Path) -> None:
    """Regression: the file's positional was one too many, and a list at its end took the command line's."""
    path = write(tmp_path / "run.yaml", "folder: a\nclusters: 3\nshow_channels: [1, 2]\n")
    for words, folder in (([], "a"), (["b"], "b")):
        for line in ([*words, "--config", path], ["--config", path, *words]):
            args = parser_of("cluster").parse_args(line)
            assert (args.folder, args.clusters, args.show_channels) == (folder, 3, [1, 2])


def test_a_text_that_reads_null_survives_a_printed_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"run_name": "null", "split": "~", "data_path": "my 'data': [x] é #", "path_column": ""}
    with pytest.raises(SystemExit, match="0"):
        main(["train", *(f"--{name}={value}" for name, value in names.items()), "--print_config"])
    path = write(tmp_path / "run.yaml", capsys.readouterr().out)
    assert vars(parse(f"--config {path}")).items() >= names.items()


def test_two_configurations_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "run.yaml", "epochs: 3")
    with pytest.raises(SystemExit, match="2"):
        main(["train", "--config", path, f"--config={path}"])
    assert "--config is given 2 times; give it once" in capsys.readouterr().err


def test_a_pipe_is_no_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, "/dev/zero"):
        with pytest.raises(SystemExit, match="2"):
            main(["--config", str(path)])
        assert "is a folder, a pipe or a device, not a regular file" in capsys.readouterr().err


# Paths.


def test_every_text_may_be_a_path_unless_it_is_listed_here() -> None:
    parsers = [*(make() for make in PARSERS.values()), submit.get_submission_parser()]
    texts = {action.dest for parser in parsers for action in options(parser) if action.type is str}
    assert texts == NO_PATHS


PATHS = ("with blank", "name.v1.2", "größe-図/b", ".", "./x", "null", "1e3", "a: b # c", "[x]", "'q\"", "{0..1}.tar")
HOME_PATHS = {"~/my data": "/my home/my data", "x:~/b::~/c": "x:/my home/b::/my home/c", "~": "/my home"}


def paths_of(name: str) -> dict[str, argparse.Action]:
    """The options and positionals of a command that take a path."""
    return {a.dest: a for a in options(PARSERS[name]()) if a.type is cli.path and not a.choices}


def words_with(name: str, values: Mapping[str, str]) -> list[str]:
    """A command line with these values; other options that are required have the value x."""
    given = [action for action in PARSERS[name]()._actions if action.dest in values or action.required]
    return [word for action in given for word in (*action.option_strings[:1], values.get(action.dest, "x"))]


def texts(args: argparse.Namespace) -> dict[str, str]:
    """Values of options as texts; of a list its first."""
    values = {name: value[:1] if isinstance(value, (list, tuple)) else [value] for name, value in vars(args).items()}
    return {name: " ".join(map(str, value)) for name, value in values.items()}


def print_config(words: list[str], name: str, path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Write what --print_config prints to a file, and return its path."""
    with pytest.raises(SystemExit, match="0"):
        PARSERS[name]().parse_args([*words, "--print_config"])
    return write(path, capsys.readouterr().out)


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_a_path_is_taken_as_it_is_typed_and_survives_a_printed_configuration(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each option of each command gets three of the paths, which are others in the next command."""
    first, differ = sorted(PARSERS).index(name), []
    for start in range(first, first + len(PATHS), 4):
        given = {option: PATHS[(start + i) % len(PATHS)] for i, option in enumerate(paths_of(name))}
        config = print_config(words_with(name, given), name, tmp_path / "c.yaml", capsys)
        for words in (words_with(name, given), ["--config", config]):
            found = texts(PARSERS[name]().parse_args(words))
            differ += [(option, path, words[0]) for option, path in given.items() if found[option] != path]
    assert not differ


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_the_home_folder_is_expanded_in_every_path_on_the_command_line_in_yaml_and_in_python(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/my home")
    paths, required = paths_of(name), {a.dest: "x" for a in options(PARSERS[name]()) if a.required}
    for typed, expanded in HOME_PATHS.items():
        values = required | {option: [typed] if action.nargs else typed for option, action in paths.items()}
        config = write(tmp_path / "c.yaml", json.dumps(values))
        found = {
            "command line": PARSERS[name]().parse_args(words_with(name, dict.fromkeys(paths, typed))),
            "YAML": PARSERS[name]().parse_args(["--config", config]),
            "Python": parse_keywords(name, values),
        }
        assert not [(way, option) for way, args in found.items() for option in paths if texts(args)[option] != expanded]


def test_the_home_folder_is_expanded_in_the_name_of_a_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "run.yaml", "epochs: 3")
    assert parse("--config=~/run.yaml").epochs == parse_keywords("train", {"config": "~/run.yaml"}).epochs == 3


def test_a_missing_configuration_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["knn", "--config", str(tmp_path / "none.yaml")])
    assert "the file cannot be read: [Errno 2] No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_a_printed_configuration_repeats_the_command_and_takes_other_positionals(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = words_with(name, {})
    config = print_config(words, name, tmp_path / "run.yaml", capsys)
    args = PARSERS[name]().parse_args(["--config", config])
    assert json.loads(json.dumps(vars(args))) == json.loads(json.dumps(vars(PARSERS[name]().parse_args(words))))
    assert f"command: {COMMANDS[name].instead_of or name}\n" in Path(config).read_text()
    others = {action.dest: f"of {action.dest}" for action in options(PARSERS[name]()) if not action.option_strings}
    for line in (["--config", config, *others.values()], [*others.values(), f"--config={config}"]):
        assert texts(PARSERS[name]().parse_args(line)).items() >= others.items()


def test_a_file_can_name_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "run.yaml", "command: scene-pairs\nnum_pairs: 2\n")
    main(["--config", path, "--output_dir", str(tmp_path / "pairs")])
    assert len(list((tmp_path / "pairs").rglob("*.png"))) == 2


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            "train",
            "--arch vit_micro --patch_size 8 --global_crops_size 32 --local_crops_number 0 --batch_size_per_gpu 4 "
            "--out_dim 32 --head_hidden_dim 16 --sparo_slots 5 --sparo_slot_dim 3",
        ),
        (
            "train-clip",
            "--preset cc3m --arch vit_micro --patch_size 16 --img_size 32 --batch_size 4 --text_layers 2 "
            "--text_width 24 --text_heads 2 --context_length 20",
        ),
    ],
)
def test_a_training_writes_the_configuration_that_repeats_it(command: str, words: str, tmp_path: Path) -> None:
    if command == "train-clip":
        pytest.importorskip("open_clip")
    words += " --data_path scenes:8:32 --max_steps 1 --epochs 1 --num_workers 0 --device cpu --precision fp32"
    given = [*words.split(), "--output_dir", str(tmp_path / "run")]
    run_command(command, given)
    path = tmp_path / "run" / "config.yaml"
    expected, args = (vars(PARSERS[command]().parse_args(line)) for line in (given, ["--config", str(path)]))
    assert json.loads(json.dumps(args)) == json.loads(json.dumps(expected))
    main(["--config", str(path), "--output_dir", str(tmp_path / "again")])
    first, second = (torch.load(tmp_path / name / "checkpoint.pth", weights_only=False) for name in ("run", "again"))
    weights = [saved["student" if command == "train" else "model"] for saved in (first, second)]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


# Help and sections.


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_help_says_what_becomes_what_with_at_most_fifteen_options_and_two_examples_and_help_all_every_option(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        run_command(name, ["--help"])
    text = capsys.readouterr().out
    usage, description, *_ = text.split("\n\n")
    assert usage.startswith(f"usage: dino-sparo {COMMANDS[name].instead_of or name} [options]")
    assert description == COMMANDS[name].summary
    assert re.fullmatch(r"[A-Z][^>]+ -> [^>]+\.", description)
    shown = [action.dest for action in options(PARSERS[name]()) if re.search(rf"^  (--)?{action.dest}\b", text, re.M)]
    assert 0 < len(shown) <= MAX_SHOWN
    _, _, examples = text.partition("examples:\n")
    shown = [f"  dino-sparo {COMMANDS[name].instead_of or name} {words}".rstrip() for words in COMMANDS[name].examples]
    assert examples.split("\n")[:2] == shown
    assert len(shown) == 2
    with pytest.raises(SystemExit, match="0"):
        run_command(name, ["--help-all"])
    text = capsys.readouterr().out
    for action in options(PARSERS[name]()):
        assert action.help, action.dest
        assert re.search(rf"^  (--)?{action.dest}\b", text, re.M), action.dest


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_the_examples_of_a_command_can_be_typed(name: str) -> None:
    for words in COMMANDS[name].examples:
        PARSERS[name]().parse_args(shlex.split(words))


@pytest.mark.parametrize("name", ["train-simdino", "train-clip", "train-oc-clip"])
def test_train_takes_the_objective_as_a_word(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([*name.split("-", 1), "--help"])
    assert capsys.readouterr().out.startswith(f"usage: dino-sparo {name} [options]")


def test_hyphens_and_underscores_are_equal() -> None:
    expected = parse("--batch_size_per_gpu 7 --use_bn_in_head true")
    assert parse("--batch-size-per-gpu 7 --use-bn-in-head") == expected
    assert parse("--batch-size_per-gpu=7 --use-bn_in_head=on") == expected
    assert find_command(["zero_shot", "--x"]) == ("zero-shot", ["--x"])


def test_a_flag_takes_true_or_false_and_no_other_word() -> None:
    assert parser_of("push").parse_args(["--private", "a.pth", "user/name"]).checkpoint == "a.pth"
    assert parser_of("push").parse_args(["--private", "false", "a.pth", "user/name"]).private is False
    assert parse("--download").download is True
    assert parse("--download false").download is False


@pytest.mark.parametrize(
    ("hidden", "kind"), [(name, kind) for name, command in COMMANDS.items() for kind in command.kinds]
)
def test_attention_and_linear_take_the_options_of_the_checkpoints_objective(
    hidden: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = COMMANDS[hidden].instead_of
    torch.save({kind: {}, "model": {}}, tmp_path / "a-b.pth")
    with pytest.raises(SystemExit, match="0"):
        main([name, "--pretrained-weights", str(tmp_path / "a-b.pth"), "--help"])
    usage, summary, *_ = capsys.readouterr().out.split("\n\n")
    assert (usage, summary) == (f"usage: dino-sparo {name} [options]", COMMANDS[hidden].summary)
    path = write(tmp_path / "run.yaml", f"command: {name}\npretrained_weights: {tmp_path / 'a-b.pth'}\n")
    assert command_for(name, ["--config", path]) == hidden
    assert command_for(name, ["--config", path, "--image-encoder=True"]) == name
    with pytest.raises(SystemExit, match="0"):
        main([name, "--pretrained_weights", str(tmp_path / "a-b.pth"), "--image_encoder", "--help"])
    assert capsys.readouterr().out.split("\n\n")[1] == COMMANDS[name].summary


def test_the_references_names_of_attention_stay() -> None:
    args = parser_of("attention").parse_args(["--image_path", "a.png", "--image_size", "480", "480"])
    assert (args.data_path, args.img_size) == ("a.png", [480, 480])
    assert parse_keywords("attention", {"image_size": [480, 480]}).img_size == [480, 480]
