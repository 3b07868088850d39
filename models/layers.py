"""The blocks of a decoder layer.

Every block takes its sizes from its weights, so one code runs on whole weights and, inside a `shard_map`, on local
shards: heads and MLP columns are cut over the `tensor` axis (column-parallel in, row-parallel out). Between blocks each
tensor shard holds its part of the tokens, see `models.collectives`, which also gathers the weights.

Parameters are float32; they are cast to the type of the activations where they are used. They are created stacked,
[L, ...]; `lax.scan` hands `__call__` the slice of one layer.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax
from jaxtyping import Float, Int, UInt32

import ring_jax
from models.collectives import gather_tokens, gather_weight, scatter_tokens
from models.config import ModelConfig, RopeScaling
from models.dropout import ATTENTION, MLP_SUM, PROBABILITIES, drop_tokens, fold, place_in
from models.sharding import RULES
from ring_jax import manual, rotary

STRATEGIES = {
    "ring": ring_jax.ring_attention,
    "all_gather": ring_jax.all_gather_attention,
    "ulysses": ring_jax.ulysses_attention,
    "usp": ring_jax.usp_attention,
}

NO_SCALING = RopeScaling()

type Positions = Int[Array, "B T"] | Int[Array, " T"]


def random_weight(rngs: nnx.Rngs, shape: tuple[int, ...], *, fan_in: int, gain: float = 1.0) -> nnx.Param:
    """A float32 parameter drawn from a normal distribution with variance gain^2 / fan_in."""
    # Drawn as a matrix: XLA takes several times as long to compile a draw with more dimensions.
    rows = math.prod(shape[:2]) if len(shape) > 2 else shape[0]
    draw = jax.random.normal(rngs.params(), (rows, math.prod(shape) // rows), jnp.float32)
    return nnx.Param((draw * (gain * fan_in**-0.5)).reshape(shape))


def rotary_frequencies(head_dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """Radians per position of every pair of channels, float64 [H / 2]: f = theta^(-2i/H), for long contexts scaled.

    With original context C a frequency turns C f / 2 pi times. At most `low` times: it becomes f / factor; at least
    `high` times: it stays; between them (1 - s) f / factor + s f with s = (C f / 2 pi - low) / (high - low).

    Reference:
      The Llama 3 Herd of Models, arXiv:2407.21783, section 3.4.2; the formula is that of the released Llama 3.1.
    """
    frequency = rotary.frequencies(head_dim, theta)
    if scaling.factor == 1:
        return frequency
    turns = scaling.original_max_position * frequency / (2 * np.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return frequency * (kept + (1 - kept) / scaling.factor)


def rotary_tables(
    positions: Int[Array, "*B T"], head_dim: int, theta: float, scaling: RopeScaling = NO_SCALING
) -> tuple[Float[Array, "*B T half"], Float[Array, "*B T half"]]:
    """Cosine and sine of the rotary angles, position * frequency (`rotary_frequencies`), float32."""
    return rotary.tables(positions, rotary_frequencies(head_dim, theta, scaling))


class RMSNorm(nnx.Module):
    """x / rms(x) * scale, computed in float32 and returned in the type of x."""

    def __init__(self, shape: tuple[int, ...], *, eps: float):
        self.eps = eps
        self.scale = nnx.Param(jnp.ones(shape, jnp.float32))

    @jax.named_scope("norm")
    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        wide = x.astype(jnp.float32)
        inverse_rms = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * inverse_rms * self.scale[...]).astype(x.dtype)


class Attention(nnx.Module):
    """Causal grouped-query attention with rotary embeddings, over the ring of the `sequence` axis."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        layers, d, n = config.num_layers, config.embed_dim, config.num_heads
        k, h = config.num_kv_heads, config.head_dim
        self.rope_theta, self.rope_scaling = config.rope_theta, config.rope_scaling
        self.strategy, self.soft_cap = config.strategy, config.attention_soft_cap
        self.dropout_rate = config.attention_dropout_rate
        self.query = random_weight(rngs, (layers, d, n, h), fan_in=d)
        self.key = random_weight(rngs, (layers, d, k, h), fan_in=d)
        self.value = random_weight(rngs, (layers, d, k, h), fan_in=d)
        self.output = random_weight(rngs, (layers, n, h, d), fan_in=n * h, gain=(2 * layers) ** -0.5)

    @jax.named_scope("attention")
    def __call__(
        self,
        x: Float[Array, "B t D"],
        positions: Positions,
        segment_ids: Positions | None,
        *,
        layout: str | None,
        window: int | None,
        words: UInt32[Array, "B 2"] | None = None,
    ) -> Float[Array, "B t D"]:
        width = x.shape[-1]
        x = gather_tokens(x)
        x = manual.vary_alike(x, self.query[...])[0]  # one sum of its cotangents over `tensor`, not three
        query, key, value = (
            jnp.einsum("BTD,DNH->BTNH", x, gather_weight(w[...], 0, width, x))
            for w in (self.query, self.key, self.value)
        )
        cos, sin = rotary_tables(positions, query.shape[-1], self.rope_theta, self.rope_scaling)
        attended = STRATEGIES[self.strategy](
            rotary.rotate(query, cos, sin),
            rotary.rotate(key, cos, sin),
            value,
            is_causal=True,
            local_window_size=None if window is None else (window, 0),
            logits_soft_cap=self.soft_cap,
            positions=positions,
            segment_ids=segment_ids,
            layout=layout,
            dropout_rate=0.0 if words is None else self.dropout_rate,
            dropout_seed=words,
            batch_axis=(RULES.batch, RULES.layers),  # stages differ, too; with a seed for each row none is counted
            axis_name=RULES.sequence if manual.axis_is_manual(RULES.sequence) else None,
        )
        return scatter_tokens(jnp.einsum("BTNH,NHD->BTD", attended, gather_weight(self.output[...], -1, width, x)))


