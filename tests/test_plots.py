"""Pictures of runs, drawn from events that an imagined AdaScale run wrote."""

import base64
import math
import random
import re
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from elastane.errors import ArgumentError, StateError, UsageError
from elastane.plots import plot_runs
from elastane.plots.figure import draw
from elastane.plots.flags import change_text, flags
from elastane.plots.panels import Curve, Panel, panels, sharers, smoothed, without_spikes
from elastane.plots.runs import (
    Change,
    Series,
    read_runs,
    run_folders,
    run_from_events,
    short_names,
)
from elastane.plots.table import change_rows, run_rows
from elastane.telemetry import JsonlSink, Telemetry

BASE_BATCH, LOCAL_BATCH = 64, 64
CHANGES = {300: (4, "join", 0.031), 900: (2, "killed", 0.112)}


def start_fields(*, rule="AdaScale", num_steps=2000):
    return {
        "elastane_version": "0.1.0",
        "torch_version": "2.13.0",
        "rule": rule,
        "policy": f"LocalBatch({LOCAL_BATCH})",
        "base_batch_size": BASE_BATCH,
        "num_steps": num_steps,
        "num_samples": 60_000,
        "world_size": 1,
        "generation": 0,
        "seed": 0,
        "parameters": 44_426,
    }


def step_fields(step, *, progress, loss, lr, gain, world_size, noise_scale, batch, **others):
    fields = {
        "step": step,
        "progress": progress,
        "epoch": 0,
        "position": step * batch,
        "loss": loss,
        "lr": lr,
        "factor": gain,
        "gain": gain,
        "scale": batch / BASE_BATCH,
        "batch_samples": batch,
        "num_gradients": world_size,
        "world_size": world_size,
        "generation": 0,
        "grad_norm": 1.0,
        "variance": noise_scale,
        "sqr_norm": 1.0,
        "noise_scale": noise_scale,
        "seconds": 0.02,
        "skipped": False,
    }
    return fields | others


def write_run(run_dir, *, num_steps=2000, changes=CHANGES, seed=0, with_loss=True):
    """Write the events of a run whose workers come and go and whose gain follows the theory."""
    rng = random.Random(seed)
    with Telemetry([JsonlSink(run_dir)]) as telemetry:
        telemetry.emit("start", **start_fields(num_steps=num_steps))
        world_size, progress, step, seen = 1, 0.0, 0, 0
        while progress < num_steps:
            if step in changes:
                world_size, cause, pause_s = changes[step]
                telemetry.emit(
                    "membership",
                    generation=1,
                    world_size=world_size,
                    cause=cause,
                    pause_s=pause_s,
                    progress=progress,
                    step=step,
                )
            batch = min(world_size * LOCAL_BATCH, 30_000 - seen)
            seen = (seen + batch) % 30_000
            part = progress / num_steps
            noise = 20 * math.exp(3.5 * part) * rng.uniform(0.95, 1.05)
            gain = (noise / BASE_BATCH + 1) / (noise / batch + 1)
            step += 1
            progress += gain
            loss = (
                2.3 * math.exp(-4 * part)
                + 0.12
                + rng.gauss(0, 0.25 / math.sqrt(world_size)) * (0.3 + math.exp(-4 * part))
            )
            telemetry.emit(
                "step",
                **step_fields(
                    step,
                    progress=progress,
                    loss=abs(loss) if with_loss else None,
                    lr=0.05 * gain * 0.5 * (1 + math.cos(math.pi * min(part, 1))),
                    gain=gain,
                    world_size=world_size,
                    noise_scale=noise if step > 1 else None,
                    batch=batch,
                ),
            )
            if step % 150 == 0 and with_loss:
                telemetry.emit(
                    "evaluation",
                    step=step,
                    progress=progress,
                    num_samples=10_000,
                    seconds=0.4,
                    metric_accuracy=0.99 - 0.5 * math.exp(-5 * part),
                )
        telemetry.emit("end", step=step, progress=progress, seconds=30.0, cause="done")
    return run_dir


