"""What a change of batch does to training, under several ramps of the learning rate.

    python -m benchmarks.dynamic_sgd [--task NAME] [--quick] [--resume] [--json PATH|-]

A run under linear scaling is saved before a change; all ramps go on from that state, for a number
of steps with the schedule standing still. `k` is the new batch over the old. The peak is the
largest mean of five held-out losses that follow one another, over the last such mean before the
change. A branch diverged if a loss or gradient was not finite, or if the held-out loss at its end
was not at least 5 % below an untrained model's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from benchmarks.dynamic_sgd.grid import TASKS, make_plan
from benchmarks.dynamic_sgd.rows import courses, make_rows, noises, on_workers
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

_NAME = "dynamic_sgd"
_MODULE = "benchmarks.dynamic_sgd.runs"


def draw(rows: list[dict[str, Any]]) -> Table:
    """Return the rows as a table; the default is marked."""
    table = Table(title="Changes of batch")
    for name in ("task", "k", "when", "momentum", "ramp"):
        table.add_column(name)
    for name in ("peak", "recovered", "metric", "diverged"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            *(row["task"], f"{row['k']:g}", row["when"], f"{row['momentum']:g}"),
            row["ramp"] + " *" * row["is_default"],
            *(shown(row[f"{name}_mean"]) for name in ("peak_ratio", "recover_steps", "metric")),
            f"{row['diverged']} of {row['seeds']}",
        )
    return table


@click.command(help="Compare ramps of the learning rate after a change of batch.")
@click.option(
    "--scales",
    callback=whole_numbers(at_least=2),
    metavar="2,4,...",
    help="Ratios, instead of the grid's own.",
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
    plan = make_plan(
        tasks, folder=folder.resolve(), ratios=scales, seeds=request.seeds, quick=quick
    )
    real = [] if no_real_workers else plan.worker_runs
    with ending_on_sigterm():
        run_plan(plan.runs, request=request, ledger=ledger, module=_MODULE, console=console)
        if real:
            run_plan(real, request=request, ledger=ledger, module=_MODULE, console=console)
    result = {
        "benchmark": _NAME,
        **facts(ledger, [*plan.runs, *real], missing=missing),
        "rows": make_rows(plan, ledger=ledger),
        "noise": noises(plan, ledger=ledger),
        "workers": on_workers(plan, ledger=ledger),
        "courses": courses(plan, ledger=ledger),
    }
    console.print(draw(result["rows"]))
    write_json(result, path=json_path)


if __name__ == "__main__":
    main()
