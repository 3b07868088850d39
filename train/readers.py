"""Documents from files: text, JSON lines, Parquet and ArrayRecord, on a disk or at an fsspec address.

What always holds: every document of every file is yielded once, in an order set by the names of the files, or the
file and the line (row, record) that could not be read is named: in a `ValueError`, or, where the user asked to skip
what is damaged, in the `Damage` that counts it. A file that ends too early is damaged, never short. Everything read
is data: nothing is unpickled or executed.

    name of a file               documents
    *.jsonl *.ndjson             one a line; the text is the field `field`
    *.parquet                    one a row; the text is the column `field`
    *.array_record *.arrayrecord one a record: UTF-8 text
    anything else                the whole file

    *.gz *.zst before that: `a.jsonl.zst` is decompressed and read as `a.jsonl`. A document's name is that of its file
    from the source on, with `:number` for a line, row or record; numbers count from 1.
"""

import contextlib
import dataclasses
import gzip
import io
import json
import os
import shutil
import stat
import tempfile
import typing
import zlib
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pyarrow
import pyarrow.parquet
import zstandard
from array_record.python import array_record_module

from train.config import OnError
from train.text import not_text, read_file, unreadable, walk, why_not_text

_COMPRESSED = (".gz", ".zst")
_KINDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".array_record": "array_record",
    ".arrayrecord": "array_record",
}
_DECOMPRESSION_ERRORS = (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError)
_CHUNK = 2**20
_PARQUET_ROWS = 1024


class RawText(typing.NamedTuple):
    """A document before it is tokens."""

    name: str
    content: bytes
    """UTF-8."""


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
        if self.on_error == "raise":
            raise ValueError(f"{what}; {fix}, or count and pass over what is damaged with --data.on-error skip")
        self.skipped.append(what)


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

    @property
    def kind(self) -> str:
        """text, jsonl, parquet or array_record."""
        base, extension = os.path.splitext(self.name.lower())
        return _KINDS.get(os.path.splitext(base)[1] if extension in _COMPRESSED else extension, "text")

    @property
    def compression(self) -> str:
        """`.gz`, `.zst`, or the empty string."""
        extension = os.path.splitext(self.name.lower())[1]
        return extension if extension in _COMPRESSED else ""

    @contextlib.contextmanager
    def open(self) -> Iterator[typing.Any]:
        """Its bytes, decompressed; a binary stream."""
        if self.is_local:
            raw = Path(self.path).open("rb")
        else:
            system, path = fsspec.core.url_to_fs(self.path)
            raw = system.open(path, "rb")
        with raw:
            if self.compression == ".gz":
                yield gzip.GzipFile(fileobj=raw)
            elif self.compression == ".zst":
                yield io.BufferedReader(_ZstdFile(raw), _CHUNK)
            else:
                yield raw


def list_files(path: str) -> list[SourceFile]:
    """The file `path`, or every file in the folder `path` and below, in the order of their names.

    Names that start with a dot and `__pycache__` folders are left out, as tools do. On this machine links are
    followed, and a file or folder with several names is listed once, under the first.

    Raises:
        ValueError: there is none, or a folder cannot be listed.
    """
    if "://" in path:
        return _list_remote(path)
    root = Path(path).expanduser()
    try:
        is_folder = stat.S_ISDIR(os.stat(root if path.strip() else "").st_mode)
    except FileNotFoundError as error:
        raise ValueError(
            f"data.path={path!r} does not exist; give a text file or a folder of text files, or leave data.path out to "
            "train on Python's own sources"
        ) from error
    except OSError as error:
        raise ValueError(unreadable(path, error)) from error
    if is_folder:
        found = list(walk(root, frozenset({"__pycache__"}), skip_hidden=True))
        if not found:
            raise ValueError(
                f"data.path={path!r} is a folder without files; put text files into it or name another folder"
            )
    else:
        found = [(root.name, root)]
    return [SourceFile(name=name, path=str(file), is_local=True, stamp=_stamp(file)) for name, file in found]


