"""What the job's store costs on this machine: a round trip, and its one thread's time for each.

The store runs in a process of its own, so that its processor time can be told from its clients'.
Knows nothing of groups or decisions.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any

from benchmarks.scale.forked import CONTEXT
from elastane.launch.link import Store, connect, serve
from elastane.protocol import Beat

__all__ = ["StoreProcess", "measure_store", "store_process"]

CLIENTS = 50
_CLIENT_PROCESSES = 2
_MANY_KEYS = 512
_LIMIT_S, _WAITING_S = 60.0, 0.2
_BEAT = Beat(count=1000, generation=10, met=10, step=1000, arrived=1001).to_json()

Operation = Callable[[Store, int], object]


class StoreProcess:
    """A store's server in another process.

    Attributes:
        address: HOST:PORT.
    """

    def __init__(self, line: Connection) -> None:
        self._line = line
        self.address = f"127.0.0.1:{line.recv()}"

    def cpu_s(self) -> float:
        """Return the server's processor seconds so far."""
        self._line.send("cpu")
        return self._line.recv()


@contextmanager
def store_process() -> Iterator[StoreProcess]:
    """Have a store for the length of a block."""
    own, its = CONTEXT.Pipe()
    process = CONTEXT.Process(target=_serve, args=(its,), daemon=True)
    process.start()
    try:
        yield StoreProcess(own)
    finally:
        own.send("end")
        process.join(_LIMIT_S)


def measure_store(*, rounds: int, operations: int) -> dict[str, Any]:
    """Return the store's costs in microseconds, medians over rounds.

    Args:
        rounds: in each of which every kind is measured once.
        operations: of a client in a round.

    Returns:
        `round_trip_us` of one client alone, by kind; `service_us`, the server's processor time
        for an operation of `CLIENTS` clients at once, by kind, and for a key of many that are
        read in one; `wake`, its share for each of the clients that wait for a key.
    """
    alone: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    served: dict[str, list[float]] = {kind: [] for kind in (*_KINDS, "multi_get key", "wake")}
    with store_process() as store, _many_clients(store) as clients:
        client = connect(store.address)
        _fill(client)
        for number in range(rounds):
            for kind, operation in _KINDS.items():
                alone[kind].append(_alone(client, operation, operations))
                served[kind].append(_served(store, clients, kind, operations))
            served["multi_get key"].append(_many_keys(store, client, operations))
            served["wake"].append(_wake(store, client, clients, number))
    return {
        "clients": CLIENTS,
        "round_trip_us": _medians(alone),
        "service_us": _medians(served),
    }


def _set(client: Store, number: int) -> None:
    client.set(f"beat/{number % _MANY_KEYS}", _BEAT)


def _get(client: Store, number: int) -> None:
    client.get(f"beat/{number % _MANY_KEYS}")


def _add(client: Store, _number: int) -> None:
    client.add("count", 1)


def _wait(client: Store, number: int) -> None:
    client.wait([f"beat/{number % _MANY_KEYS}"])


_KINDS: Mapping[str, Operation] = {"set": _set, "get": _get, "add": _add, "wait": _wait}


def _fill(client: Store) -> None:
    for number in range(_MANY_KEYS):
        _set(client, number)


def _drain(client: Store) -> None:
    """Wait until the server has done all: to set has no answer."""
    client.check(["beat/0"])


def _alone(client: Store, operation: Operation, operations: int) -> float:
    began = time.perf_counter()
    for number in range(operations):
        operation(client, number)
    _drain(client)
    return 1e6 * (time.perf_counter() - began) / operations


class _Clients:
    """Many clients, in processes of their own.

    Args:
        lines: to the processes.
    """

    def __init__(self, lines: Sequence[Connection]) -> None:
        self._lines = lines

    def tell(self, kind: str, number: int) -> None:
        """Have all of them do something."""
        for line in self._lines:
            line.send((kind, number))

    def hear(self) -> None:
        """Wait until all have done it."""
        for line in self._lines:
            line.recv()


@contextmanager
def _many_clients(store: StoreProcess) -> Iterator[_Clients]:
    pipes = [CONTEXT.Pipe() for _ in range(_CLIENT_PROCESSES)]
    processes = [
        CONTEXT.Process(target=_ask, args=(store.address, its), daemon=True) for _, its in pipes
    ]
    for process in processes:
        process.start()
    clients = _Clients([own for own, _ in pipes])
    clients.hear()
    try:
        yield clients
    finally:
        clients.tell("end", 0)
        for process in processes:
            process.join(_LIMIT_S)


def _ask(address: str, line: Connection) -> None:
    """Be some of the clients, each with a thread of its own when it asks."""
    clients = [connect(address) for _ in range(CLIENTS // _CLIENT_PROCESSES)]
    line.send("ready")
    while (order := line.recv())[0] != "end":
        threads = [Thread(target=_repeat, args=(one, *order)) for one in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        line.send("done")


def _repeat(client: Store, kind: str, number: int) -> None:
    if kind == "wake":
        client.wait([_awaited(number)])
        return
    for turn in range(number):
        _KINDS[kind](client, turn)
    _drain(client)


def _served(store: StoreProcess, clients: _Clients, kind: str, operations: int) -> float:
    """Return the server's time for an operation while many clients ask at once."""
    before = store.cpu_s()
    clients.tell(kind, operations)
    clients.hear()
    return 1e6 * (store.cpu_s() - before) / (CLIENTS * operations)


def _wake(store: StoreProcess, client: Store, clients: _Clients, number: int) -> float:
    """Return the server's time for each client that waits for one key until it is there."""
    before = store.cpu_s()
    clients.tell("wake", number)
    time.sleep(_WAITING_S)
    client.set(_awaited(number), "now")
    clients.hear()
    return 1e6 * (store.cpu_s() - before) / CLIENTS


def _awaited(number: int) -> str:
    return f"awaited/{number}"


def _many_keys(store: StoreProcess, client: Store, operations: int) -> float:
    keys = [f"beat/{number}" for number in range(_MANY_KEYS)]
    times = max(operations // 10, 3)
    before = store.cpu_s()
    for _ in range(times):
        client.multi_get(keys)
    return 1e6 * (store.cpu_s() - before) / (times * _MANY_KEYS)


def _medians(values: Mapping[str, list[float]]) -> dict[str, float]:
    return {kind: round(statistics.median(some), 2) for kind, some in values.items()}


def _serve(line: Connection) -> None:
    """Be the store, and tell its processor time when asked."""
    server = serve(0)
    line.send(server.port)
    while line.recv() == "cpu":
        line.send(time.process_time())
