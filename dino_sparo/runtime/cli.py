"""Options of commands as tables: their parser, configuration files, and the output of commands.

A command's parser is made from groups of options: title -> name -> `Option`. The options of a folder stand in its
`options.py`. Parsing opens no file but `--config`, touches no device, asks no network. It imports no torch either, so
that `--help` and mistakes are answered at once.
"""

import argparse
import difflib
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, NoReturn

from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.files import open_regular


def printable(words: str, keep: str = "") -> str:
    """Words with escape sequences for control characters, bytes that are no UTF-8, and the like, except in `keep`.

    File names may hold them. On a terminal they could move the cursor, in a log they could look like another line.
    """
    return "".join(
        letter if letter.isprintable() or letter in keep else letter.encode("unicode_escape").decode()
        for letter in words
    )


def say(text: str) -> None:
    """Write a result to the standard output, with escaped control characters. A closed pipe is not an error."""
    try:
        sys.stdout.write(printable(text, keep="\n\t") + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # Python would try once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def number(kind: type[int] | type[float], fits: Callable[[float], bool], valid: str) -> Callable[[str], Any]:
    """The type of an option that takes numbers in a range; `valid` is the range in words."""

    def parse(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError:
            wanted = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}; give {valid}") from None
        if not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"{text} is not finite; give {valid}")
        if not fits(value):
            raise argparse.ArgumentTypeError(f"{text}: give {valid}")
        return value

    return parse


positive_int = number(int, lambda value: value > 0, "a positive number")
positive_number = number(float, lambda value: value > 0, "a positive number")
whole_number = number(int, lambda value: value >= 0, "0 or more")
number_from_0 = number(float, lambda value: value >= 0, "0 or more")
any_number = number(float, lambda value: True, "one such as 0.5")
share = number(float, lambda value: 0 <= value <= 1, "a number from 0 to 1")
share_above_0 = number(float, lambda value: 0 < value <= 1, "a number above 0 and at most 1")
share_below_1 = number(float, lambda value: 0 <= value < 1, "a number from 0 to below 1")


BOOLEANS = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}


def path(text: str) -> str:
    """The type of every option that may be a path: `~`, also that of `cifar10:~/data`, becomes the home folder."""
    return ":".join(os.path.expanduser(part) for part in text.split(":"))


def path_with_name(text: str) -> str:
    """As `path`, of an option whose default is not a path: an empty text would be the working folder."""
    if not text:
        raise argparse.ArgumentTypeError("is empty; give a path")
    return path(text)


def bool_flag(text: str) -> bool:
    """`true`, `on`, `1` or `false`, `off`, `0`, in any case, as the reference's options take them."""
    if text.lower() not in BOOLEANS:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return BOOLEANS[text.lower()]


RUN_CONFIG = "config.yaml"  # a run writes its options there
RUN_FILES = ("checkpoint.pth", "run.log")  # tell the folder of a run
MAX_CONFIG_BYTES = 1 << 16  # all options of a command take 4 KB
MAX_SHOWN = 15
# `--help` of a command with more options than that shows these alone; `--help-all` shows all.
MAIN_OPTIONS = {
    *("pretrained_weights", "data_path", "data_root", "output_dir", "output", "epochs", "batch_size"),
    *("batch_size_per_gpu", "lr", "arch", "img_size", "global_crops_size", "readout", "sparo_slots", "out_dim"),
    *("init_from", "init_clip", "preset", "graphs", "device", "val_path", "captions", "caption", "parser", "server"),
    *("model", "split", "slots", "keep", "nb_knn", "fast", "numbers", "probe"),
    *("what", "dtype", "overwrite", "num_images", "threshold", "save_each", "max_maps", "compare", "atlas", "masks"),
    *("pca", "duplicates"),
    *("maps", "match", "classnames", "templates", "images", "benchmarks", "blind", "failures", "k", "parts", "pairs"),
    *("nodes", "ngpus", "partition", "timeout_min", "dry_run", "head", "steps", "slot_masks"),
}

# Type of a default -> type of the option, unless it names another. A text may be a path, unless the option says `str`.
TYPES: dict[type, Callable[[str], Any]] = {
    bool: bool_flag,
    int: whole_number,
    float: number_from_0,
    str: path,
    NoneType: path_with_name,
}


