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


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSandbox:
    """Says what a process may see and do. `user`: uid:gid. `binds`: host path by path in the root, none of which it may write."""

    env: Mapping[str, str]
    user: str = "0:0"
    cwd: str = "/"
    read_only: bool = False
    binds: Mapping[str, str] = field(default_factory=dict)
    tmpfs: tuple[str, ...] = ()


def argv_in(root: Path, command: Sequence[str], sandbox: ImageSandbox) -> list[str]:
    """A command of the host that becomes `command` in `root`, as process 1 of its own namespace."""
    script = "\n".join([*_mounts(root, sandbox), _exec(root, command, sandbox)])
    return ["unshare", "--mount", "--ipc", "--uts", "--pid", "--fork", "--kill-child", "--", "bash", "-euc", script]


def run_in(root: Path, command: Sequence[str], sandbox: ImageSandbox, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Its exit code and output, both streams together. Raises TimeoutExpired, with everything that it started killed."""
    told = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.run(argv_in(root, command, sandbox), **told, text=True, timeout=timeout_s, check=False)


def _mounts(path: Path, sandbox: ImageSandbox) -> list[str]:
    root = shlex.quote(str(path))
    lines = ["mount --make-rprivate /", f"mount --bind {root} {root}", f"mount -t proc proc {root}/proc"]
    lines += [f"mount -t tmpfs -o mode=755,size=1m replay {root}/dev", f"mkdir {root}/dev/shm", f"ln -s /proc/self/fd {root}/dev/fd"]
    lines += [f": > {root}/dev/{name}; mount --bind /dev/{name} {root}/dev/{name}" for name in _DEVICES]
    lines.append(f"mount -t tmpfs -o mode=1777,size=256m replay {root}/dev/shm")
    for target in sandbox.tmpfs:
        owner = "mode=1777" if target == "/tmp" else "mode=700,uid={},gid={}".format(*sandbox.user.split(":"))
        lines += [f"mkdir -p {root}{shlex.quote(target)}", f"mount -t tmpfs -o {owner} replay {root}{shlex.quote(target)}"]
    for target, source in sandbox.binds.items():
        inside, outside = f"{root}{shlex.quote(target)}", shlex.quote(source)
        lines.append(f"if [ -d {outside} ]; then mkdir -p {inside}; else mkdir -p $(dirname {inside}); touch {inside}; fi")
        lines += [f"mount --bind {outside} {inside}", f"mount -o remount,bind,ro {inside}"]
    if sandbox.read_only:
        lines.append(f"mount -o remount,bind,ro {root}")
    return lines


def _exec(root: Path, command: Sequence[str], sandbox: ImageSandbox) -> str:
    variables = [f"{name}={value}" for name, value in sandbox.env.items()]
    words = ["setpriv", "--no-new-privs"] if sandbox.user != "0:0" else []
    words += ["chroot", f"--userspec={sandbox.user}", "--groups=", str(root), "/usr/bin/env", "-i", f"--chdir={sandbox.cwd}"]
    return "exec " + shlex.join([*words, *variables, *command])
