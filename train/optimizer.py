"""The optimizer: clipped AdamW (or plain SGD) with linear warmup and cosine decay.

It runs outside the train step's `shard_map`, on global arrays. So every parameter counts once in the gradient
norm, whether it is cut over the mesh or replicated; a norm taken inside, over shards, would count a
replicated parameter once per device and clip too early, while the loss still looked fine.
"""

from typing import Any

import jax
import optax

from models.sharding import logical_axes, parameter_name
from train.config import OptimizerConfig


def make_schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Learning rate of step 0, 1, ...: a ramp to the peak at the last warmup step, then a cosine to the last step."""
    warmup_steps = min(config.warmup_steps, num_steps)
    schedule = optax.join_schedules(
        [
            optax.linear_schedule(0.0, config.learning_rate, max(warmup_steps, 1)),
            optax.cosine_decay_schedule(
                config.learning_rate, max(num_steps - warmup_steps, 1), alpha=config.min_learning_rate_ratio
            ),
        ],
        [warmup_steps],
    )
    return lambda step: schedule(step + 1)  # step 0 must move, too


def decay_mask(params: Any) -> Any:
    """True for the parameters that weight decay applies to: the matrices.

    Norm scales do not decay: their zero is no simpler model. Nor does the embedding table, tied or not: a row whose
    token does not occur gets no gradient, and would only shrink.
    """

    def decays(path: tuple[Any, ...], _: Any) -> bool:
        axes = [name for name in logical_axes(path) if name != "layers"]
        return len(axes) > 1 and parameter_name(path) != "embedding"

    return jax.tree_util.tree_map_with_path(decays, params)


def make_optimizer(config: OptimizerConfig, num_steps: int) -> optax.GradientTransformation:
    """Global-norm clipping, then the update rule that the configuration names."""
    schedule = make_schedule(config, num_steps)
    if config.name == "sgd":
        rule = optax.sgd(schedule)
    elif config.name == "adamw":
        rule = optax.adamw(
            schedule, config.b1, config.b2, config.eps, weight_decay=config.weight_decay, mask=decay_mask
        )
    else:
        raise ValueError(f'optimizer.name={config.name!r} must be "adamw" or "sgd"; choose one of them')
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), rule)
