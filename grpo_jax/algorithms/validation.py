"""What cannot work is refused, and what works without any effect is said, each with the reason."""

import numpy as np

from grpo_jax.algorithms import pieces
from grpo_jax.errors import BadInput

CHOICES = {
    'kl_placement': ('loss', 'reward_token', 'reward_sequence'),
    'ratio_base': ('old', 'sampler'),
    'denominator': ('all', 'selected'),
    'dead_groups': ('keep', 'drop', 'reweight', 'resample', 'replay'),
    'source': ('policy', 'reference', 'demonstrations', 'pairs'),
}
SECTIONS = {'dead_groups': 'collection', 'source': 'collection'}
BOUNDED = {'clip', 'dual_clip', 'cispo', 'sapo', 'dppo_tv', 'dppo_kl', 'vespo'}
ALONE = {'ones', 'correct', 'reward', 'reinforce_pp', 'gae', 'gae_by_length'}


def check(algorithm):
    """BadInput for a combination that cannot work, whatever the run."""
    kl, placement = pieces.name_of(algorithm.kl), algorithm.kl_placement
    for key, choices in CHOICES.items():
        if getattr(algorithm, key) not in choices:
            raise BadInput(
                f'{SECTIONS.get(key, "algorithm")}.{key}', getattr(algorithm, key), 'choose ' + ' or '.join(choices)
            )
    if kl == 'k1' and placement == 'loss':
        raise BadInput(
            'algorithm.kl',
            'k1',
            'as a loss its expected gradient is zero, so it only adds '
            'noise; use k2 (exact gradient), k3, or a kl_placement in the reward',
        )
    if kl not in ('k1', 'none') and placement != 'loss':
        raise BadInput('algorithm.kl', kl, f'only k1 is unbiased in the reward; use k1 with kl_placement={placement!r}')
    if (kl == 'none') != (algorithm.kl_coef == 0) or algorithm.kl_coef < 0:
        raise BadInput(
            'algorithm.kl_coef',
            algorithm.kl_coef,
            f'does not fit algorithm.kl={kl!r}: set kl to k2 or k3 and kl_coef above 0, or kl to none and kl_coef to 0',
        )
    if kl == 'none' and placement != 'loss':
        raise BadInput('algorithm.kl_placement', placement, 'needs a KL estimator; set kl to k1 and kl_coef above 0')
    by_token = 'token_rewards' in pieces.reads(algorithm.advantage)
    if placement == 'reward_token' and not by_token:
        raise BadInput(
            'algorithm.kl_placement',
            placement,
            f'advantage {pieces.name_of(algorithm.advantage)} reads no '
            'rewards by token; use reward_sequence, or advantage reinforce_pp or gae',
        )
    if placement == 'reward_sequence' and by_token:
        raise BadInput(
            'algorithm.kl_placement',
            placement,
            f'advantage {pieces.name_of(algorithm.advantage)} reads rewards by token; use reward_token',
        )
    if algorithm.ratio_base == 'sampler' and 'log_rho' in pieces.reads(algorithm.correction):
        raise BadInput(
            'algorithm.correction',
            pieces.name_of(algorithm.correction),
            'the ratio is taken to the '
            'sampler already (ratio_base), so the drift would count twice; use correction none',
        )
    if algorithm.denominator == 'selected' and 'drift' in pieces.reads(algorithm.correction):
        raise BadInput(
            'algorithm.denominator',
            'selected',
            'opsm drops rows as the policy moves, after the denominators are known; use all',
        )
    if algorithm.kl_target and (kl == 'none' or algorithm.kl_horizon <= 0):
        raise BadInput('algorithm.kl_target', algorithm.kl_target, 'needs a KL term and a kl_horizon above 0')
    if algorithm.entropy_target and not algorithm.needs_entropy_gradient:
        raise BadInput('algorithm.entropy_target', algorithm.entropy_target, "needs regularizers=('entropy_bonus',)")
    _numbers(algorithm)


