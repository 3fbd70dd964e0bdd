"""Record what revisitop's and DINO's code give on random rankings and features, into retrieval.json.

    git clone https://github.com/filipradenovic/revisitop && git clone https://github.com/facebookresearch/dino
    python tests/reference/record_retrieval.py revisitop dino

Commits be39832 (revisitop) and 7c446df (dino).
"""

import importlib.util
import json
import sys
import types
from pathlib import Path

import numpy as np
import torch


def module(path: Path, name: str):
    spec = importlib.util.spec_from_file_location(name, path)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def main(revisitop: Path, dino: Path) -> None:
    evaluate = module(revisitop / "python" / "evaluate.py", "evaluate")
    for name in ("vision_transformer", "eval_knn"):  # the script imports them, and what is recorded does not use them
        sys.modules[name] = types.ModuleType(name)
    sys.modules["eval_knn"].extract_features = None
    utils = module(dino / "utils.py", "utils")
    sys.modules["utils"] = utils
    copies = module(dino / "eval_copy_detection.py", "copies")
    np.in1d = getattr(np, "in1d", np.isin)
    rng = np.random.default_rng(0)
    rankings = np.stack([rng.permutation(30) for _ in range(5)])
    answers = []
    for sizes in ((3, 4), (1, 0), (0, 5), (7, 1), (2, 20)):  # the third query has no answer
        rows = rng.permutation(30)
        answers.append({"ok": rows[: sizes[0]].tolist(), "junk": rows[sizes[0] : sum(sizes)].tolist()})
    mean, single, precision, _ = evaluate.compute_map(rankings.T, answers, [1, 5, 10])
    ranks = [[0, 3, 4], [2], [], [19]]
    shortened = [copies.score_ap_from_ranks_1(found, total) for found, total in zip(ranks, (3, 2, 1, 1))]
    learned, found = rng.normal(size=(9, 6)) + 1, rng.normal(size=(4, 6))
    pca = utils.PCA(dim=6, whit=0.5)
    pca.train_pca(learned.T @ learned / len(learned))
    whitened = pca.apply(torch.from_numpy(found - learned.mean(axis=0)).float())
    values = {
        "rankings": rankings.tolist(),
        "answers": answers,
        "map": mean,
        "aps": [None if np.isnan(value) else value for value in single],
        "precision": precision.tolist(),
        "shortened": {"ranks": ranks, "totals": [3, 2, 1, 1], "aps": shortened},
        "whitening": {"learned": learned.tolist(), "found": found.tolist(), "whitened": whitened.tolist()},
    }
    Path(__file__).with_name("retrieval.json").write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
