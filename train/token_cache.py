"""The cache of tokenised documents: ArrayRecord files with the tokens, and an index of the documents' lengths.

What always holds: a cache is complete or it does not count. It is written into a folder of another name and renamed
when all is on disk; its name is a fingerprint of what it was made of; and opening it checks the size of every file and
the hash of the index, so a cut one is found before the first step. ArrayRecord checks the tokens as they are read; a
byte that changed is told apart from a file that cannot be read. `train.cache_build` makes a cache.

    <data.cache>/<fingerprint>/          with -without-<hash> after it where something was passed over
        tokens-00000.array_record    little-endian ids; up to 65,536 a record, never of two documents
        index.npz                    per document: tokens, bytes of text, place of its name, digest
        meta.json                    sizes, counts, what was passed over
"""

import collections
import dataclasses
import hashlib
import io
import itertools
import json
import pathlib
import resource
import threading
import typing
from collections.abc import Sequence

import numpy as np
from array_record.python import array_record_module

from train.errors import DataError
from train.text import part_digest

VERSION = 3
CHUNK = 2**16
"""Tokens in a record, at most."""
META, INDEX = "meta.json", "index.npz"
_MAX_OPEN = 1024


class CacheDamaged(ValueError):
    """The cache cannot be used; the message says why."""


class CacheUnreadable(ValueError):
    """The cache may be sound, and cannot be read now; the message says why and what to do."""


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
    unread: list[str]
    """Files among it that the disk or the store did not give."""
    longest: str
    """Name of the longest document."""
    dtype: np.dtype
    first_records: np.ndarray
    """The record in which each document begins."""
    shards: "_Shards"

    def __len__(self) -> int:
        return len(self.lengths)

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """Tokens start to stop of a document.

        Raises:
            DataError: the file is damaged, gone, or cannot be read.
        """
        stop = min(stop, int(self.lengths[document]))
        if start >= stop:
            return np.zeros(0, self.dtype)
        record = int(self.first_records[document])
        found = self.shards.read(record + start // CHUNK, record + (stop - 1) // CHUNK + 1)
        tokens = np.frombuffer(b"".join(found), self.dtype)
        offset = start % CHUNK
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
        return digest if whole else part_digest(digest, self.start, self.stop)


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
            return _open_readers.read((self, file), records)
        except (RuntimeError, ValueError, IndexError) as error:
            reason = error
        try:  # a file that was put back, or whose handle the server forgot
            return _open_readers.read((self, file), records)
        except (RuntimeError, ValueError, IndexError):
            pass
        if (obstacle := _obstacle(file)) is not None:
            raise DataError(
                f"the cache of tokens cannot be read: {str(file)!r} ({obstacle.strerror or obstacle}); bring its disk "
                "back and continue with --resume, which makes a cache anew that is gone (too many open files: raise "
                "`ulimit -n`)"
            )
        raise DataError(
            f"the cache of tokens is damaged: {str(file)!r}, record {records[0]} ({str(reason)[:200]}); delete the "
            f"folder {str(file.parent)!r}, and the next run makes it again"
        )


class _OpenReaders:
    """Readers of the token files that were used last, of all caches together: there may be more files than a process
    may open."""

    def __init__(self, limit: int):
        self.limit = limit
        self._readers: collections.OrderedDict[tuple[_Shards, pathlib.Path], typing.Any] = collections.OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._readers)

    def read(self, which: tuple[_Shards, pathlib.Path], records: list[int]) -> list[bytes]:
        """Some records of a file; a reader that fails is closed."""
        with self._lock:
            reader = self._readers.pop(which, None)
            while len(self._readers) >= self.limit:
                self._readers.popitem(last=False)
            if reader is None:
                reader = array_record_module.ArrayRecordReader(str(which[1]), "readahead_buffer_size:0")
            found = reader.read(records)
            self._readers[which] = reader
            return found


def _open_limit() -> int:
    """A quarter of the files that this process may open; an open one takes a third of a megabyte."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_OPEN if soft == resource.RLIM_INFINITY else max(1, min(_MAX_OPEN, soft // 4))


_open_readers = _OpenReaders(_open_limit())


def _obstacle(file: pathlib.Path) -> OSError | None:
    """Why the file as a whole cannot be read, which is no damage: it is gone, forbidden, its disk fails."""
    try:
        with file.open("rb") as stream:
            while stream.read(2**20):
                pass
    except OSError as error:
        return error
    return None


def open_cache(folder: pathlib.Path) -> TokenCache:
    """The cache in `folder`.

    Raises:
        CacheDamaged: it is incomplete, was altered, or was made by another version.
        CacheUnreadable: it may be sound, but its disk or a permission does not let it be read.
    """
    try:
        meta = json.loads((folder / META).read_text())
        index = (folder / INDEX).read_bytes()
        if meta["version"] != VERSION:
            raise CacheDamaged(f"it has version {meta['version']}, this is version {VERSION}")
        if hashlib.sha256(index).hexdigest() != meta["index_sha256"]:
            raise CacheDamaged(f"{INDEX} was altered")
        for shard in meta["shards"]:
            size = (folder / shard["name"]).stat().st_size
            if size != shard["bytes"]:
                raise CacheDamaged(f"{shard['name']} has {size:,} bytes and should have {shard['bytes']:,}")
        with np.load(io.BytesIO(index), allow_pickle=False) as arrays:
            lengths, num_bytes, places, digests = (
                arrays[name] for name in ("lengths", "num_bytes", "places", "digests")
            )
        records = -(-lengths // CHUNK)
        return TokenCache(
            folder=folder,
            lengths=lengths,
            num_bytes=num_bytes,
            places=places,
            digests=digests,
            num_empty=meta["num_empty"],
            skipped=meta["skipped"],
            num_skipped=meta["num_skipped"],
            unread=meta["unread"],
            longest=meta["longest"],
            dtype=np.dtype(meta["dtype"]),
            first_records=np.cumsum(records) - records,
            shards=_Shards(
                [folder / shard["name"] for shard in meta["shards"]],
                [shard["records"] for shard in meta["shards"]],
            ),
        )
    except CacheDamaged:
        raise
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CacheDamaged(f"{pathlib.Path(error.filename or '').name or 'a file'}: {error.strerror}") from None
    except OSError as error:
        raise CacheUnreadable(
            f"the cache of tokens {str(folder)!r} cannot be read ({pathlib.Path(error.filename or '').name}: "
            f"{error.strerror}); make it readable, bring its disk back, or name another folder with --data.cache"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise CacheDamaged(f"its {META} or {INDEX} cannot be read ({type(error).__name__}: {error})") from None
