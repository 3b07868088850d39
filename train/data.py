"""The text of a run: its sources, the held-out split, and the batches made of it.

What always holds: every document is either trained on or held out, by a hash of its name alone; none is read in part,
cut off or dropped, except what the user asked to skip, which is counted. No file belongs to two sources, of which one
might hold out what the other trains on. Text files as bytes are kept in memory; everything else is tokenised once, into
a cache (`train.token_cache`). Rows do not depend on which it is.
"""

import dataclasses
import hashlib
import json
import pathlib
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from train.cache_build import build_cache, short_caches
from train.corpus import Corpus, Part, num_tokens_of, split_by_name, split_tail, train_side
from train.files import local_path
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
from train.token_cache import VERSION, CacheDamaged, StoredDocuments, TokenCache, open_cache
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
        ValueError: the text is missing, unreadable, empty, not text, in two sources, or too small for one batch.
    """
    _check_fields(data)
    tokenizer = load_tokenizer(data.tokenizer, data.end_token)
    parts = tuple(_load_part(data, tokenizer, source, say=say) for source in _list_sources(data))
    corpus = Corpus(parts=parts, tokenizer=tokenizer)
    _check_size(corpus, data)
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


def documents_to_tokenise(data: "DataConfig", *, say: Callable[[str], None] = lambda line: None) -> Iterator[bytes]:
    """The training documents of all sources, before they are tokens: what a tokenizer is made from.

    Args:
        data: What to read; the split is that of `load_corpus`, a single document is cut by bytes.
        say: Told how much was passed over.

    Raises:
        ValueError: as `load_corpus`, but for what rows need.
    """
    _check_fields(data)
    for source in _list_sources(data):
        texts = (Document(name, np.frombuffer(text, np.uint8)) for name, text in source.read() if text)
        is_empty, files = True, source.files or []
        for document in train_side(texts, data.held_out_fraction):
            is_empty = False
            yield document.tokens.tobytes()
        skipped = source.listing.skipped + source.damage.skipped
        num_skipped = source.listing.num_skipped + source.damage.num_skipped
        if is_empty:
            raise ValueError(_no_text(source.path, files[0].name if files else None, len(files), skipped, num_skipped))
        if skipped:
            say(f"{num_skipped:,} things that cannot be read passed over, the first: {skipped[0]}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Source:
    """Where a part of the text comes from."""

    path: str | None
    """None: the standard library."""
    files: list[SourceFile] | None
    field: str
    weight: float
    listing: Damage
    """What was passed over when the files were listed."""
    damage: Damage
    """What is passed over when they are read."""

    def read(self) -> Iterator[RawText]:
        """Its documents."""
        if self.files is not None:
            yield from read_documents(self.files, field=self.field, damage=self.damage)
            return
        for document in read_standard_library():
            yield RawText(document.name, document.tokens.tobytes())


def _list_sources(data: "DataConfig") -> list[_Source]:
    """Every source and its files.

    Raises:
        ValueError: some have none, all of which are named, or two have the same.
    """
    named = [(source.path, source.field, source.weight) for source in data.sources]
    sources, problems = [], []
    for path, field, weight in named or [(data.path, data.field, 1.0)]:
        listing, damage = Damage(on_error=data.on_error), Damage(on_error=data.on_error)
        try:
            files = None if path is None else list_files(path, listing)
        except ValueError as error:
            problems.append(str(error))
            continue
        sources.append(_Source(path=path, files=files, field=field, weight=weight, listing=listing, damage=damage))
    if problems:
        raise ValueError("\n".join(problems))
    if len(sources) > 1:
        _check_overlap(sources)
    return sources


def _check_overlap(sources: Sequence[_Source]) -> None:
    """Raises when two sources read the same text. Two fields of the same rows are two texts."""
    owners: dict[tuple[str, str], int] = {}
    for index, source in enumerate(sources):
        for file in source.files or ():
            field = "" if _kind(file, source.field) in ("text", "array_record") else source.field
            owner = owners.setdefault((file.real_path, field), index)
            if owner != index:
                raise ValueError(
                    f"data.sources.{owner} ({sources[owner].path!r}) and data.sources.{index} ({source.path!r}) both "
                    f"hold {file.real_path!r}, and what one of them holds out the other would train on; name folders "
                    "that do not overlap, or take one of the two out"
                )


def _kind(file: SourceFile, field: str) -> str:
    try:
        return file.kind(field)
    except OSError:  # its reader will say so
        return "unreadable"


def _load_part(data: "DataConfig", tokenizer: Tokenizer, source: _Source, *, say: Callable[[str], None]) -> Part:
    """One source, from memory or from its cache."""
    files, damage = source.files, source.damage
    in_memory = isinstance(tokenizer, ByteTokenizer) and data.cache is None
    cache = None
    if in_memory and all(file.is_local and _kind(file, source.field) == "text" for file in files or ()):
        found = [Document(name, np.frombuffer(text, np.uint8)) for name, text in source.read()]
        documents: Documents = [document for document in found if len(document)]
        num_empty, skipped, num_skipped = len(found) - len(documents), damage.skipped, damage.num_skipped
        first_empty = next((document.name for document in found if not len(document)), None)
    else:
        cache = _cache(data, tokenizer, source, say=say)
        documents = StoredDocuments(cache, np.arange(len(cache)))
        num_empty, skipped, num_skipped = cache.num_empty, cache.skipped, cache.num_skipped
        first_empty = files[0].name if files else None
    skipped, num_skipped = [*source.listing.skipped, *skipped], source.listing.num_skipped + num_skipped
    if not len(documents):
        raise ValueError(_no_text(source.path, first_empty, num_empty, skipped, num_skipped))
    documents, too_long = _without_long(documents, data, source.path)
    split_by = "file" if len(documents) > 1 else "tail"
    if split_by == "file":
        train, held_out = split_by_name(documents, data.held_out_fraction)
    else:
        train, held_out = split_tail(documents[0], data.held_out_fraction, isinstance(tokenizer, ByteTokenizer))
    return Part(
        source=_STANDARD_LIBRARY if source.path is None else source.path,
        weight=source.weight,
        train=train,
        held_out=held_out,
        split_by=split_by,
        num_empty=num_empty,
        is_cached=cache is not None,
        skipped=skipped,
        num_skipped=num_skipped,
        too_long=too_long,
    )


def _cache(data: "DataConfig", tokenizer: Tokenizer, source: _Source, *, say: Callable[[str], None]) -> TokenCache:
    """The cache of one source: the one that is there, if it was made of these files, or a new one."""
    if source.files is None:
        stamps = [[document.name, document.digest.hex()] for document in read_standard_library()]
    else:
        stamps = [[file.name, file.real_path if file.is_local else file.path, file.stamp] for file in source.files]
    key = json.dumps([VERSION, tokenizer.fingerprint, source.field, stamps])
    name = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:24]
    folder = pathlib.Path(data.cache or DEFAULT_CACHE).expanduser() / name
    _check_cache_is_outside(data.cache, source)
    for place in [folder, *(short_caches(folder) if data.on_error == "skip" else [])]:
        cache = _open_cache(place, source.files or [], say)
        if cache is not None:
            say(f"tokens: {place}, made before")
            return cache
    say(f"tokens: making {folder}")
    return build_cache(folder, source.read(), tokenizer=tokenizer, damage=source.damage, say=say)


def _open_cache(folder: pathlib.Path, files: Sequence[SourceFile], say: Callable[[str], None]) -> TokenCache | None:
    """The cache in a folder; None where there is none, it is of no use, or files that it lacks can be read by now."""
    if not folder.exists():
        return None
    try:
        cache = open_cache(folder)
    except CacheDamaged as error:
        say(f"the cache of tokens {folder} is incomplete or damaged ({error}): it is made again")
        return None
    lacking = [file for file in files if file.path in cache.unread]
    if lacking and all(file.can_be_read() for file in lacking):
        say(f"the cache of tokens {folder} lacks {lacking[0].path!r}, which can be read by now: another one is made")
        return None
    return cache


def _check_cache_is_outside(cache: str | None, source: _Source) -> None:
    """Raises when the next run would read the cache as text."""
    text = None if source.path is None else local_path(source.path)
    if cache is None or text is None:
        return
    inside, text = pathlib.Path(cache).expanduser().resolve(), text.resolve()
    if inside.is_relative_to(text) and not any(part.startswith(".") for part in inside.relative_to(text).parts):
        raise ValueError(
            f"data.cache={cache!r} lies in data.path={source.path!r}, so its files would be read as text; name a "
            "folder outside, or one that begins with a dot"
        )


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
    """Raises for sizes that no text can satisfy, and for two answers to where the text is."""
    if data.sources and data.path is not None:
        raise ValueError(f"data.path={data.path!r} must be left out where data.sources names sources; add it to them")
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


def _without_long(documents: Documents, data: "DataConfig", path: str | None) -> tuple[Documents, str]:
    """The documents to use, and words for those that were left out, where documents longer than a row are refused.

    Raises:
        ValueError: there are such documents, and they are not to be skipped.
    """
    lengths = lengths_of(documents)
    fits = lengths <= data.seq_len
    if data.long_documents == "split" or fits.all():
        return documents, ""
    longest = int(lengths.max())
    first = documents[int(np.argmax(lengths))]
    name = documents.cache.longest if isinstance(documents, StoredDocuments) else getattr(first, "name", "")
    what = (
        f"{np.count_nonzero(~fits):,} of {len(lengths):,} documents are longer than data.seq_len={data.seq_len} tokens "
        f"(the longest has {longest:,}: {name!r} of {_STANDARD_LIBRARY if path is None else path})"
    )
    if data.on_error != "skip":
        raise ValueError(
            f"{what}, and data.long_documents='refuse'; use --data.seq-len {longest} or --data.long-documents split, "
            "or count and leave them out with --data.on-error skip"
        )
    if not fits.any():
        raise ValueError(f"{what}, so none is left; use --data.seq-len {longest} or --data.long-documents split")
    if isinstance(documents, StoredDocuments):
        return StoredDocuments(documents.cache, documents.numbers[fits]), what
    return [documents[number] for number in np.flatnonzero(fits).tolist()], what
