"""Name of a recipe -> the values of the options it stands for, with their origin.

Options that a recipe decides are None when they are not given; `Recipes.apply` fills in the recipe's values, then the
defaults. So a given option always wins, wherever it stands in the command.
"""

import argparse
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

WARMUP = "warmup"  # how the names of numbers of warm-up steps begin; what they are depends on the run's length


@dataclass(frozen=True)
class Preset:
    """A recipe.

    Attributes:
        origin: where its numbers come from.
        values: option -> value; options that are not named keep their defaults.
    """

    origin: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Recipes:
    """The recipes of an objective.

    Attributes:
        defaults: option -> what holds without a preset, and where a preset says nothing.
        presets: name -> recipe.
    """

    defaults: Mapping[str, Any]
    presets: Mapping[str, Preset]

    def apply(self, args: argparse.Namespace) -> None:
        """Give every option that is None its value: the preset's, else the default. Warm-ups come later.

        Args:
            args: parsed options, changed in place; `args.preset` is a key of `presets` or None.

        Raises:
            ValueError: the preset is unknown.
        """
        if args.preset is not None and args.preset not in self.presets:
            raise ValueError(f"unknown preset {args.preset!r}; choose one of {sorted(self.presets)}, or leave it out")
        for name in self.defaults:
            if getattr(args, name) is None and not name.startswith(WARMUP):
                setattr(args, name, self._value(args.preset, name))

    def defaults_of(self, parser: argparse.ArgumentParser) -> dict[str, Any]:
        """The values of a parser's options if none is given, as `apply` fills them in."""
        args = parser.parse_args([])
        self.apply(args)
        return vars(args)

    def fill_in_warmup(self, args: argparse.Namespace, total_steps: int) -> None:
        """Give each warm-up that is None its value: the preset's or the default, or a tenth of a run shorter than that.

        Args:
            args: parsed options, changed in place.
            total_steps: of the run.
        """
        for name in self.defaults:
            if not name.startswith(WARMUP) or getattr(args, name) is not None:
                continue
            wanted = self._value(args.preset, name)
            if wanted is None:  # the objective says what it is then
                continue
            steps = wanted if wanted <= total_steps else total_steps // 10
            setattr(args, name, steps)
            if steps != wanted:
                logger.info(
                    "--%s %d: the default of %d does not fit a run of %d steps", *(name, steps, wanted, total_steps)
                )

    def with_default(self, text: str, option: str) -> str:
        """An option's help text, and its default, which a preset may change."""
        return f"{text} (default: {self.defaults[option]}, or the preset's)"

    def add_option(self, group: argparse._ArgumentGroup, name: str, kind: Callable[[str], Any], text: str) -> None:
        """Add an option that a recipe decides.

        Args:
            group: to add to.
            name: of the option, a key of `defaults`.
            kind: text -> value.
            text: its help, without the default.
        """
        group.add_argument(f"--{name}", type=kind, default=None, help=self.with_default(text, name))

    def _value(self, preset: str | None, name: str) -> Any:
        """The preset's value of an option, else the default."""
        return (self.presets[preset].values if preset is not None else {}).get(name, self.defaults[name])
