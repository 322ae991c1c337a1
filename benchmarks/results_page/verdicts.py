"""What the tables show of what they must show: each claim judged from the rows.

Pure: knows rows; nothing of pages, pictures or how the rows came about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "ScaleVerdict",
    "beats",
    "default_against_jump",
    "holds",
    "judge_scales",
    "largest_scale",
]

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleVerdict:
    """What a task's rows say of AdaScale.

    Attributes:
        task: its name.
        holds_at: scales at which its metric is within 2 sd of that at S = 1, or better.
        fails_at: those at which it is not.
        largest: scale that the rules are compared at; `None` where they have none in common.
        linear_worse: whether linear scaling with warm-up is worse there, or diverged.
    """

    task: str
    holds_at: tuple[int, ...]
    fails_at: tuple[int, ...]
    largest: int | None
    linear_worse: bool | None


def judge_scales(rows: Sequence[Row]) -> list[ScaleVerdict]:
    """Return a verdict for each task with a metric and its spread at S = 1."""
    verdicts: list[ScaleVerdict] = []
    for task in dict.fromkeys(row["task"] for row in rows):
        own = {
            (row["rule"], row["scale"]): row
            for row in rows
            if row["task"] == task and isinstance(row["scale"], int)
        }
        base = own.get(("adascale", 1))
        if base is not None and base["metric_sd"] is not None:
            verdicts.append(_judge(task, own, base=base))
    return verdicts


def _judge(task: str, own: Mapping[tuple[str, int], Row], *, base: Row) -> ScaleVerdict:
    scales = sorted(scale for rule, scale in own if rule == "adascale" and scale > 1)
    held = [scale for scale in scales if holds(own["adascale", scale], base=base)]
    shared = [scale for scale in scales if ("lsw", scale) in own]
    largest = shared[-1] if shared else None
    worse = None
    if largest is not None:
        worse = _is_worse(own["lsw", largest], than=own["adascale", largest])
    return ScaleVerdict(
        task=task,
        holds_at=tuple(held),
        fails_at=tuple(scale for scale in scales if scale not in held),
        largest=largest,
        linear_worse=worse,
    )


def holds(row: Row, *, base: Row) -> bool:
    """Return whether no run diverged, and the metric is within 2 sd of the base's, or better."""
    if row["diverged"] or row["metric_mean"] is None:
        return False
    sign = 1 if base["higher_is_better"] else -1
    return sign * (row["metric_mean"] - base["metric_mean"]) >= -2 * (base["metric_sd"] or 0.0)


def _is_worse(row: Row, *, than: Row) -> bool:
    if row["diverged"] != than["diverged"]:
        return row["diverged"] > than["diverged"]
    if row["metric_mean"] is None or than["metric_mean"] is None:
        return row["metric_mean"] is None and than["metric_mean"] is not None
    sign = 1 if row["higher_is_better"] else -1
    return sign * (row["metric_mean"] - than["metric_mean"]) < 0


def largest_scale(rows: Sequence[Row]) -> int:
    """Return the largest scale that is a number."""
    return max((row["scale"] for row in rows if isinstance(row["scale"], int)), default=1)


def beats(row: Row, other: Row) -> bool:
    """Return whether fewer branches of a row diverged, or as many and its peak is lower."""
    if row["diverged"] != other["diverged"]:
        return row["diverged"] < other["diverged"]
    if row["peak_ratio_mean"] is None or other["peak_ratio_mean"] is None:
        return False
    return row["peak_ratio_mean"] < other["peak_ratio_mean"]


def default_against_jump(rows: Sequence[Row], *, growth: bool) -> list[tuple[Row, Row]]:
    """Return the rows of default and immediate jump of each cell.

    Args:
        rows: of the tables.
        growth: growth by 4 or more, or else shrinks.
    """
    own = [row for row in rows if (row["k"] >= 4 if growth else row["k"] < 1)]

    def cell(row: Row) -> tuple[Any, ...]:
        return tuple(row[name] for name in ("task", "k", "when", "momentum"))

    jumps = {cell(row): row for row in own if row["ramp"] == "immediate"}
    return [(row, jumps[cell(row)]) for row in own if row["is_default"] and cell(row) in jumps]
