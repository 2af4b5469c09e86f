"""How the reference policy is renewed: through a checkpoint of the policy."""

import os

import jax
import jax.numpy as jnp

from grpo_jax.run import checkpoint
from grpo_jax.run.collect import Collection
from grpo_jax.types import TrainState


def refresh(
    collection: Collection, kl_coef: float, checkpoints, state: TrainState, abstract: TrainState
) -> tuple[TrainState, bool]:
    """(TrainState, whether its reference was renewed) before a step, from the policy's checkpoint of that step.

    hard: the policy itself, every reference_every steps (DeepSeek-R1, arXiv 2501.12948: 400), and the adaptive kl_coef
    begins anew. polyak: ref + reference_mix (policy - ref) (TR-DPO, arXiv 2404.09656: 0.6 every 512). Renewing is a
    function of the checkpointed state, so that it happens again when a run resumes at that step.
    """
    step, every = int(state.step), collection.reference_every
    if state.ref_params is None or not every or step == 0 or step % every:
        return state, False
    if checkpoints.latest_step() != step:
        checkpoint.save(checkpoints, state)
    checkpoints.wait_until_finished()
    path = os.path.join(checkpoints.directory, str(step))
    if collection.reference == 'hard':
        policy = checkpoint.read_tree(path, {'params': abstract.ref_params}, partial=True)['params']
        coefficients = state.aux['coefficients'] | {'kl_coef': jnp.float32(kl_coef)}
        return state.replace(ref_params=policy, aux=state.aux | {'coefficients': coefficients}), True
    policy = checkpoint.read_tree(path, {'params': abstract.params}, partial=True)['params']
    share = collection.reference_mix

    def mixed(old, new, like):
        old = jax.device_put(old, new.sharding)  # it may wait in the hosts' memory
        return jax.device_put(old + share * (new - old), like.sharding)

    return state.replace(ref_params=jax.tree.map(mixed, state.ref_params, policy, abstract.ref_params)), True
