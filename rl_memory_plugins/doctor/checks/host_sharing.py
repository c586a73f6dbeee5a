"""How processes of one host share memory: file descriptors over a socket, `/proc`, `pidfd_getfd`, `/dev/shm`."""

from __future__ import annotations

import array
import ctypes
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rl_memory_plugins.byte_size import size
from rl_memory_plugins.doctor.finding import Finding, failure, ok, warning

SHM = Path("/dev/shm")
SMALL_SHM = 1 << 30
"""Docker's default is 64 MiB."""

_PIDFD_OPEN, _PIDFD_GETFD = 434, 438  # the same numbers on all architectures
_WORD = b"rl-memory doctor"
_PEER_S = 20.0

#: The other process: sends a file in memory over the socket, tells its number, and waits.
_PEER = """
import array, os, socket, sys
own = socket.socket(fileno=int(sys.argv[1]))
fd = os.memfd_create("rl-memory-doctor")
os.write(fd, b"rl-memory doctor")
own.sendmsg([str(fd).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])
own.recv(1)
"""


@contextmanager
def _peer() -> Iterator[tuple[int, int, int]]:
    """Another process, the number of its shared memory there, and the descriptor that it has passed (-1: none)."""
    own, other = socket.socketpair()
    with own, other:
        own.settimeout(_PEER_S)
        peer = subprocess.Popen([sys.executable, "-I", "-c", _PEER, str(other.fileno())], pass_fds=[other.fileno()])
        other.close()
        try:
            number, ancillary, _, _ = own.recvmsg(32, socket.CMSG_SPACE(4))
            received = array.array("i", ancillary[0][2] if ancillary else b"")
            yield peer.pid, int(number or b"-1"), received[0] if received else -1
        finally:
            with suppress(OSError):
                own.send(b"x")
            peer.kill()
            peer.wait()


def shared_files() -> Finding:
    """Anonymous shared memory (memfd) from another process: over a Unix socket, and by `/proc`."""
    with _peer() as (pid, number, received):
        if received < 0 or not _is_word(received):
            return failure(
                "another process could not pass its shared memory over a Unix socket (memfd, SCM_RIGHTS)",
                "allow memfd_create and sendmsg in the container's seccomp profile; updates on one host need them",
            )
        problem = _open_through_proc(Path(f"/proc/{pid}/fd/{number}"))
    seen = "another process has passed its shared memory over a Unix socket"
    if problem:
        shares = os.environ.get("RL_MEMORY_SHARE_HOST_BACKUPS", "").lower() in ("1", "true", "yes", "on")
        return (failure if shares else warning)(
            f"{seen}; /proc/PID/fd of another process cannot be opened ({problem}): share_host_backups shares nothing",
            "mount /proc without hidepid, and run the engines in one PID namespace as one user",
        )
    return ok(f"{seen}, and it can be opened through /proc/PID/fd")


def pidfd_getfd() -> Finding:
    """The call by which torch passes memory of the driver's virtual memory management between processes."""
    with _peer() as (pid, number, received):
        os.close(received)
        problem = _copy_by_pidfd(pid, number)
    if problem:
        return warning(
            f"pidfd_getfd does not work ({problem}). This package does not use it; torch does for tensors in "
            "expandable_segments that processes share",
            "allow it: `--cap-add SYS_PTRACE`, or a seccomp profile and kernel.yama.ptrace_scope that permit it",
        )
    return ok("a descriptor of another process was copied")


def _copy_by_pidfd(pid: int, number: int) -> str:
    """Copy a descriptor of another process. Returns the error; empty if the copy reads as the original."""
    libc = ctypes.CDLL(None, use_errno=True)
    pidfd = libc.syscall(_PIDFD_OPEN, pid, 0)
    if pidfd < 0:
        return f"pidfd_open: {os.strerror(ctypes.get_errno())}"
    try:
        copy = libc.syscall(_PIDFD_GETFD, pidfd, number, 0)
        if copy < 0:
            return os.strerror(ctypes.get_errno())
        return "" if _is_word(copy) else "the copy is another file"
    finally:
        os.close(pidfd)


def _is_word(fd: int) -> bool:
    """Whether the file is the other process's. Closes it."""
    try:
        return os.pread(fd, len(_WORD), 0) == _WORD
    finally:
        os.close(fd)


def _open_through_proc(path: Path) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        return str(error.strerror)
    return "" if _is_word(fd) else "another file"


def shared_memory() -> Finding:
    """The size of `/dev/shm`. This package's own shared memory is not there: the memory cgroup limits it."""
    try:
        found = os.statvfs(SHM)
    except OSError as error:
        return failure(f"{SHM}: {error.strerror}", "mount a tmpfs there (`docker run --shm-size 16g`, or `--ipc=host`)")
    total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    seen = f"{SHM} has {size(total)}, {size(free)} are free"
    if not os.access(SHM, os.W_OK):
        return failure(f"{SHM} cannot be written", "mount a tmpfs there with mode 1777", bytes=total)
    if free < SMALL_SHM:
        return warning(
            f"{seen}: NCCL, torch's data loaders and engines with several ranks have buffers there",
            "`docker run --shm-size 16g` or `--ipc=host`; in Kubernetes an emptyDir with medium: Memory",
            bytes=total,
        )
    return ok(seen, bytes=total)
