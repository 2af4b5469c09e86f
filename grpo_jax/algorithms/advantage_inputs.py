"""What advantages read, and advantages from an Algorithm and arrays, on the host."""

from typing import Any

from jaxtyping import Float32
import numpy as np
from numpy.typing import ArrayLike

from grpo_jax.algorithms import groups, pieces, validation
from grpo_jax.algorithms.algorithm import Algorithm
from grpo_jax.errors import BadInput
from grpo_jax.grouping import Grouping

PADDING = {
    'step_rewards': np.nan,
    'correct': np.nan,
}  # what stands for a completion that is missing, where 0 would be a value

NOT_BY_ROW = ('part_weights', 'initial_entropy', 'run_baseline', 'dead')


def compute_advantages(
    algorithm: Algorithm,
    rewards: ArrayLike,
    *,
    kl_coef: float | None = None,
    group_ids: ArrayLike | None = None,
    **data: Any,
) -> Float32[np.ndarray, 'B columns']:
    """Advantages f32[P * G, 1] or f32[P * G, C] of rewards [P, G], on the host.

    data holds what else the estimator reads (see algorithms.advantages), with leading axes [P, G], kl f64[P, G, C]
    where the KL is in the reward, times kl_coef (None: the algorithm's), and teacher_logprobs and old_logprobs where
    there is a teacher_coef. A function without arguments may stand for an array. Without correct, the rewards are what
    the verifier says. dead bool[P] are the dead groups; without it, those that groups.judge_groups finds by the
    algorithm's gate. With rewards [B] and group_ids i32[B], groups may differ in size, and leading axes are [B].
    Exactly 0 for unscorable (not finite) rewards and, where the outcomes of a group are compared, in dead groups, of
    which a KL that is taken off and what a teacher adds remain.
    BadInput for rewards that the algorithm cannot use, and for an estimator that is not by token and gives columns.
    """
    rewards = np.asarray(rewards, np.float64)
    if group_ids is not None:
        return _compute_for_unequal_groups(algorithm, rewards, np.asarray(group_ids), kl_coef, data)
    rewards = np.where(np.isfinite(rewards), rewards, np.nan)  # an infinite reward would spoil its whole group
    kl_coef = algorithm.kl_coef if kl_coef is None else kl_coef
    inputs = _host_inputs(algorithm, rewards, kl_coef, data)
    validation.check_outcomes(algorithm, inputs['correct'])
    advantages = _in_columns(algorithm.advantage, pieces.call(algorithm.advantage, inputs), inputs)
    dead = inputs['dead']
    if pieces.compares_outcomes(algorithm.advantage) and algorithm.kl_placement != 'reward_sequence':
        advantages = np.where(dead[:, None, None], 0.0, advantages)
    if algorithm.dead_groups == 'reweight':
        sizes = inputs['sizes']
        advantages = advantages * sizes.sum() / max(sizes[~dead].sum(), 1)
    if algorithm.takes_kl_off:
        advantages = advantages - kl_coef * pieces.call(_token_kl, inputs)
    if algorithm.teacher_coef:
        advantages = advantages + algorithm.teacher_coef * pieces.call(_teacher_gain, inputs)
    if algorithm.advantage_clip:
        advantages = np.clip(advantages, -algorithm.advantage_clip, algorithm.advantage_clip)
    advantages = np.where(np.isfinite(rewards)[..., None], advantages, 0.0) + 0.0  # + 0.0: no -0.0
    return advantages.reshape(rewards.size, -1).astype(np.float32)


