"""The command line, by exit code and message."""

import io
import subprocess
import sys

import pytest
from click.testing import CliRunner
from rich.console import Console

from elastane._version import __version__
from elastane.cli import main
from elastane.telemetry import JsonlSink, Telemetry
from examples.digits.__main__ import table_of
from examples.digits.train import folder_name


def invoke(*args):
    return CliRunner().invoke(main, [str(arg) for arg in args])


def write_run(run_dir):
    with Telemetry([JsonlSink(run_dir)]) as telemetry:
        telemetry.emit("start", rule="AdaScale", num_steps=10)
        for step in range(1, 6):
            telemetry.emit("step", step=step, progress=2.0 * step, loss=1 / step, skipped=False)
    return run_dir


def assert_refused(result, *, exit_code, message):
    assert result.exit_code == exit_code
    assert isinstance(result.exception, SystemExit)
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("Error: ")
    assert message in result.stderr


def test_help_names_the_commands():
    result = invoke("--help")
    assert result.exit_code == 0
    assert "plot" in result.output
    assert "Draw runs on one page" in invoke("plot", "-h").output


def test_version_is_shown():
    result = invoke("--version")
    assert result.exit_code == 0
    assert result.output == f"elastane {__version__}\n"


def test_one_run_is_drawn_into_its_folder(tmp_path):
    run_dir = write_run(tmp_path / "run")
    result = invoke("plot", run_dir)
    assert result.exit_code == 0
    assert result.output == f"wrote {run_dir / 'plot.png'}\nwrote {run_dir / 'plot.html'}\n"
    assert (run_dir / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert (run_dir / "plot.html").exists()


def test_a_run_is_drawn_into_its_folder_however_often_and_by_whatever_name(tmp_path):
    run_dir = write_run(tmp_path / "run")
    result = invoke("plot", run_dir / "events.jsonl", run_dir)
    assert result.exit_code == 0
    assert result.output == f"wrote {run_dir / 'plot.png'}\nwrote {run_dir / 'plot.html'}\n"
    assert (run_dir / "plot.html").read_text().count("<td>run</td>") == 1


def test_several_runs_are_drawn_where_we_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = [write_run(tmp_path / name) for name in ("a", "b")]
    result = invoke("plot", *runs)
    assert result.exit_code == 0
    assert result.output == "wrote plot.png\nwrote plot.html\n"
    assert (tmp_path / "plot.png").exists()
    assert (tmp_path / "plot.html").exists()


def test_output_and_title_are_taken(tmp_path):
    run_dir = write_run(tmp_path / "run")
    result = invoke("plot", run_dir, "--output", tmp_path / "out" / "x.png", "--title", "My run")
    assert result.exit_code == 0
    assert "<h1>My run</h1>" in (tmp_path / "out" / "x.html").read_text()
    assert not (run_dir / "plot.png").exists()


def test_a_folder_without_events_is_one_line_and_exit_code_2(tmp_path):
    assert_refused(invoke("plot", tmp_path), exit_code=2, message="holds no events.jsonl")
    missing = invoke("plot", tmp_path / "missing")
    assert_refused(missing, exit_code=2, message="holds no events.jsonl")


def test_another_kind_of_picture_is_refused(tmp_path):
    run_dir = write_run(tmp_path / "run")
    result = invoke("plot", run_dir, "--output", "x.pdf")
    assert_refused(result, exit_code=2, message="must end in .png or .html")


def test_a_broken_file_of_events_is_one_line_and_exit_code_1(tmp_path):
    (tmp_path / "events.jsonl").write_text('{"eve\n{"event": "end"}\n')
    assert_refused(invoke("plot", tmp_path), exit_code=1, message="events.jsonl, line 1")


def test_a_file_of_garbage_is_one_line_that_names_the_place(tmp_path):
    (tmp_path / "events.jsonl").write_text("garbage\n")
    message = "events.jsonl, line 1: not a whole event ('garbage')"
    assert_refused(invoke("plot", tmp_path), exit_code=1, message=message)


def test_a_place_that_can_not_be_written_is_one_line_and_exit_code_1(tmp_path):
    run_dir = write_run(tmp_path / "run")
    (tmp_path / "file").write_text("in the way")
    result = invoke("plot", run_dir, "--output", tmp_path / "file" / "x.png")
    assert_refused(result, exit_code=1, message="file")


def test_no_run_and_unknown_commands_are_clicks_usage_errors():
    assert invoke("plot").exit_code == 2
    assert "Missing argument" in invoke("plot").stderr
    assert invoke("fly").exit_code == 2


def test_an_unexpected_error_is_not_hidden(monkeypatch, tmp_path):
    def broken(*_, **__):
        raise ZeroDivisionError

    monkeypatch.setattr("elastane.plots.plot_runs", broken)
    assert isinstance(invoke("plot", tmp_path).exception, ZeroDivisionError)


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["plot", "--help"]])
def test_help_loads_neither_torch_nor_matplotlib(args):
    script = (
        "import sys\n"
        "from elastane.cli import main\n"
        f"main({args!r}, standalone_mode=False)\n"
        "assert not {'torch', 'matplotlib', 'numpy', 'rich'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


def test_the_package_can_be_run_as_a_module():
    command = [sys.executable, "-m", "elastane", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout == f"elastane {__version__}\n"


def test_a_shell_sees_the_exit_code_and_no_traceback(tmp_path):
    command = [sys.executable, "-c", "from elastane.cli import main; main()", "plot", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_demos_table_has_one_head_and_its_folders_speak_the_tables_words():
    row = {"rule": "linear", "scale": 64, "batch": 1024, "accuracy": 0.5, "train_loss": 1.0}
    console = Console(file=io.StringIO(), width=120)
    console.print(table_of([row | {"steps": 40, "diverged": False}]))
    lines = console.file.getvalue().splitlines()
    (rule,) = (index for index, line in enumerate(lines) if line.startswith("┡"))
    assert "accuracy" in lines[rule - 1]
    assert "1,024" in lines[rule + 1]
    assert folder_name("base", scale=1) == "base-batch16"
    assert folder_name("adascale", scale=16) == "adascale-batch256"
    assert folder_name("linear", scale=64) == "linear-warmup-batch1024"
