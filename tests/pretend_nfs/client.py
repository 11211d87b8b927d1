"""One client of the file server: what it believes without asking, and what it asks.

Linux's NFS client is the model, version 3 above all: attributes are believed for a while, which grows as long as they
stay the same; names, also missing ones, and listings as long as their folder's mtime looks the same; contents as long
as the file's mtime and size do. One's own change drops the listing. A file that this client has open is renamed when it
is removed here; one that another client has removed is stale.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import stat
import struct
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from . import protocol
from .faults import CHANGES, Fault, Faults
from .protocol import Op

SMALL = 1 << 16
"""Contents of so many bytes are kept."""
Caller = tuple[int, int, int]
"""User, group and thread of a request."""
STARTS = {Op.LOOKUP: 0, Op.CREATE: 16, Op.LINK: 8, Op.RENAME: 8, Op.RENAME2: 16, Op.UNLINK: 0, Op.MKDIR: 8}
"""Where the names begin in requests that have some."""
EXCLUSIVE: dict[str, dict[str, Any]] = {
    "x86_64": {"open": (2, 1), "openat": (257, 2), "others": {82, 83, 86, 88, 133, 258, 259, 264, 265, 266, 316}},
    "aarch64": {"open": (-1, 1), "openat": (56, 2), "others": {33, 34, 36, 37, 38, 276}},
}
"""System calls that make a name: a client asks its server for them, whatever it believes."""


@dataclass(frozen=True)
class Behaviour:
    """How a client is mounted.

    Attributes are believed for `ac_min_s` at first and `ac_max_s` at most. `names` and `listings` say whether those are
    kept; `contents` the same of small files. `close_to_open`: attributes are asked for whenever a file is opened.
    `tick_s` is the resolution of the server's times, which are `skew_s` ahead of this machine's. `maps`: the kernel
    keeps the pages of a file until that is opened again, so that it can be mapped into memory.
    """

    ac_min_s: float = 0.5
    ac_max_s: float = 3.0
    names: bool = True
    listings: bool = True
    contents: bool = True
    close_to_open: bool = True
    tick_s: float = 0.01
    skew_s: float = 0.0
    maps: bool = False

    to_json = asdict


@dataclass
class Node:
    """A file or a folder that the kernel knows by a number, and what is believed of it."""

    number: int
    fd: int
    path: str
    lookups: int = 0
    is_stale: bool = False
    found: os.stat_result | None = None
    until: float = 0.0
    span_s: float = 0.0
    names: dict[str, tuple[int, int]] = field(default_factory=dict)
    listing: list[tuple[int, str, int]] | None = None
    listed_at: int = -1
    content: bytes | None = None
    content_of: tuple[int, int] = (-1, -1)
    n_open: int = 0
    renamed_to: str | None = None
    parent: Node | None = None


@dataclass
class Opened:
    """A file or a folder that is open."""

    node: Node
    fd: int
    listing: list[tuple[int, str, int]] | None = None


class Client:
    """Answers the kernel's requests for one mount, out of `folder`."""

    def __init__(self, folder: Path, behaviour: Behaviour, faults: Faults) -> None:
        self.behaviour, self.faults = behaviour, faults
        root = Node(protocol.ROOT, os.open(folder, os.O_PATH | os.O_DIRECTORY), "", lookups=1)
        self._nodes = {protocol.ROOT: root}
        self._numbers: dict[tuple[int, int], int] = {}
        self._opened: dict[int, Opened] = {}
        self._last = protocol.ROOT
        self._tick_ns = round(behaviour.tick_s * 1e9) or 1
        self._skew_ns = round(behaviour.skew_s * 1e9)
        self._calls = EXCLUSIVE.get(platform.machine())

    def serve(self, fd: int) -> None:
        """Answer what comes from /dev/fuse until the mount is gone."""
        while True:
            try:
                message = os.read(fd, protocol.BUFFER_SIZE)
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):
                    continue  # the request was interrupted before it was read
                if error.errno == errno.ENODEV:
                    return
                raise
            answer = self.answer(message)
            if answer is not None:
                with contextlib.suppress(FileNotFoundError):  # the process that asked is dead
                    os.write(fd, answer)

    def answer(self, message: bytes) -> bytes | None:
        """The answer to one request; None where none is expected."""
        _, code, unique, number, uid, gid, pid, _ = protocol.IN_HEADER.unpack_from(message)
        body = message[protocol.IN_HEADER.size :]
        if code in (Op.FORGET, Op.BATCH_FORGET, Op.INTERRUPT):
            self._forget(code, number, body)
            return None
        failed, parts = 0, b""
        try:
            parts = self._do(code, number, body, (uid, gid, pid))
        except Fault as fault:
            failed = fault.number
        except OSError as error:
            failed = error.errno or errno.EIO
        if failed:
            parts = b""
        return protocol.OUT_HEADER.pack(protocol.OUT_HEADER.size + len(parts), -failed, unique) + parts

    def _do(self, code: int, number: int, body: bytes, who: Caller) -> bytes:
        try:
            op = Op(code)
        except ValueError:
            raise OSError(errno.ENOSYS, "no such request") from None
        if op is Op.INIT:
            return self._init(body)
        if op is Op.DESTROY:
            return b""
        node = self._nodes[number]
        handle = getattr(self, f"_{op.name.lower()}")
        fault = None
        # The mounted folder itself is always there: commands are started in it.
        if op not in (Op.RELEASE, Op.RELEASEDIR) and (op, number) != (Op.GETATTR, protocol.ROOT):
            is_exclusive = op is Op.CREATE and bool(struct.unpack_from("<I", body)[0] & os.O_EXCL)
            fault = self.faults.draw(op, number, self._told(op, node, body), is_exclusive=is_exclusive)
        if fault and not fault.is_done:
            raise fault
        try:
            answer: bytes = handle(node, body, who)
        except OSError:
            if op in CHANGES:  # what was believed of the names cannot be right
                for name in protocol.names(body[STARTS[op] :]):
                    node.names.pop(name, None)
            raise
        if fault:
            self._undo(op, answer)
            raise fault
        return answer

    def _undo(self, op: Op, answer: bytes) -> None:
        """Forget what the kernel would have kept, had it heard of it."""
        if op in (Op.CREATE, Op.LINK, Op.MKDIR):
            self._forget_one(protocol.ENTRY.unpack_from(answer)[0], 1)
        if op is Op.CREATE:
            self._close(protocol.OPENED.unpack_from(answer, protocol.ENTRY.size + protocol.ATTRIBUTES.size)[0])

    @staticmethod
    def _told(op: Op, node: Node, body: bytes) -> str:
        if op not in STARTS:
            return node.path
        return "/".join([node.path, *protocol.names(body[STARTS[op] :])]).lstrip("/")

    def _init(self, body: bytes) -> bytes:
        major, minor, readahead, _ = struct.unpack_from("<IIII", body)
        assert major == 7
        return protocol.INIT_OUT.pack(7, min(minor, 31), readahead, 1 << 5, 16, 12, protocol.MAX_WRITE, 1, 0, 0, 0)

    # What is believed

    def _ticked(self, time_ns: int) -> int:
        return time_ns // self._tick_ns * self._tick_ns

    def _ask(self, node: Node) -> os.stat_result:
        """The attributes of a node, asked of the server."""
        found = os.fstat(node.fd)
        if not found.st_nlink:
            node.is_stale, node.found, node.content = True, None, None
            raise OSError(errno.ESTALE, "another client has removed it")
        before, node.found = node.found, found
        same = before is not None and self._version(before) == self._version(found)
        node.span_s = min(2 * node.span_s, self.behaviour.ac_max_s) if same else self.behaviour.ac_min_s
        node.until = time.monotonic() + node.span_s
        return found

    def _believe(self, node: Node) -> os.stat_result:
        """The attributes of a node, from memory where they are fresh enough."""
        if node.found is not None and time.monotonic() < node.until and not node.is_stale:
            return node.found
        return self._ask(node)

    def _version(self, found: os.stat_result) -> tuple[int, int]:
        return self._ticked(found.st_mtime_ns), 0 if protocol.is_folder(found) else found.st_size

    def _seen_mtime(self, node: Node, *, ask: bool = False) -> int:
        return self._version(self._ask(node) if ask else self._believe(node))[0]

    def _changed(self, folder: Node, name: str, number: int) -> None:
        """Take note of this client's own change of a folder: the name now stands for `number`, 0 is nothing."""
        folder.listing = None
        with contextlib.suppress(OSError):
            self._keep_name(folder, name, number, self._seen_mtime(folder, ask=True))

    def _keep_name(self, folder: Node, name: str, number: int, seen: int) -> None:
        if self.behaviour.names:
            folder.names[name] = (number, seen)

    def _believed_name(self, folder: Node, name: str, pid: int) -> int | None:
        """The number that a name stands for, 0 for nothing; None if the server must be asked."""
        if name not in folder.names:
            return None
        number, seen = folder.names[name]
        node = self._nodes.get(number)
        is_known = node is not None and not node.is_stale if number else True
        if not is_known or seen != self._seen_mtime(folder) or (number and self._is_exclusive(pid)):
            del folder.names[name]
            return None
        return number

    def _is_exclusive(self, pid: int) -> bool:
        """Whether a thread is in a system call that makes a name, so that its client looks again."""
        if self._calls is None:
            return True
        for _ in range(5):
            try:
                words = Path(f"/proc/{pid}/syscall").read_text().split()
            except OSError:
                return True
            if words[0] != "running":
                break
            time.sleep(0.0001)
        else:
            return True
        call = int(words[0])
        for name in ("open", "openat"):
            wanted, place = self._calls[name]
            if call == wanted:
                return bool(int(words[1 + place], 16) & os.O_EXCL)
        return call in self._calls["others"]

    # Nodes

    def _node_of(self, folder: Node, name: str) -> Node:
        """What lies under a name at the server."""
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=folder.fd)
        found = os.fstat(fd)
        key = (found.st_dev, found.st_ino)
        number = self._numbers.get(key)
        path = f"{folder.path}/{name}".lstrip("/")
        if number is not None and number in self._nodes:
            os.close(fd)
            node = self._nodes[number]
            node.path = path
            return node
        self._last += 1
        self._numbers[key] = self._last
        self._nodes[self._last] = node = Node(self._last, fd, path)
        return node

    def _forget(self, code: int, number: int, body: bytes) -> None:
        if code == Op.FORGET:
            self._forget_one(number, struct.unpack_from("<Q", body)[0])
        elif code == Op.BATCH_FORGET:
            (count,) = struct.unpack_from("<I", body)
            for place in range(count):
                self._forget_one(*struct.unpack_from("<QQ", body, 8 + 16 * place))

    def _forget_one(self, number: int, count: int) -> None:
        node = self._nodes.get(number)
        if node is None or number == protocol.ROOT:
            return
        node.lookups -= count
        if node.lookups <= 0:
            found = os.fstat(node.fd)
            self._numbers.pop((found.st_dev, found.st_ino), None)
            del self._nodes[number]
            os.close(node.fd)

    def _attributes(self, found: os.stat_result) -> bytes:
        mtime, ctime = (self._ticked(ns) + self._skew_ns for ns in (found.st_mtime_ns, found.st_ctime_ns))
        return protocol.attributes(found, mtime, ctime)

    def _entry(self, node: Node) -> bytes:
        attributes = self._attributes(self._believe(node))
        node.lookups += 1
        return protocol.ENTRY.pack(node.number, 0, 0, 0, 0, 0) + attributes

    # Names

    def _lookup(self, folder: Node, body: bytes, who: Caller) -> bytes:
        [name] = protocol.names(body)
        number = self._believed_name(folder, name, who[2])
        if number:
            try:
                return self._entry(self._nodes[number])
            except OSError as error:
                if error.errno != errno.ESTALE:
                    raise
        elif number == 0:
            raise FileNotFoundError(errno.ENOENT, "believed to be missing")
        # The folder's attributes come with the answer; asked for first, so that they are not newer than that.
        seen = self._seen_mtime(folder, ask=True)
        try:
            node = self._node_of(folder, name)
        except FileNotFoundError:
            self._keep_name(folder, name, 0, seen)
            raise
        self._ask(node)
        self._keep_name(folder, name, node.number, seen)
        return self._entry(node)

    def _made(self, folder: Node, name: str, who: Caller) -> bytes:
        """The entry of what this client has just made."""
        os.chown(name, who[0], who[1], dir_fd=folder.fd, follow_symlinks=False)
        node = self._node_of(folder, name)
        self._ask(node)
        self._changed(folder, name, node.number)
        return self._entry(node)

    def _mkdir(self, folder: Node, body: bytes, who: Caller) -> bytes:
        mode, umask = struct.unpack_from("<II", body)
        [name] = protocol.names(body[8:])
        os.mkdir(name, mode & ~umask, dir_fd=folder.fd)
        return self._made(folder, name, who)

    def _mknod(self, folder: Node, body: bytes, who: Caller) -> bytes:
        mode, device, umask = struct.unpack_from("<III", body)
        [name] = protocol.names(body[16:])
        os.mknod(name, mode & ~umask if not stat.S_ISREG(mode) else mode, device, dir_fd=folder.fd)
        return self._made(folder, name, who)

    def _symlink(self, folder: Node, body: bytes, who: Caller) -> bytes:
        name, target = protocol.names(body)
        os.symlink(target, name, dir_fd=folder.fd)
        return self._made(folder, name, who)

    def _readlink(self, node: Node, body: bytes, who: Caller) -> bytes:
        return os.fsencode(os.readlink("", dir_fd=node.fd))

    def _link(self, folder: Node, body: bytes, who: Caller) -> bytes:
        (number,) = struct.unpack_from("<Q", body)
        [name] = protocol.names(body[8:])
        node = self._nodes[number]
        self._ask(node)
        os.link(f"/proc/self/fd/{node.fd}", name, dst_dir_fd=folder.fd, follow_symlinks=True)
        node.until = 0.0
        self._changed(folder, name, node.number)
        return self._entry(node)

    def _unlink(self, folder: Node, body: bytes, who: Caller) -> bytes:
        [name] = protocol.names(body)
        if not self._keep_open(folder, name):
            os.unlink(name, dir_fd=folder.fd)
        self._changed(folder, name, 0)
        return b""

    def _rmdir(self, folder: Node, body: bytes, who: Caller) -> bytes:
        [name] = protocol.names(body)
        os.rmdir(name, dir_fd=folder.fd)
        self._changed(folder, name, 0)
        return b""

    def _keep_open(self, folder: Node, name: str) -> bool:
        """Rename a file that is about to vanish, if this client has it open; whether it was."""
        found = os.stat(name, dir_fd=folder.fd, follow_symlinks=False)
        number = self._numbers.get((found.st_dev, found.st_ino))
        node = self._nodes.get(number) if number else None
        if node is None or not node.n_open or found.st_nlink > 1:
            return False
        node.renamed_to, node.parent = f".nfs{found.st_ino:016x}{node.number:08x}", folder
        os.rename(name, node.renamed_to, src_dir_fd=folder.fd, dst_dir_fd=folder.fd)
        return True

    def _rename(self, folder: Node, body: bytes, who: Caller, start: int = 8) -> bytes:
        (number,) = struct.unpack_from("<Q", body)
        source, target = protocol.names(body[start:])
        other = self._nodes[number]
        with contextlib.suppress(FileNotFoundError):
            self._keep_open(other, target)
        os.rename(source, target, src_dir_fd=folder.fd, dst_dir_fd=other.fd)
        node = self._node_of(other, target)
        self._changed(folder, source, 0)
        self._changed(other, target, node.number)
        if not node.lookups:
            del other.names[target]
            node.lookups = 1
            self._forget_one(node.number, 1)
        return b""

    def _rename2(self, folder: Node, body: bytes, who: Caller) -> bytes:
        if struct.unpack_from("<QI", body)[1]:
            raise OSError(errno.EINVAL, "NFS has no such flags")
        return self._rename(folder, body, who, start=16)

    # Attributes

    def _getattr(self, node: Node, body: bytes, who: Caller) -> bytes:
        return protocol.ATTRIBUTES_OUT.pack(0, 0, 0) + self._attributes(self._believe(node))

    def _setattr(self, node: Node, body: bytes, who: Caller) -> bytes:
        fields = protocol.SETATTR_IN.unpack_from(body)
        valid, size, mode, uid, gid = fields[0], fields[3], fields[11], fields[13], fields[14]
        path = f"/proc/self/fd/{node.fd}"
        self._ask(node)
        if valid & 1:
            os.chmod(path, stat.S_IMODE(mode))  # noqa: PTH101
        if valid & 6:
            os.chown(path, uid if valid & 2 else -1, gid if valid & 4 else -1)
        if valid & 8:
            os.truncate(path, size)
            node.content = None
        if valid & 48:
            found = os.fstat(node.fd)
            now = time.time_ns()
            given = {4: fields[5] * 10**9 + fields[8], 5: fields[6] * 10**9 + fields[9]}
            before = {4: found.st_atime_ns, 5: found.st_mtime_ns}
            chosen = [
                before[bit] if not valid & 1 << bit else now if valid & 1 << bit + 3 else given[bit] for bit in (4, 5)
            ]
            os.utime(path, ns=(chosen[0], chosen[1]))
        self._ask(node)
        return self._getattr(node, body, who)

    # Files

    def _open(self, node: Node, body: bytes, who: Caller) -> bytes:
        (flags,) = struct.unpack_from("<I", body)
        if self.behaviour.close_to_open:
            self._ask(node)
        return self._handle(node, os.open(f"/proc/self/fd/{node.fd}", flags & (os.O_ACCMODE | os.O_TRUNC)))

    def _handle(self, node: Node, fd: int) -> bytes:
        self._opened[fd] = Opened(node, fd)
        node.n_open += 1
        return protocol.OPENED.pack(fd, 0 if self.behaviour.maps else protocol.DIRECT_IO, 0)

    def _create(self, folder: Node, body: bytes, who: Caller) -> bytes:
        flags, mode, umask = struct.unpack_from("<III", body)
        [name] = protocol.names(body[16:])
        kept = flags & (os.O_ACCMODE | os.O_EXCL | os.O_TRUNC) | os.O_CREAT | os.O_NOFOLLOW
        is_new = bool(flags & os.O_EXCL) or not os.path.lexists(f"/proc/self/fd/{folder.fd}/{name}")
        fd = os.open(name, kept, stat.S_IMODE(mode) & ~umask, dir_fd=folder.fd)
        if is_new:
            os.fchown(fd, who[0], who[1])
        node = self._node_of(folder, name)
        self._ask(node)
        self._changed(folder, name, node.number)
        return self._entry(node) + self._handle(node, fd)

    def _read(self, node: Node, body: bytes, who: Caller) -> bytes:
        fd, offset, size = protocol.READ_IN.unpack_from(body)
        version = self._version(self._believe(node))
        if node.content is not None and node.content_of == version:
            return node.content[offset : offset + size]
        found = self._ask(node)
        if self.behaviour.contents and found.st_size <= SMALL:
            node.content, node.content_of = os.pread(fd, SMALL + 1, 0)[: found.st_size], self._version(found)
            return node.content[offset : offset + size]
        return os.pread(fd, size, offset)

    def _write(self, node: Node, body: bytes, who: Caller) -> bytes:
        fd, offset, size, *_ = protocol.WRITE_IN.unpack_from(body)
        self._ask(node)
        written = os.pwrite(fd, body[protocol.WRITE_IN.size :][:size], offset)
        node.content, node.until = None, 0.0
        return struct.pack("<II", written, 0)

    def _flush(self, node: Node, body: bytes, who: Caller) -> bytes:
        return b""

    def _fsync(self, node: Node, body: bytes, who: Caller) -> bytes:
        self._ask(node)
        return b""  # the server is a folder of this machine, which does not lose its power here

    _fsyncdir = _fsync

    def _release(self, node: Node, body: bytes, who: Caller) -> bytes:
        self._close(struct.unpack_from("<Q", body)[0])
        return b""

    def _close(self, fd: int) -> None:
        opened = self._opened.pop(fd)
        node = opened.node
        os.close(opened.fd)
        node.n_open -= 1
        if node.renamed_to and node.parent and not node.n_open:
            with contextlib.suppress(OSError):
                os.unlink(node.renamed_to, dir_fd=node.parent.fd)
            node.parent.listing, node.renamed_to = None, None

    # Folders

    def _opendir(self, node: Node, body: bytes, who: Caller) -> bytes:
        fd = os.open(f"/proc/self/fd/{node.fd}", os.O_RDONLY | os.O_DIRECTORY)
        self._opened[fd] = Opened(node, fd)
        return protocol.OPENED.pack(fd, 0, 0)

    def _readdir(self, node: Node, body: bytes, who: Caller) -> bytes:
        fd, offset, size = protocol.READ_IN.unpack_from(body)
        opened = self._opened[fd]
        if offset == 0 or opened.listing is None:
            opened.listing = self._listing(node)
        answer = b""
        for place, (number, name, kind) in enumerate(opened.listing[offset:], offset + 1):
            entry = protocol.dirent(number, name, place, kind)
            if len(answer) + len(entry) > size:
                break
            answer += entry
        return answer

    def _listing(self, node: Node) -> list[tuple[int, str, int]]:
        if node.listing is not None and self.behaviour.listings and node.listed_at == self._seen_mtime(node):
            return node.listing
        seen = self._seen_mtime(node, ask=True)
        found = []
        with os.scandir(f"/proc/self/fd/{node.fd}") as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    found.append((entry.inode(), entry.name, entry.stat(follow_symlinks=False).st_mode))
        for _, name, _ in found:
            if node.names.get(name, (1, 0))[0] == 0:
                del node.names[name]  # READDIRPLUS brings what the names stand for
        node.listing, node.listed_at = found, seen
        return found

    def _releasedir(self, node: Node, body: bytes, who: Caller) -> bytes:
        (fd,) = struct.unpack_from("<Q", body)
        os.close(self._opened.pop(fd).fd)
        return b""

    def _statfs(self, node: Node, body: bytes, who: Caller) -> bytes:
        free = os.statvfs(f"/proc/self/fd/{node.fd}")
        counts = (free.f_blocks, free.f_bfree, free.f_bavail, free.f_files, free.f_ffree)
        return struct.pack("<QQQQQIII28x", *counts, free.f_bsize, 255, free.f_frsize)
