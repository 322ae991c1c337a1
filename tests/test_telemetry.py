"""Events, the sinks that take them and the reader."""

import io
import json
import math
import re
import subprocess
import sys

import pytest
from rich.console import Console

import elastane.telemetry
from elastane.errors import ArgumentError, StateError, UnsupportedError, UsageError
from elastane.telemetry import (
    EVENT_FIELDS,
    EVENTS_NAME,
    JsonlSink,
    ProgressBar,
    Telemetry,
    TensorBoardSink,
    read_events,
)

STEP = {
    "event": "step",
    "time": 5.0,
    "step": 3,
    "progress": 40.0,
    "loss": 0.25,
    "lr": 0.05,
    "gain": 1.5,
    "world_size": 4,
    "noise_scale": None,
    "grad_norm": math.inf,
    "skipped": False,
}


class ListSink:
    def __init__(self, *, fails=False):
        self.events = []
        self.closed = False
        self.fails = fails

    def write(self, event):
        self.events.append(dict(event))

    def close(self):
        self.closed = True
        if self.fails:
            raise OSError("disk full")


def terminal(**options):
    return Console(file=io.StringIO(), force_terminal=True, width=80, **options)


def write_lines(run_dir, text):
    run_dir.mkdir(exist_ok=True)
    (run_dir / EVENTS_NAME).write_text(text)
    return run_dir


def make_sink(kind, folder):
    if kind == "jsonl":
        return JsonlSink(folder)
    if kind == "tensorboard":
        return TensorBoardSink(folder)
    return ProgressBar(num_steps=100, console=terminal() if kind == "bar" else None)


SINKS = pytest.mark.parametrize("kind", ["jsonl", "tensorboard", "bar", "silent bar"])


@SINKS
def test_a_sink_takes_every_kind_of_event_and_leaves_it_unchanged(kind, tmp_path):
    sink = make_sink(kind, tmp_path)
    for event_kind, names in EVENT_FIELDS.items():
        event = {"event": event_kind, "time": 1.0, **dict.fromkeys(names)}
        before = dict(event)
        sink.write(event)
        assert event == before
    sink.write({"event": "something new", "time": 1.0, "number": 7})
    sink.close()


@SINKS
def test_a_sink_can_be_closed_twice_and_without_an_event(kind, tmp_path):
    sink = make_sink(kind, tmp_path)
    sink.close()
    sink.close()


def test_the_documented_fields_are_those_of_the_contract():
    table = re.split(r"^=+  =+\n", elastane.telemetry.__doc__, flags=re.MULTILINE)[2]
    without_notes = re.sub(r"\[[^]]*\]|\([^)]*\)", "", table)
    documented = {}
    for row in re.split(r"\n(?=\w)", without_notes):
        kind, *names = re.findall(r"\w+", row)
        documented[kind] = set(names) - {"metric_NAME"}
    assert documented == EVENT_FIELDS


def test_an_event_is_flat_and_goes_to_every_sink():
    first, second = ListSink(), ListSink()
    with Telemetry([first, second], clock=lambda: 12.5) as telemetry:
        telemetry.emit("pause", reason="evaluation", seconds=3.0, step=100)
    expected = {"event": "pause", "time": 12.5, "reason": "evaluation", "seconds": 3.0, "step": 100}
    assert first.events == second.events == [expected]
    assert first.closed
    assert second.closed


def test_a_sink_that_fails_to_close_does_not_keep_the_others_open():
    sinks = [ListSink(), ListSink(fails=True), ListSink()]
    with pytest.raises(OSError, match="disk full"):
        Telemetry(sinks).close()
    assert all(sink.closed for sink in sinks)


def test_sinks_are_closed_when_training_fails():
    sink = ListSink()
    with pytest.raises(ZeroDivisionError), Telemetry([sink]):
        _ = 1 / 0
    assert sink.closed


