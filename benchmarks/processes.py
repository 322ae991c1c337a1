"""Processes that a benchmark starts together, and what they need before they run.

Knows nothing of what they do.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess

__all__ = ["free_port", "run_together"]


def free_port() -> int:
    """Return a port of this machine that nobody listens on at present."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_together(processes: Sequence[BaseProcess], *, deadline: float) -> None:
    """Start processes and wait for their end; those that live at the deadline are killed.

    Args:
        processes: not yet started.
        deadline: of `time.monotonic`.
    """
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(deadline - time.monotonic(), 0))
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