def write_events(run_dir, *events):
    with Telemetry([JsonlSink(run_dir)], clock=lambda: 0.0) as telemetry:
        for kind, fields in events:
            telemetry.emit(kind, **fields)
    return run_dir


def few_steps(count, **others):
    return [
        (
            "step",
            step_fields(
                step,
                progress=1.5 * step,
                loss=2.0 / step,
                lr=0.05,
                gain=1.5,
                world_size=2,
                noise_scale=100.0,
                batch=128,
            )
            | others,
        )
        for step in range(1, count + 1)
    ]


def labels(run_dirs):
    return [panel.label.split("\n")[0] for panel in panels(read_runs(run_dirs))]


def change(step, *, cause="join", pause_s=0.031, world_size=4):
    return Change(step=step, progress=step, world_size=world_size, cause=cause, pause_s=pause_s)


def constant(value, *, count=20):
    index = np.arange(1.0, count + 1)
    return Series(steps=index, progress=index, values=np.full(count, value))


def axes_labelled(figure, label):
    """Return the left of the two axes of a panel."""
    return next(axes for axes in figure.axes if axes.get_ylabel().startswith(label))


def write_values(run_dir, **series):
    """Write a run of which only these fields differ from step to step."""
    count = len(next(iter(series.values())))
    steps = few_steps(count)
    for index, (_, fields) in enumerate(steps):
        fields.update({name: values[index] for name, values in series.items()})
    return write_events(run_dir, *steps)


@pytest.fixture(scope="module")
def elastic_run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "elastic")


def test_a_picture_opens_and_is_not_blank(elastic_run, tmp_path):
    png, html = plot_runs(elastic_run, output=tmp_path / "new" / "page.png", title="a run")
    assert (png, html) == (tmp_path / "new" / "page.png", tmp_path / "new" / "page.html")
    picture = matplotlib.image.imread(png)
    height, width, _ = picture.shape
    assert height > 1000
    assert width > 1000
    panels_with_ink = [band.std() > 0.05 for band in np.array_split(picture[:, :, :3], 7)]
    assert all(panels_with_ink)


def test_the_web_page_loads_nothing_from_outside(elastic_run, tmp_path):
    png, html = plot_runs(elastic_run, output=tmp_path / "page.html")
    text = html.read_text(encoding="utf-8")
    assert not re.search(r"https?:|//[a-z]|@import|url\(|<script|<link", text.split("base64,")[0])
    sources = re.findall(r'(?:src|href)="([^"]*)"', text)
    assert [source.split(",")[0] for source in sources] == ["data:image/png;base64"]
    assert base64.b64decode(sources[0].split(",")[1]) == png.read_bytes()
    assert b"http" not in png.read_bytes()[:1000]


def test_the_web_page_holds_the_numbers_of_each_run(elastic_run, tmp_path):
    _, html = plot_runs([elastic_run], output=tmp_path / "page.html")
    text = html.read_text(encoding="utf-8")
    for cell in ("elastic", "AdaScale", "LocalBatch(64)", "1 → 4 → 2", "killed", "112 ms"):
        assert f"<td>{cell}</td>" in text


def test_names_and_titles_are_escaped_in_the_web_page(tmp_path):
    run_dir = write_events(tmp_path / "a & b", ("start", start_fields(rule="<b>")), *few_steps(3))
    _, html = plot_runs(run_dir, output=tmp_path / "page", title='<i> "{0}"')
    text = html.read_text(encoding="utf-8")
    assert "<b>" not in text
    assert "<i>" not in text
    assert "<title>&lt;i&gt; &quot;{0}&quot;</title>" in text
    assert "a &amp; b" in text


