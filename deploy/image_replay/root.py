"""A directory that processes take for the whole file system, in namespaces of their own: what a container has, but for its network.

Mounts are made in the process's own mount namespace and are gone with it: nothing is left to unmount, however it ends. For root on Linux.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
# The host's names and authorities, so that downloads work as they do outside.
HOST_FILES = ("/etc/resolv.conf", "/etc/hosts", "/etc/ssl/certs/ca-certificates.crt")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSandbox:
    """Says what a process may see and do. `user`: uid:gid. `binds`: host path by path in the root; those of `writable` may be written."""

    env: Mapping[str, str]
    user: str = "0:0"
    cwd: str = "/"
    read_only: bool = False
    binds: Mapping[str, str] = field(default_factory=dict)
    writable: frozenset[str] = frozenset()
    tmpfs: tuple[str, ...] = ()
    shm_bytes: int = 64 << 20
    shm_dir: str = ""
    """A directory that stands in for /dev/shm, where processes of several roots share it; empty: one of its own."""
    before: tuple[str, ...] = ()
    """What the command begins with on the host: `ip netns exec NAME` for another network."""
    beside: int = 0
    """A process whose table of processes it shares; 0: it has one of its own."""


@dataclass(frozen=True, slots=True)
class Root:
    path: Path

    def argv(self, command: Sequence[str], sandbox: ImageSandbox) -> list[str]:
        """A command of the host that becomes `command` in this root, as process 1 of its own namespace."""
        script = "\n".join([*self._mounts(sandbox), self._exec(command, sandbox)])
        others = ["--pid", "--fork", "--kill-child"]
        enter = []
        if sandbox.beside:
            others, enter = [], ["nsenter", "--target", str(sandbox.beside), "--pid", "--"]
        return [*sandbox.before, *enter, "unshare", "--mount", "--ipc", "--uts", *others, "--", "bash", "-euc", script]

    def run(self, command: Sequence[str], sandbox: ImageSandbox, timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Its exit code and output, both streams together. Raises TimeoutExpired, with everything that it started killed."""
        return subprocess.run(
            self.argv(command, sandbox),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def start(self, command: Sequence[str], sandbox: ImageSandbox, log: Path) -> ImageProcess:
        with log.open("ab") as sink:
            outer = subprocess.Popen(self.argv(command, sandbox), stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT)
        return ImageProcess(outer, log)

    def _mounts(self, sandbox: ImageSandbox) -> list[str]:
        root = shlex.quote(str(self.path))
        lines = ["mount --make-rprivate /", f"mount --bind {root} {root}", f"mount -t proc proc {root}/proc"]
        lines += [f"mount -t tmpfs -o mode=755,size=1m replay {root}/dev", f"mkdir {root}/dev/shm", f"ln -s /proc/self/fd {root}/dev/fd"]
        lines += [f": > {root}/dev/{name}; mount --bind /dev/{name} {root}/dev/{name}" for name in _DEVICES]
        if sandbox.shm_dir:
            lines.append(f"mount --bind {shlex.quote(sandbox.shm_dir)} {root}/dev/shm")
        else:
            lines.append(f"mount -t tmpfs -o mode=1777,size={sandbox.shm_bytes} replay {root}/dev/shm")
        for target in sandbox.tmpfs:
            owner = "mode=1777" if target == "/tmp" else "mode=700,uid={},gid={}".format(*sandbox.user.split(":"))
            lines += [f"mkdir -p {root}{shlex.quote(target)}", f"mount -t tmpfs -o {owner} replay {root}{shlex.quote(target)}"]
        for target, source in sandbox.binds.items():
            inside, outside = f"{root}{shlex.quote(target)}", shlex.quote(source)
            lines.append(f"if [ -d {outside} ]; then mkdir -p {inside}; else mkdir -p $(dirname {inside}); touch {inside}; fi")
            lines.append(f"mount --bind {outside} {inside}")
            if target not in sandbox.writable:
                lines.append(f"mount -o remount,bind,ro {inside}")
        if sandbox.read_only:
            lines.append(f"mount -o remount,bind,ro {root}")
        return lines

    def _exec(self, command: Sequence[str], sandbox: ImageSandbox) -> str:
        variables = [f"{name}={value}" for name, value in sandbox.env.items()]
        words = ["setpriv", "--no-new-privs"] if sandbox.user != "0:0" else []
        words += ["chroot", f"--userspec={sandbox.user}", "--groups=", str(self.path), "/usr/bin/env", "-i", f"--chdir={sandbox.cwd}"]
        return "exec " + shlex.join([*words, *variables, *command])


@dataclass(slots=True)
class ImageProcess:
    """A process in a root. `outer` is the one that made its namespaces; the process itself is its only child."""

    outer: subprocess.Popen[bytes]
    log: Path

    @property
    def running(self) -> bool:
        return self.outer.poll() is None

    @property
    def children(self) -> list[str]:
        return Path(f"/proc/{self.outer.pid}/task/{self.outer.pid}/children").read_text().split()

    def terminate(self, timeout_s: float) -> int | None:
        """SIGTERM to the process and its exit code; None: it had to be killed."""
        if self.running:
            subprocess.run(["kill", "-TERM", *self.children], check=False)
        try:
            return self.outer.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            return None

    def kill(self) -> None:
        """Its namespace goes with it, and so does everything that it started."""
        if self.running:
            # One that shares another's table of processes does not go with the one that made it.
            subprocess.run(["kill", "-KILL", *self.children], check=False, stderr=subprocess.DEVNULL)
        self.outer.kill()
        self.outer.wait()

    def tail(self, lines: int = 20) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
