"""The text of a run: its sources, the held-out split, and the batches made of it.

What always holds: every document is either trained on or held out, by a hash of its name alone; none is read in part,
cut off or dropped, except what the user asked to skip, which is counted. Text files as bytes are kept in memory;
everything else is tokenised once, into a cache (`train.token_cache`). Rows do not depend on which it is.
"""

import hashlib
import json
import os
import pathlib
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from train.corpus import Corpus, Part, num_tokens_of, split_by_name, split_tail
from train.readers import Damage, RawText, SourceFile, list_files, read_documents
from train.rows import (
    IGNORE,
    Batch,
    BatchIterator,
    Documents,
    Rows,
    deeper_targets,
    held_out_batches,
    lengths_of,
    local_data_indices,
    rows_for,
)
from train.text import VOCAB_SIZE, Document, decode, encode, read_standard_library
from train.token_cache import VERSION, CacheDamaged, StoredDocuments, TokenCache, build_cache, open_cache
from train.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

if typing.TYPE_CHECKING:
    from train.config import DataConfig

__all__ = [
    "IGNORE",
    "VOCAB_SIZE",
    "Batch",
    "Corpus",
    "Document",
    "Part",
    "batches",
    "decode",
    "deeper_targets",
    "documents_to_tokenise",
    "encode",
    "held_out_batches",
    "load_corpus",
    "local_data_indices",
    "rows_for",
]

DEFAULT_CACHE = ".cache/tokens"
_STANDARD_LIBRARY = "Python's standard library sources and language reference"


def load_corpus(data: "DataConfig", *, say: Callable[[str], None] = lambda line: None) -> Corpus:
    """Reads the text that `data` names, or opens its cache, and splits it into training and held-out documents.

    With several documents the split is by document: one is held out when the SHA-256 hash of its name, taken as a
    number in [0, 1), is below `held_out_fraction`. The choice depends on the name alone, not on the order or the number
    of documents. When none falls below, the one with the smallest hash is held out; when all do, the one with the
    largest is kept for training. With a single document that is impossible: the end of it, from the beginning of a
    line where there is one, is held out as a document of its own. Each source is split by itself.

    Args:
        data: What to read.
        say: Told what takes long, and why a cache is made.

    Raises:
        ValueError: the text is missing, unreadable, empty, not text, or too small for one batch.
    """
    _check_fields(data)
    tokenizer = load_tokenizer(data.tokenizer, data.end_token)
    parts = tuple(
        _load_part(data, tokenizer, path=path, field=field, weight=weight, say=say)
        for path, field, weight in _sources(data)
    )
    corpus = Corpus(parts=parts, tokenizer=tokenizer)
    _check_size(corpus, data)
    _check_lengths(corpus, data)
    return corpus


def batches(
    text: Corpus | Documents,
    *,
    seq_len: int,
    batch_size: int,
    seed: int,
    num_epochs: int | None = None,
    data_indices: Iterable[int] = (0,),
    num_data: int = 1,
) -> BatchIterator:
    """Training batches, in an order set by `seed`.

    Args:
        text: A corpus, whose sources are mixed by their weights, or some documents.
        seq_len: Tokens in a row.
        batch_size: Rows in a step, over all devices and hosts.
        seed: Sets the order of the rows.
        num_epochs: Times every row is read, the last batch filled up with padding (segment id 0); None: without end.
            With several sources an epoch is as many rows as all of them have.
        data_indices: The indices of the data axis whose rows this process reads.
        num_data: Size of the data axis.

    Returns:
        An iterator. `get_state()` is `{"next_row": n}`; `set_state()` of it, on an iterator of the same text, row
        length and seed, continues with that row, on any number of hosts.
    """
    if isinstance(text, Corpus):
        sources = [(part.train, part.weight) for part in text.parts]
        packings = [part.packing(seq_len) for part in text.parts]
    else:
        sources, packings = [(text, 1.0)], None
    rows = Rows(sources, seq_len=seq_len, seed=seed, packings=packings)
    num_rows = None if num_epochs is None else num_epochs * rows.num_rows
    return BatchIterator(
        rows, batch_size=batch_size, num_rows=num_rows, data_indices=tuple(data_indices), num_data=num_data
    )


def documents_to_tokenise(data: "DataConfig") -> Iterator[bytes]:
    """The training documents of all sources, before they are tokens: what a tokenizer is made from."""
    for path, field, _ in _sources(data):
        damage = Damage(on_error=data.on_error)
        files = None if path is None else list_files(path)
        for document in _read(files, field, damage):
            if Document(document.name, np.zeros(0, np.uint8)).place / 2**64 >= data.held_out_fraction:
                yield document.content


def _sources(data: "DataConfig") -> list[tuple[str | None, str, float]]:
    """(path, field, weight) of every source."""
    if data.sources:
        return [(source.path, source.field, source.weight) for source in data.sources]
    return [(data.path, data.field, 1.0)]


def _read(files: list[SourceFile] | None, field: str, damage: Damage) -> Iterator[RawText]:
    """The documents of some files, or of the standard library."""
    if files is not None:
        yield from read_documents(files, field=field, damage=damage)
        return
    for document in read_standard_library():
        yield RawText(document.name, document.tokens.tobytes())


