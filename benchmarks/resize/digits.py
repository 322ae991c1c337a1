"""The data of the benchmarks: scikit-learn's digits, written once where workers read them at once.

Importing scikit-learn takes a second, which every worker that joins would spend anew.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import numpy as np

__all__ = ["write_digits"]


def write_digits(path: Path) -> Path:
    """Write the digits into a file with `images` and `labels`, and return it."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        message = "the digits come with scikit-learn: pip install '.[test]' in this checkout"
        raise click.ClickException(message) from None
    digits: Any = load_digits()
    images = (digits.data / 16).astype(np.float32)
    np.savez(path, images=images, labels=digits.target.astype(np.int64))
    return path