def test_runs_of_different_length_are_drawn_over_one_another(elastic_run, tmp_path):
    short = write_run(tmp_path / "short", num_steps=100, changes={}, seed=1)
    png, html = plot_runs([elastic_run, short], output=tmp_path / "both.png")
    _, alone = plot_runs([elastic_run], output=tmp_path / "alone.png")
    assert png.read_bytes() != alone.with_suffix(".png").read_bytes()
    text = html.read_text(encoding="utf-8")
    assert "<td>elastic</td>" in text
    assert "<td>short</td>" in text
    loss, *_ = panels(read_runs([elastic_run, short]))
    lengths = [curve.line.values.size for curve in loss.curves]
    assert [curve.run_index for curve in loss.curves] == [0, 1]
    assert lengths[0] > 10 * lengths[1]


def test_a_run_without_loss_has_no_loss_panel(tmp_path):
    run_dir = write_run(tmp_path / "silent", num_steps=50, with_loss=False)
    assert labels([run_dir]) == ["learning rate", "gain", "batch size", "workers", "noise scale"]
    png, _ = plot_runs(run_dir, output=tmp_path / "silent.png")
    assert matplotlib.image.imread(png).std() > 0.05


def test_one_run_with_loss_brings_the_panel_for_all(elastic_run, tmp_path):
    silent = write_run(tmp_path / "silent", num_steps=50, with_loss=False)
    loss, accuracy, *_ = panels(read_runs([silent, elastic_run]))
    assert [curve.run_index for curve in loss.curves] == [1]
    assert [curve.run_index for curve in accuracy.curves] == [1]
    plot_runs([silent, elastic_run], output=tmp_path / "both.png")


def test_a_run_of_one_step_can_be_drawn(tmp_path):
    run_dir = write_events(tmp_path / "one", *few_steps(1))
    png, _ = plot_runs(run_dir, output=tmp_path / "one.png")
    assert png.exists()


def test_each_metric_has_a_panel_of_its_own(tmp_path):
    evaluation = {"step": 2, "progress": 3.0, "num_samples": 10, "seconds": 0.1}
    metrics = {"metric_top_1": 0.5, "metric_loss": 2.0, "metric_unknown": None}
    first = ("evaluation", evaluation | metrics | {"metric_once": 1.0})
    later = ("evaluation", evaluation | metrics | {"progress": 4.0})
    run_dir = write_events(tmp_path / "run", *few_steps(2), first, later)
    shown = [panel.label for panel in panels(read_runs([run_dir]))]
    assert shown[1:3] == ["evaluation:\ntop 1", "evaluation:\nloss"]
    assert not any("once" in label for label in shown), "a single value stands in the table alone"
    assert not any("unknown" in label for label in shown)


def test_a_noise_scale_that_is_never_above_zero_has_no_panel(tmp_path):
    run_dir = write_events(tmp_path / "run", *few_steps(3, noise_scale=-1.0))
    assert "noise scale" not in labels([run_dir])


def test_skipped_steps_are_counted_and_not_drawn(tmp_path):
    skipped = few_steps(3, skipped=True, loss=1e9, progress=0.0)[2]
    run_dir = write_events(tmp_path / "run", *few_steps(3), skipped, *few_steps(4)[3:])
    (run,) = read_runs([run_dir])
    assert run.num_skipped == 1
    assert run.series("loss").values.max() == 2.0
    assert run.series("loss").steps.tolist() == [1, 2, 3, 4]


def test_a_resumed_run_replaces_the_steps_that_were_lost():
    def step(number, *, loss):
        return {"event": "step", "step": number, "progress": 2.0 * number, "loss": loss}

    def other(kind, number, **fields):
        return {"event": kind, "step": number, "progress": 2.0 * number, **fields}

    start = {"event": "start", "world_size": 2, "rule": "AdaScale"}
    lost = [step(3, loss=9.0), other("evaluation", 3, metric_a=0.1), step(4, loss=9.0)]
    lost.append(other("membership", 4, cause="lost", world_size=1))
    events = [start, step(1, loss=1.0), step(2, loss=1.0), *lost, start]
    run = run_from_events([*events, step(3, loss=1.0), step(4, loss=1.0)], name="run")
    assert run.series("loss").steps.tolist() == [1, 2, 3, 4]
    assert set(run.series("loss").values) == {1.0}
    assert run.metrics == []
    assert [(change.cause, change.step) for change in run.changes] == [("resumed", 3)]


