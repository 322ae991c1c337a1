"""Answers lines on a listening socket, for many clients on one thread.

Knows sockets and lines of bytes; nothing of what they mean.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

__all__ = ["MAX_LINE_BYTES", "LineServer"]

MAX_LINE_BYTES = 65536

_BREATH_S = 0.1


@dataclass(slots=True, kw_only=True, eq=False)
class _Client:
    socket: socket.socket
    deadline: float
    heard: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)
    is_last: bool = False


class LineServer:
    """Gives each line of each client to a function and sends back what it returns.

    A client is cut off if it takes too long for a line, or to read an answer; after a line that is
    too long, the start of which is answered; and when it closes, also in the middle of a line.

    Args:
        listener: A listening socket; closed at the end.
        answer: Called with one line at a time, on the thread of `run`. Must not raise.
        idle_limit_s: Seconds that a client may take.
    """

    def __init__(
        self, listener: socket.socket, *, answer: Callable[[bytes], bytes], idle_limit_s: float
    ) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._answer = answer
        self._idle_limit_s = idle_limit_s
        self._clients: set[_Client] = set()
        self._bell, self._bell_end = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._selector.register(listener, selectors.EVENT_READ)

    def run(self) -> None:
        """Serve until `end` is called, then close everything."""
        try:
            while self._serve():
                self._cut_off()
        finally:
            for client in tuple(self._clients):
                self._close(client)
            self._selector.close()
            self._listener.close()
            self._bell.close()

    def end(self) -> None:
        """Let `run` return; may be called on any thread, and more than once."""
        self._bell_end.close()

    def _serve(self) -> bool:
        """Wait for something to happen and attend to it; return whether to go on."""
        deadlines = [client.deadline for client in self._clients]
        wait_s = max(min(deadlines) - time.monotonic(), 0.0) if deadlines else None
        for key, _ in self._selector.select(wait_s):
            if key.fileobj is self._bell:
                return False
            if key.fileobj is self._listener:
                self._accept()
            else:
                self._attend(key.data)
        return True

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:
            time.sleep(_BREATH_S)  # no descriptor is free: we would be called again at once
            return
        accepted.setblocking(False)
        client = _Client(socket=accepted, deadline=self._new_deadline())
        self._clients.add(client)
        self._selector.register(accepted, selectors.EVENT_READ, client)

    def _attend(self, client: _Client) -> None:
        try:
            if not client.unsent:
                self._listen_to(client)
            self._send(client)
        except OSError:
            client.is_last, client.unsent = True, bytearray()
        if client.is_last and not client.unsent:
            self._close(client)

    def _listen_to(self, client: _Client) -> None:
        received = client.socket.recv(MAX_LINE_BYTES)
        client.is_last = not received
        *lines, rest = (client.heard + received).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            lines.append(rest)
            client.is_last = True
        client.heard = rest
        for line in lines:
            client.unsent += self._answer(bytes(line))
            client.deadline = self._new_deadline()

    def _send(self, client: _Client) -> None:
        """Send what the client takes; it is not listened to until it has taken everything."""
        if not client.unsent:
            return
        with suppress(BlockingIOError):
            del client.unsent[: client.socket.send(client.unsent)]
        if not client.unsent:
            client.deadline = self._new_deadline()
        interest = selectors.EVENT_WRITE if client.unsent else selectors.EVENT_READ
        self._selector.modify(client.socket, interest, client)

    def _cut_off(self) -> None:
        now = time.monotonic()
        for client in [one for one in self._clients if one.deadline <= now]:
            self._close(client)

    def _close(self, client: _Client) -> None:
        self._clients.remove(client)
        self._selector.unregister(client.socket)
        client.socket.close()

    def _new_deadline(self) -> float:
        return time.monotonic() + self._idle_limit_s
