"""Open files of one directory, shared by threads and bounded in number.

Why it exists: a descriptor is a number, and the system gives the same number out again at once. A thread that reads by
a number which another thread has closed reads a stranger's file. Here a number is given back only by its last user.

    open --dropped | pushed out | forgotten | closed--> retired --last user gone--> closed

Laws: what was dropped is never handed out again. The lock of the directory is released last of all, so no other process
begins while something of ours is still under way. No file is opened or closed under the lock: both may take seconds on
a network.
Limits: `most` files stay open besides those in use.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Final


class Opened:
    """An open file and how many use it now."""

    __slots__ = ("fd", "key", "retired", "users")

    def __init__(self, fd: int, key: tuple[int, bool]) -> None:
        self.fd, self.key, self.users, self.retired = fd, key, 0, False


class Descriptors:
    """Descriptors by (segment, opened for writing?); any thread."""

    def __init__(self, lock_fd: int, most: int) -> None:
        """Takes `lock_fd` over: it is closed when all others are."""
        self._most: Final = most
        self._lock: Final = threading.Lock()
        self._open: OrderedDict[tuple[int, bool], Opened] = OrderedDict()
        self._lock_fd = lock_fd
        self._users = 0
        self._drops = 0
        self._closed = False

    def borrow(self, segment: int, writing: bool, open_file: Callable[[], int]) -> Opened:
        """An open file; `give_back` it. OSError of `open_file` comes out, EBADF after `close`."""
        key = segment, writing
        with self._lock:
            found = self._known(key)
            if found is not None:
                return found
            drops = self._drops
        fd = open_file()
        with self._lock:
            try:
                found = self._known(key)
            except OSError:
                found = None
                spare = [fd]
            else:
                spare = [fd] if found is not None else []
            if not spare:
                found = self._take(Opened(fd, key))
                if self._drops == drops:
                    self._open[key] = found
                    spare = self._push_out()
                else:
                    found.retired = True  # its file was perhaps removed while we opened it: good for this once
        _close(spare)
        if found is None:
            raise OSError(errno.EBADF, "the directory is closed")
        return found

    def give_back(self, opened: Opened) -> None:
        """Ends one use."""
        with self._lock:
            opened.users -= 1
            self._users -= 1
            fds = [opened.fd] if opened.retired and opened.users == 0 else []
            fds += self._lock_if_last()
        _close(fds)

    def forget(self, opened: Opened) -> None:
        """The next `borrow` opens this file anew."""
        with self._lock:
            if self._open.get(opened.key) is opened:
                del self._open[opened.key]
                opened.retired = True  # the caller still uses it and closes it by giving it back

    def drop(self, segment: int) -> None:
        """The segment's file is about to be removed."""
        with self._lock:
            self._drops += 1
            fds = self._retire([(segment, False), (segment, True)])
        _close(fds)

    def lock_is_alive(self) -> bool:
        """Does the file system that holds the directory's lock still answer? True after `close`."""
        with self._lock:
            fd = self._lock_fd
        try:
            os.fstat(fd)
        except OSError as error:
            return error.errno == errno.EBADF
        return True

    def begin_anew(self, lock_fd: int) -> None:
        """None of the files that are open may be used any more; `lock_fd` takes the lock's place."""
        with self._lock:
            self._drops += 1
            fds = [*self._retire(list(self._open)), self._lock_fd]
            self._lock_fd = lock_fd
            fds += self._lock_if_last()
        _close(fds)

    def close(self) -> None:
        """Nothing is opened any more; repeatable."""
        with self._lock:
            self._closed = True
            fds = self._retire(list(self._open)) + self._lock_if_last()
        _close(fds)

    def count(self) -> int:
        """Files that are kept open."""
        return len(self._open)

    # -- under the lock ------------------------------------------------------------------------------------------

    def _known(self, key: tuple[int, bool]) -> Opened | None:
        if self._closed:
            raise OSError(errno.EBADF, "the directory is closed")
        found = self._open.get(key)
        if found is None:
            return None
        self._open.move_to_end(key)
        return self._take(found)

    def _take(self, opened: Opened) -> Opened:
        opened.users += 1
        self._users += 1
        return opened

    def _push_out(self) -> list[int]:
        return self._retire([next(iter(self._open))]) if len(self._open) > self._most else []

    def _retire(self, keys: list[tuple[int, bool]]) -> list[int]:
        """Takes files out and returns the descriptors that nobody uses."""
        fds: list[int] = []
        for key in keys:
            opened = self._open.pop(key, None)
            if opened is not None:
                opened.retired = True
                if opened.users == 0:
                    fds.append(opened.fd)
        return fds

    def _lock_if_last(self) -> list[int]:
        if not self._closed or self._users or self._lock_fd < 0:
            return []
        fd, self._lock_fd = self._lock_fd, -1
        return [fd]


def _close(fds: list[int]) -> None:
    for fd in fds:
        try:
            os.close(fd)
        except OSError:
            pass  # the descriptor is gone all the same; what was to be durable, a sync has told
