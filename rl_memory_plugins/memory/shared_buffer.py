"""Host memory that several processes of one user map: a file without a name (memfd), and its locks.

A page behind the bytes holds the header: a key, which names the content, and whether the content is complete. The file
can neither grow nor shrink. The kernel frees the memory when the last process has closed and unmapped the file.

Who holds the file's shared lock relies on the bytes. Who holds its exclusive lock may write them. The kernel ends the
locks of a process that dies, so a lock says at any time whether somebody relies on the bytes or writes them.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
from pathlib import Path
from typing import NamedTuple

from rl_memory_plugins.memory.host_memory import libc
from rl_memory_plugins.private_directory import try_lock, unlock

KEY_BYTES = 16
_NAME = "rl-memory-copy"
_MAGIC = b"rl-mem-1"
_HEADER = struct.Struct(f"<8s?{KEY_BYTES}s")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MFD_NOEXEC_SEAL = 8  # Linux 6.3


class Header(NamedTuple):
    """What a buffer holds, or will hold."""

    complete: bool
    key: bytes


NOTHING = Header(complete=False, key=bytes(KEY_BYTES))


class SharedBuffer:
    """One open file of this process. `create` and `open` make it.

    Attributes:
        fd: The open file.
        nbytes: The size of the content, a multiple of the page size.
        name: The same in every process that has the file open, and unique on the host.
        address: Where this process has mapped the content; 0 if it has not.
    """

    def __init__(self, fd: int) -> None:
        found = os.fstat(fd)
        self.fd = fd
        self.nbytes = found.st_size - mmap.PAGESIZE
        self.name = f"{found.st_dev:x}-{found.st_ino:x}"
        self.address = 0

    @classmethod
    def create(cls, nbytes: int) -> SharedBuffer:
        """A new file of at least `nbytes`. It takes memory page by page, as pages are written.

        Raises:
            OSError: the kernel refuses.
        """
        try:
            fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | _MFD_NOEXEC_SEAL)
        except OSError:  # an older kernel
            fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE + mmap.PAGESIZE)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            buffer = cls(fd)
            buffer.header = NOTHING
        except BaseException:
            os.close(fd)
            raise
        return buffer

    @classmethod
    def open(cls, pid: int, fd: int) -> SharedBuffer | None:
        """The file that another process of this user has open; `None` if there is none, or it is no such file."""
        path = Path(f"/proc/{pid}/fd/{fd}")
        try:
            if not str(path.readlink()).startswith(f"/memfd:{_NAME}"):  # opening other files may have effects
                return None
            own = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:  # the process is gone or has closed the file, or is not ours
            return None
        try:
            seals = fcntl.fcntl(own, fcntl.F_GET_SEALS)
            if seals & _SEALS == _SEALS and os.fstat(own).st_uid == os.getuid():
                buffer = cls(own)
                if buffer.nbytes > 0 and os.pread(own, len(_MAGIC), buffer.nbytes) == _MAGIC:
                    return buffer
        except OSError:
            pass
        os.close(own)
        return None

    @property
    def has_memory(self) -> bool:
        """Whether every page of the content has its memory."""
        return os.fstat(self.fd).st_blocks * 512 >= self.nbytes

    @property
    def header(self) -> Header:
        _, complete, key = _HEADER.unpack(os.pread(self.fd, _HEADER.size, self.nbytes))
        return Header(complete, key)

    @header.setter
    def header(self, header: Header) -> None:
        """The caller holds the exclusive lock, or is the only process that knows the file."""
        os.pwrite(self.fd, _HEADER.pack(_MAGIC, *header), self.nbytes)

    def lock(self, *, exclusive: bool) -> bool:
        """Take the lock if no other process holds it. This process holds no lock before.

        Raises:
            OSError: the kernel refuses every lock.
        """
        return try_lock(self.fd, shared=not exclusive)

    def share_lock(self) -> bool:
        """Turn the exclusive lock into a shared one. Not atomic: look at the header afterwards."""
        return try_lock(self.fd, shared=True)

    def unlock(self) -> None:
        unlock(self.fd)

    def allow_writes(self, allowed: bool) -> None:
        """Let this process write to its mapping, or make a write of this process a fault.

        Raises:
            OSError: the kernel refuses.
        """
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if allowed else 0)
        if libc.mprotect(ctypes.c_void_p(self.address), ctypes.c_size_t(self.nbytes), protection) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"mprotect of {self.nbytes} bytes: {os.strerror(code)}")

    def close(self) -> None:
        """Close the file, and end its lock also where a forked process has the file open. The caller has unmapped."""
        try:
            self.unlock()
        finally:
            os.close(self.fd)
