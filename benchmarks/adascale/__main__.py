"""AdaScale beside other rules on five tasks, on emulated workers, and on real ones that change.

    python -m benchmarks.adascale [--task NAME] [--quick] [--resume] [--json PATH|-]

`S` workers are emulated by as many micro-batches of the base batch. All hyper-parameters are those
of S = 1. A run diverged if a loss or gradient was not finite, or if the mean training loss of its
last tenth is not at least 5 % below an untrained model's; means are over the runs that did not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from benchmarks.adascale.plan import SCHEDULES_TASK, TASKS, Plan, make_plan, random_runs
from benchmarks.adascale.rows import curves, gains, make_rows, schedules, traces
from benchmarks.output import write_json
from benchmarks.resize.job import ending_on_sigterm
from benchmarks.runs.driver import (
    Request,
    available,
    facts,
    open_ledger,
    run_plan,
    shared_options,
    whole_numbers,
)
from benchmarks.runs.figures import shown
from benchmarks.runs.ledger import Ledger, Run

_NAME = "adascale"
_MODULE = "benchmarks.adascale.runs"


def draw(rows: list[dict[str, Any]]) -> Table:
    """Return the rows as a table."""
    table = Table(title="AdaScale beside other rules")
    for name in ("task", "rule"):
        table.add_column(name)
    for name in ("scale", "metric", "sd", "loss", "steps", "gain", "diverged"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            *(row["task"], row["rule"], str(row["scale"])),
            *(shown(row[name]) for name in ("metric_mean", "metric_sd")),
            *(shown(row[name]) for name in ("train_loss_mean", "steps_mean", "mean_gain")),
            f"{row['diverged']} of {row['seeds']}",
        )
    return table


def summary(plan: Plan, *, runs: list[Run], ledger: Ledger, missing: dict[str, str]) -> Any:
    """Return the result, as far as there are runs for it."""
    return {
        "benchmark": _NAME,
        **facts(ledger, runs, missing=missing),
        "rows": make_rows(plan, ledger=ledger),
        "gains": gains(plan, ledger=ledger),
        "schedules": schedules(ledger, task=SCHEDULES_TASK),
        "curves": curves(plan, ledger=ledger),
        "traces": traces(plan, ledger=ledger),
    }


@click.command(help="Compare AdaScale with other scaling rules.")
@click.option(
    "--scales",
    callback=whole_numbers(at_least=1),
    metavar="1,4,...",
    help="Instead of the table's own.",
)
@click.option("--no-real-workers", is_flag=True, help="Leave the runs on real workers out.")
@shared_options(_NAME, tasks=TASKS)
def main(
    scales: tuple[int, ...] | None,
    no_real_workers: bool,
    json_path: str | None,
    out: Path | None,
    **given: Any,
) -> None:
    quick = given["quick"]
    folder = out or Path("benchmarks", "out", _NAME + "-quick" * quick)
    request = Request(**given, out=folder)
    console = Console(stderr=True)
    tasks, missing = available(request.tasks or TASKS, console=console)
    ledger = open_ledger(request, benchmark=_NAME)
    plan = make_plan(tasks, scales=scales, seeds=request.seeds, quick=quick)
    real = [] if no_real_workers else random_runs(plan, quick=quick)
    with ending_on_sigterm():
        run_plan(plan.runs, request=request, ledger=ledger, module=_MODULE, console=console)
        if real:
            run_plan(real, request=request, ledger=ledger, module=_MODULE, console=console)
    result = summary(plan, runs=[*plan.runs, *real], ledger=ledger, missing=missing)
    console.print(draw(result["rows"]))
    write_json(result, path=json_path)


if __name__ == "__main__":
    main()