def check_run(algorithm, *, group_size, prompts, updates):
    """Warnings, as a list of sentences, of what is inert in such a run; BadInput for what cannot work in it.

    updates: optimizer updates on one rollout.
    """
    advantage = pieces.name_of(algorithm.advantage)
    if group_size < 2 and advantage not in ALONE:
        raise BadInput(
            'rollout.group_size',
            group_size,
            f'advantage {advantage} compares completions of one prompt and needs at least 2',
        )
    if prompts < 2 and advantage in ('hybrid', 'batch_centred_std', 'group_mean_batch_std', 'gdpo'):
        raise BadInput(
            'data.prompts_per_step',
            prompts,
            f'advantage {advantage} normalizes over the batch, which '
            'with one group is that group; use 2 or more, or group_norm',
        )
    if advantage == 'pkpo' and algorithm.advantage.keywords['pass_k'] > group_size:
        raise BadInput(
            'algorithm.pass_k',
            algorithm.advantage.keywords['pass_k'],
            f'cannot be above rollout.group_size = {group_size}',
        )
    found, surrogate, ratio = [], pieces.name_of(algorithm.surrogate), pieces.name_of(algorithm.ratio)
    if updates == 1 and algorithm.ratio_base == 'old':
        inert = 'with one update per rollout the policy is still the old one'
        if surrogate in BOUNDED:
            found.append(f'{inert}: the bound of surrogate {surrogate} has no effect')
        if ratio not in ('token', 'sequence_product') and 'ratio' in algorithm.reads:
            found.append(f'{inert}: ratio {ratio} gives the gradient of ratio token')
        found += [
            f'{inert}: regularizer {pieces.name_of(r)} is 0'
            for r in algorithm.regularizers
            if pieces.name_of(r) in ('llds', 'kl_cov')
        ]
    if (
        ratio in ('sequence_geometric', 'sequence_geometric_token')
        and 'clip_low' in _bound(algorithm.surrogate)
        and max(_bound(algorithm.surrogate)[n] for n in ('clip_low', 'clip_high')) >= 0.05
    ):
        found.append(
            f'{ratio} ratios lie within some 1e-3 of 1: a clip range of 0.05 or more never acts; '
            'GSPO uses 3e-4 and 4e-4'
        )
    if ratio == 'sequence_geometric' and pieces.name_of(algorithm.weights) != 'sequence_mean':
        found.append('ratio sequence_geometric is one number a row; without weights sequence_mean long rows count more')
    return found


def check_rewards(algorithm, rewards):
    """BadInput when the algorithm cannot work with such rewards f64[P, G]."""
    if pieces.name_of(algorithm.advantage) in ('maxrl', 'pkpo') and np.nanmin(rewards, initial=0.0) < 0:
        raise BadInput(
            'algorithm.advantage',
            pieces.name_of(algorithm.advantage),
            f'needs rewards of at least 0, and there is {np.nanmin(rewards):.3g}; change reward.parts',
        )


def _numbers(algorithm):
    bound = {}
    for piece in (
        algorithm.advantage,
        algorithm.ratio,
        algorithm.surrogate,
        algorithm.weights,
        algorithm.correction,
        algorithm.selection,
        *algorithm.regularizers,
    ):
        bound |= _bound(piece)
    positive = (
        'fixed_length',
        'loss_denominator',
        'log_clip',
        'sapo_positive',
        'sapo_negative',
        'dppo_low',
        'dppo_high',
        'rho_max',
        'product_max',
        'icepop_high',
        'geometric_high',
        'dpo_beta',
        'length_alpha',
        'second_moment',
        'entropy_share',
        'pass_k',
    )
    for name, least in {**dict.fromkeys(positive, 0), 'cispo_cap': 1, 'dual_clip': 1}.items():
        if name in bound and not (bound[name] > least or bound[name] == least == 1):
            raise BadInput(f'algorithm.{name}', bound[name], f'must be {"at least 1" if least else "above 0"}')
    for name in ('clip_low', 'clip_high', 'std_eps'):
        if bound.get(name, 0) < 0:
            raise BadInput(f'algorithm.{name}', bound[name], 'must be at least 0')
    for name in ('icepop', 'geometric'):
        if bound.get(f'{name}_low', 0) > bound.get(f'{name}_high', np.inf):
            raise BadInput(f'algorithm.{name}_low', bound[f'{name}_low'], f'is above {name}_high: nothing is left')
    if bound.get('std_ddof', 0) not in (0, 1):
        raise BadInput('algorithm.std_ddof', bound['std_ddof'], 'must be 0 or 1')


def _bound(piece):
    return getattr(piece, 'keywords', {})
