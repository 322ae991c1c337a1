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
    rows: Sequence[Row], *, base: Row, found: Mapping[int, Row], scales: Sequence[int], path: Path
) -> None:
    """Draw a panel for each scale: a point with 1 sd for each rule, and two lines to compare with.

    Args:
        rows: of the rules.
        base: of the base batch.
        found: the best row of the search by scale.
        scales: of the panels.
        path: of the picture.
    """
    figure, panels = grid(len(scales), columns=1)
    rules = list(dict.fromkeys(row["rule"] for row in rows))
    for axes, scale in zip(panels, scales, strict=True):
        known = [row for row in rows if row["scale"] == scale and row["metric_mean"] is not None]
        axes.axhline(base["metric_mean"], color=_BASE, lw=1.0, ls="--", label="base batch")
        if scale in found:
            label = "best learning rate by search"
            axes.axhline(found[scale]["metric_mean"], color=_LINE, lw=1.0, label=label)
        axes.errorbar(
            [rules.index(row["rule"]) for row in known],
            [row["metric_mean"] for row in known],
            yerr=[row["metric_sd"] or 0.0 for row in known],
            fmt="o",
            ms=4.0,
            lw=1.2,
            capsize=2.5,
            color=COLORS[0],
            label="rule",
        )
        names = [rule.replace(", ", ",\n") for rule in rules]
        axes.set_xticks(range(len(rules)), names, rotation=60, ha="right")
        label_axes(axes, title=f"S = {scale}", x="", y=base["metric"].replace("_", " "))
    save_with_legend(figure, panels[-1], path=path)
