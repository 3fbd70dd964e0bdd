"""Record KoLeo of facebookresearch/dinov2 and the coding rate loss of RobinWu218/SimDINO into spread.npz.

    python tests/reference/record_spread.py --dinov2 PATH --simdino PATH

PATH is a checkout. Only the two classes are run, because their modules import packages that a loss does not need.
"""

import argparse
import ast
import datetime
import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

FOLDER = Path(__file__).parent
KOLEO_SIZE = (11, 7)  # images, width
CROPS, IMAGES, WIDTH = 5, 7, 13
# eps, coeff, expa_type
SIMDINO_CASES = ((0.05, 1.0, 1), (0.5, 1.0, 0), (0.05, 0.25, 0))


def rows(seed: int, *size: int) -> torch.Tensor:
    """Random numbers that no version of torch changes."""
    return torch.from_numpy(np.random.RandomState(seed).standard_normal(size).astype(np.float32))


def class_of(path: Path, name: str) -> Any:
    """A class of a file, defined without running the rest of the file."""
    tree = ast.parse(path.read_text())
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    scope = {"torch": torch, "nn": nn, "F": F, "dist": torch.distributed}
    exec(compile(ast.Module([found], []), str(path), "exec"), scope)
    return scope[name]


def commit_of(path: Path) -> str:
    return subprocess.check_output(["git", "-C", str(path), "rev-parse", "HEAD"], text=True).strip()


def main() -> None:
    """Record values and gradients."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dinov2", type=Path, required=True, help="checkout of facebookresearch/dinov2")
    parser.add_argument("--simdino", type=Path, required=True, help="checkout of RobinWu218/SimDINO")
    args = parser.parse_args()
    arrays: dict[str, Any] = {}
    encodings = rows(0, *KOLEO_SIZE).requires_grad_()
    value = class_of(args.dinov2 / "dinov2" / "loss" / "koleo_loss.py", "KoLeoLoss")()(encodings)
    value.backward()
    arrays |= {"koleo": value.detach().numpy(), "koleo/grad": encodings.grad.numpy()}
    build = class_of(args.simdino / "simdino" / "main_dino.py", "MCRLoss")
    teacher = F.normalize(rows(1, 2 * IMAGES, WIDTH), dim=-1)
    for number, (eps, coeff, expa_type) in enumerate(SIMDINO_CASES):
        student = F.normalize(rows(2, CROPS * IMAGES, WIDTH), dim=-1).requires_grad_()
        terms = build(CROPS, reduce_cov=1, expa_type=expa_type, eps=eps, coeff=coeff)(student, teacher)
        terms[0].backward()
        arrays[f"simdino{number}"] = np.array([term.item() for term in terms])
        arrays[f"simdino{number}/grad"] = student.grad.numpy()
    header = {
        "repositories": ["https://github.com/facebookresearch/dinov2", "https://github.com/RobinWu218/SimDINO"],
        "commits": [commit_of(args.dinov2), commit_of(args.simdino)],
        "command": "python tests/reference/record_spread.py --dinov2 PATH --simdino PATH",
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }
    np.savez_compressed(FOLDER / "spread.npz", header=np.array(json.dumps(header)), **arrays)


if __name__ == "__main__":
    main()
