"""`elastane scale`, `status`, `stop` and `ps`: commands for jobs that run.

Knows options and how answers are shown; finding and asking a job is `elastane.launch.jobs`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from elastane.errors import ElastaneError, check_whole

if TYPE_CHECKING:
    from pathlib import Path

    from elastane.launch.jobs import Job

_JOB_HELP = (
    "JOB is the name of a job, or its run folder (./NAME where a job has the folder's name). It "
    "may be left out when exactly one job runs."
)
_REDRAW_S = 1.0
_BETWEEN_GLANCES_S = 0.5
_GLANCE_LIMIT_S = 2.0
_ENDED = ("finished", "stopped", "failed")


@click.command(epilog=_JOB_HELP)
@click.argument("job_and_n", metavar="[JOB] N", nargs=-1, required=True)
@click.option(
    "--remove",
    metavar="WORKER_ID",
    type=int,
    help="Worker that leaves first. [default: the newest]",
)
def scale(job_and_n: tuple[str, ...], *, remove: int | None) -> None:
    """Change the number of workers of a running job to N."""
    from elastane.launch.jobs import ask, find_job

    *names, n_text = job_and_n
    if len(names) > 1:
        raise click.UsageError(f"Got {len(job_and_n)} arguments where [JOB] N was expected.")
    n = _whole(n_text)
    job = find_job(names[0] if names else None)
    click.echo(ask(job.path, "scale", n=n, worker=remove).result)


@click.command(epilog=_JOB_HELP)
@click.argument("job", required=False)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on one line.")
@click.option("--watch", is_flag=True, help="Show it anew each second, until the job ends.")
def status(job: str | None, *, as_json: bool, watch: bool) -> None:
    """Show a running job: workers, step, progress, learning rate, last change."""
    from elastane.launch.jobs import ask, find_job

    found = find_job(job)
    if not watch:
        _show(ask(found.path, "status").result, as_json=as_json)
        return
    with suppress(KeyboardInterrupt):
        _watch(_statuses(found.path), as_json=as_json)
        if not as_json:
            click.echo(f"{found.name} has ended; its run folder is {found.run_dir}")


@click.command(epilog=_JOB_HELP)
@click.argument("job", required=False)
@click.option("--now", is_flag=True, help="End the workers at once, without a checkpoint.")
@click.option(
    "--timeout",
    "timeout_s",
    metavar="SECONDS",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    help="How long to wait for the end.",
)
def stop(job: str | None, *, now: bool, timeout_s: float) -> None:
    """End a running job, after a checkpoint, and wait until it is gone."""
    from elastane.launch.jobs import ask, find_job

    found = find_job(job)
    with suppress(ConnectionError):  # it ended before it could answer
        click.echo(ask(found.path, "kill" if now else "stop").result)
    started = time.monotonic()
    ended, last_seen = _wait(found, timeout_s=timeout_s)
    if not ended:
        way_out = "Wait longer with --timeout" + ("." if now else ", or end it with --now.")
        message = f"{found.name} still runs after {timeout_s:g} s{last_seen}. {way_out}"
        raise click.ClickException(message)
    seconds = time.monotonic() - started
    click.echo(f"{found.name} ended after {seconds:.1f} s{last_seen}")
    click.echo(f"its run folder is {found.run_dir}")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="A JSON list of objects on one line.")
def ps(*, as_json: bool) -> None:
    """List your jobs that run on this machine."""
    from elastane.cli.status_table import jobs_table, plain_console
    from elastane.launch.socket_paths import live_sockets

    jobs = [row for path in live_sockets() if (row := _row(path)) is not None]
    if as_json:
        click.echo(json.dumps(jobs))
    elif not jobs:
        click.echo("no job runs")
    else:
        plain_console().print(jobs_table(jobs))


def _whole(text: str) -> int:
    way_out = "Give the number of workers last: elastane scale JOB N."
    return check_whole("N", int(text) if text.isdecimal() else text, at_least=1, way_out=way_out)


def _statuses(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield a job's status once a second until it has ended."""
    from elastane.launch.jobs import ask

    with suppress(ConnectionError):
        while True:
            status = ask(path, "status").result
            yield status
            if status.get("state") in _ENDED:
                return
            time.sleep(_REDRAW_S)


def _watch(statuses: Iterator[Mapping[str, Any]], *, as_json: bool) -> None:
    from rich.live import Live

    from elastane.cli.status_table import plain_console, status_picture

    console = plain_console()
    if as_json or not console.is_terminal:
        for status in statuses:
            _show(status, as_json=as_json)
        return
    with Live(console=console, auto_refresh=False) as live:
        for status in statuses:
            live.update(status_picture(status), refresh=True)


def _wait(job: Job, *, timeout_s: float) -> tuple[bool, str]:
    """Return whether a job's launcher ended in time, and how the job was last seen."""
    from elastane.launch.jobs import wait_until_gone

    deadline = time.monotonic() + timeout_s
    last_seen = ""
    while True:
        last_seen = _glance(job.path) or last_seen
        left_s = max(deadline - time.monotonic(), 0.0)
        if wait_until_gone(job, timeout_s=min(left_s, _BETWEEN_GLANCES_S)):
            return True, last_seen
        if left_s == 0:
            return False, last_seen


def _glance(path: Path) -> str:
    from elastane.cli.status_table import shown
    from elastane.launch.jobs import ask

    with suppress(ElastaneError, OSError):
        status = ask(path, "status", timeout_s=_GLANCE_LIMIT_S).result
        return f", last seen {status.get('state')} at step {shown(status.get('step'))}"
    return ""


def _row(path: Path) -> dict[str, object] | None:
    """Return a job's line of `elastane ps`, or `None` if it has ended meanwhile."""
    from elastane.cli.status_table import JOB_COLUMNS, members_of
    from elastane.launch.jobs import ask

    try:
        answer = ask(path, "status", timeout_s=_GLANCE_LIMIT_S)
    except ConnectionError:
        return None
    except (TimeoutError, ElastaneError):
        return {**dict.fromkeys(JOB_COLUMNS), "job": path.stem, "state": "no answer"}
    return {
        "job": answer.job.name,
        "state": answer.result.get("state"),
        "workers": len(members_of(answer.result)),
        "step": answer.result.get("step"),
        "pid": answer.job.pid,
        "run_dir": answer.job.run_dir,
    }


def _show(status: Mapping[str, Any], *, as_json: bool) -> None:
    from elastane.cli.status_table import plain_console, status_picture

    if as_json:
        click.echo(json.dumps(status))
    else:
        plain_console().print(status_picture(status))
