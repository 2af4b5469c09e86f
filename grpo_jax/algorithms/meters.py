"""More metrics of a minibatch than `losses.metrics` has: by outcome, by completion, and quantiles.

They are computed on a whole minibatch, so microbatches, packed rows and the mesh change nothing.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from grpo_jax.algorithms import kl, losses, pieces, ratios, reductions
from grpo_jax.algorithms.algorithm import Algorithm
from grpo_jax.types import Array, Experience, HeadOutput

AGES = 3  # ages of tokens that have metrics of their own, in steps: 0, 1, and 2 or more


class PooledMean(NamedTuple):
    """A mean that pools several minibatches: the sum of all values over their number; NaN without any value."""

    total: Any  # the sum of the values, f32[], or f32[minibatches] where they are stacked
    count: Any  # the number of the values, alike

    @property
    def value(self) -> Any:
        """f32[]: the mean of the values of all minibatches."""
        return jnp.sum(self.total) / jnp.sum(self.count)


def pooled_metrics(algorithm: Algorithm, output: HeadOutput, experience: Experience) -> dict[str, Any]:
    """Metrics of one minibatch by name: by outcome, by completion, of pairs, and quantiles of the ratio.

    Means are PooledMeans, quantiles and maxima f32[]. Without experience.correct there are no metrics by outcome.
    """
    # a barrier: fused with these, the sums of losses.metrics would be taken in another order and round differently
    logprobs, entropy = jax.lax.optimization_barrier((output.logprobs, output.entropy))
    inputs = losses.make_inputs(algorithm, HeadOutput(logprobs, entropy), experience)
    mask, correct, ratio = inputs['mask'], experience.correct, inputs['ratio']
    metrics: dict[str, Any] = {'logprob': _mean(logprobs, mask)}
    if correct is not None:
        for name, value in (('right', 1), ('wrong', 0)):
            tokens = mask & (correct == value)[:, None]
            metrics |= {f'logprob_{name}': _mean(logprobs, tokens), f'entropy_{name}': _mean(entropy, tokens)}
    metrics['kl_old_sequence'], _ = _by_sequence(kl.k3(inputs['base_logprobs'], inputs['logprobs']), mask)
    low, high = reductions.quantiles(jnp.broadcast_to(ratio, mask.shape), mask, (0.01, 0.99))
    metrics |= {'ratio_p01': low, 'ratio_p99': high}
    margin = pieces.property_of(algorithm.surrogate, 'margin')
    if margin is not None:
        margins = pieces.call(functools.partial(margin, **pieces.numbers(algorithm.surrogate)), inputs)
        sign = jnp.sign(experience.advantages[:, 0])
        worse = reductions.same_group(experience.group_ids) @ (sign < 0).astype(jnp.float32)
        pairs = (sign > 0) & (worse > 0)
        metrics |= {'pair_margin': _mean(margins, pairs), 'pair_accuracy': _mean(margins > 0, pairs)}
    if algorithm.needs_reference:
        ref_logprobs: Any = experience.ref_logprobs
        to_reference = reference_metrics(logprobs, ref_logprobs, mask)
        metrics |= {name: to_reference[name] for name in ('kl_ref_sequence', 'kl_ref_sequence_max')}
    return metrics


def age_metrics(
    algorithm: Algorithm, output: HeadOutput, experience: Experience, age: Int[Array, 'B C']
) -> dict[str, Any]:
    """Metrics, by name, of tokens that earlier policies sampled, and of the correction's weights at each age N.

    age: steps between the weights that sampled the token and these. stale_ess, f32[]: the effective sample size of rho
    over the tokens of an age above 0, as a share of them. For a correction with a bound, over the tokens of age N:
    correction_age_N_mean, the PooledMean of its weights; correction_age_N_max, f32[], the largest weight before the
    bound; correction_age_N_bound, the PooledMean of whether the bound changes a weight. correction_bound is the same
    PooledMean over all tokens. NaN without tokens.
    """
    logprobs, entropy = jax.lax.optimization_barrier((output.logprobs, output.entropy))  # as in pooled_metrics
    inputs = losses.make_inputs(algorithm, HeadOutput(logprobs, entropy), experience)
    mask, rho = inputs['mask'], ratios.token(inputs['log_rho'])
    bounds, old = pieces.property_of(algorithm.correction, 'bounds'), mask & (age > 0)
    squares = jnp.sum(old) * jnp.sum(jnp.square(rho), where=old)
    metrics: dict[str, Any] = {'stale_ess': jnp.square(jnp.sum(rho, where=old)) / squares}
    if bounds is None:
        return metrics
    row = ratios.token(reductions.row_sum(inputs['log_rho'], mask))
    free = jnp.broadcast_to({'token': rho, 'row': row, 'one': 1.0}[bounds], mask.shape)
    weights = pieces.call(algorithm.correction, inputs)
    bounded = ~jnp.isclose(weights, free, rtol=1e-5)
    metrics['correction_bound'] = _mean(bounded, mask)
    for number in range(AGES):
        own = mask & (age >= number if number == AGES - 1 else age == number)
        name, most = f'correction_age_{number}', jnp.max(jnp.where(own, free, -jnp.inf))
        metrics |= {f'{name}_mean': _mean(weights, own), f'{name}_max': most, f'{name}_bound': _mean(bounded, own)}
    return metrics


def reference_metrics(
    logprobs: Float[Array, 'B C'], ref_logprobs: Float[Array, 'B C'], mask: Bool[Array, 'B C']
) -> dict[str, Any]:
    """Returns the KL to the reference, estimated by k3, by name: kl_ref, kl_ref_sequence and kl_ref_sequence_max.

    The first is the PooledMean over tokens, the second the PooledMean of the sums over completions, and the third the
    largest of these sums, f32[].
    """
    terms = kl.k3(logprobs, jnp.where(mask, ref_logprobs, logprobs))
    by_sequence, largest = _by_sequence(terms, mask)
    return {'kl_ref': _mean(terms, mask), 'kl_ref_sequence': by_sequence, 'kl_ref_sequence_max': largest}


def _mean(values, mask):
    """The PooledMean of the values under the mask."""
    return PooledMean(jnp.sum(jnp.where(mask, values, 0.0)), jnp.sum(mask, dtype=jnp.float32))


def _by_sequence(terms, mask):
    """(PooledMean of the rows' sums over tokens, the largest sum f32[]); rows without tokens do not count."""
    sums = reductions.row_sum(terms, mask)[:, 0]
    return PooledMean(jnp.sum(sums), jnp.sum(jnp.any(mask, 1), dtype=jnp.float32)), jnp.max(sums)
