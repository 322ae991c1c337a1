"""The page on speed: what it shows of the rows, and which goals it says hold."""

from __future__ import annotations

import json

import pytest

from benchmarks.speed_page.__main__ import FORMS, page
from benchmarks.speed_page.picture import draw_overhead
from benchmarks.speed_page.verdicts import by_form, verdicts

PLACE = {"model": "mlp 10M", "params": 10_000_000, "batch": 16, "processes": 2, "micro_batches": 1}


def row(method, ratio, *, mean=None, resolved=True, beside=None, **other):
    numbers = {"cpu_ratio": ratio, "cpu_mean": mean or ratio}
    numbers |= {"cpu_low": ratio, "cpu_high": ratio}
    numbers |= {"cpu_mean_low": mean or ratio, "cpu_mean_high": mean or ratio}
    sure = {"resolved": resolved, "mean_resolved": resolved}
    return PLACE | numbers | sure | {"method": method, "beside": beside} | other


ROWS = [
    row("plain again", 1.001),
    row("floor, mean only", 1.04),
    row("floor", 1.09),
    row("elastane", 1.01, mean=1.025),
    row("elastane, every step", 1.12, resolved=False),
    row("elastane, clipped", 1.05, over_clipped_mean=1.005),
    row("fairscale", 1.3),
    row("plain again", 0.9, beside="AdaptDL"),
    row("AdaptDL", 1.02, beside="AdaptDL"),
]


def test_goals_are_judged_by_parameters_floor_and_peers():
    found = {one.goal: (one.found, one.bound, one.is_met) for one in verdicts(ROWS)}
    assert found == {
        "default": (1.025, 1.03, True),
        "default, beside fairscale": (1.025, 1.3, True),
        "default, beside AdaptDL": (1.025, 1.02, False),
        "every step": (1.12, 1.11, False),
        "shared clipping": (1.005, 1.01, True),
    }


def test_a_goal_is_out_of_reach_where_its_floor_is_above_it():
    rows = [row("floor, mean only", 1.04), row("elastane", 1.0, mean=1.05)]
    (verdict,) = verdicts(rows)
    assert (verdict.floor, verdict.is_out_of_reach) == (1.04, True)

    (verdict,) = verdicts([row("floor, mean only", 1.03), rows[1]])
    assert not verdict.is_out_of_reach

    (verdict,) = verdicts(rows[1:])
    assert (verdict.floor, verdict.is_out_of_reach) == (None, False)


@pytest.mark.parametrize(
    ("mean", "low", "unsure"), [(1.029, 1.01, False), (1.032, 1.029, True), (1.07, 1.031, False)]
)
def test_a_missed_goal_is_unsure_where_the_interval_reaches_down_to_it(mean, low, unsure):
    (verdict,) = verdicts([row("elastane", 1.0, mean=mean, cpu_mean_low=low)])
    assert verdict.is_unsure == unsure


@pytest.mark.parametrize(
    ("params", "bound"),
    [(100_000, 1.05), (2_800_000, 1.02), (10_000_000, 1.03), (49_000_000, 1.02)],
)
def test_the_default_may_cost_more_where_a_step_is_short(params, bound):
    (verdict,) = verdicts([row("elastane", 1.0, params=params)])
    assert verdict.bound == bound


def test_the_larger_batch_is_a_form_of_its_own():
    forms = by_form([row("elastane", 1.0), row("elastane", 1.1, batch=128)])
    assert list(forms) == [(2, 1, False), (2, 1, True)]
    assert forms[2, 1, False]["mlp 10M"]["elastane"]["cpu_ratio"] == 1.0


def test_the_page_shows_the_rows_and_names_the_goals_that_are_missed(tmp_path):
    result = {"rows": ROWS, "missing": {"fairscale": "is not here"}}
    (tmp_path / "overhead.json").write_text(json.dumps(result))

    text = page(tmp_path)

    assert "| mlp 10M | 1.001 | 1.040 | 1.090 | 1.025 | 1.120* | 1.050 | 1.300 | 1.020 |" in text
    assert "3 of 5 hold; the others are these" in text
    assert "| every step | mlp 10M | 2 processes | 1.120 | 1.110 | 1.090 |" in text
    assert "Missing, fairscale: is not here." in text
    assert "Not measured yet: `python -m benchmarks.loader " in text


def test_the_page_shows_parts_loaders_and_starts(tmp_path):
    place = {"workers": 1, "micro_batches": 1}
    parts = [
        {"part": part, "loop": loop, "us_median": value, **place}
        for part, loop, value in [
            *(("step", "plain", 250.0), ("decision", "elastane", 30.0)),
            *(("step", "elastane", 450.0), ("loading", "elastane", 40.0)),
        ]
    ]
    loader = {"dataset": "rows", "num_workers": 0, "batch": 16, "loader": "elastane"}
    loader |= {"ratio": 1.2, "low": 1.1, "high": 1.3, "samples_per_s": 12345}
    dealt = {"epoch_samples": 10**9, "batch": 65_536, "workers": 8}
    dealt |= {"deal_ms": 1.0, "ns_per_sample": 90.0, "peak_bytes": 1000}
    start = {"what": "elastane run", "workers": 2, "ms_median": 9.0, "ms_q1": 8.0, "ms_q3": 10.0}
    results = {
        "fixed": {"rows": parts},
        "loader": {"goal": 1.0, "rows": [loader], "dealing": [dealt]},
        "startup": {"rows": [start]},
    }
    for name, result in results.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(result))

    lines = page(tmp_path).splitlines()

    assert lines.index("| loading | – | 40.0 | – |") + 1 == lines.index(
        "| decision | – | 30.0 | – |"
    )
    assert "| step | 250.0 | 450.0 | – |" in lines
    assert "| rows | 0 | 16 | elastane | 1.200 | 1.100–1.300 | 12,345 |" in lines
    assert "| 1,000,000,000 | 65,536 | 8 | 1.00 | 90 | 1,000 |" in lines
    assert "| elastane run | 2 | 9.0 | 8.0–10.0 |" in lines


def test_the_picture_is_drawn(tmp_path):
    draw_overhead(ROWS, titles=FORMS, path=tmp_path / "speed.png")
    assert (tmp_path / "speed.png").stat().st_size > 5_000
