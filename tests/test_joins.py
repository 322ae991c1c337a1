"""The benchmark of a join's parts: its arithmetic, and the whole of it in small."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from benchmarks import elastic_page
from benchmarks.joins import PARTS, main, parts_of, rows_of
from benchmarks.resize.marks import MARKS
from benchmarks.resize.measure import Line, Membership

JOINED = Membership(number=2, members=(1, 2), cause="join", time=10.0)


def line(kind, worker, time, *, generation=0):
    return Line(kind=kind, worker=worker, pid=worker, time=time, generation=generation)


def steps(worker, *times, generation):
    return [line("step", worker, time, generation=generation) for time in times]


def marks(worker, **times):
    return [line(kind, worker, time) for kind, time in times.items()]


def records():
    """Return those of a join whose first worker waits at each mark but one for the second."""
    first = marks(1, met=10.01, followed=10.01, opened=10.2, compared=10.21, copied=10.4)
    second = marks(2, met=10.05, followed=10.15, opened=10.2, compared=10.2, copied=10.45)
    return {
        1: [
            *steps(1, 9.8, 10.0, generation=1),
            *first,
            line("entered", 1, 10.46),
            *steps(1, 11.0, 11.3, 11.6, generation=2),
        ],
        2: [*second, line("entered", 2, 10.5), *steps(2, 11.0, 11.3, generation=2)],
    }


def test_a_part_ends_when_the_last_worker_is_through_with_it():
    found = parts_of(JOINED, survivor=1, records=records())
    wanted = {"met": 50, "followed": 100, "opened": 50, "compared": 10, "copied": 240}
    wanted |= {"entered": 50, "pause": 500, "first step": 500, "usual step": 300}
    assert found == pytest.approx(wanted)
    assert sum(found[mark] for mark in MARKS) == pytest.approx(found["pause"])


def test_marks_of_earlier_changes_do_not_count():
    before = marks(2, met=3.0, followed=3.1, opened=3.2, compared=3.3, copied=3.4, entered=3.5)
    lines = records()
    found = parts_of(JOINED, survivor=1, records={**lines, 2: [*before, *lines[2]]})
    assert found == parts_of(JOINED, survivor=1, records=lines)


def test_a_join_without_a_mark_is_named():
    lines = {w: [one for one in own if one.kind != "opened"] for w, own in records().items()}
    with pytest.raises(ValueError, match="nobody came to 'opened'"):
        parts_of(JOINED, survivor=1, records=lines)


def test_rows_hold_medians_and_quartiles():
    rows = rows_of([{"pause": ms} for ms in (10.0, 30.0, 20.0)], size="10M", way="copied")
    numbers = {"ms_median": 20.0, "ms_q1": 15.0, "ms_q3": 25.0}
    assert rows == [{"size": "10M", "way": "copied", "part": "pause", "joins": 3} | numbers]


@pytest.mark.processes
def test_a_small_model_joins_with_a_copied_state_and_by_following(tmp_path):
    path = tmp_path / "joins.json"
    CliRunner().invoke(main, ["--quick", "--json", str(path)], catch_exceptions=False)
    found = json.loads(path.read_text())
    by_way = {way: {} for way in ("copied", "followed")}
    for row in found["rows"]:
        by_way[row["way"]][row["part"]] = row["ms_median"]
    for parts in by_way.values():
        assert parts.keys() == {*PARTS, "pause", "first step", "usual step"}
        assert parts["pause"] > 0
    text = elastic_page.joins(found)
    assert "| opening the group | " in text
    assert "**20k parameters with momentum, 0 MiB of state**" in text
