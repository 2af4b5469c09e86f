"""An algorithm is a value: a NamedTuple of small functions, put together from a config section."""
from collections.abc import Callable
import functools
import inspect
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.algorithms import advantages, kl, ratios, regularizers, surrogates, weights
from grpo_jax.errors import BadInput


class Algorithm(NamedTuple):
    """The pieces of a policy-gradient method; replace one with `algorithm._replace(surrogate=mine)`."""

    advantage: Callable    # (rewards f64[P, G]) -> f64[P, G]
    ratio: Callable        # (log_ratio f32[B, C], mask bool[B, C]) -> f32[B, C]
    surrogate: Callable    # (ratio, advantages, logprobs) -> f32[B, C]
    kl: Callable           # (logprobs, ref_logprobs) -> f32[B, C]
    kl_coef: float         # 0: no reference policy at all
    weights: Callable      # (mask, group_ids) -> f32[B, C]
    regularizer: Callable  # (logprobs, entropy) -> f32[B, C]
    dead_groups: str       # 'keep' or 'drop' groups whose rewards are all equal

    @property
    def needs_entropy_gradient(self):
        """Whether the learner must differentiate the entropy."""
        return self.regularizer is not regularizers.none


def make(section):
    """Algorithm from a config section that names the pieces and lists their numbers.

    A piece's keyword-only arguments are bound from the section's keys of the same names. Raises
    BadInput for an unknown piece, or a combination that cannot work.
    """
    algorithm = Algorithm(
        advantage=_piece(advantages, 'advantage', section),
        ratio=_piece(ratios, 'ratio', section),
        surrogate=_piece(surrogates, 'surrogate', section),
        kl=_piece(kl, 'kl', section),
        kl_coef=section['kl_coef'],
        weights=_piece(weights, 'weights', section),
        regularizer=_piece(regularizers, 'regularizer', section),
        dead_groups=section['dead_groups'],
    )
    if section['kl'] == 'k1':
        raise BadInput('algorithm.kl', 'k1', 'as a loss its expected gradient is zero, so it only adds '
                       'noise; use k2 (exact gradient) or k3')
    if (section['kl'] == 'none') != (section['kl_coef'] == 0):
        raise BadInput('algorithm.kl_coef', section['kl_coef'], f'does not fit algorithm.kl='
                       f'{section["kl"]!r}: set kl to k2 or k3 and kl_coef above 0, or kl to none and kl_coef to 0')
    if section['dead_groups'] not in ('keep', 'drop'):
        raise BadInput('algorithm.dead_groups', section['dead_groups'], 'choose keep or drop')
    return algorithm


def _piece(module, key, section):
    """The function of `module` that the section names, with its numbers bound."""
    name = section[key]
    choices = {n: f for n, f in vars(module).items()
               if inspect.isfunction(f) and f.__module__ == module.__name__ and not n.startswith('_')}
    if name not in choices:
        raise BadInput(f'algorithm.{key}', name, 'choose one of ' + ', '.join(sorted(choices)))
    function = choices[name]
    numbers = [n for n, p in inspect.signature(function).parameters.items() if p.kind is p.KEYWORD_ONLY]
    return functools.partial(function, **{n: section[n] for n in numbers}) if numbers else function


def compute_advantages(algorithm, rewards):
    """Advantages f32[P * G, 1] of rewards [P, G], on the host.

    Exactly 0 for unscorable (not finite) rewards and in dead groups.
    """
    rewards = np.asarray(rewards, np.float64)
    rewards = np.where(np.isfinite(rewards), rewards, np.nan)  # an infinite reward would spoil its whole group
    values = algorithm.advantage(rewards)
    alive = np.isfinite(rewards) & ~dead_groups(rewards)[:, None]
    return np.where(alive, values, 0.0).reshape(-1, 1).astype(np.float32)


def dead_groups(rewards):
    """bool[P]: the groups of rewards [P, G] whose finite rewards are all equal.

    Decided by max == min: by a small std, float rounding would leak through.
    """
    low = np.where(np.isfinite(rewards), rewards, np.inf).min(1)
    high = np.where(np.isfinite(rewards), rewards, -np.inf).max(1)
    return ~(high > low)


