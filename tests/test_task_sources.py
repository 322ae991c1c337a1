"""Where the data of the tasks lies, and the script that fetches it; without network."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest

from benchmarks.tasks import sources

ROOT = Path(__file__).parents[1]


def test_what_is_missing_is_said_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_FETCHED", tmp_path)
    monkeypatch.setattr(sources, "_DEBIAN", tmp_path / "share")
    sentence = sources.missing(["verses-en", "verses-es"])
    assert sentence == "the English verses and the Spanish verses not found: run scripts/data"
    with pytest.raises(FileNotFoundError, match="Fashion-MNIST not found: run scripts/data"):
        sources.find("fashion")


def test_a_folder_counts_only_with_all_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_FETCHED", tmp_path)
    monkeypatch.setattr(sources, "_DEBIAN", tmp_path / "share")
    debian = tmp_path / "share/datasets/fashion-mnist"
    first, *others = sources.SOURCES["fashion"].files
    for folder, names in ((tmp_path / "fashion", [first]), (debian, [first, *others])):
        folder.mkdir(parents=True)
        for name in names:
            (folder / name).touch()
    assert sources.find("fashion") == debian
    assert sources.missing(["fashion"]) is None


def run_functions(script: str, *, into: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", f'source scripts/data; into="$1"; {script}', "bash", str(into)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_scripts_data_refuses_a_file_whose_checksum_is_wrong(tmp_path: Path) -> None:
    package, into = tmp_path / "package", tmp_path / "data"
    package.mkdir()
    (package / "digits.npz").write_text("something else")
    result = run_functions(f"take speech '{package}'", into=into)
    assert result.returncode == 1
    assert "error: speech/digits.npz: its sha256 is" in result.stderr
    assert "was not kept" in result.stderr
    assert not list(into.rglob("*.npz*"))


def test_scripts_data_takes_what_is_right_and_then_misses_it_no_more(tmp_path: Path) -> None:
    package, into = tmp_path / "package", tmp_path / "data"
    package.mkdir()
    (package / "a.txt").write_text("all of it\n")
    checksum = hashlib.sha256(b"all of it\n").hexdigest()
    table = f"checksums() {{ echo '{checksum}  part/a.txt'; }}"
    result = run_functions(
        f"{table}; missing part; take part '{package}'; missing part; echo end", into=into
    )
    assert result.stdout.splitlines() == ["part/a.txt", str(into / "part/a.txt"), "end"]
    assert result.returncode == 0
    (into / "part/a.txt").write_text("half of")
    assert run_functions(f"{table}; missing part", into=into).stdout == "part/a.txt\n"


def test_scripts_data_says_so_where_a_package_lacks_a_file(tmp_path: Path) -> None:
    result = run_functions(f"take speech '{tmp_path}'", into=tmp_path / "data")
    assert result.returncode == 1
    assert "error: speech/digits.npz: the package that was fetched has no" in result.stderr


def test_scripts_data_fetches_every_file_that_the_tasks_look_for() -> None:
    result = run_functions("checksums", into=ROOT)
    fetched = {line.split()[1] for line in result.stdout.splitlines()}
    assert fetched == {
        str(source.fetched / name)
        for source in sources.SOURCES.values()
        if source.fetched is not None
        for name in source.files
    }