class MLP(nnx.Module):
    """SwiGLU: (silu(x gate) * (x up)) down."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        layers, d, f = config.num_layers, config.embed_dim, config.mlp_dim
        self.chunk = config.mlp_chunk
        self.gate = random_weight(rngs, (layers, d, f), fan_in=d)
        self.up = random_weight(rngs, (layers, d, f), fan_in=d)
        self.down = random_weight(rngs, (layers, f, d), fan_in=f, gain=(2 * layers) ** -0.5)

    @jax.named_scope("mlp")
    def __call__(self, x: Float[Array, "B t D"]) -> Float[Array, "B t D"]:
        width = x.shape[-1]
        x = gather_tokens(x)
        x = manual.vary_alike(x, self.gate[...])[0]  # one sum of its cotangents over `tensor`, not two
        gate, up = (gather_weight(w[...], 0, width, x) for w in (self.gate, self.up))
        down = gather_weight(self.down[...], -1, width, x)

        x, gate, up, down = manual.vary_alike(x, gate, up, down)  # in `_in_chunks` cotangents vary like all of them
        tokens = x.reshape(-1, width)
        if self.chunk is None or self.chunk >= len(tokens):
            out = _swiglu(tokens, gate, up, down)
        else:
            out = _in_chunks(self.chunk, jax.config.jax_default_matmul_precision, tokens, gate, up, down)
        return scatter_tokens(out.reshape(x.shape))


def _swiglu(x: Array, gate: Array, up: Array, down: Array) -> Array:
    inner = jax.nn.silu(jnp.einsum("nD,DF->nF", x, gate)) * jnp.einsum("nD,DF->nF", x, up)
    return jnp.einsum("nF,FD->nD", inner, down)


def _cut(chunk: int, x: Array) -> Array:
    """[n, D] as [chunks, at most chunk, D], filled up with zeros."""
    count = -(-len(x) // chunk)
    size = -(-len(x) // count)
    return jnp.pad(x, ((0, count * size - len(x)), (0, 0))).reshape(count, size, -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _in_chunks(chunk: int, precision: str | None, x: Array, *weights: Array) -> Array:
    """`_swiglu` of so many tokens at a time; the hidden layer of each is made again in the backward pass.

    Gradients of the weights are summed in float32: JAX's own gradient of the loop would sum in the type of the weights,
    and in bfloat16 lose what each chunk adds. ``precision`` is that of matmuls here: the backward pass is traced later,
    where another may be set.
    """
    pieces = lax.map(lambda piece: _swiglu(piece, *weights), _cut(chunk, x))
    return pieces.reshape(-1, x.shape[-1])[: len(x)]


def _in_chunks_forward(chunk: int, precision: str | None, x: Array, *weights: Array) -> tuple[Array, tuple[Array, ...]]:
    return _in_chunks(chunk, precision, x, *weights), (x, *weights)


def _in_chunks_backward(
    chunk: int, precision: str | None, residuals: tuple[Array, ...], cotangent: Array
) -> tuple[Array, ...]:
    x, *weights = residuals

    def add(sums: list[Array], pieces: tuple[Array, Array]) -> tuple[list[Array], Array]:
        piece, cotangent = pieces
        with jax.default_matmul_precision(precision):
            dx, *grads = jax.vjp(_swiglu, piece, *weights)[1](cotangent)
        return [total + grad.astype(total.dtype) for total, grad in zip(sums, grads, strict=True)], dx

    zeros = [manual.full_like(w.shape, 0, jnp.float32, x, cotangent, *weights) for w in weights]
    sums, dx = lax.scan(add, zeros, (_cut(chunk, x), _cut(chunk, cotangent)))
    return dx.reshape(-1, x.shape[-1])[: len(x)], *(s.astype(w.dtype) for s, w in zip(sums, weights, strict=True))


_in_chunks.defvjp(_in_chunks_forward, _in_chunks_backward)


class DecoderLayer(nnx.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        norm_shape = (config.num_layers, config.embed_dim)
        self.attention_norm = RMSNorm(norm_shape, eps=config.norm_eps)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = RMSNorm(norm_shape, eps=config.norm_eps)
        self.mlp = MLP(config, rngs=rngs)
        self.dropout_rate = config.dropout_rate

    @jax.named_scope("layer")
    def __call__(
        self,
        x: Float[Array, "B t D"],
        positions: Positions,
        segment_ids: Positions | None,
        *,
        layout: str | None,
        window: int | None = None,
        words: UInt32[Array, "B 2"] | None = None,
        number: Int[Array, ""] | None = None,
    ) -> Float[Array, "B t D"]:
        """Run one layer; ``words`` are the keys of the rows for dropout, ``number`` that of the layer in the model."""
        # What depends on positions alone would be computed before the loop over layers when that loop is
        # differentiated, and kept: a mask for every pair of tokens. Tied to x, it is computed here and dropped.
        x, positions, segment_ids, words = lax.optimization_barrier((x, positions, segment_ids, words))

        def words_at(place: int) -> UInt32[Array, "B 2"] | None:
            return None if words is None or number is None else fold(words, place_in(number, place))

        y = self.attention(
            self.attention_norm(x), positions, segment_ids, layout=layout, window=window, words=words_at(PROBABILITIES)
        )
        x = x + drop_tokens(y, words_at(ATTENTION), positions, segment_ids, self.dropout_rate)
        y = self.mlp(self.mlp_norm(x))
        return x + drop_tokens(y, words_at(MLP_SUM), positions, segment_ids, self.dropout_rate)
