"""Processes, faults, preemption, logs and options of any run; names of packages that are imported on first use."""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_names(
    package: str, modules: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package whose modules import torch: names are imported on first use (PEP 562).

    Args:
        package: its `__name__`.
        modules: module below `dino_sparo` -> names that the package has from there.
    """
    module_of = {name: f"dino_sparo.{module}" for module, names in modules.items() for name in names}

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(module_of[name]), name)

    return get, lambda: sorted([*vars(sys.modules[package]), *module_of])
