"""Writes the page of results and its pictures from the JSON files of the benchmarks.

    python -m benchmarks.results_page [--results FOLDER] [--docs FOLDER]

Works with whatever there is, and says what is missing. No figure of the page is typed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import click

from benchmarks.results_page import adascale, dynamic_sgd

_ROOT = Path(__file__).parents[2]
_Section = Callable[..., list[str]]
_SECTIONS: dict[str, _Section] = {"adascale": adascale.section, "dynamic_sgd": dynamic_sgd.section}


def write_page(results: Path, *, docs: Path) -> Path:
    """Write the page and its pictures, and return the page's path."""
    pictures = docs / "_static"
    pictures.mkdir(parents=True, exist_ok=True)
    lines = [_HEAD]
    for name, section in _SECTIONS.items():
        path = results / f"{name}.json"
        if path.exists():
            lines += section(json.loads(path.read_text(encoding="utf-8")), pictures=pictures)
        else:
            lines += [f"**Missing: {path.name}.** `python -m benchmarks.{name}` makes it.", ""]
    page = docs / "results.md"
    page.write_text("\n".join([*lines, _AGAIN]), encoding="utf-8")
    return page


@click.command(help="Write the page of results from what the benchmarks measured.")
@click.option(
    "--results",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    default=_ROOT / "benchmarks" / "results",
    show_default="benchmarks/results",
)
@click.option(
    "--docs",
    type=click.Path(path_type=Path, file_okay=False),
    default=_ROOT / "docs",
    show_default="docs",
)
def main(results: Path, docs: Path) -> None:
    click.echo(write_page(results, docs=docs))


_HEAD = """\
# Results

What the two methods do on real data, at a size that trains in minutes: where they do what their
papers claim, and where they don't. `python -m benchmarks.results_page` wrote this page from the
files in `benchmarks/results`; every figure comes from there.
"""
_AGAIN = """\
## Again

```bash
python -m benchmarks.adascale --quick             # each task's main claim, minutes
python -m benchmarks.adascale --json benchmarks/results/adascale.json
python -m benchmarks.dynamic_sgd --json benchmarks/results/dynamic_sgd.json
python -m benchmarks.results_page
```

The drivers say first what they will cost. `--resume` goes on with what was interrupted, `--budget
HOURS` stops after so many core-hours, and either writes the figures that there are by then.
"""


if __name__ == "__main__":
    main()
