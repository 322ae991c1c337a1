"""The demo's own training script, on little data and with a run that diverges."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from elastane.telemetry import read_events

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[1]


def test_the_digits_train_at_several_scales_and_a_diverged_run_is_a_row_of_its_own(
    tmp_path: Path,
) -> None:
    rows = []
    for run, num_steps, lr in (("adascale:16", "64", "0.01"), ("linear:64", "640", "1e18")):
        arguments = [run, "--out", str(tmp_path), "--num-steps", num_steps, "--lr", lr]
        output = subprocess.run(
            [sys.executable, "-m", "examples.digits.train", *arguments],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
        )
        rows += [json.loads(line) for line in output.stdout.splitlines()]
    good, bad = rows
    assert (good["scale"], good["batch"], good["rule"], good["diverged"]) == (
        16,
        256,
        "adascale",
        False,
    )
    assert good["accuracy"] > 0.2
    assert bad["diverged"]
    assert bad["steps"] < 5
    events = read_events(tmp_path / "linear-warmup-batch1024")
    assert any(event.get("skipped") for event in events)
