"""Layouts: which token sits where when a sequence is cut over the shards of the sequence axis.

A layout is a permutation of the sequence, made once on the data; shard i then holds elements [i*c, (i+1)*c). Twelve
tokens on three shards:

    contiguous   0  1  2  3 |  4  5  6  7 |  8  9 10 11
    striped      0  3  6  9 |  1  4  7 10 |  2  5  8 11      token t on shard t mod P
    zigzag       0  1 10 11 |  2  3  8  9 |  4  5  6  7      2P chunks, shard i holds chunks i and 2P-1-i

Under a causal mask the contiguous layout leaves the first shard idle for most of the ring; striped and zigzag give
every shard the same work. Zigzag is called *dual chunk swap* by MaxText and Transformer Engine, *head-tail* by PyTorch.

Attention never looks at the layout itself: it is given positions, or derives them here from the shard's index. That
must agree with `permutation`; if it did not, causal attention would see wrong tokens on more than one shard.
"""

import difflib
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int, Shaped

type Layout = Literal["contiguous", "striped", "zigzag"]
LAYOUTS: tuple[str, ...] = get_args(Layout.__value__)


def unknown_name(kind: str, value: object, known: tuple[str, ...]) -> str:
    """The message for a name that is none of the known ones, with the nearest of them."""
    near = difflib.get_close_matches(str(value), known, n=1, cutoff=0.3)
    hint = f'did you mean "{near[0]}"? ' if near else ""
    return f"{kind}={value!r} is not known: {hint}choose one of {', '.join(known)}"


def check_layout(layout: str) -> None:
    """Raise ValueError, naming the nearest layout, for a name that is none."""
    if layout not in LAYOUTS:
        raise ValueError(unknown_name("layout", layout, LAYOUTS))


def check_count(name: str, value: object) -> None:
    """Raise TypeError for what is no whole number, ValueError for one below 1."""
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise TypeError(f"{name} must be a Python int; got {value!r}")
    if value < 1:
        raise ValueError(f"{name}={value} must be at least 1")


def required_multiple(layout: str, num_shards: int) -> int:
    """What a sequence length must be divisible by: P, or 2P for zigzag; 1 on a single shard."""
    check_layout(layout)
    check_count("num_shards", num_shards)
    return 2 * num_shards if layout == "zigzag" and num_shards > 1 else num_shards