def test_a_change_just_before_a_step_that_is_done_again_stays():
    steps = [{"event": "step", "step": step, "progress": float(step)} for step in (1, 2)]
    membership = {"event": "membership", "step": 2, "progress": 2.0, "cause": "killed"}
    run = run_from_events([*steps, membership, steps[1]], name="run")
    assert [change.cause for change in run.changes] == ["killed"]
    assert len(run.steps) == 2


def test_a_smoothed_constant_stays_constant_up_to_its_ends():
    index = np.arange(1000.0)
    flat = Series(steps=index, progress=index, values=np.full(1000, 3.0))
    assert np.allclose(smoothed(flat).values, 3.0)


def test_smoothing_is_the_mean_over_a_centred_window():
    index = np.arange(1000.0)
    values = np.random.default_rng(0).normal(size=1000)
    result = smoothed(Series(steps=index, progress=index, values=values)).values
    slow = [values[max(0, i - 10) : i + 11].mean() for i in range(1000)]
    assert np.allclose(result, slow)


def test_a_short_last_batch_is_no_spike_but_a_change_stays():
    values = np.array([64.0] * 5 + [7.0] + [64.0] * 5 + [256.0] * 8)
    index = np.arange(values.size, dtype=float)
    result = without_spikes(Series(steps=index, progress=index, values=values)).values
    assert result.tolist() == [64.0] * 11 + [256.0] * 8


def test_a_short_last_batch_is_no_spike_at_the_runs_end_either():
    values = np.array([256.0] * 9 + [160.0])
    index = np.arange(values.size, dtype=float)
    result = without_spikes(Series(steps=index, progress=index, values=values)).values
    assert result.tolist() == [256.0] * 10


@pytest.mark.parametrize(
    ("loss", "lr", "scales"),
    [
        ([2.0, 0.5, 0.001], [0.1, 0.01, 1e-9], ["log", "log"]),
        ([2.0, 0.5, 0.03], [0.1, 0.05, 0.01], ["linear", "linear"]),
        ([2.0, 0.001, 0.0], [0.0, 0.1, 1e-4], ["linear", "log"]),
        ([2.0, 0.001, -1.0], [0.0, 0.0, 0.0], ["linear", "linear"]),
    ],
)
def test_loss_and_learning_rate_have_a_log_axis_where_they_reach_far(tmp_path, loss, lr, scales):
    run_dir = write_values(tmp_path / "run", loss=loss, lr=lr)
    runs = read_runs([run_dir])
    figure = draw(runs, panels(runs), title=None)
    both = [axes_labelled(figure, label) for label in ("training loss", "learning rate")]
    assert [axes.get_yscale() for axes in both] == scales
    plot_runs(run_dir, output=tmp_path / "page.png")


def test_a_rate_that_ends_near_zero_does_not_stretch_its_axis(tmp_path):
    run_dir = write_values(tmp_path / "run", loss=[1.0] * 3, lr=[0.1, 0.05, 1e-12])
    runs = read_runs([run_dir])
    low, high = axes_labelled(draw(runs, panels(runs), title=None), "learning rate").get_ylim()
    assert 0.1 < high < 1
    assert low > 1e-6


