"""What a step costs under elastane and its peers, over a plain step of the same model.

    python -m benchmarks.overhead [--json PATH|-] [--model NAME] [--method NAME] [--resume]

Each comparison holds all methods in one process (or two, over gloo), each with its own copy of the
model. In a round each makes a short block of steps; ratios to plain are taken round by round. All
numbers are processor time of all workers, but for `wall_ratio`. `floor` is a plain step that reads
each micro-gradient and the mean gradient once, by the kernel that elastane measures with;
`floor, mean only` reads the mean gradient alone, as a step that is not measured does.
`scripts/peers` installs the libraries that are compared with; without it their rows are missing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from benchmarks.output import versions, write_json
from benchmarks.overhead.methods import ADAPTDL, CLIPPED, METHODS, PLAIN, find_peers, missing
from benchmarks.overhead.models import SUBJECTS
from benchmarks.overhead.rounds import Comparison, compare
from benchmarks.overhead.statistics import interval_of_mean, ratio_row

Row = dict[str, Any]

_AGAIN = "plain again"
FORMS = ((1, 2), (2, 1), (2, 4))
"""Processes and micro-batches a worker."""
FACTORS = (1, 8)
_PLACE = ("model", "batch", "processes", "micro_batches")


def comparisons(
    models: Sequence[str], methods: Sequence[str], *, rounds: int, limit_s: float
) -> Iterator[Comparison]:
    """Yield what is compared; AdaptDL by itself, as it has threads of its own."""
    together = [name for name in methods if name != ADAPTDL]
    alone = [PLAIN, _AGAIN, ADAPTDL] if ADAPTDL in methods else []
    for model in models:
        for factor in FACTORS:
            for processes, micro_batches in FORMS:
                if factor != 1 and micro_batches == 4:
                    continue
                for group in (together, alone):
                    fitting = [
                        name
                        for name in group
                        if missing(name, processes=processes, micro_batches=micro_batches) is None
                    ]
                    if group and fitting != [PLAIN, _AGAIN]:
                        yield Comparison(
                            model=model,
                            batch=SUBJECTS[model].batch * factor,
                            processes=processes,
                            micro_batches=micro_batches,
                            methods=fitting,
                            rounds=rounds,
                            limit_s=limit_s,
                        )


def rows_of(comparison: Comparison, found: dict[str, Any]) -> list[Row]:
    """Return a row for each method of a comparison."""
    parameters = sum(p.numel() for p in SUBJECTS[comparison.model].build().parameters())
    times = found["times"]
    plain, clipped = times[PLAIN], times.get(CLIPPED)
    return [
        {
            "model": comparison.model,
            "params": parameters,
            "batch": comparison.batch,
            "processes": comparison.processes,
            "micro_batches": comparison.micro_batches,
            "method": method,
            "beside": ADAPTDL if ADAPTDL in comparison.methods else None,
            "block_steps": found["steps"],
            **ratio_row(own["cpu"], own["wall"], plain_cpu=plain["cpu"], plain_wall=plain["wall"]),
            **(over_clipped(own["cpu"], clipped["cpu"]) if clipped and "clipped" in method else {}),
        }
        for method, own in times.items()
        if method != PLAIN
    ]


def kept_rows(path: str | None) -> list[Row]:
    """Return the rows that a result's file has already."""
    if path in (None, "-") or not Path(path).exists():
        return []
    return json.loads(Path(path).read_text(encoding="utf-8"))["rows"]


def is_measured(comparison: Comparison, rows: Sequence[Row]) -> bool:
    """Return whether rows are those of a comparison."""
    beside = ADAPTDL if ADAPTDL in comparison.methods else None
    wanted = {"beside": beside}
    wanted |= {name: getattr(comparison, name) for name in _PLACE}
    found = {row["method"] for row in rows if all(row[k] == v for k, v in wanted.items())}
    return {*comparison.methods} <= {*found, PLAIN}


def over_clipped(own: Sequence[float], clipped: Sequence[float]) -> Row:
    """Return a method's processor time over that of a plain step that clips, over all rounds."""
    low, high = interval_of_mean(own, clipped)
    numbers = {"mean": sum(own) / sum(clipped), "low": low, "high": high}
    return {f"over_clipped_{name}": round(value, 4) for name, value in numbers.items()}


def gaps(methods: Sequence[str]) -> dict[str, str]:
    """Return why methods are missing everywhere."""
    found = {name: missing(name, processes=2, micro_batches=1) for name in methods}
    return {name: why for name, why in found.items() if why is not None}


def draw(rows: Sequence[Row]) -> Table:
    """Return the rows as a table."""
    table = Table(title="Processor time of a step over a plain one")
    for name in ("model", "method"):
        table.add_column(name)
    for name in ("batch", "processes x micro", "median", "q1-q3", "95 %", "wall"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            *(row["model"], row["method"], str(row["batch"])),
            f"{row['processes']} x {row['micro_batches']}",
            f"{row['cpu_ratio']:.3f}",
            f"{row['cpu_q1']:.3f}-{row['cpu_q3']:.3f}",
            f"{row['cpu_low']:.3f}-{row['cpu_high']:.3f}"
            + ("" if row["resolved"] else ", not resolved"),
            f"{row['wall_ratio']:.3f}",
        )
    return table


def result_of(rows: Sequence[Row], methods: Sequence[str]) -> dict[str, Any]:
    """Return what is written down of the rows."""
    return {
        "benchmark": "overhead",
        "rows": rows,
        "missing": gaps(methods),
        "versions": versions(),
    }


@click.command(help="Compare what a step costs.")
@click.option("--json", "json_path", metavar="PATH|-", help="Write JSON here; - for stdout.")
@click.option(
    "--model", "models", multiple=True, type=click.Choice(list(SUBJECTS)), help="Repeatable."
)
@click.option(
    "--method", "methods", multiple=True, type=click.Choice(list(METHODS)), help="Repeatable."
)
@click.option("--rounds", default=120, show_default=True, type=click.IntRange(2))
@click.option("--resume", is_flag=True, help="Keep the comparisons that the file has.")
@click.option("--limit", "limit_s", default=120.0, show_default=True, help="Seconds a comparison.")
def main(
    json_path: str | None,
    models: tuple[str, ...],
    methods: tuple[str, ...],
    rounds: int,
    resume: bool,
    limit_s: float,
) -> None:
    find_peers()
    console = Console(stderr=True)
    chosen = [name for name in METHODS if not methods or name in {PLAIN, _AGAIN, *methods}]
    for name, why in gaps(chosen).items():
        console.print(f"{name}: {why}")
    rows = kept_rows(json_path) if resume else []
    chosen_models = models or tuple(SUBJECTS)
    for comparison in comparisons(chosen_models, chosen, rounds=rounds, limit_s=limit_s):
        if is_measured(comparison, rows):
            continue
        console.print(
            f"{comparison.model}, batch {comparison.batch}, "
            f"{comparison.processes} x {comparison.micro_batches} ..."
        )
        rows += rows_of(comparison, compare(comparison))
        if json_path not in (None, "-"):  # what there is stays if the rest is interrupted
            write_json(result_of(rows, chosen), path=json_path)
    console.print(draw(rows))
    write_json(result_of(rows, chosen), path=json_path)


if __name__ == "__main__":
    main()
