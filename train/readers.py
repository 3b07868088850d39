"""Documents from files: text, JSON lines, Parquet and ArrayRecord, on a disk or at an fsspec address.

What always holds: every document of every file is yielded once, in an order set by the names of the files, or the
file and the line (row, record) that could not be read is named: in a `ValueError`, or, where the user asked to skip
what is damaged, in the `Damage` that counts it. A file that ends too early is damaged, never short. Everything read
is data: nothing is unpickled or executed.

    name of a file               documents
    *.jsonl *.ndjson             one a line; the text is the field `field`
    *.parquet                    one a row; the text is the column `field`
    *.array_record *.arrayrecord one a record: UTF-8 text
    *.json                       as *.jsonl where one of its first two lines is a JSON object, else the whole file; of
                                 a single line, where that object has the field
    anything else                the whole file

    *.gz *.zst before that: `a.jsonl.zst` is decompressed and read as `a.jsonl`. A document's name is that of its file
    from the source on, with `:number` for a line, row or record; numbers count from 1.
"""

import contextlib
import errno
import json
import os
import shutil
import tempfile
import typing
from collections.abc import Generator, Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
from array_record.python import array_record_module

from train.errors import DataError
from train.files import CHUNK, DECOMPRESSION_ERRORS, Damage, SourceFile, list_files
from train.text import not_text, read_file, reason_of, why_not_text, why_not_utf8

__all__ = ["Damage", "DataError", "RawText", "SourceFile", "list_files", "read_documents"]

_PARQUET_ROWS = 1024


class RawText(typing.NamedTuple):
    """A document before it is tokens."""

    name: str
    content: bytes
    """UTF-8."""


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
        num_skipped = damage.num_skipped
        try:
            kind = file.kind(field)
        except OSError as error:
            damage.unreadable(file.path, error)
            continue
        if kind == "text":
            content = _read_text(file, damage)
            reason = None if content is None else why_not_text(content)
            if reason:
                strange.append(f"{file.path!r} ({reason})")
            elif content is not None:
                yield RawText(file.name, content)
            continue
        found = False
        for document in _READERS[kind](file, field, damage):
            found = True
            yield document
        if not found and damage.num_skipped == num_skipped:
            damage.found(f"{file.path!r} holds no document", "remove this empty shard")
    if strange and damage.on_error != "skip":
        raise ValueError(not_text(strange))
    for problem in strange:
        damage.found(f"not text: {problem}")


def _read_text(file: SourceFile, damage: Damage) -> bytes | None:
    """The whole file, or None when it is damaged or cannot be read."""
    try:
        if file.is_local and not file.compression:
            return read_file(Path(file.path))
        with file.open() as stream:
            return stream.read()
    except DECOMPRESSION_ERRORS as error:
        damage.found(f"{file.path!r} is damaged ({reason_of(error)})")
    except OSError as error:
        damage.unreadable(file.path, error)
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
                    damage.found(f"{file.path!r}, line {number}: {reason_of(error)}")
                    continue
                yield RawText(f"{file.name}:{number}", content)
    except DECOMPRESSION_ERRORS as error:
        damage.found(f"{file.path!r}, from line {number + 1} on: damaged ({reason_of(error)})")
    except OSError as error:
        damage.unreadable(file.path, error, f", from line {number + 1} on,")


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
        with (
            _on_disk(file) if file.compression else file.open() as source,
            pyarrow.parquet.ParquetFile(source, page_checksum_verification=True) as table,
        ):
            if field not in table.schema_arrow.names:
                columns = ", ".join(map(repr, table.schema_arrow.names)) or "none"
                damage.found(f"{file.path!r} has no column {field!r}; its columns are {columns}", "name one of them")
                return
            for batch in table.iter_batches(batch_size=_PARQUET_ROWS, columns=[field]):
                column, is_text = _undecoded(batch.column(0))
                for value in column:
                    number += 1
                    content = value.as_py() if is_text and value.is_valid else None
                    if content is None:
                        reason = f"{column.type}, not text" if value.is_valid else "empty (null)"
                    else:
                        reason = why_not_utf8(content)
                    if content is None or reason:
                        damage.found(f"{file.path!r}, row {number}: column {field!r} is {reason}")
                    else:
                        yield RawText(f"{file.name}:{number}", content)
    except MemoryError as error:  # of Arrow, too, to which it is one of its own
        raise ValueError(
            f"{file.path!r}, from row {number + 1} on, does not fit into memory ({reason_of(error)}); write it with "
            "smaller row groups"
        ) from error
    except (*DECOMPRESSION_ERRORS, pyarrow.ArrowException) as error:
        damage.found(f"{file.path!r}, from row {number + 1} on: damaged ({reason_of(error)})")
    except OSError as error:  # also what Arrow makes of a cut or altered page
        if error.errno in (None, errno.ESPIPE):
            damage.found(f"{file.path!r}, from row {number + 1} on: damaged ({reason_of(error)})")
        else:
            damage.unreadable(file.path, error, f", from row {number + 1} on,")


def _undecoded(column: typing.Any) -> tuple[typing.Any, bool]:
    """A column with its strings as bytes, and whether it holds any: to decode one that is not UTF-8 fails for all."""
    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kinds = (pyarrow.types.is_string, pyarrow.types.is_large_string, pyarrow.types.is_string_view)
    is_text = any(is_kind(column.type) for is_kind in kinds)
    return (column.cast(pyarrow.large_binary()) if is_text else column), is_text


def _read_array_record(file: SourceFile, field: str, damage: Damage) -> Iterator[RawText]:
    """One document a record. The library reads local files only, so a remote one is copied to this machine first."""
    try:
        with _on_disk(file) as path:
            yield from _read_records(file, path, damage)
    except DECOMPRESSION_ERRORS as error:
        damage.found(f"{file.path!r} is damaged ({reason_of(error)})")
    except OSError as error:
        damage.unreadable(file.path, error)


def _read_records(file: SourceFile, path: str, damage: Damage) -> Iterator[RawText]:
    """The records of a file that lies at `path`."""
    with open(path, "rb"):  # the library would call a file damaged that must not be read
        reader = array_record_module.ArrayRecordReader(path)
    if not reader.ok() or not reader.num_records():
        damage.found(f"{file.path!r} holds no record: it is empty, cut short, or not an ArrayRecord file")
        return
    for number in range(1, reader.num_records() + 1):
        try:
            (content,) = reader.read([number - 1])
            reason = why_not_text(content)
        except (RuntimeError, ValueError, IndexError) as error:
            content, reason = b"", f"damaged ({reason_of(error)})"
        if reason:
            damage.found(f"{file.path!r}, record {number}: {reason}")
        else:
            yield RawText(f"{file.name}:{number}", content)


@contextlib.contextmanager
def _on_disk(file: SourceFile) -> Generator[str]:
    """Its path on this machine; of a remote or a compressed file, that of a decompressed copy.

    Raises:
        ValueError: there is no room for the copy.
    """
    if file.is_local and not file.compression:
        yield file.path
        return
    with tempfile.TemporaryDirectory(prefix="ring_jax-") as folder:
        path = os.path.join(folder, "copy")
        try:
            with file.open() as stream, open(path, "wb") as copy:
                shutil.copyfileobj(stream, copy, CHUNK)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise ValueError(
                f"{file.path!r} cannot be copied to {folder!r} ({error.strerror}); make room there, name another place "
                "with the environment variable TMPDIR, or decompress the file"
            ) from error
        yield path


_READERS = {"jsonl": _read_jsonl, "parquet": _read_parquet, "array_record": _read_array_record}
