"""The benchmarks of loader, fixed cost and start-up: their arithmetic, and each in small."""

from __future__ import annotations

import json
import threading
from contextlib import ExitStack
from itertools import islice

import click
import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks.fixed import __main__ as fixed
from benchmarks.fixed.recorder import BESIDE, Recorder
from benchmarks.fixed.rounds import LOOPS, TIMED, measure
from benchmarks.loader import __main__ as loader
from benchmarks.loader.datasets import KINDS, NUM_SAMPLES, Pictures
from benchmarks.loader.dealing import dealing_row
from benchmarks.loader.rounds import AGAIN, OURS, PLAIN, READERS, Reading, seconds_of_blocks
from benchmarks.startup import __main__ as startup

# Loader


@pytest.mark.parametrize("kind", ["tensors", "tensors, own collate", "rows"])
def test_both_loaders_give_whole_batches_of_the_same_kind_over_epochs(kind):
    reading = Reading(kind=kind, num_workers=0, batch=1_024, rounds=1, block_s=0.0)
    dataset = KINDS[kind].build()
    with ExitStack() as stack:
        batches = {
            name: list(islice(build(reading, dataset, KINDS[kind], stack), 9))
            for name, build in READERS.items()
        }
    for name in READERS:
        shapes = [(samples.shape, labels.shape) for samples, labels in batches[name]]
        assert set(shapes) == {((1_024, 49), (1_024,))}
    first_epoch = [sum(float(x.sum()) for x, _ in batches[name][:4]) for name in READERS]
    assert first_epoch[0] == pytest.approx(first_epoch[1])
    assert NUM_SAMPLES == 2 * 4 * 1_024


def test_a_block_takes_as_long_as_asked_and_each_round_times_every_loader():
    reading = Reading(kind="tensors", num_workers=0, batch=16, rounds=3, block_s=0.002)
    count, seconds = seconds_of_blocks(reading)
    assert count >= 16
    assert {name: len(values) for name, values in seconds.items()} == dict.fromkeys(READERS, 3)


def test_a_loader_that_takes_half_the_time_is_twice_as_fast():
    row = loader.ratios_of([1.0, 2.0, 1.0], plain=[2.0, 2.0, 4.0])
    assert (row["ratio"], row["low"], row["high"], row["rounds"]) == (2.0, 1.0, 4.0, 3)


def test_pictures_are_unpacked_normalised_and_only_shifted():
    pixels = np.arange(2 * 28 * 28, dtype=np.uint8).reshape(2, 28, 28)
    picture, label = Pictures(pixels, [3, 5])[1]
    assert label == 5
    assert picture.shape == (1, 28, 28)
    wanted = np.sort(pixels[1].ravel().astype(np.float32) / 255 * 2 - 1)
    assert np.allclose(np.sort(picture.numpy().ravel()), wanted, atol=1e-6)


