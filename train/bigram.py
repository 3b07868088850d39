"""The baseline that a trained model has to beat: the next byte from the present one alone.

    p(next | byte) = (count(byte, next) + a) / (count(byte) + 256 a),    a = 0.1

Counts are taken inside documents, on the same training text, and the score is over exactly the (input, target) pairs
that the model is scored on. With megabytes of text the constant hardly matters (on Python's own sources a = 1 costs
0.002 bits per byte more than a = 0.1, and a = 0.01 costs 0.001); it keeps a pair that was never seen from costing
infinitely many bits.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from train.data import IGNORE, VOCAB_SIZE, Batch, held_out_batches
from train.text import AnyDocument

_SMOOTHING = 0.1
_CHUNK = 2**20


def bigram_bits_per_byte(
    train_documents: Sequence[AnyDocument], held_out_documents: Sequence[AnyDocument], *, seq_len: int
) -> float:
    """Bits per predicted byte of the held-out documents, under a bigram model fitted on the training documents.

    Args:
        train_documents: What the model is trained on.
        held_out_documents: What the model is scored on.
        seq_len: Tokens in a row, as for the model. It changes no target: these are made on whole documents.
    """
    return bits_per_byte(fit(train_documents), held_out_batches(held_out_documents, seq_len=seq_len, batch_size=1))


def fit(documents: Sequence[AnyDocument]) -> np.ndarray:
    """log2 p(next | byte), float64 [256, 256], from the pairs inside each document."""
    counts = np.zeros(VOCAB_SIZE * VOCAB_SIZE, np.int64)
    for document in documents:
        for start in range(0, len(document) - 1, _CHUNK):
            text = document.tokens[start : start + _CHUNK + 1].astype(np.int64)
            counts += _count_pairs(text[:-1], text[1:])
    smoothed = counts.reshape(VOCAB_SIZE, VOCAB_SIZE) + _SMOOTHING
    return np.log2(smoothed / smoothed.sum(axis=1, keepdims=True))


def bits_per_byte(log2_probabilities: np.ndarray, some_batches: Iterable[Batch]) -> float:
    """Mean of -log2 p(target | token) over every target in the batches that is not to be ignored."""
    counts = np.zeros(VOCAB_SIZE * VOCAB_SIZE, np.int64)
    for batch in some_batches:
        scored = batch["targets"] != IGNORE
        counts += _count_pairs(batch["tokens"][scored], batch["targets"][scored])
    if not counts.any():
        raise ValueError("the batches hold no target, so there is nothing to score; give documents of 2 bytes or more")
    return float(-(counts * log2_probabilities.ravel()).sum() / counts.sum())


def _count_pairs(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return np.bincount(first * VOCAB_SIZE + second, minlength=VOCAB_SIZE * VOCAB_SIZE)
