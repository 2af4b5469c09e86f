"""The worked example that every algorithm is held against: 2 prompts, 4 completions each, up to 5 tokens.

Its numbers were computed with numpy in float64 by a separate program, to six decimals.
"""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import algorithms
from grpo_jax.algorithms import pieces
from grpo_jax.configs import algorithms as presets
from grpo_jax.configs import default
from grpo_jax.types import Experience, Rollout

_i, _t = np.meshgrid(np.arange(8), np.arange(5), indexing='ij')
REWARDS = np.array([[1, 0, 0, 1], [1, 1, 1, 0]], np.float64)
LENGTHS = np.array([2, 4, 3, 1, 5, 3, 2, 4])
MASK = _t < LENGTHS[:, None]
LOGPROBS = -0.2 - 0.1 * ((3 * _i + 2 * _t) % 7)
OLD = LOGPROBS - 0.15 * ((_i + 2 * _t) % 5 - 2)
REF = LOGPROBS + 0.1 * ((2 * _i + _t) % 3 - 1)
SAMPLER = OLD + 0.9 * ((_i + _t) % 4 == 0) - 1.8 * ((_i + 2 * _t) % 7 == 3)
TEACHER = LOGPROBS + 0.2 * ((_i + _t) % 3) - 0.15
ENTROPY = 0.2 + 0.13 * ((3 * _i + 5 * _t) % 11) + 1e-3 * (5 * _i + _t)

ROUNDED = dict(rtol=0, atol=1.5e-6)  # the numbers are printed to six decimals; float32 adds a little
NO_KL = dict(kl='none', kl_coef=0.0, kl_placement='loss')
PRESETS = sorted(name[:-3] for name in os.listdir(os.path.dirname(presets.__file__)) if name[0] != '_')


SMALL = dict(fixed_length=5, pass_k=2)  # numbers that fit the example


@functools.cache
def algorithm(preset, **numbers):
    """The preset's algorithm with some entries of its sections replaced."""
    config = default.get_config(preset)
    for name, value in numbers.items():
        section = config.collection if name in config.collection else config.algorithm
        section[name] = value
    return algorithms.make(config.algorithm, config.collection)


def algorithm_with(preset, numbers, **changes):
    """algorithm with those of the numbers that its pieces have: of the others none may be set."""
    method = algorithm(preset, **changes)
    chosen = (method.advantage, method.ratio, method.surrogate, method.weights, method.correction, method.selection)
    present = {number for piece in (*chosen, *method.regularizers) for number in pieces.numbers(piece)}
    return algorithm(preset, **changes, **{name: value for name, value in numbers.items() if name in present})


def experience(
    advantages, *, mask=MASK, old=OLD, ref=REF, sampler=SAMPLER, entropy=ENTROPY, teacher=TEACHER, group_ids=None
):
    """An Experience whose tokens nobody reads."""
    rows, length = mask.shape
    group_ids = np.arange(rows) // 4 if group_ids is None else group_ids
    old, ref, sampler, entropy = (
        None if x is None else jnp.asarray(x, jnp.float32) for x in (old, ref, sampler, entropy)
    )
    rollout = Rollout(
        tokens=jnp.zeros((rows, length + 1), jnp.int32),
        prompt_mask=jnp.ones((rows, 1), bool),
        completion_mask=jnp.asarray(mask),
        logprobs=sampler,
        truncated=jnp.zeros(rows, bool),
        version=jnp.zeros((rows, length), jnp.int32),
        forced=jnp.zeros((rows, length), bool),
    )
    return Experience(
        rollout=rollout,
        advantages=jnp.asarray(advantages),
        rewards=jnp.asarray(REWARDS.reshape(-1)[:rows]),
        old_logprobs=old,
        ref_logprobs=ref,
        group_ids=jnp.asarray(group_ids, jnp.int32),
        teacher_logprobs=jnp.asarray(teacher, jnp.float32),
        old_entropy=entropy,
    )


def worked(method, mask=MASK, **changes):
    """The example's Experience with the method's own advantages."""
    grouped = MASK.reshape(2, 4, 5)
    read = dict(
        mask=grouped,
        kl=np.where(MASK, OLD - REF, 0).reshape(grouped.shape),
        old_entropy=ENTROPY.reshape(grouped.shape),
        sampler_logprobs=SAMPLER.reshape(grouped.shape),
        tokens=(_i + _t).reshape(grouped.shape) % 3,
        values=np.where(MASK, 0.1 * _t, 0).reshape(grouped.shape),
        initial_entropy=0.0,
        teacher_logprobs=TEACHER.reshape(grouped.shape),
        old_logprobs=OLD.reshape(grouped.shape),
        run_baseline=0.5,
        prompt_baselines=np.array([[0.25] * 4, [0.75] * 4]),
        step_rewards=np.where(MASK & (_t % 2 == 1), 0.1 * _i, np.nan).reshape(grouped.shape),
    )
    return experience(algorithms.compute_advantages(method, REWARDS, **read), mask=mask, **changes)


def loss_and_gradient(method, experience_, logprobs=LOGPROBS):
    """(loss, gradient [B, C] in logprobs, metrics) through the public policy_loss."""
    (loss, metrics), gradient = _value_and_grad(method, jnp.asarray(logprobs, jnp.float32), experience_)
    return float(loss), np.asarray(gradient), {name: float(x) for name, x in metrics.items()}


@functools.partial(jax.jit, static_argnums=0)
def _value_and_grad(method, logprobs, experience_):
    return jax.value_and_grad(lambda x: algorithms.policy_loss(method, x, experience_), has_aux=True)(logprobs)
