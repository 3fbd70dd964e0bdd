"""Compositional benchmarks of 2022 to 2024 in their official layouts, drawn from a seed; for tests and the recorder."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
from compositional_files import write_json
from PIL import Image

NUM = 60
MMVP_PAIRS = 135  # the authors' code counts by position, 15 pairs a category
SPEC_SIZES = {"absolute_size": 3, "existence": 2}


def tables(seed: int, count: int, images: int, captions: int) -> np.ndarray:
    """(count, images, captions), scores of every image with every caption; many are equal."""
    return (np.random.default_rng(seed).integers(0, 5, (count, images, captions)) / 8).astype(np.float32)


def dot(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), "red").save(path)


def text(question: int, caption: int) -> str:
    """A caption that says whose it is."""
    return f"{question} {caption}"


def sugarcrepe_pp(root: Path) -> list[dict[str, Any]]:
    entries = [
        {"id": n, "filename": f"{n}.jpg", "caption": text(n, 0), "caption2": text(n, 1), "negative_caption": text(n, 2)}
        for n in range(NUM)
    ]
    write_json(root / "data" / "swap_att.json", entries)
    for entry in entries:
        dot(root / "images" / entry["filename"])
    return entries


def mmvp_vlm(root: Path) -> None:
    with (root / "Questions.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["Question ID", "Type", "Statement"])
        for number in range(2 * MMVP_PAIRS):
            kind = f"type {number // 30}"
            writer.writerow([number + 1, kind, text(number // 2, number % 2)])
            dot(root / "MLLM_VLM Images" / kind / f"{number + 1}.jpg")


def valse(root: Path) -> None:
    entries = {
        str(n): {"image_file": f"v7w_{n}.jpg", "caption": text(n, 0), "foil": text(n, 1), "dataset": "visual7w",
                 "mturk": {"foil": 0, "caption": n % 4, "other": 0}}
        for n in range(NUM)
    }  # fmt: skip
    write_json(root / "data" / "existence.json", entries)
    for entry in entries.values():
        dot(root / "data" / "visual7w" / "images" / entry["image_file"])


def labels(seed: int, count: int, size: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, size, count).tolist()


def spec(root: Path) -> None:
    """Two of the six subsets."""
    for seed, (subset, size) in enumerate(SPEC_SIZES.items()):
        for n in range(NUM):
            for candidate in range(size):
                dot(root / subset / "images" / f"{n}_{candidate}.jpg")
        entries = [
            {"query": f"images/{n}_0.jpg", "keys": [text(n, c) for c in range(size)], "label": label}
            for n, label in enumerate(labels(seed, NUM, size))
        ]
        write_json(root / subset / "image2text.json", entries)
        entries = [
            {"query": text(n, 0), "keys": [f"images/{n}_{c}.jpg" for c in range(size)], "label": label}
            for n, label in enumerate(labels(seed, NUM, size))
        ]
        write_json(root / subset / "text2image.json", entries)