def test_the_memory_of_dealing_does_not_grow_with_the_epoch():
    rows = [
        dealing_row(epoch, batch=65_536, workers=workers, rounds=2)
        for epoch in (10**5, 10**9)
        for workers in (1, 8)
    ]
    whole, part, whole_of_many, part_of_many = (row["peak_bytes"] for row in rows)
    assert whole_of_many == pytest.approx(whole, rel=0.02)
    assert part_of_many == pytest.approx(part, rel=0.05)
    assert part < whole / 2  # blocks of 16,384 need as much for a few samples
    for row in rows:
        assert row["ns_per_sample"] == pytest.approx(
            1e6 * row["deal_ms"] / (65_536 // row["workers"]), rel=0.01
        )


def test_the_loaders_command_writes_rows(monkeypatch):
    monkeypatch.setattr(
        loader,
        "seconds_of_blocks",
        lambda _: (10, {PLAIN: [2.0, 2.0], AGAIN: [2.0, 2.0], OURS: [1.0, 1.0]}),
    )
    monkeypatch.setattr(loader, "EPOCHS", (10**5,))
    options = ["--quick", "--json", "-", "--dataset", "rows"]
    written = CliRunner().invoke(loader.main, options, catch_exceptions=False)
    result = json.loads(written.stdout)
    ours = [row for row in result["rows"] if row["loader"] == OURS]
    assert [(row["num_workers"], row["batch"]) for row in ours] == [
        (0, 16),
        (0, 64),
        (2, 16),
        (2, 64),
    ]
    assert all(row["ratio"] == 2.0 for row in ours)
    assert ours[0]["samples_per_s"] == 160
    assert {row["workers"] for row in result["dealing"]} == {1, 8}


# Fixed cost


class Clock:
    """Nanoseconds that pass only where somebody works."""

    now = 0

    def __call__(self):
        return self.now

    def work(self, ns, then=lambda: None):
        def function():
            self.now += ns
            return then()

        return function


def test_a_part_is_not_charged_with_the_parts_that_it_calls():
    clock = Clock()
    recorder = Recorder(clock)
    inner = recorder.timed("inner", clock.work(3_000))
    outer = recorder.timed("outer", clock.work(5_000, then=lambda: (inner(), inner())))
    outer()
    clock.now += 7_000
    assert recorder.step(clock.now) == {"inner": 6.0, "outer": 5.0, "rest": 7.0, "step": 18.0}
    inner()
    assert recorder.step(3_000) == {"inner": 3.0, "rest": 0.0, "step": 3.0}


def test_a_whole_part_keeps_what_it_calls_and_so_does_one_that_fails():
    clock = Clock()
    recorder = Recorder(clock)
    inner = recorder.timed("inner", clock.work(3_000))

    def fail():
        inner()
        raise ValueError("on purpose")

    whole = recorder.timed("whole", clock.work(5_000, then=fail), whole=True)
    with pytest.raises(ValueError, match="on purpose"):
        whole()
    assert recorder.step(clock.now) == {"whole": 8.0, "rest": 0.0, "step": 8.0}


def test_another_threads_work_is_no_part_of_the_step():
    clock = Clock()
    recorder = Recorder(clock)
    thread = threading.Thread(target=recorder.timed("part", clock.work(4_000)))
    thread.start()
    thread.join()
    assert recorder.step(1_000) == {"part" + BESIDE: 4.0, "rest": 1.0, "step": 1.0}


def test_the_price_of_timing_is_taken_off():
    recorder = Recorder()
    assert 0 < recorder.call_ns < 1e6
    call = recorder.timed("part", lambda: None)
    for _ in range(100):
        call()
    spent_ns = 100 * recorder.call_ns
    found = recorder.step(round(spent_ns))
    assert found["step"] == pytest.approx(0.0, abs=0.1)


def test_an_iterators_turns_are_a_part():
    clock = Clock()
    recorder = Recorder(clock)
    source = iter([clock.work(1_000), clock.work(2_000)])
    turns = recorder.timed_iterator("turns", (action() for action in source))
    assert list(turns) == [None, None]
    assert recorder.step(clock.now)["turns"] == 3.0


@pytest.mark.processes
@pytest.mark.parametrize(("workers", "micro_batches"), [(1, 2), (2, 1)])
def test_the_parts_of_a_live_session_add_up_to_its_step(workers, micro_batches):
    found = measure(workers, micro_batches, rounds=1, clock="wall")
    rows = fixed.rows_of(found, workers=workers, micro_batches=micro_batches)
    means = {(row["loop"], row["part"]): row["us_mean"] for row in rows}
    assert {loop for loop, part in means if part == "step"} == set(LOOPS)
    for name in TIMED:
        own = {part: mean for (loop, part), mean in means.items() if loop == name}
        step = own.pop("step, by part")
        own.pop("step")
        inside = sum(mean for part, mean in own.items() if not part.endswith(BESIDE))
        assert inside == pytest.approx(step, rel=0.01)
    ours = {part for loop, part in means if loop == "elastane"}
    assert ours >= {"planning", "loading", "forward", "autograd", "norms of gradients"}
    assert ours >= {"decision", "optimizer", "schedule", "commit", "result", "telling events"}
    if workers > 1:
        assert ours >= {"reduction of gradients: launch", "norms of gradients"}


# Start-up


def test_a_command_that_fails_is_shown_with_what_it_said():
    assert startup.seconds_of(("-c", "pass")) > 0
    with pytest.raises(click.ClickException, match="no such luck"):
        startup.seconds_of(("-c", "raise SystemExit('no such luck')"))


def test_a_job_starts_when_its_last_worker_has_made_a_step():
    script = (
        "import pathlib, sys, time\n"
        "for name, later in (('a', 1), ('b', 100)):\n"
        "    path = pathlib.Path(sys.argv[1], name + '.done')\n"
        "    path.write_text(str(time.monotonic() + later))\n"
    )
    job = ("-c", script, "{folder}")
    assert 100 < startup.seconds_to_first_step(job, workers=2) < 130
    with pytest.raises(click.ClickException, match="2 of 3 workers"):
        startup.seconds_to_first_step(job, workers=3)


@pytest.mark.processes
@pytest.mark.parametrize("launcher", ["elastane run", "torchrun"])
def test_a_worker_tells_of_its_first_step(launcher):
    assert 0 < startup.seconds_to_first_step(startup.first_steps(1)[launcher], workers=1) < 120


def test_the_start_ups_command_writes_rows(monkeypatch):
    monkeypatch.setattr(startup, "seconds_of", lambda _: 0.25)
    monkeypatch.setattr(startup, "seconds_to_first_step", lambda _, workers: float(workers))
    written = CliRunner().invoke(startup.main, ["--quick", "--json", "-"], catch_exceptions=False)
    rows = json.loads(written.stdout)["rows"]
    found = {(row["what"], row["workers"]): row["ms_median"] for row in rows}
    assert found["import elastane", None] == 250.0
    assert found["elastane run", 2] == 2_000.0
    assert len(found) == len(startup.commands()) + 2 * len(startup.first_steps(1))
