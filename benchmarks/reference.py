"""A checkout of facebookresearch/dino -> its modules, as they are, under their own names.

Its files import each other as `utils` and `vision_transformer`; those names are taken for the time of the import only.
"""

import importlib.util
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType

# In the order in which they import each other.
MODULES = ("utils", "vision_transformer", "eval_knn", "eval_linear", "main_dino")


class Reference:
    """The reference's code.

    Args:
        path: of the checkout.

    Attributes:
        path: of the checkout.
        commit: that is checked out, or `unknown`.

    Raises:
        ValueError: the path is not a checkout of facebookresearch/dino.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        missing = [f"{name}.py" for name in MODULES if not (self.path / f"{name}.py").is_file()]
        if missing:
            raise ValueError(
                f"--reference {path} is not a checkout of facebookresearch/dino: {', '.join(missing)} missing; "
                f"git clone https://github.com/facebookresearch/dino, and give that folder"
            )
        self.commit = _commit(self.path)
        self._modules: dict[str, ModuleType] = {}

    def __getattr__(self, name: str) -> ModuleType:
        """One of `MODULES`, imported on first use, together with the modules before it."""
        if name not in MODULES:
            raise AttributeError(name)
        for needed in MODULES[: MODULES.index(name) + 1]:
            # The scripts import the first two alone.
            if needed not in self._modules and (needed == name or needed in MODULES[:2]):
                self._modules[needed] = self._import(needed)
        return self._modules[name]

    def _import(self, name: str) -> ModuleType:
        specification = importlib.util.spec_from_file_location(name, self.path / f"{name}.py")
        assert specification is not None
        assert specification.loader is not None
        module = importlib.util.module_from_spec(specification)
        hidden = {other: sys.modules.pop(other, None) for other in MODULES}
        sys.modules.update({**self._modules, name: module})
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of functions that newer versions of torch would rename
                specification.loader.exec_module(module)
        finally:
            for other, previous in hidden.items():
                sys.modules.pop(other, None)
                if previous is not None:
                    sys.modules[other] = previous
        return module


def _commit(path: Path) -> str:
    command = ["git", "-C", str(path), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