def test_without_sinks_not_even_the_clock_is_read():
    def no_clock():
        raise AssertionError("the clock was read")

    with Telemetry([], clock=no_clock) as telemetry:
        telemetry.emit("step", step=1)
        assert not telemetry.enabled
    assert Telemetry([ListSink()]).enabled


@pytest.mark.parametrize("name", ["event", "time"])
def test_a_field_can_not_take_the_place_of_kind_or_time(name):
    with pytest.raises(ArgumentError, match=f"{name}=3"):
        Telemetry([ListSink()]).emit("policy", **{name: 3})


def test_a_field_may_be_called_kind():
    sink = ListSink()
    Telemetry([sink]).emit("policy", kind="local")
    assert sink.events[0]["kind"] == "local"


def test_events_come_back_as_they_were_written(tmp_path):
    run_dir = tmp_path / "runs" / "first"
    values = {
        "none": None,
        "yes": True,
        "whole": 3,
        "real": 0.1,
        "text": "ä\u2028\n",
        "s": "\udc80",
    }
    with Telemetry([JsonlSink(run_dir)], clock=lambda: 1.0) as telemetry:
        telemetry.emit("policy", **values, nested={"list": [1, (2.0, "x")]})
    (event,) = read_events(run_dir)
    nested = {"list": [1, [2.0, "x"]]}
    assert event == {"event": "policy", "time": 1.0, **values, "nested": nested}


def test_numbers_that_are_not_finite_become_null(tmp_path):
    with Telemetry([JsonlSink(tmp_path)]) as telemetry:
        telemetry.emit("step", loss=math.nan, parts=[math.inf, 1.0], more={"x": -math.inf})
    text = (tmp_path / EVENTS_NAME).read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    (event,) = read_events(tmp_path)
    assert event["loss"] is None
    assert event["parts"] == [None, 1.0]
    assert event["more"] == {"x": None}


@pytest.mark.parametrize("kind", ["jsonl", "tensorboard"])
def test_a_sink_that_is_only_kept_ready_touches_no_file(kind, tmp_path):
    sink = make_sink(kind, tmp_path / "run")
    sink.close()
    assert not (tmp_path / "run").exists()


def test_a_reader_sees_each_event_as_soon_as_it_is_written(tmp_path):
    with Telemetry([JsonlSink(tmp_path)]) as telemetry:
        for step in range(3):
            telemetry.emit("step", step=step)
            assert [event["step"] for event in read_events(tmp_path)] == list(range(step + 1))


@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes", 1j])
def test_an_unknown_type_of_value_is_refused_by_name(tmp_path, value):
    with Telemetry([JsonlSink(tmp_path)]) as telemetry:
        with pytest.raises(UnsupportedError, match=rf"step\.loss\[0\]=.*{type(value).__name__}"):
            telemetry.emit("step", loss=[value])
        with pytest.raises(UnsupportedError, match="key"):
            telemetry.emit("step", loss={3: 1})
        telemetry.emit("step", loss=1.0)
    assert len(read_events(tmp_path)) == 1


def test_writing_after_close_is_refused(tmp_path):
    for sink in (JsonlSink(tmp_path), TensorBoardSink(tmp_path)):
        sink.close()
        with pytest.raises(UsageError, match="after close"):
            sink.write(STEP)


def test_a_torn_last_line_is_left_out(tmp_path):
    run_dir = write_lines(tmp_path, '{"event": "step", "step": 1}\n{"event": "step", "st')
    assert read_events(run_dir) == [{"event": "step", "step": 1}]


def test_a_torn_line_elsewhere_names_file_and_line(tmp_path):
    lines = '{"event": "step", "step": 1}\n{"event": "st\n{"event": "step", "step": 3}\n'
    with pytest.raises(StateError, match=rf"{EVENTS_NAME}, line 2: not a whole event"):
        read_events(write_lines(tmp_path, lines))


