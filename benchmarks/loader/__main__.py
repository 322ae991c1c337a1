"""How fast samples come through the session's loader, beside torch's own; and what dealing costs.

    python -m benchmarks.loader [--json PATH|-] [--quick] [--dataset NAME] [--rounds N]

`DataLoader` has a `DistributedSampler`, as many loader processes, and the same collation; both are
one worker of two. In a round each loader gives a block of batches; a ratio above 1 says that
elastane's gave them faster. `DataLoader again` is a second one of the same kind: the noise.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.loader.datasets import KINDS
from benchmarks.loader.dealing import dealing_row
from benchmarks.loader.rounds import PLAIN, Reading, seconds_of_blocks
from benchmarks.output import versions, write_json
from benchmarks.overhead.statistics import interval_of_median

Row = dict[str, Any]

GOAL = 1.0
BATCHES, LOADER_PROCESSES = (16, 64), (0, 2)
EPOCHS, DEALT, DEALT_TO = (10**5, 10**7, 10**9), 65_536, (1, 8)


def readings(kinds: Sequence[str], *, rounds: int, block_s: float) -> Iterator[Reading]:
    """Yield what is compared."""
    for kind in kinds:
        for num_workers in LOADER_PROCESSES:
            for batch in BATCHES:
                yield Reading(
                    kind=kind,
                    num_workers=num_workers,
                    batch=batch,
                    rounds=rounds,
                    block_s=block_s,
                )


def rows_of(reading: Reading) -> list[Row]:
    """Return the rows of a comparison: the second `DataLoader`, and elastane's loader."""
    count, seconds = seconds_of_blocks(reading)
    return [
        {
            "dataset": reading.kind,
            "num_workers": reading.num_workers,
            "batch": reading.batch,
            "loader": name,
            **ratios_of(seconds[name], plain=seconds[PLAIN]),
            "samples_per_s": round(count * reading.batch / statistics.median(seconds[name])),
            "block_batches": count,
        }
        for name in seconds
        if name != PLAIN
    ]


def ratios_of(own: Sequence[float], *, plain: Sequence[float]) -> Row:
    """Return how many times as fast the blocks were, round by round: its median, and how sure.

    Example:
        >>> ratios_of([1.0, 2.0], plain=[2.0, 2.0])
        {'ratio': 1.5, 'low': 1.0, 'high': 2.0, 'rounds': 2}
    """
    ratios = [theirs / ours for ours, theirs in zip(own, plain, strict=True)]
    low, high = interval_of_median(ratios)
    median = statistics.median(ratios)
    return {
        "ratio": round(median, 4),
        "low": round(low, 4),
        "high": round(high, 4),
        "rounds": len(ratios),
    }


def draw_reading(rows: Sequence[Row]) -> Table:
    """Return the rows of the loaders as a table."""
    table = Table(title=f"Samples a second over a DataLoader's, goal {GOAL:g}")
    for name in ("dataset", "loader"):
        table.add_column(name)
    for name in ("processes", "batch", "ratio", "95 %", "samples/s"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            *(row["dataset"], row["loader"], str(row["num_workers"]), str(row["batch"])),
            *(f"{row['ratio']:.3f}", f"{row['low']:.3f}-{row['high']:.3f}"),
            f"{row['samples_per_s']:,}",
        )
    return table


def draw_dealing(rows: Sequence[Row]) -> Table:
    """Return the rows of the dealing as a table."""
    table = Table(title="Dealing a worker's part of a batch")
    for name in ("epoch", "batch", "workers", "ms", "q1-q3 ms", "ns a sample", "peak bytes"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            *(f"{row['epoch_samples']:,}", f"{row['batch']:,}", str(row["workers"])),
            *(f"{row['deal_ms']:.2f}", f"{row['deal_ms_q1']:.2f}-{row['deal_ms_q3']:.2f}"),
            *(f"{row['ns_per_sample']:.0f}", f"{row['peak_bytes']:,}"),
        )
    return table


@click.command(help="Time the loader and the dealing.")
@click.option("--json", "json_path", metavar="PATH|-", help="Write JSON here; - for stdout.")
@click.option("--quick", is_flag=True, help="Few short rounds: to see that it runs.")
@click.option(
    "--dataset", "kinds", multiple=True, type=click.Choice(list(KINDS)), help="Repeatable."
)
@click.option("--rounds", default=40, show_default=True, type=click.IntRange(2))
def main(json_path: str | None, quick: bool, kinds: tuple[str, ...], rounds: int) -> None:
    torch.set_num_threads(1)
    console = Console(stderr=True)
    rounds, block_s = (4, 0.02) if quick else (rounds, 0.3)
    missing = {name: why for name in kinds or KINDS if (why := KINDS[name].missing()) is not None}
    for name, why in missing.items():
        console.print(f"{name}: {why}")
    rows: list[Row] = []
    present = [name for name in kinds or KINDS if name not in missing]
    for reading in readings(present, rounds=rounds, block_s=block_s):
        console.print(f"{reading.kind}, {reading.num_workers} processes, {reading.batch} ...")
        rows += rows_of(reading)
    dealing = [
        dealing_row(samples, batch=DEALT, workers=workers, rounds=rounds)
        for samples in EPOCHS
        for workers in DEALT_TO
    ]
    console.print(draw_reading(rows))
    console.print(draw_dealing(dealing))
    result = {
        "benchmark": "loader",
        "goal": GOAL,
        "rows": rows,
        "dealing": dealing,
        "missing": missing,
        "versions": versions("numpy"),
    }
    write_json(result, path=json_path)


if __name__ == "__main__":
    main()
