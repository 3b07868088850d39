"""Rows of tokens from documents: the held-out split, targets, packing, order, and a position that can be saved.

What always holds:

- Every byte of every training document comes up exactly once per epoch, and so does every (byte, next byte) pair of
  a document. A document longer than a row is split into pieces of at most a row; nothing is cut off or dropped.
- Targets are made on whole documents, before splitting: the last token of a piece has the first byte of the next piece
  as its target. Only a document's own last byte has none.
- A token never has a target from another document, and padding has none. A missing target is -1, never 0, which is a
  token.
- What the k-th batch holds depends on the documents, the sizes, the seed and k; never on threads or on how often the
  iterator was saved and restored.

A row with two documents (a, b), a longer document's piece (c) and padding; the segment ids keep them apart:

    tokens       a0 a1 a2 b0 b1 c0 c1  0
    targets      a1 a2 -1 b1 -1 c1 c2 -1
    positions     0  1  2  0  1  0  1  0
    segment_ids   1  1  1  2  2  3  3  0

Positions restart at 0 in each piece, also inside a split document: a piece cannot attend to the pieces before it,
rotary embeddings depend on differences only, and so every position stays inside the range that rows of this length
train.
"""

import dataclasses
import hashlib
import typing
from collections.abc import Iterable, Sequence

import grain
import numpy as np
from grain.experimental import BestFitPackIterDataset

from train.text import VOCAB_SIZE, Document, decode, encode, read_path, read_standard_library

if typing.TYPE_CHECKING:
    from train.config import DataConfig

__all__ = [
    "IGNORE",
    "VOCAB_SIZE",
    "Batch",
    "Corpus",
    "Document",
    "SplitReport",
    "batches",
    "decode",
    "encode",
    "held_out_batches",
    "load_corpus",
    "padding_share",
    "split_report",
]

type Batch = dict[str, np.ndarray]
"""tokens, targets, positions, segment_ids: int32 arrays [batch_size, seq_len] in natural order."""

IGNORE = -1
"""The target of a token whose next token is not known."""

