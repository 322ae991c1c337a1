"""The blackout benchmark: what it checks is found where it is wrong, and a real job goes on."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.blackout.__main__ import keeps_promises, summary
from benchmarks.blackout.job import Job
from benchmarks.blackout.lineage import Lineage, Stand
from benchmarks.blackout.run import Round
from benchmarks.blackout.shelf import DAMAGES, damage, drafts, look
from benchmarks.chaos.audit import orphans
from benchmarks.launched import JobError
from elastane.elastic.checkpoint import CheckpointStore

ROOT = Path(__file__).parents[1]
LIMIT_S = 240.0
NUM_SAMPLES = 100

processes = pytest.mark.processes


def step(number, *, generation=1, worker=1, workers=1, **other):
    stand = Stand(
        kind="step",
        worker=worker,
        generation=generation,
        step=number,
        world_size=workers,
        position=16 * number,
        epoch=16 * number // NUM_SAMPLES,
        progress=float(number),
        lr=1 / (1 + number),
        state_hash=f"state {number}",
        applied_lr=2 / (1 + number),
    )
    return replace(stand, **other)


def enter(number, *, generation, **other):
    return step(number, generation=generation, kind="enter", applied_lr=None, **other)


def lineage_of_ten_steps():
    lineage = Lineage(NUM_SAMPLES)
    steps = [step(number) for number in range(1, 11)]
    assert lineage.extend([enter(0, generation=1), *steps]).steps_back == 0
    return lineage


def test_a_run_that_goes_on_from_an_earlier_step_is_followed():
    lineage = lineage_of_ten_steps()

    entries = [enter(8, generation=3, worker=worker) for worker in (4, 5)]
    resume = lineage.extend([*entries, *(step(n, generation=3) for n in (9, 10, 11))])

    assert (resume.step, resume.steps_back, resume.workers) == (8, 2, {4, 5})
    assert (lineage.reached, lineage.num_alike, lineage.problems) == (11, 2, [])


def test_a_round_in_which_nobody_trained_changes_nothing():
    lineage = lineage_of_ten_steps()

    assert lineage.extend([]) is None
    assert (lineage.reached, lineage.has(10), lineage.has(11)) == (10, True, False)


@pytest.mark.parametrize(
    "other",
    [{"position": 1}, {"epoch": 5}, {"progress": 8.5}, {"lr": 0.5}, {"state_hash": "other"}],
)
def test_a_resume_that_differs_from_the_step_it_names_is_found(other):
    lineage = lineage_of_ten_steps()

    lineage.extend([enter(8, generation=2), enter(8, generation=2, **other)])

    (problem,) = lineage.problems
    assert problem.startswith(f"step 8 was entered with {next(iter(other))}")


@pytest.mark.parametrize("other", [{"applied_lr": 0.5}, {"state_hash": "other"}])
def test_a_step_that_comes_out_otherwise_though_as_many_made_it_is_found(other):
    for workers, found in ((1, 1), (2, 0)):
        lineage = lineage_of_ten_steps()
        again = step(9, generation=2, workers=workers, **other)

        lineage.extend([enter(8, generation=2), again])

        assert len(lineage.problems) == found


@pytest.mark.parametrize(("progress", "found"), [(3.0 + 1e-9, 0), (3.1, 1)])
def test_several_workers_may_round_otherwise_when_they_make_a_step_again(progress, found):
    lineage = Lineage(NUM_SAMPLES)
    steps = [step(number, workers=2) for number in (1, 2, 3)]
    lineage.extend([enter(0, generation=1), *steps])

    again = step(3, generation=2, workers=2, progress=progress, state_hash="other")
    lineage.extend([enter(2, generation=2), again])

    assert len(lineage.problems) == found


def test_a_step_is_only_compared_with_one_that_was_made_from_the_same_state():
    lineage = lineage_of_ten_steps()

    lineage.extend([enter(7, generation=2), step(8, generation=2, workers=2, state_hash="other")])
    again = step(9, generation=3, state_hash="another")
    lineage.extend([enter(8, generation=3, state_hash="other"), again])

    assert lineage.problems == []


def test_gaps_and_resumes_from_the_future_are_found():
    gap, future = lineage_of_ten_steps(), lineage_of_ten_steps()

    gap.extend([enter(8, generation=2), step(10, generation=2)])
    future.extend([enter(12, generation=2)])

    assert gap.problems == ["step 10 does not follow step 8"]
    assert future.problems == ["step 12 was entered with nothing that is known of it"]


def shelf_with(folder, *steps):
    store = CheckpointStore(folder)
    for number in steps:
        store.save({"weights": torch.ones(5), "step": number}, step=number)
    return store


def test_the_shelf_tells_newest_torn_and_unfinished_checkpoints(tmp_path):
    store = shelf_with(tmp_path, 1, 2, 3)
    old = store.write({"weights": torch.ones(1)}, step=4)
    known = frozenset({old.path.name})
    CheckpointStore(tmp_path / "other").write({"weights": torch.ones(1)}, step=5).path.rename(
        tmp_path / ".step-000000005.new.part"
    )
    (tmp_path / "step-000000003" / "manifest.json").unlink()

    found = look(tmp_path, known_drafts=known)

    assert found.newest.manifest.step == 2
    assert found.before.manifest.step == 1
    assert found.draft_step == 5
    assert found.torn == {"step-000000003"}
    assert sorted(drafts(tmp_path).values()) == [4, 5]


def test_a_folder_without_checkpoints_can_be_looked_at(tmp_path):
    found = look(tmp_path / "none", known_drafts=frozenset())

    assert (found.newest, found.before, found.draft_step) == (None, None, None)


@pytest.mark.parametrize("kind", DAMAGES)
@pytest.mark.parametrize("seed", range(5))
def test_every_damage_is_seen_by_the_store(tmp_path, kind, seed):
    store = shelf_with(tmp_path, 1, 2)

    damage(store.newest(), kind, draw=random.Random(seed))

    with pytest.warns(RuntimeWarning, match="step-000000002 .*: the one before is used"):
        assert CheckpointStore(tmp_path).newest().manifest.step == 1


def round_of(number, **other):
    given = {"aim": "write", "workers": 1, "resumed_at": 10, "steps_back": 5, "steps_allowed": 10}
    return Round(number=number, **given | {"in_write": 2} | other)


def result_of(*rounds):
    fine = {"orphans": 0, "samples_lost": 0, "samples_repeated": 0, "problems": []}
    fine |= {"replicas_equal": True, "final_accuracy": 0.9}
    return fine | summary([*rounds, round_of(9, aim="end", in_write=None)], interval=10)


def test_a_run_as_promised_keeps_its_promises():
    damaged = round_of(2, damaged="a file", named=True, steps_back=19, steps_allowed=20)
    result = result_of(round_of(1), damaged)

    assert keeps_promises(result, kills=2)
    assert not keeps_promises(result, kills=3)
    assert (result["kills"], result["in_write"], result["resumes"]) == (2, 2, 2)
    assert (result["max_steps_back"], result["max_steps_back_damaged"]) == (5, 19)


@pytest.mark.parametrize(
    "other",
    [
        {"steps_back": 11},
        {"in_write": 10},
        {"in_write": None},
        {"damaged": "a file", "named": False},
    ],
)
def test_a_broken_promise_is_told(other):
    assert not keeps_promises(result_of(round_of(2, **other)), kills=1)


def start_blackout(tmp_path, *options):
    environment = {"OMP_NUM_THREADS": "1"} | os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)}
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "benchmarks.blackout", "--workers", "2"),
            *("--out", str(tmp_path / "o u t"), *options),
        ],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@processes
@pytest.mark.timeout(LIMIT_S + 30)
def test_a_job_goes_on_after_everybody_was_killed_twice(tmp_path):
    blackout = start_blackout(tmp_path, "--kills", "2", "--seed", "1", "--interval", "10")
    try:
        shown, told = blackout.communicate(timeout=LIMIT_S)
    finally:
        end(blackout)

    assert blackout.returncode == 0, f"{shown}\n{told}\n{launcher_log(tmp_path)}"
    result = json.loads(shown)
    assert (result["kills"], result["resumes"], result["damaged"], result["named"]) == (2, 2, 1, 1)


@processes
@pytest.mark.timeout(LIMIT_S)
def test_nothing_is_left_of_a_blackout_that_is_interrupted(tmp_path):
    blackout = start_blackout(tmp_path, "--kills", "100")
    job = f"blackout-{blackout.pid}-0"
    deadline = time.monotonic() + LIMIT_S / 2
    try:
        while not list((tmp_path / "o u t").glob("stands/worker-*.jsonl")):
            assert time.monotonic() < deadline, launcher_log(tmp_path)
            time.sleep(0.05)
        running = orphans(job, patience_s=0.0)
        blackout.send_signal(signal.SIGTERM)
        blackout.communicate(timeout=LIMIT_S / 4)
    finally:
        end(blackout)

    assert running
    assert blackout.returncode != 0
    assert orphans(job) == []


@processes
def test_a_job_that_does_not_start_is_told(tmp_path):
    job = Job(folder=tmp_path, name=f"blackout-{os.getpid()}-none", max_workers=1)
    (tmp_path / "run").write_text("no folder")

    with pytest.raises(JobError, match="the launcher ended with exit code"), job.ended():
        job.start(1)
        job.ask("status")


def end(blackout):
    """End the benchmark as one would by hand: it ends its job itself."""
    if blackout.poll() is None:
        blackout.send_signal(signal.SIGINT)
        blackout.communicate(timeout=30)


def launcher_log(tmp_path):
    log = tmp_path / "o u t" / "launcher.log"
    return log.read_text()[-5000:] if log.exists() else "no launcher yet"
