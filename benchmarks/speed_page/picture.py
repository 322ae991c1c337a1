"""The picture of the page on speed: what steps cost, with the floor drawn in.

Knows rows and matplotlib's figure objects; nothing of the page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.results_page.pictures import COLORS, grid, label_axes, save_with_legend
from benchmarks.speed_page.verdicts import DEFAULT, EVERY, FLOOR, PEERS, by_form, told

__all__ = ["HEIGHTS", "draw_overhead"]

_DRAWN = (DEFAULT, EVERY, *PEERS)
HEIGHTS = (0.85, 1.8)
"""Ratios at the lower and upper edge; what lies beyond is cut off."""
_FLOOR_COLOR, _GOAL_COLOR, _APART = "#BBBBBB", "#666666", 0.16


def draw_overhead(
    rows: Sequence[Mapping[str, Any]], *, titles: Mapping[Any, str], path: Path
) -> None:
    """Draw a panel for each form of comparison: ratios over models, and the floor as bars.

    Args:
        rows: of the overhead benchmark.
        titles: of the forms, in the order of the panels.
        path: of the picture.
    """
    forms = by_form(rows)
    shown = [form for form in titles if form in forms]
    figure, panels = grid(len(shown))
    for axes, form in zip(panels, shown, strict=True):
        models = forms[form]
        places = range(len(models))
        floors = [told(methods[FLOOR]).ratio - 1 for methods in models.values()]
        axes.bar(places, floors, bottom=1.0, color=_FLOOR_COLOR, width=0.8, label=FLOOR)
        axes.axhline(1.0, color=_GOAL_COLOR, lw=0.8)
        for index, name in enumerate(_DRAWN):
            known = [
                (x, told(m[name]))
                for x, m in zip(places, models.values(), strict=True)
                if name in m
            ]
            axes.errorbar(
                [x + _APART * (index - 1.5) for x, _ in known],
                [one.ratio for _, one in known],
                yerr=[
                    [one.ratio - one.low for _, one in known],
                    [one.high - one.ratio for _, one in known],
                ],
                fmt="o",
                ms=3.0,
                lw=1.0,
                color=COLORS[index],
                label=name,
            )
        axes.set_xticks(list(places), [_short(name) for name in models], rotation=30, ha="right")
        axes.set_ylim(*HEIGHTS)
        label_axes(axes, title=titles[form], x="", y="processor time / plain")
    save_with_legend(figure, panels[-1], path=path)


def _short(model: str) -> str:
    kind, size = model.split()[:2]
    return f"{kind} {size}"
