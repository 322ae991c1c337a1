"""What the changes come to: one JSON object with goals, and a table for people. Pure but for that.

Knows changes and goals; nothing of how they were made.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table

from benchmarks.output import versions
from benchmarks.resize.measure import Change, summarize

__all__ = ["KINDS", "draw", "goals_of", "summary"]

KINDS = ("join", "leave", "kill", "kill_rank0", "kill_two", "hang", "refill")
_GOALS_MS = {
    "1M": {"join": 100, "leave": 100, "kill": 250, "kill_rank0": 250, "kill_two": 250, "hang": 300},
    "10M": {
        "join": 400,
        "leave": 400,
        "kill": 400,
        "kill_rank0": 400,
        "kill_two": 400,
        "hang": 300,
    },
}


def summary(
    changes: Mapping[str, Sequence[Change]],
    *,
    stalled: Mapping[str, int],
    torchrun: Mapping[str, float | None] | None,
) -> dict[str, Any]:
    """Return the benchmark's result as one JSON object.

    Args:
        changes: by the name of the model's size.
        stalled: by size, how many changes never came to their end; they are in no median.
        torchrun: what its restarts took in seconds, if that was asked for.
    """
    everything = [change for rows in changes.values() for change in rows]
    sizes = {
        size: {**_size_summary(rows), "stalled": stalled[size]} for size, rows in changes.items()
    }
    return {
        "benchmark": "resize",
        "sizes": sizes,
        "ready_to_first_step_ms": _ready(everything),
        "pids_unchanged": all(change.pids_unchanged for change in everything),
        "torchrun": torchrun,
        "goals": goals_of(sizes),
        "versions": versions("numpy"),
        "processors": os.cpu_count(),
        "load_average": round(os.getloadavg()[1], 1),
    }


def goals_of(sizes: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return each goal with what was measured and whether it is met; sizes without goals have none.

    Args:
        sizes: summaries by the name of the size.
    """
    goals: list[dict[str, Any]] = []
    for size, limits in _GOALS_MS.items():
        for kind, limit in limits.items():
            row = sizes.get(size, {}).get(kind)
            if row is not None:
                goals.append(_goal(f"{size} {kind} median_ms", row["median_ms"], limit))
        if "leave" in sizes.get(size, {}):
            lost = sizes[size]["leave"]["discarded_steps"]
            goals.append(_goal(f"{size} leave discarded_steps", lost, 0))
            goals.append(_goal(f"{size} stalled", sizes[size]["stalled"], 0))
    return goals


def draw(result: Mapping[str, Any]) -> Table:
    """Return the result as a table."""
    table = Table(title="Longest pause of a survivor beyond its usual step")
    for name in ("model", "change"):
        table.add_column(name)
    for name in ("n", "median ms", "max ms", "beyond next steps ms", "steps made again", "goal"):
        table.add_column(name, justify="right")
    if result["torchrun"] is not None:
        table.caption = "torchrun restarts: join {join_s} s, kill {kill_s} s".format(
            **result["torchrun"]
        )
    goals = {goal["goal"]: goal for goal in result["goals"]}
    for size, rows in result["sizes"].items():
        for kind in (*KINDS, "undisturbed"):
            row = rows[kind]
            goal = goals.get(f"{size} {kind} median_ms")
            table.add_row(
                size,
                kind,
                str(row["n"]),
                *(f"{row[name]}" for name in ("median_ms", "max_ms")),
                str(row.get("median_beyond_next_ms", "-")),
                str(row.get("discarded_steps", "-")),
                "-" if goal is None else f"{goal['limit']} {'met' if goal['met'] else 'NOT MET'}",
            )
    return table


def _size_summary(changes: Sequence[Change]) -> dict[str, Any]:
    by_kind = {kind: [c for c in changes if c.kind == kind] for kind in KINDS}
    summaries: dict[str, Any] = {kind: summarize(rows) for kind, rows in by_kind.items()}
    summaries["hang"] |= {
        f"raw_{k}": v for k, v in _spread(c.raw_ms for c in by_kind["hang"]).items()
    }
    return {
        **summaries,
        "undisturbed": {"n": len(changes), **_spread(c.undisturbed_ms for c in changes)},
        "median_step_ms": _steps(changes),
        "ready_to_first_step_ms": _ready(changes),
    }


def _steps(changes: Sequence[Change]) -> dict[str, float]:
    """Return the median step by the number of workers after a change."""
    sizes = sorted({change.workers for change in changes})
    return {
        str(size): round(
            statistics.median(c.median_step_ms for c in changes if c.workers == size), 1
        )
        for size in sizes
    }


def _ready(changes: Iterable[Change]) -> dict[str, float | None]:
    spread = _spread(ms for change in changes for ms in change.ready_to_first_step_ms)
    return {"median": spread["median_ms"], "max": spread["max_ms"]}


def _spread(values: Iterable[float]) -> dict[str, float | None]:
    known = list(values)
    return {
        "median_ms": round(statistics.median(known), 1) if known else None,
        "max_ms": round(max(known), 1) if known else None,
    }


def _goal(name: str, value: float | None, limit: float) -> dict[str, Any]:
    return {
        "goal": name,
        "limit": limit,
        "value": value,
        "met": value is not None and value <= limit,
    }
