"""How samples become a batch in this process: as in torch's `DataLoader`, at a lower price.

Knows map-style datasets and collation; nothing of orders, ranges or loader processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

from elastane._compat import collates_by_stacking

__all__ = ["Collate", "batchwise", "read_here"]

Collate = Callable[[list[Any]], Any]
"""Makes a batch of a list of samples."""


def read_here(
    dataset: Any, indices: Iterable[list[int]], collate_fn: Collate | None
) -> Iterator[Any]:
    """Yield the batches that a `DataLoader` without loader processes would.

    That one opens a record of torch's profiler for each batch, which costs as much as to collate
    sixteen small samples.

    Args:
        dataset: map-style, with `__getitems__` or without.
        indices: of each batch.
        collate_fn: as `DataLoader`'s.
    """
    collate = collate_fn or default_collate
    fetch = getattr(dataset, "__getitems__", None)
    for batch in indices:
        yield collate(fetch(batch) if fetch else [dataset[index] for index in batch])


def batchwise(dataset: Any, collate_fn: Collate | None) -> tuple[Any, Collate | None]:
    """Return a dataset and a collation that come to the same batches, without a loop over samples.

    Where a batch is plainly rows of tensors in memory; anything else is returned as it is.
    """
    is_plain = type(dataset) is TensorDataset and collate_fn is None and collates_by_stacking()
    if is_plain and all(map(_is_plain, dataset.tensors)):
        return _Rows(*dataset.tensors), _as_it_is
    return dataset, collate_fn


def _is_plain(tensor: Tensor) -> bool:
    is_dense = tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)
    return type(tensor) is Tensor and tensor.device.type == "cpu" and is_dense


class _Rows(TensorDataset):
    """Gives a batch at once, as `default_collate` would put it together."""

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        rows = torch.from_numpy(np.array(indices, dtype=np.int64))
        return [tensor.index_select(0, rows) for tensor in self.tensors]


def _as_it_is(batch: Any) -> Any:
    return batch
