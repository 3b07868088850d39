"""A short continuation of held-out text, as the plainest proof that the model learned something.

The same `model(tokens)` as in training runs here on one device without a mesh. The window has a fixed length, so the
program compiles once: each new token pushes the oldest one out on the left.

    step 0   [ p0 p1 p2 p3 ]  -> s0
    step 1   [ p1 p2 p3 s0 ]  -> s1
    step 2   [ p2 p3 s0 s1 ]  -> s2

Every token is a whole forward pass over the window: fine for a few hundred tokens, far too slow for serving.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from train.rows import Documents, lengths_of

WINDOW = 128
NUM_TOKENS = 240


def choose_prompt(documents: Documents, *, length: int = WINDOW) -> np.ndarray:
    """Tokens from the middle of the longest document; fewer than `length` when no document has so many."""
    text = documents[int(np.argmax(lengths_of(documents)))]
    start = max(0, (len(text) - length) // 2)
    return np.asarray(text.read(start, start + length), np.int32)


def continue_text(
    model: Any, prompt: np.ndarray, *, num_tokens: int = NUM_TOKENS, temperature: float = 0.8, seed: int = 0
) -> np.ndarray:
    """Sample tokens that follow a prompt.

    Args:
      model: the trained Transformer pytree; its arrays may be spread over a mesh.
      prompt: token ids [T]; T is the window that the model sees at every step.
      num_tokens: tokens to sample.
      temperature: divides the logits; below 1 prefers likely tokens, 0 always takes the likeliest.
      seed: determines the sample.

    Returns:
      Token ids [num_tokens].
    """
    device = jax.devices()[0]
    local_model = jax.device_put(jax.device_get(model), device)
    window = jax.device_put(np.asarray(prompt, np.int32)[None, :], device)
    tokens = _sample(local_model, window, jax.random.key(seed), jnp.float32(temperature), num_tokens=num_tokens)
    return np.asarray(tokens)


@functools.partial(jax.jit, static_argnames="num_tokens")
def _sample(model: Any, window: jax.Array, key: jax.Array, temperature: jax.Array, *, num_tokens: int) -> jax.Array:
    def step(window: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = model(window)[:, -1]
        noise = temperature * jax.random.gumbel(key, logits.shape)
        token = jnp.argmax(logits + noise, axis=-1).astype(window.dtype)
        return jnp.concatenate([window[:, 1:], token[:, None]], axis=1), token[0]

    _, tokens = jax.lax.scan(step, window, jax.random.split(key, num_tokens))
    return tokens
