"""What a checkpoint folder says of itself, and whether its files are what it says.

Knows files, sizes and checksums; nothing of torch or of what the files mean.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastane._version import __version__
from elastane.errors import StateError, UnsupportedError, describe

__all__ = ["FORMAT", "MANIFEST_NAME", "Manifest", "checksum", "inspect_folder", "write_manifest"]

FORMAT = 1
MANIFEST_NAME = "manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint folder says of itself.

    Attributes:
        step: committed steps.
        generation: membership that wrote it.
        facts: what the writer wanted to be known without reading tensors.
        version: elastane's, of the writer.
        files: size in bytes and checksum of each file, by name.
    """

    step: int
    generation: int
    facts: Mapping[str, Any]
    version: str
    files: Mapping[str, tuple[int, str]]


def write_manifest(
    folder: Path, *, step: int, generation: int, facts: Mapping[str, Any]
) -> Manifest:
    """Write the manifest of all files in a folder, and make it durable.

    Raises:
        UnsupportedError: `facts` is no plain JSON.
    """
    files = {path.name: (path.stat().st_size, checksum(path)) for path in sorted(folder.iterdir())}
    body = {
        "format": FORMAT,
        "elastane": __version__,
        "step": step,
        "generation": generation,
        "facts": _plain(facts),
        "files": {
            name: {"bytes": size, "sha256": digest} for name, (size, digest) in files.items()
        },
    }
    with (folder / MANIFEST_NAME).open("xb") as file:
        file.write(_render(body))
        file.flush()
        os.fsync(file.fileno())
    return _manifest(body)


def inspect_folder(folder: Path) -> tuple[Manifest | None, str]:
    """Return a checkpoint's manifest if all its files are whole, else `None` and what is wrong.

    Raises:
        StateError: it is whole as far as can be told, but of a format newer than this version's.
    """
    try:
        body, problem = _read_body(folder)
        if body is None:
            return None, problem
        _check_format(body, folder)
        manifest = _manifest(body)
        problems = (_problem(folder / name, *record) for name, record in manifest.files.items())
        problem = next(filter(None, problems), "")
    except OSError as error:
        return None, f"can't be read, {error}"
    return (None, problem) if problem else (manifest, "")


def checksum(file: Path | bytes) -> str:
    """Return the SHA-256 of a file, or of bytes."""
    if isinstance(file, bytes):
        return hashlib.sha256(file).hexdigest()
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _render(body: Mapping[str, Any]) -> bytes:
    """Return the one text that stands for these values, with a checksum of its own."""
    digest = checksum(json.dumps(body, sort_keys=True).encode())
    return json.dumps({"body": body, "sha256": digest}, indent=1, sort_keys=True).encode() + b"\n"


def _read_body(folder: Path) -> tuple[dict[str, Any] | None, str]:
    """Return a manifest's values if it is whole, else what is wrong."""
    path = folder / MANIFEST_NAME
    if not path.is_file():
        return None, f"has no {MANIFEST_NAME}"
    text = path.read_bytes()
    try:
        body = json.loads(text)["body"]
        whole = _render(body) == text
    except (LookupError, RecursionError, TypeError, ValueError):
        whole, body = False, None
    return (body, "") if whole else (None, f"{MANIFEST_NAME} is damaged")


def _check_format(body: Mapping[str, Any], folder: Path) -> None:
    """Refuse a format that this version does not know: going back behind it would lose steps."""
    if body["format"] > FORMAT:
        raise StateError(
            f"checkpoint {folder} has format {body['format']}, written by elastane "
            f"{body['elastane']}; elastane {__version__} reads formats up to {FORMAT}: install "
            "that version, or move the folder away to go on from the checkpoint before it"
        )


def _manifest(body: Mapping[str, Any]) -> Manifest:
    return Manifest(
        step=body["step"],
        generation=body["generation"],
        facts=body["facts"],
        version=body["elastane"],
        files={name: (file["bytes"], file["sha256"]) for name, file in body["files"].items()},
    )


def _problem(path: Path, size: int, digest: str) -> str:
    """Return what is wrong with a file, or ""."""
    if not path.is_file():
        return f"{path.name} is missing"
    own_size = path.stat().st_size
    if own_size != size:
        return f"{path.name} has {own_size} bytes and had {size}"
    return "" if checksum(path) == digest else f"{path.name} is damaged, its checksum differs"


def _plain(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts as they will be read."""
    try:
        return json.loads(json.dumps(dict(facts), allow_nan=False))
    except (TypeError, ValueError) as error:
        rule = f"can't be written to {MANIFEST_NAME}, {error}"
        way_out = "Facts are strings, finite numbers, booleans, None, and lists and dicts of them."
        raise UnsupportedError(describe("facts", facts, rule=rule, way_out=way_out)) from None
