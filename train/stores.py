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
import urllib.parse
from collections.abc import Callable

import fsspec
from fsspec.archive import AbstractArchiveFileSystem
from fsspec.asyn import AsyncFileSystem

from train.text import reason_of

_PAUSES_S = (0.5, 2.0)
_WEB = ("http", "https")
# What tells of the content, the best first: a listing and a question about one file may know different ones.
_IDENTITIES = (
    "ETag", "etag", "generation", "md5Hash", "Content-MD5", "Digest", "blob_id", "sha", "CRC",
    "LastModified", "Last-Modified", "last_modified", "mtime", "modify", "updated",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stored:
    """A file of a store."""

    system: typing.Any
    """The file system that listed it."""
    file: str
    """Its name there."""
    stamp: str
    """What the store tells of its content."""

    @property
    def query(self) -> str:
        """Of the web, what follows the name in its address."""
        return self.file.removeprefix(_without_query(self.system, self.file))


def list_files(path: str, unreadable: Callable[[str, OSError], None]) -> list[tuple[str, str, Stored]]:
    """(name relative to `path`, address, file) of the file at an address, or of all below it that are not hidden.

    Args:
        path: An address, also a chain of them (`zip://texts::s3://bucket/all.zip`).
        unreadable: Told about what lies below it and cannot be looked into: its address, and why.

    Raises:
        ValueError: there is none, or the store does not answer.
    """
    try:
        system, root = fsspec.core.url_to_fs(path)
        kind, root = _kind(system, root, path)
        files, refused = [root] if kind == "file" else [], []
        if kind == "directory":
            files, refused = _files_below(system, root)
        found = _named(system, files, root, kind)
        stored = [_look(system, file, refused, is_only=kind == "file") for _, file in found]
    except ImportError as error:
        raise ValueError(
            f"data.path={path!r} needs a package that is not installed ({error}); install it, or copy the data here"
        ) from error
    except Exception as error:  # each store raises its own kind
        raise ValueError(
            f"data.path={path!r} cannot be listed ({reason_of(error)}); correct the address or the credentials of this "
            "machine"
        ) from error
    for place, error in refused:
        unreadable(_address(path, system, place, root), error)
    if kind is None:
        raise ValueError(f"data.path={path!r} does not exist; correct the address")
    if not any(stored):
        raise ValueError(f"data.path={path!r} is a folder without files that can be read; name another folder")
    named = zip(found, stored, strict=True)
    return [(name, _address(path, system, file, root), it) for (name, file), it in named if it is not None]


def _kind(system: typing.Any, root: str, path: str) -> tuple[str | None, str]:
    """(`file`, `directory` or None for nothing, what its files call it). A page of the web may be both: the address
    decides."""
    if _is_web(system):
        there = _patiently(lambda: system.exists(root))
        return (None if not there else "directory" if _without_query(system, path).endswith("/") else "file"), root
    try:
        found = _patiently(lambda: system.info(root))
    except FileNotFoundError:
        return None, root
    return ("directory", found["name"]) if found["type"] == "directory" else ("file", root)


def _files_below(system: typing.Any, root: str) -> tuple[list[str], list[tuple[str, OSError]]]:
    """All files below a folder, and the folders and links that cannot be followed with the reason.

    fsspec's own search takes a folder that cannot be listed for an empty one.
    """
    if _lists_at_once(system):
        return _patiently(lambda: system.find(root)), []
    files, refused, folders, seen = [], [], [root], set()
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
            name, is_folder = entry["name"].rstrip("/"), entry["type"] == "directory"
            if (name, is_folder) in seen or name == folder.rstrip("/"):
                continue
            seen.add((name, is_folder))
            if not is_folder:
                files.append(entry["name"])
            elif not _is_hidden(_relative(system, name, root)):
                folders.append(entry["name"])
    return files, refused


def _named(system: typing.Any, files: list[str], root: str, kind: str | None) -> list[tuple[str, str]]:
    """(name relative to `root`, file) of each that is not hidden, in the order of `train.text.walk`.

    Stores mark a folder by a file without a name, and pages of the web link themselves in other orders.
    """
    named: dict[str, str] = {}
    for file in files:
        name = _relative(system, file, root)
        if kind == "file" or (name and not _without_query(system, file).endswith("/") and not _is_hidden(name)):
            named.setdefault(name, file)
    return sorted(named.items(), key=lambda entry: _as_walked(entry[0]))


def _look(system: typing.Any, file: str, refused: list[tuple[str, OSError]], *, is_only: bool) -> Stored | None:
    """The file, with what is told of its content; None where that cannot be told, which is put into `refused`."""
    try:
        info = _patiently(lambda: system.info(file))
        if info["type"] == "directory":
            raise OSError(errno.EISDIR, "a link to a folder, which is not followed in a store")
        return Stored(system=system, file=file, stamp=_patiently(lambda: _stamp(system, file, info)))
    except OSError as error:
        if is_only:
            raise
        refused.append((file, error))
        return None


def _lists_at_once(system: typing.Any) -> bool:
    """Whether the store has a search of its own: one listing of all keys, which fails as a whole."""
    kind = type(_inner(system))
    if issubclass(kind, AsyncFileSystem):
        return kind._find is not AsyncFileSystem._find
    return kind.find is not fsspec.AbstractFileSystem.find


def _stamp(system: typing.Any, file: str, info: dict[str, typing.Any]) -> str:
    """What the store tells of the content: the best identity, and the size. An archive's own key is that of the process
    that reads it, and a web server's is the address alone."""
    for name in _IDENTITIES:
        if info.get(name):
            return f"size={info.get('size')} {name}={info[name]}"
    if isinstance(_inner(system), AbstractArchiveFileSystem):
        told = {name: info[name] for name in sorted(info)}
        return hashlib.sha256(str(told).encode("utf-8", "surrogateescape")).hexdigest()
    return f"size={info.get('size')} {system.ukey(file)}"


def _inner(system: typing.Any) -> typing.Any:
    """The file system behind a cache or a folder of another."""
    while isinstance(inner := getattr(system, "fs", None), fsspec.AbstractFileSystem):
        system = inner
    return system


def _address(path: str, system: typing.Any, file: str, root: str) -> str:
    """The address of a file or folder below `path`, as its user would write it."""
    path = _without_query(system, path)
    if file == root:
        return path
    links, name = path.split("::"), _relative(system, file, root)
    for index, link in enumerate(links):
        if "://" in link:
            links[index] += name if link.endswith("/") else f"/{name}"
            break
        if issubclass(fsspec.get_filesystem_class(link), AbstractArchiveFileSystem):
            links[index] = f"{link}://{name}"
            break
    return "::".join(links)


def _relative(system: typing.Any, file: str, root: str) -> str:
    """The name of a file from the folder `root` on; of `root` itself, its last part."""
    file, base = _without_query(system, file), _without_query(system, root)
    inside = file.rsplit("/", 1)[-1] if file == base else file.removeprefix(base.rstrip("/"))
    name = "/".join(part for part in inside.split("/") if part not in ("", "."))
    return urllib.parse.unquote(name) if _is_web(system) else name


def _without_query(system: typing.Any, address: str) -> str:
    """What follows a question mark is no part of a name, and may be a signature."""
    return address.split("?")[0].split("#")[0] if _is_web(system) else address


def _is_web(system: typing.Any) -> bool:
    names = _inner(system).protocol
    return any(name in _WEB for name in ((names,) if isinstance(names, str) else names))


def _as_walked(name: str) -> list[tuple[bool, str]]:
    """Puts names into that order: the files of a folder before its subfolders."""
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
            begin = _patiently(self._size)
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

    def _size(self) -> int | None:
        size = getattr(self._opened(), "size", None)  # a cached copy does not say
        return self._stored.system.info(self._stored.file).get("size") if size is None else size

    def _opened(self) -> typing.Any:
        if self._file is None:
            system, file = self._stored.system, self._stored.file
            if self._has_failed and self._position:
                system.invalidate_cache()
                if _stamp(system, file, system.info(file)) != self._stored.stamp:
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
