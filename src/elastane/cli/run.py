"""`elastane run`: starts a job on this machine, or joins one.

Knows options and their defaults; the running is `elastane.launch`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from elastane.errors import ArgumentError, describe

_EPILOG = """\b
Exit codes:
  0    training reached its end, or the job stopped as asked
  1    the job failed
  2    the arguments were refused
  130  killed: Ctrl-C twice, or `elastane stop --now`

Ctrl-C or SIGTERM stops the job: workers write a checkpoint and leave.
"""


@click.command(
    epilog=_EPILOG,
    context_settings={"allow_interspersed_args": False},  # what follows SCRIPT is its own
    no_args_is_help=True,
)
@click.option(
    "--workers",
    metavar="N|MIN:MAX",
    default="1",
    show_default=True,
    help="How many workers take part; N means at least 1 and at most N.",
)
@click.option("--initial", metavar="N", type=click.IntRange(1), help="At first. [default: MAX]")
@click.option(
    "--slots",
    metavar="N",
    type=click.IntRange(1),
    help="How many workers this machine may hold. [default: MAX]",
)
@click.option("--standby", metavar="N", type=click.IntRange(0), default=0, help="Spare workers.")
@click.option(
    "--run-dir",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    help="The run's folder; one that is given again is gone on with. [default: runs/JOB]",
)
@click.option("--job", metavar="NAME", help="Name of the job. [default: script and time]")
@click.option(
    "--join", metavar="HOST:PORT", help="Give a job that runs elsewhere this machine's workers."
)
@click.option("--port", metavar="P", type=click.IntRange(0, 65535), default=0, help="Of the store.")
@click.option(
    "--hang-limit",
    metavar="S",
    type=click.FloatRange(0, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds after which a worker that keeps the others waiting is left behind.",
)
@click.option(
    "--heartbeat-limit",
    metavar="S",
    type=click.FloatRange(0, min_open=True),
    default=3.0,
    show_default=True,
    help="Seconds of silence after which a machine counts as lost.",
)
@click.option(
    "--orphan-limit",
    metavar="S",
    type=click.FloatRange(0, min_open=True),
    default=300.0,
    show_default=True,
    help="Seconds without this launcher after which workers write a checkpoint and end.",
)
@click.option(
    "--max-respawns",
    metavar="N",
    type=click.IntRange(0),
    default=10,
    show_default=True,
    help="Workers that may die in a row before they train.",
)
@click.option(
    "--grace",
    metavar="S",
    type=click.FloatRange(0, min_open=True),
    default=30.0,
    show_default=True,
    help="Seconds that workers have to write a checkpoint when the job stops.",
)
@click.option("-m", "as_module", is_flag=True, help="SCRIPT is a module, as for `python -m`.")
@click.argument("script", metavar="SCRIPT")
@click.argument("arguments", metavar="[ARGS]...", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def run(ctx: click.Context, *, script: str, as_module: bool, **given: Any) -> None:
    """Train with workers that may come and go.

    Starts SCRIPT once for each worker. The same command with --join on a further machine gives
    the job that machine's workers.
    """
    from elastane.launch.launcher import RunOptions, join_job, parse_workers, run_job
    from elastane.roster import Rules

    least, most, initial = parse_workers(given["workers"])
    rules = Rules(
        min_workers=least,
        max_workers=most,
        standby=given["standby"],
        hang_limit_s=given["hang_limit"],
        heartbeat_limit_s=given["heartbeat_limit"],
        max_respawns=given["max_respawns"],
        stop_grace_s=given["grace"],
    )
    options = RunOptions(
        command=_command(script, given["arguments"], as_module=as_module),
        name=script if as_module else Path(script).stem,
        rules=rules,
        initial=_initial(given["initial"], least=least, most=most) or initial,
        slots=given["slots"],
        run_dir=given["run_dir"],
        job=given["job"],
        port=given["port"],
        orphan_limit_s=given["orphan_limit"],
    )
    ctx.exit(join_job(given["join"], options) if given["join"] else run_job(options))


def _command(script: str, arguments: tuple[str, ...], *, as_module: bool) -> tuple[str, ...]:
    if as_module:
        return (sys.executable, "-u", "-m", script, *arguments)
    if not Path(script).is_file():
        rule, way_out = "there is no such file", "Give a Python file, or -m and a module."
        raise ArgumentError(describe("script", script, rule=rule, way_out=way_out))
    return (sys.executable, "-u", script, *arguments)


def _initial(given: int | None, *, least: int, most: int) -> int | None:
    if given is not None and not least <= given <= most:
        rule = f"must be from {least} to {most}"
        way_out = "The range is that of --workers."
        raise ArgumentError(describe("initial", given, rule=rule, way_out=way_out))
    return given
