"""What a worker adds to the small sum of a step, and where it waits until that is made.

Knows numbers on the host and on a device; nothing of buckets, windows or workers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Extra", "StepSums", "as_vector", "known", "reads_at_once"]

Extra = float | Tensor
"""A value to be summed over the ranks with the step's statistics."""


def reads_at_once(device: torch.device) -> bool:
    """Whether a value on a device may be read as soon as it is there: nobody waits for a CPU."""
    return device.type == "cpu"


def known(value: Tensor) -> Extra:
    """Return a scalar as a number where that costs no wait, else as float64 where it lies."""
    scalar = value.detach().reshape(())
    return scalar.item() if reads_at_once(scalar.device) else scalar.double()


class StepSums:
    """Collects the squared norms of a step and lays out its small vector.

    On a CPU all numbers are the host's at once, which spares a dozen small tensor operations a
    step; on another device they stay there until the vector is read. Both ways give the same
    vector to the bit but for the order in which several local norms are added up.

    Args:
        num_groups: parameter groups that have statistics of their own.
    """

    def __init__(self, num_groups: int) -> None:
        self._num_groups = num_groups
        self._local: list[list[float]] = []
        self._local_on_device: list[Tensor] = []
        self._means: dict[int, list[float] | Tensor] = {}

    def add_local(self, sqr_norms: Tensor, *, factor: float) -> None:
        """Take a gradient of this worker's, or a part of it.

        Args:
            sqr_norms: squared norms of the groups, float64, of shape (num_groups,).
            factor: what they count in the weighted sum.
        """
        if reads_at_once(sqr_norms.device):
            self._local.append([factor * one for one in sqr_norms.tolist()])
        else:
            self._local_on_device.append(sqr_norms * factor)

    def set_mean(self, part: int, sqr_norms: Tensor) -> None:
        """Take a part of the mean gradient.

        Args:
            part: its number; all ranks add them up in this order.
            sqr_norms: as in `add_local`.
        """
        at_once = reads_at_once(sqr_norms.device)
        self._means[part] = sqr_norms.tolist() if at_once else sqr_norms

    def vector(
        self, counts: Sequence[float], extras: Sequence[Extra], *, device: torch.device
    ) -> Tensor:
        """Return what this worker adds: weighted norms, counts, a flag, and the extra values.

        Norms that are not finite are left out, and the flag is 1 then.
        """
        if self._local_on_device:
            local = _total(self._local_on_device)
            clean = local.nan_to_num(0.0, 0.0, 0.0)
            told = _pieces((*counts, clean.ne(local).any(), *extras), device)
            return torch.cat([clean, *told])
        local = [sum(one) for one in zip(*self._local, strict=True)] or [0.0] * self._num_groups
        clean = [one if math.isfinite(one) else 0.0 for one in local]
        return as_vector((*clean, *counts, float(clean != local), *extras), device)

    def read(self, vector: Tensor, loss_scale: Extra) -> tuple[list[float], list[float], float]:
        """Return the reduced vector, the squared norms of the mean, and the loss scale.

        The one place that waits for a device.
        """
        scale = known(loss_scale) if isinstance(loss_scale, Tensor) else loss_scale
        parts = [self._means[part] for part in sorted(self._means)]
        on_host = [part for part in parts if not isinstance(part, Tensor)]
        if len(on_host) == len(parts) and not isinstance(scale, Tensor):
            return vector.double().tolist(), [sum(one) for one in zip(*on_host, strict=True)], scale
        device = vector.device
        means = _total(
            [torch.as_tensor(part, dtype=torch.float64, device=device) for part in parts]
        )
        *values, read_scale = torch.cat([vector, means, *_pieces([scale], device)]).tolist()
        return values[: len(vector)], values[len(vector) :], read_scale


def as_vector(values: Sequence[Extra], device: torch.device) -> Tensor:
    """Return host numbers and device scalars in one float64 vector, without waiting."""
    pieces = _pieces(values, device)
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _pieces(values: Sequence[Extra], device: torch.device) -> list[Tensor]:
    """Return vectors that put together are `as_vector`: neighbours on the host are one of them."""
    found: list[Tensor] = []
    host: list[float] = []
    for value in values:
        told = known(value) if isinstance(value, Tensor) else float(value)
        if isinstance(told, Tensor):
            found += [*_moved(host, device), told.reshape(1)]
            host = []
        else:
            host.append(told)
    return [*found, *_moved(host, device)]


def _moved(numbers: list[float], device: torch.device) -> list[Tensor]:
    if not numbers:
        return []
    return [torch.tensor(numbers, dtype=torch.float64).to(device, non_blocking=True)]


def _total(vectors: Sequence[Tensor]) -> Tensor:
    return vectors[0] if len(vectors) == 1 else torch.stack(list(vectors)).sum(0)
