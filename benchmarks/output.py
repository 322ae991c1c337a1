"""Where a benchmark's result goes: a file, standard output, or nowhere.

Knows JSON; nothing of what was measured.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["write_json"]


def write_json(result: Mapping[str, Any], *, path: str | None) -> None:
    """Write a result as JSON to a file, or to standard output for `-`; `None` writes nothing."""
    text = json.dumps(result, indent=2) + "\n"
    if path == "-":
        sys.stdout.write(text)
    elif path is not None:
        Path(path).write_text(text, encoding="utf-8")
