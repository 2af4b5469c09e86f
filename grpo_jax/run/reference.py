"""When the reference policy is renewed, and how: through a checkpoint of the policy."""

import jax
import jax.numpy as jnp

from grpo_jax.errors import BadInput
from grpo_jax.run import checkpoint

SCHEDULES = ('frozen', 'hard', 'polyak')


def check(section):
    """BadInput for a schedule that does not exist, or never or always acts."""
    schedule, every, mix = section['reference'], section['reference_every'], section['reference_mix']
    if schedule not in SCHEDULES:
        raise BadInput('collection.reference', schedule, 'choose one of ' + ', '.join(SCHEDULES))
    if (schedule == 'frozen') != (every == 0) or every < 0:
        raise BadInput(
            'collection.reference_every',
            every,
            f'does not fit collection.reference={schedule!r}: '
            'use 0 with frozen, and 1 or more steps with hard and polyak',
        )
    if not 0 < mix <= 1:
        raise BadInput('collection.reference_mix', mix, 'is the share of the policy; choose above 0 and at most 1')


def refresh(config, checkpoints, state, abstract):
    """(TrainState, whether its reference was renewed) before a step, from the policy's checkpoint of that step.

    hard: the policy itself, every reference_every steps (DeepSeek-R1, arXiv 2501.12948: 400), and the adaptive
    kl_coef begins anew. polyak: ref + reference_mix (policy - ref) (TR-DPO, arXiv 2404.09656: 0.6 every 512).
    Being a function of the checkpointed state, it happens again when a run resumes at that step.
    """
    section = config.collection
    step, every = int(state.step), section['reference_every']
    if state.ref_params is None or not every or step == 0 or step % every:
        return state, False
    if checkpoints.latest_step() != step:
        checkpoint.save(checkpoints, state)
    checkpoints.wait_until_finished()
    if section['reference'] == 'hard':
        policy = checkpoint.restore_params(checkpoints, abstract.ref_params)
        coefficients = state.aux['coefficients'] | {'kl_coef': jnp.float32(config.algorithm.kl_coef)}
        return state.replace(ref_params=policy, aux=state.aux | {'coefficients': coefficients}), True
    share, policy = section['reference_mix'], checkpoint.restore_params(checkpoints, abstract.params)

    def mixed(old, new, like):
        old = jax.device_put(old, new.sharding)  # it may wait in the hosts' memory
        return jax.device_put(old + share * (new - old), like.sharding)

    return state.replace(ref_params=jax.tree.map(mixed, state.ref_params, policy, abstract.ref_params)), True
