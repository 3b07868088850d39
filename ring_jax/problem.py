"""One call as every strategy sees it: what is static, the caller's arrays, and both in the kernel's layout.

`Spec` holds what is known when the call is traced, `Inputs` the caller's arrays, local to a device. `open_problem`
brings them into the kernel's layout: rows of masks, heads grouped by key/value head, keys and values side by side.

Nothing hidden can do harm: padding is zeroed; a key with a non-finite entry gets value 0 and key NaN, so that a query
that sees it becomes NaN, and one that does not (its score is replaced by the mask) never meets it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ring_jax import dropout, layouts, manual
from ring_jax.kernels import registry
from ring_jax.kernels.protocol import Kernel
from ring_jax.kernels.tiles import Keys, Pairs, Queries, Scores, widened
from ring_jax.masks import Tokens
from ring_jax.options import Schedule
from ring_jax.routes import Grid, Reach


class Spec(NamedTuple):
    """What is known when the call is traced."""

    axis_name: str
    strategy: str
    scores: Scores
    layout: str | None
    num_heads: tuple[int, int]  # query and key/value heads on one device, before any exchange
    return_lse: bool = True
    schedule: Schedule = Schedule()
    default_positions: bool = True  # no positions were given: they are the indices in natural order
    promised: bool = True  # differences of positions are those of the layout's indices
    real_lengths: tuple[int, int] | None = None  # of the whole sequence, where padding was added behind it
    kernel: str = "xla"
    copies: int = 1  # devices that get a copy each of one key/value head
    shared: tuple[tuple[str, ...], ...] = ((), (), ())  # manual axes over which query, key and value are the same

    @property
    def sums_later(self) -> tuple[bool, bool]:
        """Whether the gradients of the query, and of key or value, are still to be summed over devices."""
        query, key, value = self.shared
        return bool(query), self.copies > 1 or bool(key or value)

    @property
    def keeps_lost(self) -> bool:
        """Scores may be so large that the log-sum-exp loses the logarithm."""
        return self.scores.score_fn is not None


class Place(NamedTuple):
    """Where this device's shards lie: its number on the sequence axis, its first batch row and first query head."""

    rank: Array
    first_row: Array
    first_head: Array


class Inputs(NamedTuple):
    """The arrays of one call, local to a device. Those up to ``score_args`` have gradients."""

    query: Array  # [B, T, N, H]
    key: Array  # [B, S, K, H]
    value: Array  # [B, S, K, Hv]
    bias: Array | None  # [B, N, T, S of all devices], each 1 where it is the same for all
    sinks: Array | None  # [N]
    score_args: tuple[Any, ...]
    mask: Array | None  # as bias
    query_tokens: Tokens
    key_tokens: Tokens
    query_lengths: Array | None  # [B]
    key_lengths: Array | None  # [B]
    seed: Array | None  # [2], or [B, 2]: one for each row
    place: Place


