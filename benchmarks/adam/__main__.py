"""AdamW in larger batches: rules beside the best learning rate that a search finds.

    python -m benchmarks.adam [--quick] [--resume] [--json PATH|-]

A small transformer learns the letters of the King James version. `S` workers are emulated by as
many micro-batches of the base batch. A run diverged if a loss or gradient was not finite, or if
the mean training loss of its last tenth is not at least 5 % below an untrained model's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from benchmarks.adam.plan import TASK, make_plan
from benchmarks.adam.rows import best_rows, make_rows, spikes
from benchmarks.output import write_json
from benchmarks.runs.driver import (
    Request,
    available,
    facts,
    open_ledger,
    run_plan,
    shared_options,
)
from benchmarks.runs.figures import shown

_NAME = "adam"
_MODULE = "benchmarks.adam.runs"


def draw(rows: list[dict[str, Any]]) -> Table:
    """Return the rows as a table."""
    table = Table(title="AdamW in larger batches")
    for name in ("rule", "scale", "lr x", "bits a letter", "sd", "steps", "gain", "diverged"):
        table.add_column(name, justify="left" if name == "rule" else "right")
    for row in rows:
        table.add_row(
            *(row["rule"], str(row["scale"]), shown(row["lr_factor"])),
            *(shown(row[name]) for name in ("metric_mean", "metric_sd", "steps_mean", "mean_gain")),
            f"{row['diverged']} of {row['seeds']}",
        )
    return table


@click.command(help="Compare what can be done with AdamW in larger batches.")
@shared_options(_NAME, tasks=(TASK,))
def main(json_path: str | None, out: Path | None, **given: Any) -> None:
    quick = given["quick"]
    request = Request(**given, out=out or Path("benchmarks", "out", _NAME + "-quick" * quick))
    console = Console(stderr=True)
    tasks, missing = available(request.tasks or (TASK,), console=console)
    if TASK not in tasks:
        raise click.UsageError(missing.get(TASK, f"the study has one task, {TASK}"))
    ledger = open_ledger(request, benchmark=_NAME)
    plan = make_plan(seeds=request.seeds, quick=quick)
    run_plan(plan.runs, request=request, ledger=ledger, module=_MODULE, console=console)
    rows = make_rows(plan, ledger=ledger)
    console.print(draw(rows))
    result = {
        "benchmark": _NAME,
        **facts(ledger, plan.runs, missing=missing),
        "rows": rows,
        "best": best_rows(rows),
        "spikes": spikes(plan, ledger=ledger),
    }
    write_json(result, path=json_path)


if __name__ == "__main__":
    main()
