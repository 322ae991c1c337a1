"""Draws panels as a picture.

Knows matplotlib's figure objects, and sets no global state: no pyplot, no rcParams.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from elastane.errors import UsageError
from elastane.plots.flags import flags
from elastane.plots.panels import SMOOTHED_PART, Curve, Panel, sharers
from elastane.plots.runs import Array, Change, Run, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.typing import LineStyleType

Axis = Literal["progress", "steps"]

_AXES: tuple[tuple[Axis, str], ...] = (
    ("progress", "progress τ (base steps)"),
    ("steps", "optimizer steps"),
)

# Okabe and Ito (2008), Color Universal Design, without yellow, which is faint on white.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES: tuple[LineStyleType, ...] = ("-", (0, (5, 2)), (0, (1.2, 1.2)))
_INK, _GREY, _GRID = "#222222", "#666666", "#E6E6E6"
_LABEL_PT, _TICK_PT, _FLAG_PT = 9.0, 8.0, 7.0
_WIDTH_IN, _PANEL_IN, _MARGIN_IN = 9.0, 1.25, 0.9
_FLAG_ROW_PT = 10.0
_MAX_MARKERS = 50
_ALPHA = 0.9  # a line below another one shines through
_MARK = {"lw": 0.6, "alpha": 0.6}
_STRIPE_PT = 7.0
_LETTER_PT, _HANDLE_PT, _GAP_PT = 5.0, 26.0, 18.0  # of the legend
# An annealed rate goes down to 0, a loss may too: the axis ends this far below its largest value.
_LOWEST_PART = 1e-4
_CAPTION = (
    "Progress τ: what the optimizer steps were worth, in base steps (steps of the batch that the "
    "schedule was tuned for)."
)
_FAINT_CAPTION = f" Faint: each step's own value; bold: mean over {SMOOTHED_PART:.0%} of the steps."
# About what is left of the page's width for one axis, and the width of a letter of a flag.
_AXIS_IN, _LETTER_IN = 3.8, 0.056


def draw(runs: Sequence[Run], rows: Sequence[Panel], *, title: str | None) -> Figure:
    """Return the page: a row for each panel, on the left against progress, right against steps.

    Raises:
        UsageError: matplotlib is not installed.
    """
    figure = _figure(height_in=_MARGIN_IN + _PANEL_IN * len(rows))
    grid = figure.subplots(len(rows), 2, sharex="col", sharey="row", squeeze=False)
    for column, (axis, label) in enumerate(_AXES):
        for row, panel in enumerate(rows):
            _draw_panel(grid[row][column], panel, axis=axis)
            _draw_changes(grid[row][column], runs, axis=axis)
        grid[-1][column].set_xlabel(label, fontsize=_LABEL_PT, color=_INK)
        end = _end(rows, axis=axis)
        _set_length(grid[-1][column], end=end)
        _draw_flags(grid[0][column], runs, axis=axis, end=end)
    for row, panel in enumerate(rows):
        grid[row][0].set_ylabel(panel.label, fontsize=_LABEL_PT, color=_INK)
    figure.align_ylabels(list(grid[:, 0]))
    _draw_head(figure, runs, title=title)
    has_faint = any(_is_smoothed(curve) for panel in rows for curve in panel.curves)
    caption = _CAPTION + _FAINT_CAPTION * has_faint
    figure.supxlabel(caption, fontsize=_FLAG_PT, color=_GREY)
    return figure


def _figure(*, height_in: float) -> Figure:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError(
            f"Plots need matplotlib, which can't be imported ({error}). "
            "In a checkout of elastane: pip install '.[plots]'"
        ) from error
    figure = Figure(figsize=(_WIDTH_IN, height_in), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _draw_panel(axes: Axes, panel: Panel, *, axis: Axis) -> None:
    from matplotlib.ticker import MaxNLocator

    for index, (curve, shared) in enumerate(zip(panel.curves, sharers(panel), strict=True)):
        stripe = _stripe(shared.index(index), count=len(shared))
        _draw_curve(axes, curve, panel=panel, axis=axis, stripe=stripe)
    if panel.whole:
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    axes.margins(y=0.08)
    if panel.from_zero:
        axes.set_ylim(bottom=0)
    if panel.log:
        _make_log(axes, panel)
    _tidy(axes)


def _make_log(axes: Axes, panel: Panel) -> None:
    """Make the vertical axis logarithmic, with numbers that can be read at a glance."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    values = np.concatenate([curve.line.values for curve in panel.curves])
    high = values.max() * 1.5
    low = max(values[values > 0].min() / 1.5, high * _LOWEST_PART)
    axes.set_ylim(low, high)
    steps = (1, 2, 5) if high / low < 300 else (1,)
    axes.yaxis.set_major_locator(LogLocator(subs=steps, numticks=8))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _plain(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _set_length(axes: Axes, *, end: float) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_xlim(0, end)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 2.5, 5, 10]))
    if end >= 20_000:
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1000:g}k"))


def _plain(value: float) -> str:
    return f"{value:,.0f}" if 1 <= value < 1e6 else f"{value:g}"


def _stripe(place: int, *, count: int) -> LineStyleType | None:
    """Return the dashes of a curve that shares its level with others, or None for none.

    Each one lies on the one before and covers less of it, so that all of them are seen, as stripes
    of equal length.
    """
    if place == 0:
        return None
    return (0, (_STRIPE_PT * (count - place), _STRIPE_PT * place))


