"""The part of the page of results that AdaScale's table fills.

Knows the form of its result; nothing of how it came about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.adascale.rules import SELDOM
from benchmarks.results_page.pictures import draw_curves, draw_gains, draw_scales
from benchmarks.results_page.text import listed, origin, plus_minus, shown, table
from benchmarks.results_page.verdicts import holds, judge_scales

__all__ = ["reasons", "section"]

Row = Mapping[str, Any]
_GOAL_ERROR, _GOAL_RATIO = 0.25, 1.5


def section(result: Mapping[str, Any], *, pictures: Path) -> list[str]:
    """Return the lines of the section, and write its pictures into a folder."""
    rows = result["rows"]
    lines = ["## AdaScale", "", _MEANING, "", *origin(result)]
    if not rows:
        return [*lines, "Nothing has been measured yet.", ""]
    drawn = [row for row in rows if row["rule"] != SELDOM]  # it would cover the line of AdaScale
    draw_scales(drawn, path=pictures / "results-scales.png")
    alt = "Each task's metric against the scale, a line for each rule"
    lines += [*_verdicts(rows), f"![{alt}](_static/results-scales.png)", "", *seldom(rows)]
    for task in dict.fromkeys(row["task"] for row in rows):
        lines += _task(task, result, pictures=pictures)
    lines += _gains(result["gains"])
    if result["traces"]:
        draw_gains(result["traces"], path=pictures / "results-gains.png")
        alt = "Gain and learning rate against progress, for each task and scale"
        lines += ["Gain and learning rate along AdaScale's first run at each scale:", ""]
        lines += [f"![{alt}](_static/results-gains.png)", ""]
    return lines + _schedules(result["schedules"])


def _verdicts(rows: Sequence[Row]) -> list[str]:
    found = judge_scales(rows)
    if not found:
        return ["Too few seeds at S = 1 to judge anything.", ""]
    head = ["task", "within 2 sd of S = 1, or better, at S =", "not at S =", "LSW against it"]
    cells = [
        [
            one.task,
            listed(one.holds_at) or "–",
            listed(one.fails_at) or "–",
            "–" if one.largest is None else _linear(one.largest, worse=one.linear_worse),
        ]
        for one in found
    ]
    return ["What AdaScale's metric does as the scale grows:", "", *table(head, cells)]


def seldom(rows: Sequence[Row]) -> list[str]:
    """Return what measuring as seldom as by default does to the metric, beside each step."""
    every = {(row["task"], row["scale"]): row for row in rows if row["rule"] == "adascale"}
    pairs = [(row, every.get((row["task"], row["scale"]))) for row in rows if row["rule"] == SELDOM]
    cells = [
        [
            *(row["task"], str(row["scale"])),
            *(plus_minus(one["metric_mean"], one["metric_sd"]) for one in (base, row)),
            *(shown(one["mean_gain"]) for one in (base, row)),
            "yes" if holds(row, base=base) else "**no**",
        ]
        for row, base in pairs
        if base is not None
    ]
    if not cells:
        return []
    head = ["task", "S", "each step", "seldom", "gain, each step", "gain, seldom", "within 2 sd"]
    return [_SELDOM, "", *table(head, cells)]


def _linear(scale: int, *, worse: bool | None) -> str:
    return f"{'worse or diverged' if worse else '**not worse**'} at S = {scale}"


def _task(task: str, result: Mapping[str, Any], *, pictures: Path) -> list[str]:
    own = [row for row in result["rows"] if row["task"] == task]
    better = "higher" if own[0]["higher_is_better"] else "lower"
    head = ["rule", "S", own[0]["metric"], "training loss", "steps", "mean gain", "diverged"]
    cells = [
        [
            row["rule"],
            str(row["scale"]),
            plus_minus(row["metric_mean"], row["metric_sd"]),
            *(shown(row[name]) for name in ("train_loss_mean", "steps_mean", "mean_gain")),
            f"{row['diverged']} of {row['seeds']}",
        ]
        for row in own
    ]
    lines = [f"### {task.capitalize()}", "", f"{own[0]['metric']}, {better} is better.", ""]
    lines += [*table(head, cells), *reasons(own)]
    curves = [
        curve
        for curve in result["curves"]
        if curve["task"] == task and curve["rule"] == "adascale" and len(curve["tau"]) > 1
    ]
    if curves:
        name = f"results-curves-{task.rpartition('.')[2]}.png"
        draw_curves(curves, metric=own[0]["metric"], path=pictures / name)
        lines += [f"![AdaScale's {own[0]['metric']} against progress](_static/{name})", ""]
    return lines


def reasons(rows: Sequence[Row]) -> list[str]:
    """Return what the training loss and the steps say of the scales where the metric is worse."""
    own = {row["scale"]: row for row in rows if row["rule"] == "adascale"}
    lines: list[str] = []
    for verdict in judge_scales(rows):
        for scale in verdict.fails_at:
            row, base = own[scale], own[1]
            if row["train_loss_mean"] is not None:
                lines += [f"- S = {scale}: {_reason(row, base=base)}"]
            lines += [f"- S = {scale}, tried: {text}" for text in _tried(rows, scale=scale)]
    if not lines:
        return []
    return ["Where the metric is worse than at S = 1 by more than 2 sd:", "", *lines, ""]


def _tried(rows: Sequence[Row], *, scale: int) -> list[str]:
    """Return what other conditions did at a scale, each beside S = 1 under the same where known."""
    found = {(row["rule"], row["scale"]): row for row in rows}
    lines: list[str] = []
    for rule in dict.fromkeys(row["rule"] for row in rows if row["rule"].startswith("adascale, ")):
        if rule != SELDOM and (rule, scale) in found:
            row = found[rule, scale]
            base = found.get((rule, 1)) or found["adascale", 1]
            verdict = "within 2 sd of it, or better" if holds(row, base=base) else "worse, too"
            lines += [
                f"{rule}: {shown(row['metric_mean'])}, and "
                f"{plus_minus(base['metric_mean'], base['metric_sd'])} at S = 1 "
                f"({base['rule']}): {verdict}."
            ]
    return lines


def _reason(row: Row, *, base: Row) -> str:
    ends = (
        f"training loss {shown(row['train_loss_mean'])}, {shown(base['train_loss_mean'])} at S = 1"
    )
    if row["train_loss_mean"] <= base["train_loss_mean"]:
        return (
            f"{ends}. Training comes as far or farther: what is lost is not progress, but how the "
            "model does on samples that it has not seen."
        )
    memories = [one["steps_mean"] * (1 - one["momentum"]) for one in (row, base)]
    return (
        f"{ends}. Training itself comes less far. The run has {memories[0]:.1f} time constants of "
        f"momentum {row['momentum']:g}, {memories[1]:.1f} at S = 1."
    )


def _gains(gains: Sequence[Row]) -> list[str]:
    if not gains:
        return []
    within = sum(abs(row["error"]) <= _GOAL_ERROR for row in gains)
    head = ["task", "S", "predicted", "measured", "error"]
    cells = [
        [
            row["task"],
            *(str(row["scale"]), shown(row["predicted"]), shown(row["measured"])),
            f"{row['error']:+.1%}",
        ]
        for row in gains
    ]
    text = (
        "Mean gain at each scale, as predicted from the gradient noise of runs at S = 1 alone "
        f"(each base batch taken in two halves): {within} of {len(gains)} are within "
        f"{_GOAL_ERROR:.0%}."
    )
    return ["### Gains predicted from S = 1", "", text, "", *table(head, cells)]


def _schedules(found: Row | None) -> list[str]:
    lines = ["### Workers that come and go", ""]
    if found is None:
        return [*lines, "**Missing: the runs on real workers.**", ""]
    verdict = "within" if found["ratio"] <= _GOAL_RATIO else "**above**"
    text = (
        f"{found['schedules']} runs of {found['task']} under `elastane run`, each with a seed and "
        "a random schedule of 1 to 4 real workers of its own: "
        f"{found['metric']} {plus_minus(found['mean'], found['sd'])}, beside "
        f"{plus_minus(found['base_mean'], found['base_sd'])} of {found['base_seeds']} seeds at "
        f"S = 1. The spread is {found['ratio']:.2f} times that of the seeds, {verdict} the goal of "
        f"{_GOAL_RATIO:g}. {found['diverged']} diverged."
    )
    return [*lines, text, ""]


_SELDOM = """\
Elastane measures as seldom as the noise allows, up to every 16th step (`Measuring(every="auto")`);
in all other rows each step is measured. The metric of both, at the same scale:"""

_MEANING = """\
`S` is the batch over the base batch. Data, model, schedule and hyper-parameters of a task are the
same in all of its rows, tuned at S = 1 only. `S` workers are emulated by as many micro-batches of
the base batch on one thread. Means and standard deviations are over the seeds that did not diverge,
and those that did are counted: a loss or gradient was not finite, or the mean training loss of the
run's last tenth was not at least 5 % below an untrained model's.

| rule | learning rate times | steps |
|---|---|---|
| adascale | the gain | until the gains add up to the base run's steps |
| lsw | S, after a linear warm-up over 5.5 % of the run | base run's over S |
| lsw+ | as lsw, stretched | as many as AdaScale took with this seed |
| sqrt | root of S | base run's over S |
| identity | 1 | until the gains add up to the base run's steps |
| adascale, momentum 0.9 or 0.5 | the gain; `lr / (1 - m)` as in the task | as adascale |
| adascale, no average | the gain of the last step's moments alone | as adascale |
| adascale, seldom measured | the gain, measured as seldom as by default | as adascale |

`8-16-32` and `32-16-8` are changes of the scale at a quarter and at half of the run. There
`adascale` has elastane's default ramp after each growth, and `adascale, no ramp` follows the gain
at once."""
