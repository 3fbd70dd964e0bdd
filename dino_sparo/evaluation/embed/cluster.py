"""Embeddings on disk -> clusters of similar images, examples of each cluster, and a map.

    dino-sparo cluster embeddings --clusters 20

    clusters.csv    row, path, cluster, distance to the center; cluster 0 is the largest
    clusters.html   the images nearest to each center
    clusters.png    a random sample of the images in two dimensions
    clusters.json   protocol; size, label and examples of each cluster, silhouette, inertia

k-means runs on features of length one. If they do not fit into memory, it reads random batches from disk.
"""

import argparse
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from dino_sparo.draw.figure import Band, Section
from dino_sparo.draw.plots import colour_of, panels
from dino_sparo.draw.sheet import require_matplotlib
from dino_sparo.draw.tables import text_table
from dino_sparo.evaluation.embed.pictures import Pictures, open_pictures, save_found
from dino_sparo.evaluation.embed.store import BLOCK_ROWS, Embeddings, check_sample, load_embeddings, write_csv
from dino_sparo.runtime.cli import say
from dino_sparo.runtime.faults import UserError, require
from dino_sparo.runtime.files import refuse_existing, versions, write_json
from dino_sparo.runtime.launch import on_first_process
from dino_sparo.runtime.logs import progress, setup_logging

logger = logging.getLogger(__name__)

CSV, PAGE, RESULT = "clusters.csv", "clusters.html", "clusters.json"
MAX_FIT_BYTES = 1 << 30  # larger features are read in batches for k-means
BATCH_ROWS, PASSES, STARTS = 4096, 3, 3  # of k-means on batches; random starts of k-means in memory
SCORED_IMAGES, MAPPED_IMAGES = 5_000, 2_000  # samples for the silhouette and for the map
PERPLEXITY = 30.0  # of t-SNE, scikit-learn's default
MIN_DIFFERENT = 3  # different features of a map, since t-SNE of equal features ends the process
LABEL = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}  # behind a cluster's number

Vectors = Callable[[Any], Float[np.ndarray, "rows F"]]  # indices or a slice of rows -> features


@on_first_process
def cluster_embeddings(args: argparse.Namespace) -> dict[str, Any]:
    """Cluster the embeddings of a folder; returns the content of clusters.json."""
    setup_logging()
    require("sklearn", "clusters")
    require_matplotlib()
    embeddings = load_embeddings(args.folder)
    out = Path(args.output_dir or args.folder)
    picture = out / f"clusters.{args.figure_format}"
    old = refuse_existing((out / CSV, out / PAGE, picture, out / RESULT), args.overwrite)
    found = check_sample(embeddings.array(args.what, args.slot), f"{args.what} in {args.folder}")
    num_images = len(embeddings.index["path"])
    if num_images < args.clusters:
        raise UserError(f"--clusters {args.clusters}, but {args.folder} has {num_images} images")
    vectors = partial(embeddings.vectors, args.what, slot=args.slot)
    logger.info("k-means: %d clusters of %d images", args.clusters, num_images)
    centers, method = fit_centers(vectors, num_images, args.clusters, args.seed)
    clusters, distances = assign(vectors, num_images, centers)
    # Sorted by cluster, then by distance, so that the first rows of a cluster are its examples.
    order = np.split(np.lexsort((distances, clusters)), np.cumsum(np.bincount(clusters))[:-1])
    examples = [rows[: args.examples].tolist() for rows in order]
    result = {
        "evaluation": "cluster",
        "embeddings": {**embeddings.source(args.what), "slot": args.slot, "num_images": num_images},
        "encoder": embeddings.record["encoder"],
        "method": method,
        "num_clusters": args.clusters,
        "seed": args.seed,
        "inertia": float(np.square(distances, dtype=np.float64).sum()),
        "silhouette": _silhouette(vectors, clusters, args.seed),
        "labels": _agreement(embeddings.index["label"], clusters),
        "clusters": [_describe(number, rows, embeddings, examples[number]) for number, rows in enumerate(order)],
        "versions": versions(sklearn="scikit-learn"),
        **({"warnings": found} if found else {}),
    }
    out.mkdir(parents=True, exist_ok=True)
    for path in old:  # page and map are not always drawn again
        path.unlink()
    rows = zip(range(num_images), embeddings.index["path"], clusters.tolist(), distances.tolist(), strict=True)
    write_csv(out / CSV, [("row", "path", "cluster", "distance"), *rows])
    logger.info("drawing %s and %s", picture.name, PAGE)
    draw_map(vectors, clusters, picture, args.map, args.seed)
    pictures = open_pictures(embeddings, out / PAGE, args.data_path, args.show_channels)
    if pictures is not None:
        draw_page(result, examples, pictures, out / PAGE)
    write_json(result, out / RESULT)
    say(_table(result))
    say(f"\n{out}")
    return result


