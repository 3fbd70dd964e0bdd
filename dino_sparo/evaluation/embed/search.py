"""Embeddings -> the nearest images of other images, and groups of near copies.

    dino-sparo search embeddings --images photo.jpg
    dino-sparo search embeddings --images photo.jpg --slots 3,7      # similar in these slots
    dino-sparo search embeddings --duplicates 0.97

    search.csv        query, rank, row, path, label, similarity (cosine); an image never finds itself
    search.html       the first queries, each with its nearest images
    search.json       protocol, and the first queries
    duplicates.*      table, page and record of near copies, see `near_copies.py`

The search compares with every image, block by block, so it is exact, and memory does not grow with the embeddings. The
features of slots are concatenated and scaled to length one, as in `dino-sparo knn`.
"""

import argparse
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from dino_sparo.draw.figure import Section, short_name
from dino_sparo.evaluation.embed.command import embed_as
from dino_sparo.evaluation.embed.near_copies import DUPLICATES, write_groups
from dino_sparo.evaluation.embed.pictures import SHOWN_PARTS, open_pictures, save_found
from dino_sparo.evaluation.embed.store import (
    Embeddings,
    check_sample,
    is_store,
    load_embeddings,
    require_same_encoder,
    write_csv,
)
from dino_sparo.evaluation.embed.vectors import ROWS, Vectors, open_slots, open_vectors
from dino_sparo.evaluation.knn import first_largest
from dino_sparo.runtime.cli import say
from dino_sparo.runtime.faults import UserError, require
from dino_sparo.runtime.files import refuse_existing, versions, write_json
from dino_sparo.runtime.launch import on_first_process, select_device
from dino_sparo.runtime.logs import progress, setup_logging
from dino_sparo.weights.checkpoint import weights_sha256

SEARCH = "search"  # stem of files
PRINTED = 3  # queries

Neighbours = tuple[int, list[tuple[int, float]]]  # a query's row -> rows and similarities, best first


@on_first_process
def search(args: argparse.Namespace) -> dict[str, Any]:
    """Search for the nearest images, or near copies; returns the content of search.json and duplicates.json."""
    setup_logging()
    stems = [SEARCH] * bool(args.images) + [DUPLICATES] * (args.duplicates is not None)
    if not stems:
        raise UserError("nothing to search; give --images, or --duplicates 0.97")
    if args.duplicates is not None:
        require("scipy", "groups of near copies")
    out = Path(args.output_dir or args.folder)
    refuse_existing([out / f"{stem}.{ending}" for stem in stems for ending in ("csv", "html", "json")], args.overwrite)
    store, device = load_embeddings(args.folder), select_device(args.device)
    warnings = check_sample(store.array(args.what), f"{args.what} in {args.folder}")
    slots, slots_record = open_slots(store, args.what, args.slots)
    record = {
        "embeddings": {**store.source(args.what), "slots": slots_record, "num_images": len(store.index["path"])},
        "encoder": store.record["encoder"],
        "images": {"data_path": store.record["images"]["data_path"]},
        "versions": versions(),
        **({"warnings": warnings} if warnings else {}),
    }
    vectors, results = open_vectors(store, args.what, slots, device), {}
    with tempfile.TemporaryDirectory(prefix="dino_sparo_") as temporary:
        query = open_query(store, args, Path(temporary)) if args.images else None
        out.mkdir(parents=True, exist_ok=True)
        if query is not None:
            queries = open_vectors(query, args.what, slots, device)
            found = nearest(store, vectors, query, queries, args.top)
            results[SEARCH] = write_nearest(store, query, found, record, out, args)
    if args.duplicates is not None:
        results[DUPLICATES] = write_groups(store, vectors, record, out, args)
        counts = [results[DUPLICATES][name] for name in ("num_images", "num_groups")]
        say("{:,} images in {:,} groups of near copies".format(*counts))
    say("\n".join(str(path) for stem in stems for path in sorted(out.glob(f"{stem}.*"))))
    return results


