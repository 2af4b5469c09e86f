"""The optimizer: global-norm clipping and AdamW under a warm-up and decay schedule."""

from typing import Annotated, Any, NamedTuple

import optax

from grpo_jax import ranges
from grpo_jax.ranges import Natural, OneOf, Positive, Range

SCHEDULES = ('constant', 'cosine', 'linear')  # after warm-up
Decay = Annotated[float, Range(least=0, most=0.999999)]  # nearer to 1, float32 has 1 - b as 0


class Optimization(NamedTuple):
    """An optimizer's numbers; updates counts optimizer updates."""

    learning_rate: Annotated[float, Range(least=0, most=10)] = 1e-6  # after warm-up
    schedule: Annotated[str, OneOf(SCHEDULES)] = 'constant'  # after warm-up: constant, linear or cosine to zero
    warmup: Natural = 0  # updates
    b1: Decay = 0.9  # of AdamW
    b2: Decay = 0.95  # of AdamW
    eps: Annotated[float, Range(above=0, most=1)] = 1e-8  # of AdamW
    weight_decay: Annotated[float, Range(least=0, most=10)] = 0.0  # of AdamW, on every parameter
    max_grad_norm: Positive = 1.0  # longer gradients are scaled down to it

    @classmethod
    def from_config(cls, section, name='optimizer'):
        """Optimization of the config's section of that name; BadInput for a value out of its range."""
        return cls(**ranges.read_section(cls, section, name))


class Optimizers(NamedTuple):
    """The optimizers of a run."""

    policy: optax.GradientTransformation
    critic: optax.GradientTransformation | None = None
    learning_rate: optax.Schedule | None = None  # of the policy's, which the metrics then have


def build_optimizer(optimization: Optimization, updates: int) -> optax.GradientTransformation:
    """The optax transformation for `updates` optimizer updates."""
    return optax.chain(
        optax.clip_by_global_norm(optimization.max_grad_norm),
        optax.adamw(
            learning_rates(optimization, updates),
            b1=optimization.b1,
            b2=optimization.b2,
            eps=optimization.eps,
            weight_decay=optimization.weight_decay,
        ),
    )


def applied_updates(opt_state: optax.OptState) -> Any:
    """How many updates an optimizer of build_optimizer has made, i32[]; skipped ones do not count."""
    return optax.tree_utils.tree_get_all_with_path(opt_state, 'count')[-1][1]


def learning_rates(optimization: Optimization, updates: int) -> optax.Schedule:
    """Learning rate by update: linear warm-up, then constant, linear or cosine to zero at `updates`."""
    peak, warmup = optimization.learning_rate, optimization.warmup
    rest = max(updates - warmup, 1)
    decays = {
        'constant': lambda: optax.constant_schedule(peak),
        'linear': lambda: optax.linear_schedule(peak, 0.0, rest),
        'cosine': lambda: optax.cosine_decay_schedule(peak, rest),
    }
    # from peak / warmup, not 0: the first update of a run must count
    ramp = optax.linear_schedule(peak / max(warmup, 1), peak, max(warmup - 1, 1))
    return optax.join_schedules([ramp, decays[optimization.schedule]()], [warmup])
