"""Dense attention in float64 NumPy, forward and backward by hand, and the mask rule. No code of the library is used."""

import numpy as np


def dense_mask(batch: int, lengths: tuple[int, int], is_causal: bool, segment_ids=None, positions=None) -> np.ndarray:
    """``[B, T, S]``: same segment, which is not 0; and the query not before the key."""
    mask = np.ones((batch, *lengths), bool)
    if is_causal:
        query, key = (np.arange(n) for n in lengths) if positions is None else (positions, positions)
        query, key = (np.broadcast_to(x, (batch, n)) for x, n in zip((query, key), lengths, strict=True))
        mask &= query[:, :, None] >= key[:, None, :]
    if segment_ids is not None:
        ids = np.broadcast_to(segment_ids, (batch, lengths[0]))
        mask &= (ids[:, :, None] == ids[:, None, :]) & (ids[:, :, None] != 0)
    return mask


def attention(query, key, value, dout, dlse, *, mask: np.ndarray, scale: float) -> tuple[np.ndarray, ...]:
    """(out, lse, dq, dk, dv) for the cotangents of out and of the finite part of lse; all float64.

    A row without a key gives out 0, lse -inf, and no gradient.
    """
    query, key, value, dout, dlse = (np.asarray(x, np.float64) for x in (query, key, value, dout, dlse))
    batch, length, num_heads, _ = query.shape
    num_kv_heads = key.shape[2]

    def grouped(x):  # [B, T, N, ...] to [B, T, K, G, ...]
        return x.reshape(batch, length, num_kv_heads, num_heads // num_kv_heads, *x.shape[3:])

    q, do, dl = grouped(query), grouped(dout), grouped(dlse)
    scores = np.where(mask[:, None, None], np.einsum("btkgh,bskh->bkgts", q, key) * scale, -np.inf)
    seen = np.broadcast_to(mask.any(-1)[:, None, None], scores.shape[:-1])
    top = np.where(seen, scores.max(-1), 0)
    weights = np.exp(scores - top[..., None])
    total = np.where(seen, weights.sum(-1), 1)
    p = weights / total[..., None]
    out = np.einsum("bkgts,bskh->btkgh", p, value)
    with np.errstate(divide="ignore"):
        lse = np.where(seen, top + np.log(total), -np.inf)
    dp = np.einsum("btkgh,bskh->bkgts", do, value)
    delta = (p * dp).sum(-1) - dl.transpose(0, 2, 3, 1)
    ds = p * (dp - delta[..., None]) * scale
    dq = np.einsum("bkgts,bskh->btkgh", ds, key).reshape(query.shape)
    dk = np.einsum("bkgts,btkgh->bskh", ds, q)
    dv = np.einsum("bkgts,btkgh->bskh", p, do)
    return out.reshape(dout.shape), lse.transpose(0, 3, 1, 2).reshape(dlse.shape), dq, dk, dv