def check_length(layout: str, seq_len: int, num_shards: int, name: str = "seq_len") -> None:
    """Raise ValueError with the nearest length that fits, for one that the layout cannot cut evenly."""
    multiple = required_multiple(layout, num_shards)
    if seq_len < 1 or seq_len % multiple:
        padded = max(1, -(-seq_len // multiple)) * multiple
        rule = f"2 * {num_shards} shards" if multiple > num_shards else f"{num_shards} shards"
        other = f' or use layout="contiguous" (needs a multiple of {num_shards})' if multiple > num_shards else ""
        raise ValueError(
            f"{name}={seq_len} must be a positive multiple of {multiple} ({rule}) for the {layout} layout; "
            f"pad to {padded}{other}"
        )


def chunk_length(layout: str | None, local_length: int, num_shards: int) -> int:
    """Length of the runs of consecutive positions on a shard (for striped: of its one run of equal strides)."""
    return local_length // 2 if layout == "zigzag" and num_shards > 1 else local_length


def shard_positions(layout: str, shard: Int[Array, ""] | int, length: int, num_shards: int) -> Int[Array, " c"]:
    """Positions of the ``length`` tokens that shard number ``shard`` holds, int32; ``shard`` may be traced."""
    index = jnp.arange(length, dtype=jnp.int32)
    if layout == "striped":
        return index * num_shards + shard
    if layout == "zigzag" and num_shards > 1:
        chunk = length // 2
        return jnp.where(index < chunk, shard * chunk + index, (2 * num_shards - 2 - shard) * chunk + index)
    return shard * length + index


def permutation(layout: str, seq_len: int, num_shards: int) -> np.ndarray:
    """Indices that put a sequence into a layout: ``new[i] = old[permutation[i]]``.

    A length that the layout cannot cut evenly is padded behind its end, put into the layout, and stripped of the
    padding: `dot_product_attention` does the same inside. For an array that is cut over devices pad it yourself, to a
    multiple of `required_multiple`.

    Args:
      layout: ``"contiguous"``, ``"striped"`` or ``"zigzag"``.
      seq_len: global length, at least 1.
      num_shards: size P of the sequence axis.

    Returns:
      An int64 array ``[seq_len]``, a permutation of ``range(seq_len)``.

    Raises:
      ValueError: unknown layout, or a size below 1. TypeError: a size that is no whole number.

    Example:
      >>> permutation("zigzag", 8, 2)
      array([0, 1, 6, 7, 2, 3, 4, 5])

    Reference:
      Striped: Brandon et al., Striped Attention, arXiv:2311.09431, section 3. Zigzag: Llama 3, arXiv:2407.21783,
      section 3.3.2 (2P chunks, rank i holds i and 2P-1-i).
    """
    multiple = required_multiple(layout, num_shards)
    check_count("seq_len", seq_len)
    index = np.arange(-(-seq_len // multiple) * multiple)
    if layout == "striped":
        index = index.reshape(-1, num_shards).T.reshape(-1)
    elif layout == "zigzag" and num_shards > 1:
        chunks = index.reshape(2 * num_shards, -1)
        index = np.stack([chunks[:num_shards], chunks[: num_shards - 1 : -1]], axis=1).reshape(-1)
    return index[index < seq_len]


def padded_slots(layout: str, seq_len: int, num_shards: int, cut: int = 1) -> tuple[int, np.ndarray]:
    """The length that the layout can cut evenly, and where the token of each slot lies in the array that has none.

    A slot of padding has index ``seq_len``, which is outside. With ``cut`` each run of a shard can be cut evenly, too.
    """
    multiple = required_multiple(layout, num_shards) * (cut if num_shards > 1 else 1)
    padded = -(-seq_len // multiple) * multiple
    place = np.argsort(permutation(layout, seq_len, num_shards))  # of each token in the array
    return padded, np.append(place, np.full(padded - seq_len, seq_len))[permutation(layout, padded, num_shards)]


def to_layout(
    x: Shaped[Array, "..."] | np.ndarray, layout: str, num_shards: int, axis: int = 1
) -> Shaped[Array, "..."] | np.ndarray:
    """Put axis ``axis`` of ``x`` (natural order) into a layout; NumPy in, NumPy out.

    Args and errors as `permutation`; shape, dtype and (on an Explicit mesh) sharding of ``x`` are kept.

    Example:
      >>> to_layout(np.arange(8), "striped", 2, axis=0)
      array([0, 2, 4, 6, 1, 3, 5, 7])
    """
    return _reorder(x, permutation(layout, x.shape[axis], num_shards), axis)


def from_layout(
    x: Shaped[Array, "..."] | np.ndarray, layout: str, num_shards: int, axis: int = 1
) -> Shaped[Array, "..."] | np.ndarray:
    """Undo `to_layout`: axis ``axis`` of ``x`` back to natural order.

    Example:
      >>> from_layout(to_layout(np.arange(8), "zigzag", 2, axis=0), "zigzag", 2, axis=0)
      array([0, 1, 2, 3, 4, 5, 6, 7])
    """
    return _reorder(x, np.argsort(permutation(layout, x.shape[axis], num_shards)), axis)


def _reorder(x: Any, order: np.ndarray, axis: int) -> Any:
    """Entries of an axis; an array whose type says how it is cut stays cut as it was."""
    if isinstance(x, np.ndarray) or not any(jax.typeof(x).sharding.spec):
        return x.take(order, axis=axis)
    where = (slice(None),) * (axis % x.ndim) + (order,)
    return x.at[where].get(out_sharding=jax.typeof(x).sharding)
