"""The demo: one schedule for batch 16, trained at batch 256 and 1,024, and by workers that change.

python -m examples.digits [--quick] [--json] [--out FOLDER]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from elastane.plots import plot_runs
from examples.digits.changes import run_with_changes
from examples.digits.train import folder_name

NUM_STEPS, QUICK_STEPS, QUICK_ELASTIC_STEPS = 2_500, 300, 800
RUNS = ("adascale:16", "linear:16", "adascale:64", "linear:64")
HEAD = (
    *("S", "batch", "rule"),
    *("validation\naccuracy", "training\nloss", "steps", "speed-up\nin steps"),
)
NAMES = {
    "base": "base batch",
    "adascale": "AdaScale",
    "linear": "linear + warm-up",
}


def run_training(launcher: list[str], arguments: list[str]) -> list[dict[str, Any]]:
    """Run the training script under a launcher and return the rows that it prints."""
    command = [sys.executable, *launcher, "-m", "examples.digits.train", *arguments]
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    result = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    if result.returncode != 0:
        raise SystemExit(f"training failed, its messages are above: {' '.join(command)}")
    return [json.loads(line) for line in result.stdout.splitlines()]


def table_of(rows: list[dict[str, Any]]) -> Table:
    """Return the table that the demo prints."""
    table = Table(title="The same schedule and hyper-parameters, tuned at batch 16")
    for name in HEAD:
        table.add_column(name, justify="left" if name == "rule" else "right")
    for row in rows:
        table.add_row(
            f"{row['scale']}",
            f"{row['batch']:,}",
            NAMES[row["rule"]],
            f"{row['accuracy']:.3f}",
            "-" if row["train_loss"] is None else f"{row['train_loss']:.4g}",
            f"{row['steps']:,}",
            "diverged" if row["diverged"] else f"{rows[0]['steps'] / row['steps']:.1f}",
        )
    return table


@click.command()
@click.option("--quick", is_flag=True, help="Fewer base steps: under a minute.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
@click.option("--out", type=click.Path(path_type=Path), default=None, help="Folder of the runs.")
@click.option("--seed", default=0, help="Of weights and order of the samples.")
def main(quick: bool, as_json: bool, out: Path | None, seed: int) -> None:
    """Train real digits at three batch sizes with one set of hyper-parameters."""
    console = Console(stderr=as_json)
    out = out or Path("runs") / f"digits-{time.strftime('%Y%m%d-%H%M%S')}"
    begin = time.monotonic()
    common = [
        "--out",
        str(out),
        "--seed",
        str(seed),
        "--num-steps",
        str(QUICK_STEPS if quick else NUM_STEPS),
    ]
    two_workers = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    console.print(f"Training at batch 16 in one process, then {len(RUNS)} runs in two ...")
    rows = run_training([], [*common, "base:1"])
    rows += run_training(two_workers, [*common, *RUNS])
    folders = [out / folder_name(row["rule"], scale=row["scale"]) for row in rows]
    console.print("Training with 1 worker, then 4, one of them killed, then 2 ...")
    elastic = run_with_changes(
        out / "elastic", num_steps=QUICK_ELASTIC_STEPS if quick else NUM_STEPS, seed=seed
    )
    title = "Digits: one schedule, tuned at batch 16"
    picture, page = plot_runs(folders, output=out / "digits.png", title=title)
    changes, _ = plot_runs(
        [out / "elastic"], output=out / "elastic.png", title="1 worker, 4, one killed, then 2"
    )
    console.print(table_of(rows))
    console.print(
        f"With workers that changed {elastic['generation'] - 1} times: validation accuracy "
        f"{elastic['accuracy']:.3f} after {elastic['steps']:,} steps (base batch: "
        f"{rows[0]['accuracy']:.3f} after {rows[0]['steps']:,})"
    )
    console.print(f"Took {time.monotonic() - begin:.0f} s. Pictures: {picture}, {changes}")
    console.print(f"Page: {page}")
    if as_json:
        runs = [
            {name: row[name] for name in ("rule", "scale", "accuracy", "train_loss", "steps")}
            for row in rows
        ]
        base_accuracy = rows[0]["accuracy"]
        report = {
            "base_accuracy": base_accuracy,
            "runs": runs,
            "elastic": elastic,
            "figure": str(picture),
            "elastic_figure": str(changes),
        }
        print(json.dumps(report))


if __name__ == "__main__":
    main()
