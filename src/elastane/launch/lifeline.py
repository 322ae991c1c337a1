"""The other end of what started an agent: an open standard input, and the store's word.

An agent that was started by a launcher ends when its standard input is closed *and* the store says
that it is released. Either alone proves nothing: ssh may die, and the launcher may come back.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from elastane.launch.link import LOST, connect
from elastane.protocol import released_key

__all__ = ["Lifeline"]

_ASK_AGAIN_S = 1.0


class Lifeline:
    """Watches for the end of an agent's line of life, for the length of a block.

    Args:
        agent: the agent's id.
        address: HOST:PORT of the store.
        file: descriptor of the line: standard input.
        on_end: called, on another thread, when the agent is to end.
    """

    def __init__(
        self, *, agent: str, address: str, on_end: Callable[[], None], file: int = 0
    ) -> None:
        self._key = released_key(agent)
        self._address = address
        self._file = file
        self._on_end = on_end
        self._closed = threading.Event()
        self._waker, self._wake_end = os.pipe()
        self._thread = threading.Thread(target=self._watch, name="elastane lifeline", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        os.close(self._wake_end)
        self._thread.join()
        os.close(self._waker)

    def _watch(self) -> None:
        self._wait_for_end_of_input()
        # Asked for now and then, and not waited for: a launcher that is away has no answer yet.
        while not self._closed.is_set():
            if self._is_released():
                self._on_end()
                return
            self._closed.wait(_ASK_AGAIN_S)

    def _wait_for_end_of_input(self) -> None:
        while True:
            readable, _, _ = select.select([self._file, self._waker], [], [])
            if self._waker in readable or not os.read(self._file, 4096):
                return

    def _is_released(self) -> bool:
        with suppress(*LOST):
            return connect(self._address, patience_s=0).check([self._key])
        return False