def _load_part(
    data: "DataConfig",
    tokenizer: Tokenizer,
    *,
    path: str | None,
    field: str,
    weight: float,
    say: Callable[[str], None],
) -> Part:
    """One source, from memory or from its cache."""
    files = None if path is None else list_files(path)
    in_memory = isinstance(tokenizer, ByteTokenizer) and data.cache is None
    damage, cache = Damage(on_error=data.on_error), None
    if in_memory and all(file.kind == "text" and file.is_local for file in files or ()):
        found = [Document(name, np.frombuffer(text, np.uint8)) for name, text in _read(files, field, damage)]
        documents: Documents = [document for document in found if len(document)]
        num_empty, skipped, num_skipped = len(found) - len(documents), damage.skipped, len(damage.skipped)
        first_empty = next((document.name for document in found if not len(document)), None)
    else:
        cache = _cache(data, tokenizer, files=files, field=field, damage=damage, say=say)
        documents = StoredDocuments(cache, np.arange(len(cache)))
        num_empty, skipped, num_skipped = cache.num_empty, cache.skipped, cache.num_skipped
        first_empty = files[0].name if files else None
    if not len(documents):
        raise ValueError(_no_text(path, first_empty, num_empty, skipped, num_skipped))
    split_by = "file" if len(documents) > 1 else "tail"
    if split_by == "file":
        train, held_out = split_by_name(documents, data.held_out_fraction)
    else:
        train, held_out = split_tail(documents[0], data.held_out_fraction, isinstance(tokenizer, ByteTokenizer))
    return Part(
        source=_STANDARD_LIBRARY if path is None else path,
        weight=weight,
        train=train,
        held_out=held_out,
        split_by=split_by,
        num_empty=num_empty,
        is_cached=cache is not None,
        skipped=skipped,
        num_skipped=num_skipped,
    )


def _cache(
    data: "DataConfig",
    tokenizer: Tokenizer,
    *,
    files: list[SourceFile] | None,
    field: str,
    damage: Damage,
    say: Callable[[str], None],
) -> TokenCache:
    """The cache of one source: the one that is there, if it was made of these files, or a new one."""
    if files is None:
        stamps = [[document.name, document.digest.hex()] for document in read_standard_library()]
    else:
        stamps = [
            [file.name, os.path.realpath(file.path) if file.is_local else file.path, file.stamp] for file in files
        ]
    key = json.dumps([VERSION, tokenizer.fingerprint, field, stamps])
    name = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:24]
    folder = pathlib.Path(data.cache or DEFAULT_CACHE).expanduser() / name
    if folder.exists():
        try:
            cache = open_cache(folder)
        except CacheDamaged as error:
            say(f"the cache of tokens {folder} is incomplete or damaged ({error}): it is made again")
        else:
            if data.on_error == "skip" or not cache.num_skipped:
                say(f"tokens: {folder}, made before")
                return cache
    say(f"tokens: making {folder}")
    return build_cache(folder, _read(files, field, damage), tokenizer=tokenizer, damage=damage, say=say)


def _no_text(
    path: str | None, first_empty: str | None, num_empty: int, skipped: Sequence[str], num_skipped: int
) -> str:
    """What to say about a source without a document that has text."""
    if num_skipped:
        return (
            f"data.path={path!r} holds no text that can be read: {num_skipped} things were passed over, the first: "
            f"{skipped[0]}; mend them"
        )
    others = f" and so are the other {num_empty - 1} files" if num_empty > 1 else ""
    return f"data.path={path!r} holds no text: {first_empty!r} is empty{others}; give a file or a folder with text"


def _check_fields(data: "DataConfig") -> None:
    """Raises for sizes that no text can satisfy."""
    for name in ("seq_len", "batch_size"):
        if getattr(data, name) < 1:
            raise ValueError(f"data.{name}={getattr(data, name)} must be at least 1")
    if not 0 < data.held_out_fraction < 1:
        raise ValueError(
            f"data.held_out_fraction={data.held_out_fraction} must be above 0 (or nothing is held out) and below 1 (or "
            "nothing is left to train on); 0.05 is usual"
        )


def _check_size(corpus: Corpus, data: "DataConfig") -> None:
    """Raises when the text does not fill one batch or cannot be scored."""
    unit = "bytes" if isinstance(corpus.tokenizer, ByteTokenizer) else "tokens"
    source = ", ".join(part.source for part in corpus.parts)
    size, needed = num_tokens_of(corpus.train), data.batch_size * data.seq_len
    if size < needed:
        raise ValueError(
            f"the training text ({source}) has {size:,} {unit} in {len(corpus.train):,} documents, but one batch "
            f"takes data.batch_size * data.seq_len = {data.batch_size} * {data.seq_len} = {needed:,}; lower one of "
            "them or give more text"
        )
    for part in corpus.parts:
        for role, documents in (("training", part.train), ("held-out", part.held_out)):
            if lengths_of(documents).max() < 2:
                raise ValueError(
                    f"the {role} text ({part.source}) has no document of 2 {unit} or more, so there is nothing to "
                    f"predict; give longer files or change data.held_out_fraction={data.held_out_fraction}"
                )


def _check_lengths(corpus: Corpus, data: "DataConfig") -> None:
    """Raises when a document is longer than a row and the user wants none to be split."""
    if data.long_documents == "split":
        return
    lengths = np.concatenate([lengths_of(corpus.train), lengths_of(corpus.held_out)])
    num_long, longest = int(np.count_nonzero(lengths > data.seq_len)), int(lengths.max())
    if num_long:
        raise ValueError(
            f"{num_long:,} of {len(lengths):,} documents are longer than data.seq_len={data.seq_len} tokens (the "
            f"longest has {longest:,}), and data.long_documents='refuse'; use --data.seq-len {longest} or "
            "--data.long-documents split"
        )
