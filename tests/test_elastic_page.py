"""The page of measurements: written out of the committed results, and complete without them."""

import re

from benchmarks.chaos.events import KINDS
from benchmarks.elastic_page import _EVENTS, PAGE, RESULTS, page


def test_the_page_is_what_the_committed_results_say():
    assert PAGE.read_text() == page(RESULTS)


def test_without_results_the_page_says_how_to_get_them(tmp_path):
    text = page(tmp_path)

    commands = re.findall(r"Not measured yet: `python -m benchmarks\.(\w+)`", text)
    assert commands == ["resize", "joins", "steady", "chaos", "blackout"]


def test_every_kind_of_event_has_its_words():
    assert set(_EVENTS) == set(KINDS)
