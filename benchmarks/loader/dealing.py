"""What it costs to know which samples a worker's part of a batch is, however long the epoch.

Knows the order of the samples; nothing of datasets.
"""

from __future__ import annotations

import random
import statistics
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

from elastane import order

__all__ = ["dealing_row"]

_WARM = 3


def dealing_row(epoch_samples: int, *, batch: int, workers: int, rounds: int) -> dict[str, Any]:
    """Return the time to deal the middle worker's part of batches at random places, and its memory.

    Args:
        epoch_samples: of an epoch, at least the batch.
        batch: samples over all workers.
        workers: whose part is dealt.
        rounds: batches that count.
    """
    draw = random.Random(0)

    def deal() -> None:
        position = draw.randrange(100) * epoch_samples + draw.randrange(epoch_samples - batch + 1)
        start, stop = order.split(position, position + batch, parts=workers, part=workers // 2)
        order.stream_indices(start, stop, num_samples=epoch_samples, seed=0)

    for _ in range(_WARM):
        deal()
    times_s = [_seconds(deal) for _ in range(rounds)]
    median_s = statistics.median(times_s)
    q1_s, _, q3_s = statistics.quantiles(times_s, n=4, method="inclusive")
    return {
        "epoch_samples": epoch_samples,
        "batch": batch,
        "workers": workers,
        "deal_ms": round(1e3 * median_s, 4),
        "deal_ms_q1": round(1e3 * q1_s, 4),
        "deal_ms_q3": round(1e3 * q3_s, 4),
        "ns_per_sample": round(1e9 * median_s / (batch // workers), 2),
        "peak_bytes": _peak_bytes(deal),
        "rounds": rounds,
    }


def _seconds(action: Callable[[], None]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def _peak_bytes(action: Callable[[], None]) -> int:
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
