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
_LINEAR_RATIO = 100.0  # positive values that lie within this ratio are drawn on a linear axis
_LEVELS_PART = 0.05  # a curve with few values for its points is made of levels


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
        _far_reaching(Panel(label="training loss", curves=_loss_curves(runs))),
        *(
            Panel(label=_metric_label(name), curves=_metric_curves(runs, name), shape="points")
            for name in metrics
        ),
        _far_reaching(
            Panel(
                label="learning rate",
                curves=_curves(runs, "lr", smooth=without_spikes),
                from_zero=True,
            )
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


def sharers(panel: Panel) -> list[list[int]]:
    """Return for each curve the positions of those that share a level with it, its own included.

    Curves made of few values (a batch size, a number of workers, a gain of 1) lie on one another
    where they agree, and only the one drawn last would be seen.
    """
    levels = [_levels(curve.line.values) for curve in panel.curves]
    return [
        [other for other in range(len(levels)) if other == own or levels[own] & levels[other]]
        for own in range(len(levels))
    ]


def _levels(values: Array) -> set[float]:
    different = np.unique(values)
    few = different.size <= 1 + values.size * _LEVELS_PART
    return set(different.tolist()) if few else set()


def _far_reaching(panel: Panel) -> Panel:
    """Return the panel with a logarithmic axis if its values call for one and all have a logarithm.

    A learning rate of 0, with which a warm-up begins and an annealing ends, is left below the axis.
    """
    if not panel.curves:
        return panel
    everything = np.concatenate(
        [part.values for curve in panel.curves for part in (curve.line, curve.faint) if part]
    )
    values = np.concatenate([curve.line.values for curve in panel.curves])
    positive = values[values > 0]
    if not panel.from_zero and everything.min() <= 0:
        return panel
    far = bool(positive.size) and positive.max() > _LINEAR_RATIO * positive.min()
    return replace(panel, log=True, from_zero=False) if far else panel


def smoothed(series: Series) -> Series:
    """Return the mean over a centred window of 2 % of the points; too few stay as they are."""
    half = int(series.values.size * SMOOTHED_PART / 2)
    if half < 1:
        return series
    return replace(series, values=_window_means(series.values, half=half))


def without_spikes(series: Series) -> Series:
    """Return medians over 5 steps: the short last batch of each epoch is no news.

    Mirrored at the ends, so that a run that ends with a short batch has no spike there either.
    """
    values = series.values
    if values.size < _MEDIAN_STEPS:
        return series
    padded = np.pad(values, _MEDIAN_STEPS // 2, mode="reflect")
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
