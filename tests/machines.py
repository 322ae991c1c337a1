"""Machines for tests: network namespaces on a bridge, or addresses of the loopback; sshd on each.

Whatever is made here is gone when a block ends. Nothing is installed: `why_not` says what is
missing.
"""

import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
LIMIT_S = 20.0

SSHD_CONFIG = """\
Port {port}
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin yes
PasswordAuthentication no
KbdInteractiveAuthentication no
LogLevel ERROR
"""

SSH_CONFIG = """\
Host *
  Port {port}
  IdentityFile {folder}/user_key
  IdentitiesOnly yes
  BatchMode yes
  ConnectTimeout 3
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
"""


def why_no_sshd():
    """Return why no sshd can be run here, or "" if one can."""
    missing = [name for name in ("ssh", "ssh-keygen") if shutil.which(name) is None]
    if sys.platform != "linux":
        return "needs Linux"
    if SSHD is None or missing:
        return f"needs {', '.join(missing or ['sshd'])}"
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd keeps its unprivileged half there
    return ""


def why_no_namespaces():
    """Return why machines can't be network namespaces here, or "" if they can."""
    if why_no_sshd() or os.geteuid() != 0 or shutil.which("ip") is None:
        return why_no_sshd() or "network namespaces need root and ip"
    name = f"el{secrets.token_hex(3)}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces are not allowed here: {made.stderr.strip()}"
    ip("netns", "delete", name)
    return ""


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=LIMIT_S)


def empty(space):
    """End what still runs in a network namespace: it would outlive its name."""
    listed = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True)
    kill(int(pid) for pid in listed.stdout.split())


def processes():
    """Return the ids of all processes."""
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def command_of(pid):
    """Return the words of a process, each with a zero byte at its end."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def kill(pids):
    """End processes at once, and wait for it; whoever is gone already is passed over."""
    for pid in pids:
        with suppress(ProcessLookupError):
            handle = os.pidfd_open(pid)
            try:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                assert select.select([handle], [], [], LIMIT_S)[0]
            finally:
                os.close(handle)


class Machines:
    """Machines by address, with an sshd on each.

    Attributes:
        addresses: of the machines.
        ssh: command that reaches them.
    """

    def __init__(self, folder, *, port, addresses):
        self.addresses = addresses
        self._folder = folder
        self._port = port
        folder.mkdir()
        for key in ("host_key", "user_key"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
            subprocess.run(command, check=True, timeout=LIMIT_S)
        (folder / "ssh_config").write_text(SSH_CONFIG.format(port=port, folder=folder))
        self.ssh = f"ssh -F {folder / 'ssh_config'}"

    def end_clients(self):
        """End the connections to the machines that are still open."""
        mark = f"-F\0{self._folder / 'ssh_config'}\0"
        kill(pid for pid in processes() if mark in command_of(pid))

    @contextmanager
    def sshd(self, address, *, within=()):
        """Run the sshd of a machine for the length of a block."""
        config = self._folder / f"sshd-{address}"
        known = {"port": self._port, "address": address, "folder": self._folder}
        config.write_text(SSHD_CONFIG.format(**known))
        log = self._folder / f"sshd-{address}.log"
        with log.open("wb") as output:
            command = [*within, SSHD, "-D", "-e", "-f", str(config)]
            process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            self._meet(address, process, log)
            yield
        finally:
            process.kill()
            process.wait()

    def _meet(self, address, process, log):
        deadline = time.monotonic() + LIMIT_S
        while process.poll() is None and time.monotonic() < deadline:
            try:
                socket.create_connection((address, self._port), timeout=1).close()
            except OSError:
                time.sleep(0.01)
            else:
                return
        raise AssertionError(f"no sshd at {address}: {log.read_text()}")


class Namespaces(Machines):
    """Machines that are network namespaces on a bridge, whose own address is this machine's."""

    def __init__(self, folder, *, num_machines):
        self._tag = f"el{secrets.token_hex(2)}"
        self._net = f"10.{200 + secrets.randbelow(50)}.{secrets.randbelow(250)}"
        addresses = [f"{self._net}.{n}" for n in range(2, num_machines + 2)]
        super().__init__(folder, port=22, addresses=addresses)

    def set_link(self, address, state):
        """Set a machine's link `up` or `down`: down, its packets vanish without a word."""
        ip("link", "set", f"{self._tag}v{self.addresses.index(address)}", state)

    @contextmanager
    def running(self):
        """Have the machines for the length of a block."""
        bridge = f"{self._tag}b"
        with ExitStack() as stack:
            ip("link", "add", bridge, "type", "bridge")
            stack.callback(ip, "link", "delete", bridge)
            ip("address", "add", f"{self._net}.1/24", "dev", bridge)
            ip("link", "set", bridge, "up")
            stack.callback(self.end_clients)
            for number, address in enumerate(self.addresses):
                space = f"{self._tag}n{number}"
                ip("netns", "add", space)
                stack.callback(ip, "netns", "delete", space)
                stack.callback(empty, space)
                self._plug(number, address, space=space, bridge=bridge)
                # The last connections of what was ended would keep it for a minute.
                stack.callback(ip, "link", "delete", f"{self._tag}v{number}")
                within = ("ip", "netns", "exec", space)
                stack.enter_context(self.sshd(address, within=within))
            yield self

    def _plug(self, number, address, *, space, bridge):
        outside, inside = f"{self._tag}v{number}", f"{self._tag}w{number}"
        ip("link", "add", outside, "type", "veth", "peer", "name", inside)
        ip("link", "set", outside, "master", bridge, "up")
        ip("link", "set", inside, "netns", space)
        ip("-n", space, "address", "add", f"{address}/24", "dev", inside)
        ip("-n", space, "link", "set", inside, "up")
        ip("-n", space, "link", "set", "lo", "up")


class Loopbacks(Machines):
    """Machines that are this one under other names of the loopback: all but the network."""

    def __init__(self, folder, *, num_machines):
        addresses = [f"127.0.0.{n}" for n in range(2, num_machines + 2)]
        with socket.socket() as probe:
            probe.bind((addresses[0], 0))
            port = probe.getsockname()[1]
        super().__init__(folder, port=port, addresses=addresses)

    @contextmanager
    def running(self):
        """Have the machines for the length of a block."""
        with ExitStack() as stack:
            stack.callback(self.end_clients)
            for address in self.addresses:
                stack.enter_context(self.sshd(address))
            yield self
