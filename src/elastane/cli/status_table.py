"""How `elastane status` and `elastane ps` show what launchers answer.

Knows the keys of a status and rich; nothing of where it comes from.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

__all__ = [
    "JOB_COLUMNS",
    "age_text",
    "jobs_table",
    "members_of",
    "plain_console",
    "shown",
    "status_picture",
]

JOB_COLUMNS = {
    "job": "job",
    "state": "state",
    "workers": "workers",
    "step": "step",
    "pid": "pid",
    "run_dir": "run folder",
}
_NONE = "–"
_FROM_SINGLES = ", from single gradients"
_WORKER_COLUMNS = {
    name: name for name in ("worker", "rank", "state", "step", "pid", "agent", "slot", "host")
}


def members_of(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the workers that take part in the generation."""
    return [one for one in status.get("workers") or () if one.get("rank") is not None]


def plain_console() -> Console:
    """Return a console on standard output that takes every text as it is."""
    return Console(markup=False, highlight=False)


def jobs_table(jobs: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of `elastane ps`."""
    return _table(jobs, columns=JOB_COLUMNS)


def status_picture(status: Mapping[str, Any]) -> RenderableType:
    """Return facts and workers of a job as `elastane status` shows them."""
    facts = Table.grid(padding=(0, 2))
    for label, text in _facts(status).items():
        facts.add_row(Text(label, style="dim"), Text(text, overflow="fold"))
    return Group(facts, _table(status.get("workers") or (), columns=_WORKER_COLUMNS))


def _facts(status: Mapping[str, Any]) -> dict[str, str]:
    get = status.get
    allowed = f"{shown(get('min_workers'))} to {shown(get('max_workers'))}"
    return {
        "job": f"{shown(get('job'))}, {shown(get('state'))}",
        "run folder": shown(get("run_dir")),
        "generation": f"{shown(get('generation'))}, {_why(status)}",
        "workers": f"{len(members_of(status))} of {shown(get('target'))} wanted, {allowed} allowed",
        "step": shown(get("step")),
        "progress": f"{shown(get('progress'))} of {shown(get('num_steps'))} base steps",
        "lr": shown(get("lr")),
        "gain": shown(get("gain")) + (_FROM_SINGLES if get("single_share") else ""),
        "batch": shown(get("batch")),
        "samples/s": shown(get("samples_per_s")),
        "last change": _NONE if get("last_change") is None else _change(status["last_change"]),
    }


def _change(change: Mapping[str, Any]) -> str:
    when, pause_s = change.get("time"), change.get("pause_s")
    ago = _NONE if when is None else f"{age_text(time.time() - when)} ago"
    pause = _NONE if pause_s is None else f"{1000 * pause_s:,.0f} ms"
    return f"generation {shown(change.get('generation'))}, {ago}, {_why(change)}, pause {pause}"


def age_text(seconds: float) -> str:
    """Return a length of time in its largest unit that gives at least 2."""
    for unit, unit_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:,.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def _why(values: Mapping[str, Any]) -> str:
    cause, reason = values.get("cause"), values.get("reason")
    return f"{shown(cause)}: {reason}" if reason else shown(cause)


def shown(value: object) -> str:
    """Return a value for people; a dash for what is not known."""
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return _NONE if value is None or value == "" else str(value)


def _table(rows: Sequence[Mapping[str, Any]], *, columns: Mapping[str, str]) -> Table:
    table = Table()
    for name in columns.values():
        table.add_column(name, overflow="fold")
    for row in rows:
        # Ids of processes and workers are names, not amounts: no comma among their digits.
        table.add_row(*(Text(_NONE if row.get(n) is None else str(row.get(n))) for n in columns))
    return table
