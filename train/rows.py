"""Rows of tokens by number: row n of a run is a function of the documents, the seed and n, and of nothing else.

What always holds:

- The position in the data is one number, that of the next row, for all hosts and sources together. Which host makes a
  row, on which mesh, after how many restarts, changes nothing in it.
- Every row of a source comes up exactly once before any comes up again, and so does every token and every (token,
  next token) pair of its documents.
- Targets are made on whole documents, before any layout: the last token of a piece has the first token of the next
  piece as its target. Only a document's own last token has none. A missing target is -1, never 0, which is a token.

A row with two documents (a, b), a longer document's piece (c) and padding; the segment ids keep them apart:

    tokens       a0 a1 a2 b0 b1 c0 c1  0
    targets      a1 a2 -1 b1 -1 c1 c2 -1
    positions     0  1  2  0  1  0  1  0
    segment_ids   1  1  1  2  2  3  3  0

Positions restart at 0 in each piece, also inside a split document: a piece cannot attend to the pieces before it,
rotary embeddings depend on differences only, and so every position stays inside the range that rows of this length
train.

How a row number finds its tokens, with two sources of weights 2 and 1:

    row number      0  1  2  3  4  5  6 ...
    source          A  B  A  A  B  A  A ...     `Interleave`: even, and exact over 10,000 rows
    n-th of its     0  0  1  2  1  3  4 ...
    row of source   7  2  0  3  9  5  1 ...     `order_of`: shuffled anew for each epoch of the source
"""

import dataclasses
import typing
from collections.abc import Collection, Iterable, Iterator, Sequence

import grain
import jax
import numpy as np
from jax.sharding import Mesh

from train.packing import Packing, Piece, pack
from train.text import AnyDocument

__all__ = [
    "IGNORE",
    "Batch",
    "BatchIterator",
    "Documents",
    "Interleave",
    "Rows",
    "deeper_targets",
    "held_out_batches",
    "lengths_of",
    "local_data_indices",
    "order_of",
    "rows_for",
]

type Batch = dict[str, np.ndarray]
"""tokens, targets, positions, segment_ids: int32 arrays [rows, seq_len] in natural order."""

type Documents = Sequence[AnyDocument]
"""Where `lengths` is an attribute, it is the array of all lengths."""

IGNORE = -1
"""The target of a token whose next token is not known."""

_HELD_OUT_SEED = 0
_BLOCK = 10_000
_PADDING = {"tokens": 0, "targets": IGNORE, "positions": 0, "segment_ids": 0}


def rows_for(step: int, *, batch_size: int, data_index: int = 0, num_data: int = 1) -> range:
    """The numbers of the rows that one index of the data axis trains on in one step.

    Devices that differ in their tensor, pipeline or sequence index only read the same rows.

    Args:
        step: From 0.
        batch_size: Rows in a step, over all devices.
        data_index: Index on the data axis.
        num_data: Size of the data axis; divides `batch_size`.
    """
    if batch_size % num_data or not 0 <= data_index < num_data:
        raise ValueError(
            f"data_index={data_index} must be below num_data={num_data}, which must divide batch_size={batch_size}"
        )
    each = batch_size // num_data
    first = step * batch_size + data_index * each
    return range(first, first + each)


class Interleave:
    """Which source a row number belongs to, for sources with weights.

    In every block of 10,000 rows each source has its share, rounded to whole rows (one at least), spread evenly.
    """

    def __init__(self, weights: Sequence[float]):
        shares = np.asarray(weights, np.float64) / np.sum(weights)
        counts = np.maximum(1, np.floor(shares * _BLOCK).astype(np.int64))
        while (missing := _BLOCK - int(counts.sum())) > 0:  # to those that lost most by rounding down
            counts[np.argmax(shares * _BLOCK - counts)] += 1
        counts[np.argmax(counts)] += missing  # what raising small ones to one row took
        if len(counts) == 1:
            counts[:] = 1
        sources = np.repeat(np.arange(len(counts)), counts)
        places = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
        self.sources = sources[np.lexsort((sources, places))]
        self.counts = counts
        self.shares = counts / counts.sum()
        of_source = self.sources[:, None] == np.arange(len(counts))
        self._before = (np.cumsum(of_source, axis=0) - 1)[np.arange(len(self.sources)), self.sources]

    def find(self, number: int) -> tuple[int, int]:
        """(source, how many rows of that source come before row `number`)."""
        block, place = divmod(number, len(self.sources))
        source = int(self.sources[place])
        return source, block * int(self.counts[source]) + int(self._before[place])


