"""A process that carries out one run after the other: `python -m benchmarks.runs.worker MODULE`.

Reads a JSON line for each run and writes one with its end. Knows the module's functions by name
only.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch

__all__ = ["answer", "main"]


def answer(function: Callable[..., Mapping[str, Any]], task: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's end: what the function returned, or why it failed, and what it cost."""
    began = _process_s()
    found: dict[str, Any]
    try:
        found = {"record": function(task["spec"], task["needs"])}
    except Exception as error:
        traceback.print_exc()
        found = {"failure": f"{type(error).__name__}: {error}"[:500]}
    return found | {"process_s": round(_process_s() - began, 3)}


def _process_s() -> float:
    """Return the processor time of this process and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def main() -> None:
    """Serve until there is nothing more to read."""
    torch.set_num_threads(1)
    functions = import_module(sys.argv[1])
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what runs print is no answer
        for line in sys.stdin:
            task = json.loads(line)
            print(json.dumps(answer(getattr(functions, task["does"]), task)), file=answers)
            answers.flush()


if __name__ == "__main__":
    main()
