"""Opening process groups such that nobody can be caught in them: the default one, or beside it.

Knows torch's registry of backends; nothing of generations or members.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from elastane._compat import PrefixStore, Store
from elastane.batching import World
from elastane.elastic.sockets import can_break
from elastane.peers import Breaker

__all__ = ["open_beside", "open_group"]

_TIME_LIMIT = timedelta(minutes=30)
_TIME_LIMIT_UNBREAKABLE = timedelta(minutes=2)
_BACKEND = "elastane_gloo"


def open_group(
    store: Callable[[], Store], *, world: World, device: torch.device, breaker: Breaker
) -> dist.ProcessGroup:
    """Open the default group; on the CPU it connects in a thread that can be left alone.

    Gloo connects while it is built, and waits for ever for a member that died on the way: there
    is no socket yet that could be shut. So it is built beside this thread, and torch's registry
    gets it when it is whole. Nothing global has changed before that.

    Args:
        store: gives a client whose keys no other group has had.
        world: this member's place.
        device: the model's.
        breaker: ends the wait for the others.

    Raises:
        CommunicationError: it could not be opened, or was given up.
    """
    if device.type == "cuda":
        breaker.call(lambda: _register("nccl", store(), world=world))
    else:
        client, gloo = breaker.call(lambda: _connect(store(), world=world))
        _hand_over(lambda *_: gloo)
        try:
            _register(_BACKEND, client, world=world)
        finally:
            _hand_over(_refuse)
    group = dist.group.WORLD
    assert group is not None
    return group


def open_beside(
    store: Callable[[], Store], *, world: World, device: torch.device, breaker: Breaker
) -> dist.ProcessGroup:
    """Open a group that torch's registry does not know, so that the default group may stay.

    Args:
        store: gives a client whose keys no other group has had.
        world: this process's place in the group.
        device: the model's.
        breaker: ends the wait for the others.

    Raises:
        CommunicationError: it could not be opened, or was given up.
    """
    group: Any
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        group = breaker.call(
            lambda: dist.ProcessGroupNCCL(store(), world.rank, world.world_size, options)
        )
    else:
        _, group = breaker.call(lambda: _connect(store(), world=world))
    return group


def _connect(store: Store, *, world: World) -> tuple[Store, dist.ProcessGroupGloo]:
    limit = _TIME_LIMIT if can_break() else _TIME_LIMIT_UNBREAKABLE
    own = PrefixStore("gloo", store)
    own.set_timeout(limit)  # gloo may read all addresses at once, and waits with the client's limit
    return store, dist.ProcessGroupGloo(own, world.rank, world.world_size, limit)


def _hand_over(make: Callable[..., object]) -> None:
    """Have torch's registry make our backend with this function."""
    dist.Backend.register_backend(_BACKEND, make, devices=["cpu"])


def _refuse(*_: object) -> object:
    raise RuntimeError(f"{_BACKEND} groups are opened by elastane's sessions only: use gloo")


def _register(backend: str, store: Store, *, world: World) -> None:
    dist.init_process_group(
        backend, store=store, rank=world.rank, world_size=world.world_size, timeout=_TIME_LIMIT
    )
