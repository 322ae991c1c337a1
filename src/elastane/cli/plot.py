"""`elastane plot`: draws runs on one page.

Knows options and default paths; the drawing is `elastane.plots`.
"""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("run_dirs", metavar="RUN_DIR...", nargs=-1, required=True, type=Path)
@click.option(
    "--output",
    metavar="PATH",
    type=Path,
    help="The picture; the web page lies beside it. [default: plot.png in RUN_DIR, or here if "
    "there are several]",
)
@click.option("--title", metavar="T", help="Stands above the picture.")
def plot(run_dirs: tuple[Path, ...], *, output: Path | None, title: str | None) -> None:
    """Draw runs on one page, as a PNG picture and a self-contained HTML page.

    RUN_DIR is the folder that a run was told to write to, or its events.jsonl.
    """
    from elastane.plots import plot_runs
    from elastane.plots.runs import run_folders

    folders = run_folders(run_dirs)
    if output is None:
        output = (folders[0] if len(folders) == 1 else Path()) / "plot.png"
    for path in plot_runs(folders, output=output, title=title):
        click.echo(f"wrote {path}")
