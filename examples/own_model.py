"""Ring attention in your own Flax model and training loop: `python examples/own_model.py`, on 8 simulated devices."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import ring_jax

jax.config.update("jax_num_cpu_devices", 8)  # before JAX is first used; leave it out on a real machine


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, vocab_size: int = 64, num_heads: int = 4, head_dim: int = 16):
        width = num_heads * head_dim
        self.num_heads = num_heads
        self.embed = nnx.Embed(vocab_size, width, rngs=rngs)
        self.qkv = nnx.Linear(width, 3 * width, rngs=rngs)
        self.out = nnx.Linear(width, vocab_size, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        query, key, value = jnp.split(self.qkv(x).reshape(*tokens.shape, self.num_heads, -1), 3, axis=-1)
        y = ring_jax.dot_product_attention(query, key, value, is_causal=True, layout="zigzag")  # the only new line
        return self.out(x + y.reshape(x.shape))


def train(num_steps: int = 60, seq_len: int = 256) -> list[float]:
    """Learn to repeat what stood 8 tokens earlier; the sequence is cut over 4 devices, the batch over 2."""
    mesh = ring_jax.make_mesh(data=2, sequence=4)
    text = jnp.tile(jax.random.randint(jax.random.key(0), (8, 8), 0, 64), (1, seq_len // 8 + 1))
    # Targets first, then the layout: a token's target must not depend on where the token lies.
    tokens, targets = (ring_jax.to_layout(x, "zigzag", 4) for x in (text[:, :seq_len], text[:, 1 : seq_len + 1]))
    tokens, targets = jax.device_put((tokens, targets), jax.NamedSharding(mesh, jax.P("data", "sequence")))
    model, optimizer = Model(nnx.Rngs(0)), optax.adam(1e-2)
    state = optimizer.init(model)

    def loss_fn(model: Model) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(tokens), targets).mean()

    @jax.jit
    def step(model: Model, state: optax.OptState):
        loss, grads = jax.value_and_grad(loss_fn)(model)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(model, updates), state, loss

    losses = []
    with jax.set_mesh(mesh):
        for _ in range(num_steps):
            model, state, loss = step(model, state)
            losses.append(float(loss))
    return losses


if __name__ == "__main__":
    losses = train()
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps")
