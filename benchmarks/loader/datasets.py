"""The datasets that both loaders read: samples that cost nothing, and samples that cost something.

Knows datasets; nothing of how they are read or timed.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset, default_collate

from benchmarks.tasks import fashion

__all__ = ["KINDS", "Kind", "Pictures", "Rows"]

NUM_SAMPLES = 8_192
"""A multiple of each loader's batch over its workers, so that no batch is short."""

_WIDTH, _CLASSES, _SHIFT = 49, 10, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A dataset, and how its samples become a batch.

    Attributes:
        build: returns the dataset.
        collate: as `DataLoader`'s; `None` is its default.
        missing: returns why it can't be read here, or `None`.
    """

    build: Callable[[], Dataset[Any]]
    collate: Callable[[list[Any]], Any] | None = None
    missing: Callable[[], str | None] = lambda: None


def _noise() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(NUM_SAMPLES, _WIDTH, generator=generator)
    return rows, torch.randint(_CLASSES, (NUM_SAMPLES,), generator=generator)


class Rows(Dataset[tuple[Tensor, int]]):
    """Rows of noise with a label, as a dataset of a user's own: its price is the call alone."""

    def __init__(self) -> None:
        rows, labels = _noise()
        self._rows, self._labels = rows, labels.tolist()

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._rows[index], self._labels[index]


class Pictures(Dataset[tuple[Tensor, int]]):
    """Pictures that lie compressed in memory: unpacked, normalised and shifted at each reading.

    Args:
        pixels: whole numbers from 0 to 255, of shape (pictures, height, width).
        labels: a class for each.
    """

    def __init__(self, pixels: np.ndarray, labels: list[int]) -> None:
        self._shape = pixels.shape[1:]
        self._packed = [zlib.compress(one.tobytes()) for one in pixels]
        self._labels = labels

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        flat = np.frombuffer(zlib.decompress(self._packed[index]), np.uint8)
        picture = torch.from_numpy(flat.reshape(1, *self._shape).astype(np.float32))
        picture = picture.div_(255).sub_(0.5).div_(0.5)
        right, down = torch.randint(-_SHIFT, _SHIFT + 1, (2,)).tolist()
        return picture.roll((right, down), (1, 2)), self._labels[index]


def _pictures() -> Pictures:
    images, labels = fashion.load(True).train.tensors  # pyright: ignore[reportAttributeAccessIssue]
    images, labels = images[:NUM_SAMPLES, 0], labels[:NUM_SAMPLES]
    darkest, brightest = images.min(), images.max()
    pixels = ((images - darkest) / (brightest - darkest) * 255).round().byte()
    return Pictures(pixels.numpy(), labels.tolist())


KINDS: Mapping[str, Kind] = {
    "tensors": Kind(build=lambda: TensorDataset(*_noise())),
    "tensors, own collate": Kind(build=lambda: TensorDataset(*_noise()), collate=default_collate),
    "rows": Kind(build=Rows),
    "pictures": Kind(build=_pictures, missing=fashion.TASK.missing),
}
