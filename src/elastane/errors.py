"""Every error that elastane raises for its users, and the one form of their messages.

Knows nothing of torch and nothing of the rest of the package.

    ElastaneError
    ├── ArgumentError       (ValueError)    a value that breaks a rule
    ├── UnsupportedError    (TypeError)     a kind of object that is refused by name
    ├── UsageError          (RuntimeError)  calls in the wrong order
    ├── StateError          (ValueError)    a saved state that does not fit
    ├── NonFiniteError      (ArithmeticError)  gradients that stay infinite or NaN
    └── CommunicationError  (RuntimeError)  the process group broke during a step
"""

from __future__ import annotations

import math
from collections.abc import Collection
from contextlib import suppress


class ElastaneError(Exception):
    """Root of all errors that elastane raises on purpose."""


class ArgumentError(ElastaneError, ValueError):
    """An argument has a value that breaks a rule."""


class UnsupportedError(ElastaneError, TypeError):
    """An object of a kind that elastane refuses by name."""


class UsageError(ElastaneError, RuntimeError):
    """A method was called at a moment when it can't do its work."""


class StateError(ElastaneError, ValueError):
    """A saved state does not fit what it is loaded into."""


class NonFiniteError(ElastaneError, ArithmeticError):
    """Too many steps in a row were skipped because their gradients were not finite."""


class CommunicationError(ElastaneError, RuntimeError):
    """The process group broke while a step was being averaged."""


def describe(name: str, value: object, *, rule: str, way_out: str) -> str:
    """Return the one-line message of a refused argument: name, value, rule, way out."""
    shown = repr(value)
    if len(shown) > 80:
        shown = shown[:77] + "..."
    return f"{name}={shown}: {rule}. {way_out}"


def check_whole(name: str, value: object, *, at_least: int, way_out: str) -> int:
    """Return `value` as an int, or raise `ArgumentError` if it is no whole number >= `at_least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        rule = f"must be a whole number of at least {at_least}"
        raise ArgumentError(describe(name, value, rule=rule, way_out=way_out))
    return value


def check_between(name: str, value: object, *, at_least: int, at_most: int, way_out: str) -> int:
    """Return `value` as an int, or raise `ArgumentError` if it is no whole number in the range."""
    if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value <= at_most:
        rule = f"must be a whole number from {at_least} to {at_most}"
        raise ArgumentError(describe(name, value, rule=rule, way_out=way_out))
    return value


def check_positive(name: str, value: object, *, way_out: str) -> float:
    """Return `value` as a float, or raise `ArgumentError` if it is not finite and above 0."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        with suppress(OverflowError):
            number = float(value)
            if math.isfinite(number) and number > 0:
                return number
    rule = "must be a finite number above 0"
    raise ArgumentError(describe(name, value, rule=rule, way_out=way_out))


def check_choice(name: str, value: object, choices: Collection[str]) -> str:
    """Return `value`, or raise `ArgumentError` if it is none of `choices`."""
    if not isinstance(value, str) or value not in choices:
        listed = ", ".join(repr(choice) for choice in sorted(choices))
        raise ArgumentError(
            describe(name, value, rule="unknown option", way_out=f"Choose one of {listed}.")
        )
    return value
