"""The update of a step: the gradient of the policy's loss, the optimizer's updates, and the critic's update."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float
import optax

from grpo_jax import algorithms
from grpo_jax.learner import critic, descent, packing
from grpo_jax.learner.logprobs import Head
from grpo_jax.learner.options import NOTHING, ExtraMetrics, Learning, applied_updates
from grpo_jax.learner.packing import ForwardSpec, PackedCells, PackSizes, microbatch_output
from grpo_jax.models import lora
from grpo_jax.models.linear import in_dtype
from grpo_jax.models.mesh_ops import ALONE, MeshOps
from grpo_jax.models.transformer import ModelConfig
from grpo_jax.types import HEAD_BY_TOKEN, Array, Experience, HeadOutput, TrainState


class UpdateSpec(NamedTuple):
    """What all updates of a run share: static values, which their programs close over."""

    model_config: ModelConfig
    algorithm: algorithms.Algorithm
    learning: Learning
    optimizer: optax.GradientTransformation
    critic_optimizer: optax.GradientTransformation | None = None
    group_size: int = 1
    mesh_ops: MeshOps = ALONE
    sizes: PackSizes | None = None  # of packed rows; None: rows are padded
    learning_rate: optax.Schedule | None = None  # by update
    extra: ExtraMetrics = NOTHING

    @property
    def keeps_reference(self) -> bool:
        """Whether the state holds a reference policy: the algorithm needs one, or metrics do."""
        return self.algorithm.keeps_reference or self.extra.reference

    @property
    def forward(self) -> ForwardSpec:
        """The ForwardSpec of the policy: how its logprobs are computed."""
        entropy_gradient = self.algorithm.needs_entropy_gradient
        head = Head(self.learning.temperature, self.learning.chunk, entropy_gradient, self.mesh_ops)
        return ForwardSpec(self.model_config, head, self.sizes)


def new_aux(algorithm: algorithms.Algorithm, params, critic_optimizer=None) -> dict[str, Any]:
    """The entries of TrainState.aux that the update reads and writes, by key, as they are at the start of a run.

    A critic, if the algorithm reads values, begins from a copy of the policy's params.
    """
    coefficients = {name: jnp.float32(value) for name, value in algorithm.coefficients.items()}
    aux = {'bad_steps': jnp.int32(0), 'coefficients': coefficients, 'initial_entropy': jnp.float32(jnp.nan)}
    if algorithm.needs_values and critic_optimizer is not None:
        critic_params = critic.new_params(params)
        aux['critic'] = {'params': critic_params, 'opt_state': critic_optimizer.init(critic_params)}
    return aux


def update(
    state: TrainState, experience: Experience, packed: PackedCells | None, spec: UpdateSpec
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Updates the policy, and a critic, from a step's Experience; returns (TrainState, metrics f32[] by name).

    There are epochs * minibatches optimizer updates (see descent.descend).
    If params have adapters, only these are trained. The weights of the loss are computed before a minibatch is cut
    into microbatches, so the cut changes nothing. packed: where the step's tokens lie in packed rows; None: rows are
    padded (the default if learner.microbatches is above 1). A critic's rows are always padded. Skipped updates of
    policy and critic are counted in state.aux['bad_steps'], and state.aux['coefficients'] adapt at the end if the
    algorithm says so.
    """
    algorithm, learning = spec.algorithm, spec.learning
    coefficients, minibatching = state.aux['coefficients'], learning.minibatching(spec.group_size)
    trained, frozen = lora.split(state.params)
    trained, opt_state, skipped, metrics = descent.descend(
        trained, state.opt_state, experience, packed, make_gradient(spec, coefficients, state.step, frozen),
        spec.optimizer, minibatching, learns=state.step >= learning.critic_warmup,
    )  # fmt: skip
    initial = state.aux['initial_entropy']
    aux = state.aux | {
        'bad_steps': state.aux['bad_steps'] + skipped,
        'coefficients': algorithms.adapt(algorithm, coefficients, metrics, experience.rewards.shape[0]),
        'initial_entropy': jnp.where(jnp.isnan(initial), metrics['entropy'], initial),
    }
    metrics |= {name: coefficients[name] for name in algorithm.adapting}
    if spec.learning_rate is not None:
        metrics['learning_rate'] = jnp.asarray(spec.learning_rate(applied_updates(state.opt_state)))
    if algorithm.needs_values:
        aux['critic'], critic_skipped, critic_metrics = critic.update_critic(
            aux['critic'], experience, spec.model_config, spec.critic_optimizer, learning, minibatching, spec.mesh_ops
        )
        aux['bad_steps'] += critic_skipped
        metrics |= {f'critic/{name}': value for name, value in critic_metrics.items()}
        metrics['finite'] = jnp.minimum(metrics['finite'], critic_metrics['finite'])
    params = lora.join(trained, frozen)
    return state.replace(step=state.step + 1, params=params, opt_state=opt_state, aux=aux), metrics


def anchor_logprobs(logprobs: Float[Array, 'B C'], experience: Experience, learning: Learning) -> Float[Array, 'B C']:
    """The logprobs f32[B, C] that the loss reads in place of `logprobs`, the output of the learner's forward pass.

    With learning.old_logprobs = 'decode' the value is old_logprobs plus the change of the learner's logprobs since the
    start of the step, so before the first update the ratio is exactly 1; the gradient is the gradient of `logprobs`.
    With 'forward' they are `logprobs`.
    """
    old: Any = experience.old_logprobs
    if not learning.decoded_fields:
        return logprobs
    start = jax.lax.stop_gradient(logprobs) if experience.forward_logprobs is None else experience.forward_logprobs
    return old + (logprobs - start)  # in this order: the difference of equal numbers is 0


def make_gradient(spec: UpdateSpec, coefficients: dict, step: Any, frozen: Any = None):
    """Makes gradient(params, minibatch, packed) -> (loss, gradient, metrics) of the algorithm, for descent.descend.

    coefficients: TrainState.aux['coefficients']. step: of the state, i32[]. frozen: where params are adapters, the
    other part of lora.split.
    """
    algorithm, learning, forward = spec.algorithm, spec.learning, spec.forward
    together = spec.group_size if 'group_ids' in algorithm.reads else 1

    def gradient(params, minibatch, packed):
        # cast once, not in each microbatch; the gradients of a cast are casts, so these sum to the parameters' own
        compute = in_dtype(params, learning.dtype)
        fixed = in_dtype(frozen, learning.dtype)

        def loss_of(compute, microbatch):
            experience, prepared, cells = microbatch
            params = lora.join(compute, fixed)
            output = microbatch_output(
                params, experience.rollout, cells, forward, learning.remat, experience.teacher_ids
            )
            output = output._replace(logprobs=anchor_logprobs(output.logprobs, experience, learning))
            losses = algorithms.token_losses(algorithm, output, experience, prepared, coefficients)
            return jnp.sum(losses), output._replace(top_logprobs=None)

        microbatches = packing.cut_minibatch(
            minibatch, algorithms.prepare(algorithm, minibatch), packed, learning.microbatches, together
        )
        zeros = HeadOutput(**dict.fromkeys(HEAD_BY_TOKEN, jnp.zeros(minibatch.loss_mask.shape)))
        loss, grads, output = descent.accumulate(loss_of, compute, microbatches, zeros)
        metrics = algorithms.metrics(algorithm, output, minibatch)
        metrics |= algorithms.pooled_metrics(algorithm, output, minibatch)
        if spec.extra.ages:
            metrics |= algorithms.age_metrics(algorithm, output, minibatch, step - minibatch.rollout.version)
        return loss, grads, metrics

    return gradient
