"""Markdown tables and numbers as the page of results shows them.

Knows strings; nothing of what is shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["listed", "origin", "plus_minus", "shown", "table"]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table; all columns but the first are set to the right."""
    marks = ["---", *("---:" for _ in head[1:])]
    return [f"| {' | '.join(cells)} |" for cells in (head, marks, *rows)] + [""]


def shown(value: float | None) -> str:
    """Return a number with four digits, or a dash."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def plus_minus(mean: float | None, sd: float | None) -> str:
    """Return a mean with its standard deviation, where there is one."""
    return shown(mean) if mean is None or sd is None else f"{shown(mean)} ± {sd:.2g}"


def listed(values: Sequence[object]) -> str:
    """Return values with commas, and `and` before the last."""
    words = [str(value) for value in values]
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def origin(result: Mapping[str, Any]) -> list[str]:
    """Return the lines that say how a result came about, and what it lacks."""
    versions = result["versions"]
    commits = ", ".join(f"`{commit}`" for commit in result["commits"]) or "no commit"
    lines = [
        f"{result['finished_runs']} of {result['planned_runs']} runs, {result['core_hours']:.2f} "
        f"core-hours; elastane {versions['elastane']} ({commits}), torch {versions['torch']}, "
        f"Python {versions['python']}, {versions['machine']}.",
        "",
    ]
    if result["quick"]:
        lines += ["**The quick form: smaller tasks, fewer seeds and rules.**", ""]
    for task, lacks in result["missing_tasks"].items():
        lines += [f"**Missing: {task}.** {lacks}", ""]
    left = result["planned_runs"] - result["finished_runs"] - len(result["failed_runs"])
    if left:
        lines += [f"**{left} runs are still to come:** the figures below lack them.", ""]
    for name, why in result["failed_runs"].items():
        lines += [f"**Failed: {name}.** `{why}`", ""]
    return lines
