"""The processes of one worker, which hold one copy of a sharded model between them.

Knows their own small group; nothing of other workers, generations or models.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from elastane.errors import CommunicationError, UsageError

__all__ = ["Team"]

T = TypeVar("T")

_FOR_EVER = timedelta(days=1000)


class Team:
    """One worker's processes: their leader decides, and what one can't finish none has finished.

    Almost always there is one, and then nothing here costs anything. Of several, the leader, which
    has index 0, speaks with the supervisor and the followers do as it says. They live and die
    together: when one is gone the others end, and the supervisor replaces the worker.

    Args:
        size: number of processes.
        index: of this one.
    """

    def __init__(self, *, size: int = 1, index: int = 0) -> None:
        self.size = size
        self.index = index
        self._group: dist.ProcessGroup | None = None

    @property
    def is_leader(self) -> bool:
        """Whether this process speaks for the worker."""
        return self.index == 0

    @contextmanager
    def assembled(self) -> Iterator[None]:
        """Have a group of their own, beside the default group, for the length of a block.

        A follower may wait in it for days, until its worker is let in.

        Raises:
            UsageError: the default group is not that of these processes.
        """
        if self.size == 1:
            yield
            return
        if not dist.is_initialized() or dist.get_world_size() != self.size:
            raise UsageError(_NO_GROUP.format(size=self.size))
        self._group = cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=_FOR_EVER))
        try:
            yield
        finally:
            self._group = None

    def agree(self, holds: bool) -> bool:
        """Return whether something holds on every process of the team."""
        if self.size == 1:
            return holds
        vote = torch.tensor([int(holds)])
        _ended_with_the_team(lambda: dist.all_reduce(vote, op=dist.ReduceOp.MIN, group=self._group))
        return bool(vote.item())

    def together(self, action: Callable[[], T]) -> T:
        """Return what an action comes to, if it ends well on every process.

        Raises:
            CommunicationError: it did not on this process, or on another.
        """
        if self.size == 1:
            return action()
        why = "it broke for another process of this worker"
        result: list[T] = []
        try:
            result.append(action())
        except CommunicationError as error:
            why = str(error)
        if self.agree(bool(result)):
            return result[0]
        raise CommunicationError(why)

    def told(self, decide: Callable[[], Any]) -> Any:
        """Return what the leader decides; only it calls `decide`.

        Args:
            decide: returns what JSON can hold.
        """
        if self.size == 1:
            return decide()
        text = bytearray(json.dumps(decide()).encode()) if self.is_leader else bytearray()
        length = torch.tensor([len(text)])
        self._hear(length)
        message = torch.frombuffer(text, dtype=torch.uint8) if text else length.new_empty(0)
        if not self.is_leader:
            message = torch.empty(int(length), dtype=torch.uint8)
        self._hear(message)
        return json.loads(message.numpy().tobytes())

    def _hear(self, message: torch.Tensor) -> None:
        _ended_with_the_team(lambda: dist.broadcast(message, group=self._group, group_src=0))


def _ended_with_the_team(action: Callable[[], object]) -> None:
    """Communicate; end this process, whatever it is at, when another one of its team has ended."""
    try:
        action()
    except RuntimeError as error:
        why = str(error)
    else:
        return
    raise SystemExit(_LOST.format(why=why))


_NO_GROUP = (
    "this worker has {size} processes, which shard the model between them: call "
    "torch.distributed.init_process_group() and fully_shard(model) before the session is built, as "
    "under torchrun"
)
_LOST = "this process ends, since another one that holds a part of the same model has ended: {why}"