class HeadLayout(NamedTuple):
    """Sizes of the kernel's axes: R rows of masks, b batch rows for each, K key/value heads, G queries for each."""

    rows: int
    kv_heads: int

    def tokens(self, x: Array, heads_axis_is_grouped: bool) -> Array:
        """``[B, T, heads, ...]`` to ``[R, b, K, (G,) T, ...]``."""
        batch, length, heads = x.shape[:3]
        group = (heads // self.kv_heads,) if heads_axis_is_grouped else ()
        x = x.reshape(self.rows, batch // self.rows, length, self.kv_heads, *group, *x.shape[3:])
        return jnp.moveaxis(x, 2, 3 + len(group))

    def heads(self, x: Array, heads_axis_is_grouped: bool) -> Array:
        """Undo `tokens`."""
        x = jnp.moveaxis(x, 3 + heads_axis_is_grouped, 2)
        rest = x.shape[4 + heads_axis_is_grouped :]
        return x.reshape(x.shape[0] * x.shape[1], x.shape[2], -1, *rest)

    def pairwise(self, x: Array | None) -> Array | None:
        """``[B, N, T, S]`` to ``[R, b, K, G, T, S]``, axes of size 1 kept."""
        if x is None:
            return None
        rows = (self.rows, x.shape[0] // self.rows) if x.shape[0] > 1 else (1, 1)
        heads = (self.kv_heads, x.shape[1] // self.kv_heads) if x.shape[1] > 1 else (1, 1)
        return x.reshape(*rows, *heads, *x.shape[2:])


class Problem(NamedTuple):
    """One call in the kernel's layout."""

    spec: Spec
    grid: Grid
    place: Place
    layout: HeadLayout
    queries: Queries
    keys: Keys  # of this place; what can be derived from the source place does not travel
    pairs: Pairs  # all keys' columns
    given_tokens: Tokens  # of the queries: what cannot be derived from their place
    counts: tuple[Array | None, Array | None]  # sequence lengths of queries and keys, [B]

    @property
    def lengths(self) -> tuple[int, int]:
        return self.queries.query.shape[4], self.keys.kv.shape[3]

    @property
    def kernel(self) -> Kernel:
        return registry.KERNELS[self.spec.kernel]

    @property
    def reach(self) -> Reach:
        spec = self.spec
        return Reach(spec.layout, spec.scores.rules, self.lengths, spec.default_positions, spec.promised)

    def key_tokens(self, given: Tokens, index: Array) -> Tokens:
        """Tokens of a block whose tokens have these indices, with what did not travel derived from them."""
        return complete(self.spec, given, index, 1, self.counts[1], self.layout.rows)

    def query_tokens(self, given: Tokens, index: Array) -> Tokens:
        """The same for queries."""
        return complete(self.spec, given, index, 0, self.counts[0], self.layout.rows)

    def tile_sizes(self, num_keys: int, halves: int = 1) -> tuple[int, int]:
        """For a block of ``num_keys`` keys, whose chunks were cut in ``halves``."""
        length, size, given = self.lengths[0], self.grid.num_devices, self.spec.schedule.tile_size
        if given is not None:
            return min(given, length), min(given, num_keys)
        chunk = layouts.chunk_length(self.spec.layout, length // self.grid.ulysses, size)
        key_chunk = layouts.chunk_length(self.spec.layout, self.lengths[1] // self.grid.ulysses, size) // halves
        side_by_side = self.queries.query.shape[1] * self.queries.query.shape[2] * self.queries.query.shape[3]
        query_tile = self.kernel.tile_size(length, chunk, side_by_side)
        return query_tile, self.kernel.tile_size(num_keys, min(key_chunk, num_keys), side_by_side)


def complete(spec: Spec, given: Tokens, index: Array, side: int, counts: Array | None, rows: int) -> Tokens:
    """Positions where a rule reads them and none are given; segment ids where lengths make padding."""
    positions = given.positions
    if positions is None and spec.scores.read_positions:
        positions = jnp.broadcast_to(index, (rows, len(index)))
    segments = given.segment_ids
    if segments is None and (counts is not None or spec.real_lengths is not None):
        segments = jnp.broadcast_to(_is_real(spec, index, side, counts), (rows, len(index))).astype(jnp.int32)
    return Tokens(positions, segments)


def _is_real(spec: Spec, index: Array, side: int, counts: Array | None) -> Array:
    """False for padding behind the sequence, ``[1 or B, n]``."""
    real = jnp.ones((1, len(index)), bool)
    if spec.real_lengths is not None:
        real &= index < spec.real_lengths[side]
    return real if counts is None else real & (index < counts[:, None])


def open_problem(spec: Spec, grid: Grid, inputs: Inputs) -> Problem:
    """Bring the caller's arrays into the kernel's layout."""
    batch, kv_heads = inputs.key.shape[0], inputs.key.shape[2]
    by_row = inputs.query_tokens, inputs.key_tokens, inputs.query_lengths, inputs.key_lengths
    rows = max([1, *(x.shape[0] for x in jax.tree.leaves(by_row))])
    layout = HeadLayout(rows, kv_heads)
    counts = inputs.query_lengths, inputs.key_lengths
    if counts != (None, None):  # both sides need segment ids then
        no_end = jnp.full((batch,), jnp.iinfo(jnp.int32).max)
        counts = no_end if counts[0] is None else counts[0], no_end if counts[1] is None else counts[1]
    sides = []
    for side, (given, x, count) in enumerate(
        zip((inputs.query_tokens, inputs.key_tokens), (inputs.query, inputs.key), counts, strict=True)
    ):
        index = grid.token_index(spec.layout, inputs.place.rank // grid.ulysses, x.shape[1])
        given = jax.tree.map(lambda y, n=x.shape[1]: jnp.broadcast_to(y, (rows, n)), given)
        if given.segment_ids is not None:
            real = _is_real(spec, index, side, count)
            given = given._replace(segment_ids=jnp.where(real, given.segment_ids, 0))
        sides.append((given, complete(spec, given, index, side, count, rows)))
    (_, query_tokens), (given_keys, key_tokens) = sides
    query = _zero_padding(inputs.query, query_tokens)
    key, value = _poison(_zero_padding(inputs.key, key_tokens), _zero_padding(inputs.value, key_tokens))
    kv = layout.tokens(jnp.concatenate([key, value], -1), False)
    queries = Queries(layout.tokens(query, True), query_tokens, _words(layout, inputs, query_tokens, sides[0][0]))
    num_heads = inputs.query.shape[2]
    heads = inputs.place.first_head + jnp.arange(num_heads, dtype=jnp.int32).reshape(kv_heads, -1)
    score_args = widened(inputs.score_args, jnp.promote_types(query.dtype, jnp.float32))
    pairs = Pairs(layout.pairwise(inputs.bias), layout.pairwise(inputs.mask), heads, score_args)
    return Problem(spec, grid, inputs.place, layout, queries, Keys(kv, given_keys), pairs, sides[0][0], counts)


def _zero_padding(x: Array, tokens: Tokens) -> Array:
    if tokens.segment_ids is None:
        return x
    return jnp.where((tokens.segment_ids != 0)[..., None, None], x, jnp.zeros((), x.dtype))


def _poison(key: Array, value: Array) -> tuple[Array, Array]:
    """A key or value that is not finite: value 0, key NaN. A NaN in the value would reach rows that do not see it."""
    good = jnp.isfinite(key).all(-1, keepdims=True) & jnp.isfinite(value).all(-1, keepdims=True)
    return jnp.where(good, key, jnp.nan), jnp.where(good, value, 0)


def _words(layout: HeadLayout, inputs: Inputs, tokens: Tokens, given: Tokens) -> Array | None:
    """The keys of dropout, one for each row, head and query: ``[R, b, K, G, T, 2]``.

    Segment ids that only mark padding behind the sequence do not enter: how much there is depends on the mesh.
    """
    if inputs.seed is None:
        return None
    batch, _, num_heads, _ = inputs.query.shape
    rows = inputs.place.first_row + jnp.arange(batch)
    heads = inputs.place.first_head + jnp.arange(num_heads)
    if given.segment_ids is None and inputs.query_lengths is None and inputs.key_lengths is None:
        tokens = tokens._replace(segment_ids=None)
    tokens = jax.tree.map(lambda x: jnp.repeat(x, batch // len(x), axis=0), tokens)
    assert tokens.positions is not None
    words = dropout.query_words(inputs.seed, rows, heads, tokens.positions, tokens.segment_ids)
    return layout.tokens(jnp.swapaxes(words, 1, 2), True)


def columns(x: Array | None, first: Array, count: int) -> Array | None:
    """Columns of a pairwise array that belong to ``count`` keys from ``first``; all where it has one for all."""
    if x is None or x.shape[-1] == 1 or x.shape[-1] == count:
        return x
    return lax.dynamic_slice_in_dim(x, first, count, axis=-1)


def put_columns(x: Array | None, part: Array | None, first: Array, count: int) -> Array | None:
    """Undo `columns`."""
    if x is None or part is None or x.shape[-1] == 1 or x.shape[-1] == count:
        return part
    return lax.dynamic_update_slice_in_dim(x, part, first, axis=-1)


def wire_dtype(problem: Problem) -> Any:
    """Dtype in which a gradient is sent before it is complete: that of its sum, unless half of it was asked for."""
    wide = jnp.promote_types(problem.queries.query.dtype, jnp.float32)
    return wide if problem.spec.schedule.gradient_dtype == "float32" else jnp.dtype(jnp.bfloat16)


def zeros(problem: Problem, shape: tuple[int, ...]) -> Array:
    """An accumulator: float32 at least, varying over the mesh like the query."""
    dtype = jnp.promote_types(problem.queries.query.dtype, jnp.float32)
    return manual.full_like(shape, 0, dtype, problem.queries.query)
