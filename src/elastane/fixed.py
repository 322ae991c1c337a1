"""A membership that is fixed for the length of a process: plain python, or torchrun.

Opens the group that the launcher has room for. Nothing ever changes; a broken group is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

import torch
import torch.distributed as dist

from elastane import _env
from elastane._compat import PrefixStore, rendezvous
from elastane.batching import World
from elastane.errors import CommunicationError
from elastane.group import Trainee, Wrapping
from elastane.peers import Peers
from elastane.sharded_wrapping import ShardedWrapping

__all__ = ["FixedMembership", "discover_world"]

T = TypeVar("T")


def discover_world() -> World:
    """Return this worker's place: of the open group, else as launched, else alone."""
    if dist.is_available() and dist.is_initialized():
        return World(rank=dist.get_rank(), world_size=dist.get_world_size())
    launch = _env.launch()
    return World() if launch is None else World(rank=launch.rank, world_size=launch.world_size)


class FixedMembership:
    """Implements `elastane.group.Membership` for workers that stay as they were started.

    Args:
        wrapping: of the model.
        world: this worker's place.
    """

    warming = False
    final_at_once = True

    def __init__(self, wrapping: Wrapping | ShardedWrapping, *, world: World) -> None:
        self._wrapping = wrapping
        self.world = world

    @property
    def peers(self) -> Peers | None:
        """The workers of the process group; `None` for one worker."""
        return self._wrapping.peers

    @contextmanager
    def joined(self, trainee: Trainee) -> Iterator[None]:
        """Take part for the length of a block, once all workers agree on what they train."""
        device = self._wrapping.device
        with _open_group(self.world, device=device) as group:
            try:
                trainee.resume()
                peers = None if group is None else Peers(group)
                self._wrapping.use(peers)
                if peers is not None:
                    peers.agree({**trainee.identity(), **trainee.facts()}, device=device)
                trainee.entered(self.world, cause="start")
                yield
            finally:
                self._wrapping.drop()

    def rehearsed(self) -> None:
        """Never called: there is no rehearsal."""

    def start_window(self) -> None:
        """Wrap the model anew if other parameters train."""
        self._wrapping.refresh()

    def extras(self) -> Sequence[float]:
        """Return nothing."""
        return ()

    def arrived(self) -> None:
        """Do nothing."""

    def finished_step(self, sums: Sequence[float]) -> None:
        """Do nothing."""

    def recover(self, why: str) -> bool:
        """Raise: who is left can't be known here.

        Raises:
            CommunicationError: always.
        """
        raise CommunicationError(why)

    def together(self, work: Callable[[], T]) -> T:
        """Return what the work comes to."""
        return work()

    def agree_on_end(self) -> None:
        """Do nothing: all workers count alike."""

    def pause(self, reason: str) -> AbstractContextManager[None]:  # noqa: ARG002
        """Return an empty context."""
        return nullcontext()


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
        store, rank, world_size = next(rendezvous("env://", world.rank, world.world_size))
        times_opened = store.add(f"elastane/opened/{rank}", 1)
        fresh = PrefixStore(f"elastane/group/{times_opened}", store)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=fresh, rank=rank, world_size=world_size)
        try:
            yield dist.group.WORLD
        finally:
            dist.destroy_process_group()
