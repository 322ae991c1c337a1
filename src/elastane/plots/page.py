"""Draws runs and writes the picture, alone and as a web page that needs nothing else.

Joins the other files of this package; knows nothing of events.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from elastane.errors import ArgumentError, StateError, describe
from elastane.plots.figure import draw
from elastane.plots.panels import panels
from elastane.plots.runs import Run, read_runs
from elastane.plots.table import change_rows, run_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DPI = 200

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff;
       max-width: 1100px; margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.4rem; }}
h2 {{ font-size: 1.1rem; margin-top: 2rem; }}
img {{ width: 100%; height: auto; }}
p {{ color: #555; font-size: 0.9rem; }}
div {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: 0.85rem; font-variant-numeric: tabular-nums; }}
th, td {{ padding: 0.3rem 0.7rem; text-align: left; white-space: nowrap;
         border-bottom: 1px solid #ddd; }}
th {{ color: #555; font-weight: 600; }}
</style>
</head>
<body>
<h1>{title}</h1>
{tables}
<img alt="{alt}" src="data:image/png;base64,{picture}">
<p>Left against progress, right against optimizer steps. Loss: mean over 2 % of the steps, each
step's own behind it, faint. Loss and learning rate are on a logarithmic axis where they span more
than two decades. Lines that lie on one another are drawn as stripes. Learning rate, gain and batch
size: median over 5 steps, since an epoch's last batch may be short. Vertical lines: changes of
membership, with their cause, the number of workers after them and the pause. Skipped steps are left
out. Final loss in the table: mean over the last 2 % of the steps.</p>
{changes}
</body>
</html>
"""


def plot_runs(
    run_dirs: str | PathLike[str] | Sequence[str | PathLike[str]],
    *,
    output: str | PathLike[str],
    title: str | None = None,
) -> tuple[Path, Path]:
    """Draw one or several runs on one page, and return the paths of the picture and the web page.

    Loss, metrics, learning rate, gain, batch size, workers and noise scale, as far as the runs have
    them: on the left against progress, on the right against optimizer steps.

    Args:
        run_dirs: Folders of the runs; each holds an ``events.jsonl``, and that file's path will do
            too. A folder that comes twice is drawn once.
        output: Path of the picture, ending in ``.png``, ``.html`` or nothing; in a folder that
            exists, it is called ``plot.png``. The web page lies beside it under the same name.
            Missing folders are created.
        title: Stands above the picture; none by default.

    Returns:
        The paths of the PNG and of the HTML file.

    Raises:
        ArgumentError: No run is given, one holds no ``events.jsonl``, or `output` has another end.
        StateError: The runs have no step that could be drawn, or a file of events is broken
            (the line is named).
        UsageError: matplotlib is not installed.
    """
    if isinstance(run_dirs, (str, PathLike)):
        run_dirs = [run_dirs]
    if not run_dirs:
        rule = "must name at least one run"
        way_out = "Give the folder that the run was told to write to."
        raise ArgumentError(describe("run_dirs", run_dirs, rule=rule, way_out=way_out))
    png_path, html_path = _output_paths(Path(output))
    runs = read_runs(run_dirs)
    rows = panels(runs)
    if not rows:
        names = ", ".join(run.name for run in runs)
        raise StateError(f"{names}: no finished step to draw yet. Wait until the first one is.")
    png = _as_png(draw(runs, rows, title=title))
    png_path.parent.mkdir(parents=True, exist_ok=True)
    png_path.write_bytes(png)
    html_path.write_text(_as_html(runs, png, title=title), encoding="utf-8")
    return png_path, html_path


def _output_paths(output: Path) -> tuple[Path, Path]:
    if output.is_dir():
        output = output / "plot"
    if output.suffix not in ("", ".png", ".html"):
        rule = "must end in .png or .html"
        way_out = "Both files are written, whichever is named."
        raise ArgumentError(describe("output", str(output), rule=rule, way_out=way_out))
    return output.with_suffix(".png"), output.with_suffix(".html")


def _as_png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    # The default metadata names matplotlib's address; the page is to hold no outside link.
    figure.savefig(buffer, format="png", dpi=_DPI, metadata={"Software": "elastane"})
    return buffer.getvalue()


def _as_html(runs: Sequence[Run], png: bytes, *, title: str | None) -> str:
    names = ", ".join(run.name for run in runs)
    changes_head, changes = change_rows(runs)
    changes_table = _as_table("Changes of membership", changes_head, changes) if changes else ""
    return _PAGE.format(
        title=escape(title or names),
        tables=_as_table("Runs", *run_rows(runs)),
        alt=escape(f"Curves of {names}", quote=True),
        picture=base64.b64encode(png).decode("ascii"),
        changes=changes_table,
    )


def _as_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f"<h2>{escape(title)}</h2>\n<div><table>\n<tr>{cells}</tr>\n{body}\n</table></div>"
