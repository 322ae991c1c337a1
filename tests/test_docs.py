"""The documentation's links lead somewhere, and plain docstrings become what Sphinx can read."""

import importlib.util
import re
from pathlib import Path

import pytest

import elastane

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(page for page in ROOT.glob("docs/**/*.md") if "_build" not in page.parts),
    ]
)
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)|^\[[^\]]+\]:\s*(\S+)", re.MULTILINE)
HEADING = re.compile(r"^#+\s+(.*)$", re.MULTILINE)


def prose_of(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def links_of(page: Path) -> list[str]:
    targets = [first or second for first, second in LINK.findall(prose_of(page))]
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MyST make them."""
    words = (
        re.sub(r"[^\w\s-]", "", heading.lower()) for heading in HEADING.findall(prose_of(page))
    )
    return {heading.strip().replace(" ", "-") for heading in words}


def load_extension():
    path = ROOT / "docs" / "_extensions" / "plain_docstrings.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_to_files_and_headings_that_exist(page):
    broken = []
    for link in links_of(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            broken.append(link)

    assert broken == []


def test_the_reference_names_every_name_at_the_top():
    text = (ROOT / "docs" / "api" / "index.md").read_text(encoding="utf-8")

    missing = [name for name in elastane.__all__ if f"`elastane.{name} <" not in text]

    assert [name for name in missing if not name.startswith("__")] == []


def test_a_plain_docstring_keeps_bars_stars_and_code_in_backticks():
    plain = load_extension().plain

    assert plain(["Return `|g|^2` and |g|^2 * b_i, see :func:`gain`."]) == [
        r"Return ``|g|^2`` and \|g\|^2 \* b_i, see :func:`gain`."
    ]


def test_an_indented_block_of_a_plain_docstring_is_literal_and_a_section_is_not():
    plain = load_extension().plain
    lines = ["A tree:", "", "    a * b", "    └── c", "", "Args:", "    x: a * b."]

    assert plain(lines) == [
        *["A tree:", "", "::", "", "    a * b", "    └── c", "", "Args:"],
        r"    x: a \* b.",
    ]


def promised_on(page, *, row):
    """Return (row, test) of a page's table."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return {
        (found[1], test)
        for found in re.finditer(rf"^\| ({row}) \|.*\|([^|]*)\|$", text, re.MULTILINE)
        for test in re.findall(r"`(test_\w+)`", found[2])
    }


def held_by_tests(mark, *, row):
    """Return (row, test) of the comments above tests."""
    decorators = r"(?:@.*\n(?:[ )].*\n)*)*"
    return {
        (number, found["test"])
        for path in ROOT.glob("tests/test_*.py")
        for found in re.finditer(
            rf"^# (?P<marks>(?:{mark} ?)+)\n(?:# .*\n)*{decorators}def (?P<test>\w+)",
            path.read_text(encoding="utf-8"),
            re.MULTILINE,
        )
        for number in re.findall(row, found["marks"])
    }


def test_every_report_is_held_by_the_tests_that_the_page_names():
    promised = promised_on("reports.md", row=r"\d+")

    assert promised == held_by_tests(r"\[\d+\]", row=r"\d+")
    assert {int(number) for number, _ in promised} == set(range(1, 28))


def test_every_case_is_held_by_the_tests_that_the_page_names():
    promised = promised_on("cases.md", row=r"BC-\d\d")

    assert promised == held_by_tests(r"BC-\d\d", row=r"BC-\d\d")
    assert len({case for case, _ in promised}) >= 46
