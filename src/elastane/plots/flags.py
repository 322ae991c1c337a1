"""Where the labels of membership changes go, so that they can be read.

Knows positions and texts; nothing of matplotlib.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from elastane.plots.runs import Change

Mark = tuple[int, float, Change]

_MAX_FLAGS = 6
_CAUSE_LETTERS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """A label on a pole: all in parts of the axis, but `row`, of which 0 is the lowest.

    The text reaches from the pole to the right, or to the left.
    """

    position: float
    text: str
    run_index: int
    width: float
    to_left: bool = False
    row: int = 0

    @property
    def span(self) -> tuple[float, float]:
        """Where the text begins and ends."""
        if self.to_left:
            return self.position - self.width, self.position
        return self.position, self.position + self.width


def change_text(change: Change) -> str:
    """Return what a change is labelled with.

    Example:
        >>> change_text(Change(step=5, progress=9, world_size=4, cause="join", pause_s=0.031))
        'join → 4, 31 ms'
    """
    cause = change.cause
    if len(cause) > _CAUSE_LETTERS:
        cause = cause[: _CAUSE_LETTERS - 1] + "…"
    target = "" if change.world_size is None else f" → {change.world_size}"
    pause = "" if change.pause_s is None else f", {pause_text(change.pause_s)}"
    return cause + target + pause


def pause_text(pause_s: float) -> str:
    """Return a pause in milliseconds below a second, in seconds above."""
    return f"{pause_s * 1000:.0f} ms" if pause_s < 1 else f"{pause_s:.3g} s"


def flags(marks: Sequence[Mark], *, letter_width: float) -> list[Flag]:
    """Return at most about six flags for these changes, placed, from left to right.

    Where there are more changes, those of a run that stand close together share a flag.

    Args:
        marks: Run index, position in parts of the axis (between 0 and 1), and change.
        letter_width: Width of a letter in parts of the axis.
    """
    gap = 0.01
    groups = _grouped(marks, gap=gap)
    while len(groups) > _MAX_FLAGS and gap < 1:
        gap *= 1.5
        groups = _grouped(marks, gap=gap)
    loose = [_flag(group, letter_width=letter_width) for group in groups]
    return _in_rows(_turned(sorted(loose, key=lambda flag: flag.position)))


def _grouped(marks: Sequence[Mark], *, gap: float) -> list[list[Mark]]:
    groups: list[list[Mark]] = []
    for mark in sorted(marks, key=lambda mark: mark[:2]):
        first = groups[-1][0] if groups else None
        if first is not None and first[0] == mark[0] and mark[1] - first[1] <= gap:
            groups[-1].append(mark)
        else:
            groups.append([mark])
    return groups


def _flag(group: Sequence[Mark], *, letter_width: float) -> Flag:
    run_index, position, change = group[0]
    text = change_text(change)
    if len(group) > 1:
        pauses = [change.pause_s for _, _, change in group if change.pause_s is not None]
        longest = f", ≤ {pause_text(max(pauses))}" if pauses else ""
        text = f"{len(group)} changes{longest}"
    width = (len(text) + 2) * letter_width
    return Flag(position=position, text=text, run_index=run_index, width=width)


def _turned(ordered: Sequence[Flag]) -> list[Flag]:
    """Return the flags with the last few turned to the left, as many as is best."""
    layouts = [
        [replace(flag, to_left=index >= split) for index, flag in enumerate(ordered)]
        for split in range(len(ordered), -1, -1)
    ]
    return min(layouts, key=_badness)


def _badness(ordered: Sequence[Flag]) -> float:
    """Return how far texts reach beyond the axis, plus 0.1 for each pole across a text."""
    beyond = sum(max(0.0, -flag.span[0]) + max(0.0, flag.span[1] - 1) for flag in ordered)
    pairs = itertools.combinations(ordered, 2)
    crossed = sum(_covers(left, right) and _covers(right, left) for left, right in pairs)
    return beyond + 0.1 * crossed


def _in_rows(ordered: Sequence[Flag]) -> list[Flag]:
    """Return the flags in the lowest rows where no text lies on another or on a pole."""
    rows = [0] * len(ordered)
    pairs = list(itertools.combinations(range(len(ordered)), 2))
    for _ in ordered:  # the longest chain of flags above flags settles in so many rounds
        for left, right in pairs:
            upper = _upper(ordered[left], ordered[right])
            if upper == "left":
                rows[left] = max(rows[left], rows[right] + 1)
            elif upper == "right":
                rows[right] = max(rows[right], rows[left] + 1)
    return [replace(flag, row=row) for flag, row in zip(ordered, rows, strict=True)]


def _upper(left: Flag, right: Flag) -> str | None:
    """Return which of two flags must be the higher one, or None if they may share a row."""
    if _covers(right, left):
        return "right"
    if _covers(left, right):
        return "left"
    return "right" if left.span[1] > right.span[0] else None


def _covers(flag: Flag, other: Flag) -> bool:
    """Whether the other's pole would go through this flag's text, were it in a lower row."""
    start, end = flag.span
    return start <= other.position <= end
