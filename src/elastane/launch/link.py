"""The store as agents and coordinator reach it: clients that block for ever, and a server.

Knows addresses and torch's TCPStore; nothing of what is said through it.
"""

from __future__ import annotations

import socket
import time
from datetime import timedelta

import torch.distributed as dist

from elastane.errors import ArgumentError, describe

__all__ = ["JOB_KEY", "LOST", "Store", "connect", "master_key", "parse_address", "serve"]

JOB_KEY = "job"
LOST = (dist.DistError, OSError)  # pyright: ignore[reportPrivateImportUsage]
Store = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]

# A wait that times out prints a warning: nobody here ever wants one to.
_FOR_EVER = timedelta(days=365)
_RETRY_S = 0.05


def master_key(attempt: int) -> str:
    """Return the key of the port of an attempt's own store.

    Scripts without a session meet there: torch uses the same keys in every attempt.
    """
    return f"master/{attempt}"


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT.

    Raises:
        ArgumentError: it is none.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        rule = "must be HOST:PORT, the port from 1 to 65535"
        way_out = "The first launcher shows its address when it starts."
        raise ArgumentError(describe("join", text, rule=rule, way_out=way_out))
    return host.strip("[]"), int(port)


def connect(address: str, *, patience_s: float = 30.0) -> Store:
    """Return a new client of the store at HOST:PORT.

    Raises:
        OSError: nobody listens there in time.
    """
    host, port = parse_address(address)
    _await_listener(host, port, patience_s=patience_s)
    limit = timedelta(seconds=max(patience_s, 1.0))
    client = Store(host, port, is_master=False, timeout=limit, wait_for_workers=False)
    client.set_timeout(_FOR_EVER)
    return client


def serve(port: int, *, patience_s: float = 5.0) -> Store:
    """Open the store's server on a port, or on a free one for 0.

    The port of a launcher that has just died may be taken for a moment.

    Raises:
        OSError: the port stays taken.
    """
    _await_free(port, patience_s=patience_s)
    server = Store("127.0.0.1", port, is_master=True, wait_for_workers=False)
    server.set_timeout(_FOR_EVER)
    return server


# torch tells at length, on standard error, of every try that fails: plain sockets try first.


def _await_listener(host: str, port: int, *, patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while True:
        try:
            socket.create_connection((host, port), timeout=max(patience_s, 0.1)).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_S)
        else:
            return


def _await_free(port: int, *, patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while True:
        try:
            socket.create_server(("", port)).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_S)
        else:
            return
