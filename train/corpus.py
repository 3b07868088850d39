"""The documents of a run, source by source, and their split into what is trained on and what is held out.

What always holds: every document is on one side, chosen by a hash of its name alone; no list of documents is copied or
read to say how long its documents are, whether they lie in memory or in a cache.
"""

import dataclasses
import functools
import hashlib
import typing
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from train.packing import Packing, pack
from train.rows import Documents, Interleave, lengths_of
from train.text import AnyDocument, Document, DocumentPart, encode
from train.token_cache import StoredDocument, StoredDocuments
from train.tokenizer import ByteTokenizer, Tokenizer

_MAX_NAMED = 3
_HOW = {"file": "by a hash of the file's name", "tail": "the end of the only file"}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """The documents of one source; no document is empty and both sides hold at least one target."""

    source: str
    """Where the text comes from, in words."""
    weight: float = 1.0
    """Its share of the rows is this over the sum of all parts."""
    train: Documents
    held_out: Documents
    split_by: str
    """`file` (or line, row, record: whatever a document is), or `tail` when there is a single document."""
    num_empty: int
    """Empty documents, which hold no token and were left out."""
    is_cached: bool = False
    """Whether its documents are in a cache on disk."""
    skipped: Sequence[str] = ()
    """What could not be read and was passed over: file, place and reason."""
    num_skipped: int = 0
    """How many; `skipped` may list the first thousand only."""
    too_long: str = ""
    """Which documents were left out because they are longer than a row; empty: none."""

    @functools.cached_property
    def _packings(self) -> dict[int, Packing]:
        return {}

    def packing(self, seq_len: int) -> Packing:
        """The rows of the training documents; computed once."""
        if seq_len not in self._packings:
            self._packings[seq_len] = pack(lengths_of(self.train), seq_len)
        return self._packings[seq_len]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """All training and held-out documents."""

    parts: tuple[Part, ...]
    tokenizer: Tokenizer = dataclasses.field(default_factory=ByteTokenizer)

    @property
    def train(self) -> Documents:
        """Training documents of all parts, one after the other."""
        return _joined([part.train for part in self.parts])

    @property
    def held_out(self) -> Documents:
        """Held-out documents of all parts, one after the other."""
        return _joined([part.held_out for part in self.parts])

    @property
    def is_cached(self) -> bool:
        """Whether any of it is in a cache on disk."""
        return any(part.is_cached for part in self.parts)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hex digest of every name and token: equal exactly when a resumed run reads the text it was started on.

        It does not depend on where the text lies, or on whether it is in a cache.
        """
        digest = hashlib.sha256()
        for part in self.parts:
            for role, documents in (("train", part.train), ("held_out", part.held_out)):
                digest.update(f"{role} {len(documents)}\0".encode())
                digest.update(_digests(documents))
        return digest.hexdigest()

    @property
    def bytes_per_token(self) -> float:
        """Bytes of held-out text per token: what turns nats per token into bits per byte. 1 for bytes."""
        num_bytes = num_tokens = 0.0
        for part in self.parts:
            for document_bytes, length in _sizes(part.held_out):
                num_bytes, num_tokens = num_bytes + document_bytes, num_tokens + length
        return num_bytes / num_tokens

    def as_bytes(self, documents: Documents, *, max_tokens: int) -> list[Document]:
        """The first documents as bytes, about `max_tokens` of them: text that a model of bytes can be fitted on."""
        is_bytes = isinstance(self.tokenizer, ByteTokenizer)
        found, num_tokens = [], 0
        for index, document in enumerate(documents):
            if num_tokens >= max_tokens:
                break
            tokens = document.read(0, max_tokens - num_tokens)
            num_tokens += len(tokens)
            found.append(Document(str(index), tokens if is_bytes else encode(self.tokenizer.decode(tokens))))
        return found

    def summary(self, seq_len: int) -> str:
        """Lines for the start of a run: sizes, the split, documents longer than a row, padding, what was left out."""
        unit = "bytes" if isinstance(self.tokenizer, ByteTokenizer) else "tokens"
        shares = Interleave([part.weight for part in self.parts]).shares
        lines = []
        for part, rows in zip(self.parts, shares, strict=True):
            share = f" ({rows:.2%} of the rows)" if len(self.parts) > 1 else ""
            packing = part.packing(seq_len)
            num_pieces = int(np.sum(-(-packing.lengths[packing.lengths > seq_len] // seq_len)))
            lines += [
                f"text: {part.source}{share}",
                f"  training: {len(part.train):,} documents, {packing.num_tokens:,} {unit}",
                f"  held out ({_HOW[part.split_by]}): {len(part.held_out):,} documents, "
                + f"{num_tokens_of(part.held_out):,} {unit}",
                f"  {packing.num_split:,} training documents longer than a row of {seq_len:,} tokens, "
                + f"split into {num_pieces:,} pieces",
                f"  {packing.num_rows:,} rows an epoch, {packing.padding_share:.2%} padding",
            ]
            if part.num_empty:
                lines.append(f"  {part.num_empty:,} empty files left out")
            if part.num_skipped:
                lines.append(f"  {part.num_skipped:,} things that cannot be read passed over:")
                lines += [f"    {line}" for line in part.skipped[:_MAX_NAMED]]
            if part.too_long:
                lines.append(f"  left out: {part.too_long}")
        return "\n".join(lines)


def split_by_name(documents: Documents, fraction: float) -> tuple[Documents, Documents]:
    """(training, held out) by the hash of each name; both have at least one document."""
    if isinstance(documents, StoredDocuments):
        places = documents.cache.places[documents.numbers].astype(np.float64) / 2**64
    else:
        places = np.array([document.place / 2**64 for document in documents])
    threshold = min(max(fraction, np.nextafter(places.min(), 1.0)), places.max())
    if isinstance(documents, StoredDocuments):
        return (
            StoredDocuments(documents.cache, documents.numbers[places >= threshold]),
            StoredDocuments(documents.cache, documents.numbers[places < threshold]),
        )
    train = [document for document, place in zip(documents, places, strict=True) if place >= threshold]
    held_out = [document for document, place in zip(documents, places, strict=True) if place < threshold]
    return train, held_out


def split_tail(document: AnyDocument, fraction: float, is_bytes: bool) -> tuple[Documents, Documents]:
    """(training, held out) of a single document: its beginning and its end.

    Of bytes, the cut is where a line begins, or where a character does if there is no line in the first half of the
    end.
    """
    cut = max(1, min(int(len(document) * (1 - fraction)), len(document) - 2))
    if is_bytes:
        text = document.tokens.tobytes()
        line = text.find(b"\n", cut - 1, (cut + len(text)) // 2) + 1
        if line:
            cut = line
        while 1 < cut < len(text) and text[cut] & 0xC0 == 0x80:
            cut -= 1
    if isinstance(document, StoredDocument):
        split = (dataclasses.replace(document, stop=cut), dataclasses.replace(document, start=cut))
        return [split[0]], [split[1]]
    name, tokens = document.name if isinstance(document, Document) else "", document.tokens
    return (
        [DocumentPart(name, tokens[:cut], document.digest, 0)],
        [DocumentPart(f"{name} (from byte {cut})", tokens[cut:], document.digest, cut)],
    )


def train_side(documents: Iterable[Document], fraction: float) -> Iterator[AnyDocument]:
    """The training documents of `split_by_name`, or of `split_tail` of a single one, of bytes, as they come.

    Either side may get a document that its name alone would put on the other (see `train.data.load_corpus`): the one
    of the smallest number above the fraction and that of the largest below are kept back until all have been seen.
    """
    lowest: Document | None = None
    highest: Document | None = None
    num_documents = 0
    for document in documents:
        num_documents += 1
        passed_on: Document | None = None
        if document.place / 2**64 < fraction:
            highest = document if highest is None or document.place > highest.place else highest
        elif lowest is None or document.place < lowest.place:
            lowest, passed_on = document, lowest
        else:
            passed_on = document
        if passed_on is not None:
            yield passed_on
    last = highest if lowest is None else lowest
    if last is not None and num_documents == 1:
        train, _ = split_tail(last, fraction, is_bytes=True)
        yield from train
    elif last is not None and highest is not None:
        yield last


class _Joined(Sequence[AnyDocument]):
    """Several lists of documents, one after the other."""

    def __init__(self, lists: Sequence[Documents]):
        self._lists = lists
        self._ends = np.cumsum([len(documents) for documents in lists])
        self.lengths = np.concatenate([lengths_of(documents) for documents in lists])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: typing.Any) -> typing.Any:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        index += len(self) if index < 0 else 0
        if not 0 <= index < len(self):
            raise IndexError(index)
        which = int(np.searchsorted(self._ends, index, side="right"))
        return self._lists[which][index - (int(self._ends[which - 1]) if which else 0)]


def _joined(lists: Sequence[Documents]) -> Documents:
    return lists[0] if len(lists) == 1 else _Joined(lists)


def _digests(documents: Documents) -> bytes:
    if isinstance(documents, StoredDocuments):
        return documents.cache.digests[documents.numbers].tobytes()
    return b"".join(document.digest for document in documents)


def _sizes(documents: Documents) -> Iterator[tuple[float, int]]:
    """(bytes of text, tokens), of all documents or of each."""
    if isinstance(documents, StoredDocuments):
        yield int(documents.cache.num_bytes[documents.numbers].sum()), int(documents.lengths.sum())
        return
    for document in documents:
        each = 1.0
        if isinstance(document, StoredDocument):  # a part of a document: as many bytes a token as in all of it
            each = document.cache.num_bytes[document.number] / document.cache.lengths[document.number]
        yield float(each * len(document)), len(document)


def num_tokens_of(documents: Documents) -> int:
    """Tokens of all the documents; reads nothing."""
    return int(lengths_of(documents).sum())