@pytest.mark.parametrize("line", ["[1]", "3", "{}", '{"event": 3}', "\x00\x00", "{\udcff}"])
def test_what_is_json_but_no_event_counts_as_torn(tmp_path, line):
    tmp_path.joinpath(EVENTS_NAME).write_bytes(
        line.encode(errors="surrogateescape") + b'\n{"event": "end"}\n'
    )
    with pytest.raises(StateError, match="line 1"):
        read_events(tmp_path)


@pytest.mark.parametrize("end", ["", "\n"])
def test_a_last_line_that_never_was_an_event_is_named(tmp_path, end):
    write_lines(tmp_path, '{"event": "step"}\nhello, this is no event but a long line' + end)
    with pytest.raises(StateError, match=r"line 2: .*'hello, this is no event but a \.\.\.'"):
        read_events(tmp_path)


def test_a_file_of_bytes_is_refused_in_one_printable_line(tmp_path):
    (tmp_path / EVENTS_NAME).write_bytes(bytes(range(256)) * 4)
    with pytest.raises(StateError, match="line 1: not a whole event") as caught:
        read_events(tmp_path)
    assert str(caught.value).isprintable()


def test_a_run_may_be_named_by_its_file_of_events(tmp_path):
    run_dir = write_lines(tmp_path, '{"event": "end"}\n')
    assert read_events(run_dir / EVENTS_NAME) == read_events(run_dir) == [{"event": "end"}]


def test_a_folder_without_events_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match=r"run_dir=.*holds no events\.jsonl"):
        read_events(tmp_path / "nothing")


def test_a_resumed_run_goes_on_in_the_same_file(tmp_path):
    for step in (1, 2):
        with Telemetry([JsonlSink(tmp_path)]) as telemetry:
            telemetry.emit("step", step=step)
    assert [event["step"] for event in read_events(tmp_path)] == [1, 2]


@pytest.mark.parametrize("block", ["", "x" * 70_000, "x" * 65_500])
@pytest.mark.parametrize(
    ("tail", "kept"),
    [
        ('{"event": "step", "text": "', [1]),
        ('{"event": "st\n', [1]),
        ('{"event": "step", "step": 2}', [1, 2]),
        ("\n", [1]),
        ("", [1]),
    ],
)
def test_a_resumed_run_mends_the_line_that_its_end_tore(tmp_path, tail, kept, block):
    torn = tail + block if tail.endswith('"') else tail
    whole = json.dumps({"event": "step", "step": 1, "text": block})
    run_dir = write_lines(tmp_path, whole + "\n" + torn)
    with Telemetry([JsonlSink(run_dir)]) as telemetry:
        telemetry.emit("step", step=9)
    assert [event["step"] for event in read_events(run_dir)] == [*kept, 9]


def test_a_file_that_holds_only_a_torn_line_starts_anew(tmp_path):
    run_dir = write_lines(tmp_path, '{"event": "sta')
    with Telemetry([JsonlSink(run_dir)], clock=lambda: 0.0) as telemetry:
        telemetry.emit("start")
    assert read_events(run_dir) == [{"event": "start", "time": 0.0}]


def test_the_bar_is_silent_where_there_is_no_terminal():
    console = Console(file=io.StringIO(), force_terminal=False)
    with Telemetry([ProgressBar(num_steps=100, console=console)]) as telemetry:
        telemetry.emit("start", world_size=4)
        telemetry.emit("step", **{k: v for k, v in STEP.items() if k not in ("event", "time")})
    assert console.file.getvalue() == ""


def test_the_bar_draws_on_a_terminal():
    console = terminal()
    bar = ProgressBar(num_steps=100, console=console)
    bar.write({"event": "start", "time": 0.0})
    assert console.file.getvalue() == ""
    bar.write(STEP)
    shown = console.file.getvalue()
    for part in ("40/100", "40%", "loss 0.2500", "lr 0.05", "gain 1.50", "workers 4", "left"):
        assert part in shown
    bar.close()


