"""The files of a source: which there are, in which order, and their bytes, on a disk or at an fsspec address.

What always holds: the same folder has the same files under the same names in the same order wherever it lies, and a
file that changes has another stamp. Whatever a store raises ends as an `OSError` with a reason, after a few tries.
"""

import contextlib
import dataclasses
import errno
import functools
import gzip
import io
import json
import os
import stat
import time
import typing
import zlib
from collections.abc import Callable, Generator
from pathlib import Path

import fsspec
import zstandard

from train.config import OnError
from train.text import MAKE_READABLE, unreadable, walk

CHUNK = 2**20
DECOMPRESSION_ERRORS = (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError)
"""What a compressed file raises that is damaged."""

_COMPRESSED = (".gz", ".zst")
_KINDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".array_record": "array_record",
    ".arrayrecord": "array_record",
}
_LONGEST_LINE = 2**24
_LARGEST_WINDOW = 2**31
_PAUSES_S = (0.5, 2.0)
_STAMPS = ("size", "ETag", "Content-MD5", "Digest", "Last-Modified")
_LOCAL_SCHEMES = ("file", "local")


@dataclasses.dataclass(kw_only=True)
class Damage:
    """What is done about something that cannot be read, and what was passed over so far."""

    on_error: OnError
    skipped: list[str] = dataclasses.field(default_factory=list)
    """A line for everything that was passed over: the file, where in it, and why."""

    def found(self, what: str, fix: str = "mend or remove it") -> None:
        """Count it, or raise.

        Raises:
            ValueError: `on_error` is not "skip".
        """
        if self.on_error != "skip":
            raise ValueError(f"{what}; {fix}, or count and pass over what is damaged with --data.on-error skip")
        self.skipped.append(what)

    def unreadable(self, file: str, error: OSError, where: str = "") -> None:
        """`found` for a file, or its rest, that the disk or the store does not give."""
        self.found(unreadable(file, error, where), MAKE_READABLE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One file of a source."""

    name: str
    """Relative to the source, with slashes."""
    path: str
    """Where it is: a path of this machine, or an address that fsspec opens."""
    is_local: bool
    stamp: str
    """Changes when the file does: size and time of change, or what the remote store tells."""

    @functools.cached_property
    def kind(self) -> str:
        """text, jsonl, parquet or array_record: by the name, but for `*.json`, which is looked into."""
        base, extension = os.path.splitext(self.name.lower())
        if extension in _COMPRESSED:
            extension = os.path.splitext(base)[1]
        if extension == ".json":
            return "jsonl" if self._has_json_lines() else "text"
        return _KINDS.get(extension, "text")

    @property
    def compression(self) -> str:
        """`.gz`, `.zst`, or the empty string."""
        extension = os.path.splitext(self.name.lower())[1]
        return extension if extension in _COMPRESSED else ""

    @property
    def real_path(self) -> str:
        """The same for every name that the file goes by."""
        return os.path.realpath(self.path) if self.is_local else self.path

    @contextlib.contextmanager
    def open(self) -> Generator[typing.Any]:
        """Its bytes, decompressed; a binary stream."""
        with Path(self.path).open("rb") if self.is_local else io.BufferedReader(_Remote(self.path), CHUNK) as raw:
            if self.compression == ".gz":
                yield gzip.GzipFile(fileobj=raw)
            elif self.compression == ".zst":
                yield io.BufferedReader(_ZstdFile(raw), CHUNK)
            else:
                yield raw

    def _has_json_lines(self) -> bool:
        """Whether the first two lines that are not empty are JSON objects."""
        try:
            with self.open() as stream:
                for _ in range(2):
                    line = b"\n"
                    while line.isspace():
                        line = stream.readline(_LONGEST_LINE)
                    if not isinstance(json.loads(line), dict):
                        return False
        except (*DECOMPRESSION_ERRORS, ValueError, RecursionError):
            return False
        except OSError:  # reading it as lines will say so
            return True
        return True


def list_files(path: str, damage: Damage | None = None) -> list[SourceFile]:
    """The file `path`, or every file in the folder `path` and below; the files of a folder before its subfolders.

    Names that start with a dot and `__pycache__` folders are left out, as tools do. On this machine links are
    followed, and a file or folder with several names is listed once, under the first.

    Args:
        path: A path or an address.
        damage: Told about files and subfolders that are there and cannot be read; None: that is an error.

    Raises:
        ValueError: there is none, or one cannot be read and `damage` does not skip it.
    """
    damage = damage or Damage(on_error="raise")
    if "://" in path and path.split("://")[0] not in _LOCAL_SCHEMES:
        return _list_remote(path)
    if "://" in path:
        path = fsspec.core.url_to_fs(path)[1]
    root = Path(path).expanduser()
    try:
        is_folder = stat.S_ISDIR(os.stat(root if path.strip() else "").st_mode)
        if is_folder:
            os.listdir(root)
    except FileNotFoundError as error:
        raise ValueError(
            f"data.path={path!r} does not exist; give a text file or a folder of text files, or leave data.path out to "
            "train on Python's own sources"
        ) from error
    except OSError as error:
        raise ValueError(f"{unreadable(path, error)}; {MAKE_READABLE}") from error
    found: typing.Iterable[tuple[str, Path]] = [(root.name, root)]
    if is_folder:
        found = walk(
            root,
            frozenset({"__pycache__"}),
            skip_hidden=True,
            refuse=lambda error: damage.unreadable(str(error.filename), error),
        )
    files = []
    for name, file in found:
        stamp = _stamp(file, damage)
        if stamp is not None:
            files.append(SourceFile(name=name, path=str(file), is_local=True, stamp=stamp))
    if not files and damage.skipped:
        raise ValueError(f"data.path={path!r} has nothing that can be read, first: {damage.skipped[0]}; mend it")
    if not files:
        raise ValueError(f"data.path={path!r} is a folder without files; put text files into it or name another folder")
    return files


def reason_of(error: BaseException) -> str:
    """The first line of what an error says."""
    return (getattr(error, "strerror", None) or str(error).strip() or type(error).__name__).split("\n")[0][:300]


def _stamp(file: Path, damage: Damage) -> str | None:
    """Size and time of change; None for what is passed over."""
    try:
        status = file.stat()
    except OSError as error:
        damage.unreadable(str(file), error)
        return None
    if not stat.S_ISREG(status.st_mode):  # to open a pipe would wait for ever
        damage.found(f"{str(file)!r} is not a regular file", "leave it out of data.path")
        return None
    return f"{status.st_size} {status.st_mtime_ns}"


def _list_remote(path: str) -> list[SourceFile]:
    """The files at an fsspec address."""
    try:
        system, root = fsspec.core.url_to_fs(path)
        exists, found = _patiently(lambda: _find(system, root))
        kept = sorted((_as_walked(_relative(file, root)), file) for file in found)
        stamps = [_patiently(lambda file=file: _remote_stamp(system, file)) for _, file in kept]
    except ImportError as error:
        raise ValueError(
            f"data.path={path!r} needs a package that is not installed ({error}); install it, or copy the data here"
        ) from error
    except Exception as error:  # each store raises its own kind
        raise ValueError(
            f"data.path={path!r} cannot be listed ({reason_of(error)}); correct the address or the credentials of this "
            "machine"
        ) from error
    if not exists:
        raise ValueError(f"data.path={path!r} does not exist; correct the address")
    if not kept:
        raise ValueError(f"data.path={path!r} is a folder without files; name another folder")
    return [
        SourceFile(name=_relative(file, root), path=system.unstrip_protocol(file), is_local=False, stamp=stamp)
        for (_, file), stamp in zip(kept, stamps, strict=True)
    ]


def _find(system: typing.Any, root: str) -> tuple[bool, list[str]]:
    """Whether there is something at the address, and its files that are not hidden."""
    if not system.exists(root):
        return False, []
    found = system.find(root) if system.isdir(root) else [root]
    return True, [file for file in found if not _is_hidden(_relative(file, root))]


def _remote_stamp(system: typing.Any, file: str) -> str:
    """What the store tells of the content; a web server's identity of a file is its address alone, so more is asked."""
    info = system.info(file)
    return " ".join([str(system.ukey(file)), *(f"{name}={info[name]}" for name in _STAMPS if info.get(name))])


def _as_walked(name: str) -> list[tuple[bool, str]]:
    """Puts names into the order of `walk`: the files of a folder before its subfolders."""
    *folders, file = name.split("/")
    return [*((True, folder) for folder in folders), (False, file)]


def _relative(file: str, root: str) -> str:
    inside = file.removeprefix(root.rstrip("/")).lstrip("/")
    return inside or file.rsplit("/", 1)[-1]


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in name.split("/"))


