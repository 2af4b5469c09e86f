"""Computes advantages on the host, from an Algorithm and the arrays that its estimator reads."""

from typing import Any

from jaxtyping import Float32
import numpy as np
from numpy.typing import ArrayLike

from grpo_jax.algorithms import checks, group_math, pieces
from grpo_jax.algorithms.algorithm import Algorithm
from grpo_jax.errors import BadInput
from grpo_jax.grouping import Grouping

# what stands in place of a missing completion, for arrays in which 0 would be a value
PADDING = {'step_rewards': np.nan, 'correct': np.nan}
NOT_BY_ROW = ('part_weights', 'initial_entropy', 'run_baseline', 'dead')  # data without a row for each completion


def compute_advantages(
    algorithm: Algorithm,
    rewards: ArrayLike,
    *,
    kl_coef: float | None = None,
    group_ids: ArrayLike | None = None,
    **data: Any,
) -> Float32[np.ndarray, 'B columns']:
    """Computes, on the host, the advantages of completions: f32[P * G, 1], or f32[P * G, C] if they differ by token.

    rewards: [P, G]; or [B] with group_ids i32[B], where groups may differ in size and rows come in any order. Then the
        arrays in data have [B] in place of [P, G], and advantages have the rows' order. A completion is unscorable if
        its reward is not finite.
    kl_coef: weight of a KL that is subtracted from rewards or advantages; None: algorithm.kl_coef.
    data: arrays by name, with axes [P, G]: what the estimator, algorithm.advantage, reads (see algorithms.advantages);
        mask and kl f64[P, G, C], if the KL is in the reward; mask, teacher_logprobs and old_logprobs with teacher_coef.
        Without group_ids, a function without arguments may stand for an array. `correct` defaults to the rewards, and
        dead bool[P] to what group_math.judge_groups finds by the algorithm's gate.

    The estimator's advantage of an unscorable completion becomes exactly 0, unless the estimator is `unrewarded`, and
    no KL is subtracted there. In dead groups the estimator's advantage becomes 0 too, if the estimator compares the
    outcomes of a group, but a KL is subtracted there. The teacher's gain is added everywhere. dead_groups 'reweight'
    multiplies the estimator's advantages by the number of completions over the number in groups that are not dead.
    advantage_clip bounds the absolute sum. Raises BadInput for rewards that the algorithm cannot use, and for a piece
    that returns columns though it is not by token; TypeError where data lacks an array.
    """
    rewards = np.asarray(rewards, np.float64)
    if group_ids is not None:
        return _compute_for_unequal_groups(algorithm, rewards, np.asarray(group_ids), kl_coef, data)
    rewards = np.where(np.isfinite(rewards), rewards, np.nan)  # an infinite reward would spoil its whole group
    kl_coef = algorithm.kl_coef if kl_coef is None else kl_coef
    inputs = _host_inputs(algorithm, rewards, kl_coef, data)
    checks.check_outcomes(algorithm, inputs['correct'])
    advantages = _to_columns(algorithm.advantage, pieces.call(algorithm.advantage, inputs), inputs)
    dead = inputs['dead']
    if pieces.compares_outcomes(algorithm.advantage) and algorithm.kl_placement != 'reward_sequence':
        advantages = np.where(dead[:, None, None], 0.0, advantages)
    if not pieces.property_of(algorithm.advantage, 'unrewarded'):
        advantages = np.where(np.isfinite(rewards)[..., None], advantages, 0.0)
    if algorithm.dead_groups == 'reweight':
        sizes = inputs['sizes']
        advantages = advantages * sizes.sum() / max(sizes[~dead].sum(), 1)
    if algorithm.takes_kl_off:
        advantages = advantages - kl_coef * pieces.call(_token_kl, inputs)
    if algorithm.teacher_coef:
        advantages = advantages + algorithm.teacher_coef * pieces.call(_teacher_gain, pieces.Inputs(data))
    if algorithm.advantage_clip:
        advantages = np.clip(advantages, -algorithm.advantage_clip, algorithm.advantage_clip)
    advantages = advantages + 0.0  # no -0.0
    return advantages.reshape(rewards.size, -1).astype(np.float32)


