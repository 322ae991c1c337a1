"""Newcomers that catch up while the others train: who asks whom, when, and until when.

One worker's side of it, as a member and as a newcomer. What is sent, `streams` knows; who takes
part in the job, the runtime.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Sequence
from queue import SimpleQueue

from elastane import _env, protocol
from elastane._compat import TCPStore
from elastane.elastic.streams import Giver, Open, Taker, open_pair
from elastane.group import Replayable

__all__ = ["LEAST_BYTES", "Following"]

LEAST_BYTES = _env.follow_bytes()
"""Parameters below this are copied as a whole."""

_ANSWER_LIMIT_S = 10.0
_SILENCE_LIMIT_S = 1.0  # the others wait meanwhile
_LOOK_S = 0.02


class Following:
    """Lets one worker follow a member until it enters, and newcomers follow this one.

    Args:
        worker: own id.
        connect: gives a client of the job's store.
    """

    def __init__(self, *, worker: int, connect: Callable[[], TCPStore]) -> None:
        self._worker = worker
        self._connect = connect
        self._asked: SimpleQueue[dict[str, str | int]] = SimpleQueue()
        self._givers: list[Giver] = []
        self._taker: Taker | None = None
        self._replay: Replayable | None = None

    # A newcomer ------------------------------------------------------------------------------

    def catch_up(self, replay: Replayable, *, give_up: Callable[[], bool]) -> None:
        """Ask a member, and follow it until this worker has all that is large.

        Args:
            replay: of the training.
            give_up: whether there is nobody to follow any longer.
        """
        if not replay.is_possible or replay.num_bytes < LEAST_BYTES:
            return
        prefix = f"{protocol.STREAMS}/{self._worker}/{time.time_ns()}"
        try:
            ask = json.dumps({"newcomer": self._worker, "prefix": prefix})
            self._connect().queue_push(protocol.STREAMS, ask)
        except (OSError, RuntimeError):
            return
        self._taker = Taker(replay, connect=self._opens(prefix, rank=1))
        asked = time.monotonic()
        while not self._taker.wait_ready(_LOOK_S):
            is_late = not self._taker.has_begun and time.monotonic() - asked > _ANSWER_LIMIT_S
            if is_late or give_up():
                self._taker.give_up()
                return

    @property
    def turns(self) -> int:
        """Turns behind which this newcomer has come to stand by following; -1 if it has not."""
        return -1 if self._taker is None else self._taker.turns

    @property
    def has_begun(self) -> bool:
        """Whether this newcomer's own state is no longer what it was."""
        return self._taker is not None and self._taker.has_begun

    def finish(self, *, is_broken: Callable[[], bool]) -> int:
        """Wait for the member's last step, and return behind how many turns this newcomer stands.

        Args:
            is_broken: whether the generation that it enters can't hold any longer.

        Returns:
            The number of turns, or -1: it needs the whole state.
        """
        taker = self._taker
        if taker is None or not taker.has_begun:
            return -1
        begun = time.monotonic()
        while not taker.wait_over(_LOOK_S):
            if is_broken() or time.monotonic() - max(taker.heard, begun) > _SILENCE_LIMIT_S:
                taker.give_up()
                return -1
        return taker.turns

    # A member --------------------------------------------------------------------------------

    def look(self, store: TCPStore) -> None:
        """Find out who asks. Called now and then by another thread, of one member only."""
        while store.queue_len(protocol.STREAMS):
            self._asked.put(json.loads(store.queue_pop(protocol.STREAMS, False)))

    def answer(self, replay: Callable[[], Replayable]) -> None:
        """Begin to show the training to those who asked; between two steps."""
        while not self._asked.empty():
            ask = self._asked.get()
            self._replay = self._replay or replay()
            connect = self._opens(str(ask["prefix"]), rank=0)
            self._givers.append(Giver(self._replay, newcomer=int(ask["newcomer"]), connect=connect))
            self._replay.watch(self._show_step)

    def advance(self) -> None:
        """Show the next part, behind a step."""
        for giver in self._givers:
            giver.advance()
        self._forget_those_that_are_over()

    def entering(self, members: Collection[int], *, turns: int) -> None:
        """Tell the newcomers among the members of the next generation that this was all."""
        for giver in self._givers:
            if giver.newcomer in members:
                giver.end(turns)

    def drop(self) -> None:
        """Show nothing any longer: this worker's state is no longer the one that was shown."""
        if self._taker is not None:
            self._taker.give_up()
        for giver in self._givers:
            giver.drop()
        self._forget_those_that_are_over()

    def close(self) -> None:
        """End all streams, and their threads."""
        for stream in (*self._givers, *([] if self._taker is None else [self._taker])):
            stream.close()
        self._forget_those_that_are_over()

    def _show_step(self, buffer_factors: Sequence[float]) -> None:
        for giver in self._givers:
            giver.step(buffer_factors)

    def _forget_those_that_are_over(self) -> None:
        if self._givers:
            self._givers = [one for one in self._givers if not one.is_over]
            if not self._givers and self._replay is not None:
                self._replay.watch(None)
                self._replay = None  # and with it the memory of what was sent

    def _opens(self, prefix: str, *, rank: int) -> Open:
        return lambda: open_pair(self._connect(), prefix=prefix, rank=rank)
