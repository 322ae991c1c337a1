"""What the launcher's decisions cost for a number of workers: each kind of change, and none.

Drives a simulated job and takes its processor time; knows nothing of networks.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.scale.simulated import INSTANT_S, SLOTS, SimulatedJob
from elastane.launch.coordinator import TICK_S
from elastane.launch.decider import LOOK_S
from elastane.protocol import Leaving

__all__ = ["CHANGES", "changes", "quiet", "slope"]

Row = dict[str, Any]
_QUIET_TURNS = 12


def _start(job: SimulatedJob) -> None:
    job.register()
    job.turn(job.obey())


def _join(job: SimulatedJob) -> None:
    job.decider.scale(len(job.members) + 1, None)
    job.turn()
    job.turn(job.obey())


def _leave(job: SimulatedJob) -> None:
    job.turn([Leaving(worker=job.members[-1], why="the worker received SIGTERM")])


def _death(job: SimulatedJob) -> None:
    job.turn(job.die(job.members[-1:]))


def _hang(job: SimulatedJob) -> None:
    job.hang(job.members[-1])
    job.turn(seconds=61.0)


def _machine_lost(job: SimulatedJob) -> None:
    job.lose_machine()
    job.turn(seconds=3.1)


def _scale_down(job: SimulatedJob) -> None:
    job.decider.scale(max(len(job.members) // 2, 1), None)
    job.turn()


CHANGES: dict[str, Callable[[SimulatedJob], None]] = {
    "start": _start,
    "a worker joins": _join,
    "a planned leave": _leave,
    "a worker dies": _death,
    "a worker hangs": _hang,
    "a machine is lost": _machine_lost,
    "scale down to half": _scale_down,
}


def changes(workers: int) -> list[Row]:
    """Return what each kind of change costs the launcher, one after the other in one job.

    Args:
        workers: at the start.

    Returns:
        Rows; `decide_ms` and `settle_ms` are processor times until the generation is published
        and from then on until all members have entered; the launcher's store operations and
        bytes are those of the whole change.
    """
    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="elastane-scale-") as folder,
        SimulatedJob(workers, folder=Path(folder)) as job,
    ):
        for name, cause in CHANGES.items():
            if cause is _machine_lost and workers <= SLOTS:
                continue  # nobody would be left
            rows.append({"workers": workers, "change": name, **_cost(job, cause)})
            if name == "start":
                rows.append({"workers": workers, "change": "none", **quiet(job)})
    return rows


def quiet(job: SimulatedJob) -> Row:
    """Return what the launcher does while nothing changes: looks at beats, and decides nothing.

    Beats are told half as often as they are looked at, so every other look finds the old ones.
    `load` is the share of one processor: `LOOK_S` and `TICK_S` say how often it looks and decides.
    """
    looks, acts = [], []
    before = job.decider.now.number
    job.store.start_count()
    for _ in range(_QUIET_TURNS):
        looks.append(_cpu_ms(job, job.turn))
        acts.append(_cpu_ms(job, lambda: job.turn(seconds=INSTANT_S)))
    trips, keys = sum(job.store.round_trips.values()), job.store.keys
    began = time.process_time()
    job.decider.status()
    status_ms = 1e3 * (time.process_time() - began)
    assert job.decider.now.number == before, job.decider.now.reason
    act_ms = statistics.median(acts)
    look_ms = statistics.mean(statistics.median(looks[i::2]) for i in (0, 1)) - act_ms
    return {
        "look_ms": round(look_ms, 4),
        "act_ms": round(act_ms, 4),
        "status_ms": round(status_ms, 4),
        "load": round(1e-3 * (look_ms / LOOK_S + act_ms / TICK_S), 5),
        "store_round_trips": round(trips / _QUIET_TURNS, 2),
        "store_keys": round(keys / _QUIET_TURNS, 2),
        "store_bytes": round(job.store.num_bytes / _QUIET_TURNS),
    }


def slope(sizes: Sequence[int], values: Sequence[float]) -> float:
    """Return the exponent `p` of the best `c N^p`, by least squares of the logarithms.

    Example:
        >>> round(slope([8, 64, 512], [1.0, 8.0, 64.0]), 6)
        1.0
    """
    x, y = [math.log(one) for one in sizes], [math.log(one) for one in values]
    return statistics.linear_regression(x, y).slope


def _cost(job: SimulatedJob, cause: Callable[[SimulatedJob], None]) -> Row:
    job.store.start_count()
    before = job.decider.now.number
    decide_ms = _cpu_ms(job, lambda: cause(job))
    generation = job.decider.now
    assert generation.number == before + 1, f"{before} -> {generation}"
    settle_ms = _cpu_ms(job, job.settle)
    return {
        "decide_ms": round(decide_ms, 4),
        "settle_ms": round(settle_ms, 4),
        "cause": generation.cause,
        "members": len(generation.members),
        "generation_bytes": len(generation.to_json()),
        "store_round_trips": sum(job.store.round_trips.values()),
        "store_keys": job.store.keys,
        "store_bytes": job.store.num_bytes,
    }


def _cpu_ms(job: SimulatedJob, action: Callable[[], object]) -> float:
    """Return the processor time of the launcher's turns in an action."""
    before = job.cpu_s
    action()
    return 1e3 * (job.cpu_s - before)
