"""The decoder transformer, as a pytree: embedding, stacked layers under one `lax.scan`, head.

Invariant: `model(tokens)` is one function of tokens, positions and segment ids, wherever the tokens lie. The same code
runs on one device with no mesh and, inside a `shard_map`, on the shards that `models.sharding.param_specs` describes:
a collective over an axis that is not manual is the identity, and default positions come from the shard's place in the
layout. If they restarted at 0 on every shard, attention would mistake late tokens for early ones and the
loss would depend on the mesh.

The module is a plain pytree: `jax.jit`, `jax.grad`, `jax.tree.map` and optax work on it directly.
"""

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Float, Int, Integer, UInt32

from models.collectives import (
    gather_tokens,
    gather_weight,
    keep_all_but_weights,
    own_tokens,
    replicated,
    scatter_tokens,
    vocab_shard,
    wide_ids,
)
from models.config import ModelConfig
from models.dropout import EMBEDDING, drop_tokens, fold, row_words
from models.layers import DecoderLayer, Positions, RMSNorm, random_weight
from models.sharding import RULES
from ring_jax import manual
from ring_jax.core import ATTENTION
from ring_jax.layouts import shard_positions

_KEEP = jax.checkpoint_policies
REMAT_POLICIES = {
    "none": keep_all_but_weights,
    "layer": _KEEP.nothing_saveable,
    "attention": _KEEP.save_only_these_names(ATTENTION),
    "offload": _KEEP.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[ATTENTION],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}
"""What each value of ``remat`` keeps of a layer besides its input. Gathered weights are never kept."""


def matmul_precision(config: ModelConfig) -> contextlib.AbstractContextManager:
    """What a program is traced under, so that ``compute_dtype="float32"`` is float32 on every device.

    By default TPUs multiply float32 as bfloat16, and GPUs may take TF32.
    """
    exact = config.compute_dtype == "float32"
    return jax.default_matmul_precision("highest") if exact else contextlib.nullcontext()