_HELD_OUT_ORDER = 0
_MAX_WINDOW_ROWS = 64
_MAX_WINDOW_TOKENS = 2**21
_PADDING = {"tokens": 0, "targets": IGNORE, "positions": 0, "segment_ids": 0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitReport:
    """How many documents are longer than a row, and what became of them."""

    num_documents: int
    num_split: int
    """Documents longer than a row."""
    num_split_pieces: int
    """Pieces these were split into."""
    num_pieces: int
    """Pieces in all; a document that fits a row is one piece."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """Training and held-out documents; no document is empty and both lists hold at least one target."""

    source: str
    """Where the text comes from, in words."""
    train: list[Document]
    held_out: list[Document]
    split_by: str
    """`file`, or `tail` when there is a single file."""
    num_empty: int
    """Empty files, which hold no token and were left out."""

    @property
    def fingerprint(self) -> str:
        """Hex digest of every name and byte: equal exactly when a resumed run reads the text it was started on."""
        digest = hashlib.sha256()
        for role, documents in (("train", self.train), ("held_out", self.held_out)):
            for document in documents:
                digest.update(role.encode() + b"\0" + _name_bytes(document) + f"\0{len(document)}\0".encode())
                digest.update(document.tokens)
        return digest.hexdigest()

    def summary(self, seq_len: int) -> str:
        """Lines for the start of a run: sizes, the split, how many documents are longer than a row, empty files."""
        how = "by a hash of the file's name" if self.split_by == "file" else "the end of the only file"
        report = split_report(self.train, seq_len=seq_len)
        lines = [
            f"text: {self.source}",
            f"  training: {len(self.train):,} documents, {_num_tokens(self.train):,} bytes",
            f"  held out ({how}): {len(self.held_out):,} documents, {_num_tokens(self.held_out):,} bytes",
            f"  {report.num_split:,} training documents longer than a row of {seq_len:,} tokens, "
            + f"split into {report.num_split_pieces:,} pieces",
        ]
        if self.num_empty:
            lines.append(f"  {self.num_empty:,} empty files left out")
        return "\n".join(lines)


def load_corpus(data: "DataConfig") -> Corpus:
    """Reads the text that `data` names and splits it into training and held-out documents.

    With several files the split is by file: a file is held out when the SHA-256 hash of its name, taken as a number in
    [0, 1), is below `held_out_fraction`. The choice depends on the name alone, not on the order or the number of
    files. When no file falls below, the one with the smallest hash is held out; when every file does, the one with
    the largest is kept for training. With a single file a split by file is impossible: the end of the file, from the
    beginning of a line where there is one, is held out as a document of its own.

    Raises:
        ValueError: the text is missing, unreadable, empty, not text, or too small for one batch.
    """
    _check_fields(data)
    if data.path is None:
        source, documents = "Python's standard library sources and language reference", read_standard_library()
    else:
        source, documents = data.path, read_path(data.path)
    non_empty = [document for document in documents if len(document)]
    if not non_empty:
        others = f" and so are the other {len(documents) - 1} files" if len(documents) > 1 else ""
        raise ValueError(
            f"data.path={data.path!r} holds no text: {documents[0].name!r} is empty{others}; give a file or a folder "
            "with text"
        )
    split_by = "file" if len(non_empty) > 1 else "tail"
    split = _split_by_name if split_by == "file" else _split_tail
    train, held_out = split(non_empty, data.held_out_fraction)
    corpus = Corpus(
        source=source, train=train, held_out=held_out, split_by=split_by, num_empty=len(documents) - len(non_empty)
    )
    _check_size(corpus, data)
    return corpus


def split_report(documents: Sequence[Document], *, seq_len: int) -> SplitReport:
    """Counts the documents longer than `seq_len` and the pieces they are split into."""
    counts = [_num_pieces(document, seq_len) for document in documents]
    split = [count for count in counts if count > 1]
    return SplitReport(
        num_documents=len(counts), num_split=len(split), num_split_pieces=sum(split), num_pieces=sum(counts)
    )


def batches(
    documents: Sequence[Document], *, seq_len: int, batch_size: int, seed: int, num_epochs: int | None = None
) -> grain.DatasetIterator[Batch]:
    """Training batches, in an order set by `seed`.

    The pieces of all documents form one stream: epoch after epoch, each epoch every piece once, in a new order.
    Consecutive stretches of the stream are packed (best fit) into windows of rows, and the rows of a window are
    shuffled. With `num_epochs=None` the stream has no end: nothing is left over between epochs, but the window (and
    the batch) in which an epoch ends also holds the beginning of the next. With a number the stream ends after that
    many epochs, and the last batch is filled up with rows of padding (segment id 0).

    Args:
        documents: The training documents.
        seq_len: Tokens in a row.
        batch_size: Rows in a batch.
        seed: Sets the order of the pieces and of the rows.
        num_epochs: Times every document is read; None: without end.

    Returns:
        An iterator. `get_state()` gives a small dictionary of JSON values (counters, no text); `set_state()` of it, on
        an iterator made with the same arguments, continues with the very next batch.
    """
    if seed < 0:
        raise ValueError(f"seed={seed} must not be negative; use 0 or more")
    order_seed, row_seed = (int(word) for word in np.random.SeedSequence(seed).generate_state(2))
    return iter(_dataset(documents, seq_len, batch_size, num_epochs, order_seed, row_seed))


def held_out_batches(documents: Sequence[Document], *, seq_len: int, batch_size: int) -> Iterable[Batch]:
    """All held-out text once, every target exactly once; iterating again gives the same batches again.

    The pieces are in one fixed mixed order, so that the first few batches are a fair sample. The last batch is filled
    up with rows of padding (segment id 0).
    """
    return _dataset(documents, seq_len, batch_size, 1, _HELD_OUT_ORDER, _HELD_OUT_ORDER)


def padding_share(some_batches: Iterable[Batch]) -> float:
    """Share of the token slots that hold padding, over all the batches given."""
    num_padding = num_slots = 0
    for batch in some_batches:
        num_padding += int(np.count_nonzero(batch["segment_ids"] == 0))
        num_slots += batch["segment_ids"].size
    return num_padding / num_slots if num_slots else 0.0


class _Pieces:
    """Random access to the pieces of all documents; piece i of a document starts at byte i * seq_len."""

    def __init__(self, documents: Sequence[Document], seq_len: int):
        counts = np.array([_num_pieces(document, seq_len) for document in documents], np.int64)
        self._documents = documents
        self._seq_len = seq_len
        self._owners = np.repeat(np.arange(len(documents)), counts)
        first_pieces = np.repeat(np.cumsum(counts) - counts, counts)
        self._starts = (np.arange(len(self._owners)) - first_pieces) * seq_len

    def __len__(self) -> int:
        return len(self._owners)

    def __getitem__(self, index: typing.SupportsIndex) -> dict[str, np.ndarray]:
        text = self._documents[self._owners[index]].tokens
        start = self._starts[index]
        tokens = text[start : start + self._seq_len].astype(np.int32)
        following = text[start + 1 : start + 1 + self._seq_len]
        targets = np.full(len(tokens), IGNORE, np.int32)
        targets[: len(following)] = following
        return {"tokens": tokens, "targets": targets}


def _dataset(
    documents: Sequence[Document],
    seq_len: int,
    batch_size: int,
    num_epochs: int | None,
    order_seed: int,
    row_seed: int,
) -> grain.IterDataset[Batch]:
    """Pieces -> shuffled stream -> packed rows -> batches. Reading is in memory, so it uses no threads."""
    pieces = grain.MapDataset.source(_Pieces(documents, seq_len)).shuffle(seed=order_seed).repeat(num_epochs)
    rows = BestFitPackIterDataset(
        pieces.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)),
        length_struct={"tokens": seq_len, "targets": seq_len},
        num_packing_bins=max(batch_size, min(_MAX_WINDOW_ROWS, _MAX_WINDOW_TOKENS // seq_len)),
        seed=row_seed,
        padding_struct={"tokens": _PADDING["tokens"], "targets": _PADDING["targets"]},
    )
    return rows.batch(batch_size, batch_fn=lambda group: _stack(group, batch_size))


def _stack(rows: Sequence[dict[str, np.ndarray]], batch_size: int) -> Batch:
    """Packed rows as one batch, filled up to `batch_size` rows with padding."""
    names = {
        "tokens": "tokens",
        "targets": "targets",
        "positions": "tokens_positions",
        "segment_ids": "tokens_segment_ids",
    }
    batch = {}
    for name, packed_name in names.items():
        batch[name] = np.full((batch_size, len(rows[0]["tokens"])), _PADDING[name], np.int32)
        batch[name][: len(rows)] = [row[packed_name] for row in rows]
    return batch


def _split_by_name(documents: list[Document], fraction: float) -> tuple[list[Document], list[Document]]:
    """(training, held out) by the hash of each name; both have at least one document."""
    places = [int.from_bytes(hashlib.sha256(_name_bytes(document)).digest()[:8]) / 2**64 for document in documents]
    threshold = min(max(fraction, np.nextafter(min(places), 1.0)), max(places))
    train = [document for document, place in zip(documents, places, strict=True) if place >= threshold]
    held_out = [document for document, place in zip(documents, places, strict=True) if place < threshold]
    return train, held_out


def _split_tail(documents: list[Document], fraction: float) -> tuple[list[Document], list[Document]]:
    """(training, held out) of a single document: its beginning and its end.

    The cut is where a line begins, or where a character does if there is no line in the first half of the end.
    """
    (document,) = documents
    text = document.tokens.tobytes()
    cut = max(1, min(int(len(text) * (1 - fraction)), len(text) - 2))
    line = text.find(b"\n", cut - 1, (cut + len(text)) // 2) + 1
    if line:
        cut = line
    while 1 < cut < len(text) and text[cut] & 0xC0 == 0x80:
        cut -= 1
    end = Document(f"{document.name} (from byte {cut})", document.tokens[cut:])
    return [Document(document.name, document.tokens[:cut])], [end]


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
    size, needed = _num_tokens(corpus.train), data.batch_size * data.seq_len
    if size < needed:
        raise ValueError(
            f"the training text ({corpus.source}) has {size:,} bytes in {len(corpus.train):,} documents, but one batch "
            f"takes data.batch_size * data.seq_len = {data.batch_size} * {data.seq_len} = {needed:,}; lower one of "
            "them or give more text"
        )
    for role, documents in (("training", corpus.train), ("held-out", corpus.held_out)):
        if max(len(document) for document in documents) < 2:
            raise ValueError(
                f"the {role} text ({corpus.source}) has no document of 2 bytes or more, so there is nothing to "
                f"predict; give longer files or change data.held_out_fraction={data.held_out_fraction}"
            )


def _num_pieces(document: Document, seq_len: int) -> int:
    return -(-len(document) // seq_len)


def _num_tokens(documents: Sequence[Document]) -> int:
    return sum(len(document) for document in documents)


def _name_bytes(document: Document) -> bytes:
    """The name as the file system writes it, also when it is not UTF-8."""
    return document.name.encode("utf-8", "surrogateescape")
