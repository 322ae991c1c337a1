"""An agent's line to the coordinator: facts out, orders in, heartbeats, and torch's rendezvous.

Knows the store and how to find it again after its loss; nothing of what orders mean.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from elastane.launch.link import LOST, Store, connect, parse_address
from elastane.protocol import (
    INBOX,
    NOW,
    AgentHere,
    Message,
    heartbeat_key,
    orders_key,
    parse_order,
)

__all__ = ["AgentLine", "Event", "Orphaned", "Reconnected", "StoreRendezvous"]

_CLOSING_LIMIT_S = 5.0

_RECONNECT_S = 0.25


class Reconnected:
    """The store was lost and is there again, perhaps empty."""


class Orphaned:
    """The store has been gone for too long."""


Event = Message | Reconnected | Orphaned


class AgentLine:
    """An agent's clients of the store and their threads, for the length of a block.

    Args:
        agent: the agent's id.
        address: HOST:PORT of the store.
        heartbeat_s: seconds between heartbeats.
        orphan_limit_s: seconds without a store after which the agent gives up.
        on_event: called, on another thread, when there is an event to take.

    Attributes:
        events: orders, and what happened to the line, for the main loop.
    """

    def __init__(
        self,
        *,
        agent: str,
        address: str,
        heartbeat_s: float,
        orphan_limit_s: float,
        on_event: Callable[[], None],
    ) -> None:
        self.agent = agent
        self.address = address
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._heartbeat_s = heartbeat_s
        self._orphan_limit_s = orphan_limit_s
        self._on_event = on_event
        self._closed = threading.Event()
        self._client: Store | None = None
        self._threads = [
            threading.Thread(target=target, name=f"elastane {name}", daemon=True)
            for name, target in (("heartbeat", self._beat), ("orders", self._receive))
        ]

    def __enter__(self) -> Self:
        self._client = connect(self.address)
        self._client.add(heartbeat_key(self.agent), 1)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        with suppress(*LOST):  # wake the thread that waits for orders
            self.store.queue_push(orders_key(self.agent), "")
        for thread in self._threads:
            thread.join(_CLOSING_LIMIT_S)
        self._client = None

    @property
    def store(self) -> Store:
        """The main loop's own client."""
        if self._client is None:
            self._client = connect(self.address)
        return self._client

    def push(self, fact: Message) -> bool:
        """Tell the coordinator a fact; return whether it arrived at the store."""
        for _ in range(2):  # the client may be one of a store that is gone
            with suppress(*LOST):
                client = self._client or connect(self.address, patience_s=0)
                self._client = client
                client.queue_push(INBOX, fact.to_json())
                client.check([NOW])  # a push has no answer: one to a dead store would be lost
                return True
            self._client = None
        return False

    def register(self, *, slots: int, workers: dict[int, int]) -> None:
        """Say that this agent is there, and which workers live in its slots."""
        host, pid = socket.gethostname(), os.getpid()
        live = {str(slot): worker for slot, worker in workers.items()}
        self.push(AgentHere(agent=self.agent, host=host, slots=slots, pid=pid, workers=live))

    def _beat(self) -> None:
        client: Store | None = None
        while not self._closed.wait(self._heartbeat_s):
            try:
                client = client or connect(self.address, patience_s=0)
                client.add(heartbeat_key(self.agent), 1)
            except LOST:
                client = None

    def _receive(self) -> None:
        client = connect(self.address)
        while not self._closed.is_set():
            try:
                text = client.queue_pop(orders_key(self.agent))
            except LOST:
                found = self._find_again()
                self._tell(Orphaned() if found is None else Reconnected())
                if found is None:
                    return
                client = found
            else:
                if text:
                    self._tell(parse_order(text))

    def _find_again(self) -> Store | None:
        waited_s = 0.0
        while waited_s < self._orphan_limit_s:
            with suppress(*LOST):
                return connect(self.address, patience_s=0)
            if self._closed.wait(_RECONNECT_S):
                return None
            waited_s += _RECONNECT_S
        return None

    def _tell(self, event: Event) -> None:
        self.events.put(event)
        self._on_event()


class StoreRendezvous(RendezvousHandler):
    """torch's rendezvous interface over an agent's line.

    It returns at once: workers start before they meet, and meet by generations. Agents never
    wait for each other.
    """

    def __init__(self, line: AgentLine, *, job: str, register: Callable[[], None]) -> None:
        self._line = line
        self._job = job
        self._register = register
        self._closed = False

    def next_rendezvous(self) -> RendezvousInfo:
        """Say that the agent is there, and return its store."""
        self._register()
        host, port = parse_address(self._line.address)
        info = RendezvousStoreInfo(master_addr=host, master_port=port)
        return RendezvousInfo(self._line.store, 0, 1, info)

    def num_nodes_waiting(self) -> int:
        """Return 0: nobody has to restart because somebody waits."""
        return 0

    def get_backend(self) -> str:
        """Return the name of the backend."""
        return "elastane"

    @property
    def use_agent_store(self) -> bool:
        """Whether workers may use the agent's store: they do."""
        return True

    def get_run_id(self) -> str:
        """Return the job's name."""
        return self._job

    def is_closed(self) -> bool:
        """Return whether the rendezvous was closed."""
        return self._closed

    def set_closed(self) -> None:
        """Close the rendezvous."""
        self._closed = True

    def shutdown(self) -> bool:
        """Close the rendezvous; the line is closed by whoever opened it."""
        self._closed = True
        return True
