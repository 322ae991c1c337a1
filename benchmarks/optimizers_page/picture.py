"""The picture of the study on AdamW: rules beside what a search finds, at each scale.

Knows rows and matplotlib's figure objects; nothing of the page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.results_page.pictures import COLORS, grid, label_axes, save_with_legend

__all__ = ["draw_study"]

Row = Mapping[str, Any]

_BASE, _LINE = "#666666", "#D55E00"


def draw_study(
    rows: Sequence[Row],
    *,
    base: Row,
    found: Mapping[int, Row],
    longer: Row | None,
    scales: Sequence[int],
    path: Path,
) -> None:
    """Draw a panel for each scale: a point with 1 sd for each rule, and lines to compare with.

    Args:
        rows: of the rules.
        base: of the base batch.
        found: the best row of the search by scale.
        longer: the best row of the search with as many steps as AdamScale takes.
        scales: of the panels.
        path: of the picture.
    """
    figure, panels = grid(len(scales), columns=len(scales))
    figure.set_size_inches(9.0, 4.0)
    rules = list(dict.fromkeys(row["rule"] for row in rows))
    for axes, scale in zip(panels, scales, strict=True):
        known = [row for row in rows if row["scale"] == scale and row["metric_mean"] is not None]
        as_many = longer if longer is not None and longer["scale"] == scale else None
        lines = {
            "base batch": (base, _BASE, "--"),
            "best rate by search": (found.get(scale), _LINE, "-"),
            "that, with as many steps as adamscale": (as_many, _LINE, ":"),
        }
        for label, (row, color, style) in lines.items():
            if row is not None:
                axes.axvline(row["metric_mean"], color=color, lw=1.2, ls=style, label=label)
        axes.errorbar(
            [row["metric_mean"] for row in known],
            [rules.index(row["rule"]) for row in known],
            xerr=[row["metric_sd"] or 0.0 for row in known],
            fmt="o",
            ms=4.0,
            lw=1.2,
            capsize=2.5,
            color=COLORS[0],
            label="rule",
        )
        axes.set_yticks(range(len(rules)), rules if axes is panels[0] else [""] * len(rules))
        axes.invert_yaxis()
        label_axes(axes, title=f"S = {scale}", x=base["metric"].replace("_", " "), y="")
    save_with_legend(figure, panels[-1], path=path)
