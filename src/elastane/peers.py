"""The workers of one process group, and waiting for them such that another thread can end the wait.

Knows collective operations; nothing of steps, models or who decides on members.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import Lock, Thread
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from elastane.errors import CommunicationError, StateError

__all__ = ["Breaker", "Peers", "digest_of"]

T = TypeVar("T")

_LARGE_BYTES = 1 << 20
_RETURN_S, _RETURN_LIMIT_S = 1e-3, 1.0


class Breaker:
    """Waits for operations of a group, and can give all of them up.

    Gloo may never end an operation whose member has died, not even when the group's sockets are
    shut: then only who waits can be freed. What an operation that was given up still does, it
    does to tensors that nobody reads any more.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._pending: dict[Future[Any], Callable[[str | None], Any]] = {}
        self._num_ending = 0
        self._why: str | None = None

    def watch(
        self, work: dist.Work, then: Callable[[str | None], T], *, on_host: bool
    ) -> Future[T]:
        """Return a future of what `then` makes of an operation's end.

        Args:
            work: under way.
            then: called once with `None`, or with why the operation failed or was given up.
            on_host: whether its tensors are the CPU's. A device's operation is ended by aborting
                its group, and its future must keep the order of the device's streams.
        """
        if not on_host:
            return work.get_future().then(lambda ended: then(_failure_of(ended)))
        future: Future[T] = Future()
        with self._lock:
            why = self._why
            if why is None:
                self._pending[future] = then
        if why is None:
            work.get_future().add_done_callback(partial(self._end, future))
        else:
            future.set_result(then(why))
        return future

    def outcome(self, work: dist.Work, *, on_host: bool) -> str | None:
        """Wait for an operation; return `None`, or why it failed or was given up."""
        if on_host and (self._why is not None or not work.is_completed()):
            return self.watch(work, lambda why: why, on_host=True).wait()
        try:
            work.wait()
        except RuntimeError as error:
            return str(error)
        return None

    def wait(self, work: dist.Work | None, *, on_host: bool) -> None:
        """Wait for an operation.

        Raises:
            CommunicationError: it failed, or was given up.
        """
        if work is None:
            raise CommunicationError(_BROKEN.format("this process is no member of its group"))
        failure = self.outcome(work, on_host=on_host)
        if failure is not None:
            raise CommunicationError(_BROKEN.format(failure))

    def call(self, action: Callable[[], T]) -> T:
        """Return what a blocking action returns; it runs in a thread that can be left alone.

        For operations without a future, and for opening a group.

        Raises:
            CommunicationError: it failed, or was given up. An error that is not about
                communication is raised as it is.
        """
        future: Future[tuple[T | None, str | None]] = Future()
        mistakes: list[Exception] = []
        with self._lock:
            if self._why is not None:
                raise CommunicationError(_BROKEN.format(self._why))
            self._pending[future] = lambda why: (None, why)

        def run() -> None:
            value, failure = None, None
            try:
                value = action()
            except (OSError, RuntimeError) as error:
                failure = str(error)
            except Exception as error:  # whoever waits would wait for ever
                mistakes.append(error)
            with self._lock:
                waited_for = self._pending.pop(future, None) is not None
            if waited_for:
                future.set_result((value, failure))

        Thread(target=run, name="elastane communication", daemon=True).start()
        value, failure = future.wait()
        if failure is not None:
            raise CommunicationError(_BROKEN.format(failure))
        if mistakes:
            raise mistakes.pop()
        return cast("T", value)

    def give_up(self, why: str) -> None:
        """End all waits, present and future. Any thread may call it."""
        with self._lock:
            self._why = self._why or why
            pending, self._pending = self._pending, {}
        for future, then in pending.items():
            future.set_result(then(why))

    def await_returns(self) -> None:
        """Wait until gloo's threads have come back from what they called here.

        Before the group is let go of: its end waits for these threads with the interpreter's lock
        in hand, and they need that lock to return. Who waits for a result is woken before they do.
        """
        deadline = time.monotonic() + _RETURN_LIMIT_S
        while True:
            time.sleep(_RETURN_S)  # without the lock
            with self._lock:
                if self._num_ending == 0 or time.monotonic() > deadline:
                    return

    def _end(self, future: Future[Any], ended: Future[Any]) -> None:
        with self._lock:
            then = self._pending.pop(future, None)
            self._num_ending += 1
        if then is not None:
            value = then(_failure_of(ended))
            # Gloo's thread calls this: as the last that holds the group it would wait for itself.
            del then
            future.set_result(value)
        with self._lock:
            self._num_ending -= 1


