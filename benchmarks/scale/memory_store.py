"""A job's store in this process, which counts what the launcher asks of it.

Knows keys and values; nothing of what they mean.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from queue import SimpleQueue

__all__ = ["MemoryStore"]


class MemoryStore:
    """The part of torch's store that a launcher's desk uses.

    Attributes:
        values: by key; who plays the workers writes here, uncounted.
        queues: by key.
        round_trips: of the desk, by kind; a push counts as one.
        keys: that the desk read or wrote in them.
        num_bytes: of the values in them.
    """

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.queues: dict[str, SimpleQueue[bytes]] = defaultdict(SimpleQueue)
        self.start_count()

    def start_count(self) -> None:
        """Count from zero."""
        self.round_trips: Counter[str] = Counter()
        self.keys = self.num_bytes = 0

    def set(self, key: str, value: str) -> None:
        """Set a value."""
        self.values[key] = self._counted("set", [value.encode()])[0]

    def get(self, key: str) -> bytes:
        """Return a value that is there."""
        return self._counted("get", [self.values[key]])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return values that are there."""
        return self._counted("multi_get", [self.values[key] for key in keys])

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return it."""
        total = int(self.values.get(key, b"0")) + amount
        self.values[key] = self._counted("add", [str(total).encode()])[0]
        return total

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are there."""
        self._counted("check", [b""] * len(keys))
        return all(key in self.values for key in keys)

    def queue_push(self, key: str, value: str) -> None:
        """Put a value at the end of a queue."""
        self.queues[key].put(self._counted("queue_push", [value.encode()])[0])

    def queue_pop(self, key: str) -> bytes:
        """Take the first value of a queue, or wait for one."""
        return self._counted("queue_pop", [self.queues[key].get()])[0]

    def _counted(self, kind: str, values: list[bytes]) -> list[bytes]:
        self.round_trips[kind] += 1
        self.keys += len(values)
        self.num_bytes += sum(map(len, values))
        return values