def test_the_bar_shows_the_last_step_when_it_is_closed():
    console = terminal()
    bar = ProgressBar(num_steps=100, console=console)
    for progress in range(1, 100):
        bar.write(STEP | {"progress": float(progress), "loss": None, "gain": math.nan})
    bar.close()
    last = console.file.getvalue().rpartition("99/100")[2]
    assert "/100" not in last
    assert "loss –" in last
    assert console.file.getvalue().count("/100") < 20


def test_the_bar_leaves_standard_output_as_it_was():
    before = sys.stdout, sys.stderr
    bar = ProgressBar(num_steps=100, console=terminal())
    bar.write(STEP)
    bar.close()
    assert (sys.stdout, sys.stderr) == before
    bar.write(STEP)


def test_the_bar_never_shows_more_than_the_whole():
    for progress in (90.0, 130.0):  # a first step beyond the end, and a later one
        console = terminal()
        bar = ProgressBar(num_steps=100, console=console)
        bar.write(STEP | {"progress": progress})
        bar.write(STEP | {"progress": 107.0})
        bar.close()
        shown = console.file.getvalue()
        assert "base step 100/100" in shown
        assert "100%" in shown
        assert not re.search(r"10[1-9]|1[1-9]\d", re.sub(r"\x1b\[[^m]*m", "", shown))


@pytest.mark.parametrize("width", [80, 120])
def test_the_bar_names_its_unit_and_cuts_no_number(width):
    console = Console(file=io.StringIO(), force_terminal=True, width=width)
    bar = ProgressBar(num_steps=12_500, console=console)
    bar.write(STEP | {"progress": 5_300.0})
    bar.close()
    shown = console.file.getvalue()
    for part in ("base step 5,300/12,500", "42%", "loss 0.2500", "gain 1.50", "workers 4", "left"):
        assert part in shown
    assert ("━" in shown) == (width > 100)


@pytest.mark.parametrize("num_steps", [0, 1.5, True, None])
def test_the_bar_refuses_a_length_that_is_no_whole_number(num_steps):
    with pytest.raises(ArgumentError, match="num_steps"):
        ProgressBar(num_steps=num_steps)


def read_tensorboard(log_dir):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(log_dir))
    events.Reload()
    return events


def test_tensorboard_gets_steps_and_metrics_as_curves_and_the_rest_as_text(tmp_path):
    with Telemetry([TensorBoardSink(tmp_path)], clock=lambda: 99.0) as telemetry:
        fields = {k: v for k, v in STEP.items() if k not in ("event", "time")}
        telemetry.emit("step", **fields)
        telemetry.emit("membership", generation=1, world_size=2, cause="killed", pause_s=0.1)
        telemetry.emit("step", **(fields | {"step": 4, "loss": 7.0, "skipped": True}))
        telemetry.emit("evaluation", step=4, progress=50.0, metric_accuracy=0.5, metric_bad=None)
    events = read_tensorboard(tmp_path)
    scalars = set(events.Tags()["scalars"])
    assert {"step/loss", "step/lr", "step/gain", "step/world_size", "step/progress"} <= scalars
    assert "evaluation/accuracy" in scalars
    assert not scalars & {"step/noise_scale", "evaluation/bad"}
    (loss,) = events.Scalars("step/loss")
    assert (loss.step, loss.value, loss.wall_time) == (3, 0.25, 99.0)
    (text,) = events.Tensors("membership/text_summary")
    assert text.step == 3
    assert b"cause: `killed`" in text.tensor_proto.string_val[0]
    assert len(events.Tensors("step/text_summary")) == 1


def test_without_tensorboard_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(UsageError, match=r"checkout.*pip install '\.\[tensorboard\]'"):
        TensorBoardSink(tmp_path)


def test_importing_telemetry_loads_neither_torch_nor_tensorboard():
    script = (
        "import sys, elastane.telemetry\n"
        "assert not {'torch', 'tensorboard', 'matplotlib', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
