"""Fails when a public name lacks a docstring or is missing from the built documentation.

Usage: documented_names.py docs/_build/html/objects.inv
A public name is one in the `__all__` of a module of elastane without a leading underscore; the
command line is left out, because its help text is its documentation.
"""

import importlib
import inspect
import pkgutil
import sys
import zlib
from pathlib import Path

import elastane


def public_modules() -> list[str]:
    """Return the names of all modules that export something."""
    found = [module.name for module in pkgutil.walk_packages(elastane.__path__, "elastane.")]
    named = [name for name in found if "._" not in name]
    names = ["elastane", *(name for name in named if name.split(".")[1] != "cli")]
    return [name for name in names if hasattr(importlib.import_module(name), "__all__")]


def documented_names(inventory: Path) -> set[str]:
    """Return every Python object that the built documentation can link to."""
    packed = inventory.read_bytes().split(b"\n", 4)[4]  # four lines of header, then zlib
    entries = [line.split() for line in zlib.decompress(packed).decode().splitlines()]
    return {name for name, kind, *_ in entries if kind.startswith("py:")}


def home_name(module: str, name: str) -> str:
    """Return the dotted name under which `module.name` was defined."""
    value = getattr(importlib.import_module(module), name)
    if inspect.isclass(value) or inspect.isroutine(value):
        return f"{value.__module__}.{value.__qualname__}"
    return value.__name__ if inspect.ismodule(value) else f"{module}.{name}"


def has_docstring(module: str, name: str) -> bool:
    """Return whether a class, function or module has a docstring; plain values needn't."""
    value = getattr(importlib.import_module(module), name)
    if not (inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value)):
        return True
    return bool(value.__doc__ and value.__doc__.strip())


def complaints(inventory: Path) -> list[str]:
    """Return one line for each public name that isn't documented."""
    documented = documented_names(inventory)
    lines: list[str] = []
    for module in public_modules():
        for name in importlib.import_module(module).__all__:
            if name.startswith("__"):
                continue
            if not {f"{module}.{name}", home_name(module, name)} & documented:
                lines.append(f"{module}.{name}: not in the built documentation")
            if not has_docstring(module, name):
                lines.append(f"{module}.{name}: has no docstring")
    return lines


if __name__ == "__main__":
    found = complaints(Path(sys.argv[1]))
    print("\n".join(found), file=sys.stderr)
    sys.exit(1 if found else 0)