def test_curves_that_share_a_level_know_of_one_another():
    series = [constant(2.0), constant(1.0), constant(2.0), constant(2.0)]
    moving = Series(steps=series[0].steps, progress=series[0].steps, values=np.arange(20.0))
    curves = [Curve(run_index=i, line=line) for i, line in enumerate([*series, moving])]
    assert sharers(Panel(label="workers", curves=curves)) == [
        *([0, 2, 3], [1], [0, 2, 3], [0, 2, 3]),
        [4],
    ]


def test_of_lines_that_lie_on_one_another_all_can_be_seen(tmp_path):
    runs = [write_events(tmp_path / name, *few_steps(40)) for name in "abc"]
    png, _ = plot_runs(runs, output=tmp_path / "page.png")
    picture = matplotlib.image.imread(png)[:, :, :3]
    # The panels of batch and workers, without the legend above: exactly the same in all three runs.
    height = picture.shape[0]
    below = picture[height // 2 : height * 3 // 4].reshape(-1, 3)
    for color in ("#0072B2", "#D55E00", "#009E73"):
        wanted = np.array(matplotlib.colors.to_rgb(color))
        assert (np.abs(below - wanted).max(axis=1) < 0.15).sum() > 100, color


def test_a_stair_begins_where_the_first_step_did(tmp_path):
    runs = read_runs([write_values(tmp_path / "run", batch_samples=[64] * 3 + [256] * 9)])
    line = axes_labelled(draw(runs, panels(runs), title=None), "batch size").lines[0]
    assert line.get_xdata()[0] == 0
    assert line.get_drawstyle() == "steps-pre"


def test_the_caption_says_what_the_axis_and_faint_lines_are(elastic_run, tmp_path):
    def caption(run_dir):
        runs = read_runs([run_dir])
        return draw(runs, panels(runs), title=None).get_supxlabel()

    assert "τ" in caption(elastic_run)
    assert "Faint" in caption(elastic_run)
    few = write_events(tmp_path / "few", *few_steps(3))
    assert "τ" in caption(few)
    assert "Faint" not in caption(few), "too few steps to be smoothed"


@pytest.mark.parametrize("count", [1, 4, 5, 9])
def test_the_legend_stays_on_the_page_and_is_read_line_by_line(tmp_path, count):
    names = [f"linear-warmup-batch{number}" for number in range(1000, 1000 + count)]
    runs = read_runs([write_events(tmp_path / name, *few_steps(2)) for name in names])
    figure = draw(runs, panels(runs), title=None)
    figure.canvas.draw()
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.x1
    places = [(text.get_window_extent(), text.get_text()) for text in legend.get_texts()]
    read = sorted(places, key=lambda place: (-round(place[0].y0), place[0].x0))
    assert [text for _, text in read] == names


def test_a_run_may_be_named_by_its_file_and_twice(elastic_run, tmp_path):
    names = [elastic_run, elastic_run / "events.jsonl", f"{elastic_run}/", tmp_path / "other"]
    assert run_folders(names) == [elastic_run, tmp_path / "other"]
    assert [run.name for run in read_runs(names[:3])] == ["elastic"]


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["/runs/a", "/runs/b"], ["a", "b"]),
        (["/x/a/seed0", "/x/b/seed0"], ["a/seed0", "b/seed0"]),
        (["/runs/a", "/runs/a"], ["a", "a"]),
    ],
)
def test_runs_are_called_by_the_shortest_name_that_tells_them_apart(names, short):
    assert short_names([Path(name) for name in names]) == short


def test_a_run_is_named_by_its_folder_also_when_that_is_where_we_are(elastic_run, monkeypatch):
    monkeypatch.chdir(elastic_run)
    assert read_runs(["."])[0].name == "elastic"


def test_no_label_lies_on_another_or_on_a_pole():
    marks = [(0, position, change(10)) for position in (0.0, 0.1, 0.15, 0.5, 0.9, 0.97, 1.0)]
    placed = flags(marks, letter_width=0.015)
    assert {flag.text for flag in placed} >= {"join → 4, 31 ms"}
    for flag in placed:
        start, end = flag.span
        assert start >= 0
        assert end <= 1
        for other in placed:
            if other is not flag and other.row >= flag.row:
                assert not start <= other.position <= end
            if other is not flag and other.row == flag.row:
                assert end < other.span[0] or other.span[1] < start


