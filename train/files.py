"""The files of a source: which there are, in which order, and their bytes, on a disk or at an fsspec address.

What always holds: the same folder has the same files under the same names in the same order wherever it lies, and a
file that changes has another stamp. What lies in a store is listed and read by `train.stores`.
"""

import contextlib
import dataclasses
import gzip
import io
import json
import os
import stat
import typing
import zlib
from collections.abc import Generator
from pathlib import Path

import fsspec
import zstandard

from train import stores
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
_MAX_LISTED = 1000
_LOCAL_SCHEMES = ("file", "local")


@dataclasses.dataclass(kw_only=True)
class Damage:
    """What is done about something that cannot be read, and what was passed over so far."""

    on_error: OnError
    skipped: list[str] = dataclasses.field(default_factory=list)
    """A line for everything that was passed over, of the first thousand: the file, where in it, and why."""
    num_skipped: int = 0
    """How many there are."""
    unread: list[str] = dataclasses.field(default_factory=list)
    """The files among them that the disk or the store did not give, wholly or from some place on."""

    def found(self, what: str, fix: str = "mend or remove it") -> None:
        """Count it, or raise.

        Raises:
            ValueError: `on_error` is not "skip".
        """
        if self.on_error != "skip":
            raise ValueError(f"{what}; {fix}, or count and pass over what is damaged with --data.on-error skip")
        self.num_skipped += 1
        if len(self.skipped) < _MAX_LISTED:
            self.skipped.append(what)

    def unreadable(self, file: str, error: OSError, where: str = "") -> None:
        """`found` for a file, or its rest, that the disk or the store does not give."""
        self.found(unreadable(file, error, where), MAKE_READABLE)
        self.unread.append(file)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One file of a source."""

    name: str
    """Relative to the source, with slashes."""
    path: str
    """Where it is: a path of this machine, or the address of a store as its user would write it."""
    stamp: str
    """Changes when the file does: size and time of change, or what the remote store tells."""
    stored: stores.Stored | None = None
    """Where it is in a store; None: on this machine."""
    _kinds: dict[str, str] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    @property
    def is_local(self) -> bool:
        """Whether `path` is one of this machine."""
        return self.stored is None

    def kind(self, field: str) -> str:
        """text, jsonl, parquet or array_record: by the name, but for `*.json`, which is looked into.

        Args:
            field: The field of JSON lines that holds the text.

        Raises:
            OSError: it cannot be looked into.
        """
        base, extension = os.path.splitext(self.name.lower())
        if extension in _COMPRESSED:
            extension = os.path.splitext(base)[1]
        if extension != ".json":
            return _KINDS.get(extension, "text")
        if field not in self._kinds:
            self._kinds[field] = "jsonl" if _are_json_lines(self._first_lines(), field) else "text"
        return self._kinds[field]

    @property
    def compression(self) -> str:
        """`.gz`, `.zst`, or the empty string."""
        extension = os.path.splitext(self.name.lower())[1]
        return extension if extension in _COMPRESSED else ""

    @property
    def real_path(self) -> str:
        """The same for every name that the file goes by; of the web with what is asked for after a question mark."""
        if self.stored is None:
            return os.path.realpath(self.path)
        return f"{self.path}{self.stored.query}"

    @contextlib.contextmanager
    def open(self) -> Generator[typing.Any]:
        """Its bytes, decompressed; a binary stream.

        Raises:
            OSError: it cannot be read.
            EOFError: it should be compressed and holds nothing.
        """
        with contextlib.ExitStack() as stack:
            if self.stored is None:
                raw = stack.enter_context(Path(self.path).open("rb"))
            else:
                raw = stack.enter_context(io.BufferedReader(stores.Remote(self.stored), CHUNK))
            if self.compression and not raw.peek(1):
                raise EOFError("a compressed file of no bytes")
            if self.compression == ".gz":
                yield gzip.GzipFile(fileobj=raw)
            elif self.compression == ".zst":
                yield io.BufferedReader(_ZstdFile(raw), CHUNK)
            else:
                yield raw

    def can_be_read(self) -> bool:
        """Whether the disk or the store gives all of it."""
        try:
            with self.open() as stream:
                while stream.read(CHUNK):
                    pass
        except DECOMPRESSION_ERRORS:
            pass
        except OSError:
            return False
        return True

    def _first_lines(self) -> list[bytes]:
        """The first two lines that are not empty, or those there are."""
        found: list[bytes] = []
        with contextlib.suppress(*DECOMPRESSION_ERRORS), self.open() as stream:
            while len(found) < 2 and (line := stream.readline(_LONGEST_LINE)):
                if not line.isspace():
                    found.append(line)
        return found


def _are_json_lines(lines: list[bytes], field: str) -> bool:
    """Whether a file `*.json` that begins so is one of JSON lines, damaged ones among them, and no document itself."""
    if lines and len(lines[0]) == _LONGEST_LINE:
        return lines[0].lstrip().startswith(b"{")
    rows = [_json_object(line) for line in lines]
    if len(rows) == 1:
        return rows[0] is not None and field in rows[0]
    return any(row is not None for row in rows)


def _json_object(line: bytes) -> dict[str, typing.Any] | None:
    """The JSON object that is this line, if it is one."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def list_files(path: str, damage: Damage | None = None) -> list[SourceFile]:
    """The file `path`, or every file in the folder `path` and below; the files of a folder before its subfolders.

    Names that start with a dot and `__pycache__` folders are left out, as tools do. On this machine links are
    followed, and a file or folder with several names is listed once, under the first. On a web server an address that
    ends in a slash is a folder, a page of links, and any other is a file.

    Args:
        path: A path or an address.
        damage: Told about files and subfolders that are there and cannot be read; None: that is an error.

    Raises:
        ValueError: there is none, or one cannot be read and `damage` does not skip it.
    """
    damage = damage or Damage(on_error="raise")
    if (root := local_path(path)) is None:
        return [
            SourceFile(name=name, path=address, stamp=stored.stamp, stored=stored)
            for name, address, stored in stores.list_files(path, damage.unreadable)
        ]
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
            files.append(SourceFile(name=name, path=str(file), stamp=stamp))
    if not files and damage.skipped:
        raise ValueError(f"data.path={path!r} has nothing that can be read, first: {damage.skipped[0]}; mend it")
    if not files:
        raise ValueError(f"data.path={path!r} is a folder without files; put text files into it or name another folder")
    return files


def local_path(path: str) -> Path | None:
    """The path of this machine that is meant; None for an address of a store."""
    if "://" not in path:
        return Path(path).expanduser()
    if "::" in path or path.split("://")[0] not in _LOCAL_SCHEMES:
        return None
    return Path(fsspec.core.url_to_fs(path)[1])


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
