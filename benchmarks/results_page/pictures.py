"""The pictures of the page of results.

Knows rows and matplotlib's figure objects; nothing of the page, and sets no global state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "COLORS",
    "draw_curves",
    "draw_gains",
    "draw_noise",
    "draw_peaks",
    "draw_scales",
    "grid",
    "label_axes",
    "make_log",
    "rules_of",
    "save_with_legend",
]

# Okabe and Ito (2008), Color Universal Design, without yellow, as in elastane's own plots; then
# a grey, and wine of Tol's muted scheme.
COLORS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"),
    *("#999999", "#882255"),
)
_INK, _GREY, _GRID = "#222222", "#666666", "#E6E6E6"
_LABEL_PT, _TICK_PT = 9.0, 8.0
_COLUMNS, _PANEL_IN, _WIDTH_IN, _HEAD_IN = 3, 2.6, 9.0, 0.6
_FAR = 20.0

Row = Mapping[str, Any]


def rules_of(rows: Sequence[Row]) -> list[str]:
    """Return the names of the rules, each once."""
    return list(dict.fromkeys(row["rule"] for row in rows))


def draw_scales(rows: Sequence[Row], *, path: Path) -> None:
    """Draw each task's metric against the scale, a line for each rule; a cross has diverged."""
    rows = [row for row in rows if isinstance(row["scale"], int)]
    tasks = _tasks(rows)
    figure, panels = grid(len(tasks))
    rules = rules_of(rows)
    for axes, task in zip(panels, tasks, strict=True):
        own = [row for row in rows if row["task"] == task]
        for rule in rules:
            color = COLORS[rules.index(rule) % len(COLORS)]
            _draw_rule(axes, [row for row in own if row["rule"] == rule], rule=rule, color=color)
        axes.set_xscale("log", base=2)
        scales = sorted({row["scale"] for row in own})
        axes.set_xticks(scales, [str(scale) for scale in scales])
        _widen(axes, [row["metric_mean"] for row in own])
        label_axes(axes, title=task, x="scale S", y=own[0]["metric"])
    save_with_legend(figure, panels[0], path=path)


def _draw_rule(axes: Axes, rows: Sequence[Row], *, rule: str, color: str) -> None:
    good = [row for row in rows if row["metric_mean"] is not None]
    axes.errorbar(
        [row["scale"] for row in good],
        [row["metric_mean"] for row in good],
        yerr=[row["metric_sd"] or 0.0 for row in good],
        color=color,
        marker="o",
        ms=3.5,
        lw=1.4,
        capsize=2.5,
        label=rule,
    )
    lost = [row["scale"] for row in rows if row["diverged"]]
    axes.plot(lost, [0.04] * len(lost), "x", color=color, transform=axes.get_xaxis_transform())


def draw_curves(curves: Sequence[Row], *, metric: str, path: Path) -> None:
    """Draw AdaScale's metric against progress, a line for each scale, with a band of 1 sd."""
    figure, (axes,) = grid(1)
    for index, row in enumerate(curves):
        color = COLORS[index % len(COLORS)]
        axes.plot(row["tau"], row["mean"], color=color, lw=1.4, label=f"S = {row['scale']}")
        sd = [0.0 if one is None else one for one in row["sd"]]
        low = [mean - one for mean, one in zip(row["mean"], sd, strict=True)]
        high = [mean + one for mean, one in zip(row["mean"], sd, strict=True)]
        axes.fill_between(row["tau"], low, high, color=color, alpha=0.15, lw=0)
    _widen(axes, [value for row in curves for value in row["mean"]])
    label_axes(axes, title=curves[0]["task"], x="progress τ (base steps)", y=metric)
    save_with_legend(figure, axes, path=path)


def draw_gains(traces: Sequence[Row], *, path: Path) -> None:
    """Draw gain and learning rate against progress, a row of two panels for each task."""
    tasks = _tasks(traces)
    figure, panels = grid(2 * len(tasks), columns=2)
    for row_index, task in enumerate(tasks):
        own = [trace for trace in traces if trace["task"] == task]
        pair = panels[2 * row_index : 2 * row_index + 2]
        for axes, name, label in zip(
            pair, ("gain", "lr"), ("gain (base steps per step)", "learning rate"), strict=True
        ):
            for index, trace in enumerate(own):
                color = COLORS[index % len(COLORS)]
                axes.plot(
                    trace["tau"], trace[name], color=color, lw=1.2, label=f"S = {trace['scale']}"
                )
            label_axes(axes, title=task, x="progress τ (base steps)", y=label)
        pair[0].set_yscale("log", base=2)
        pair[0].yaxis.set_major_formatter("{x:g}")
    save_with_legend(figure, panels[0], path=path)