def _host_inputs(algorithm, rewards, kl_coef, data):
    """What an advantage reads, of rewards f64[P, G] and the other data."""
    given = pieces.Inputs(data)
    inputs = given | {
        'discount': algorithm.discount,
        'rewards': lambda: with_kl() if by_row else rewards,
        'token_rewards': lambda: token_rewards(algorithm, rewards, kl_coef, inputs),
        'correct': lambda: np.where(known, given['correct'], np.nan) if 'correct' in given else rewards,
        'sizes': lambda: given['sizes'] if 'sizes' in given else np.full(*rewards.shape),
        'dead': lambda: given['dead'] if 'dead' in given else judge_groups(inputs),
    }
    by_row, known = algorithm.kl_placement == 'reward_sequence', np.isfinite(rewards)
    compares = pieces.compares_outcomes(algorithm.advantage)

    def with_kl():  # a dead group has equal rewards, from which the KL is taken all the same
        equal = np.where(known, groups.group_means(rewards), np.nan)
        even = np.where(inputs['dead'][:, None], equal, rewards) if compares else rewards
        return even - kl_coef * pieces.call(_summed_kl, inputs)

    def judge_groups(inputs):
        return groups.judge_groups(algorithm.gate, rewards, inputs['correct'] if 'correct' in given else None)

    # unscorable completions count in no statistic of tokens or steps either
    if 'mask' in given:
        inputs |= {'mask': lambda: given['mask'] & known[..., None]}
        inputs |= {'completion_mask': lambda: _completion_mask(given) & known[..., None]}
    if 'step_rewards' in given:
        inputs |= {'step_rewards': lambda: np.where(inputs['completion_mask'], given['step_rewards'], np.nan)}
    return inputs


def _completion_mask(given):
    """bool[P, G, C]: the completions' tokens; without completion_mask, up to the last one that was sampled."""
    if 'completion_mask' in given:
        return given['completion_mask']
    return np.flip(np.logical_or.accumulate(np.flip(given['mask'], -1), -1), -1)


def token_rewards(algorithm, rewards, kl_coef, inputs):
    """f64[P, G, C]: the reward at a completion's last token, less the KL of each token where it is in the reward."""

    def spread(mask):
        last = mask & (np.cumsum(mask, -1) == mask.sum(-1, keepdims=True))
        return np.where(last & np.isfinite(rewards)[..., None], rewards[..., None], 0.0)

    earned = pieces.call(spread, inputs)
    return earned - kl_coef * pieces.call(_token_kl, inputs) if algorithm.kl_placement == 'reward_token' else earned


def _token_kl(mask, kl):
    return np.where(mask, kl, 0.0)


def _teacher_gain(mask, teacher_logprobs, old_logprobs):
    return np.where(mask, np.asarray(teacher_logprobs, np.float64) - old_logprobs, 0.0)


def _summed_kl(mask, kl):
    return np.sum(_token_kl(mask, kl), -1)


def _in_columns(piece, advantages, inputs):
    """Advantages [P, G, 1], or [P, G, C] where the piece is by token; BadInput where it says that it is not."""
    advantages = advantages.reshape(*inputs['rewards'].shape, -1)
    if pieces.is_by_token(piece):
        shapes = (inputs[name].shape for name in pieces.reads(piece) if name in pieces.BY_TOKEN)
        return np.broadcast_to(advantages, next(shapes, advantages.shape))
    if advantages.shape[-1] > 1:
        raise BadInput(
            'algorithm.advantage', pieces.name_of(piece), 'differs by token; write @pieces.properties(by_token=True)'
        )
    return advantages


def _compute_for_unequal_groups(algorithm, rewards, group_ids, kl_coef, data):
    """compute_advantages of rows [B] in any order: groups are padded with unscorable completions."""
    grouping = Grouping.by_ids(group_ids)
    grouped: dict[str, Any] = {'sizes': grouping.sizes}
    grouped |= {
        name: x if name in NOT_BY_ROW else grouping.spread(np.asarray(x), PADDING.get(name, 0))
        for name, x in data.items()
        if name != 'parts'
    }
    if 'parts' in data:
        grouped['parts'] = np.stack([grouping.spread(part, np.nan) for part in np.asarray(data['parts'], np.float64)])
    spread = grouping.spread(rewards, np.nan)
    advantages = compute_advantages(algorithm, spread, kl_coef=kl_coef, **grouped)
    return grouping.gather(advantages.reshape(*spread.shape, -1))


def by_token(algorithm: Algorithm) -> bool:
    """Whether the algorithm's advantages have a column for each token."""
    return pieces.is_by_token(algorithm.advantage) or algorithm.takes_kl_off or algorithm.teacher_coef > 0