def order_of(num_rows: int, *, seed: int, source: int = 0) -> grain.MapDataset:
    """The n-th row of a source, for any n: every epoch has each of the rows once, in an order of its own."""
    (word,) = np.random.SeedSequence([seed, source]).generate_state(1)
    return grain.MapDataset.range(num_rows).shuffle(seed=int(word)).repeat()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Source:
    documents: Documents
    packing: Packing
    order: grain.MapDataset


class Rows:
    """All rows of a run, by number."""

    def __init__(
        self,
        sources: Sequence[tuple[Documents, float]],
        *,
        seq_len: int,
        seed: int,
        packings: Sequence[Packing] | None = None,
    ):
        """Rows of documents with weights.

        Args:
            sources: The documents of each source and its share of the rows (only the ratio counts).
            seq_len: Tokens in a row.
            seed: Sets the order.
            packings: `pack` of each source, where it is known already.
        """
        if seed < 0:
            raise ValueError(f"seed={seed} must not be negative; use 0 or more")
        packings = packings or [pack(lengths_of(documents), seq_len) for documents, _ in sources]
        self.seq_len = seq_len
        self._interleave = Interleave([weight for _, weight in sources])
        self._sources = [
            _Source(documents=documents, packing=packing, order=order_of(packing.num_rows, seed=seed, source=index))
            for index, ((documents, _), packing) in enumerate(zip(sources, packings, strict=True))
        ]

    @property
    def num_rows(self) -> int:
        """Rows of all sources, each once."""
        return sum(source.packing.num_rows for source in self._sources)

    @property
    def padding_share(self) -> float:
        """Share of the token slots that hold padding: exact over whole epochs, weighted as the sources are mixed."""
        weighed = zip(self._interleave.shares, self._sources, strict=True)
        return float(sum(share * source.packing.padding_share for share, source in weighed))

    def read(self, numbers: Iterable[int | None]) -> Batch:
        """The rows with these numbers, one below the other; None is a row of padding."""
        wanted = list(numbers)
        batch = {name: np.full((len(wanted), self.seq_len), fill, np.int32) for name, fill in _PADDING.items()}
        for place, number in enumerate(wanted):
            if number is not None:
                self._fill({name: array[place] for name, array in batch.items()}, number)
        return batch

    def segments(self, number: int) -> list[int]:
        """Tokens of each segment of a row, from left to right; reads no text."""
        return [piece.length for piece in self._find(number)[1]]

    def _find(self, number: int) -> tuple[Documents, list[Piece]]:
        """The documents that a row is made of, and its pieces."""
        index, ordinal = self._interleave.find(number)
        source = self._sources[index]
        shuffled: typing.Any = source.order[ordinal]
        return source.documents, source.packing.row(shuffled)

    def _fill(self, row: dict[str, np.ndarray], number: int) -> None:
        documents, pieces = self._find(number)
        begin = 0
        for segment, piece in enumerate(pieces, 1):
            end = begin + piece.length
            text = documents[piece.document].read(piece.start, piece.start + piece.length + 1)
            row["tokens"][begin:end] = text[: piece.length]
            row["targets"][begin : begin + len(text) - 1] = text[1:]
            row["positions"][begin:end] = np.arange(piece.length)
            row["segment_ids"][begin:end] = segment
            begin = end