class Transformer(nnx.Module):
    """A decoder-only language model.

    Example:
      >>> config = ModelConfig(
      ...     vocab_size=256, num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=64
      ... )
      >>> model = Transformer(config, rngs=nnx.Rngs(0))
      >>> model(jnp.zeros((1, 16), jnp.int32)).shape
      (1, 16, 256)
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        if problems := config.problems():
            raise ValueError("; ".join(problems))
        self.config = config
        self.embedding = random_weight(rngs, (config.vocab_size, config.embed_dim), fan_in=config.embed_dim)
        self.layers = DecoderLayer(config, rngs=rngs)
        self.final_norm = RMSNorm((config.embed_dim,), eps=config.norm_eps)
        self.unembedding = (
            None
            if config.tie_embeddings
            else random_weight(rngs, (config.embed_dim, config.vocab_size), fan_in=config.embed_dim)
        )
        blocks = (config.mtp_depth - 1, config.embed_dim, config.embed_dim)
        self.depth_blocks = random_weight(rngs, blocks, fan_in=config.embed_dim) if blocks[0] else None

    def __call__(
        self,
        tokens: Integer[Array, "B T"],
        *,
        positions: Positions | None = None,
        segment_ids: Positions | None = None,
        layout: str | None = "contiguous",
        dropout_seed: Any = None,
    ) -> Float[Array, "B T V"]:
        """Logits of the next token, float32.

        Args:
          tokens: token ids; inside a `shard_map`, this shard's part of them.
          positions: place of every token in its document, int32. None: the place in the row that `layout` gives it.
          segment_ids: document of every token, int32; tokens attend within their own. 0 is padding. None: one document.
          layout: order of the tokens over the `sequence` axis; see `ring_jax.layouts`. None needs positions.
          dropout_seed: which activations fall where the configuration has dropout: an int, an integer array of shape
            [] or [2], or a key of `jax.random`, another at every step. None: none fall, as in evaluation.

        Raises:
          ValueError: the parameters are not sharded as `param_specs` says, or the layers are spread over `pipeline`;
            no positions, and a layout that does not give them.
        """
        held = self.layers.attention_norm.scale.shape[0]
        if held != self.config.num_layers:
            raise ValueError(
                f"this shard holds {held} of {self.config.num_layers} layers, so model(tokens) would skip the others; "
                f"use pipeline=1, or the train step, which passes activations from stage to stage"
            )
        words = None if dropout_seed is None else row_words(dropout_seed, len(tokens))
        with matmul_precision(self.config):
            x = self.embed(tokens)
            if positions is None:
                positions = self._default_positions(tokens, x, layout)
            x = self.drop_embedding(x, words, positions, segment_ids)
            x = self.run_layers(x, positions, segment_ids, layout=layout, words=words)
            return self.head(x)

    @jax.named_scope("embed")
    def embed(self, tokens: Integer[Array, "*B T"]) -> Float[Array, "*B t D"]:
        """Rows of the embedding table, in the compute type; NaN for a token id outside the vocabulary.

        Each device looks up what its part of the table holds; the sum over parts leaves each tensor shard its tokens.
        """
        config, tokens = self.config, wide_ids(tokens)
        like = jnp.zeros((), config.compute_dtype)
        # In float32 once more: the gradient of a row is a sum over all its tokens, which bfloat16 would lose.
        table = gather_weight(self.embedding[...], -1, config.embed_dim, like).astype(jnp.float32)
        first, axes = vocab_shard(table.shape[0], config.vocab_size)
        rows = jnp.take(table, tokens - first, axis=0, mode="fill", fill_value=0)
        # Negative indices count from the end.
        rows = jnp.where(((tokens >= first) & (tokens < first + table.shape[0]))[..., None], rows, 0).astype(like.dtype)
        known, axis = (tokens >= 0) & (tokens < config.vocab_size), tokens.ndim - 1
        rows = scatter_tokens(rows, axis) if RULES.heads in axes else own_tokens(rows, axis)
        if RULES.layers in axes:
            rows = lax.psum(rows, RULES.layers)  # of this tensor shard's tokens only
        return jnp.where(own_tokens(known, axis)[..., None], rows, jnp.nan)

    def drop_embedding(
        self,
        x: Float[Array, "B t D"],
        words: UInt32[Array, "B 2"] | None,
        positions: Positions,
        segment_ids: Positions | None,
    ) -> Float[Array, "B t D"]:
        """What `embed` gave, some of it dropped in training; ``words`` are the keys of the rows."""
        words = None if words is None else fold(words, EMBEDDING)
        return drop_tokens(x, words, positions, segment_ids, self.config.dropout_rate)

    def run_layers(
        self,
        x: Float[Array, "B t D"],
        positions: Positions | None,
        segment_ids: Positions | None,
        *,
        layout: str | None,
        layers: DecoderLayer | None = None,
        words: UInt32[Array, "B 2"] | None = None,
        numbers: Int[Array, "L ..."] | None = None,
        turn: Int[Array, ""] | None = None,
    ) -> Float[Array, "B t D"]:
        """Run the layers that this shard holds, or ``layers`` of them, one after another.

        ``x`` holds this tensor shard's tokens, ``positions`` and ``segment_ids`` those of the whole sequence shard.
        ``words`` are the keys of the rows for dropout, None for none; it goes by the ``numbers`` of the layers in the
        whole model, None where they are all here, in order. With ``turn`` both are [L, turns, ...], and it is run.
        """
        self._check_shards()
        if positions is None:
            positions = self._default_positions(x, x, layout)
        layers = self.layers if layers is None else layers
        windows = self.config.windows or (None,)
        # Between the two loops, forward and backward, nothing can be merged; in one trip of a loop, or without a loop,
        # XLA would merge what is computed again with what was computed before, and keep that.
        one_a_trip = len(windows) == 1 < len(layers.attention_norm.scale)

        @functools.partial(
            jax.checkpoint, static_argnums=0, prevent_cse=not one_a_trip, policy=REMAT_POLICIES[self.config.remat]
        )
        def run(i: int, x: Array, group: DecoderLayer, number: Array | None) -> Array:
            # Cut out in here: outside, every layer's part would be kept for the backward pass, a second copy of all.
            layer = jax.tree.map(lambda w: lax.index_in_dim(w, i, keepdims=False), group)
            if turn is not None:
                here = functools.partial(lax.dynamic_index_in_dim, index=turn, keepdims=False)
                layer, number = jax.tree.map(here, (layer, number))
            # Gathered weights depend on weights alone: untied from x they would be computed for all layers before the
            # loops, and all be there at once.
            x, layer = lax.optimization_barrier((x, layer))
            return layer(x, positions, segment_ids, layout=layout, window=windows[i], words=words, number=number)

        def body(x: Array, held: tuple[DecoderLayer, Array | None]) -> tuple[Array, None]:
            group, numbers = held
            for i in range(len(windows)):
                x = run(i, x, group, None if numbers is None else numbers[i])
            return x, None

        groups = jax.tree.map(lambda w: w.reshape(-1, len(windows), *w.shape[1:]), layers)
        # The carry must enter the loop varying over every axis that it varies over when it leaves.
        x = manual.vary_alike(x, positions, segment_ids, words, jax.tree.leaves(layers))[0]
        if words is not None:
            numbers = jnp.arange(len(layers.attention_norm.scale)) if numbers is None else numbers
            numbers = numbers.reshape(-1, len(windows), *numbers.shape[1:])
        return lax.scan(body, x, (groups, None if words is None else numbers))[0]

    def _default_positions(self, given: Array, x: Float[Array, "B t D"], layout: str | None) -> Int[Array, " T"]:
        """The place in the row that the layout gives to every token of this shard; ``given``: what the caller passed.

        ValueError for a layout that does not tell it: None, and one made for shards that cannot be told apart here.
        """
        if layout is None:
            raise ValueError("layout=None says nothing about the order of the tokens; pass positions=, or a layout")
        if layout != "contiguous" and not manual.axis_is_manual(RULES.sequence):
            meshes = jax.sharding.get_abstract_mesh(), manual.mesh_of(given)
            if (size := max(mesh.shape.get(RULES.sequence, 1) for mesh in meshes)) > 1:
                raise ValueError(
                    f"{layout=}: the mesh axis {RULES.sequence!r} has size {size}, and this call is for one shard, "
                    "whose positions would be others; pass positions=, or call the model inside jax.shard_map"
                )
        shard, num_shards = manual.axis_index(RULES.sequence), manual.axis_size(RULES.sequence)
        length = x.shape[1] * manual.axis_size(RULES.heads)
        return shard_positions(layout, shard, length, num_shards)

    def ahead(self, x: Float[Array, "*B D"], depth: int) -> Float[Array, "*B D"]:
        """What predicts the token ``depth`` places on, from what predicts the next: x + silu(x W)."""
        if depth == 1:
            return x
        assert self.depth_blocks is not None
        block = gather_weight(self.depth_blocks[...][depth - 2], 0, self.config.embed_dim, x)
        x = manual.vary_alike(x, block)[0]
        return x + jax.nn.silu(jnp.einsum("...D,DE->...E", x, block))

    def head_weight(self, like: Array) -> Float[Array, "D v"]:
        """This device's columns of the output head, in the type of ``like``."""
        if self.unembedding is not None:
            return gather_weight(self.unembedding[...], 0, self.config.embed_dim, like)
        return gather_weight(self.embedding[...], -1, self.config.embed_dim, like).T

    @jax.named_scope("head")
    def head(self, x: Float[Array, "B t D"]) -> Float[Array, "B T V"]:
        """Final norm and logits of all tokens of the shard; the logits are accumulated and returned in float32.

        For a look at logits: the loss never forms them for all tokens (`train.loss`).
        """
        x = gather_tokens(self.final_norm(x))
        weight = self.head_weight(x)
        first, axes = vocab_shard(weight.shape[-1], self.config.vocab_size)
        x = manual.vary_alike(x, weight)[0]
        logits = jnp.einsum("...D,DV->...V", x, weight, preferred_element_type=jnp.float32)
        cap = self.config.final_soft_cap
        logits = logits if cap is None else cap * jnp.tanh(logits / cap)
        if not axes:
            return replicated(logits)
        whole = jnp.zeros((*logits.shape[:-1], self.config.vocab_size), logits.dtype)
        whole, logits, first = manual.vary_alike(whole, logits, first)
        return lax.psum(lax.dynamic_update_slice_in_dim(whole, logits, first, axis=logits.ndim - 1), axes)

    def _check_shards(self) -> None:
        """The shards of heads and MLP columns over `tensor` must add up, or the sums over it would be wrong."""
        shards = manual.axis_size(RULES.heads)
        attention, mlp = self.layers.attention, self.layers.mlp
        for name, held, whole in (
            ("query heads", attention.query.shape[-2], self.config.num_heads),
            ("key/value heads", attention.key.shape[-2], self.config.num_kv_heads),
            ("MLP columns", mlp.gate.shape[-1], self.config.mlp_dim),
        ):
            if held * shards != whole:
                raise ValueError(
                    f"{held} {name} on each of {shards} shards of the {RULES.heads} axis do not make {whole}; "
                    f"shard the parameters as models.sharding.param_specs(model) says"
                )
