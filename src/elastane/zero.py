"""torch's ZeroRedundancyOptimizer, whose workers each hold the state of a part of the parameters.

Knows what it is refused for, and how its state is put together; nothing of steps or files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from elastane import _compat
from elastane.errors import UnsupportedError

__all__ = ["check_zero", "is_zero", "load_zero_state", "own_state", "zero_state_of"]


def is_zero(optimizer: Optimizer) -> bool:
    """Return whether it is torch's `ZeroRedundancyOptimizer`; importing that would warn."""
    return any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__)


def own_state(optimizer: Optimizer) -> Mapping[Any, dict[str, Any]]:
    """Return the state that an optimizer steps by on this worker, by parameter."""
    held: Any = optimizer
    return held.optim.state if is_zero(optimizer) else optimizer.state


def check_zero(optimizer: Any, *, world_size: int, is_elastic: bool, is_sharded: bool) -> None:
    """Refuse a ZeroRedundancyOptimizer that can't be stepped or saved by a session.

    Args:
        optimizer: the optimizer.
        world_size: workers of the session.
        is_elastic: whether they come and go.
        is_sharded: whether the model is sharded.

    Raises:
        UnsupportedError: for any of these.
    """
    if is_elastic:
        raise UnsupportedError(_ELASTIC)
    if is_sharded:
        raise UnsupportedError(
            "the model is sharded, and with it the optimizer's state already: pass a plain "
            "optimizer in place of ZeroRedundancyOptimizer"
        )
    if _compat.overlaps_with_ddp(optimizer):
        raise UnsupportedError(
            "ZeroRedundancyOptimizer(overlap_with_ddp=True) steps inside DDP's backward, before "
            "anything was measured: leave overlap_with_ddp out"
        )
    if optimizer.world_size != world_size:
        raise UnsupportedError(
            f"ZeroRedundancyOptimizer has a group of {optimizer.world_size} workers and the "
            f"session {world_size}: build it without process_group, on all workers"
        )


def zero_state_of(optimizer: Any) -> dict[str, Any]:
    """Return the whole state, as the plain optimizer would have it, on rank 0; nothing elsewhere.

    Collective: all workers must call it. torch sends the parts as pickles among them.
    """
    optimizer.consolidate_state_dict(to=0)
    return optimizer.state_dict() if optimizer.rank == 0 else {}


def load_zero_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Take up this worker's part of a whole state; all others' stay out of memory."""
    optimizer.load_state_dict({**state, "state": dict(state["state"])})  # which torch empties
    optimizer.state.clear()  # a second copy of the part


_ELASTIC = (
    "a ZeroRedundancyOptimizer has parts of its state on workers that are fixed when it is built, "
    "and under `elastane run` workers come and go: shard the model with FSDP2 (fully_shard) "
    "instead, which shards the optimizer's state too, or start the job with torchrun"
)
