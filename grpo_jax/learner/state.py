"""The TrainState at the start of a run, and the reference in it; of a policy with adapters, these alone are trained."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.learner.update import UpdateSpec, new_aux
from grpo_jax.models import lora
from grpo_jax.types import TrainState


class Initial(NamedTuple):
    """Makes the first TrainState; what adapters leave frozen goes into it as it is, without a copy."""

    program: Any  # jitted, (trained parameters) -> TrainState of these alone

    def __call__(self, params: Any) -> TrainState:
        """The TrainState, on the mesh, of the policy's params; of lora.split's trained ones alone where given these.

        The first update takes the memory of what is frozen, which is then to be had from the new state alone.
        """
        trained, frozen = lora.split(params)
        state = self.program(trained)
        return state.replace(params=lora.join(state.params, frozen))


def new_state(params: Any, spec: UpdateSpec, kept: Any) -> TrainState:
    """The TrainState at the start of a run from the policy's trained params; kept, as zeros, joins its aux."""
    reference = jax.tree.map(jnp.copy, params) if spec.keeps_reference else None
    aux = new_aux(spec.algorithm, params, spec.critic_optimizer)
    aux |= jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), kept or {})
    return TrainState(jnp.int32(0), params, spec.optimizer.init(params), reference, aux)


def fetch_reference(state: TrainState) -> Any:
    """The reference's parameters on the devices, outside of a program, from the hosts' memory where it waits there."""
    trained, frozen = lora.split(state.params)
    return lora.join(jax.device_put(state.ref_params, jax.tree.map(lambda x: x.sharding, trained)), frozen)


def without_frozen(state: TrainState) -> TrainState:
    """The state without what is frozen of its parameters: what a checkpoint holds."""
    return state.replace(params=lora.split(state.params)[0])
