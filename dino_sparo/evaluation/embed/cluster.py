"""Embeddings on disk -> clusters of similar images, examples of each cluster, and a map.

    dino-sparo cluster embeddings --clusters 20

    clusters.csv    row, path, cluster, distance to the center; cluster 0 is the largest
    clusters.html   the images nearest to each center
    clusters.png    a random sample of the images in two dimensions
    clusters.json   how it was made; size, label and examples of each cluster, silhouette, inertia

k-means runs on features of length one, which k-NN compares, too. Features that are too large for memory are read in
random batches from the memory-mapped array.
"""

import argparse
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from dino_sparo.draw.figure import Band, Figure, Layout, Section
from dino_sparo.draw.html import save_page
from dino_sparo.draw.plots import colour_of, panels
from dino_sparo.draw.sheet import require_matplotlib
from dino_sparo.evaluation.embed.pictures import PICTURE_HEIGHT, PICTURE_WIDTH, open_pictures
from dino_sparo.evaluation.embed.store import BLOCK_ROWS, Embeddings, check_sample, load_embeddings, write_csv
from dino_sparo.runtime.cli import say
from dino_sparo.runtime.faults import UserError, require
from dino_sparo.runtime.files import versions, write_json
from dino_sparo.runtime.launch import is_only_a_peer
from dino_sparo.runtime.logs import progress, setup_logging

logger = logging.getLogger(__name__)

CSV, PAGE, RESULT = "clusters.csv", "clusters.html", "clusters.json"
MAX_FIT_BYTES = 1 << 30  # features up to this size are loaded for k-means; of more, random batches
BATCH_ROWS, PASSES, STARTS = 4096, 3, 3  # of k-means on batches; random starts of k-means in memory
SCORED_IMAGES, MAPPED_IMAGES = 5_000, 2_000  # samples for the silhouette and for the map
PERPLEXITY = 30.0  # of t-SNE, scikit-learn's default
MIN_DIFFERENT = 3  # features of a map; t-SNE of equal ones ends the process
LABEL = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}  # behind a cluster's number

Vectors = Callable[[Any], Float[np.ndarray, "rows F"]]  # rows, as indices or a slice -> their features


def cluster_embeddings(args: argparse.Namespace) -> dict[str, Any]:
    """Cluster the embeddings of a folder; returns the content of clusters.json."""
    if is_only_a_peer():
        return {}
    setup_logging()
    require("sklearn", "clusters")
    require_matplotlib()
    embeddings = load_embeddings(args.folder)
    out = Path(args.output_dir or args.folder)
    picture = out / f"clusters.{args.figure_format}"
    old = [path for path in (out / CSV, out / PAGE, picture, out / RESULT) if path.exists()]
    if old and not args.overwrite:
        raise UserError(f"{old[0]} exists already; give another --output_dir, or --overwrite")
    found = check_sample(embeddings.array(args.what, args.slot), f"{args.what} in {args.folder}")
    num_images = len(embeddings.index["path"])
    if num_images < args.clusters:
        raise UserError(f"--clusters {args.clusters}, but {args.folder} has {num_images} images")

    def vectors(rows: Any) -> Float[np.ndarray, "rows F"]:
        return embeddings.vectors(args.what, rows, args.slot)

    logger.info("k-means: %d clusters of %d images", args.clusters, num_images)
    centers, method = fit_centers(vectors, num_images, args.clusters, args.seed)
    clusters, distances = assign(vectors, num_images, centers)
    # By cluster, then by distance: the first rows of a cluster are its examples.
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
    for path in old:  # the page and the map are not always drawn again
        path.unlink()
    rows = zip(range(num_images), embeddings.index["path"], clusters.tolist(), distances.tolist(), strict=True)
    write_csv(out / CSV, [("row", "path", "cluster", "distance"), *rows])
    logger.info("drawing %s and %s", picture.name, PAGE)
    draw_map(vectors, clusters, picture, args.map, args.seed)
    draw_page(result, examples, embeddings, out / PAGE, args.data_path, args.show_channels)
    write_json(result, out / RESULT)
    say(_table(result))
    say(f"\n{out}")
    return result