class Option(NamedTuple):
    """One option of a command; its name is the key in its group.

    Attributes:
        default: value if the option is not given. A tuple takes as many values, a list any number.
        help: advice in a sentence; the default is added.
        type: text -> value; by default that of `default`, see `TYPES`.
        choices: valid values; None: all.
        nargs: number of values as in argparse, if `default` does not say it.
        metavar: value in the help.
        is_positional: given without name.
        is_required: the command ends without the option.
        spellings: further names without hyphens in front.
    """

    default: Any
    help: str
    type: Callable[[str], Any] | None = None
    choices: Iterable[Any] | None = None
    nargs: str | None = None
    metavar: str | None = None
    is_positional: bool = False
    is_required: bool = False
    spellings: Sequence[str] = ()

    def add_to(self, group: argparse._ArgumentGroup, name: str) -> None:
        """Add the option to a group of a parser."""
        several = isinstance(self.default, (list, tuple))
        kind = self.type or TYPES[type((self.default or [None])[0] if several else self.default)]
        nargs: str | int | None = self.nargs
        if several and nargs is None:
            nargs = len(self.default) if isinstance(self.default, tuple) else "+"
        keywords: dict[str, Any] = {"type": kind, "nargs": nargs, "metavar": self.metavar, "help": self.help}
        keywords |= {"default": self.default, "choices": self.choices}
        if kind is bool_flag:
            keywords |= {"nargs": "?", "const": True, "metavar": "true|false"}
        if self.is_positional:
            group.add_argument(name, **keywords)
        else:
            spellings = [f"--{spelling}" for spelling in (name, *self.spellings)]
            group.add_argument(*spellings, dest=name, required=self.is_required, **keywords)


Group = dict[str, Option]


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Prints every option's default after its help, no `(default: None)`, and the description as it was written."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default == "":
            return action.help
        return super()._get_help_string(action)