def _host_inputs(algorithm, rewards, kl_coef, data):
    """The pieces.Inputs that an advantage may read, from rewards f64[P, G] and the caller's other data."""
    given = pieces.Inputs(data)
    inputs = given | {
        'discount': algorithm.discount,
        'rewards': lambda: with_kl() if kl_in_reward else rewards,
        'token_rewards': lambda: token_rewards(algorithm, rewards, kl_coef, inputs),
        'correct': lambda: np.where(scorable, given['correct'], np.nan) if 'correct' in given else rewards,
        'sizes': lambda: given['sizes'] if 'sizes' in given else np.full(*rewards.shape),
        'dead': lambda: given['dead'] if 'dead' in given else judge_groups(inputs),
    }
    kl_in_reward, scorable = algorithm.kl_placement == 'reward_sequence', np.isfinite(rewards)
    compares = pieces.compares_outcomes(algorithm.advantage)

    def with_kl():  # the KL is subtracted in dead groups too, from rewards that are made equal there
        means = np.where(scorable, group_math.group_means(rewards), np.nan)
        levelled = np.where(inputs['dead'][:, None], means, rewards) if compares else rewards
        return levelled - kl_coef * pieces.call(_summed_kl, inputs)

    def judge_groups(inputs):
        return group_math.judge_groups(algorithm.gate, rewards, inputs['correct'] if 'correct' in given else None)

    # unscorable completions count in no statistic of tokens or steps either
    if 'mask' in given:
        inputs |= {'mask': lambda: given['mask'] & scorable[..., None]}
        inputs |= {'completion_mask': lambda: _completion_mask(given) & scorable[..., None]}
    if 'parts' in given:
        inputs |= {'parts': lambda: np.where(scorable, given['parts'], np.nan)}
    if 'step_rewards' in given:
        inputs |= {'step_rewards': lambda: np.where(inputs['completion_mask'], given['step_rewards'], np.nan)}
    return inputs


def _completion_mask(given):
    """bool[P, G, C]: the completions' tokens; where completion_mask is not given, all up to the last sampled one."""
    if 'completion_mask' in given:
        return given['completion_mask']
    return np.flip(np.logical_or.accumulate(np.flip(given['mask'], -1), -1), -1)


def token_rewards(algorithm, rewards, kl_coef, inputs):
    """Rewards by token, f64[P, G, C]: a completion's reward at its last sampled token, and 0 at all other tokens.

    A reward that is not finite counts as 0. With kl_placement reward_token, each token's KL times kl_coef is taken off.
    """

    def at_last_token(mask):
        last = mask & (np.cumsum(mask, -1) == mask.sum(-1, keepdims=True))
        return np.where(last & np.isfinite(rewards)[..., None], rewards[..., None], 0.0)

    earned = pieces.call(at_last_token, inputs)
    if algorithm.kl_placement != 'reward_token':
        return earned
    return earned - kl_coef * pieces.call(_token_kl, inputs)


def _token_kl(mask, kl):
    """f64[P, G, C]: each token's KL, 0 where masked."""
    return np.where(mask, kl, 0.0)


def _teacher_gain(mask, teacher_logprobs, old_logprobs):
    """teacher_logprobs - old_logprobs in nats, f64[P, G, C], 0 where masked: what the teacher favours is above 0."""
    return np.where(mask, np.asarray(teacher_logprobs, np.float64) - old_logprobs, 0.0)


def _summed_kl(mask, kl):
    """f64[P, G]: the KL summed over each completion's tokens."""
    return np.sum(_token_kl(mask, kl), -1)


def _to_columns(piece, advantages, inputs):
    """The advantages as [P, G, 1], or [P, G, C] if the piece is by token.

    Raises BadInput if a piece that is not by token returned a number for each token.
    """
    advantages = advantages.reshape(*inputs['rewards'].shape, -1)
    if pieces.is_by_token(piece):
        shapes = (inputs[name].shape for name in pieces.reads(piece) if name in pieces.BY_TOKEN)
        return np.broadcast_to(advantages, next(shapes, advantages.shape))
    if advantages.shape[-1] > 1:
        raise BadInput(
            'algorithm.advantage',
            pieces.name_of(piece),
            'has a number for each token; say so by @pieces.properties(by_token=True)',
        )
    return advantages


def _compute_for_unequal_groups(algorithm, rewards, group_ids, kl_coef, data):
    """compute_advantages for rows [B] in any order, where groups are padded to one size with unscorable completions."""
    grouping = Grouping.by_ids(group_ids)
    grouped: dict[str, Any] = {'sizes': grouping.sizes}
    grouped |= {
        name: x if name in NOT_BY_ROW else grouping.spread(np.asarray(x), PADDING.get(name, 0))
        for name, x in data.items()
        if name != 'parts'
    }
    if 'parts' in data:
        grouped['parts'] = np.stack([grouping.spread(part, np.nan) for part in np.asarray(data['parts'], np.float64)])
    rewards_PG = grouping.spread(rewards, np.nan)
    advantages = compute_advantages(algorithm, rewards_PG, kl_coef=kl_coef, **grouped)
    return grouping.gather(advantages.reshape(*rewards_PG.shape, -1))


def is_by_token(algorithm: Algorithm) -> bool:
    """Whether the algorithm's advantages have a column for each token."""
    return pieces.is_by_token(algorithm.advantage) or algorithm.takes_kl_off or algorithm.teacher_coef > 0