def open_query(store: Embeddings, args: argparse.Namespace, folder: Path) -> Embeddings:
    """The embeddings at --images, or of the images at --images, which the encoder of the store embeds into `folder`."""
    if is_store(args.images):
        query = load_embeddings(args.images)
        query.array(args.what)
        require_same_encoder(store, query)
        return query
    encoder = store.record["encoder"]
    remedy = f"embed {args.images} with the options of {store.folder}, and give the folder"
    if encoder.get("untrained"):
        raise UserError(f"{store.folder} is of random weights; {remedy}")
    weights = args.pretrained_weights or encoder["pretrained_weights"]
    try:
        sha256 = weights_sha256(weights)
    except (UserError, OSError) as error:
        raise UserError(
            f"the encoder of {store.folder}, which embeds {args.images}: {error}. Say with --pretrained_weights where "
            f"the weights are now; or {remedy}"
        ) from error
    if sha256 != encoder["sha256"]:  # before all images are embedded
        raise UserError(f"{weights} holds weights of another encoder than {store.folder}; give the same checkpoint")
    options = {"pretrained_weights": weights, "checkpoint_key": encoder.get("checkpoint_key"), "what": [args.what]}
    query = embed_as(store, args.images, folder, **options, device=args.device, num_workers=args.num_workers)
    if not query.index["path"]:
        raise UserError(f"--images {args.images}: no image can be read")
    return query


def nearest_rows(vectors: Vectors, queries: Float[Tensor, "m F"], k: int) -> tuple[Tensor, Tensor]:
    """Similarities and rows (m, k) of the k most similar rows of each query, best first; the first row wins ties."""
    similarities = queries.new_empty(len(queries), 0)
    rows = torch.empty(len(queries), 0, dtype=torch.int64, device=queries.device)
    for block, features in vectors.blocks():
        numbers = torch.arange(block.start, block.stop, device=queries.device)
        compared = torch.cat((similarities, queries @ features.T), dim=1)
        similarities, positions = first_largest(compared, min(k, compared.shape[1]))
        rows = torch.cat((rows, numbers.expand(len(queries), -1)), dim=1).gather(1, positions)
    return similarities, rows


def nearest(store: Embeddings, vectors: Vectors, query: Embeddings, queries: Vectors, top: int) -> Iterator[Neighbours]:
    """The nearest images of each query, without the query itself, which has its path."""
    for block, features in progress(queries.blocks(), total=-(-queries.num_rows // ROWS), desc=SEARCH):
        found = (part.cpu().tolist() for part in nearest_rows(vectors, features, top + 1))
        for number, similarities, rows in zip(range(block.start, block.stop), *found, strict=True):
            query_path = os.path.abspath(query.index["path"][number])
            pairs = zip(rows, similarities, strict=True)
            yield number, [pair for pair in pairs if os.path.abspath(store.index["path"][pair[0]]) != query_path][:top]


def write_nearest(
    store: Embeddings,
    query: Embeddings,
    found: Iterator[Neighbours],
    record: Mapping[str, Any],
    out: Path,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Write table, page and record; returns the record."""
    shown: list[Neighbours] = []
    names, paths = query.index["path"], store.index["path"]

    def lines() -> Iterator[Sequence[Any]]:
        yield "query", "rank", "row", "path", "label", "similarity"
        for number, pairs in found:
            if len(shown) < SHOWN_PARTS:
                shown.append((number, pairs))
            for rank, (row, similarity) in enumerate(pairs, 1):
                yield names[number], rank, *store.cells(row), f"{similarity:.6f}"

    write_csv(out / f"{SEARCH}.csv", lines())
    first: list[dict[str, Any]] = [
        {"query": names[i], "nearest": [[paths[row], value] for row, value in pairs]} for i, pairs in shown
    ]
    result = {"evaluation": SEARCH, **record, "query": args.images, "num_queries": len(names), "queries": first}
    page = out / f"{SEARCH}.html"
    page.unlink(missing_ok=True)
    if (stored := open_pictures(store, page, args.data_path, args.show_channels)) is not None:
        is_same = query.folder.resolve() == store.folder.resolve()
        part = Path(f"the part of {SEARCH}.html about {args.images}")
        pictures = open_pictures(query, part, args.data_path if is_same else None, args.show_channels)
        sections = [
            Section([stored.band(pairs)], about=short_name(names[i]), picture=pictures.tile(i) if pictures else None)
            for i, pairs in shown
        ]
        words = "At the left the query; at its right the nearest images, nearest first, with their cosine similarity."
        save_found(f"Images like {short_name(args.images)}", words, sections, page, result)
    write_json(result, out / f"{SEARCH}.json")
    for entry in first[:PRINTED]:
        say("\n".join([entry["query"], *(f"  {value:.3f}  {path}" for path, value in entry["nearest"])]))
    return result
