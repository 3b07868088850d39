"""The cache of tokenised documents: ArrayRecord files with the tokens, and an index of the documents' lengths.

What always holds: a cache is complete or it does not count. It is written into a folder of another name and renamed
when all is on disk; its name is a fingerprint of what it was made of; and opening it checks the size of every file and
the hash of the index, so a cut one is found before the first step. ArrayRecord checks the tokens as they are read.

    <data.cache>/<fingerprint>/
        tokens-00000.array_record    little-endian ids; up to 65,536 a record, never of two documents
        index.npz                    per document: tokens, bytes of text, place of its name, digest
        meta.json                    sizes, counts, what was passed over
"""

import dataclasses
import hashlib
import io
import itertools
import json
import os
import pathlib
import shutil
import socket
import threading
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from array_record.python import array_record_module

from train.readers import Damage, RawText
from train.text import document_digest, name_place
from train.tokenizer import Tokenizer

VERSION = 1
_CHUNK = 2**16
_SHARD_RECORDS = 2**16
_BATCH_BYTES = 2**22
_BATCH_DOCUMENTS = 2**12
_MAX_LISTED = 1000
_META, _INDEX = "meta.json", "index.npz"
_SAY_EVERY = 2**28


class CacheDamaged(ValueError):
    """The cache cannot be used; the message says why."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TokenCache:
    """An open cache; documents are read when they are needed."""

    folder: pathlib.Path
    lengths: np.ndarray
    """Tokens of each document, int64."""
    num_bytes: np.ndarray
    """Bytes of each document's text, int64."""
    places: np.ndarray
    """The number that each document's name gives it, uint64 (`train.text.name_place`)."""
    digests: np.ndarray
    """Hash of each document's name and tokens, uint8 [documents, 16]."""
    num_empty: int
    skipped: list[str]
    """What was passed over; at most 1000 lines."""
    num_skipped: int
    dtype: np.dtype
    first_records: np.ndarray
    """The record in which each document begins."""
    shards: "_Shards"

    def __len__(self) -> int:
        return len(self.lengths)

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """Tokens start to stop of a document.

        Raises:
            ValueError: the file is damaged or gone.
        """
        stop = min(stop, int(self.lengths[document]))
        if start >= stop:
            return np.zeros(0, self.dtype)
        record = int(self.first_records[document])
        found = self.shards.read(record + start // _CHUNK, record + (stop - 1) // _CHUNK + 1)
        tokens = np.frombuffer(b"".join(found), self.dtype)
        offset = start % _CHUNK
        return tokens[offset : offset + stop - start]


@dataclasses.dataclass(frozen=True, eq=False)
class StoredDocument:
    """Tokens start to stop of one document of a cache; read when asked for."""

    cache: TokenCache
    number: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def tokens(self) -> np.ndarray:
        """All its tokens."""
        return self.cache.read(self.number, self.start, self.stop)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start to stop, fewer at the end of the document."""
        return self.cache.read(self.number, self.start + start, min(self.start + stop, self.stop))

    @property
    def place(self) -> int:
        """A number below 2**64 from the name alone."""
        return int(self.cache.places[self.number])

    @property
    def digest(self) -> bytes:
        """16 bytes of a hash of the name and the tokens."""
        whole = len(self) == self.cache.lengths[self.number]
        digest = self.cache.digests[self.number].tobytes()
        return digest if whole else hashlib.sha256(digest + f"{self.start} {self.stop}".encode()).digest()[:16]


class StoredDocuments(Sequence[StoredDocument]):
    """Some documents of a cache, in order."""

    def __init__(self, cache: TokenCache, numbers: np.ndarray):
        self.cache = cache
        self.numbers = numbers
        self.lengths = cache.lengths[numbers]

    def __len__(self) -> int:
        return len(self.numbers)

    @typing.overload
    def __getitem__(self, index: int) -> StoredDocument: ...
    @typing.overload
    def __getitem__(self, index: slice) -> "StoredDocuments": ...
    def __getitem__(self, index: int | slice) -> "StoredDocument | StoredDocuments":
        if isinstance(index, slice):
            return StoredDocuments(self.cache, self.numbers[index])
        return StoredDocument(self.cache, int(self.numbers[index]), 0, int(self.lengths[index]))


class _Shards:
    """The token files: record number -> bytes. Several threads may read."""

    def __init__(self, files: list[pathlib.Path], counts: list[int]):
        self._files = files
        self._ends = list(itertools.accumulate(counts))
        self._readers: dict[int, typing.Any] = {}
        self._lock = threading.Lock()

    def read(self, first: int, last: int) -> list[bytes]:
        """Records first to last - 1."""
        found = []
        while first < last:
            shard = int(np.searchsorted(self._ends, first, side="right"))
            before = self._ends[shard - 1] if shard else 0
            stop = min(last, self._ends[shard])
            found += self._read(shard, list(range(first - before, stop - before)))
            first = stop
        return found

    def _read(self, shard: int, records: list[int]) -> list[bytes]:
        file = self._files[shard]
        try:
            with self._lock:
                if shard not in self._readers:
                    self._readers[shard] = array_record_module.ArrayRecordReader(str(file), "readahead_buffer_size:0")
                return self._readers[shard].read(records)
        except (RuntimeError, ValueError, IndexError) as error:
            raise ValueError(
                f"the cache of tokens is damaged: {str(file)!r}, record {records[0]} ({str(error)[:200]}); delete the "
                f"folder {str(file.parent)!r}, and the next run makes it again"
            ) from None


def open_cache(folder: pathlib.Path) -> TokenCache:
    """The cache in `folder`.

    Raises:
        CacheDamaged: it is incomplete, was altered, or was made by another version.
    """
    try:
        meta = json.loads((folder / _META).read_text())
        index = (folder / _INDEX).read_bytes()
        if meta["version"] != VERSION:
            raise CacheDamaged(f"it has version {meta['version']}, this is version {VERSION}")
        if hashlib.sha256(index).hexdigest() != meta["index_sha256"]:
            raise CacheDamaged(f"{_INDEX} was altered")
        for shard in meta["shards"]:
            size = (folder / shard["name"]).stat().st_size
            if size != shard["bytes"]:
                raise CacheDamaged(f"{shard['name']} has {size:,} bytes and should have {shard['bytes']:,}")
        with np.load(io.BytesIO(index), allow_pickle=False) as arrays:
            lengths, num_bytes, places, digests = (
                arrays[name] for name in ("lengths", "num_bytes", "places", "digests")
            )
        records = -(-lengths // _CHUNK)
        return TokenCache(
            folder=folder,
            lengths=lengths,
            num_bytes=num_bytes,
            places=places,
            digests=digests,
            num_empty=meta["num_empty"],
            skipped=meta["skipped"],
            num_skipped=meta["num_skipped"],
            dtype=np.dtype(meta["dtype"]),
            first_records=np.cumsum(records) - records,
            shards=_Shards(
                [folder / shard["name"] for shard in meta["shards"]],
                [shard["records"] for shard in meta["shards"]],
            ),
        )
    except CacheDamaged:
        raise
    except OSError as error:
        raise CacheDamaged(f"{pathlib.Path(error.filename or '').name or 'a file'}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise CacheDamaged(f"its {_META} or {_INDEX} cannot be read ({type(error).__name__}: {error})") from None


def build_cache(
    folder: pathlib.Path,
    documents: Iterable[RawText],
    *,
    tokenizer: Tokenizer,
    damage: Damage,
    say: Callable[[str], None],
) -> TokenCache:
    """Tokenise documents into `folder`, which appears when all is done; what was there before is replaced.

    Raises:
        ValueError: the folder cannot be written, or a document cannot be read.
    """
    folder = folder.absolute()
    partial = folder.with_name(f"{folder.name}.part-{socket.gethostname()}-{os.getpid()}")
    try:
        _remove_abandoned(folder, say)
        partial.mkdir(parents=True)
        meta = _write(partial, documents, tokenizer, say)
        meta |= {"skipped": damage.skipped[:_MAX_LISTED], "num_skipped": len(damage.skipped)}
        _write_file(partial / _META, json.dumps(meta, indent=1).encode())
        return _put_in_place(partial, folder)
    except (OSError, RuntimeError) as error:  # ArrayRecord reports a full disk as RuntimeError
        reason = getattr(error, "strerror", None) or str(error)[:200]
        raise ValueError(
            f"the cache of tokens cannot be written to {str(folder)!r} ({reason}); make room there, or name another "
            "folder with --data.cache"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _put_in_place(partial: pathlib.Path, folder: pathlib.Path) -> TokenCache:
    """Rename, unless another process was quicker: it made the same, and reads it already."""
    try:
        return open_cache(folder)
    except CacheDamaged:
        shutil.rmtree(folder, ignore_errors=True)
    try:
        partial.rename(folder)
    except OSError:
        if not folder.exists():
            raise
    return open_cache(folder)


def _write(
    folder: pathlib.Path, documents: Iterable[RawText], tokenizer: Tokenizer, say: Callable[[str], None]
) -> dict[str, typing.Any]:
    """The token files and the index; returns what `meta.json` says of them."""
    lengths, num_bytes, places, digests = [], [], [], []
    num_empty, num_tokens = 0, 0
    writer = _ShardWriter(folder)
    try:
        for batch in _in_batches(documents):
            contents = [document.content for document in batch]
            for document, tokens in zip(batch, tokenizer.encode(contents), strict=True):
                if not document.content or not len(tokens):
                    num_empty += 1
                    continue
                for start in range(0, len(tokens), _CHUNK):
                    writer.write(tokens[start : start + _CHUNK].tobytes())
                lengths.append(len(tokens))
                num_bytes.append(len(document.content))
                places.append(name_place(document.name))
                digests.append(document_digest(document.name, tokens))
                num_tokens += len(tokens)
                if num_tokens // _SAY_EVERY != (num_tokens - len(tokens)) // _SAY_EVERY:
                    say(f"  tokenised {len(lengths):,} documents, {num_tokens:,} tokens")
    finally:
        writer.close()
    buffer = io.BytesIO()
    np.savez(
        buffer,
        lengths=np.array(lengths, np.int64),
        num_bytes=np.array(num_bytes, np.int64),
        places=np.array(places, np.uint64),
        digests=np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 16),
    )
    _write_file(folder / _INDEX, buffer.getvalue())
    return {
        "version": VERSION,
        "dtype": tokenizer.dtype.newbyteorder("<").str,
        "num_documents": len(lengths),
        "num_tokens": num_tokens,
        "num_empty": num_empty,
        "index_sha256": hashlib.sha256(buffer.getvalue()).hexdigest(),
        "shards": [
            {"name": file.name, "bytes": file.stat().st_size, "records": records}
            for file, records in zip(writer.files, writer.counts, strict=True)
        ],
    }


class _ShardWriter:
    """Records into files of a bounded number of records."""

    def __init__(self, folder: pathlib.Path):
        self.files: list[pathlib.Path] = []
        self.counts: list[int] = []
        self._folder = folder
        self._writer = None

    def write(self, record: bytes) -> None:
        """Add a record."""
        if self._writer is None or self.counts[-1] == _SHARD_RECORDS:
            self.close()
            self.files.append(self._folder / f"tokens-{len(self.files):05d}.array_record")
            self.counts.append(0)
            self._writer = array_record_module.ArrayRecordWriter(str(self.files[-1]), "group_size:1")
        self._writer.write(record)
        self.counts[-1] += 1

    def close(self) -> None:
        """Put what was written on disk."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
            with self.files[-1].open("rb") as file:
                os.fsync(file.fileno())


def _in_batches(documents: Iterable[RawText]) -> Iterator[list[RawText]]:
    """Documents in groups that keep every thread of a tokenizer at work."""
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += len(document.content)
        if size >= _BATCH_BYTES or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _write_file(path: pathlib.Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _remove_abandoned(folder: pathlib.Path, say: Callable[[str], None]) -> None:
    """Remove what processes of this machine that are gone have left half-written."""
    prefix = f"{folder.name}.part-{socket.gethostname()}-"
    for path in folder.parent.glob(f"{folder.name}.part-*"):
        pid = path.name.removeprefix(prefix)
        if pid.isdigit() and not _is_running(int(pid)):
            say(f"removed a cache of tokens that was left half-written: {path}")
            shutil.rmtree(path, ignore_errors=True)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