def read_documents(files: list[SourceFile], *, field: str, damage: Damage) -> Iterator[RawText]:
    """Every document of the files, in order; documents without a byte too.

    Args:
        files: From `list_files`.
        field: JSON lines: the name of the field with the text; Parquet: the column.
        damage: Told about everything that cannot be read.

    Raises:
        ValueError: something cannot be read and `damage` does not skip it. Files that are not text are named together.
    """
    strange = []
    for file in files:
        if file.kind == "text":
            content = _read_text(file, damage)
            reason = None if content is None else why_not_text(content)
            if reason:
                strange.append(f"{file.path!r} ({reason})")
            elif content is not None:
                yield RawText(file.name, content)
            continue
        found = False
        for document in _READERS[file.kind](file, field, damage):
            found = True
            yield document
        if not found and not any(line.startswith(repr(file.path)) for line in damage.skipped[-1:]):
            damage.found(f"{file.path!r} holds no document", "remove this empty shard")
    if strange and damage.on_error == "raise":
        raise ValueError(not_text(strange))
    damage.skipped += [f"not text: {problem}" for problem in strange]


def _read_text(file: SourceFile, damage: Damage) -> bytes | None:
    """The whole file, or None when it is damaged."""
    if file.is_local and not file.compression:
        return read_file(Path(file.path))
    try:
        with file.open() as stream:
            return stream.read()
    except _DECOMPRESSION_ERRORS as error:
        damage.found(f"{file.path!r} is damaged ({_reason(error)})")
    except OSError as error:
        raise ValueError(unreadable(file.path, error)) from error
    return None


def _read_jsonl(file: SourceFile, field: str, damage: Damage) -> Iterator[RawText]:
    """One document a line; empty lines hold none."""
    number = 0
    try:
        with file.open() as stream:
            for number, line in enumerate(stream, 1):
                if not line.strip():
                    continue
                try:
                    content = _text_of(line, field)
                except (ValueError, RecursionError) as error:
                    damage.found(f"{file.path!r}, line {number}: {_reason(error)}")
                    continue
                yield RawText(f"{file.name}:{number}", content)
    except _DECOMPRESSION_ERRORS as error:
        damage.found(f"{file.path!r}, from line {number + 1} on: damaged ({_reason(error)})")
    except OSError as error:
        raise ValueError(unreadable(file.path, error)) from error


