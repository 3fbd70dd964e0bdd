"""Processes, faults, preemption, logs and options of any run; names of packages that are imported on first use."""

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package whose modules import torch, which takes seconds.

    The names are those that the package imports in its `if TYPE_CHECKING:`. They are imported on first use (PEP 562).
    """
    module = sys.modules[package]
    body = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8")).body
    (guard,) = (part for part in body if isinstance(part, ast.If) and ast.unparse(part.test) == "TYPE_CHECKING")
    imports = (part for part in guard.body if isinstance(part, ast.ImportFrom))
    module_of = {alias.name: str(part.module) for part in imports for alias in part.names}

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(module_of[name]), name)

    return get, lambda: sorted([*vars(module), *module_of]), sorted(module_of)
