"""The files of a store: whatever fsspec opens, other than the disk of this machine.

What always holds: a file is read by the very file system that listed it, so nothing of its address (host, user,
account, what it is packed in) is lost between the two. Whatever a store raises ends as an `OSError` with a reason,
after a few tries; and a file that was replaced while it was read is not pieced together from both.
"""

import contextlib
import dataclasses
import errno
import hashlib
import io
import os
import time
import typing
from collections.abc import Callable

import fsspec
from fsspec.asyn import AsyncFileSystem

from train.text import reason_of

_PAUSES_S = (0.5, 2.0)
_STAMPS = ("size", "ETag", "Content-MD5", "Digest", "Last-Modified")
_WEB = ("http", "https")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stored:
    """A file of a store."""

    system: typing.Any
    """The file system that listed it."""
    file: str
    """Its name there."""
    stamp: str
    """What the store tells of its content."""


def list_files(path: str, unreadable: Callable[[str, OSError], None]) -> list[tuple[str, str, Stored]]:
    """(name relative to `path`, address, file) of the file at an address, or of all below it that are not hidden.

    Args:
        path: An address, also a chain of them (`zip://texts::s3://bucket/all.zip`).
        unreadable: Told about a folder below it that cannot be listed: its address, and why.

    Raises:
        ValueError: there is none, or the store does not answer.
    """
    try:
        system, root = fsspec.core.url_to_fs(path)
        kind = _kind(system, root)
        files, refused = [root] if kind == "file" else [], []
        if kind == "directory":
            files, refused = _files_below(system, root)
        named = [(_relative(system, file, root), file) for file in files]
        named = sorted((entry for entry in named if not _is_hidden(entry[0])), key=lambda entry: _as_walked(entry[0]))
        stamps = [_patiently(lambda file=file: _stamp(system, file)) for _, file in named]
    except ImportError as error:
        raise ValueError(
            f"data.path={path!r} needs a package that is not installed ({error}); install it, or copy the data here"
        ) from error
    except Exception as error:  # each store raises its own kind
        raise ValueError(
            f"data.path={path!r} cannot be listed ({reason_of(error)}); correct the address or the credentials of this "
            "machine"
        ) from error
    for folder, error in refused:
        unreadable(_address(path, system, folder, root), error)
    if kind is None:
        raise ValueError(f"data.path={path!r} does not exist; correct the address")
    if not named:
        raise ValueError(f"data.path={path!r} is a folder without files that can be read; name another folder")
    return [
        (name, _address(path, system, file, root), Stored(system=system, file=file, stamp=stamp))
        for (name, file), stamp in zip(named, stamps, strict=True)
    ]


def _kind(system: typing.Any, root: str) -> str | None:
    """`file`, `directory`, or None where nothing is. A page of the web may be both, so its address decides."""
    if _is_web(system):
        there = _patiently(lambda: system.exists(root))
        return None if not there else "directory" if root.endswith("/") else "file"
    try:
        found = _patiently(lambda: system.info(root))
    except FileNotFoundError:
        return None
    return "directory" if found["type"] == "directory" else "file"


def _files_below(system: typing.Any, root: str) -> tuple[list[str], list[tuple[str, OSError]]]:
    """All files below a folder, and the folders that cannot be listed with the reason.

    fsspec's own search takes a folder that cannot be listed for an empty one.
    """
    if _lists_at_once(system):
        return _patiently(lambda: system.find(root)), []
    files, refused, folders, seen = [], [], [root], {root.rstrip("/")}
    while folders:
        folder = folders.pop()
        try:
            entries = _patiently(lambda folder=folder: system.ls(folder, detail=True))
        except OSError as error:
            if folder == root:
                raise
            refused.append((folder, error))
            continue
        for entry in entries:
            name = entry["name"].rstrip("/")
            if name in seen or _is_hidden(_relative(system, name, root)):
                continue
            seen.add(name)
            if entry["type"] == "directory":
                folders.append(entry["name"])
            else:
                files.append(entry["name"])
    return files, refused


def _lists_at_once(system: typing.Any) -> bool:
    """Whether the store has a search of its own: one listing of all keys, which fails as a whole."""
    kind = type(system)
    if isinstance(system, AsyncFileSystem):
        return kind._find is not AsyncFileSystem._find
    return kind.find is not fsspec.AbstractFileSystem.find


