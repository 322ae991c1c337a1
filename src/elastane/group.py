"""A membership that is fixed for the length of a process: who takes part, and the model's wrap.

Knows process groups and DDP; nothing of steps, data or schedules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from elastane import _env, replica
from elastane._compat import PrefixStore, rendezvous
from elastane.batching import World
from elastane.gradients import GradientTap

__all__ = ["discover_world", "joined"]


def discover_world() -> World:
    """Return this worker's place: of the open group, else as launched, else alone."""
    if dist.is_available() and dist.is_initialized():
        return World(rank=dist.get_rank(), world_size=dist.get_world_size())
    launch = _env.launch()
    return World() if launch is None else World(rank=launch.rank, world_size=launch.world_size)


@contextmanager
def joined(
    model: replica.Replica, *, tap: GradientTap, world: World, ddp: Mapping[str, Any]
) -> Iterator[dist.ProcessGroup | None]:
    """Take part for the length of a block: open the group, wrap the model, average gradients.

    Yields the group, or `None` for a single worker, whose model stays bare.
    """
    device = next(model.parameters()).device
    with _open_group(world, device=device) as group:
        if group is None:
            yield None
            return
        wrapper = replica.wrap(model.inner, group=group, options=ddp)
        tap.attach(wrapper, group=group)
        model.use(wrapper)
        del wrapper
        try:
            yield group
        finally:
            model.use(None)
            tap.detach()


@contextmanager
def _open_group(world: World, *, device: torch.device) -> Iterator[dist.ProcessGroup | None]:
    """Open the default group, nccl or gloo by device; one that is open is used and left open.

    Each opening has keys of its own in the launcher's store: a group that finds the addresses of
    an earlier one waits for ever.
    """
    if world.world_size == 1:
        yield None
    elif dist.is_initialized():
        yield dist.group.WORLD
    else:
        backend = "nccl" if device.type == "cuda" else "gloo"
        store, rank, world_size = next(rendezvous("env://", world.rank, world.world_size))
        times_opened = store.add(f"elastane/opened/{rank}", 1)
        fresh = PrefixStore(f"elastane/group/{times_opened}", store)
        dist.init_process_group(backend, store=fresh, rank=rank, world_size=world_size)
        try:
            yield dist.group.WORLD
        finally:
            dist.destroy_process_group()
