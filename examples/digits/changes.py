"""What the demo does to its elastic run: 1 worker, then 4, one of them killed, then 2.

Uses the commands that a user would use.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ELASTANE = [sys.executable, "-m", "elastane"]
TIME_LIMIT_S = 200
POLL_S = 0.4  # each look starts a process, beside workers that want the processors


def run_with_changes(folder: Path, *, num_steps: int, seed: int) -> dict[str, Any]:
    """Train once under `elastane run`, with the changes on the way; return what came of it."""
    job, result = f"digits-{os.getpid()}", folder / "result.json"
    script = ["-m", "examples.digits.elastic", "--result", str(result)]
    script += ["--num-steps", str(num_steps), "--seed", str(seed)]
    options = ["--workers", "1:4", "--initial", "1", "--standby", "3"]
    command = [*ELASTANE, "run", *options, "--run-dir", str(folder), "--job", job, *script]
    launcher = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        for share, change in ((0.2, _grow), (0.45, _kill_one), (0.7, _shrink)):
            _wait_for_progress(job, share * num_steps, launcher=launcher)
            change(job)
        if launcher.wait(TIME_LIMIT_S) != 0:
            raise SystemExit(f"the elastic run failed, its logs are in {folder / 'logs'}")
    finally:
        if launcher.poll() is None:
            launcher.terminate()
            launcher.wait()
    return json.loads(result.read_text())


def _grow(job: str) -> None:
    subprocess.run([*ELASTANE, "scale", job, "4"], check=True, stdout=subprocess.DEVNULL)


def _shrink(job: str) -> None:
    subprocess.run([*ELASTANE, "scale", job, "2"], check=True, stdout=subprocess.DEVNULL)


def _kill_one(job: str) -> None:
    members = [one for one in _status(job)["workers"] if one["rank"] is not None]
    os.kill(max(members, key=lambda one: one["rank"])["pid"], signal.SIGKILL)


def _status(job: str) -> dict[str, Any]:
    command = [*ELASTANE, "status", job, "--json"]
    output = subprocess.run(command, capture_output=True, text=True, check=False)
    return json.loads(output.stdout) if output.returncode == 0 else {"progress": None}


def _wait_for_progress(job: str, progress: float, *, launcher: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + TIME_LIMIT_S
    while (_status(job)["progress"] or 0.0) < progress:
        if launcher.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the elastic run stopped before base step {progress:g}")
        time.sleep(POLL_S)