def _text_of(line: bytes, field: str) -> bytes:
    """The text of one JSON line, as UTF-8."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at character {error.pos})") from None
    if not isinstance(row, dict):
        raise ValueError(f"JSON, but {type(row).__name__} and not an object with the field {field!r}")
    if not isinstance(row.get(field), str):
        known = ", ".join(map(repr, list(row)[:8])) or "none"
        what = f"field {field!r} is {type(row[field]).__name__}, not text" if field in row else f"no field {field!r}"
        raise ValueError(f"{what}; its fields are {known}")
    return row[field].encode("utf-8")


def _read_parquet(file: SourceFile, field: str, damage: Damage) -> Iterator[RawText]:
    """One document a row."""
    number = 0
    try:
        with file.open() as stream, pyarrow.parquet.ParquetFile(stream, page_checksum_verification=True) as table:
            if field not in table.schema_arrow.names:
                columns = ", ".join(map(repr, table.schema_arrow.names)) or "none"
                damage.found(f"{file.path!r} has no column {field!r}; its columns are {columns}", "name one of them")
                return
            for batch in table.iter_batches(batch_size=_PARQUET_ROWS, columns=[field]):
                for value in batch.column(0).to_pylist():
                    number += 1
                    if isinstance(value, str):
                        yield RawText(f"{file.name}:{number}", value.encode("utf-8"))
                        continue
                    kind = "empty (null)" if value is None else f"{type(value).__name__}, not text"
                    damage.found(f"{file.path!r}, row {number}: column {field!r} is {kind}")
    except (*_DECOMPRESSION_ERRORS, pyarrow.ArrowException, UnicodeDecodeError) as error:
        damage.found(f"{file.path!r}, from row {number + 1} on: damaged ({_reason(error)})")
    except OSError as error:  # also what Arrow makes of a cut or altered page
        if error.errno is not None:
            raise ValueError(unreadable(file.path, error)) from error
        damage.found(f"{file.path!r}, from row {number + 1} on: damaged ({_reason(error)})")


def _read_array_record(file: SourceFile, field: str, damage: Damage) -> Iterator[RawText]:
    """One document a record. The library reads local files only, so a remote one is copied to this machine first."""
    with tempfile.TemporaryDirectory(prefix="ring_jax-") as folder:
        path = file.path
        if not file.is_local or file.compression:
            path = os.path.join(folder, "records")
            try:
                with file.open() as stream, open(path, "wb") as copy:
                    shutil.copyfileobj(stream, copy, _CHUNK)
            except _DECOMPRESSION_ERRORS as error:
                damage.found(f"{file.path!r} is damaged ({_reason(error)})")
                return
            except OSError as error:
                raise ValueError(unreadable(file.path, error)) from error
        reader = array_record_module.ArrayRecordReader(path)
        if not reader.ok() or not reader.num_records():
            damage.found(f"{file.path!r} holds no record: it is empty, cut short, or not an ArrayRecord file")
            return
        for number in range(1, reader.num_records() + 1):
            try:
                (content,) = reader.read([number - 1])
                reason = why_not_text(content)
            except (RuntimeError, ValueError, IndexError) as error:
                content, reason = b"", f"damaged ({_reason(error)})"
            if reason:
                damage.found(f"{file.path!r}, record {number}: {reason}")
            else:
                yield RawText(f"{file.name}:{number}", content)


_READERS = {"jsonl": _read_jsonl, "parquet": _read_parquet, "array_record": _read_array_record}


class _ZstdFile(io.RawIOBase):
    """Decompressed bytes of a Zstandard file, frame after frame.

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
            self._input = self._input or self._raw.read(_CHUNK)
            if not self._input:
                if self._frame is not None:
                    raise EOFError("the file ends inside a Zstandard frame")
                return 0
            self._frame = self._frame or zstandard.ZstdDecompressor().decompressobj()
            self._output = memoryview(self._frame.decompress(self._input))
            self._input = b""
            if self._frame.eof:
                self._input, self._frame = self._frame.unused_data, None
        size = min(len(buffer), len(self._output))
        buffer[:size] = self._output[:size]
        self._output = self._output[size:]
        return size


def _list_remote(path: str) -> list[SourceFile]:
    """The files at an fsspec address."""
    try:
        system, root = fsspec.core.url_to_fs(path)
        exists = system.exists(root)
        found = (system.find(root) if system.isdir(root) else [root]) if exists else []
        names = {file: _relative(file, root) for file in found}
        kept = sorted((name, file) for file, name in names.items() if not _is_hidden(name))
        stamps = [str(system.ukey(file)) for _, file in kept]
    except ImportError as error:
        raise ValueError(
            f"data.path={path!r} needs a package that is not installed ({error}); install it, or copy the data here"
        ) from error
    except Exception as error:  # each store raises its own kind
        raise ValueError(
            f"data.path={path!r} cannot be listed ({type(error).__name__}: {_reason(error)}); correct the address or "
            "the credentials of this machine"
        ) from error
    if not exists:
        raise ValueError(f"data.path={path!r} does not exist; correct the address")
    if not kept:
        raise ValueError(f"data.path={path!r} is a folder without files; name another folder")
    return [
        SourceFile(name=name, path=system.unstrip_protocol(file), is_local=False, stamp=stamp)
        for (name, file), stamp in zip(kept, stamps, strict=True)
    ]


def _relative(file: str, root: str) -> str:
    inside = file.removeprefix(root.rstrip("/")).lstrip("/")
    return inside or file.rsplit("/", 1)[-1]


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in name.split("/"))


def _stamp(file: Path) -> str:
    try:
        status = file.stat()
    except OSError as error:
        raise ValueError(unreadable(str(file), error)) from error
    if not stat.S_ISREG(status.st_mode):  # to open a pipe would wait for ever
        raise ValueError(f"{str(file)!r} is not a regular file; leave it out of data.path")
    return f"{status.st_size} {status.st_mtime_ns}"


def _reason(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).split("\n")[0][:300]
