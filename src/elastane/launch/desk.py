"""The coordinator's side of the store: facts in, orders out, generations, beats.

Knows keys and messages; decides nothing.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Self, TypeVar

from elastane.launch.link import Store, connect, master_key, serve
from elastane.protocol import (
    INBOX,
    NOW,
    WORKER_IDS,
    Beat,
    Generation,
    Message,
    beat_key,
    generation_key,
    heartbeat_key,
    orders_key,
    parse_fact,
)

__all__ = ["Desk", "Item"]

Item = Message | Callable[[], None]
_M = TypeVar("_M", bound=Message)
_T = TypeVar("_T")

_MOST_KEYS = 512


class Desk:
    """Clients of the store and the thread that takes facts from it, for the length of a block.

    Args:
        address: HOST:PORT of the store.
        say: shows a message.
        connect: returns a new client of the store.

    Attributes:
        items: facts, and whatever else the coordinator is to do in turn.
    """

    def __init__(
        self,
        address: str,
        *,
        say: Callable[[str], None],
        connect: Callable[[str], Store] = connect,
    ) -> None:
        self._address = address
        self._connect = connect
        self._say = say
        self._present: set[str] = set()
        self._beats: dict[int, tuple[bytes, Beat | None]] = {}
        self._masters: dict[int, Store] = {}
        self._thread = threading.Thread(target=self._receive, name="elastane inbox", daemon=True)
        self.items: queue.SimpleQueue[Item] = queue.SimpleQueue()

    def __enter__(self) -> Self:
        self._store = self._connect(self._address)
        self._inbox = self._connect(self._address)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._store.queue_push(INBOX, "")
        self._thread.join()

    def next_item(self, timeout_s: float) -> Item | None:
        """Return what came in, or `None` after a while."""
        try:
            return self.items.get(timeout=max(timeout_s, 0.0))
        except queue.Empty:
            return None

    def show(self, generation: Generation) -> None:
        """Publish a generation."""
        text = generation.to_json()
        self._store.set(generation_key(generation.number), text)
        self._store.set(NOW, text)

    def order(self, agent: str, message: Message) -> None:
        """Give an agent an order."""
        self._store.queue_push(orders_key(agent), message.to_json())

    def note_workers(self, last: int, *, attempt: int) -> None:
        """Note the last worker id, and open its attempt's own store unless it is open."""
        self._store.set(WORKER_IDS, str(last))
        if attempt not in self._masters:
            self._masters = {attempt: serve(0)}
            self._store.set(master_key(attempt), str(self._masters[attempt].port))

    def heartbeats(self, agents: Iterable[str]) -> dict[str, int]:
        """Return the heartbeats of the agents that have sent any."""
        found = self._read({agent: heartbeat_key(agent) for agent in agents})
        return {agent: int(text) for agent, text in found.items()}

    def beats(self, workers: Iterable[int]) -> dict[int, Beat]:
        """Return the newest beats of the workers that have sent any."""
        found = self._read({worker: beat_key(worker) for worker in workers})
        before, self._beats = self._beats, {}
        for worker, text in found.items():
            told, beat = before.get(worker, (b"", None))
            self._beats[worker] = text, beat if told == text else self._parsed(Beat.from_json, text)
        return {w: beat for w, (_, beat) in self._beats.items() if beat is not None}

    def _read(self, keys: Mapping[_T, str]) -> dict[_T, bytes]:
        """Return the values of the keys that are there, many in one round trip.

        To ask for one that is not there would block until it is.
        """
        new = [key for key in keys.values() if key not in self._present]
        if new and self._store.check(new):
            self._present.update(new)
        else:
            self._present.update(key for key in new if self._store.check([key]))
        there = [(name, key) for name, key in keys.items() if key in self._present]
        texts: list[bytes] = []
        for first in range(0, len(there), _MOST_KEYS):
            some = there[first : first + _MOST_KEYS]
            texts += self._store.multi_get([key for _, key in some])
        return {name: text for (name, _), text in zip(there, texts, strict=True)}

    def _receive(self) -> None:
        while text := self._inbox.queue_pop(INBOX):
            fact = self._parsed(parse_fact, text)
            if fact is not None:
                self.items.put(fact)

    def _parsed(self, parse: Callable[[bytes], _M], text: bytes) -> _M | None:
        """Return a message, or `None` if it is none: that must not end the launcher."""
        try:
            return parse(text)
        except (ValueError, KeyError, TypeError) as error:
            self._say(f"a message was not understood and is passed over: {error}")
            return None
