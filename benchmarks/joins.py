"""What the pause of a join is made of, with a copied state and with newcomers that follow.

    python -m benchmarks.joins [--json PATH|-] [--sizes 10M,50M] [--joins N] [--quick]

One worker trains, a second one joins, and leaves again. The pause begins when the first one has
finished its last step alone, and ends when both are in the new group; a part ends when the last of
the two is through with it. `first step` and `usual step` are those of two workers. What a state is
copied at stands beside what a plain socket moves on the same machine.
"""

from __future__ import annotations

import math
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from benchmarks.output import versions, write_json
from benchmarks.resize.__main__ import number_of
from benchmarks.resize.digits import write_digits
from benchmarks.resize.job import RunningJob, ending_on_sigterm
from benchmarks.resize.marks import MARKS
from benchmarks.resize.measure import STEPS_AFTER, Line, Membership, steps_of

__all__ = ["PARTS", "WAYS", "link_rate", "main", "parts_of", "rows_of"]

Row = dict[str, Any]

PARTS = {
    "met": "decision, and meeting the newcomer",
    "followed": "waiting for the newcomer's last step",
    "opened": "opening the group",
    "compared": "comparing where both stand",
    "copied": "copying state",
    "entered": "wrapping the model",
}
WAYS = {"copied": math.inf, "followed": 0.0}
"""How the newcomer gets the state, and from how many MB of parameters on it then follows."""
_HANG_LIMIT_S = 60.0
_MEBI, _LINK_CHUNK, _LINK_ROUNDS = 1 << 20, 4 << 20, 5
_STATE_OVER_PARAMETERS = 2  # with momentum


def parts_of(
    membership: Membership, *, survivor: int, records: Mapping[int, Sequence[Line]]
) -> dict[str, float]:
    """Return the milliseconds of each part of a join.

    Args:
        membership: that it led to.
        survivor: the worker that trained before.
        records: the lines of each worker, oldest first.

    Raises:
        ValueError: a worker did not come to one of the marks, or to no step after them.
    """
    own = steps_of(records[survivor])
    after = [line for line in own if line.generation >= membership.number]
    before = [line for line in own if line.generation < membership.number]
    if len(after) < 2 or not before:
        raise ValueError(f"no steps around {membership}")
    begin = end = before[-1].time
    found: dict[str, float] = {}
    for mark in MARKS:
        times = [_time_of(mark, records[w], begin, after[0].time) for w in membership.members]
        known = [one for one in times if one is not None]
        if not known:
            raise ValueError(f"nobody came to {mark!r} in {membership}")
        found[mark] = 1e3 * (max(*known, end) - end)
        end = max(*known, end)
    gaps = [b.time - a.time for a, b in pairwise(after[: STEPS_AFTER + 1])]
    return {
        **found,
        "pause": 1e3 * (end - begin),
        "first step": 1e3 * (after[0].time - end),
        "usual step": 1e3 * statistics.median(gaps),
    }


def _time_of(mark: str, lines: Sequence[Line], begin: float, end: float) -> float | None:
    """Return when a worker came to a mark, the last time within a span."""
    times = [line.time for line in lines if line.kind == mark and begin <= line.time <= end]
    return times[-1] if times else None


def rows_of(joins: Sequence[Mapping[str, float]], *, size: str, way: str) -> list[Row]:
    """Return a row for each part of some joins: median and quartiles."""
    rows: list[Row] = []
    for part in joins[0]:
        q1, median, q3 = statistics.quantiles([one[part] for one in joins], n=4, method="inclusive")
        numbers = {"ms_median": median, "ms_q1": q1, "ms_q3": q3}
        rows.append(
            {"size": size, "way": way, "part": part, "joins": len(joins)}
            | {name: round(value, 1) for name, value in numbers.items()}
        )
    return rows


def link_rate(num_bytes: int) -> float:
    """Return how many bytes a second a plain socket moves over the loopback, the best of some."""
    return max(_moved_once(num_bytes) for _ in range(_LINK_ROUNDS))


