"""Record scikit-learn's adjusted Rand index of a few labelings, for tests/test_slot_score.py.

    pip install scikit-learn && python tests/reference/record_ari.py

Writes ari.json: scikit-learn's version, and for each case true labels, predicted labels and the score.
"""

import json
from pathlib import Path

import numpy as np
import sklearn
from sklearn.metrics import adjusted_rand_score

rng = np.random.default_rng(0)
cases = [
    ([0, 0, 1, 1], [1, 1, 0, 0]),
    ([0, 0, 1, 2], [0, 0, 1, 1]),
    ([0, 0, 1, 1], [0, 1, 0, 1]),
    ([0, 0, 0, 0], [0, 1, 2, 3]),
    ([0, 0, 0], [1, 1, 1]),
    ([0, 0, 0], [0, 0, 1]),
    ([0], [2]),
    *((rng.integers(3, size=40).tolist(), rng.integers(5, size=40).tolist()) for _ in range(3)),
]
for noise in (0.1, 0.4):
    true = rng.integers(4, size=60)
    cases.append((true.tolist(), np.where(rng.random(60) < noise, rng.integers(4, size=60), true).tolist()))
scored = [{"true": true, "predicted": predicted, "score": adjusted_rand_score(true, predicted)} for true, predicted in cases]
content = {"scikit-learn": sklearn.__version__, "cases": scored}
Path(__file__).with_name("ari.json").write_text(json.dumps(content) + "\n")
