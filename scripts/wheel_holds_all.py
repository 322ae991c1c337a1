"""Compare the files of a wheel with those of the source tree: `wheel_holds_all.py WHEEL`.

Knows names of files only. Exits with 1 and names what differs.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"


def in_tree() -> set[str]:
    """Return the names of the package's files."""
    files = (path for path in SOURCE.glob("elastane/**/*") if path.is_file())
    return {str(path.relative_to(SOURCE)) for path in files if "__pycache__" not in path.parts}


def in_wheel(path: str) -> set[str]:
    """Return the names of the wheel's files without its metadata."""
    with zipfile.ZipFile(path) as wheel:
        return {name for name in wheel.namelist() if ".dist-info/" not in name}


def main() -> int:
    """Say what only one of the two has."""
    tree, wheel = in_tree(), in_wheel(sys.argv[1])
    for name in sorted(tree - wheel):
        print(f"not in the wheel: {name}")
    for name in sorted(wheel - tree):
        print(f"only in the wheel: {name}")
    return int(tree != wheel)


if __name__ == "__main__":
    sys.exit(main())
