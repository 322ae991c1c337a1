"""The picture of the page on scale: what grows how with the number of workers.

Knows rows and matplotlib's figure objects; sets no global state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.results_page.pictures import COLORS, grid, label_axes, make_log

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_scale"]

Row = Mapping[str, Any]
_PARTS = {
    "regroup_ms": "all of it",
    "of_that_store_ms": "the store",
    "of_that_connect_ms": "connecting",
    "of_that_standings_ms": "standings",
    "of_that_decision_ms": "decision",
}
_LOADS = {"launcher_load": "the launcher", "store_load": "the store's thread"}


def draw_scale(rows: Sequence[Row], *, path: Path) -> None:
    """Draw small sums, a regroup's parts on the last network, and what is busy without a change."""
    figure, (sums, regroup, loads) = grid(3)
    networks = list(dict.fromkeys(row["network"] for row in rows))
    last = [row for row in rows if row["network"] == networks[-1]]
    for network in networks:
        own = [row for row in rows if row["network"] == network]
        _line(sums, own, "small_reduction_us", label=f"ring, {network}", scale=1e-3)
    _line(sums, last, "of_a_tree_us", label=f"tree, {networks[-1]}", scale=1e-3)
    for name, label in _PARTS.items():
        _line(regroup, last, name, label=label)
    for name, label in _LOADS.items():
        _line(loads, last, name, label=label)
    _finish(sums, last, title="a step's small sum", y="ms")
    _finish(regroup, last, title=f"a regroup, {networks[-1]}", y="ms")
    _finish(loads, last, title="while nothing changes", y="share of a processor")
    figure.savefig(path)


def _line(axes: Axes, rows: Sequence[Row], name: str, *, label: str, scale: float = 1.0) -> None:
    color = COLORS[len(axes.lines) % len(COLORS)]
    workers = [row["workers"] for row in rows]
    values = [scale * row[name] for row in rows]
    axes.plot(workers, values, color=color, marker="o", ms=3, lw=1.4, label=label)


def _finish(axes: Axes, rows: Sequence[Row], *, title: str, y: str) -> None:
    ticks = [row["workers"] for row in rows][::3]
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(one) for one in ticks])
    make_log(axes)
    label_axes(axes, title=title, x="workers", y=y)
    axes.legend(frameon=False, fontsize=7)