class _HelpAll(argparse.Action):
    """`--help-all`: show every option and end."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        assert isinstance(parser, Parser)
        say(parser.format_help(everything=True))
        parser.exit()


class Parser(argparse.ArgumentParser):
    """Options of a command, spelled in full; a mistake is answered in one line.

    Values come from the command line, else from `--config`, else from `--preset`, whose configuration files are
    `presets`, else from `defaults`, else from the table.
    """

    def __init__(
        self,
        groups: Mapping[str, Group] | None = None,
        prog: str | None = None,
        description: str | None = None,
        presets: Mapping[str, Path] | None = None,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            prog, description=description, formatter_class=HelpFormatter, allow_abbrev=False, add_help=False
        )
        self.groups: dict[str, Group] = {}
        self.presets = presets or {}
        self.command: str | None = None  # that a configuration file may name
        self.source = ""  # of the options, for messages
        self.raises_errors = False
        self._optionals.title = "help and configuration"
        self.add_argument("-h", "--help", action="help", help="Show the most important options and examples.")
        no_default: Any = {"default": argparse.SUPPRESS}
        self.add_argument("--help_all", "--help-all", action=_HelpAll, nargs=0, help="Show all options.", **no_default)
        self.add_argument("--config", metavar="FILE", help="YAML file of lines `option: value`.", **no_default)
        self.add_argument(
            "--print_config", action="store_true", help="Print all options as such a file and end.", **no_default
        )
        for title, options in (groups or {}).items():
            self.add_options(title, options)
        self.set_defaults(**(defaults or {}))

    def add_options(self, title: str, options: Group) -> None:
        """Add a group of options."""
        group = self.add_argument_group(title)
        for name, option in options.items():
            option.add_to(group, name)
        self.groups[title] = options

    @property
    def options(self) -> Group:
        """All options by name."""
        return {name: option for group in self.groups.values() for name, option in group.items()}

    def format_help(self, everything: bool = False) -> str:
        """Usage, description, options and examples; by default the most important options alone."""
        options, formatter = self.options, self._get_formatter()
        is_short = not everything and len(options) > MAX_SHOWN
        positional = [action.dest for action in self._actions if not action.option_strings]
        formatter.add_usage(" ".join(["%(prog)s [options]", *positional]), [], [])
        formatter.add_text(self.description)
        for group in [*self._action_groups[2:], self._action_groups[1]]:
            formatter.start_section(group.title)
            shown = [a for a in group._group_actions if not is_short or a.dest not in options or a.dest in MAIN_OPTIONS]
            formatter.add_arguments(shown)
            formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse words; else values come from `namespace`, unchecked so far, from `--config`, or from `--preset`."""
        words = self._with_values([with_underscores(str(word)) for word in (sys.argv[1:] if args is None else args)])
        layers = [vars(namespace)] if namespace is not None else []
        files = values_of(words, "--config")
        if len(files) > 1:
            self.error(f"--config is given {len(files)} times; give it once")
        for file in files:
            self.source = f" --config {file}"
            values = self._config(file)
            if not values_of(words, "--output_dir") and not any("output_dir" in layer for layer in layers):
                self._refuse_moved_run(Path(path(file)), path(str(values.get("output_dir") or "")))
            layers = [values, *layers]
        preset = (values_of(words, "--preset") or [str(layers[0].get("preset")) if layers else ""])[-1]
        if preset in self.presets:
            layers = [self._config(self.presets[preset]), *layers]
        parsed = argparse.Namespace()
        for layer in layers:
            self._set_values(layer, parsed)
        for action in self._actions:
            action.required = action.required and action.dest not in parsed
        parsed, rest = super().parse_known_args(words, parsed)
        parsed.__dict__.pop("config", None)
        if parsed.__dict__.pop("print_config", False) and not rest:
            say(config_text(vars(parsed), self.command).rstrip())
            self.exit()
        return parsed, rest

    def _with_values(self, words: list[str]) -> list[str]:
        """Give options without a value the value true, where words without an option may follow."""
        if all(action.option_strings for action in self._actions):
            return words
        flags = {f"--{action.dest}" for action in self._actions if action.type is bool_flag}
        following = [*words, ""][1:]
        return [
            f"{word}=true" if word in flags and next_word.lower() not in BOOLEANS else word
            for word, next_word in zip(words, following, strict=True)
        ]

    def _config(self, file: str | Path) -> dict[str, Any]:
        """The options of a configuration file, which may name no other command than this one."""
        try:
            values = read_config(file)
        except UserError as error:
            self.error(str(error))
        command = values.pop("command", None)
        if None not in (command, self.command) and command != self.command:
            self.error(f"the file is for the command {command}")
        return values

    def _refuse_moved_run(self, file: Path, output_dir: str) -> None:
        """End with an error if the config.yaml of a run names another folder, where the run would start anew."""
        is_of_run = file.name == RUN_CONFIG and any((file.parent / name).exists() for name in RUN_FILES)
        if is_of_run and output_dir and os.path.realpath(output_dir) != os.path.realpath(file.parent):
            self.error(
                f"the file lies in the folder of a run, {file.parent}, but says output_dir: {output_dir}; give "
                f"--output_dir {shlex.quote(str(file.parent))} to resume this run, or --output_dir with another folder"
            )

    def parse_keywords(self, keywords: Mapping[str, Any]) -> argparse.Namespace:
        """Parse option names with their values, as a call from Python gives them; None: the option is left out.

        A wrong option, type or choice is a UserError of one line, without the name of the command, with the nearest
        options.
        """
        self.raises_errors = True
        given = {name: value for name, value in keywords.items() if value is not None}
        words = [f"--{name}={given.pop(name)}" for name in ("config", "preset") if name in given]
        return self.parse_args(words, argparse.Namespace(**given))

    def _set_values(self, values: Mapping[str, Any], namespace: argparse.Namespace) -> None:
        """Set options that are given by name, with the checks of the command line; None leaves an option out."""
        positional = {action.dest: action for action in self._actions if not action.option_strings}
        seen: set[str] = set()
        for given_name, value in values.items():
            name = given_name.replace("-", "_")
            action = positional.get(name) or self._option_string_actions.get(f"--{name}")
            if action is None or action.dest not in self.options:
                self.error(f"unrecognized arguments: --{name}={value}")
            if action.dest in seen:
                self.error(f"argument --{name}: given twice")
            seen.add(action.dest)
            if value is None or value == action.default == []:
                continue
            is_list, is_single = isinstance(value, (list, tuple)), action.nargs in (None, "?")
            texts = list(map(str, value)) if is_list else [str(value)]
            try:
                is_wrong = isinstance(value, Mapping) or (is_list and is_single)
                if is_wrong or self._match_argument(action, "A" * len(texts)) < len(texts):
                    wanted = "one value" if is_single else f"{action.nargs} values"
                    raise argparse.ArgumentError(action, f"expected {wanted}, not {value}")
                setattr(namespace, action.dest, self._get_values(action, texts))
            except argparse.ArgumentError as error:
                self.error(str(error))

    def error(self, message: str) -> NoReturn:
        """End with exit status 2 and one line that names the nearest options; `parse_keywords` raises it instead."""
        words = message.partition("unrecognized arguments: ")[2].split(" ")
        unknown = [word.partition("=")[0] for word in words if word.startswith("--")]
        near = list(dict.fromkeys(option for word in unknown for option in self._nearest(word)))
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        if self.raises_errors:
            raise UserError(message + hint)
        self.exit(2, f"{self.prog}{self.source}: {message}{hint}; --help-all lists the options\n")

    def _nearest(self, word: str) -> list[str]:
        """The options that begin with a word, else the one that resembles it most."""
        known = self._option_string_actions
        begun = [option for option in known if option.startswith(word)]
        return begun or difflib.get_close_matches(word, known, n=1, cutoff=0.7)