class Peers:
    """The workers of a group, as one of them.

    Args:
        group: gloo or nccl.
        breaker: ends waits for the group.
        replicas: those of them that hold the same shards of other copies of the model; `None`
            where no copy is sharded over several workers, or there is only one.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        breaker: Breaker | None = None,
        replicas: Peers | None = None,
    ) -> None:
        self.group = group
        self.breaker = breaker or Breaker()
        self.replicas = replicas

    def call(self, action: Callable[[], T], *, on_host: bool) -> T:
        """Return what an action returns that waits for the group without saying so.

        Args:
            action: to be called by all workers.
            on_host: whether it waits for the CPU's tensors, and so in a thread that can be left
                alone. On a device, aborting the group ends it.

        Raises:
            CommunicationError: the group broke.
        """
        if on_host:
            return self.breaker.call(action)
        try:
            return action()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            why = str(error)
        raise CommunicationError(_BROKEN.format(why))

    def sum(self, values: Tensor) -> None:
        """Add up a tensor over the workers, in place.

        Raises:
            CommunicationError: the group broke.
        """
        work = _started(lambda: dist.all_reduce(values, group=self.group, async_op=True))
        self.breaker.wait(work, on_host=not values.is_cuda)

    def sum_all(self, tensors: Sequence[Tensor]) -> None:
        """Add up tensors over the workers, in place and side by side; small ones go together.

        Args:
            tensors: as many as on every other worker, alike in dtype and shape.

        Raises:
            CommunicationError: the group broke.
        """
        small: dict[torch.dtype, list[Tensor]] = {}
        messages: list[Tensor] = []
        for tensor in tensors:
            if tensor.is_contiguous() and tensor.nbytes >= _LARGE_BYTES:
                messages.append(tensor)
            elif tensor.numel():
                small.setdefault(tensor.dtype, []).append(tensor)
        joined = [(torch.cat([one.reshape(-1) for one in some]), some) for some in small.values()]
        messages += [flat for flat, _ in joined]
        works = [
            _started(lambda one=one: dist.all_reduce(one, group=self.group, async_op=True))
            for one in messages
        ]
        for work, message in zip(works, messages, strict=True):
            self.breaker.wait(work, on_host=not message.is_cuda)
        for flat, some in joined:
            for tensor, part in zip(some, flat.split([t.numel() for t in some]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def gather(self, values: Tensor) -> list[Tensor]:
        """Return the workers' tensors, which have one shape, by rank.

        Raises:
            CommunicationError: the group broke.
        """
        rows = [torch.empty_like(values) for _ in range(dist.get_world_size(self.group))]
        work = _started(lambda: dist.all_gather(rows, values, group=self.group, async_op=True))
        self.breaker.wait(work, on_host=not values.is_cuda)
        return rows

    def agree(self, facts: Mapping[str, object], *, device: torch.device) -> None:
        """Compare named facts over the workers.

        Raises:
            StateError: on every worker, naming what differs.
            CommunicationError: the group broke.
        """
        own = torch.tensor([digest_of(value) for value in facts.values()], device=device)
        gathered = self.gather(own)
        same = (torch.stack(gathered) == gathered[0]).all(0).tolist()
        differing = [name for name, is_same in zip(facts, same, strict=True) if not is_same]
        if differing:
            shown = ", ".join(f"{name}={facts[name]!r}" for name in differing)
            raise StateError(
                f"the workers differ in what must be the same on all; here {shown}: start all of "
                "them with the same arguments, and load the same saved state on each"
            )


def digest_of(value: object) -> int:
    """Return 64 bits of a hash of a value's `repr`; the same in every process."""
    digest = hashlib.blake2b(repr(value).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _started(start: Callable[[], dist.Work | None]) -> dist.Work | None:
    """Start an operation; the error of a group that is broken already keeps no frames of it."""
    try:
        return start()
    except RuntimeError as error:
        why = str(error)
    raise CommunicationError(_BROKEN.format(why))


def _failure_of(ended: Future[Any]) -> str | None:
    try:
        ended.value()
    except RuntimeError as error:
        return str(error)
    return None


_BROKEN = "the process group broke, {}: another worker failed, or did not call this"
