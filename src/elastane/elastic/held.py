"""The process group that a worker is in: what breaks it, and how the worker lets go of it.

Knows nothing of who else is in it, or why it ends.
"""

from __future__ import annotations

import threading

import torch.distributed as dist

from elastane.elastic.sockets import GroupSockets
from elastane.group import Wrapping
from elastane.peers import Breaker
from elastane.replicated import ReplicatedWrapping
from elastane.sharded_wrapping import ShardedWrapping

__all__ = ["HeldGroup"]

_CLOSING_LIMIT_S = 1.0


class HeldGroup:
    """Holds one group at a time, or none.

    Args:
        wrapping: of the model; it has the group's peers.
        keeps_default: whether torch's default group is another one, which stays.
    """

    def __init__(
        self,
        wrapping: Wrapping | ShardedWrapping | ReplicatedWrapping,
        *,
        keeps_default: bool = False,
    ) -> None:
        self.wrapping = wrapping
        self._keeps_default = keeps_default
        self.sockets = GroupSockets()
        self.breaker = Breaker()
        self._closing: list[threading.Thread] = []

    def renew(self) -> None:
        """Be ready to open another group, after the one before was let go of."""
        self.breaker = Breaker()

    def break_up(self, why: str) -> None:
        """End all waits in the group, of its other members as well. Any thread may call it."""
        self.sockets.shut()
        self.breaker.give_up(why)

    def let_go(self, *, at_once: bool) -> None:
        """Be in no group; destroying it takes 10 ms a member, in a thread of its own.

        Args:
            at_once: shut its sockets, so that nobody waits for this worker in it.
        """
        peers = self.wrapping.peers
        self.wrapping.drop()
        if at_once:
            self.break_up("this worker has left the group")
        self.sockets.forget()
        last_references: list[object] = [peers]
        del peers
        if dist.is_initialized() and not self._keeps_default:
            last_references.append(dist.group.WORLD)
            dist.destroy_process_group()
        if any(one is not None for one in last_references):
            closing = threading.Thread(target=last_references.clear, daemon=True)
            closing.start()
            self._closing = [one for one in self._closing if one.is_alive()] + [closing]

    def close(self) -> None:
        """Be in no group; wait a little for those that were let go of."""
        self.let_go(at_once=True)
        for closing in self._closing:  # one that waits for an operation may take half an hour
            closing.join(_CLOSING_LIMIT_S)
