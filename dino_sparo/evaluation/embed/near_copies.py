"""Embeddings -> groups of near copies: pairs of similar images, and the images that such pairs connect.

    dino-sparo search embeddings --duplicates 0.97

All pairs are compared, block by block. Groups are connected components of similar pairs, so two images of a large group
may be less similar than the threshold.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int

from dino_sparo.draw.figure import Section
from dino_sparo.evaluation.embed.pictures import SHOWN_IMAGES, SHOWN_PARTS, open_pictures, save_found
from dino_sparo.evaluation.embed.store import Embeddings, write_csv
from dino_sparo.evaluation.embed.vectors import ROWS, Vectors
from dino_sparo.runtime.files import write_json
from dino_sparo.runtime.logs import progress

DUPLICATES = "duplicates"  # stem of files
MAX_PAIRS = 1 << 22  # in memory, or twice the number of images, before pairs become groups
ROUNDING = 1e-6  # rounding error of a cosine in fp32


def find_groups(vectors: Vectors, threshold: float) -> tuple[list[list[int]], Float[np.ndarray, " images"]]:
    """Groups of rows that pairs with a cosine of at least `threshold` connect, largest first.

    Returns:
        The rows of each group, ascending; and each image's highest similarity to another image.
    """
    highest = np.full(vectors.num_rows, -np.inf, dtype=np.float32)
    pairs = [np.empty((2, 0), np.int64)]
    for block, features in progress(vectors.blocks(), total=-(-vectors.num_rows // ROWS), desc="near copies"):
        for other, compared in vectors.blocks(block.start):
            similarities = features @ compared.T
            if other == block:
                similarities.fill_diagonal_(-torch.inf)
            for rows, values in ((block, similarities.amax(dim=1)), (other, similarities.amax(dim=0))):
                highest[rows] = np.maximum(highest[rows], values.cpu().numpy())
            near = (similarities >= threshold - ROUNDING).nonzero().T.cpu().numpy()
            pairs.append(near + np.array([[block.start], [other.start]]))
            if sum(part.shape[1] for part in pairs) > max(MAX_PAIRS, 2 * vectors.num_rows):
                components = connect(pairs, vectors.num_rows)
                firsts = np.unique(components, return_index=True)[1]
                pairs = [np.stack([np.arange(vectors.num_rows), firsts[components]])]  # they connect the same images
    components = connect(pairs, vectors.num_rows)
    parts = np.split(np.argsort(components, kind="stable"), np.cumsum(np.bincount(components))[:-1])
    groups = [rows.tolist() for rows in parts if len(rows) > 1]
    return sorted(groups, key=lambda rows: (-len(rows), rows[0])), highest


def connect(pairs: Sequence[Int[np.ndarray, "2 pairs"]], num_rows: int) -> Int[np.ndarray, " images"]:
    """Number of each row's connected component."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    ends = np.concatenate(pairs, axis=1)
    graph = coo_array((np.ones(ends.shape[1], bool), tuple(ends)), shape=(num_rows, num_rows))
    return connected_components(graph, directed=False)[1]


def write_groups(
    store: Embeddings, vectors: Vectors, record: Mapping[str, Any], out: Path, args: argparse.Namespace
) -> dict[str, Any]:
    """Find groups, write table, page and record; returns the record."""
    groups, highest = find_groups(vectors, args.duplicates)
    numbered = [(number, row) for number, rows in enumerate(groups) for row in rows]
    cells = ((number, *store.cells(row), f"{highest[row]:.6f}") for number, row in numbered)
    write_csv(out / f"{DUPLICATES}.csv", [("group", "row", "path", "label", "similarity"), *cells])
    result = {
        "evaluation": DUPLICATES,
        **record,
        "threshold": args.duplicates,
        "num_groups": len(groups),
        "num_images": len(numbered),
    }
    page = out / f"{DUPLICATES}.html"
    page.unlink(missing_ok=True)
    if groups and (pictures := open_pictures(store, page, args.data_path, args.show_channels)) is not None:
        sections = []
        for number, rows in enumerate(groups[:SHOWN_PARTS]):
            band = pictures.band((row, float(highest[row])) for row in rows[:SHOWN_IMAGES])
            sections.append(Section([band], f"group {number}", [f"{len(rows):,} images"]))
        words = "The largest groups first. Numbers: cosine similarity of an image to its nearest other image."
        save_found(f"{len(groups):,} groups of near copies", words, sections, page, result)
    write_json(result, out / f"{DUPLICATES}.json")
    return result