def _stamp(system: typing.Any, file: str) -> str:
    """What the store tells of the content; a web server's identity of a file is its address alone, so more is asked."""
    info = system.info(file)
    if "mtime" in info and "time" in info:  # of SFTP, when it was last read
        own = hashlib.sha256(str({name: info[name] for name in sorted(info) if name != "time"}).encode()).hexdigest()
    else:
        own = str(system.ukey(file))
    return " ".join([own, *(f"{name}={info[name]}" for name in _STAMPS if info.get(name))])


def _address(path: str, system: typing.Any, file: str, root: str) -> str:
    """The address of a file or folder below `path`, as its user would write it."""
    path = _without_query(system, path)
    if file == root:
        return path
    links = path.split("::")
    where = next(index for index, link in enumerate(links) if "://" in link)
    separator = "" if links[where].endswith("/") else "/"
    links[where] += separator + _relative(system, file, root)
    return "::".join(links)


def _relative(system: typing.Any, file: str, root: str) -> str:
    """The name of a file from the folder `root` on; of `root` itself, its last part."""
    file, root = _without_query(system, file), _without_query(system, root)
    inside = file.removeprefix(root.rstrip("/")).lstrip("/")
    return inside or file.rsplit("/", 1)[-1]


def _without_query(system: typing.Any, address: str) -> str:
    """What follows a question mark is no part of a name, and may be a signature."""
    return address.split("?")[0].split("#")[0] if _is_web(system) else address


def _is_web(system: typing.Any) -> bool:
    names = system.protocol if isinstance(system.protocol, tuple) else (system.protocol,)
    return any(name in _WEB for name in names)


def _as_walked(name: str) -> list[tuple[bool, str]]:
    """Puts names into the order of `train.text.walk`: the files of a folder before its subfolders."""
    *folders, file = name.split("/")
    return [*((True, folder) for folder in folders), (False, file)]


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in name.split("/"))


def _patiently[T](work: Callable[[], T]) -> T:
    """What `work` returns. What fails is tried twice more, unless the store says that it is not there or not allowed.

    Raises:
        FileNotFoundError: the store says so.
        OSError: it failed to the end, whatever it raised.
    """
    for pause in (*_PAUSES_S, None):
        try:
            return work()
        except (ImportError, FileNotFoundError):
            raise
        except Exception as error:  # each store raises its own kind
            if pause is None or isinstance(error, (PermissionError, Replaced)):
                raise OSError(errno.EIO, f"{type(error).__name__}: {reason_of(error)}") from error
            time.sleep(pause)
    raise AssertionError("the last try returns or raises")


class Replaced(Exception):
    """A file is not the one any more that was listed."""


class Remote(io.RawIOBase):
    """The bytes of a stored file; a read that fails is tried again from where it began, if the file is the same."""

    def __init__(self, stored: Stored):
        super().__init__()
        self._stored, self._file, self._position = stored, None, 0
        self._has_failed = False

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        begin = 0 if whence == os.SEEK_SET else self._position
        if whence == os.SEEK_END:
            begin = _patiently(lambda: self._opened().size)
            if begin is None:
                raise OSError(errno.ESPIPE, "its server does not say how long it is; copy it to this machine")
        self._position = begin + offset
        return self._position

    def readinto(self, buffer: typing.Any) -> int:
        content = _patiently(lambda: self._read(len(buffer)))
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)

    def close(self) -> None:
        self._drop()
        super().close()

    def _opened(self) -> typing.Any:
        if self._file is None:
            system, file = self._stored.system, self._stored.file
            if self._has_failed and self._position:
                system.invalidate_cache()
                if _stamp(system, file) != self._stored.stamp:
                    raise Replaced("it was replaced while it was read")
            self._file = system.open(file, "rb")
        return self._file

    def _read(self, size: int) -> bytes:
        try:
            file = self._opened()
            if file.tell() != self._position:
                file.seek(self._position)
            return file.read(size)
        except Exception:
            self._has_failed = True
            self._drop()
            raise

    def _drop(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(Exception):  # it has been read, or is of no use
                file.close()
