"""A benchmark's result: what it was measured with, and where it goes.

Knows JSON; nothing of what was measured.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

__all__ = ["versions", "write_json"]


def versions(*more: str) -> dict[str, str]:
    """Return the versions of elastane, torch, further packages and Python, and the machine."""
    return {
        **{name: version(name) for name in ("elastane", "torch", *more)},
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def write_json(result: Mapping[str, Any], *, path: str | None) -> None:
    """Write a result as JSON to a file, or to standard output for `-`; `None` writes nothing."""
    text = json.dumps(result, indent=2) + "\n"
    if path == "-":
        sys.stdout.write(text)
    elif path is not None:
        Path(path).write_text(text, encoding="utf-8")
