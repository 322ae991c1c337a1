"""Noise scale from one gradient a step, beside the truth and beside two gradients a step.

    python -m benchmarks.single [--json PATH|-] [--seeds N] [--steps N] [--digits-steps N]

On a quadratic whose noise is known, and on the digits of `examples/digits`, where the two halves
of each batch are measured beside the batch, on one trajectory and with the same averages.
`layers` is what a session takes. The others were tried and are not offered: `pair`, the gradient
of the step before as a second sample; `lag 2`, that of two steps before; `buffer`, the momentum
buffer in its place, which would need no memory.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.output import write_json
from benchmarks.single import digits, quadratic
from elastane import __version__


def draw(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    """Return rows as a table, without their lists."""
    names = [name for name, value in rows[0].items() if not isinstance(value, list)]
    table = Table(title=title)
    for name in names:
        table.add_column(name.replace("_", " "), justify="left" if name == "candidate" else "right")
    for row in rows:
        shown = ("infinite" if row[name] is None else row[name] for name in names)
        table.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in shown))
    return table


@click.command(help="Compare noise scales from one gradient a step with known and with usual ones.")
@click.option("--json", "json_path", metavar="PATH|-", help="Write JSON here; - for stdout.")
@click.option("--seeds", default=20, show_default=True, type=click.IntRange(0))
@click.option("--steps", default=200, show_default=True, type=click.IntRange(3))
@click.option("--digits-steps", default=2_500, show_default=True, type=click.IntRange(0))
def main(json_path: str | None, seeds: int, steps: int, digits_steps: int) -> None:
    console = Console(stderr=True)
    result: dict[str, Any] = {
        "benchmark": "single",
        "steps": steps,
        "digits_steps": digits_steps,
        "quadratic": [],
        "digits": [],
        "versions": {
            "elastane": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
    if seeds:
        result["quadratic"] = quadratic.quadratic_rows(seeds, num_steps=steps, console=console)
        console.print(draw(f"Quadratic, goal {quadratic.GOAL:g}", result["quadratic"]))
    for scale in digits.SCALES if digits_steps else ():
        rows = digits.digits_rows(scale, num_steps=digits_steps, seed=0)
        result["digits"] += rows
        console.print(draw(f"Digits beside two samples, goal {digits.GOAL:g}", rows))
    write_json(result, path=json_path)


if __name__ == "__main__":
    main()
