"""What a worker does on SIGTERM, for the length of a block. Knows nothing of what that is."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["on_sigterm"]


@contextmanager
def on_sigterm(action: Callable[[], None]) -> Iterator[None]:
    """Call `action` on SIGTERM for the length of a block, where signals can be handled."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: action())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
