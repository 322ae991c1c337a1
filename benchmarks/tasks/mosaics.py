"""Mosaics of three photographed textures with their masks, made in memory.

The photos are scikit-image's (CC0). Knows nothing of models and metrics.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import TensorDataset

from benchmarks.tasks import sources

__all__ = ["SIDE", "TEXTURES", "make_mosaics"]

TEXTURES = ("brick", "grass", "gravel")
SIDE = 64
_ROWS = {"train": slice(0, 384), "validation": slice(384, 512)}


def make_mosaics(num_mosaics: int, *, part: str, seed: int) -> TensorDataset:
    """Return mosaics of three to six Voronoi cells, each of them of one texture.

    A sample is `(image, mask)`: uint8 `(1, 64, 64)`, and int64 `(64, 64)` with the number of the
    texture in `TEXTURES`.

    Args:
        num_mosaics: how many.
        part: `train` takes its pieces from the upper 384 rows of the photos, `validation` from the
            lower 128.
        seed: of cells and pieces.
    """
    photos = _photos()[:, _ROWS[part]]
    rng = np.random.default_rng(seed)
    masks = np.stack([_draw_mask(rng) for _ in range(num_mosaics)])
    images = np.stack([_fill(mask, photos, rng) for mask in masks])
    return TensorDataset(torch.from_numpy(images[:, None]), torch.from_numpy(masks))


def _draw_mask(rng: np.random.Generator) -> NDArray[np.int64]:
    num_cells = rng.integers(3, 7)
    centres = rng.uniform(0, SIDE, (num_cells, 2))
    places = np.arange(SIDE) + 0.5
    down, across = (np.subtract.outer(centres[:, i], places) ** 2 for i in (0, 1))
    nearest = (down[:, :, None] + across[:, None, :]).argmin(0)  # (SIDE, SIDE)
    return rng.integers(len(TEXTURES), size=num_cells)[nearest]


def _fill(
    mask: NDArray[np.int64], photos: NDArray[np.uint8], rng: np.random.Generator
) -> NDArray[np.uint8]:
    """Return a picture with one piece of each photo where the mask has its number."""
    _, height, width = photos.shape
    tops = rng.integers(height - SIDE + 1, size=len(photos))
    lefts = rng.integers(width - SIDE + 1, size=len(photos))
    corners = zip(photos, tops, lefts, strict=True)
    pieces = np.stack([photo[y : y + SIDE, x : x + SIDE] for photo, y, x in corners])
    return np.take_along_axis(pieces, mask[None], axis=0)[0]


@cache
def _photos() -> NDArray[np.uint8]:
    """Return the photos, `(3, 512, 512)`."""
    folder = sources.find("mosaic")
    return np.stack([np.asarray(Image.open(folder / f"{name}.png")) for name in TEXTURES])