def _draw_curve(
    axes: Axes, curve: Curve, *, panel: Panel, axis: Axis, stripe: LineStyleType | None
) -> None:
    drawstyle = "steps-pre" if panel.shape == "stair" else "default"
    color = _color(curve.run_index)
    if curve.faint is not None and _is_smoothed(curve):
        x, y = _points(curve.faint, axis=axis)
        axes.plot(x, y, color=color, drawstyle=drawstyle, lw=0.6, alpha=0.25, zorder=2)
    num_points = curve.line.values.size
    marked = num_points == 1 or (panel.shape == "points" and num_points <= _MAX_MARKERS)
    x, y = _points(curve.line, axis=axis)
    if panel.shape == "stair" and curve.line.steps[0] <= 1:  # the first step began at the left end
        x, y = np.concatenate([[0.0], x]), np.concatenate([y[:1], y])
    axes.plot(
        x,
        y,
        color=color,
        drawstyle=drawstyle,
        lw=1.4,
        linestyle=stripe or _dashes(curve.run_index),
        dash_capstyle="butt",
        alpha=_ALPHA,
        marker="o" if marked else None,
        markersize=3,
        zorder=3,
    )


def _is_smoothed(curve: Curve) -> bool:
    return curve.faint is not None and curve.faint is not curve.line


def _points(series: Series, *, axis: Axis) -> tuple[Array, Array]:
    return (series.progress if axis == "progress" else series.steps), series.values


def _tidy(axes: Axes) -> None:
    axes.grid(color=_GRID, lw=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=_TICK_PT, length=2.5, width=0.6, color=_GREY, labelcolor=_INK)
    axes.tick_params(which="minor", length=1.5, width=0.5, color=_GREY)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set(color=_GREY, lw=0.6)


def _draw_changes(axes: Axes, runs: Sequence[Run], *, axis: Axis) -> None:
    for run_index, run in enumerate(runs):
        for change in _drawn_changes(run):
            axes.axvline(
                _position(change, axis=axis),
                color=_mark_color(run_index, num_runs=len(runs)),
                zorder=1,
                **_MARK,
            )


def _draw_flags(axes: Axes, runs: Sequence[Run], *, axis: Axis, end: float) -> None:
    """Write cause and pause above the topmost panel, on poles that go on the marks' lines."""
    marks = [
        (run_index, _position(change, axis=axis) / end, change)
        for run_index, run in enumerate(runs)
        for change in _drawn_changes(run)
        if _position(change, axis=axis) <= end
    ]
    for flag in flags(marks, letter_width=_LETTER_IN / _AXIS_IN):
        color = _mark_color(flag.run_index, num_runs=len(runs))
        height_pt = 7 + flag.row * _FLAG_ROW_PT
        axes.annotate(
            "",
            xy=(flag.position, 1),
            xytext=(0, height_pt + 3),
            xycoords="axes fraction",
            textcoords="offset points",
            arrowprops={"arrowstyle": "-", "shrinkA": 0, "shrinkB": 0, "color": color} | _MARK,
        )
        axes.annotate(
            flag.text,
            xy=(flag.position, 1),
            xytext=(-3 if flag.to_left else 3, height_pt),
            xycoords="axes fraction",
            textcoords="offset points",
            ha="right" if flag.to_left else "left",
            va="center",
            fontsize=_FLAG_PT,
            color=color,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
        )


def _draw_head(figure: Figure, runs: Sequence[Run], *, title: str | None) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=_color(index), linestyle=_dashes(index), lw=1.8, label=run.name)
        for index, run in enumerate(runs)
    ]
    # The title is the legend's: beside a legend outside, a figure's own title would lie on it.
    num_columns = _num_columns([run.name for run in runs])
    # Matplotlib fills a legend's columns one after the other; read it is line by line.
    by_column = [handle for column in range(num_columns) for handle in handles[column::num_columns]]
    legend = figure.legend(
        handles=by_column,
        loc="outside upper center",
        ncols=num_columns,
        frameon=False,
        fontsize=_LABEL_PT,
        labelcolor=_INK,
        title=title,
        title_fontsize=_LABEL_PT + 2,
    )
    legend.get_title().set_color(_INK)


def _num_columns(names: Sequence[str]) -> int:
    """Return how many columns of the legend fit on the page, the lines about equally full."""
    column_pt = _HANDLE_PT + _GAP_PT + _LETTER_PT * max(len(name) for name in names)
    most = max(1, min(len(names), int(_WIDTH_IN * 72 / column_pt)))
    num_lines = math.ceil(len(names) / most)
    return math.ceil(len(names) / num_lines)


def _drawn_changes(run: Run) -> list[Change]:
    """Return the changes after the first step; what was before it is not seen on the page."""
    return [change for change in run.changes if change.step > 0]


def _end(rows: Sequence[Panel], *, axis: Axis) -> float:
    """Return where the axis ends: a little after the longest curve."""
    lines = [curve.line for panel in rows for curve in panel.curves]
    ends = [(line.progress if axis == "progress" else line.steps).max() for line in lines]
    return float(max(ends)) * 1.01 or 1.0


def _position(change: Change, *, axis: Axis) -> float:
    return change.progress if axis == "progress" else change.step


def _color(run_index: int) -> str:
    return _COLORS[run_index % len(_COLORS)]


def _dashes(run_index: int) -> LineStyleType:
    return _DASHES[run_index // len(_COLORS) % len(_DASHES)]


def _mark_color(run_index: int, *, num_runs: int) -> str:
    return _GREY if num_runs == 1 else _color(run_index)
