"""What 8 to 4,096 workers would cost: decisions by simulation, the rest by a model.

    python -m benchmarks.scale [--json PATH|-] [--quick] [--gbit 25] [--round-trip-us 50]

The launcher's own decision code runs over a store in memory with every number of workers. Costs of
the store, of small groups and of a copy are measured here with processes, in rounds that take
turns; formulas (`benchmarks.scale.model`) lead from them to larger groups, and their rows say how
far they are from what was measured. `python -m benchmarks.scale.page` writes docs/scale.md.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from benchmarks.output import versions, write_json
from benchmarks.scale.changes import changes, slope
from benchmarks.scale.members import VECTOR_LENGTH, measure_groups
from benchmarks.scale.rows import checks, constants_of, limits, predict
from benchmarks.scale.store_cost import measure_store

Row = dict[str, Any]

SIZES = (8, 16, 32, 64, 128, 256, 512, 1000, 2048, 4096)
_QUICK_SIZES = (8, 64)
_GROUPS, _QUICK_GROUPS = (2, 4, 8, 16), (2, 4)
_COSTS = ("decide_ms", "settle_ms", "store_bytes", "look_ms", "act_ms")
_SMALLEST_FOR_SLOPE = 64


def slopes(rows: Sequence[Row]) -> list[Row]:
    """Return the exponent with which each cost of each change grows, from 64 workers on."""
    found = []
    for change in dict.fromkeys(row["change"] for row in rows):
        own = [r for r in rows if r["change"] == change and r["workers"] >= _SMALLEST_FOR_SLOPE]
        sizes = [row["workers"] for row in own]
        if len(sizes) > 1:
            costs = {
                name: round(slope(sizes, [row[name] for row in own]), 2)
                for name in _COSTS
                if name in own[0]
            }
            found.append({"change": change, **costs})
    return found


def measured(*, quick: bool) -> dict[str, Any]:
    """Return what is measured on this machine: the store and small groups."""
    rounds, operations = (1, 20) if quick else (5, 200)
    before = os.getloadavg()[0]
    groups = measure_groups(
        _QUICK_GROUPS if quick else _GROUPS,
        rounds=2 if quick else 5,
        sums=20 if quick else 200,
        state_bytes=4_000_000 if quick else 40_000_000,
    )
    return {
        "processors": len(os.sched_getaffinity(0)),
        "load_before": round(before, 2),
        "vector_length": VECTOR_LENGTH,
        "store": measure_store(rounds=rounds, operations=operations),
        "groups": groups,
    }


def result_of(found: dict[str, Any], decided: Sequence[Row], **network: float) -> dict[str, Any]:
    """Return all rows made of what was measured and simulated."""
    constants = constants_of(
        found["store"], found["groups"], processors=found["processors"], **network
    )
    by_size: dict[int, dict[str, Row]] = {}
    for row in decided:
        by_size.setdefault(row["workers"], {})[row["change"]] = row
    rows = [
        predict(workers, net, constants, known)
        for net in constants.networks
        for workers, known in by_size.items()
    ]
    return {
        "benchmark": "scale",
        "assumed": network,
        "measured": found,
        "decisions": list(decided),
        "growth": slopes(decided),
        "rows": rows,
        "checks": checks(found["groups"], constants),
        "limits": {
            net.name: limits([row for row in rows if row["network"] == net.name])
            for net in constants.networks
        },
        "versions": versions(),
    }


def draw(rows: Sequence[Row]) -> Table:
    """Return the rows of one network as a table."""
    table = Table(title=f"What a job of so many workers would cost: {rows[0]['network']}")
    head = ("workers", "small sum, us", "regroup, ms", "store", "connect", "1B, ms")
    for name in (*head, "launcher", "store load"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            *(str(row["workers"]), f"{row['small_reduction_us']:.0f}"),
            *(f"{row[n]:.1f}" for n in ("regroup_ms", "of_that_store_ms", "of_that_connect_ms")),
            f"{row['transfer_ms']['1B']:.0f}",
            *(f"{row[n]:.3f}" for n in ("launcher_load", "store_load")),
        )
    return table


@click.command(help="Find what many workers would cost.")
@click.option("--json", "json_path", metavar="PATH|-", help="Write JSON here; - for stdout.")
@click.option("--quick", is_flag=True, help="Few sizes and rounds, to try it.")
@click.option("--gbit", default=25.0, show_default=True, type=click.FloatRange(0.001))
@click.option("--round-trip-us", default=50.0, show_default=True, type=click.FloatRange(0))
@click.option("--store-gb-per-s", default=1.0, show_default=True, type=click.FloatRange(0.001))
def main(
    json_path: str | None, quick: bool, gbit: float, round_trip_us: float, store_gb_per_s: float
) -> None:
    console = Console(stderr=True)
    found = measured(quick=quick)
    decided: list[Row] = []
    for workers in _QUICK_SIZES if quick else SIZES:
        console.print(f"{workers} simulated workers ...")
        decided += changes(workers)
    result = result_of(
        found,
        decided,
        ethernet_gbit=gbit,
        ethernet_round_trip_us=round_trip_us,
        store_gb_per_s=store_gb_per_s,
    )
    for name in result["limits"]:
        console.print(draw([row for row in result["rows"] if row["network"] == name]))
    write_json(result, path=json_path)


if __name__ == "__main__":
    main()