def fit_centers(
    vectors: Vectors, num_images: int, num_clusters: int, seed: int
) -> tuple[Float[np.ndarray, "clusters F"], str]:
    """Centers of k-means, and the name of scikit-learn's class: KMeans in memory, else MiniBatchKMeans."""
    from sklearn.cluster import KMeans, MiniBatchKMeans
    from sklearn.exceptions import ConvergenceWarning

    if num_images * vectors([0]).nbytes <= MAX_FIT_BYTES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # of fewer different features than clusters
            kmeans = KMeans(num_clusters, n_init=STARTS, random_state=seed).fit(vectors(slice(None)))
        return kmeans.cluster_centers_, "KMeans"
    kmeans = MiniBatchKMeans(num_clusters, random_state=seed)
    rng = np.random.default_rng(seed)
    num_batches = max(1, num_images // max(BATCH_ROWS, num_clusters))
    for _ in range(PASSES):
        # Folders are sorted by class, so a batch of neighbours would have one class.
        for rows in progress(np.array_split(rng.permutation(num_images), num_batches), desc="k-means"):
            kmeans.partial_fit(vectors(np.sort(rows)))
    return kmeans.cluster_centers_, "MiniBatchKMeans"


def assign(
    vectors: Vectors, num_images: int, centers: Float[np.ndarray, "clusters F"]
) -> tuple[Int[np.ndarray, " images"], Float[np.ndarray, " images"]]:
    """The cluster of each image, numbered by size from the largest, and its distance to the center."""
    from sklearn.metrics import pairwise_distances_argmin_min

    starts = progress(range(0, num_images, BLOCK_ROWS), desc="nearest centers")
    parts = [pairwise_distances_argmin_min(vectors(slice(start, start + BLOCK_ROWS)), centers) for start in starts]
    nearest, distances = (np.concatenate(part) for part in zip(*parts, strict=True))
    by_size = np.argsort(-np.bincount(nearest, minlength=len(centers)), kind="stable")
    return np.argsort(by_size)[nearest], distances.astype(np.float32)


def _silhouette(vectors: Vectors, clusters: Int[np.ndarray, " images"], seed: int) -> float | None:
    """Mean silhouette of a random sample, -1 to 1; None for a single cluster, or if all clusters have one image."""
    from sklearn.metrics import silhouette_score

    rows = _sample(len(clusters), SCORED_IMAGES, seed)
    if not 1 < len(np.unique(clusters[rows])) < len(rows):
        return None
    return float(silhouette_score(vectors(rows), clusters[rows]))


def _sample(num_images: int, size: int, seed: int) -> Int[np.ndarray, " size"]:
    """At most `size` random rows, in order."""
    return np.sort(np.random.default_rng(seed).permutation(num_images)[:size])


def _agreement(labels: Sequence[str], clusters: Int[np.ndarray, " images"]) -> dict[str, float] | None:
    """Agreement of clusters and labels, if there are labels; 0 is chance, 1 is equality."""
    from sklearn.metrics import adjusted_mutual_info_score, adjusted_rand_score

    rows = [row for row, label in enumerate(labels) if label]
    if not rows:
        return None
    known = [labels[row] for row in rows]
    return {
        "adjusted_mutual_information": float(adjusted_mutual_info_score(known, clusters[rows])),
        "adjusted_rand_index": float(adjusted_rand_score(known, clusters[rows])),
    }


def _describe(
    number: int, rows: Int[np.ndarray, " size"], embeddings: Embeddings, examples: Sequence[int]
) -> dict[str, Any]:
    """Size, most frequent label and nearest images of a cluster."""
    labels = Counter(embeddings.index["label"][row] for row in rows)
    label, count = max(labels.items(), key=lambda item: (item[1], item[0]))
    return {
        "cluster": number,
        "num_images": len(rows),
        "label": label or None,
        "label_share": count / len(rows) if label else None,
        "nearest": [embeddings.index["path"][row] for row in examples],
    }


def draw_map(vectors: Vectors, clusters: Int[np.ndarray, " images"], path: Path, method: str, seed: int) -> None:
    """Plot a random sample of the images in two dimensions, coloured by cluster."""
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    rows = _sample(len(clusters), MAPPED_IMAGES, seed)
    features = vectors(rows)
    if features.shape[1] < 2 or len(np.unique(features, axis=0)) < MIN_DIFFERENT:
        logger.warning("%s is not drawn: a map needs %d images with different features", path, MIN_DIFFERENT)
        return
    perplexity = min(PERPLEXITY, (len(rows) - 1) / 3)
    reduce = TSNE(perplexity=perplexity, random_state=seed) if method == "tsne" else PCA(2, random_state=seed)
    points = reduce.fit_transform(features)
    num_clusters = int(clusters.max()) + 1
    with panels(path, 1, 1) as ((axis,),):
        for cluster in range(num_clusters):
            members = points[clusters[rows] == cluster]
            if len(members):
                colour = colour_of(cluster, num_clusters)
                axis.scatter(*members.T, s=3, color=colour, linewidths=0)
                x, y = np.median(members, axis=0)
                axis.text(x, y, str(cluster), ha="center", va="center", weight="bold", color=colour, bbox=LABEL)
        axis.spines[:].set_visible(False)
        axis.set(xticks=[], yticks=[], title=f"{len(rows):,} images, {'t-SNE' if method == 'tsne' else 'PCA'}")


def draw_page(result: dict[str, Any], examples: Sequence[Sequence[int]], pictures: Pictures, path: Path) -> None:
    """Write a page of the readable images nearest to each center."""
    sections = []
    for cluster, rows in zip(result["clusters"], examples, strict=True):
        facts = [f"{cluster['num_images']:,} images"]
        if cluster["label"]:
            facts.append(f"{cluster['label_share']:.0%} {cluster['label']}")
        shown = [tile for tile in map(pictures.tile, rows) if tile is not None]
        sections.append(Section([Band(tiles=shown)], f"cluster {cluster['cluster']}", facts))
    words = "Each cluster with its images nearest to the center, nearest first."
    save_found(f"{result['num_clusters']} clusters", words, sections, path, result, max(map(len, examples)))


def _table(result: dict[str, Any]) -> str:
    """Clusters for the terminal."""
    rows = [("cluster", "images", "most frequent label")]
    for cluster in result["clusters"]:
        label = f"{cluster['label']} ({cluster['label_share']:.0%})" if cluster["label"] else "-"
        rows.append((f"{cluster['cluster']}", f"{cluster['num_images']:,}", label))
    silhouette = "-" if result["silhouette"] is None else f"{result['silhouette']:.3f}"
    return f"{text_table(rows)}\nsilhouette {silhouette}, inertia {result['inertia']:.4g}"
