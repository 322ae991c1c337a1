"""Draws a chaos run on one page: workers, events and stalls against time.

Knows the result of a run and its script; nothing of how either came about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.chaos.records import read_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw"]

# Of those of Okabe and Ito (2008), Color Universal Design.
_WORKERS, _GENTLE, _HARSH, _LAUNCHER = "#0072B2", "#009E73", "#D55E00", "#000000"
_GREY, _GRID = "#666666", "#E6E6E6"
_SIZE_IN = (11.0, 6.5)
_HEIGHTS = (2.0, 4.0, 1.6)
_LONG_S = 600.0
_MANY_EVENTS, _MANY_CHANGES = 300, 300
_STRETCHES = 200


def draw(folder: Path, result: Mapping[str, Any], *, path: Path) -> None:
    """Write the picture of a run.

    Args:
        folder: of the run, with its script.
        result: of the run and its audit.
        path: of the picture; its ending says which format.
    """
    from matplotlib.figure import Figure

    events = list(read_lines(folder / "script.jsonl"))
    start, end = result["sizes"][0][0], result["ended"]
    unit_s, unit = (60.0, "minutes") if end - start > _LONG_S else (1.0, "seconds")

    def at(time: float) -> float:
        return (time - start) / unit_s

    figure = Figure(figsize=_SIZE_IN, layout="constrained", dpi=150)
    axes = figure.subplots(3, sharex=True, height_ratios=_HEIGHTS)
    sizes = [(at(time), size) for time, size in result["sizes"]]
    _draw_workers(axes[0], [*sizes, (at(end), sizes[-1][1])])
    _draw_events(axes[1], [(at(event["time"]), event["kind"]) for event in events])
    _draw_stalls(axes[2], [(at(time), s) for time, s in result["stalls"]], result=result)
    for one in axes:
        one.grid(color=_GRID, lw=0.6)
        one.set_axisbelow(True)
        one.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel(f"{unit} since the first step")
    axes[-1].set_xlim(0, at(end))
    figure.suptitle(_title(result), fontsize=10, x=0.01, ha="left")
    figure.savefig(path)


def _draw_workers(axes: Axes, sizes: Sequence[tuple[float, int]]) -> None:
    """Draw how many workers there were; in a long run the mean of each stretch."""
    most = max(size for _, size in sizes)
    is_long = len(sizes) > _MANY_CHANGES
    times, counts = zip(*(_means(sizes) if is_long else sizes), strict=True)
    axes.fill_between(times, counts, step="post", color=_WORKERS, alpha=0.3, lw=0)
    axes.step(times, counts, where="post", color=_WORKERS, lw=0.8)
    axes.set_ylim(0, most + 0.5)
    axes.set_yticks(range(most + 1))
    axes.set_ylabel("workers (mean)" if is_long else "workers")


def _means(sizes: Sequence[tuple[float, int]]) -> list[tuple[float, float]]:
    """Return the mean number of workers in equal stretches of time."""
    times, counts = np.array(sizes).T
    worker_time = np.concatenate([[0.0], np.cumsum(counts[:-1] * np.diff(times))])
    edges = np.linspace(times[0], times[-1], _STRETCHES + 1)
    means = np.diff(np.interp(edges, times, worker_time)) / (edges[1] - edges[0])
    return list(zip(edges.tolist(), [*means.tolist(), float(means[-1])], strict=True))


def _draw_events(axes: Axes, events: Sequence[tuple[float, str]]) -> None:
    kinds = sorted({kind for _, kind in events}, key=lambda kind: (_color(kind), kind))
    many = len(events) > _MANY_EVENTS
    for row, kind in enumerate(kinds):
        times = [time for time, one in events if one == kind]
        axes.vlines(
            times, row - 0.38, row + 0.38, color=_color(kind), lw=0.5 if many else 1.5, alpha=0.8
        )
    counts = {kind: sum(one == kind for _, one in events) for kind in kinds}
    labels = [f"{kind.replace('_', ' ')} ({counts[kind]})" for kind in kinds]
    axes.set_yticks(range(len(kinds)), labels, fontsize=7)
    axes.set_ylim(len(kinds) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)


def _draw_stalls(
    axes: Axes, stalls: Sequence[tuple[float, float]], *, result: Mapping[str, Any]
) -> None:
    times, seconds = zip(*stalls, strict=True) if stalls else ((), ())
    axes.scatter(times, seconds, s=4, color=_GREY, lw=0)
    limit_s = result["stall_limit_s"]
    axes.axhline(limit_s, color=_HARSH, lw=0.8, ls="--")
    axes.annotate(
        f"hang limit + 1 s = {limit_s:g} s",
        (1.0, limit_s),
        xycoords=("axes fraction", "data"),
        xytext=(0, 2),
        textcoords="offset points",
        ha="right",
        fontsize=7,
        color=_HARSH,
    )
    axes.set_ylim(0, 1.25 * max(limit_s, *seconds, 0.0))
    axes.set_ylabel("s to the next step\n(over 0.1 s)", fontsize=8)


def _color(kind: str) -> str:
    if kind == "kill_launcher":
        return _LAUNCHER
    return _HARSH if kind.startswith(("kill", "freeze", "pause")) else _GENTLE


def _title(result: Mapping[str, Any]) -> str:
    equal = "equal" if result["replicas_equal"] else "UNEQUAL"
    return (
        f"{result['events']:,} events in {result['wall_s'] / 60:.0f} min, "
        f"{result['committed_steps']:,} steps in {result['generations']:,} generations: "
        f"{result['samples_lost']} samples lost, {result['samples_repeated']} repeated, "
        f"replicas {equal}, longest stall {result['max_stall_s']:.2f} s, "
        f"{result['orphans']} orphans, {result['false_commits']} false commits"
    )