def test_many_changes_share_labels():
    marks = [(0, index / 99, change(index, pause_s=index / 1000)) for index in range(100)]
    placed = flags(marks, letter_width=0.015)
    assert 2 <= len(placed) <= 6
    assert sum(int(flag.text.split()[0]) for flag in placed) == 100
    assert placed[-1].text.endswith("≤ 99 ms")


def test_labels_leave_out_what_is_not_known_and_shorten_long_causes():
    assert change_text(change(1, pause_s=None)) == "join → 4"
    assert change_text(change(1, pause_s=1.234, world_size=None)) == "join, 1.23 s"
    assert len(change_text(change(1, cause="worker 3 was killed by signal 9 on host a"))) < 40


def test_the_table_shows_the_end_of_each_run(elastic_run):
    head, (row,) = run_rows(read_runs([elastic_run]))
    cells = dict(zip(head, row, strict=True))
    assert cells["base batch"] == "64"
    assert cells["final batch"] == "128"
    assert cells["workers"] == "1 → 4 → 2"
    assert cells["progress"].endswith(" of 2,000")
    assert 0 < float(cells["final loss"]) < 0.3
    assert 0.9 < float(cells["final accuracy"]) < 1
    assert 1 < float(cells["mean gain"]) < 3


def test_a_run_with_nothing_known_still_has_a_row():
    _, (row,) = run_rows([run_from_events([], name="empty")])
    assert row[0] == "empty"
    assert change_rows([run_from_events([], name="empty")])[1] == []


def test_a_run_that_has_not_begun_can_not_be_drawn(tmp_path):
    run_dir = write_events(tmp_path / "new", ("start", start_fields()))
    with pytest.raises(StateError, match="new: no finished step"):
        plot_runs(run_dir, output=tmp_path / "page.png")
    assert not (tmp_path / "page.png").exists()


def test_a_run_that_has_not_begun_does_not_hinder_the_others(elastic_run, tmp_path):
    new = write_events(tmp_path / "new", ("start", start_fields()))
    _, html = plot_runs([new, elastic_run], output=tmp_path / "page.png")
    assert "<td>new</td>" in html.read_text(encoding="utf-8")


def test_no_runs_and_other_kinds_of_files_are_refused(elastic_run, tmp_path):
    with pytest.raises(ArgumentError, match="run_dirs"):
        plot_runs([], output=tmp_path / "page.png")
    with pytest.raises(ArgumentError, match=r"output=.*must end in \.png or \.html"):
        plot_runs(elastic_run, output=tmp_path / "page.pdf")


def test_in_a_folder_that_exists_the_picture_is_called_plot(tmp_path):
    run_dir = write_events(tmp_path / "one", *few_steps(2))
    assert plot_runs(run_dir, output=run_dir)[0] == run_dir / "plot.png"


def test_without_matplotlib_the_error_says_what_to_install(elastic_run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r"checkout.*pip install '\.\[plots\]'"):
        plot_runs(elastic_run, output=tmp_path / "page.png")


def test_drawing_leaves_matplotlib_as_it_was(elastic_run, tmp_path):
    before = dict(matplotlib.rcParams)
    plot_runs(elastic_run, output=tmp_path / "page.png")
    assert dict(matplotlib.rcParams) == before


def test_drawing_uses_no_pyplot_and_importing_no_matplotlib(elastic_run, tmp_path):
    script = (
        "import sys, elastane.plots\n"
        "assert 'matplotlib' not in sys.modules\n"
        f"elastane.plots.plot_runs({str(elastic_run)!r}, output={str(tmp_path / 'p.png')!r})\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