def _patiently[T](work: Callable[[], T]) -> T:
    """What `work` returns. What fails is tried twice more, unless the store says that it is not there or not allowed.

    Raises:
        OSError: it failed to the end, whatever it raised.
    """
    for pause in (*_PAUSES_S, None):
        try:
            return work()
        except ImportError:
            raise
        except Exception as error:  # each store raises its own kind
            if pause is None or isinstance(error, (FileNotFoundError, PermissionError)):
                raise OSError(errno.EIO, f"{type(error).__name__}: {reason_of(error)}") from error
            time.sleep(pause)
    raise AssertionError("the last try returns or raises")


class _Remote(io.RawIOBase):
    """The bytes at an fsspec address; a read that fails is tried again from where it began."""

    def __init__(self, address: str):
        super().__init__()
        self._address, self._file, self._position = address, None, 0

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
            system, path = fsspec.core.url_to_fs(self._address)
            self._file = system.open(path, "rb")
        return self._file

    def _read(self, size: int) -> bytes:
        try:
            file = self._opened()
            if file.tell() != self._position:
                file.seek(self._position)
            return file.read(size)
        except Exception:
            self._drop()
            raise

    def _drop(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(Exception):  # it has been read, or is of no use
                file.close()


class _ZstdFile(io.RawIOBase):
    """Decompressed bytes of a Zstandard file, frame after frame, with any window (`zstd --long=31`).

    The library's own reader ends in silence where a file was cut; this one raises EOFError.
    """

    def __init__(self, raw: typing.BinaryIO):
        super().__init__()
        self._raw = raw
        self._frame = None
        self._input = b""
        self._output = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: typing.Any) -> int:
        while not self._output:
            self._input = self._input or self._raw.read(CHUNK)
            if not self._input:
                if self._frame is not None:
                    raise EOFError("the file ends inside a Zstandard frame")
                return 0
            if self._frame is None:
                self._frame = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW).decompressobj()
            self._output = memoryview(self._frame.decompress(self._input))
            self._input = b""
            if self._frame.eof:
                self._input, self._frame = self._frame.unused_data, None
        size = min(len(buffer), len(self._output))
        buffer[:size] = self._output[:size]
        self._output = self._output[size:]
        return size