def _moved_once(num_bytes: int) -> float:
    data, landing = bytearray(num_bytes), bytearray(num_bytes)
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
        with sender, receiver:
            begin = time.perf_counter()
            thread = threading.Thread(target=sender.sendall, args=(data,))
            thread.start()
            view, got = memoryview(landing), 0
            while got < num_bytes:
                got += receiver.recv_into(view[got : got + _LINK_CHUNK])
            took = time.perf_counter() - begin
            thread.join()
    return num_bytes / took


def measure(
    size: str, way: str, *, joins: int, folder: Path, digits: Path
) -> list[dict[str, float]]:
    """Have a second worker join so many times, and return the parts of each join."""
    with RunningJob(
        folder,
        digits=digits,
        parameters=number_of(size),
        most_workers=2,
        hang_limit_s=_HANG_LIMIT_S,
        follow_mb=WAYS[way],
        marks=True,
    ) as job:
        found: list[dict[str, float]] = []
        while len(found) < joins:
            (survivor,) = job.steady(1).members
            joined = job.steady(2)
            found.append(parts_of(joined, survivor=survivor, records=job.records))
    return found


def draw(rows: Sequence[Row], rates: Mapping[str, Row]) -> Table:
    """Return the rows as a table."""
    table = Table(title="Parts of a join, milliseconds")
    for name in ("model", "state", "part"):
        table.add_column(name)
    for name in ("median", "q1-q3"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            *(row["size"], row["way"], PARTS.get(row["part"], row["part"])),
            *(f"{row['ms_median']:.1f}", f"{row['ms_q1']:.1f}-{row['ms_q3']:.1f}"),
        )
    table.caption = "; ".join(
        f"{size}: {rate['mib']} MiB copied at {rate['copied_gb_s']} GB/s, a plain socket's "
        f"{rate['socket_gb_s']} GB/s"
        for size, rate in rates.items()
    )
    return table


def rate_of(rows: Sequence[Row], *, size: str) -> Row:
    """Return at what rate a size's state was copied, and what a plain socket does."""
    num_bytes = 4 * _STATE_OVER_PARAMETERS * number_of(size)
    took = next(
        row["ms_median"]
        for row in rows
        if (row["size"], row["way"], row["part"]) == (size, "copied", "copied")
    )
    return {
        "mib": round(num_bytes / _MEBI),
        "copied_gb_s": round(num_bytes / took / 1e6, 2),
        "socket_gb_s": round(link_rate(num_bytes) / 1e9, 2),
    }


@click.command(help="Measure what the pause of a join is made of.")
@click.option("--json", "json_path", metavar="PATH|-", help="Write JSON here; - for stdout.")
@click.option("--sizes", default="10M,50M", show_default=True, help="Parameters of the models.")
@click.option("--joins", default=8, show_default=True, type=click.IntRange(2))
@click.option("--quick", is_flag=True, help="A tiny model and 2 joins, for a look.")
def main(json_path: str | None, sizes: str, joins: int, quick: bool) -> None:
    console = Console(stderr=True)
    if quick:
        sizes, joins = "20k", 2
    rows: list[Row] = []
    rates: dict[str, Row] = {}
    with ending_on_sigterm(), tempfile.TemporaryDirectory(prefix="elastane-joins-") as name:
        digits = write_digits(Path(name, "digits.npz"))
        for size in sizes.split(","):
            for way in WAYS:
                console.print(f"{size}, {way} ...")
                folder = Path(name, f"{size}-{way}")
                found = measure(size, way, joins=joins, folder=folder, digits=digits)
                rows += rows_of(found, size=size, way=way)
            rates[size] = rate_of(rows, size=size)
    console.print(draw(rows, rates))
    result = {"benchmark": "joins", "parts": PARTS, "rows": rows, "rates": rates}
    write_json(result | {"versions": versions()}, path=json_path)


if __name__ == "__main__":
    main()
