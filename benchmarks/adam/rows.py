"""What is made of the study's runs: rows, the learning rates that were found, and spikes.

Pure: reads a ledger's records and returns JSON values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.adam.plan import TASK, Cell, Plan
from benchmarks.adam.rules import FOUND, FOUND_LONGER
from benchmarks.runs.figures import mean, spread
from benchmarks.runs.ledger import Ledger
from benchmarks.tasks import load_task

__all__ = ["best_rows", "make_rows", "spikes"]

Row = dict[str, Any]
Record = Mapping[str, Any]


def make_rows(plan: Plan, *, ledger: Ledger) -> list[Row]:
    """Return a row for each way and scale that has at least one finished run.

    Means are over the runs that did not diverge, which are counted beside them.
    """
    found = ((cell, ledger.records(names)) for cell, names in plan.cells.items())
    return [_row(cell, records) for cell, records in found if records and cell.moments is None]


def _row(cell: Cell, records: Sequence[Record]) -> Row:
    good = [record for record in records if not record["diverged"]]
    return {
        "rule": cell.rule,
        "scale": cell.scale,
        "lr_factor": cell.lr_factor,
        "seeds": len(records),
        "metric": load_task(TASK).metric,
        "metric_mean": mean(record["metric"] for record in good),
        "metric_sd": spread(record["metric"] for record in good),
        "steps_mean": mean(record["steps"] for record in good),
        "mean_gain": mean(record["num_steps"] / record["steps"] for record in good),
        "diverged": len(records) - len(good),
    }


def best_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the best row of each search, that of the lowest mean where all seeds converged."""
    searches: dict[tuple[str, Any], list[Row]] = {}
    for row in rows:
        if row["rule"] in (FOUND, FOUND_LONGER) and not row["diverged"]:
            searches.setdefault((row["rule"], row["scale"]), []).append(row)
    return [min(found, key=lambda row: row["metric_mean"]) for found in searches.values()]


def spikes(plan: Plan, *, ledger: Ledger) -> list[Row]:
    """Return how high the loss rose at a change of batch, with moments carried over or reset."""
    rows: list[Row] = []
    for cell, names in plan.cells.items():
        records = ledger.records(names)
        if cell.moments is None or not records:
            continue
        ratios = [record["peak_ratio"] for record in records if not record["diverged"]]
        rows.append(
            {
                "rule": cell.rule,
                "changes": cell.scale,
                "moments": cell.moments,
                "seeds": len(records),
                "diverged": len(records) - len(ratios),
                "peak_ratio_mean": mean(ratios),
                "peak_ratio_max": max(ratios, default=None),
                "losses": [*records[0]["before"], *records[0]["after"]],
            }
        )
    return rows
