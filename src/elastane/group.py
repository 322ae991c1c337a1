"""A membership that is fixed for the length of a process: who takes part, and the model's wrap.

Knows process groups and DDP; nothing of steps, data or schedules.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from elastane import _env, replica
from elastane._compat import PrefixStore, rendezvous
from elastane.batching import World
from elastane.errors import CommunicationError, StateError
from elastane.gradients import GradientTap

__all__ = ["Membership", "check_agreement", "discover_world", "sum_over_workers"]


def discover_world() -> World:
    """Return this worker's place: of the open group, else as launched, else alone."""
    if dist.is_available() and dist.is_initialized():
        return World(rank=dist.get_rank(), world_size=dist.get_world_size())
    launch = _env.launch()
    return World() if launch is None else World(rank=launch.rank, world_size=launch.world_size)


class Membership:
    """This worker's place among the workers, and the wrapper that averages over them.

    Args:
        model: the module that users hold; it is told of every wrapper.
        tap: averages and measures the wrapper's gradients.
        world: this worker's place.
        ddp: further arguments of DDP.
    """

    def __init__(
        self, model: replica.Replica, *, tap: GradientTap, world: World, ddp: Mapping[str, Any]
    ) -> None:
        self._model = model
        self._tap = tap
        self._ddp = dict(ddp)
        self._trainable: frozenset[int] = frozenset()
        self.world = world
        self.group: dist.ProcessGroup | None = None

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Take part for the length of a block; a single worker's model stays bare."""
        with _open_group(self.world, device=self._device) as self.group:
            try:
                self.refresh()
                yield
            finally:
                self._unwrap()
                self.group = None

    def refresh(self) -> None:
        """Wrap the model, and again when other parameters of it require gradients.

        DDP averages what required a gradient when it was made. All workers must freeze and
        unfreeze alike.
        """
        if self.group is None:
            return
        trainable = frozenset(id(p) for p in self._model.parameters() if p.requires_grad)
        if trainable != self._trainable:
            if self._trainable:  # DDP would spread the buffers of rank 0
                add_up = partial(sum_over_workers, group=self.group)
                replica.merge_batch_statistics(self._model.inner, sum_over_workers=add_up)
            self._unwrap()
            wrapper = replica.wrap(self._model.inner, group=self.group, options=self._ddp)
            self._tap.attach(wrapper, group=self.group)
            self._model.use(wrapper, on_failure=self._tap.note_failure)
            self._trainable = trainable

    def check_agreement(self, facts: Mapping[str, object]) -> None:
        """Refuse to go on where workers differ in what must be the same (see the function)."""
        if self.group is not None:
            check_agreement(facts, group=self.group, device=self._device)

    @property
    def _device(self) -> torch.device:
        return next(self._model.parameters()).device

    def _unwrap(self) -> None:
        self._model.use(None)
        self._tap.detach()
        self._trainable = frozenset()


def check_agreement(
    facts: Mapping[str, object], *, group: dist.ProcessGroup, device: torch.device
) -> None:
    """Compare named facts over the workers.

    Raises:
        StateError: on every worker, naming what differs.
        CommunicationError: the group broke.
    """
    own = torch.tensor([_digest(value) for value in facts.values()], device=device)
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    with _as_communication_error():
        dist.all_gather(gathered, own, group=group)
    same = (torch.stack(gathered) == gathered[0]).all(0).tolist()
    differing = [name for name, is_same in zip(facts, same, strict=True) if not is_same]
    if differing:
        shown = ", ".join(f"{name}={facts[name]!r}" for name in differing)
        raise StateError(
            f"the workers differ in what must be the same on all; here {shown}: start all of them "
            "with the same arguments, and load the same saved state on each"
        )


def sum_over_workers(values: torch.Tensor, *, group: dist.ProcessGroup) -> None:
    """Add up a tensor over the workers, in place.

    Raises:
        CommunicationError: the group broke.
    """
    with _as_communication_error():
        dist.all_reduce(values, group=group)


@contextmanager
def _as_communication_error() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise CommunicationError(
            f"the process group broke, {error}: another worker failed, or did not call this"
        ) from error


def _digest(value: object) -> int:
    digest = hashlib.blake2b(repr(value).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


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
