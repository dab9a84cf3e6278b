"""A Unix socket's place in the file system: whose it is, whether a server lives there, and what a dead one left."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import socket
import stat
import struct
from pathlib import Path

from eplb_core.errors import SocketInUseError, SocketOwnerError
from eplb_core.files.reading import check_path as check_text_path

MAX_PATH = 107
"""Bytes of a Unix socket's path, as the kernel has it."""
_CREDENTIALS = struct.Struct("3i")


def check_path(path: str | os.PathLike[str]) -> str:
    """The path as text that a socket can have."""
    text = check_text_path(path)
    if not 0 < len(os.fsencode(text)) <= MAX_PATH or "\0" in text:
        raise ValueError(
            f"`path` ({len(os.fsencode(text))} bytes) must have 1 to {MAX_PATH}, as Unix sockets do; use a shorter one"
        )
    return text


def check_owner(path: str) -> None:
    """Raise SocketOwnerError if what is there belongs neither to this user nor to root; FileNotFoundError passes."""
    _check_uid(os.lstat(path).st_uid, path)


def _check_uid(uid: int, path: str) -> None:
    if uid not in (os.geteuid(), 0):
        raise SocketOwnerError(
            f"{path} belongs to user {uid}, not to {os.geteuid()}; choose a path in a folder of your own",
            path=path,
            uid=uid,
        )


def check_peer(connection: socket.socket, path: str) -> None:
    """Raise SocketOwnerError unless the process at the other end is of this user or root."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid = _CREDENTIALS.unpack(raw)[1]
    if uid not in (os.geteuid(), 0):
        raise SocketOwnerError(f"user {uid} is at the other end of {path}, not {os.geteuid()}", path=path, uid=uid)


def close(sock: socket.socket) -> None:
    """Close it; the descriptor is given back even where the system reports an error."""
    with contextlib.suppress(OSError):
        sock.close()


def has_ended(sock: socket.socket) -> bool:
    """Whether the other side has closed, as the kernel has it: an error of a call may have any other cause."""
    poll = select.poll()
    poll.register(sock, 0)
    try:
        return any(events & select.POLLHUP for _, events in poll.poll(0))
    except OSError:
        return False


class SocketPlace:
    """The right to serve at a path, from the constructor to `release`; the kernel takes it from a dead process.

    A lock on `PATH.lock` says who serves, so a socket without a holder of the lock is stale and may be removed, and two
    servers that start at once cannot both think so. A lock beside the file of the record's state says who writes that:
    two servers at different paths could each overwrite what the other has promised. The files of the locks stay;
    removing them would undo that.

    Args:
        path: Of the socket.
        state_file: Where this server will keep its record, or None.

    Raises:
        SocketInUseError: A server lives there, or the path is no socket, or another server keeps its record in
            `state_file`.
        SocketOwnerError: What is there belongs to somebody else.
        OSError: No such folder, or no permission in it.
    """

    def __init__(self, path: str | os.PathLike[str], state_file: str | os.PathLike[str] | None = None) -> None:
        self.path = check_path(path)
        self._process = os.getpid()
        self._locks: list[int] = []
        self._inode: tuple[int, int] | None = None
        try:
            lock = self._take(self.path)
            self._check_free()
            if state_file is not None:
                self._take(os.path.realpath(check_text_path(state_file, "state_file")), record=True)
            os.ftruncate(lock, 0)
            os.pwrite(lock, str(os.getpid()).encode(), 0)
        except BaseException:
            self.release()
            raise

    def _take(self, path: str, *, record: bool = False) -> int:
        """Lock what is at `path`, by the file beside it; the descriptor that holds the lock."""
        for each in (path, path + ".lock"):
            with contextlib.suppress(FileNotFoundError):
                check_owner(each)
        try:
            lock = os.open(path + ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, "No such folder", os.path.dirname(path)) from None
        self._locks.append(lock)
        _check_uid(os.fstat(lock).st_uid, path + ".lock")  # it may have come meanwhile
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):  # pragma: no cover  a folder without locks
                raise
            if record:
                what = "holds the record of another server that runs; give each server a state file of its own"
            else:
                what = f"is served by another process{_holder(lock)}"
            raise SocketInUseError(f"{path} {what}", path=path) from error
        return lock

    def listen(self) -> socket.socket:
        """A listening socket at the path, for this user only, in place of a stale one."""
        Path(self.path).unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(self.path)
            status = os.lstat(self.path)
            self._inode = status.st_dev, status.st_ino
            os.chmod(self.path, 0o600)  # before `listen`: until then nobody can connect
            listener.listen(128)
        except BaseException:
            close(listener)
            raise
        return listener

    def release(self) -> None:
        """Remove the socket, if it is still the one that was made here by this process, and let others serve."""
        if not self._locks:
            return
        try:
            status = os.lstat(self.path)
            if self._process == os.getpid() and (status.st_dev, status.st_ino) == self._inode:
                os.unlink(self.path)
        except OSError:
            pass  # somebody removed it, or the folder
        while self._locks:
            with contextlib.suppress(OSError):
                os.close(self._locks.pop())

    def _check_free(self) -> None:
        """With the lock held: nothing is there, or a socket at which nobody listens."""
        what = "is served by a process that holds no lock"
        try:
            mode = os.lstat(self.path).st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            what = "is there already and is no socket; move it away, or choose another path"
        else:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.setblocking(False)
                try:
                    probe.connect(self.path)
                except (ConnectionRefusedError, FileNotFoundError):
                    return
                except BlockingIOError:
                    pass  # a full queue: somebody listens
        raise SocketInUseError(f"{self.path} {what}", path=self.path)


def _holder(lock: int) -> str:
    """Process number in the lock's file; of another container it means nothing here, so it is a hint only."""
    text = os.pread(lock, 20, 0)
    return f" (process {text.decode()} by its own count); stop it, or choose another path" if text.isdigit() else ""
