"""What the pieces of a loss may read of a minibatch, by name."""

from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax.algorithms import pieces, ratios


def make_inputs(algorithm, logprobs, entropy, experience, top_logprobs=None) -> pieces.Inputs:
    """What a row's pieces may read, 0 where masked: masked before any exp, or masked tokens' gradients were NaN.

    top_logprobs are the policy's of experience.teacher_ids.
    """
    rollout, mask = experience.rollout, experience.rollout.loss_mask

    def masked(x) -> Any:
        return None if x is None else jnp.where(mask, x, 0.0)

    def fixed(x) -> Any:
        return None if x is None else jax.lax.stop_gradient(masked(x))

    live, sampler = masked(logprobs), fixed(rollout.logprobs)
    old = fixed(logprobs if experience.old_logprobs is None else experience.old_logprobs)
    base = sampler if algorithm.ratio_base == 'sampler' else old
    inputs = pieces.Inputs(
        {
            'logprobs': live,
            'entropy': masked(entropy),
            'base_logprobs': base,
            'log_ratio': live - base,
            'sampler_logprobs': sampler,
            'ref_logprobs': fixed(experience.ref_logprobs),
            'log_rho': old - sampler,
            'drift': sampler - fixed(logprobs),
            'mask': mask,
            'rewards': experience.rewards,
            'correct': correct_of(experience),
            'advantages': jax.lax.stop_gradient(experience.advantages),
            'group_ids': experience.group_ids,
            'token_ratio': lambda: ratios.token(inputs['log_ratio']),
            'ratio': lambda: pieces.call(algorithm.ratio, inputs),
            'teacher_kl': lambda: _teacher_kl(live, inputs['token_ratio'], experience, top_logprobs),
        }
    )
    return inputs


def correct_of(experience):
    """f32[B]: 1 for right completions by the verifier, else by their reward."""
    return experience.rewards if experience.correct is None else jnp.nan_to_num(experience.correct)


def _teacher_kl(logprobs, ratio, experience, top_logprobs):
    """f32[B, C] whose expectation, and that of whose gradient, is KL(policy, teacher) in each token's place.

    The sum over the teacher's likeliest tokens is exact. For all others, which weigh the less the more these are,
    stands the sampled token.
    """
    rollout, mask = experience.rollout, experience.loss_mask
    beyond = ratio * (logprobs - jnp.where(mask, experience.teacher_logprobs, 0.0))
    if top_logprobs is None:
        return jnp.where(mask, beyond, 0.0)
    sampled = rollout.tokens[:, rollout.prompt_mask.shape[1] :]
    among = jnp.any(experience.teacher_ids == sampled[..., None], -1)
    terms = jnp.where(mask[..., None], jnp.exp(top_logprobs) * (top_logprobs - experience.teacher_top), 0.0)
    return jnp.where(mask, jnp.sum(terms, -1) + jnp.where(among, 0.0, beyond), 0.0)