class BatchIterator(Iterator[Batch]):
    """Batches of consecutive rows, with a position that can be saved."""

    def __init__(
        self,
        rows: Rows,
        *,
        batch_size: int,
        num_rows: int | None = None,
        data_indices: Collection[int] = (0,),
        num_data: int = 1,
    ):
        """Batches from row 0 on.

        Args:
            rows: Where they come from.
            batch_size: Rows in a step, over all devices and hosts.
            num_rows: Rows in all, the last batch filled up with padding; None: without end.
            data_indices: The indices of the data axis whose rows this process reads, rising; it gets these only.
            num_data: Size of the data axis.
        """
        self.rows = rows
        self._batch_size = batch_size
        self._num_rows = num_rows
        self._next_row = 0
        self._offsets = [
            number
            for index in sorted(data_indices)
            for number in rows_for(0, batch_size=batch_size, data_index=index, num_data=num_data)
        ]

    def __next__(self) -> Batch:
        if self._num_rows is not None and self._next_row >= self._num_rows:
            raise StopIteration
        numbers = [self._next_row + offset for offset in self._offsets]
        batch = self.rows.read(
            number if self._num_rows is None or number < self._num_rows else None for number in numbers
        )
        self._next_row += self._batch_size
        return batch

    def get_state(self) -> dict[str, int]:
        """`{"next_row": n}`: the whole state of the data, the same on every host."""
        return {"next_row": self._next_row}

    def set_state(self, state: dict[str, int]) -> None:
        """Continue from there, on any number of hosts.

        Raises:
            ValueError: it is the state of another version.
        """
        if set(state) != {"next_row"}:
            raise ValueError(
                f"the position in the data {state!r} must be {{'next_row': n}}; it was saved by another version: start "
                "anew with another --run-dir and without --resume"
            )
        self._next_row = state["next_row"]


@dataclasses.dataclass(frozen=True)
class HeldOut(Iterable[Batch]):
    """What `held_out_batches` returns."""

    rows: Rows
    batch_size: int
    data_indices: tuple[int, ...]
    num_data: int

    def __iter__(self) -> BatchIterator:
        return BatchIterator(
            self.rows,
            batch_size=self.batch_size,
            num_rows=self.rows.num_rows,
            data_indices=self.data_indices,
            num_data=self.num_data,
        )


def held_out_batches(
    documents: Documents,
    *,
    seq_len: int,
    batch_size: int,
    data_indices: Collection[int] = (0,),
    num_data: int = 1,
) -> HeldOut:
    """All held-out text once, every target exactly once; iterating again gives the same batches again.

    The rows are in one fixed mixed order, so that the first few batches are a fair sample. The last batch is filled
    up with rows of padding (segment id 0). A process reads the rows of its `data_indices` of the data axis only.
    """
    rows = Rows([(documents, 1.0)], seq_len=seq_len, seed=_HELD_OUT_SEED)
    return HeldOut(rows, batch_size, tuple(data_indices), num_data)


def deeper_targets(batch: Batch, depth: int) -> np.ndarray:
    """The tokens that lie `depth` after each token, int32 [rows, seq_len]; `depth` 1 is `batch["targets"]`.

        target_k[t] = target_1[t + k - 1]   if t + k - 1 lies in the segment of t, else -1

    So they never come from another document, and they are made in natural order, before any layout: what a shard of
    the sequence gets does not depend on how many shards there are.
    """
    if depth < 1:
        raise ValueError(f"depth={depth} must be at least 1; 1 is the next token")
    targets, segments, shift = batch["targets"], batch["segment_ids"], depth - 1
    deeper = np.full_like(targets, IGNORE)
    width = targets.shape[1] - shift
    if width > 0:
        same = (segments[:, :width] == segments[:, shift:]) & (segments[:, :width] != 0)
        deeper[:, :width] = np.where(same, targets[:, shift:], IGNORE)
    return deeper


def local_data_indices(mesh: Mesh) -> tuple[int, ...]:
    """The indices of the data axis that have a device of this process, rising: whose rows it has to read."""
    axis = mesh.axis_names.index("data")
    own = [device.process_index == jax.process_index() for device in mesh.devices.flat]
    return tuple(sorted({place[axis] for place, mine in zip(np.ndindex(mesh.devices.shape), own, strict=True) if mine}))


def lengths_of(documents: Documents) -> np.ndarray:
    """Tokens of each document; reads nothing."""
    lengths = getattr(documents, "lengths", None)
    if lengths is not None:
        return lengths
    return np.fromiter((len(document) for document in documents), np.int64, len(documents))
