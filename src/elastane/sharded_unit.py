"""A part of a model that `fully_shard` was called on, and what FSDP calls to reduce its gradient.

Knows FSDP's setters and the reduce-scatter; nothing of windows, statistics or workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from elastane.errors import UnsupportedError
from elastane.sharding import Sharding

__all__ = ["Unit", "Watcher"]


class Watcher(Protocol):
    """Whom a unit shows its gradients."""

    def take(self, unit: Unit, gradient: Tensor) -> None:
        """Look at a unit's whole local gradient before it is reduced, and weight it in place."""
        ...

    def note_failure(self, cause: str) -> None:
        """Know that the reduction failed."""
        ...


class Unit:
    """What FSDP calls in place of its reduce-scatter, for one of its units.

    It has the form of FSDP's `ReduceScatter`, which torch does not export. FSDP leaves it out
    where a unit lies on one rank; then its hook after the reduction is the place.

    Args:
        watcher: is shown each gradient.
        name: of the unit's module in the model.
        parameters: of the unit.
        sharding: how they are split.
    """

    def __init__(
        self,
        watcher: Watcher,
        name: str,
        parameters: Sequence[nn.Parameter],
        *,
        sharding: Sharding,
    ) -> None:
        self.name = f"model.{name}" if name else "model"
        self.group = 0
        self._watcher: Watcher | None = watcher
        self._parameters = parameters
        self._sharding = sharding
        self._module: FSDPModule | None = None
        self._limit: int | None = None

    def find_group(self, groups: Sequence[Sequence[Tensor]]) -> None:
        """Find the group that the unit's parameters are in.

        Raises:
            UnsupportedError: they are in several, or in none.
        """
        group_of = {id(p): number for number, group in enumerate(groups) for p in group}
        trained = [p for p in self._parameters if p.requires_grad]
        found = {group_of.get(id(parameter)) for parameter in trained}
        if None in found:
            raise UnsupportedError(_NOT_TRAINED.format(unit=self.name))
        if len(found) > 1:
            raise UnsupportedError(_SEVERAL_GROUPS.format(unit=self.name))
        self.group = cast("int", next(iter(found), 0))
        padded = sum(_padded_size(p, num_shards=self._sharding.num_shards) for p in trained)
        self._limit = padded if len(groups) > 1 else None

    def enter(self, module: FSDPModule) -> None:
        """Have FSDP call this, and sum."""
        self._module = module
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        try:
            if self._sharding.num_shards == 1:
                module.set_all_reduce_hook(self._take)
            else:
                module.set_custom_reduce_scatter(cast("Any", self))
        except ValueError as error:  # torch's, for several meshes in one unit
            raise UnsupportedError(f"{self.name} can't be measured: {error}") from None

    def leave(self) -> None:
        """Have FSDP take means again; what it calls does nothing more than it would."""
        self._watcher = None
        if self._module is not None:
            self._module.set_gradient_divide_factor(float(self._sharding.mesh.size()))

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for FSDP's buffers."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Measure and weight the unit's gradient, then reduce it."""
        self._take(input_tensor)
        try:
            return dist.reduce_scatter_single(
                output_tensor, input_tensor, op=op, group=group, async_op=async_op
            )
        except RuntimeError as error:
            if self._watcher is not None:
                self._watcher.note_failure(str(error))
            raise

    def _take(self, gradient: Tensor) -> None:
        if self._watcher is None:
            return
        if self._limit is not None and gradient.numel() > self._limit:
            raise UnsupportedError(_SEVERAL_GROUPS.format(unit=self.name))
        self._watcher.take(self, gradient)


def _padded_size(parameter: nn.Parameter, *, num_shards: int) -> int:
    """Return how many numbers a parameter takes in its unit's reduce-scatter, at most."""
    rows = parameter.shape[0] if parameter.dim() else 1
    rest = parameter.numel() // max(rows, 1)
    return max(-(-rows // num_shards) * num_shards * rest, parameter.numel())


_NOT_TRAINED = (
    "{unit} has a parameter that requires a gradient and is not in the optimizer: freeze it, or "
    "give it to the optimizer, before fully_shard is called"
)
_SEVERAL_GROUPS = (
    "the parameters of {unit} are in several groups with statistics of their own, and FSDP reduces "
    "them as one: take Measuring(per='model'), or shard them apart"
)
