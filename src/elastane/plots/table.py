"""The numbers of a run that stand beside its picture.

Knows runs; gives strings, and knows nothing of how they are set.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from elastane.plots.flags import pause_text
from elastane.plots.panels import SMOOTHED_PART
from elastane.plots.runs import Run, Series

NONE = "–"


def run_rows(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the table of runs; metrics have a column each."""
    metrics = list(dict.fromkeys(name for run in runs for name in run.metrics))
    head = [
        "run",
        "rule",
        "policy",
        "base batch",
        "final batch",
        "workers",
        "steps",
        "skipped",
        "progress",
        "final loss",
        *(f"final {name.replace('_', ' ')}" for name in metrics),
        "mean gain",
    ]
    return head, [_run_row(run, metrics=metrics) for run in runs]


def change_rows(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the table of membership changes, of all runs in turn."""
    head = ["run", "step", "progress", "cause", "workers", "pause"]
    rows = [
        [
            run.name,
            _shown(change.step),
            _shown(change.progress),
            change.cause,
            NONE if change.world_size is None else str(change.world_size),
            NONE if change.pause_s is None else pause_text(change.pause_s),
        ]
        for run in runs
        for change in run.changes
    ]
    return head, rows


def _run_row(run: Run, *, metrics: Sequence[str]) -> list[str]:
    batches, steps, gains = (run.series(f) for f in ("batch_samples", "progress", "gain"))
    return [
        run.name,
        str(run.start.get("rule", NONE)),
        str(run.start.get("policy", NONE)),
        _shown(run.start.get("base_batch_size")),
        _shown(_typical_end(batches)),
        _workers(run.series("world_size")),
        _shown(_last(steps.steps)),
        str(run.num_skipped),
        f"{_shown(_last(steps.values))} of {_shown(run.start.get('num_steps'))}",
        _shown(_mean_end(run.series("loss"))),
        *(_shown(_last(run.metric(name).values)) for name in metrics),
        _shown(float(gains.values.mean()) if gains.values.size else None),
    ]


def _workers(series: Series) -> str:
    """Return how the number of workers went, as "1 → 4 → 2"; a long story shortened."""
    values = series.values
    if values.size == 0:
        return NONE
    changed = np.flatnonzero(np.diff(values)) + 1
    story = [f"{value:.0f}" for value in values[[0, *changed]]]
    if len(story) > 5:
        return f"{story[0]} → … → {story[-1]} ({values.min():.0f} to {values.max():.0f})"
    return " → ".join(story)


def _mean_end(series: Series) -> float | None:
    """Return the mean over the last 2 % of the steps."""
    window = max(1, round(series.values.size * SMOOTHED_PART))
    return float(series.values[-window:].mean()) if series.values.size else None


def _typical_end(series: Series) -> float | None:
    """Return the median of the last 5 values: the very last batch is often a short one."""
    return float(np.median(series.values[-5:])) if series.values.size else None


def _last(values: np.ndarray) -> float | None:
    return float(values[-1]) if values.size else None


def _shown(value: object) -> str:
    """Return a number as a person reads it; whole numbers with thousands apart.

    Example:
        >>> _shown(12000), _shown(0.123456), _shown(None)
        ('12,000', '0.1235', '–')
    """
    if not isinstance(value, (int, float)):
        return NONE
    if float(value).is_integer() or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"
