"""What the library makes of what people train with, beside one plain loop in float64.

    python -m benchmarks.oracle [--json PATH|-] [--feature NAME] [--workers N] [--keep FOLDER]

A row is a feature and a number of workers: 50 steps on scikit-learn's digits in float32. The oracle
takes the samples that each rank said it had seen, and computes gain, moments and weights from every
micro-batch's gradient by the formulas, in one process and float64. Errors are relative, the largest
over all ranks, and of gain and moments over all steps; that of the weights is relative to how far
they moved. Exit status 1 says that a row is not within its bound.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from benchmarks.oracle.features import FEATURES
from benchmarks.oracle.rows import Row, compare, failed
from benchmarks.oracle.worker import Case, carry_out, errors_of, records_of
from benchmarks.output import versions, write_json
from benchmarks.resize.job import ending_on_sigterm

_LIMIT_S = 3600.0
_QUICK = ("plain", "accumulation, another A each step and rank", "token weights", "scaler")


def rows_of(
    cases: Sequence[Case], *, keep: Path | None = None, limit_s: float = _LIMIT_S
) -> list[Row]:
    """Carry runs out and return their rows.

    Args:
        cases: the runs.
        keep: folder for the ranks' records; those that lie there are taken as they are.
        limit_s: after which a run that has no end yet is given up.
    """
    with tempfile.TemporaryDirectory(prefix="elastane-oracle-") as name:
        folder = Path(name) if keep is None else keep
        folder.mkdir(parents=True, exist_ok=True)
        carry_out(cases, folder=folder, limit_s=limit_s)
        rows = []
        for case in cases:
            feature, errors = FEATURES[case.feature], errors_of(case, folder=folder)
            if errors:
                rows.append(failed(feature, case.worlds, why=errors[0]))
            else:
                rows.append(compare(feature, records_of(case, folder=folder)))
        return rows


def draw(rows: Sequence[Row]) -> Table:
    """Return the rows as a table."""
    table = Table(title="Relative errors against one process in float64")
    table.add_column("feature")
    for name in ("ranks", "gain", "moments", "weights", "bound", "ok"):
        table.add_column(name, justify="right")
    for row in rows:
        errors = (row.gain_error, row.moment_error, row.weight_error, row.bound)
        shown = ["-" if error is None else f"{error:.1e}" for error in errors]
        table.add_row(row.feature, str(row.ranks), *shown, "yes" if row.ok else "NO")
    return table


@click.command(help="Compare the library with one plain loop in float64, feature by feature.")
@click.option("--json", "json_path", metavar="PATH|-", help="Write JSON here; - for stdout.")
@click.option("--feature", "names", multiple=True, metavar="NAME", help="This one alone.")
@click.option("--workers", "most", default=4, show_default=True, help="Leave larger runs out.")
@click.option(
    "--keep",
    metavar="FOLDER",
    type=click.Path(path_type=Path, file_okay=False),
    help="Keep the ranks' records here, and go on from them; of one state of the code.",
)
@click.option("--quick", is_flag=True, help="A few features, with one worker and two.")
def main(
    json_path: str | None, names: Sequence[str], most: int, keep: Path | None, quick: bool
) -> None:
    unknown = sorted(set(names) - FEATURES.keys())
    if unknown:
        raise click.BadParameter(f"no feature {unknown[0]!r}; there are: {'; '.join(FEATURES)}")
    chosen = names or (_QUICK if quick else FEATURES)
    cases = [
        Case(feature=name, worlds=worlds)
        for name in chosen
        for worlds in FEATURES[name].worlds
        if max(worlds) <= (min(most, 2) if quick else most)
    ]
    with ending_on_sigterm():
        rows = rows_of(cases, keep=keep)
    console = Console(stderr=True)
    console.print(draw(rows))
    for row in rows:
        if not row.ok:
            console.print(f"{row.feature}, {row.ranks}: {row.why}", markup=False)
    result = {
        "benchmark": "oracle",
        "rows": [row.as_dict() for row in rows],
        "versions": versions(),
    }
    write_json(result, path=json_path)
    if not all(row.ok for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