def fit_centers(
    vectors: Vectors, num_images: int, num_clusters: int, seed: int
) -> tuple[Float[np.ndarray, "clusters F"], str]:
    """k-means' centers, and the name of scikit-learn's class: KMeans in memory, else MiniBatchKMeans."""
    from sklearn.cluster import KMeans, MiniBatchKMeans
    from sklearn.exceptions import ConvergenceWarning

    if num_images * vectors([0]).nbytes <= MAX_FIT_BYTES:
        with warnings.catch_warnings():  # of fewer different features than clusters
            warnings.simplefilter("ignore", ConvergenceWarning)
            kmeans = KMeans(num_clusters, n_init=STARTS, random_state=seed).fit(vectors(slice(None)))
        return kmeans.cluster_centers_, "KMeans"
    kmeans = MiniBatchKMeans(num_clusters, random_state=seed)
    rng = np.random.default_rng(seed)
    num_batches = max(1, num_images // max(BATCH_ROWS, num_clusters))
    for _ in range(PASSES):
        # Folders are sorted by class: a batch of neighbours would be of one class.
        for rows in progress(np.array_split(rng.permutation(num_images), num_batches), desc="k-means"):
            kmeans.partial_fit(vectors(np.sort(rows)))
    return kmeans.cluster_centers_, "MiniBatchKMeans"


def assign(
    vectors: Vectors, num_images: int, centers: Float[np.ndarray, "clusters F"]
) -> tuple[Int[np.ndarray, " images"], Float[np.ndarray, " images"]]:
    """The cluster of each image, numbered by size from the largest, and its distance to the center."""
    from sklearn.metrics import pairwise_distances_argmin_min

    parts = []
    for start in progress(range(0, num_images, BLOCK_ROWS), desc="nearest centers"):
        parts.append(pairwise_distances_argmin_min(vectors(slice(start, start + BLOCK_ROWS)), centers))
    nearest, distances = (np.concatenate(part) for part in zip(*parts, strict=True))
    by_size = np.argsort(-np.bincount(nearest, minlength=len(centers)), kind="stable")
    return np.argsort(by_size)[nearest], distances.astype(np.float32)


def _silhouette(vectors: Vectors, clusters: Int[np.ndarray, " images"], seed: int) -> float | None:
    """Mean silhouette of a random sample, -1 to 1; None where the sample has a single cluster or only single images."""
    from sklearn.metrics import silhouette_score

    rows = _sample(len(clusters), SCORED_IMAGES, seed)
    if not 1 < len(np.unique(clusters[rows])) < len(rows):
        return None
    return float(silhouette_score(vectors(rows), clusters[rows]))


def _sample(num_images: int, size: int, seed: int) -> Int[np.ndarray, " size"]:
    """At most `size` random rows, in order."""
    return np.sort(np.random.default_rng(seed).permutation(num_images)[:size])


def _agreement(labels: Sequence[str], clusters: Int[np.ndarray, " images"]) -> dict[str, float] | None:
    """Agreement of clusters and labels, where images have labels; 0 is chance, 1 is equality."""
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
    """A random sample of the images in two dimensions, by t-SNE or PCA, coloured by cluster."""
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
            own = points[clusters[rows] == cluster]
            if len(own):
                colour = colour_of(cluster, num_clusters)
                axis.scatter(*own.T, s=3, color=colour, linewidths=0)
                x, y = np.median(own, axis=0)
                axis.text(x, y, str(cluster), ha="center", va="center", weight="bold", color=colour, bbox=LABEL)
        axis.spines[:].set_visible(False)
        axis.set(xticks=[], yticks=[], title=f"{len(rows):,} images, {'t-SNE' if method == 'tsne' else 'PCA'}")


def draw_page(
    result: dict[str, Any],
    examples: Sequence[Sequence[int]],
    embeddings: Embeddings,
    path: Path,
    data_path: str | None,
    channels: Sequence[int],
) -> None:
    """The images nearest to each center, where they can still be read."""
    pictures = open_pictures(embeddings, path, data_path, channels)
    if pictures is None:
        return
    sections = []
    for cluster, rows in zip(result["clusters"], examples, strict=True):
        facts = [f"{cluster['num_images']:,} images"]
        if cluster["label"]:
            facts.append(f"{cluster['label_share']:.0%} {cluster['label']}")
        shown = [tile for tile in map(pictures.tile, rows) if tile is not None]
        sections.append(Section([Band(tiles=shown)], f"cluster {cluster['cluster']}", facts))
    what = result["embeddings"]["what"]
    figure = Figure(
        f"{result['num_clusters']} clusters",
        f"{result['embeddings']['num_images']:,} images of {pictures.source.name}; features: {what}",
        sections,
        Layout((PICTURE_HEIGHT, PICTURE_WIDTH), per_line=max(map(len, examples))),
        explanation="Each cluster with its images nearest to the center, nearest first.",
        ends=None,
    )
    save_page(figure, path)


def _table(result: dict[str, Any]) -> str:
    """Clusters for people."""
    lines = [f"{'cluster':>7}  {'images':>9}  most frequent label"]
    for cluster in result["clusters"]:
        label = f"{cluster['label']} ({cluster['label_share']:.0%})" if cluster["label"] else "-"
        lines.append(f"{cluster['cluster']:>7}  {cluster['num_images']:>9,}  {label}")
    silhouette = "-" if result["silhouette"] is None else f"{result['silhouette']:.3f}"
    return "\n".join([*lines, f"silhouette {silhouette}, inertia {result['inertia']:.4g}"])
