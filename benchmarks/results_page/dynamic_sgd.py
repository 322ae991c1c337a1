"""The part of the page of results that the Dynamic SGD tables fill.

Knows the form of their result; nothing of how it came about.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.results_page.pictures import draw_noise, draw_peaks
from benchmarks.results_page.text import listed, origin, plus_minus, shown, table
from benchmarks.results_page.verdicts import beats, default_against_jump

__all__ = ["section"]

Row = Mapping[str, Any]


def section(result: Mapping[str, Any], *, pictures: Path) -> list[str]:
    """Return the lines of the section, and write its pictures into a folder."""
    rows = result["rows"]
    lines = ["## Dynamic SGD", "", _MEANING, "", *origin(result)]
    if not rows:
        return [*lines, "Nothing has been measured yet.", ""]
    lines += _verdicts(rows)
    if any(row["when"] == "middle" and row["momentum"] == 0.9 for row in rows):
        draw_peaks(rows, path=pictures / "results-peaks.png")
        alt = "Peak loss over the loss before, for each ratio and ramp"
        lines += [
            "Changes in the middle of the run, momentum 0.9; `lost` counts diverged runs:",
            "",
        ]
        lines += [f"![{alt}](_static/results-peaks.png)", ""]
    for task in dict.fromkeys(row["task"] for row in rows):
        lines += _task([row for row in rows if row["task"] == task])
    return lines + _workers(result["workers"]) + _noise(result["noise"], pictures=pictures)


def _verdicts(rows: Sequence[Row]) -> list[str]:
    growths = default_against_jump(rows, growth=True)
    shrinks = default_against_jump(rows, growth=False)
    better = sum(beats(row, jump) for row, jump in growths)
    worse = sum(beats(jump, row) for row, jump in shrinks)
    lines: list[str] = []
    if growths:
        lines += [
            f"Where the batch grows by 4 or more, elastane's default has a lower peak than the "
            f"immediate jump, or fewer runs that diverge, in {better} of {len(growths)} cells."
        ]
        lines += [
            f"Not so at {_place(row)}: {_peak(row)} against {_peak(jump)}, on average "
            f"{shown(row['peak_step_mean'])} and {shown(jump['peak_step_mean'])} steps after the "
            "change."
            for row, jump in growths
            if not beats(row, jump)
        ]
    if shrinks:
        lines += [f"Where it shrinks, the default is worse in {worse} of {len(shrinks)} cells."]
    return [*lines, ""]


def _place(row: Row) -> str:
    return f"{row['task']}, k = {row['k']:g}, {row['when']}, momentum {row['momentum']:g}"


def _peak(row: Row) -> str:
    lost = f" ({row['diverged']} lost)" if row["diverged"] else ""
    return f"{shown(row['peak_ratio_mean'])}{lost}"


def _task(rows: Sequence[Row]) -> list[str]:
    ramps = list(dict.fromkeys(row["ramp"] for row in rows))
    ended = [ramp for ramp in ramps if any(_has_end(row) for row in rows if row["ramp"] == ramp)]
    lines = [
        *(f"### {rows[0]['task'].capitalize()}", ""),
        "Peak of the held-out loss over its level before the change:",
        "",
        *_pivot(rows, ramps, _peak),
        "Steps until it is back for good:",
        "",
        *_pivot(rows, ramps, lambda row: shown(row["recover_steps_mean"])),
    ]
    if ended:
        better = "higher" if rows[0]["higher_is_better"] else "lower"
        lines += [f"{rows[0]['metric']} at the end of the run, {better} is better:", ""]
        lines += _pivot(rows, ended, _end)
    stuck = [_place(row) for row in rows if row["no_start"] and row["ramp"] == ramps[0]]
    if stuck:
        text = (
            "Not all seeds have a state to start from, because the run diverged before the change"
        )
        lines += [f"{text}: {'; '.join(stuck)}.", ""]
    return lines


def _has_end(row: Row) -> bool:
    return row["metric_mean"] is not None or row["diverged_at_end"] > 0


def _end(row: Row) -> str:
    if not _has_end(row):
        return "–"
    lost = f" ({row['diverged_at_end']} lost)" if row["diverged_at_end"] else ""
    return plus_minus(row["metric_mean"], row["metric_sd"]) + lost


def _pivot(rows: Sequence[Row], ramps: Sequence[str], show: Callable[[Row], str]) -> list[str]:
    """Return a table with a line for each change, a column for each ramp, the default bold."""
    lines: dict[tuple[Any, ...], dict[str, str]] = {}
    for row in rows:
        key = (_fraction(row["k"]), row["when"], f"{row['momentum']:g}", str(row["seeds"]))
        text = show(row)
        lines.setdefault(key[:3], {})[row["ramp"]] = f"**{text}**" if row["is_default"] else text
    cells = [[*key, *(found.get(ramp, "–") for ramp in ramps)] for key, found in lines.items()]
    return table(["k", "when", "momentum", *ramps], cells)


def _fraction(ratio: float) -> str:
    return f"{ratio:g}" if ratio >= 1 else f"1/{1 / ratio:g}"


def _workers(rows: Sequence[Row]) -> list[str]:
    lines = ["### On real workers", ""]
    if not rows:
        return [*lines, "**Missing: changes on real workers.**", ""]
    head = ["k", "ramp", "workers", "peak", "emulated", "largest difference"]
    cells = [
        [
            *(_fraction(row["k"]), row["ramp"]),
            " or ".join(sorted({_sizes(sizes) for sizes in row["sizes"]})),
            *(_peak(row), shown(row["emulated_peak_ratio_mean"]), shown(row["difference_max"])),
        ]
        for row in rows
    ]
    tasks = listed(sorted({row["task"] for row in rows}))
    text = (
        f"The same change ({tasks}, from the same states) under `elastane run`: workers join the "
        "job or leave it while it trains, each with a base batch of its own. Then one worker "
        "emulates the same numbers of workers step by step. The difference is the largest of all "
        "held-out losses, relative to the emulated one: rounding, which training lets grow."
    )
    return [*lines, text, "", *table(head, cells)]


def _sizes(stretches: Sequence[Sequence[int]]) -> str:
    return ", ".join(f"{steps} x {size}" for size, steps in stretches)


def _noise(rows: Sequence[Row], *, pictures: Path) -> list[str]:
    lines = ["### The noise model, measured", ""]
    if not rows:
        return [*lines, "**Missing: the variance of updates.**", ""]
    draw_noise(rows, path=pictures / "results-noise.png")
    head = ["k", "ramp", "model: peak", "at step", "measured: peak", "at step"]
    cells = [
        [
            *(_fraction(row["k"]), row["ramp"]),
            *(shown(row["predicted_peak"]), str(row["predicted_peak_step"])),
            *(shown(row["measured_peak"]), str(row["measured_peak_step"])),
        ]
        for row in rows
    ]
    tasks = listed(sorted({row["task"] for row in rows}))
    text = (
        f"Variance of the weights' updates ({tasks}) in the first {len(rows[0]['measured'])} steps "
        "after a change, over that before it and over k, so that 1 is where linear scaling "
        "settles; over replicas that saw other samples. [Mathematics](mathematics.md) has the "
        "model."
    )
    alt = "Variance of updates after a change, measured and by the model"
    return [*lines, text, "", *table(head, cells), f"![{alt}](_static/results-noise.png)", ""]


_MEANING = """\
`k` is the new batch over the old. A run under linear scaling (with warm-up) is saved before the
change, at 20 % (early), 50 % (middle) or 80 % (late) of its length; all ramps go on from that one
state for the same number of steps, with the schedule standing still. Under momentum 0.99 the
learning rate is a tenth, so that a gradient is worth as much in the end. The peak is the largest
mean of five held-out losses that follow one another, over the last such mean before the change.
What is back is at most 5 % above it, for good; the number of steps looked at stands for never. Bold
is elastane's default. A run is lost if a loss or gradient was not finite, or if the held-out loss
of its end was not at least 5 % below an untrained model's; means are over the others.

| ramp | learning rate after the change |
|---|---|
| unchanged | as before |
| immediate | times k at once |
| T=8, T=8k, T=1/(1-m) | from 1 to k times the old one over T steps (Dynamic SGD, equation 6) |
| noise-matched | so that the variance of an update is at once that of linear scaling |
| velocity kept | times k at once, the momentum buffer divided by k |
| T=8k, velocity kept | as T=8k, the buffer divided at each step by what the rate has grown by |"""
