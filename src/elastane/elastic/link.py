"""A worker's line to its supervisor: facts and beats go out, generations come in.

Finds the store again when the launcher has come back. Knows nothing of groups, models or steps.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from queue import SimpleQueue
from threading import Condition, Event, Thread

from elastane import protocol
from elastane._compat import TCPStore
from elastane._env import ElasticLaunch
from elastane.elastic.history import History
from elastane.elastic.sockets import can_break, shut_connections_to
from elastane.protocol import Beat, Generation, Hello, Message

__all__ = ["Link", "connect"]

_FOR_EVER = timedelta(days=1000)
_ANSWER_LIMIT = timedelta(seconds=10)
_RETRY_S = 0.2


def connect(address: str) -> TCPStore:
    """Return a new client of the store; a client serves one thread and never reconnects.

    Raises:
        OSError: nobody answers at the address.
        RuntimeError: it is no store.
    """
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=_ANSWER_LIMIT.seconds):
        pass  # a client that finds nobody would try again, and complain, until its time is over
    return TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=_ANSWER_LIMIT)


def _answers(store: TCPStore | None) -> bool:
    """Return whether a client's store is still there."""
    try:
        return store is not None and (store.check([protocol.NOW]) or True)
    except RuntimeError:
        return False


class Link:
    """Keeps one worker in touch with the job's store.

    Two threads have clients of their own: the watcher waits for the next generation, and the
    other tells the worker's beat. Neither needs the main thread, which may be blocked.

    Of several processes of one worker only the first tells facts and the worker's beat, and its
    beat stands still when another process of the worker does.

    Args:
        launch: what the launcher said of this worker.
        beat: returns the present beat for a count; called by the beat's thread.
        on_change: called after each new generation, in the watcher's thread.
        on_beat: called with a client of the store after each beat, in the beat's thread.
    """

    def __init__(
        self,
        launch: ElasticLaunch,
        *,
        beat: Callable[[int], Beat],
        on_change: Callable[[], None],
        on_beat: Callable[[TCPStore], None] = lambda _: None,
    ) -> None:
        self._launch = launch
        self._beat = beat
        self._on_change = on_change
        self._on_beat = on_beat
        self._is_silent = launch.group_index > 0
        self._changed = Condition()
        self._history = History()
        self._entered: Generation | None = None
        self._standing: Message | None = None
        self._closing, self._introduced = Event(), Event()
        self._lost_at: float | None = None
        self._client: TCPStore | None = None
        self._spare: TCPStore | None = None
        self._posted: SimpleQueue[Message] = SimpleQueue()

    @property
    def history(self) -> History:
        """All generations that this worker has heard of."""
        return self._history

    @property
    def orphaned(self) -> bool:
        """Whether there has been no launcher for as long as this worker may go on without one."""
        lost_at = self._lost_at
        return lost_at is not None and time.monotonic() - lost_at > self._launch.orphan_limit_s

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Say hello and stay in touch for the length of a block."""
        threads = [
            Thread(target=target, name=f"elastane {name}", daemon=True)
            for name, target in (("watcher", self._watch), ("beat", self._tell_beats))
        ]
        for thread in threads:
            thread.start()
        self._introduced.wait(_ANSWER_LIMIT.seconds)  # hello comes before all other facts
        try:
            yield
        finally:
            self._closing.set()
            threads[1].join()
            # A thread that wakes up in C++ while the interpreter ends would abort the process.
            shut_connections_to(int(self._launch.store.rpartition(":")[2]))
            threads[0].join(None if can_break() else 0)

    def tell(self, message: Message) -> None:
        """Tell a fact that stands until this worker enters a generation: also to a new launcher."""
        self._standing = message
        self.send(message)

    def entered(self, generation: Generation, *, told: Message) -> None:
        """Tell that this worker takes part in a generation."""
        self._entered, self._standing = generation, None
        self.send(told)

    def send(self, message: Message) -> None:
        """Tell a fact; without a store it is lost, and hello will tell what matters."""
        if self._is_silent:
            return
        with suppress(OSError, RuntimeError):
            store = self.store()
            store.queue_push(protocol.INBOX, message.to_json())
            store.check([protocol.NOW])  # a push has no answer: into a dead store it "succeeds"

    def post(self, message: Message) -> None:
        """Have the beat's thread tell a fact; any thread may call it."""
        self._posted.put(message)

    def store(self) -> TCPStore:
        """Return the main thread's client of the store, for short questions.

        Raises:
            OSError, RuntimeError: there is no store at present.
        """
        self._client = self._client if _answers(self._client) else connect(self._launch.store)
        assert self._client is not None
        return self._client

    @contextmanager
    def lending(self) -> Iterator[Callable[[], TCPStore]]:
        """Lend clients to open a group with, one a call; who calls may meet OSError, RuntimeError.

        One lies ready: to connect can take seconds where names are looked up in vain. The last one
        is taken back at the end of the block. After an error it is not: a thread that was left
        alone may be caught in it, and keep it locked.
        """
        lent: list[TCPStore] = []

        def lend() -> TCPStore:
            spare, self._spare = self._spare, None
            lent.append(spare if spare and _answers(spare) else connect(self._launch.store))
            return lent[-1]

        yield lend
        if lent:
            self._spare = lent[-1]

    def wait_newer(self, than: int, *, timeout_s: float) -> Generation | None:
        """Return the newest generation once it is newer than `than`; `None` when time is up."""
        with self._changed:
            newer = self._changed.wait_for(
                lambda: self._history.newest.number > than, timeout=timeout_s
            )
            return self._history.newest if newer else None

    def _hello(self) -> Hello:
        launch, entered = self._launch, self._entered
        return Hello(
            worker=launch.worker,
            agent=launch.agent,
            slot=launch.slot,
            pid=os.getpid(),
            host=socket.gethostname(),
            generation={} if entered is None else asdict(entered),
        )

    def _watch(self) -> None:
        while not self._closing.is_set():
            with suppress(OSError, RuntimeError):
                store = connect(self._launch.store)
                self._introduce(store)
                self._lost_at = None
                store.set_timeout(_FOR_EVER)
                self._follow(store)
            if self._lost_at is None:
                self._lost_at = time.monotonic()
            self._closing.wait(_RETRY_S)

    def _introduce(self, store: TCPStore) -> None:
        """Say hello, also when that was said before: a launcher may have died with it."""
        for fact in () if self._is_silent else (self._hello(), self._standing):
            if fact is not None:
                store.queue_push(protocol.INBOX, fact.to_json())
        self._introduced.set()

    def _follow(self, store: TCPStore) -> None:
        """Take every generation as it comes, until the store is gone."""
        self._take(store.get(protocol.NOW))  # numbers go on from those of an earlier launcher
        while not self._closing.is_set():
            key = protocol.generation_key(self._history.newest.number + 1)
            store.wait([key])
            self._take(store.get(key))

    def _take(self, text: bytes) -> None:
        before = self._history
        with self._changed:
            self._history = before.after(Generation.from_json(text))
            self._changed.notify_all()
        if self._history is not before:
            self._on_change()

    def _tell_beats(self) -> None:
        store: TCPStore | None = None
        count, ticks = 0, _Ticks(self._launch)
        while not self._closing.wait(self._launch.beat_interval_s):
            try:
                store = store or connect(self._launch.store)
                count += ticks.go_on(store)
                beat = self._beat(count)
                if not self._is_silent:
                    store.set(protocol.beat_key(self._launch.worker), beat.to_json())
                self._spare = self._spare or connect(self._launch.store)
                self._on_beat(store)
                while not self._posted.empty():
                    store.queue_push(protocol.INBOX, self._posted.get().to_json())
            except (OSError, RuntimeError):
                store = self._spare = None


class _Ticks:
    """Whether all processes of a worker are awake: each counts in the store, the first one looks.

    Args:
        launch: what the launcher said of this worker.
    """

    def __init__(self, launch: ElasticLaunch) -> None:
        self._launch = launch
        self._own = 0
        self._seen: dict[int, bytes] = {}

    def go_on(self, store: TCPStore) -> bool:
        """Count; return whether the other processes have counted since this last was so."""
        self._own += 1
        if self._launch.group_index > 0:
            store.set(self._key(self._launch.group_index), str(self._own))
            return True
        keys = {index: self._key(index) for index in range(1, self._launch.group_size)}
        now = {index: store.get(key) for index, key in keys.items() if store.check([key])}
        if any(now.get(index) == count for index, count in self._seen.items()):
            return False
        self._seen = now
        return True

    def _key(self, index: int) -> str:
        return f"{protocol.beat_key(self._launch.worker)}/{index}"
