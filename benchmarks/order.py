"""How long it takes to compute a slice of an epoch's order, for datasets of any size.

Run with OMP_NUM_THREADS=1, as all our times are on one thread (numpy's loops use no more anyway):

    OMP_NUM_THREADS=1 python -m benchmarks.order [--json PATH|-] [--rounds N]

Each round takes 65,536 places (or the whole epoch if it is smaller) from a random start of a random
epoch. The last row is there for scale: numpy's own shuffle of a million, which needs the memory.
"""

from __future__ import annotations

import os
import platform
import random
import statistics
import time
from collections.abc import Callable

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.output import write_json
from elastane.permutation import permute_range

COUNT = 65_536
GOAL_MS = 6.0
SIZES = (4_096, 5_000, 60_000, 10**6, 1000**2 + 1, 2**30 + 1, 10**9, 10**12, (10**6 - 1) ** 2 + 1)
NUMPY_SIZE = 10**6


def time_rounds(call: Callable[[], object], rounds: int) -> list[float]:
    """Return the milliseconds of each of `rounds` calls, after three that don't count."""
    times_ms: list[float] = []
    for number in range(rounds + 3):
        begin_s = time.perf_counter()
        call()
        if number >= 3:
            times_ms.append((time.perf_counter() - begin_s) * 1e3)
    return times_ms


def make_row(name: str, num_samples: int, count: int, times_ms: list[float]) -> dict[str, object]:
    """Return one row of the result; only elastane's own rows have a goal."""
    q1_ms, median_ms, q3_ms = statistics.quantiles(times_ms, n=4, method="inclusive")
    return {
        "order": name,
        "num_samples": num_samples,
        "count": count,
        "median_ms": round(median_ms, 4),
        "q1_ms": round(q1_ms, 4),
        "q3_ms": round(q3_ms, 4),
        "under_goal": median_ms < GOAL_MS if name == "elastane" else None,
    }


def measure(rounds: int) -> list[dict[str, object]]:
    """Return a row for each size, and numpy's."""
    draw = random.Random(0)
    rows: list[dict[str, object]] = []
    for num_samples in SIZES:
        count = min(COUNT, num_samples)

        def take(num_samples: int = num_samples, count: int = count) -> object:
            start = draw.randrange(num_samples - count + 1)
            epoch = draw.randrange(10**6)
            return permute_range(start, start + count, num_samples=num_samples, seed=0, epoch=epoch)

        rows.append(make_row("elastane", num_samples, count, time_rounds(take, rounds)))

    def shuffle() -> object:
        return np.random.default_rng(draw.randrange(10**6)).permutation(NUMPY_SIZE)[:COUNT]

    rows.append(make_row("numpy", NUMPY_SIZE, COUNT, time_rounds(shuffle, rounds)))
    return rows


def print_table(rows: list[dict[str, object]]) -> None:
    """Print the rows for people."""
    table = Table(title=f"Order of an epoch on one thread, goal {GOAL_MS:g} ms")
    table.add_column("order")
    table.add_column("samples", justify="right", min_width=17)
    for name in ("count", "median ms", "q1-q3 ms", "goal"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            str(row["order"]),
            f"{row['num_samples']:,}",
            f"{row['count']:,}",
            f"{row['median_ms']:.2f}",
            f"{row['q1_ms']:.2f}-{row['q3_ms']:.2f}",
            {True: "yes", False: "NO", None: "-"}[row["under_goal"]],  # type: ignore[index]
        )
    Console().print(table)


@click.command(help="Time the data order.")
@click.option("--json", "json_path", metavar="PATH|-", help="Write JSON here; - for stdout alone.")
@click.option("--rounds", default=50, show_default=True, type=click.IntRange(min=2))
def main(json_path: str | None, rounds: int) -> None:
    rows = measure(rounds)
    if json_path != "-":
        print_table(rows)
    if json_path is None:
        return
    result = {
        "benchmark": "order",
        "goal_ms": GOAL_MS,
        "rounds": rounds,
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "rows": rows,
    }
    write_json(result, path=json_path)


if __name__ == "__main__":
    main()
