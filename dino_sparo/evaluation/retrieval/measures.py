"""Rankings -> mean average precision and precision at k, without junk."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dino_sparo.runtime.faults import UserError

KAPPAS = (1, 5, 10)


class Query(NamedTuple):
    """Rows of the database that answer a query, and rows that are neither right nor wrong."""

    positives: np.ndarray
    junk: np.ndarray


def rank_database(
    queries: Float[Tensor, "queries F"], database: Float[Tensor, "images F"], chunk: int = 256
) -> Int[Tensor, "queries images"]:
    """Rows of the database by falling dot product with each query; of equal products, the first row comes first."""
    parts = (part @ database.T for part in queries.split(chunk))
    return torch.cat([part.sort(dim=1, descending=True, stable=True).indices.cpu() for part in parts])


def average_precision(positions: np.ndarray, num_positives: int) -> float:
    """Area under the precision-recall curve by trapezoids, in [0, 1].

        AP = sum_i (p_i + q_i) / (2 num_positives),  p_i = i / r_i (1 if r_i = 0),  q_i = (i + 1) / (r_i + 1)

    Args:
        positions: r_i, positions of right images in a ranking, from 0, ascending; i counts them from 0.
        num_positives: right images in the database, of which a shortened ranking may lack some.
    """
    found = np.arange(len(positions))
    before = np.where(positions == 0, 1.0, found / np.maximum(positions, 1))
    return float((before + (found + 1) / (positions + 1)).sum() / (2 * num_positives))


def mean_precision(rankings: Int[Tensor, "queries images"], queries: Sequence[Query]) -> dict[str, float]:
    """Mean average precision, as in filipradenovic/revisitop and the Copydays package.

    Junk is removed from a ranking before positions are counted. Queries without an answer are skipped.

    Returns:
        Means over all queries that have an answer, in percent: `map`, and `precision_at_1`, 5 and 10 (`KAPPAS`), the
        share of right images among the first, at most up to the last right one. `num_queries` have an answer.

    Raises:
        UserError: no query has an answer.
    """
    precisions, at = [], []
    for ranking, query in zip(rankings.numpy(), queries, strict=True):
        if not len(query.positives):
            continue
        kept = ranking[~np.isin(ranking, query.junk)]
        positions = np.isin(kept, query.positives).nonzero()[0]
        precisions.append(average_precision(positions, len(query.positives)))
        last = positions.max(initial=0) + 1
        at.append([(positions < min(last, kappa)).sum() / min(last, kappa) for kappa in KAPPAS])
    if not precisions:
        raise UserError("no query has an answer; give several images per building or class")
    shares = zip(KAPPAS, 100 * np.mean(at, axis=0), strict=True)
    precision_at = {f"precision_at_{kappa}": float(share) for kappa, share in shares}
    return {"map": 100 * float(np.mean(precisions)), **precision_at, "num_queries": len(precisions)}
