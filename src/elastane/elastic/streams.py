"""How a newcomer gets the state while the others train: a stream of parts and steps from a member.

Knows messages and threads; what a part or a step is, `elastane.replay` knows, and who comes and
goes, the runtime.

    member                                                     newcomer
    a part of the parameters, with their optimizer state  -->  has that part, from now on
    each step: the gradients of what the newcomer has     -->  makes the step
    after the last part: sums of the bits of some parts   -->  compares; after the last it is ready
    when both enter a generation: the turns behind it     -->  has all but what is small

    The newcomer takes the state as a whole if anything goes wrong on the way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist

from elastane._compat import PrefixStore, TCPStore
from elastane.elastic.sockets import GroupSockets
from elastane.elastic.transfer import receive_state, send_state
from elastane.errors import CommunicationError, StateError
from elastane.group import Replayable

__all__ = ["Giver", "Open", "Taker", "open_pair"]

MOST_WAITING = 64
"""Messages that may wait for a newcomer before it is given up: it must not eat up the memory."""

_LIMIT = timedelta(seconds=20)
_FEW, _CHECKS = 2, 4
_CLOSING_LIMIT_S = 1.0

Open = Callable[[], dist.ProcessGroup]


def open_pair(store: TCPStore, *, prefix: str, rank: int) -> dist.ProcessGroup:
    """Open a group of a member (rank 0) and a newcomer (rank 1), beside all others."""
    keys = PrefixStore(prefix, store)
    keys.set_timeout(_LIMIT)
    group: Any = dist.ProcessGroupGloo(keys, rank, 2, _LIMIT)
    return group


def _started(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, name="elastane stream", daemon=True)
    thread.start()
    return thread


class Giver:
    """A member's end of a stream.

    Args:
        replay: of the training.
        newcomer: id of the worker that is to have it.
        connect: opens the group of the two; called in the stream's thread.
    """

    def __init__(self, replay: Replayable, *, newcomer: int, connect: Open) -> None:
        self.newcomer = newcomer
        self._replay = replay
        self._connect, self._sockets = connect, GroupSockets()
        self._parts = replay.parts()
        self._checked = _joined(self._parts, _CHECKS)
        self._next = 0
        self._count = 0
        self._waiting: SimpleQueue[Future[dict[str, Any]] | None] = SimpleQueue()
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="elastane copies")
        self._copying: Future[dict[str, Any]] | None = None
        self._connected, self._over = threading.Event(), threading.Event()
        self._thread = _started(self._work)

    @property
    def is_over(self) -> bool:
        """Whether nothing more is sent."""
        return self._over.is_set()

    def step(self, buffer_factors: Sequence[float]) -> None:
        """Show the step that is about to be made."""
        if self._copying is not None:
            wait([self._copying])
            self._copying = None
        if self._count and not self.is_over:
            self._put(_done({"kind": "step", **self._replay.step(self._count, buffer_factors)}))

    def advance(self) -> None:
        """Show a part, or sums of some, behind a step; the next step waits until they are read.

        Nothing changes it before: it is read while the next gradients are computed.
        """
        if not self._connected.is_set() or self.is_over:
            return
        number = self._next - len(self._parts)
        if number < 0:
            part = self._parts[self._next]
            self._copying = self._copier.submit(self._part, part)
            self._count = part.stop
        else:
            part, is_last = (
                self._checked[number % len(self._checked)],
                number >= len(self._checked) - 1,
            )
            self._copying = self._copier.submit(self._sums, part, is_last=is_last)
        self._put(self._copying)
        self._next += 1

    def _part(self, part: range) -> dict[str, Any]:
        return {"kind": "part", **self._replay.part(part)}

    def _sums(self, part: range, *, is_last: bool) -> dict[str, Any]:
        numbers = [part.start, part.stop]
        sums = self._replay.sums(part)
        return {"kind": "sums", "numbers": numbers, "sums": sums, "is_last": is_last}

    def end(self, turns: int) -> None:
        """Say that the newcomer stands where this member does, behind so many turns."""
        self._put(_done({"kind": "end", "turns": turns}))
        self._waiting.put(None)

    def drop(self) -> None:
        """Send nothing more."""
        self._over.set()
        self._waiting.put(None)

    def close(self) -> None:
        """Send nothing more, and end the thread: where it waits it would outlive the process."""
        self.drop()
        self._copier.shutdown(wait=False)
        self._sockets.shut()
        self._thread.join(_CLOSING_LIMIT_S)

    def _put(self, message: Future[dict[str, Any]]) -> None:
        if self._waiting.qsize() > MOST_WAITING:
            self.drop()
        else:
            self._waiting.put(message)

    def _work(self) -> None:
        try:
            with self._sockets.opening():
                group = self._connect()
            self._connected.set()
            while (future := self._waiting.get()) is not None and not self.is_over:
                message = future.result()
                send_state({**message, "waiting": self._waiting.qsize()}, to=1, group=group)
                if message["kind"] == "step":
                    self._replay.have_back(message)
        except (CommunicationError, OSError, RuntimeError):
            pass  # the newcomer is gone, or takes the state as a whole
        finally:
            self._over.set()


def _joined(parts: Sequence[range], most: int) -> list[range]:
    """Return ranges that follow one another, joined until there are so many at most."""
    each = -(-len(parts) // most)
    some = [parts[begin : begin + each] for begin in range(0, len(parts), each)]
    return [range(one[0].start, one[-1].stop) for one in some]


def _done(message: dict[str, Any]) -> Future[dict[str, Any]]:
    future: Future[dict[str, Any]] = Future()
    future.set_result(message)
    return future


class Taker:
    """A newcomer's end of a stream.

    Args:
        replay: of the training that follows.
        connect: opens the group of the two; called in the stream's thread.

    Attributes:
        has_begun: whether anything has come.
        heard: when the last message came.
        turns: behind which the stream has ended; -1 until then, or if it broke.
        failure: why it broke.
    """

    def __init__(self, replay: Replayable, *, connect: Open) -> None:
        self._replay = replay
        self._connect, self._sockets = connect, GroupSockets()
        self._ready, self._over = threading.Event(), threading.Event()
        self._lock, self._given_up = threading.Lock(), False
        self.has_begun = False
        self.heard = time.monotonic()
        self.turns = -1
        self.failure: str | None = None
        self._thread = _started(self._work)

    def wait_ready(self, timeout_s: float | None = None) -> bool:
        """Wait until all is there but what comes from now on, or the stream is over."""
        return self._ready.wait(timeout_s)

    def wait_over(self, timeout_s: float | None = None) -> bool:
        """Wait until the stream is over: `turns` and `failure` say how it ended."""
        return self._over.wait(timeout_s)

    def give_up(self) -> None:
        """Leave the training alone from now on."""
        with self._lock:
            self._given_up = True
        self._ready.set()
        self._over.set()

    def close(self) -> None:
        """Leave the training alone, and end the thread: where it waits it would outlive all."""
        self.give_up()
        self._sockets.shut()
        self._thread.join(_CLOSING_LIMIT_S)

    def _work(self) -> None:
        try:
            with self._sockets.opening():
                group = self._connect()
            while self.turns < 0:
                message = receive_state(source=0, group=group)
                with self._lock:
                    if self._given_up:
                        raise CommunicationError("this worker takes the state as a whole")
                    self._take(message)
        except Exception as error:  # whatever it is, the state comes as a whole
            self.failure = str(error)
        finally:
            self._ready.set()
            self._over.set()

    def _take(self, message: dict[str, Any]) -> None:
        self.has_begun, self.heard = True, time.monotonic()
        if message["kind"] == "part":
            self._replay.take_part(message)
        elif message["kind"] == "step":
            self._replay.take_step(message)
        elif message["kind"] == "sums":
            self._compare(message)
        else:
            self.turns = message["turns"]

    def _compare(self, message: dict[str, Any]) -> None:
        start, stop = message["numbers"]
        if self._replay.sums(range(start, stop)) != message["sums"]:
            raise StateError(
                f"parameters {start} to {stop - 1} differ from those of the worker that is "
                "followed: something other than the optimizer's step changes them"
            )
        if message["is_last"] and message["waiting"] <= _FEW:
            self._ready.set()
