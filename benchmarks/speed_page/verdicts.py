"""What the rows of the overhead benchmark say of its goals.

Pure: knows rows; nothing of pages or of how the rows came about.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "DEFAULT",
    "EVERY",
    "FLOOR",
    "FLOOR_OF_MEAN",
    "PEERS",
    "Form",
    "Told",
    "Verdict",
    "by_form",
    "told",
    "verdicts",
]

Row = Mapping[str, Any]
Form = tuple[int, int, bool]
"""Processes, micro-batches of each, and whether the batch is the larger one."""

DEFAULT, EVERY, SHARED = "elastane", "elastane, every step", "elastane, clipped"
FLOOR, FLOOR_OF_MEAN = "floor", "floor, mean only"
PEERS = ("fairscale", "AdaptDL")
_BY_PARAMETERS = ((1_000_000, 1.05), (5_000_000, 1.02), (30_000_000, 1.03), (10**12, 1.02))
_POINTS_ABOVE_FLOOR, _MOST_SHARED, _LARGE = 0.02, 1.01, 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One goal in one comparison.

    Attributes:
        model: name of the model.
        form: of the comparison.
        goal: what is to hold.
        found: the ratio that was measured.
        bound: what it must not be above.
        low: lower end of the ratio's 95 % interval, if it has one.
        floor: what a plain step costs that only reads what the method has to read, if measured.
    """

    model: str
    form: Form
    goal: str
    found: float
    bound: float
    low: float | None = None
    floor: float | None = None

    @property
    def is_met(self) -> bool:
        """Whether it holds."""
        return self.found <= self.bound

    @property
    def is_unsure(self) -> bool:
        """Whether the interval reaches down to the goal, which is missed."""
        return not self.is_met and self.low is not None and self.low <= self.bound

    @property
    def is_out_of_reach(self) -> bool:
        """Whether the floor alone is above the goal."""
        return self.floor is not None and self.floor > self.bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """A method's ratio, and how sure it is.

    Attributes:
        ratio: processor time over that of a plain step.
        low: lower end of its 95 % interval.
        high: upper end.
        is_resolved: whether the interval is narrower than a point.
    """

    ratio: float
    low: float
    high: float
    is_resolved: bool


def told(row: Row) -> Told:
    """Return a row's number: the median of the rounds.

    Of methods that measure few of their steps it is the mean: the median would see the others.
    """
    if row["method"] in (DEFAULT, SHARED):
        middle, ends, resolved = "cpu_mean", "cpu_mean", "mean_resolved"
    else:
        middle, ends, resolved = "cpu_ratio", "cpu", "resolved"
    return Told(
        ratio=row[middle],
        low=row[f"{ends}_low"],
        high=row[f"{ends}_high"],
        is_resolved=row[resolved],
    )


def by_form(rows: Sequence[Row]) -> dict[Form, dict[str, dict[str, Row]]]:
    """Return the rows by form, model and method. AdaptDL's own plain rows are left out."""
    least: dict[str, int] = {}
    for row in rows:
        least[row["model"]] = min(row["batch"], least.get(row["model"], row["batch"]))
    found: dict[Form, dict[str, dict[str, Row]]] = {}
    for row in rows:
        if row["beside"] is None or row["method"] == row["beside"]:
            is_large = row["batch"] > least[row["model"]]
            form = (row["processes"], row["micro_batches"], is_large)
            found.setdefault(form, {}).setdefault(row["model"], {})[row["method"]] = row
    return found


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """Return each goal in each comparison that has its rows."""
    return [
        verdict
        for form, models in by_form(rows).items()
        for model, methods in models.items()
        for verdict in _verdicts(model, form, methods)
    ]


def _verdicts(model: str, form: Form, methods: Mapping[str, Row]) -> Iterator[Verdict]:
    def verdict(goal: str, method: str, bound: float, *, floor: str | None = None) -> Verdict:
        found = told(methods[method])
        least = None if floor is None or floor not in methods else told(methods[floor]).ratio
        known = {"found": found.ratio, "low": found.low, "bound": bound, "floor": least}
        return Verdict(model=model, form=form, goal=goal, **known)

    parameters = next(iter(methods.values()))["params"]
    if DEFAULT in methods:
        bound = next(bound for most, bound in _BY_PARAMETERS if parameters < most)
        yield verdict("default", DEFAULT, bound, floor=FLOOR_OF_MEAN)
        for peer in PEERS:
            if peer in methods:
                yield verdict(f"default, beside {peer}", DEFAULT, told(methods[peer]).ratio)
    if EVERY in methods and FLOOR in methods:
        bound = told(methods[FLOOR]).ratio + _POINTS_ABOVE_FLOOR
        yield verdict("every step", EVERY, round(bound, 4), floor=FLOOR)
    if SHARED in methods and parameters > _LARGE:
        found = methods[SHARED]["over_clipped_mean"]
        yield Verdict(
            model=model, form=form, goal="shared clipping", found=found, bound=_MOST_SHARED
        )
