"""What is made of the runs of the Dynamic SGD tables: rows, and the noise beside its model.

Pure: reads a ledger's records and returns JSON values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.dynamic_sgd.grid import Cell, Plan
from benchmarks.dynamic_sgd.measure import WINDOW, running_means
from benchmarks.dynamic_sgd.ramps import default_ramp
from benchmarks.runs.figures import mean, spread
from benchmarks.runs.ledger import Ledger
from benchmarks.tasks import load_task

__all__ = ["courses", "make_rows", "noises", "on_workers"]

Row = dict[str, Any]
Record = Mapping[str, Any]


def make_rows(plan: Plan, *, ledger: Ledger) -> list[Row]:
    """Return a row for each cell that has at least one finished run.

    Means are over the branches that did not diverge, which are counted beside them, as are those
    that had no state to start from.
    """
    rows: list[Row] = []
    for cell, names in plan.branches.items():
        records = ledger.records(names)
        if records:
            ends = ledger.records(plan.finishes.get(cell, []))
            rows.append(_key(cell) | _figures(records, ends) | _metric(cell.task))
    return rows


def _key(cell: Cell) -> Row:
    return {
        "task": cell.task,
        "k": cell.k,
        "when": cell.when,
        "momentum": cell.momentum,
        "ramp": cell.ramp,
        "is_default": default_ramp(cell.k, momentum=cell.momentum) == cell.ramp,
    }


def _figures(records: Sequence[Record], ends: Sequence[Record]) -> Row:
    started = [record for record in records if not record["no_start"]]
    good = [record for record in started if not record["diverged"]]
    finished = [record for record in ends if not record["no_start"]]
    metrics = [record["metric"] for record in finished if not record["diverged"]]
    return {
        "seeds": len(started),
        "peak_ratio_mean": mean(record["peak_ratio"] for record in good),
        "peak_ratio_sd": spread(record["peak_ratio"] for record in good),
        "peak_step_mean": mean(_peak_step(record["after"]) for record in good),
        "recover_steps_mean": mean(record["recover_steps"] for record in good),
        "metric_mean": mean(metrics),
        "metric_sd": spread(metrics),
        "diverged": len(started) - len(good),
        "diverged_at_end": len(finished) - len(metrics),
        "no_start": len(records) - len(started),
    }


def _peak_step(losses: Sequence[float]) -> int:
    """Return the last step of the largest running mean."""
    means = running_means(losses)
    return means.index(max(means)) + min(WINDOW, len(losses))


def _metric(task: str) -> Row:
    found = load_task(task)
    return {"metric": found.metric, "higher_is_better": found.higher_is_better}


def courses(plan: Plan, *, ledger: Ledger) -> list[Row]:
    """Return the first seed's held-out loss around each change, over its level before."""
    rows: list[Row] = []
    for cell, names in plan.branches.items():
        for record in ledger.records(names[:1]):
            if not record["no_start"] and record["after"]:
                level = running_means(record["before"])[-1]
                ratios = [round(loss / level, 4) for loss in record["after"]]
                rows.append(_key(cell) | {"ratios": ratios})
    return rows


def noises(plan: Plan, *, ledger: Ledger) -> list[Row]:
    """Return the variance of updates after a change beside the noise model's, both over `k`."""
    rows: list[Row] = []
    for cell, names in plan.noises.items():
        for record in ledger.records(names):
            if not record["no_start"]:
                measured, predicted = record["measured"], record["predicted"]
                rows.append(
                    _key(cell)
                    | {
                        "predicted_peak": float(f"{max(predicted):.4g}"),
                        "predicted_peak_step": predicted.index(max(predicted)) + 1,
                        "measured_peak": float(f"{max(measured):.4g}"),
                        "measured_peak_step": measured.index(max(measured)) + 1,
                        "predicted": [float(f"{value:.4g}") for value in predicted],
                        "measured": [float(f"{value:.4g}") for value in measured],
                    }
                )
    return rows


def on_workers(plan: Plan, *, ledger: Ledger) -> list[Row]:
    """Return the peaks of changes on real workers beside those of the same changes emulated."""
    rows: list[Row] = []
    for cell, names in plan.on_workers.items():
        started = [one for one in ledger.records(names) if not one["no_start"]]
        good = [record for record in started if not record["diverged"]]
        if started:
            peaks = ("peak_ratio", "emulated_peak_ratio")
            rows.append(
                _key(cell)
                | {"seeds": len(started), "diverged": len(started) - len(good)}
                | {f"{name}_mean": mean(record[name] for record in good) for name in peaks}
                | {
                    "difference_max": max((record["difference"] for record in good), default=None),
                    "sizes": [record["sizes"] for record in started],
                }
            )
    return rows
