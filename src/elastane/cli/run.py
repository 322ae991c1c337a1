"""`elastane run`: starts a job on this machine, or joins one.

Knows options and their defaults; the running is `elastane.launch`.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from elastane.errors import ArgumentError, describe

if TYPE_CHECKING:
    from elastane.launch.options import HostsOptions

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
    help="How many workers take part; N means at least 1 and at most N. [default: 1; with --hosts "
    "as many as there are slots]",
)
@click.option("--initial", metavar="N", type=click.IntRange(1), help="At first. [default: MAX]")
@click.option(
    "--slots",
    metavar="N",
    type=click.IntRange(0),
    help="How many workers this machine may hold; with --hosts, a machine whose line does not say. "
    "[default: MAX; with --hosts 1]",
)
@click.option("--standby", metavar="N", type=click.IntRange(0), default=0, help="Spare workers.")
@click.option(
    "--group-size",
    metavar="K",
    type=click.IntRange(1),
    help="Processes of a worker, which shard one copy of the model between them; workers and slots "
    "count as many. [default: 1; with --join the launcher's]",
)
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
    "--advertise",
    metavar="HOST",
    help="Address under which the other machines reach this one. [default: with --hosts the one "
    "on the way to them, else the loopback's]",
)
@click.option(
    "--hosts",
    "hosts_file",
    metavar="FILE",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Start an agent on each machine of a file, a line each: HOST [slots=N]. The file is "
    "watched; what came of it is in FILE.log.",
)
@click.option(
    "--prepare",
    metavar="CMD",
    help="Done on each machine of --hosts before its agent starts; {host} is its name.",
)
@click.option("--ssh", metavar="CMD", help="How machines of --hosts are reached. [default: ssh]")
@click.option(
    "--remote-python",
    metavar="PATH",
    help="Interpreter on the other machines of --hosts. [default: the path of this one]",
)
@click.option("--agent", metavar="ID", hidden=True, help="Id of the agent, with --join.")
@click.option("--lifeline", is_flag=True, hidden=True, help="A launcher holds standard input.")
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
    the job that machine's workers; --hosts does so on all machines of a file, through ssh.
    """
    from elastane.launch.launcher import join_job, parse_workers, run_job
    from elastane.launch.options import RunOptions, default_most
    from elastane.roster import Rules

    hosts = _hosts(given)
    workers = f"1:{default_most(hosts.hosts)}" if hosts else "1"
    least, most = parse_workers(given["workers"] or workers)
    rules = Rules(
        min_workers=least,
        max_workers=most,
        standby=given["standby"],
        hang_limit_s=given["hang_limit"],
        heartbeat_limit_s=given["heartbeat_limit"],
        max_respawns=given["max_respawns"],
        stop_grace_s=given["grace"],
    )
    words = _words(script, given["arguments"], as_module=as_module)
    options = RunOptions(
        command=(sys.executable, "-u", *words),
        script=words,
        name=script if as_module else Path(script).stem,
        rules=rules,
        initial=_initial(given["initial"], least=least, most=most),
        slots=given["slots"],
        run_dir=given["run_dir"],
        job=given["job"],
        port=given["port"],
        advertise=given["advertise"],
        orphan_limit_s=given["orphan_limit"],
        group_size=given["group_size"],
        hosts=hosts,
        agent=given["agent"],
        lifeline=given["lifeline"],
    )
    ctx.exit(join_job(given["join"], options) if given["join"] else run_job(options))


def _hosts(given: dict[str, Any]) -> HostsOptions | None:
    from elastane.launch.hosts import read_hosts
    from elastane.launch.options import HostsOptions
    from elastane.launch.ssh import DEFAULT_SSH

    path, slots = given["hosts_file"], given["slots"]
    if given["join"] and (path or slots == 0):
        name, value = ("hosts", str(path)) if path else ("slots", slots)
        rule = "has no effect on a machine that joins"
        raise ArgumentError(describe(name, value, rule=rule, way_out="Give it to the launcher."))
    if path is None:
        unused = [name for name in ("prepare", "ssh", "remote_python") if given[name]]
        if unused:
            rule, way_out = "has no effect without --hosts", "Give a file of hosts."
            raise ArgumentError(describe(unused[0], given[unused[0]], rule=rule, way_out=way_out))
        return None
    if slots == 0:
        rule, way_out = "a machine of --hosts holds workers", "Leave it out."
        raise ArgumentError(describe("slots", 0, rule=rule, way_out=way_out))
    default_slots = slots or 1
    return HostsOptions(
        path=path.absolute(),
        hosts=read_hosts(path, default_slots=default_slots),
        default_slots=default_slots,
        ssh=shlex.split(given["ssh"] or DEFAULT_SSH),
        python=given["remote_python"],
        prepare=given["prepare"],
    )


def _words(script: str, arguments: tuple[str, ...], *, as_module: bool) -> tuple[str, ...]:
    if as_module:
        return ("-m", script, *arguments)
    if not Path(script).is_file():
        rule, way_out = "there is no such file", "Give a Python file, or -m and a module."
        raise ArgumentError(describe("script", script, rule=rule, way_out=way_out))
    return (script, *arguments)


def _initial(given: int | None, *, least: int, most: int) -> int | None:
    if given is not None and not least <= given <= most:
        rule = f"must be from {least} to {most}"
        way_out = "The range is that of --workers."
        raise ArgumentError(describe("initial", given, rule=rule, way_out=way_out))
    return given
