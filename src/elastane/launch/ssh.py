"""Has things done on the machines of a job: commands on this one, over ssh on all others.

Knows command lines and processes; nothing of stores, or of why something is done.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from elastane.launch.hosts_file import Host

__all__ = ["DEFAULT_SSH", "Process", "Reach", "agent_command", "is_local", "prepare_command"]

# No questions; a machine that is off is given up in time, and so is a connection that is dead.
DEFAULT_SSH = (
    "ssh -T -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=10 "
    "-o ServerAliveCountMax=3"
)
_LAST_LINES = 5
_LAST_BYTES = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """How machines are reached, and what an agent is started with.

    Attributes:
        store: HOST:PORT of the job's store, as the machines reach it.
        script: the script and its arguments, or `-m`, a module and its arguments.
        folder: working directory, the same on all machines.
        python: path of the interpreter on other machines.
        own_python: path of the interpreter on this one.
        ssh: words of the command that takes a host and a command line.
        prepare: to be done on a machine before an agent starts there; `{host}` is its name.
    """

    store: str
    script: Sequence[str]
    folder: Path
    python: str
    own_python: str
    ssh: Sequence[str]
    prepare: str | None = None


def is_local(name: str) -> bool:
    """Return whether a host is this machine, by its name.

    Example:
        >>> is_local("localhost"), is_local("127.0.0.2")
        (True, False)
    """
    return name in ("localhost", "127.0.0.1", "::1", socket.gethostname())


def agent_command(host: Host, *, reach: Reach) -> list[str]:
    """Return the command that is an agent of the job on a host.

    Example:
        >>> reach = Reach(store="here:29400", script=["my train.py", "--lr", "1"],
        ...               folder=Path("/my runs"), python="/venv/bin/python",
        ...               own_python="/usr/bin/python", ssh=["ssh"])
        >>> agent_command(Host(name="node-1", slots=4), reach=reach)[:2]
        ['ssh', 'node-1']
        >>> print(agent_command(Host(name="node-1", slots=4), reach=reach)[2])
        cd '/my runs' && exec /venv/bin/python -m elastane run --join here:29400 --agent node-1 \
--slots 4 --lifeline 'my train.py' --lr 1
    """
    local = is_local(host.name)
    options = ["--join", reach.store, "--agent", host.name, "--slots", str(host.slots)]
    python = reach.own_python if local else reach.python
    words = [python, "-m", "elastane", "run", *options, "--lifeline", *reach.script]
    return words if local else _over_ssh(host.name, f"exec {shlex.join(words)}", reach=reach)


def prepare_command(host: Host, *, reach: Reach) -> list[str]:
    """Return the command that prepares a host: on the host itself, in the working directory."""
    command = (reach.prepare or "").replace("{host}", host.name)
    if is_local(host.name):
        return ["sh", "-c", command]
    return _over_ssh(host.name, f"{{ {command}\n}}", reach=reach)


def _over_ssh(host: str, command: str, *, reach: Reach) -> list[str]:
    return [*reach.ssh, host, f"cd {shlex.quote(str(reach.folder))} && {command}"]


class Process:
    """A command that runs, its output in a file; its standard input stays open until `let_go`.

    Args:
        command: program and arguments.
        folder: working directory.
        log: file that its output is added to.

    Raises:
        OSError: it can't be started.
    """

    def __init__(self, command: Sequence[str], *, folder: Path, log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        with log.open("ab") as output:
            self._begin = output.tell()
            self._process = subprocess.Popen(
                command,
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C in the launcher's terminal is not for it
            )

    @property
    def code(self) -> int | None:
        """Its exit code; `None` while it runs."""
        return self._process.poll()

    @property
    def words(self) -> str:
        """The last lines that it printed."""
        with self._log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(self._begin, end - _LAST_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        return "\n".join(line for line in lines[-_LAST_LINES:] if line.strip())

    def let_go(self) -> None:
        """Close its standard input: nobody here waits for it any more."""
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end; return whether it came."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """End it and what it has started here; over ssh nothing ends on the other machine."""
        self.let_go()
        if self.code is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
