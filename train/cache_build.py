"""Making the cache of tokenised documents that `train.token_cache` reads.

What always holds: it is written into a folder of another name, which nobody else has, and renamed when all is on disk.
Who writes holds a lock, so that what a killed process left is removed by the next one on its machine, and what a living
one writes is not. A whole cache that is found in place is never removed: another process may read it.
"""

import array
import contextlib
import fcntl
import hashlib
import io
import json
import os
import pathlib
import shutil
import socket
import typing
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator

import numpy as np
from array_record.python import array_record_module

from train.readers import Damage, RawText
from train.text import document_digest, name_place
from train.token_cache import CHUNK, INDEX, META, VERSION, CacheDamaged, TokenCache, open_cache
from train.tokenizer import Tokenizer

_SHARD_RECORDS = 2**16
_BATCH_BYTES = 2**22
_BATCH_DOCUMENTS = 2**12
_SAY_EVERY = 2**28
_LOCK = "lock"
_DAMAGED = ".damaged"


def build_cache(
    folder: pathlib.Path,
    documents: Iterable[RawText],
    *,
    tokenizer: Tokenizer,
    damage: Damage,
    say: Callable[[str], None],
) -> TokenCache:
    """Tokenise documents into `folder`, which appears when all is done; a damaged one in its place is replaced.

    Where something was passed over the name of the folder says so (`short_name`): `folder` itself is always whole, and
    what one run could not read another may.

    Raises:
        ValueError: the folder cannot be written, or a document cannot be read.
    """
    folder = folder.absolute()
    try:
        _remove_abandoned(folder, say)
        with _new_folder(folder) as partial:
            meta = _write(partial, documents, tokenizer, damage, say)
            meta |= {"skipped": damage.skipped, "num_skipped": damage.num_skipped, "unread": damage.unread}
            _write_file(partial / META, json.dumps(meta, indent=1).encode())
            (partial / _LOCK).unlink()
            return _put_in_place(partial, short_name(folder, damage) if damage.num_skipped else folder)
    except (OSError, RuntimeError) as error:  # ArrayRecord reports a full disk as RuntimeError
        reason = getattr(error, "strerror", None) or str(error)[:200]
        raise ValueError(
            f"the cache of tokens cannot be written to {str(folder)!r} ({reason}); make room there, or name another "
            "folder with --data.cache"
        ) from error


def short_name(folder: pathlib.Path, damage: Damage) -> pathlib.Path:
    """Where the cache lies that would be `folder` if this had not been passed over."""
    passed_over = json.dumps([damage.num_skipped, damage.skipped, damage.unread])
    digest = hashlib.sha256(passed_over.encode("utf-8", "surrogateescape")).hexdigest()[:12]
    return folder.with_name(f"{folder.name}-without-{digest}")


def short_caches(folder: pathlib.Path) -> list[pathlib.Path]:
    """Every `short_name` of a folder that is there."""
    return sorted(folder.parent.glob(f"{folder.name}-without-*[0-9a-f]"))


@contextlib.contextmanager
def _new_folder(folder: pathlib.Path) -> Generator[pathlib.Path]:
    """A new folder beside `folder`, locked inside the `with`, and removed after it unless it was renamed."""
    partial = folder.with_name(f"{_partial_prefix(folder)}{uuid.uuid4().hex[:12]}")
    partial.mkdir(parents=True)
    try:
        with (partial / f"{_LOCK}.new").open("wb") as lock:
            with contextlib.suppress(OSError):  # a disk without locks: then nobody can take it for abandoned
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (partial / f"{_LOCK}.new").rename(partial / _LOCK)
            yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _put_in_place(partial: pathlib.Path, folder: pathlib.Path) -> TokenCache:
    """Rename, unless another process was quicker: it made the same, and reads it already."""
    while True:
        try:
            partial.rename(folder)
            return open_cache(folder)
        except OSError:
            if not folder.exists():
                raise
        try:
            return open_cache(folder)
        except CacheDamaged:
            aside = partial.with_name(f"{partial.name}{_DAMAGED}")
            with contextlib.suppress(FileNotFoundError):
                folder.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)


def _write(
    folder: pathlib.Path,
    documents: Iterable[RawText],
    tokenizer: Tokenizer,
    damage: Damage,
    say: Callable[[str], None],
) -> dict[str, typing.Any]:
    """The token files and the index; returns what `meta.json` says of them."""
    lengths, num_bytes, places, digests = array.array("q"), array.array("q"), array.array("Q"), bytearray()
    num_empty, num_tokens, most, longest = 0, 0, 0, ""
    writer = _ShardWriter(folder)
    try:
        for batch in _in_batches(documents):
            contents = [document.content for document in batch]
            for document, tokens in zip(batch, tokenizer.encode(contents), strict=True):
                if not document.content:
                    num_empty += 1
                    continue
                if not len(tokens):
                    damage.found(f"{document.name!r}: the tokenizer makes no token of its text", "use another one")
                    continue
                for start in range(0, len(tokens), CHUNK):
                    writer.write(tokens[start : start + CHUNK].tobytes())
                lengths.append(len(tokens))
                num_bytes.append(len(document.content))
                places.append(name_place(document.name))
                digests += document_digest(document.name, tokens)
                num_tokens += len(tokens)
                if len(tokens) > most:
                    most, longest = len(tokens), document.name
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
        digests=np.frombuffer(digests, np.uint8).reshape(-1, 16),
    )
    _write_file(folder / INDEX, buffer.getvalue())
    return {
        "version": VERSION,
        "dtype": tokenizer.dtype.newbyteorder("<").str,
        "num_documents": len(lengths),
        "num_tokens": num_tokens,
        "num_empty": num_empty,
        "longest": longest,
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


def _partial_prefix(folder: pathlib.Path) -> str:
    """How the names begin of what processes of this machine write in the place of `folder`."""
    return f"{folder.name}.part-{socket.gethostname()}-"


def _remove_abandoned(folder: pathlib.Path, say: Callable[[str], None]) -> None:
    """Remove what processes of this machine that are gone have left half-written."""
    for path in folder.parent.glob(f"{folder.name}.part-*"):
        if path.name.rsplit("-", 1)[0] + "-" == _partial_prefix(folder) and _is_abandoned(path):
            say(f"removed a cache of tokens that was left half-written: {path}")
            shutil.rmtree(path, ignore_errors=True)


def _is_abandoned(partial: pathlib.Path) -> bool:
    """Whether nobody holds the lock. Process numbers do not tell: in a container they come again.

    A damaged cache that was moved aside has none, and nobody reads it.
    """
    if partial.name.endswith(_DAMAGED):
        return True
    try:
        with (partial / _LOCK).open("r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
