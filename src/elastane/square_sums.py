"""Sums of squared micro-batch gradients, element by element, over a step and over its workers.

Knows tensors; nothing of buckets, of moments or of what the sums are for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from elastane._compat import foreach_addcmul_

__all__ = ["SquareSums"]


class SquareSums:
    """Collects `sum b_i g_i^2` of parameters in one flat buffer, for a single reduction.

    Args:
        parameters: of one device and floating type.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        dtypes = {parameter.dtype for parameter in parameters}
        dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        size = sum(parameter.numel() for parameter in parameters)
        self._flat = torch.zeros(size, dtype=dtype, device=parameters[0].device)
        parts = self._flat.split([parameter.numel() for parameter in parameters])
        self._sums = {
            id(parameter): part.as_strided(parameter.shape, _dense(parameter))
            for parameter, part in zip(parameters, parts, strict=True)
        }

    @property
    def sums(self) -> Mapping[int, Tensor]:
        """The sums by the parameters' ids."""
        return self._sums

    def clear(self) -> None:
        """Begin a step."""
        self._flat.zero_()

    def add(self, gradients: Mapping[int, Tensor], *, factor: float) -> None:
        """Add the squares of a micro-batch's gradients, by the parameters' ids, times a factor."""
        pairs = [
            (self._sums[one], gradient) for one, gradient in gradients.items() if one in self._sums
        ]
        if not pairs:
            return
        sums, each = map(list, zip(*pairs, strict=True))
        each = [one.to(self._flat.dtype) for one in each]
        foreach_addcmul_(sums, each, each, value=factor)

    def reduce(self, start: Callable[[Tensor], dist.Work | None]) -> dist.Work | None:
        """Start the sum over the workers."""
        return start(self._flat)


def _dense(parameter: Tensor) -> tuple[int, ...]:
    """Return the strides of a parameter's elements where they lie close together in its order."""
    return torch.empty_like(parameter, device="meta").stride()