def with_underscores(word: str) -> str:
    """A word of the command line; in the name of an option hyphens become underscores."""
    if not word.startswith("--") or word == "--":
        return word
    name, equals, value = word[2:].partition("=")
    return f"--{name.replace('-', '_')}{equals}{value}"


def values_of(words: Sequence[str], option: str) -> list[str]:
    """The values that a command line gives an option, in its order."""
    values = []
    for word, following in zip(words, [*words, None][1:], strict=True):
        if word == option and following is not None:
            values.append(following)
        elif word.startswith(f"{option}="):
            values.append(word.partition("=")[2])
    return values


def read_config(file_path: str | os.PathLike[str]) -> dict[str, Any]:
    """Options in a configuration file: texts, lists of texts, or None; UserError if it is unreadable or holds more."""
    import yaml  # not above: most commands come without a file

    try:
        with open_regular(os.path.expanduser(file_path)) as file:
            text = file.read(MAX_CONFIG_BYTES + 1)
        if len(text) > MAX_CONFIG_BYTES:
            raise UserError(f"the file is larger than {MAX_CONFIG_BYTES} bytes; is it a configuration?")
        # Types are left to the options: 1e-3 is not a number in YAML, and `off` would be a boolean.
        root = yaml.compose(text, yaml.BaseLoader)
    except RecursionError:
        raise UserError("the file is nested too deeply; give lines like `epochs: 100`") from None
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"the file cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(root, yaml.MappingNode):
        raise UserError("the file holds no options; give lines like `epochs: 100`")
    values: dict[str, Any] = {}
    for key, node in root.value:
        items = node.value if isinstance(node, yaml.SequenceNode) else [node]
        if not all(isinstance(item, yaml.ScalarNode) for item in (key, *items)):
            line = key.start_mark.line + 1
            raise UserError(f"line {line} of the file gives neither `option: value` nor `option: [value, value]`")
        name = key.value.replace("-", "_")
        if name in values:
            raise UserError(f"the file gives {name} twice; leave one of the lines out")
        if isinstance(node, yaml.SequenceNode):
            values[name] = [item.value for item in items]
        else:
            is_null = node.style is None and node.value in ("", "null", "~")  # in quotes they are texts
            values[name] = None if is_null else node.value
    return values


def option_words(options: Mapping[str, object]) -> list[str]:
    """Options as a command line; several values of one are a list."""
    values = {name: value if isinstance(value, list) else [value] for name, value in options.items()}
    return [word for name, several in values.items() for word in (f"--{name}", *map(str, several))]


def config_text(options: Mapping[str, Any], command: str | None = None) -> str:
    """The configuration file, in YAML, that repeats a command with these options."""
    import yaml  # not above: most commands write none

    values = {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}
    return yaml.safe_dump({**({"command": command} if command else {}), **values}, sort_keys=False)