def token_losses(algorithm, logprobs, entropy, experience):
    """f32[B, C] losses before weighting, 0 where masked; differentiable in logprobs and entropy.

    Without old_logprobs the log ratio is logprobs - stop_gradient(logprobs): the ratio is exactly 1
    and its gradient is the policy gradient.
    """
    mask = experience.rollout.loss_mask
    advantages_ = jax.lax.stop_gradient(experience.advantages)
    ratio = algorithm.ratio(_log_ratio(logprobs, experience), mask)
    loss = algorithm.surrogate(ratio, advantages_, jnp.where(mask, logprobs, 0.0))
    if algorithm.kl_coef:
        live, reference = jnp.where(mask, logprobs, 0.0), jnp.where(mask, experience.ref_logprobs, 0.0)
        loss = loss + algorithm.kl_coef * algorithm.kl(live, reference)
    loss = loss + algorithm.regularizer(logprobs, entropy)
    return jnp.where(mask, loss, 0.0)


def policy_loss(algorithm, logprobs, experience, entropy=None):
    """(loss f32[], metrics) of logprobs f32[B, C]; differentiable in logprobs alone, no model in sight.

    entropy f32[B, C] is for algorithms with an entropy bonus.
    """
    entropy = jnp.zeros_like(logprobs) if entropy is None else entropy
    rollout = experience.rollout
    weights_ = algorithm.weights(rollout.loss_mask, experience.group_ids)
    loss = jnp.sum(weights_ * token_losses(algorithm, logprobs, entropy, experience))
    return loss, metrics(algorithm, jax.lax.stop_gradient(logprobs), entropy, experience)


def metrics(algorithm, logprobs, entropy, experience):
    """Diagnostics of one minibatch as f32[] scalars: token means over the completion mask unless named otherwise."""
    mask = experience.rollout.loss_mask
    count = jnp.maximum(jnp.sum(mask), 1)

    def mean(x):
        return jnp.sum(jnp.where(mask, x, 0.0)) / count

    log_ratio = _log_ratio(logprobs, experience)
    ratio = algorithm.ratio(log_ratio, mask)
    old = logprobs - log_ratio
    gap = jnp.where(mask, jnp.abs(experience.rollout.logprobs - old), 0.0)
    clipped = _clipped(algorithm, logprobs, experience)
    found = {
        'entropy': mean(entropy),
        'ratio_mean': mean(ratio),
        'ratio_max': jnp.max(jnp.where(mask, ratio, 0.0)),
        'kl_old': mean(kl.k3(old, old + log_ratio)),
        'clip_low_share': mean(clipped & (experience.advantages < 0)),
        'clip_high_share': mean(clipped & (experience.advantages > 0)),
        'sampler_gap_mean': mean(gap),
        'sampler_gap_p99': jnp.nan_to_num(jnp.nanquantile(jnp.where(mask, gap, jnp.nan), 0.99)),
        'sampler_gap_max': jnp.max(gap),
    }
    if algorithm.kl_coef:
        reference = jnp.where(mask, experience.ref_logprobs, logprobs)
        found['kl_ref'] = mean(kl.k3(logprobs, reference))
        found['kl_clamped_share'] = mean(kl.clamped(logprobs, reference))
    return found


def _clipped(algorithm, logprobs, experience):
    """bool[B, C]: tokens whose surrogate has lost its gradient, whichever surrogate it is."""
    def surrogate(logprobs):
        ratio = algorithm.ratio(_log_ratio(logprobs, experience), experience.rollout.loss_mask)
        return jnp.sum(algorithm.surrogate(ratio, experience.advantages, logprobs))

    return (jax.grad(surrogate)(logprobs) == 0) & experience.rollout.loss_mask


def _log_ratio(logprobs, experience):
    """f32[B, C], 0 where masked: masked before any exp, or gradients of masked tokens would be NaN."""
    old = experience.old_logprobs
    old = jax.lax.stop_gradient(logprobs if old is None else old)
    return jnp.where(experience.rollout.loss_mask, logprobs - old, 0.0)
