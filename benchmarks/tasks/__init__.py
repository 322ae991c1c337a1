"""The tasks of the tables by name; each one's module is imported when it is asked for.

Knows names; nothing of what is in a task or of what is done with it.
"""

from __future__ import annotations

from importlib import import_module

import click

from benchmarks.tasks.task import Task

__all__ = ["TASKS", "load_task"]

TASKS = ("fashion", "mnist", "speech", "translation", "detection", "segmentation", "language")


def load_task(name: str) -> Task:
    """Return a task.

    Args:
        name: one of `TASKS`, or the dotted name of a module of yours that has a `TASK`.

    Raises:
        UsageError: there is no such task.
        ClickException: its module can't be imported.
    """
    if name not in TASKS and "." not in name:
        way_out = "or the dotted name of a module with a TASK"
        raise click.UsageError(f"no task {name!r}: choose one of {', '.join(TASKS)}, {way_out}")
    try:
        return import_module(name if "." in name else f"benchmarks.tasks.{name}").TASK
    except (ImportError, AttributeError) as error:
        raise click.ClickException(f"the task {name!r} can't be loaded: {error}") from error
