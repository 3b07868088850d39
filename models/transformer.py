"""The decoder transformer, as a pytree: embedding, stacked layers under one `lax.scan`, head.

Invariant: `model(tokens)` is one function of tokens, positions and segment ids, wherever the tokens lie. The same code
runs on one device with no mesh and, inside a `shard_map`, on the shards that `models.sharding.param_specs` describes:
a collective over an axis that is not manual is the identity, and default positions come from the shard's place in the
layout. If they restarted at 0 on every shard, attention would mistake late tokens for early ones and the
loss would depend on the mesh.

The module is a plain pytree: `jax.jit`, `jax.grad`, `jax.tree.map` and optax work on it directly.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Float, Int

from models.config import ModelConfig
from models.layers import DecoderLayer, Positions, RMSNorm, random_weight
from models.sharding import RULES
from ring_jax import manual
from ring_jax.layouts import shard_positions


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

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        positions: Positions | None = None,
        segment_ids: Positions | None = None,
        layout: str = "contiguous",
    ) -> Float[Array, "B T V"]:
        """Logits of the next token, float32.

        Args:
          tokens: token ids; inside a `shard_map`, this shard's part of them.
          positions: place of every token in its document, int32. None: the place in the row that `layout` gives it.
          segment_ids: document of every token, int32; tokens attend within their own. 0 is padding. None: one document.
          layout: order of the tokens over the `sequence` axis; see `ring_jax.layouts`.

        Raises:
          ValueError: the parameters are not sharded as `param_specs` says, or the layers are spread over `pipeline`.
        """
        held = self.layers.attention_norm.scale.shape[0]
        if held != self.config.num_layers:
            raise ValueError(
                f"this shard holds {held} of {self.config.num_layers} layers, so model(tokens) would skip the others; "
                f"use pipeline=1, or the train step, which passes activations from stage to stage"
            )
        x = self.embed(tokens)
        x = self.run_layers(x, positions, segment_ids, layout=layout)
        return self.head(x)

    @jax.named_scope("embed")
    def embed(self, tokens: Int[Array, "*B T"]) -> Float[Array, "*B T D"]:
        """Rows of the embedding table, in the compute type; NaN for a token id outside the vocabulary."""
        return jnp.take(self.embedding[...], tokens, axis=0, mode="fill").astype(self.config.compute_dtype)

    def run_layers(
        self,
        x: Float[Array, "B T D"],
        positions: Positions | None,
        segment_ids: Positions | None,
        *,
        layout: str,
    ) -> Float[Array, "B T D"]:
        """Run the layers that this shard holds, one after another."""
        self._check_shards()
        if positions is None:
            shard, num_shards = manual.axis_index(RULES.sequence), manual.axis_size(RULES.sequence)
            positions = shard_positions(layout, shard, x.shape[1], num_shards)

        def body(x: Array, layer: DecoderLayer) -> tuple[Array, None]:
            return layer(x, positions, segment_ids, layout=layout), None

        if self.config.remat:
            body = jax.checkpoint(body, prevent_cse=False)  # the loop itself keeps the recomputation
        # The carry must enter the loop varying over every axis that it varies over when it leaves.
        x = manual.vary_alike(x, positions, segment_ids, self.layers.attention_norm.scale[...])[0]
        return lax.scan(body, x, self.layers)[0]

    @jax.named_scope("head")
    def head(self, x: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        """Final norm and logits; the logits are accumulated and returned in float32."""
        x = self.final_norm(x)
        weight = self.embedding[...].T if self.unembedding is None else self.unembedding[...]
        return jnp.einsum("...D,DV->...V", x, weight.astype(x.dtype), preferred_element_type=jnp.float32)

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
