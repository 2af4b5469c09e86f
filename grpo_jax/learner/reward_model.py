"""Training of scalar scores: a reward model, by pairs, by labels of whole completions, or by labels of their steps."""

import jax
import jax.numpy as jnp
import optax

from grpo_jax.algorithms import weights
from grpo_jax.learner import descent
from grpo_jax.models import heads
from grpo_jax.models.collectives import ALONE


def of_completions(params, rollout, c, *, remat, dtype, collectives=ALONE):
    """f32[B, C]: the score of a completion up to and with each of its tokens; not meaningful where masked."""
    mask = jnp.concatenate([rollout.prompt_mask, rollout.completion_mask], 1)
    found = heads.values(params, rollout.tokens, mask, c, remat=remat, dtype=dtype, collectives=collectives)
    return found[:, rollout.prompt_mask.shape[1] :]


def update(
    state, experience, c, optimizer, *, loss, group_size, microbatches, remat, dtype, collectives=ALONE, offload=False
):
    """(TrainState, metrics f32[] by name) after one update on the mean of loss(scores, labels, mask) over tokens.

    loss is a function of this module; experience.returns holds the labels, and rollout.loss_mask marks the tokens
    that have one. An update that is not finite is skipped and counted in state.aux['bad_steps'].
    offload is that of descent.descend.
    """

    def loss_of(params, part):
        microbatch, token_weights = part
        found = of_completions(params, microbatch.rollout, c, remat=remat, dtype=dtype, collectives=collectives)
        mask = microbatch.rollout.loss_mask
        return jnp.sum(token_weights * jnp.where(mask, loss(found, microbatch.returns, mask), 0.0)), ()

    def gradient(params, batch, _):
        whole = batch, weights.token_mean(batch.rollout.loss_mask)
        total, grads, _ = descent.accumulate(loss_of, params, whole, microbatches=microbatches, together=group_size)
        return total, grads, {}

    params, opt_state, skipped, found = descent.descend(
        state.params,
        state.opt_state,
        experience,
        gradient,
        optimizer,
        group_size=group_size,
        epochs=1,
        minibatches=1,
        offload=offload,
    )
    aux = {'bad_steps': state.aux['bad_steps'] + skipped}
    return state.replace(step=state.step + 1, params=params, opt_state=opt_state, aux=aux), found


def pairwise(scores, labels, mask):
    """f32[B, C]: -log sigmoid(score of the chosen - score of the rejected) (Bradley-Terry) at both; rows 2i and 2i + 1.

    One token of each row is marked. The labels are the order of the rows and not read.
    """
    chosen, rejected = jnp.sum(jnp.where(mask, scores, 0.0), -1).reshape(-1, 2).T
    return jnp.repeat(-jax.nn.log_sigmoid(chosen - rejected), 2)[:, None]


def labelled(scores, labels, mask):
    """f32[B, C]: binary cross entropy of sigmoid(scores) against labels in [0, 1]."""
    return optax.sigmoid_binary_cross_entropy(scores, labels)
