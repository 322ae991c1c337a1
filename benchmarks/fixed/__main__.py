"""Where the time of a step goes that does not depend on the model: by part, in microseconds.

    python -m benchmarks.fixed [--json PATH|-] [--quick] [--rounds N] [--clock wall|cpu]

The model has 108 parameters and a micro-batch four samples, so that nothing else costs. The parts
of a live session, and of a plain loop beside it, are timed call by call; the price of timing is
known and taken off. `step` is the same loop untimed, in the same rounds, `step, by part` with its
parts timed, and `rest` what no part accounts for. `(beside the step)` is another thread's work.
The processor's clock of the thread knows no waits; it serves where other jobs run as well.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from benchmarks.fixed.rounds import CLOCKS, measure
from benchmarks.output import versions, write_json

Row = dict[str, Any]

SETTINGS = ((1, 1), (1, 2), (4, 1))
"""Workers and micro-batches of each."""


def rows_of(found: dict[str, Any], *, workers: int, micro_batches: int) -> list[Row]:
    """Return a row for each part of each loop, the longest first, then those for the whole."""
    rows: list[Row] = []
    for loop, steps in found["whole"].items():
        rows += _rows(found["parts"].get(loop, []))
        rows += [{"part": "step", **_spread([step["step"] for step in steps])}]
        for row in rows:
            row.setdefault("loop", loop)
    return [{**row, "workers": workers, "micro_batches": micro_batches} for row in rows]


def _rows(steps: Sequence[dict[str, float]]) -> list[Row]:
    names = dict.fromkeys(name for step in steps for name in step if name not in ("rest", "step"))
    rows = [{"part": name, **_spread([step.get(name, 0.0) for step in steps])} for name in names]
    rows.sort(key=lambda row: -row["us_median"])
    for name, shown in (("rest", "rest"), ("step", "step, by part")):
        rows += [{"part": shown, **_spread([step[name] for step in steps])}] if steps else []
    return rows


def _spread(values: Sequence[float]) -> Row:
    """Return median, quartiles and mean of microseconds; the means of the parts add up."""
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    numbers = {"us_median": median, "us_q1": q1, "us_q3": q3, "us_mean": statistics.mean(values)}
    return {name: round(value, 2) for name, value in numbers.items()} | {"steps": len(values)}


def draw(rows: Sequence[Row]) -> Table:
    """Return the rows as a table."""
    table = Table(title="Microseconds of a step by part")
    for name in ("workers x micro", "loop", "part"):
        table.add_column(name)
    for name in ("median", "q1-q3", "mean"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            f"{row['workers']} x {row['micro_batches']}",
            *(row["loop"], row["part"], f"{row['us_median']:.1f}"),
            *(f"{row['us_q1']:.1f}-{row['us_q3']:.1f}", f"{row['us_mean']:.1f}"),
        )
        if row["part"] == "step":
            table.add_section()
    return table


@click.command(help="Time the parts of a step.")
@click.option("--json", "json_path", metavar="PATH|-", help="Write JSON here; - for stdout.")
@click.option("--quick", is_flag=True, help="Two rounds, without four workers: to see it run.")
@click.option("--rounds", default=50, show_default=True, type=click.IntRange(2))
@click.option("--clock", default="wall", show_default=True, type=click.Choice(list(CLOCKS)))
def main(json_path: str | None, quick: bool, rounds: int, clock: str) -> None:
    console = Console(stderr=True)
    rows: list[Row] = []
    call_us: dict[str, float] = {}
    for workers, micro_batches in SETTINGS[:2] if quick else SETTINGS:
        console.print(f"{workers} x {micro_batches} ...")
        found = measure(workers, micro_batches, rounds=2 if quick else rounds, clock=clock)
        rows += rows_of(found, workers=workers, micro_batches=micro_batches)
        call_us[f"{workers} x {micro_batches}"] = round(found["call_us"], 3)
    console.print(draw(rows))
    result = {
        "benchmark": "fixed",
        "clock": clock,
        "rows": rows,
        "timed_call_us": call_us,
        "versions": versions(),
    }
    write_json(result, path=json_path)


if __name__ == "__main__":
    main()
