"""Training of a reward model: by pairs, by labels of whole completions, or by labels of their steps."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float
import optax

from grpo_jax.algorithms import weights
from grpo_jax.learner import descent
from grpo_jax.learner.options import Learning
from grpo_jax.models import heads
from grpo_jax.models.mesh_ops import ALONE, MeshOps
from grpo_jax.models.transformer import ModelConfig
from grpo_jax.types import Array, LabelledBatch, Rollout, TrainState


class RewardSpec(NamedTuple):
    """What all updates of a reward model share: static values, which their program closes over."""

    model_config: ModelConfig
    loss: Callable  # a function of this module
    optimizer: optax.GradientTransformation
    learning: Learning
    group_size: int = 1  # completions of an example
    mesh_ops: MeshOps = ALONE


def completion_values(params, rollout: Rollout, spec: RewardSpec, remat: str = 'none') -> Float[Array, 'B C']:
    """f32[B, C]: the value of prompt and completion up to and including each token; without a meaning where masked."""
    mask = jnp.concatenate([rollout.prompt_mask, rollout.completion_mask], 1)
    dtype, mesh_ops = spec.learning.dtype, spec.mesh_ops
    columns = heads.values(params, rollout.tokens, mask, spec.model_config, remat=remat, dtype=dtype, mesh_ops=mesh_ops)
    return columns[:, rollout.prompt_mask.shape[1] :]


def update_reward_model(
    state: TrainState, batch: LabelledBatch, spec: RewardSpec
) -> tuple[TrainState, dict[str, jax.Array]]:
    """(TrainState, metrics f32[] by name) after one update on the mean of spec.loss over the tokens with a label.

    An update that is not finite is skipped and counted in state.aux['bad_steps'].
    """
    learning, minibatching = spec.learning, spec.learning.minibatching(spec.group_size)

    def loss_of(params, weighted_microbatch):
        microbatch, token_weights = weighted_microbatch
        values = completion_values(params, microbatch.rollout, spec, learning.remat)
        mask = microbatch.label_mask
        return jnp.sum(token_weights * jnp.where(mask, spec.loss(values, microbatch.labels, mask), 0.0)), ()

    def gradient(params, batch, _):
        weighted = batch, weights.token_mean(batch.label_mask)
        microbatches = descent.cut_rows(weighted, learning.microbatches, spec.group_size)
        loss, grads, _ = descent.accumulate(loss_of, params, microbatches)
        return loss, grads, {}

    params, opt_state, skipped, metrics = descent.descend(
        state.params, state.opt_state, batch, None, gradient, spec.optimizer, minibatching
    )
    aux = {'bad_steps': state.aux['bad_steps'] + skipped}
    return state.replace(step=state.step + 1, params=params, opt_state=opt_state, aux=aux), metrics


def pairwise(values: Float[Array, 'B C'], labels, mask: Bool[Array, 'B C']) -> Float[Array, 'B 1']:
    """-log sigmoid(value of the chosen - value of the rejected) at both rows of a pair (Bradley-Terry).

    Row 2i is the chosen completion and row 2i + 1 the rejected one. The mask has one token in each row, whose value is
    compared. labels are not read, since the order of the rows says as much.
    """
    chosen, rejected = jnp.sum(jnp.where(mask, values, 0.0), -1).reshape(-1, 2).T
    return jnp.repeat(-jax.nn.log_sigmoid(chosen - rejected), 2)[:, None]


def labelled(values: Float[Array, 'B C'], labels: Float[Array, 'B C'], mask) -> Float[Array, 'B C']:
    """Binary cross entropy of sigmoid(values) against labels in [0, 1] at each place; the mask is not read."""
    return optax.sigmoid_binary_cross_entropy(values, labels)
