"""Which quantities are drawn, under which name, and how they are smoothed.

Knows runs and numbers; nothing of matplotlib.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from elastane.plots.runs import Array, Run, Series

SMOOTHED_PART = 0.02  # of a run's steps, the window of the mean loss
_MEDIAN_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One run's line in a panel; `faint` is the raw series behind a smoothed one."""

    run_index: int
    line: Series
    faint: Series | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One quantity of all runs.

    `shape` is how points are joined: a plain line, a stair that holds until the next point, or a
    line with a mark at each point. `whole` axes have whole numbers only.
    """

    label: str
    curves: Sequence[Curve]
    shape: Literal["line", "stair", "points"] = "line"
    log: bool = False
    from_zero: bool = False
    whole: bool = False


def panels(runs: Sequence[Run]) -> list[Panel]:
    """Return the panels of a page from top to bottom, without those that would be empty."""
    metrics = dict.fromkeys(name for run in runs for name in run.metrics)
    every = [
        Panel(label="training loss", curves=_loss_curves(runs)),
        *(
            Panel(label=_metric_label(name), curves=_metric_curves(runs, name), shape="points")
            for name in metrics
        ),
        Panel(
            label="learning rate",
            curves=_curves(runs, "lr", smooth=without_spikes),
            from_zero=True,
        ),
        Panel(
            label="gain\n(base steps\nper step)",
            curves=_curves(runs, "gain", smooth=without_spikes),
        ),
        Panel(
            label="batch size\n(samples)",
            curves=_curves(runs, "batch_samples", smooth=without_spikes),
            shape="stair",
            from_zero=True,
        ),
        Panel(
            label="workers",
            curves=_curves(runs, "world_size"),
            shape="stair",
            from_zero=True,
            whole=True,
        ),
        Panel(label="noise scale\n(samples)", curves=_noise_curves(runs), log=True),
    ]
    return [panel for panel in every if panel.curves]


def smoothed(series: Series) -> Series:
    """Return the mean over a centred window of 2 % of the points; too few stay as they are."""
    half = int(series.values.size * SMOOTHED_PART / 2)
    if half < 1:
        return series
    return replace(series, values=_window_means(series.values, half=half))


def without_spikes(series: Series) -> Series:
    """Return medians over 5 steps: the short last batch of each epoch is no news."""
    values = series.values
    if values.size < _MEDIAN_STEPS:
        return series
    padded = np.pad(values, _MEDIAN_STEPS // 2, mode="edge")
    windows = np.lib.stride_tricks.sliding_window_view(padded, _MEDIAN_STEPS)
    return replace(series, values=np.median(windows, axis=1))


def _window_means(values: Array, *, half: int) -> Array:
    """Return means over up to `half` points on either side, fewer at the ends."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(values.size)
    low, high = np.maximum(index - half, 0), np.minimum(index + half + 1, values.size)
    return (sums[high] - sums[low]) / (high - low)


def _curves(
    runs: Sequence[Run], field: str, *, smooth: Callable[[Series], Series] | None = None
) -> list[Curve]:
    known = [(run_index, run.series(field)) for run_index, run in enumerate(runs)]
    return [
        Curve(run_index=run_index, line=series if smooth is None else smooth(series))
        for run_index, series in known
        if series.values.size
    ]


def _loss_curves(runs: Sequence[Run]) -> list[Curve]:
    curves = _curves(runs, "loss")
    return [replace(curve, line=smoothed(curve.line), faint=curve.line) for curve in curves]


def _metric_curves(runs: Sequence[Run], name: str) -> list[Curve]:
    """Return a metric's curves; values that were taken once a run stand in the table alone."""
    curves = [Curve(run_index=index, line=run.metric(name)) for index, run in enumerate(runs)]
    longest = max((curve.line.values.size for curve in curves), default=0)
    return [curve for curve in curves if curve.line.values.size] if longest > 1 else []


def _metric_label(name: str) -> str:
    return "evaluation:\n" + name.replace("_", " ")


def _noise_curves(runs: Sequence[Run]) -> list[Curve]:
    """Return the noise scales where they are above 0: an estimate below has no logarithm."""
    curves = []
    for curve in _curves(runs, "noise_scale"):
        line = curve.line
        good = line.values > 0
        if good.any():
            line = Series(
                steps=line.steps[good], progress=line.progress[good], values=line.values[good]
            )
            curves.append(replace(curve, line=line))
    return curves
