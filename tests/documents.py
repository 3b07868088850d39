"""Documents with known tokens, and what rows must hold of them, written out naively."""

import collections
import itertools
from pathlib import Path

import numpy as np

from train.data import Document

SEQ_LEN = 16
LENGTHS = [1, 2, SEQ_LEN - 1, SEQ_LEN, SEQ_LEN + 1, 2 * SEQ_LEN, 2 * SEQ_LEN + 1, 5, 40, 7, 3, 100]
MISSING = -1


def make_documents(lengths=LENGTHS, seed=0, low=1):
    rng = np.random.default_rng(seed)
    return [Document(f"d{i}", rng.integers(low, 256, length).astype(np.uint8)) for i, length in enumerate(lengths)]


def expected_pieces(documents, seq_len):
    """Every (tokens, targets) piece of the documents, written out naively."""
    pieces = collections.Counter()
    for document in documents:
        tokens = [int(token) for token in document.tokens]
        targets = [*tokens[1:], MISSING]
        for start in range(0, len(tokens), seq_len):
            pieces[tuple(tokens[start : start + seq_len]), tuple(targets[start : start + seq_len])] += 1
    return pieces


def segments(batch):
    """(tokens, targets) of every segment of a batch, after checking how its rows are laid out."""
    for row in range(len(batch["tokens"])):
        tokens, targets, positions, ids = (
            batch[name][row].tolist() for name in ("tokens", "targets", "positions", "segment_ids")
        )
        runs = [(segment, len(list(run))) for segment, run in itertools.groupby(ids)]
        num_segments = len(runs) - (runs[-1][0] == 0)
        assert [segment for segment, _ in runs][:num_segments] == list(range(1, num_segments + 1)), "ids are 1, 2, ..."
        start = 0
        for segment, length in runs:
            part = slice(start, start + length)
            start += length
            if segment == 0:
                assert tokens[part] == [0] * length
                assert targets[part] == [MISSING] * length
                assert positions[part] == [0] * length
            else:
                assert positions[part] == list(range(length)), "positions restart at 0 in each segment"
                yield tuple(tokens[part]), tuple(targets[part])


def pieces_in(some_batches):
    return collections.Counter(piece for batch in some_batches for piece in segments(batch))


def assert_same_batch(first, second):
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


def write_folder(root, files):
    for name, content in files.items():
        path = Path(root, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(root)
