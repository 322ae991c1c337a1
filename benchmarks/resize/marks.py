"""Has a worker write down when it is through with each part of a change of members.

Knows the names of the parts of `elastane.elastic`; nothing of what is made of the times.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from elastane.elastic import entry, runtime
from elastane.elastic.following import Following
from elastane.elastic.runtime import ElasticMembership

__all__ = ["MARKS", "install"]

MARKS = ("met", "followed", "opened", "compared", "copied", "entered")
"""In the order in which a worker comes to them."""


def install(tell: Callable[[str], None]) -> None:
    """Have this process tell each mark when it comes to it.

    Args:
        tell: takes the mark's name.
    """
    _mark(ElasticMembership, "_meet", "met", tell)
    _mark(Following, "finish", "followed", tell)
    _mark(entry, "_open", "opened", tell)
    _mark(entry, "_gather", "compared", tell)
    _mark(entry, "_equalize", "copied", tell)
    _mark(runtime, "enter_group", "entered", tell)


def _mark(owner: Any, name: str, mark: str, tell: Callable[[str], None]) -> None:
    real = getattr(owner, name)

    @wraps(real)
    def marked(*args: Any, **options: Any) -> Any:
        result = real(*args, **options)
        tell(mark)
        return result

    setattr(owner, name, marked)
