"""What a worker does on SIGTERM, for the length of a block. Knows nothing of what that is.

The handler also shows that a process is in such a block already.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from elastane.errors import UsageError

__all__ = ["on_sigterm"]


class _Handler:
    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action

    def __call__(self, *_: object) -> None:
        self._action()


@contextmanager
def on_sigterm(action: Callable[[], None]) -> Iterator[None]:
    """Call `action` on SIGTERM for the length of a block, where signals can be handled.

    Raises:
        UsageError: the process is in such a block already: a worker is in one job.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if isinstance(signal.getsignal(signal.SIGTERM), _Handler):
        raise UsageError(_TWO_SESSIONS)
    before = signal.signal(signal.SIGTERM, _Handler(action))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


_TWO_SESSIONS = (
    "a session is open already: under `elastane run` a worker has one, which its place among the "
    "others belongs to. Put the models into one module, add up their losses and pass their "
    "optimizers as a list; sessions that take turns run under torchrun"
)