def draw_peaks(rows: Sequence[Row], *, path: Path) -> None:
    """Draw the peak ratios of each task's changes in the middle, a bar for each ramp."""
    rows = [row for row in rows if row["when"] == "middle" and row["momentum"] == 0.9]
    tasks = _tasks(rows)
    ramps = list(dict.fromkeys(row["ramp"] for row in rows))
    figure, panels = grid(len(tasks), columns=1)
    for axes, task in zip(panels, tasks, strict=True):
        own = [row for row in rows if row["task"] == task]
        ratios = sorted({row["k"] for row in own})
        for place, ramp in enumerate(ramps):
            _draw_bars(axes, own, ramp=ramp, ratios=ratios, place=place, count=len(ramps))
        axes.set_xticks(range(len(ratios)), [f"k = {_fraction(ratio)}" for ratio in ratios])
        axes.axhline(1.0, color=_GREY, lw=0.8)
        values = [row["peak_ratio_mean"] for row in own]
        _widen(axes, values)
        label_axes(axes, title=task, x="new batch over old", y="peak loss\nover loss before")
    save_with_legend(figure, panels[0], path=path)


def _draw_bars(
    axes: Axes, rows: Sequence[Row], *, ramp: str, ratios: Sequence[float], place: int, count: int
) -> None:
    width = 0.8 / count
    color = COLORS[place % len(COLORS)]
    found = {row["k"]: row for row in rows if row["ramp"] == ramp}
    at = [index + (place - (count - 1) / 2) * width for index in range(len(ratios))]
    heights = [(found[k]["peak_ratio_mean"] if k in found else None) or 0.0 for k in ratios]
    axes.bar(at, heights, width=0.9 * width, color=color, label=ramp)
    for x, height, k in zip(at, heights, ratios, strict=True):
        if k in found and found[k]["diverged"]:
            axes.annotate(
                f"{found[k]['diverged']} lost",
                (x, height),
                xytext=(0, 2),
                textcoords="offset points",
                rotation=90,
                ha="center",
                va="bottom",
                fontsize=6.5,
                color=color,
            )


def draw_noise(rows: Sequence[Row], *, path: Path) -> None:
    """Draw the measured variance of updates after a change over the model's (dashed)."""
    ratios = sorted({row["k"] for row in rows})
    figure, panels = grid(len(ratios), columns=2)
    ramps = list(dict.fromkeys(row["ramp"] for row in rows))
    for axes, ratio in zip(panels, ratios, strict=True):
        for row in rows:
            if row["k"] == ratio:
                color = COLORS[ramps.index(row["ramp"]) % len(COLORS)]
                steps = range(1, len(row["measured"]) + 1)
                axes.plot(steps, row["measured"], color=color, lw=1.4, label=row["ramp"])
                axes.plot(steps, row["predicted"], color=color, lw=1.0, ls=(0, (4, 2)))
        make_log(axes)
        axes.axhline(1.0, color=_GREY, lw=0.8)
        title = f"k = {_fraction(ratio)} (dashed: the noise model)"
        label_axes(axes, title=title, x="steps after the change", y="variance of updates\nover k")
    save_with_legend(
        figure, panels[-1], path=path
    )  # some ramps are only compared where the batch grows


def grid(count: int, *, columns: int = _COLUMNS) -> tuple[Figure, list[Axes]]:
    """Return a figure with so many panels, and the panels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(columns, count)
    rows = math.ceil(count / columns)
    size = (max(_WIDTH_IN * columns / _COLUMNS, 6.0), _PANEL_IN * rows + _HEAD_IN)
    figure = Figure(figsize=size, layout="constrained", facecolor="white", dpi=130)
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for spare in panels[count:]:
        spare.set_visible(False)
    return figure, panels[:count]


def label_axes(axes: Axes, *, title: str, x: str, y: str) -> None:
    """Give a panel its words and its plain look."""
    axes.set_title(title, fontsize=_LABEL_PT, color=_INK)
    axes.set_xlabel(x, fontsize=_TICK_PT, color=_INK)
    axes.set_ylabel(y, fontsize=_TICK_PT, color=_INK)
    axes.grid(color=_GRID, lw=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=_TICK_PT, color=_GREY, labelcolor=_INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set(color=_GREY, lw=0.6)


def _widen(axes: Axes, values: Sequence[float | None]) -> None:
    """Make the vertical axis logarithmic where values lie far apart."""
    known = [value for value in values if value is not None]
    if known and min(known) > 0 and max(known) > _FAR * min(known):
        make_log(axes)


def make_log(axes: Axes) -> None:
    """Make the vertical axis logarithmic, with plain numbers on it."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def save_with_legend(figure: Figure, axes: Axes, *, path: Path) -> None:
    """Write a picture; one panel's lines tell what they are for all."""
    handles, labels = axes.get_legend_handles_labels()
    columns = 4 if figure.get_figwidth() < _WIDTH_IN else 7
    figure.legend(
        handles,
        labels,
        loc="outside upper center",
        ncols=min(len(labels), columns),
        frameon=False,
        fontsize=_TICK_PT,
        labelcolor=_INK,
    )
    figure.savefig(path)


def _tasks(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["task"] for row in rows))


def _fraction(ratio: float) -> str:
    return f"{ratio:g}" if ratio >= 1 else f"1/{1 / ratio:g}"
