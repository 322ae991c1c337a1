"""What is made of the runs of the AdaScale table: rows, predicted gains, curves, spreads.

Pure: reads a ledger's records and returns JSON values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.adascale.plan import Cell, Plan, measure_names, schedule_names
from benchmarks.adascale.rules import TRIED
from benchmarks.runs.figures import mean, spread
from benchmarks.runs.ledger import Ledger
from benchmarks.runs.training import POINTS
from benchmarks.tasks import load_task

__all__ = ["curves", "gains", "make_rows", "schedules", "traces"]

Row = dict[str, Any]
Record = Mapping[str, Any]


def make_rows(plan: Plan, *, ledger: Ledger) -> list[Row]:
    """Return a row for each cell that has at least one finished run.

    Means are over the runs that did not diverge, which are counted beside them.
    """
    found = ((cell, ledger.records(names)) for cell, names in plan.cells.items())
    return [_row(cell, records) for cell, records in found if records]


def _row(cell: Cell, records: Sequence[Record]) -> Row:
    task, good = load_task(cell.task), _good(records)
    return {
        "task": cell.task,
        "rule": cell.rule,
        "scale": cell.scale,
        "seeds": len(records),
        "metric": task.metric,
        "higher_is_better": task.higher_is_better,
        "metric_mean": mean(record["metric"] for record in good),
        "metric_sd": spread(record["metric"] for record in good),
        "train_loss_mean": mean(record["train_loss"] for record in good),
        "steps_mean": mean(record["steps"] for record in good),
        "mean_gain": mean(record["num_steps"] / record["steps"] for record in good),
        "diverged": len(records) - len(good),
        "momentum": TRIED.get(cell.rule, {}).get("momentum", task.recipe.momentum),
    }


def _good(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if not record["diverged"]]


def gains(plan: Plan, *, ledger: Ledger) -> list[Row]:
    """Return AdaScale's mean gain at each scale beside what the noise at S = 1 predicts."""
    rows: list[Row] = []
    for cell, names in plan.cells.items():
        good = _good(ledger.records(names))
        noise = ledger.records(measure_names(cell.task, plan))
        if cell.rule != "adascale" or cell.scale == 1 or not good or not noise:
            continue
        if str(cell.scale) not in noise[0]["gains"]:
            continue
        measured = mean(record["num_steps"] / record["steps"] for record in good)
        predicted = mean(record["gains"][str(cell.scale)] for record in noise)
        assert measured is not None
        assert predicted is not None
        rows.append(
            {
                "task": cell.task,
                "scale": cell.scale,
                "predicted": predicted,
                "measured": measured,
                "error": round(predicted / measured - 1, 4),
            }
        )
    return rows


def curves(plan: Plan, *, ledger: Ledger) -> list[Row]:
    """Return the validation metric against progress, mean and spread over the seeds."""
    rows: list[Row] = []
    for cell, names in plan.cells.items():
        runs = [r["curve"] for r in _good(ledger.records(names)) if r["curve"]]
        if runs:
            length = max(record["num_steps"] for record in ledger.records(names))
            rows.append({"task": cell.task, "rule": cell.rule, "scale": cell.scale})
            rows[-1] |= _mean_curve(runs, length=length)
    return rows


def _mean_curve(runs: Sequence[Sequence[Sequence[float]]], *, length: float) -> Row:
    """Return curves on one grid of progress; no point lies before the first evaluation of any."""
    start = max(curve[0][0] for curve in runs)
    grid = [tau for tau in np.linspace(0, length, POINTS + 1).tolist() if tau >= start] or [length]
    values = [
        np.interp(grid, [point[0] for point in curve], [point[1] for point in curve]).tolist()
        for curve in runs
    ]
    by_point = list(zip(*values, strict=True))
    return {
        "tau": [round(tau, 3) for tau in grid],
        "mean": [mean(point) for point in by_point],
        "sd": [spread(point) for point in by_point],
    }


def traces(plan: Plan, *, ledger: Ledger) -> list[Row]:
    """Return gain and learning rate along AdaScale's first run at each scale."""
    rows: list[Row] = []
    for cell, names in plan.cells.items():
        records = ledger.records(names[:1])
        if cell.rule == "adascale" and records:
            trace = {name: records[0]["trace"][name] for name in ("tau", "gain", "lr")}
            rows.append({"task": cell.task, "scale": cell.scale, **trace})
    return rows


def schedules(ledger: Ledger, *, task: str) -> Row | None:
    """Return the spread over random schedules of real workers beside that over seeds at S = 1.

    Each schedule has a seed of its own, too, so its spread holds both.
    """
    ended = ledger.records(schedule_names())
    prefix = f"{task} base 1 seed "
    base = [
        entry.record
        for entry in ledger.entries
        if entry.name.startswith(prefix) and entry.record is not None
    ]
    sd = spread(record["metric"] for record in _good(ended))
    base_sd = spread(record["metric"] for record in _good(base))
    if sd is None or not base_sd:
        return None
    return {
        "task": task,
        "metric": load_task(task).metric,
        "schedules": len(ended),
        "mean": mean(record["metric"] for record in _good(ended)),
        "sd": sd,
        "base_seeds": len(base),
        "base_mean": mean(record["metric"] for record in _good(base)),
        "base_sd": base_sd,
        "ratio": round(sd / base_sd, 3),
        "diverged": len(ended) - len(_good(ended)),
        "sizes": [record["sizes"] for record in ended],
    }
