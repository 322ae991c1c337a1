"""Every optimizer under every rule, through a change of batch, saved and resumed.

    python -m benchmarks.optimizers [--json PATH|-] [--optimizer NAME] [--rule NAME]

A small network learns the digits from a base batch of 8; after 60 steps the batch grows fourfold.
A row says whether the held-out loss came below half of the untrained model's, how high the loss
rose behind the change, how high if the optimizer's state was dropped there, and whether a run that
was saved there goes on to the bit. Learning rates were chosen at the base batch alone. The exit
code is 1 if a run did not resume to the bit.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.optimizers.catalogue import CATALOGUE, missing
from benchmarks.optimizers.contract import RULES, check_contract
from benchmarks.output import versions, write_json

Row = dict[str, Any]


def row_of(optimizer: str, rule: str) -> Row:
    """Return the row of a pair."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a rule that is meant for the other kind
        found = check_contract(CATALOGUE[optimizer].build, RULES[rule])
    return {
        "optimizer": optimizer,
        "rule": rule,
        "loss_before": round(found.loss_before, 4),
        "loss_after": round(found.loss_after, 4),
        "peak_ratio": round(found.peak_ratio, 4),
        "peak_ratio_reset": round(found.peak_ratio_reset, 4),
        "steps": found.steps,
        "converges": found.converges,
        "resumes": found.resumes,
    }


def draw(rows: list[Row]) -> Table:
    """Return the rows as a table: an optimizer a line, a rule a column."""
    rules = list(dict.fromkeys(row["rule"] for row in rows))
    cells = {(row["optimizer"], row["rule"]): row for row in rows}
    table = Table(title="Held-out loss at the end (! not converged, # does not resume)")
    table.add_column("optimizer")
    for rule in rules:
        table.add_column(rule, justify="right")
    for optimizer in dict.fromkeys(row["optimizer"] for row in rows):
        table.add_row(optimizer, *(_cell(cells[optimizer, rule]) for rule in rules))
    return table


def _cell(row: Row) -> str:
    return f"{row['loss_after']:.2f}{'!' * (not row['converges'])}{'#' * (not row['resumes'])}"


@click.command(help="Run every optimizer under every rule.")
@click.option("--json", "json_path", metavar="PATH|-", help="Write JSON here; - for stdout.")
@click.option("--optimizer", "optimizers", multiple=True, type=click.Choice(list(CATALOGUE)))
@click.option("--rule", "rules", multiple=True, type=click.Choice(list(RULES)))
def main(json_path: str | None, optimizers: tuple[str, ...], rules: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    console = Console(stderr=True)
    wanted = optimizers or tuple(CATALOGUE)
    lacking = {name: why for name in wanted if (why := missing(name)) is not None}
    for name, why in lacking.items():
        console.print(f"{name}: {why}")
    rows = [
        row_of(optimizer, rule)
        for optimizer in wanted
        if optimizer not in lacking
        for rule in rules or RULES
    ]
    console.print(draw(rows))
    result = {"benchmark": "optimizers", "rows": rows, "missing": lacking, "versions": versions()}
    write_json(result, path=json_path)
    sys.exit(0 if all(row["resumes"] for row in rows) else 1)


if __name__ == "__main__":
    main()
