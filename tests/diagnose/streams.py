"""Streams of metrics, one in which a monitor must speak and one in which it must not, by the monitor's name."""

from typing import Any, NamedTuple

from grpo_jax.diagnose import Context

STEPS = 40


class Stream(NamedTuple):
    """Rows, what else is known of the run, and a text that the diagnosis must have; '' where there must be none."""

    rows: list
    text: str = ''
    context: Context = Context()


def rows(count: int = STEPS, **columns: Any) -> list[dict]:
    """Rows of a healthy run; a column is a number, or a function of the step, and replaces the one that it has.

    It gains 0.02 of accuracy a step up to 0.9, and its entropy falls from 0.5 to 0.02.
    """
    healthy: dict[str, Any] = {
        'reward': lambda step: min(0.3 + 0.02 * step, 0.9),
        'reward/numeric': lambda step: min(0.3 + 0.02 * step, 0.9),
        'reward_std': 0.4,
        'reward_died': 0.0,
        'reward_expired': 0.0,
        'reward_missing': 0.0,
        'unscorable': 0.0,
        'unparsed': 0.0,
        'dead_groups': lambda step: min(0.1 + 0.015 * step, 0.6),
        'groups_all_right': lambda step: min(0.015 * step, 0.5),
        'groups_all_wrong': 0.1,
        'distinct_completions': lambda step: max(1.0 - 0.02 * step, 0.3),
        'advantage_abs': 0.3,
        'advantage_all_wrong': 0.0,
        'advantage_variance': lambda step: max(0.25 - 0.004 * step, 0.08),
        'loss': -0.1,
        'grad_norm': lambda step: 0.1 + 0.02 * (step % 4),
        'finite': 1.0,
        'entropy': lambda step: max(0.5 - 0.02 * step, 0.02),
        'kl_old': 0.001,
        'kl_ref': lambda step: 0.002 * step,
        'kl_ref_sequence': lambda step: 0.05 * step,
        'ratio_max': 1.2,
        'clip_low_share': 0.01,
        'clip_high_share': 0.01,
        'logprob_change_better': 0.002,
        'probe_logprob_change': lambda step: 0.01 * step,
        'sampler_gap_mean': 1e-6,
        'sampler_ess': 1.0,
        'stale_ess': 0.95,
        'correction_bound': 0.01,
        'length': lambda step: 20 + 0.2 * step,
        'length_right': lambda step: 20 + 0.2 * step,
        'length_wrong': lambda step: 20 + 0.2 * step,
        'length_reward_correlation': 0.1,
        'truncated': 0.02,
        'repetitive': 0.01,
        'language_mixed': 0.01,
    }
    columns = healthy | columns
    return [
        {'step': step} | {name: column(step) if callable(column) else column for name, column in columns.items()}
        for step in range(count)
    ]


def evaluations(*pairs: tuple[int, float]) -> tuple:
    """Rows of evaluations.jsonl from (step, pass@1)."""
    return tuple({'step': step, 'pass@1': rate} for step, rate in pairs)


RUN = Context(verifier='numeric', parts=(('numeric', 1.0),), group_size=8, max_tokens=64)
TWO_PARTS = RUN._replace(parts=(('numeric', 1.0), ('format', 0.5)), terms=('format',))
UNVERIFIED = RUN._replace(verifier='', parts=(('model', 1.0),))
JUDGED = RUN._replace(parts=(('model', 1.0), ('numeric', 0.0)))


def from_step(start: int, value: Any, before: Any):
    """A column with one value before a step, and another one from there on."""
    return lambda step: value if step >= start else before


DEAD: dict[str, Any] = {'reward': 0.0, 'reward/numeric': 0.0, 'dead_groups': 1.0, 'advantage_abs': 0.0}

# labs/sums at a learning rate of 1e-3, seed 0
STILL_TOO_HIGH: dict[str, Any] = {
    'reward': (0.4648, 0.4258, 0.2773, 0.4258, 0.3672).__getitem__,
    'reward/numeric': (0.4648, 0.4258, 0.2773, 0.4258, 0.3672).__getitem__,
    'reward_std': 0.49,
    'entropy': (0.3268, 0.1305, 0.0892, 0.0806, 0.0797).__getitem__,
    'length': (10.93, 15.85, 17.52, 17.49, 17.85).__getitem__,
    'groups_all_wrong': (0.0, 0.1562, 0.4688, 0.2812, 0.4375).__getitem__,
}

SHARPENING = (0.3268, 0.2242, 0.1653, 0.1394, 0.0981, 0.0858, 0.087, 0.0785, 0.0748, 0.0611, 0.0615, 0.0542)

MUST: dict[str, list[Stream]] = {
    'large_updates': [
        # 0.4 loses more than half of its deviation, 0.4, in a step, and the entropy falls to a hundredth
        Stream(
            rows(6, entropy=from_step(3, 0.004, 0.4), reward=from_step(3, 0.05, 0.4), learning_rate=0.01),
            'reward 0.4 in step 1, 0.05 in steps 3 to 4; entropy 0.4 in step 1, 0.004 in steps 3 to 4; learning_rate',
            RUN,
        ),
        # more varied than before, in completions of twice the length: told as soon as two steps show it
        Stream(
            rows(4, entropy=None, length=from_step(2, 60.0, 20.0), reward=from_step(2, 0.05, 0.4)),
            'length 20 in step 0, 60 in steps 2 to 3',
            RUN,
        ),
        Stream(
            rows(4, entropy=None, length=None, truncated=from_step(2, 0.3, 0.0), reward=from_step(2, 0.05, 0.4)),
            'truncated 0 in step 0, 0.3 in steps 2 to 3',
            RUN,
        ),
        # labs/sums at 1e-3, as measured: the reward falls slowly; at step 4 the entropy is a quarter of its first value
        Stream(
            rows(5, **STILL_TOO_HIGH), 'entropy 0.327 in step 0, 0.0801 in steps 3 to 4; groups_all_wrong 0 in', RUN
        ),
        # no group tells, but held-out prompts do, while greedy accuracy rises
        Stream(
            rows(12, entropy=lambda step: 0.41 * 0.81**step, groups_all_wrong=None),
            'pass@8 0.97 at step 0, 0.91 at step 11; greedy 0.40 at step 0, 0.55 at step 11',
            RUN._replace(
                evaluations=(
                    {'step': 0, 'greedy': 0.4, 'pass@1': 0.3, 'pass@2': 0.5, 'pass@8': 0.97},
                    {'step': 11, 'greedy': 0.55, 'pass@1': 0.5, 'pass@2': 0.6, 'pass@8': 0.91},
                )
            ),
        ),
    ],
    'unverified_advantage': [
        Stream(
            rows(10, advantage_all_wrong=0.7, **{'reward/numeric': 0.05}),
            'advantage_all_wrong 0.70 in steps 0 to 9, collection.gate=reward',
            TWO_PARTS,
        )
    ],
    'dead_run': [
        Stream(rows(3, **DEAD, groups_all_wrong=1.0, groups_all_right=0.0), 'in steps 0 to 2, reward 0', RUN),
        Stream(rows(3, **DEAD, groups_all_right=0.0, truncated=1.0), 'reward 0, truncated 1.00', RUN),
        Stream(rows(3, **DEAD, groups_all_right=0.0, unparsed=0.9), 'reward 0, unparsed 0.90', RUN),
        Stream(
            rows(3, **DEAD | {'reward': 0.2}, groups_all_right=0.0),
            'reward 0.2, reward_std 0.40',
            TWO_PARTS._replace(gate='outcome'),
        ),
        Stream(
            rows(8, reward=from_step(5, 0.0, 0.5), advantage_abs=from_step(5, 0.0, 0.3), groups_all_right=0.0),
            'in steps 5 to 7, reward 0 after 0.5 at best',
            RUN,
        ),
    ],
    'dead_all_right': [
        Stream(rows(10, groups_all_right=0.95, dead_groups=0.97), 'groups_all_right 0.95 in steps 0 to 9', RUN),
        Stream(rows(10, groups_all_right=1.0, dead_groups=1.0), 'groups_all_right 1.00 in steps 0 to 9', RUN),
    ],
    'dead_all_wrong': [
        Stream(rows(10, groups_all_wrong=0.95, dead_groups=0.97), 'groups_all_wrong 0.95 in steps 0 to 9', RUN),
        Stream(rows(10, groups_all_wrong=0.95, dead_groups=0.97, truncated=0.8), 'truncated 0.80', RUN),
        Stream(rows(10, groups_all_wrong=0.95, dead_groups=0.97, unparsed=0.8), 'unparsed 0.80', RUN),
        Stream(
            rows(10, groups_all_wrong=0.95, dead_groups=0.97),
            'groups_all_wrong 0.95 in steps 0 to 9, reward_std 0.40',
            TWO_PARTS._replace(gate='outcome'),
        ),
        # 0.3 is more than half a deviation of 0.4
        Stream(
            rows(14, groups_all_wrong=from_step(7, 0.8, 0.1), dead_groups=0.8, reward=from_step(7, 0.1, 0.4)),
            'groups_all_wrong 0.1 in steps 0 to 6, 0.8 in steps 7 to 13; reward 0.4',
            RUN,
        ),
    ],
    'stagnation': [
        # means of steps 0 to 9 and of 30 to 39; 0.02 is less than a tenth of 0.25
        Stream(
            rows(
                advantage_variance=from_step(20, 0.02, 0.25),
                **{'reward/numeric': 0.5, 'reward': 0.5, 'groups_all_right': 0.2},
            ),
            'advantage_variance 0.25 in steps 0 to 9, 0.02 in steps 30 to 39',
            RUN,
        )
    ],
    'noisy_advantages': [
        # 0.8 of 7/8 are 0.7
        Stream(
            rows(advantage_variance=0.75, **{'reward/numeric': 0.5, 'groups_all_right': 0.2}),
            'advantage_variance 0.75 in steps 30 to 39; reward/numeric 0.5 in steps 0 to 9, 0.5 in steps 30 to 39',
            RUN,
        ),
        # rewards in cents, not divided
        Stream(
            rows(advantage_variance=30.0, **{'reward/numeric': 0.5, 'groups_all_right': 0.2}),
            'advantage_variance 30 in steps 30 to 39',
            RUN,
        ),
    ],
    'low_diversity': [
        # two of eight: 1/8 and a seventh of the rest; 0.3 of the groups are dead and not all right
        Stream(
            rows(5, distinct_completions=from_step(2, 0.25, 0.6), dead_groups=0.6, groups_all_right=0.3),
            'distinct_completions 0.25 to 0.25 in steps 2 to 4, groups dead 0.60 and all right 0.30, rollout.temp',
            RUN._replace(temperature=0.5),
        )
    ],
    'data_exhausted': [
        Stream(rows(5, retired=lambda step: 0.2 * step + 0.1), 'retired 0.90 in step 4', RUN),
        Stream(rows(5, draws=10.0, dead_groups=0.7), 'draws 10 and dead_groups 0.70 in steps 2 to 4', RUN),
        # training: 0.3 to 0.48 at first, mean 0.39; 0.9 at the end, against 0.5 on held-out prompts: 0.4 apart
        Stream(
            rows(),
            # sqrt((0.5 x 0.5 + 0.35 x 0.65) / 256)
            'reward/numeric 0.90 in steps 30 to 39, pass@1 0.50 at step 35, standard error of its change 0.04',
            RUN._replace(evaluations=evaluations((0, 0.35), (35, 0.5))),
        ),
    ],
    'loss_is_zero': [Stream(rows(3, loss=1e-7), '|loss| at most 1e-07 in steps 0 to 2, grad_norm 0.14', RUN)],
    'entropy_collapse': [
        # the reward loses more than half of 0.4, its deviation in step 0
        Stream(
            rows(5, entropy=from_step(3, 0.001, 0.5), reward=from_step(3, 0.0, 0.3)),
            'entropy 0.5 in step 0, 0.001 in steps 3 to 4; reward 0.3 in step 0, 0 in steps 3 to 4',
            RUN,
        ),
        Stream(
            rows(5, entropy=from_step(3, 0.001, 0.5), dead_groups=1.0, groups_all_right=0.4),
            'groups dead 1.00 and all right 0.40',
            RUN,
        ),
    ],
    'kl_runaway': [
        # steps 30 to 39: mean 34.5; 20 to 29: 24.5, which is more than two thirds of it; 10 to 19: 14.5
        Stream(
            rows(kl_ref_sequence=lambda step: 1.0 * step, **{'reward/numeric': 0.5}),
            'kl_ref_sequence 14.5 in steps 10 to 19, 34.5 in steps 30 to 39',
            RUN,
        ),
        Stream(
            rows(kl_ref_sequence=None, kl_ref=from_step(30, 0.8, 0.01), **{'reward/numeric': 0.5}),
            'kl_ref 0.01 in steps 20 to 29, 0.8 in steps 30 to 39',
            RUN._replace(kl='k3', kl_coef=0.01),
        ),
    ],
    'likelihood_displacement': [
        # 0.39 nats have gone at step 39; steps 10 to 19 are the newest earlier ones with at most half of that
        Stream(
            rows(probe_logprob_change=lambda step: -0.01 * step, **{'reward/numeric': 0.5}),
            'probe_logprob_change -0.145 in steps 10 to 19, -0.39 in step 39',
            RUN,
        ),
        Stream(
            rows(10, probe_logprob_change=None, logprob_change_better=-0.02),
            'logprob_change_better -0.2 nats a token in all of steps 0 to 9',
            RUN._replace(updates=4),
        ),
    ],
    'truncation': [
        Stream(rows(5, truncated=from_step(3, 0.4, 0.0)), 'truncated 0.40 to 0.40 in steps 3 to 4, at 64 tokens', RUN),
        Stream(rows(5, truncated=from_step(3, 0.5, 0.0), length=from_step(3, 40.0, 20.0)), 'truncated 0.50', RUN),
        Stream(rows(5, truncated=from_step(3, 1.0, 0.0), length=from_step(3, 64.0, 20.0)), 'truncated 1.00', RUN),
        # the demo at 1e-2 after a cold start that is too short: nothing was learned
        Stream(rows(5, truncated=from_step(3, 0.5, 0.0), length=from_step(3, 40.0, 20.0), reward=0.0), '0.50', RUN),
    ],
    'repetition': [
        Stream(rows(6, repetitive=from_step(3, 0.5, 0.1)), 'repetitive 0.1 in step 0, 0.5 in steps 3 to 5', RUN),
        # broken by the first update
        Stream(rows(6, repetitive=from_step(1, 0.5, 0.0)), 'repetitive 0 in step 0, 0.5 in steps 3 to 5', RUN),
    ],
    'language_mixing': [
        Stream(rows(6, language_mixed=from_step(3, 0.3, 0.0)), 'language_mixed 0 in step 0, 0.3 in steps', RUN)
    ],
    'length_hacking': [
        # 2 tokens a step: 49 on average in steps 10 to 19, 69 in 20 to 29, 89 in 30 to 39, 1.29 and 1.8 times those
        Stream(
            rows(length=lambda step: 20 + 2 * step, length_reward_correlation=0.6, **{'reward/numeric': 0.5}),
            'length 49 in steps 10 to 19, 89 in steps 30 to 39; length_reward_correlation 0.60; reward/numeric 0.5',
            RUN,
        ),
        # once all are long, none is paid for being longer
        Stream(
            rows(
                20,
                length=from_step(10, 40.0, 20.0),
                length_reward_correlation=from_step(10, 0.1, 0.6),
                **{'reward/numeric': 0.5},
            ),
            'length 20 in steps 0 to 9, 40 in steps 10 to 19; length_reward_correlation 0.35',
            RUN,
        ),
    ],
    'wrong_answers_growing': [
        Stream(
            rows(length_wrong=from_step(30, 60.0, 20.0), length_right=20.0, **{'reward/numeric': 0.5}),
            'length_wrong 20 in steps 20 to 29, 60 in steps 30 to 39; length_right 20',
            RUN,
        ),
        Stream(
            rows(length_wrong=from_step(30, 60.0, 20.0), length_right=20.0, **{'reward/numeric': 0.5}),
            'length_wrong 20',
            RUN._replace(weights='fixed_length'),
        ),
    ],
    'hacked_part': [
        # the part gains 0.8, at a weight of 0.5 a whole deviation of the reward
        Stream(
            rows(**{'reward/format': from_step(30, 0.9, 0.1), 'reward/numeric': 0.4}),
            'reward/format 0.1 in steps 20 to 29, 0.9 in steps 30 to 39; reward/numeric 0.4 in steps 20 to 29, 0.4',
            TWO_PARTS,
        )
    ],
    'overoptimization': [
        Stream(
            rows(**{'reward/model': from_step(30, 0.9, 0.4), 'reward/numeric': from_step(30, 0.3, 0.5)}),
            'reward/model 0.4 in steps 20 to 29, 0.9 in steps 30 to 39; reward/numeric 0.5 in steps 20 to 29, 0.3',
            JUDGED,
        )
    ],
    'unverified_reward': [
        # 0.9 - 0.4 is more than half of 0.4; measured every ten steps, at last 6 nats
        Stream(
            rows(
                kl_ref_sequence=lambda step: None if step % 10 else 0.2 * step,
                **{'reward/model': from_step(20, 0.9, 0.4), 'reward/numeric': None},
            ),
            'steps 30 to 39; reward_std 0.4 in steps 10 to 19, 0.4 in steps 30 to 39; kl_ref_sequence 6 in step 30',
            UNVERIFIED,
        ),
        Stream(
            rows(kl_ref_sequence=7.0, **{'reward/judge': from_step(30, 0.9, 0.4)}),
            'reward/judge 0.4 in steps 20 to 29, 0.9 in steps 30 to 39; reward_std',
            UNVERIFIED._replace(parts=(('mine.py:judge', 1.0),), kl='k3', kl_coef=0.01),
        ),
        # near, and not measured; all completions have the look that is paid
        Stream(
            rows(
                kl_ref_sequence=None, reward_std=from_step(30, 0.02, 0.4), **{'reward/model': from_step(30, 1.0, 0.5)}
            ),
            '0.5 in steps 20 to 29, 1 in steps 30 to 39; reward_std 0.4 in steps 20 to 29, 0.02 in steps 30 to 39',
            UNVERIFIED,
        ),
    ],
    'flaky_reward': [
        Stream(rows(3, reward_expired=0.1), 'reward_expired 0.10 to 0.10 in steps 0 to 2', RUN),
        Stream(rows(3, reward_died=0.1), 'reward_died 0.10', RUN),
        Stream(rows(3, reward_missing=0.08, unscorable=0.08), 'reward_missing 0.08', RUN),
        Stream(
            rows(3, reward_missing=0.08), 'reward_missing 0.08', RUN._replace(parts=(('numeric', 1.0), ('judge', 0.5)))
        ),
        Stream(
            rows(3, reward_refused=0.08), 'reward_refused 0.08', RUN._replace(parts=(('numeric', 1.0), ('judge', 0.5)))
        ),
        Stream(rows(3, unscorable=0.1), 'unscorable 0.10', RUN),
    ],
    'falling_evaluation': [
        # 256 prompts: two standard errors of 0.6 - 0.45 are 0.087
        Stream(
            rows(),
            'pass@1 0.60 at step 10, 0.45 at step 30; reward 0.59 in steps 10 to 19, 0.9 in steps 30 to 39',
            RUN._replace(evaluations=evaluations((0, 0.4), (10, 0.6), (30, 0.45))),
        ),
        Stream(rows(), 'pass@1 0.60', TWO_PARTS._replace(evaluations=evaluations((0, 0.4), (10, 0.6), (30, 0.45)))),
        Stream(  # the reference wrote the completions: their reward says nothing of the policy
            rows(reward=lambda step: 0.35 - 0.001 * step),
            'pass@1 0.69 at step 10, 0.49 at step 20',
            RUN._replace(source='reference', evaluations=evaluations((0, 0.32), (10, 0.69), (20, 0.49))),
        ),
    ],
    'forgetting': [
        Stream(
            rows(retired=0.4),
            'retired 0.40 in steps 30 to 39; pass@1 0.60 at step 10, 0.45 at step 30',
            RUN._replace(evaluations=evaluations((0, 0.4), (10, 0.6), (30, 0.45)), retire_above=0.8),
        )
    ],
    'sampler_mismatch': [
        Stream(rows(3, sampler_gap_mean=0.05), 'sampler_gap_mean 0.05 nats a token, sampler_ess 1.00', RUN),
        Stream(rows(3, sampler_ess=0.3), 'sampler_ess 0.30 in steps 0 to 2', RUN._replace(exact=False)),
        Stream(rows(3, sampler_gap_mean=0.05), 'nats a token', RUN._replace(exact=False, correction='truncated')),
        Stream(rows(3, sampler_gap_mean=0.05), 'nats a token', RUN._replace(quantized=True)),
    ],
    'stale_tokens': [
        Stream(rows(3, stale_ess=0.3), 'stale_ess 0.30 in steps 0 to 2', RUN._replace(staleness=4)),
        Stream(rows(3, stale_ess=0.3), 'stale_ess 0.30 in steps 0 to 2', RUN._replace(max_age=8)),
        Stream(rows(3, stale_ess=0.3), 'stale_ess 0.30', RUN._replace(staleness=4, learning_rate=1e-3)),
    ],
    'correction_at_bound': [
        Stream(
            rows(3, correction_bound=0.2),
            'correction_bound 0.20 in steps 0 to 2',
            RUN._replace(staleness=4, correction='truncated'),
        ),
        Stream(rows(3, correction_bound=0.2), '', RUN._replace(max_age=8, correction='truncated_product')),
        Stream(rows(3, correction_bound=0.2), '', RUN._replace(correction='truncated', learning_rate=1e-3)),
        Stream(rows(3, correction_bound=0.2), '', RUN._replace(staleness=1, correction='masked_geometric')),
    ],
    'clip_saturation': [
        Stream(
            rows(3, clip_low_share=0.25, clip_high_share=0.25),
            'clip_low_share 0.25 and clip_high_share 0.25 in steps 0 to 2',
            RUN._replace(updates=4),
        )
    ],
    'inert_settings': [
        Stream(
            rows(3, ratio_max=1.0),
            'ratio_max 1 in steps 0 to 2, 1 update a rollout',
            RUN._replace(inert=('regularizer llds is 0',)),
        ),
        Stream(rows(3, ratio_max=1.0), '4 updates a rollout', RUN._replace(updates=4)),
    ],
    'gradient_spikes': [
        # the usual norm is the median of 0.1, 0.12, 0.14 and 0.16 in turn; 2.6 is 20 times 0.13
        Stream(
            rows(grad_norm=lambda step: 2.6 if step in (33, 37) else 0.1 + 0.02 * (step % 4)),
            'grad_norm 2.6 in step 33, median 0.13 before steps 30 to 39; such steps: 2',
            RUN,
        ),
        Stream(rows(grad_norm=from_step(39, 50.0, 0.1)), 'grad_norm 50 in step 39, median 0.1 before', RUN),
    ],
}

SILENT: dict[str, list[Stream]] = {
    'large_updates': [
        # the reward falls alone, as when data or rewards change; the policy moves and is no worse; it falls in 20 steps
        Stream(rows(reward=from_step(10, 0.0, 0.6)), context=RUN),
        Stream(rows(entropy=from_step(10, 0.001, 0.6)), context=RUN),
        Stream(rows(20, reward=lambda step: 0.6 - 0.03 * step, entropy=lambda step: 0.5 * 0.9**step), context=RUN),
        Stream(  # others wrote the completions: these are worse, and not the policy
            rows(reward=from_step(10, 0.0, 0.6), entropy=from_step(10, 0.001, 0.6)),
            context=RUN._replace(source='reference'),
        ),
        # labs/sums at 3e-4, as measured: the entropy falls as fast, and no prompt is lost
        Stream(rows(12, entropy=SHARPENING.__getitem__, groups_all_wrong=0.0), context=RUN),
    ],
    'unverified_advantage': [
        Stream(rows(advantage_all_wrong=0.7, **{'reward/numeric': 0.05}), context=RUN),  # the verifier alone pays
        Stream(rows(advantage_all_wrong=0.7), context=TWO_PARTS),  # it gains
        Stream(rows(advantage_all_wrong=0.3, **{'reward/numeric': 0.05}), context=TWO_PARTS),
        Stream(rows(advantage_all_wrong=0.9, **{'reward/numeric': 0.05}), context=TWO_PARTS._replace(compares=False)),
    ],
    'dead_run': [
        Stream(rows(5, **DEAD | {'reward': 1.0}, groups_all_right=1.0), context=RUN),  # mastered
        Stream(rows(5, **DEAD, groups_all_right=0.0), context=RUN._replace(source='demonstrations')),
        Stream(rows(5, **DEAD, groups_all_right=0.0), context=RUN._replace(group_size=1)),
        Stream(rows(5, dead_groups=from_step(4, 1.0, 0.9)), context=RUN),
        Stream(rows(2, **DEAD, groups_all_right=0.0), context=RUN),
    ],
    'dead_all_right': [
        Stream(rows(10, groups_all_right=from_step(9, 1.0, 0.7), dead_groups=0.97), context=RUN),
        Stream(rows(10, groups_all_right=0.95, dead_groups=0.1), context=RUN),  # something else is paid
    ],
    'dead_all_wrong': [
        Stream(rows(10, groups_all_wrong=0.8, dead_groups=0.8), context=RUN),
        Stream(rows(10, groups_all_wrong=0.95, dead_groups=0.1), context=RUN),
        Stream(rows(groups_all_wrong=from_step(10, 0.6, 0.1), dead_groups=0.8, reward=0.4), context=RUN),
    ],
    'stagnation': [
        # all is right, or it goes on gaining
        Stream(rows(advantage_variance=from_step(20, 0.02, 0.25), groups_all_right=0.9), context=RUN),
        Stream(rows(30, advantage_variance=from_step(20, 0.02, 0.25), groups_all_right=0.2), context=RUN),
    ],
    'noisy_advantages': [
        Stream(rows(29, advantage_variance=0.75, **{'reward/numeric': 0.5, 'groups_all_right': 0.2}), context=RUN),
        Stream(rows(advantage_variance=0.75, **{'reward/numeric': 0.5, 'groups_all_right': 0.7}), context=RUN),
        Stream(rows(advantage_variance=0.25, **{'reward/numeric': 0.5, 'groups_all_right': 0.2}), context=RUN),
        Stream(rows(31, advantage_variance=0.75, **{'reward/numeric': lambda step: 0.02 * step}), context=RUN),  # gains
        Stream(
            rows(advantage_variance=1.0, **{'reward/numeric': 0.5, 'groups_all_right': 0.2}),
            context=RUN._replace(over_batch=True),
        ),
    ],
    'low_diversity': [
        # as alike, and all right; half of them differ; groups of one
        Stream(rows(distinct_completions=0.15, dead_groups=0.8, groups_all_right=0.7), context=RUN),
        Stream(rows(distinct_completions=0.5, dead_groups=0.8, groups_all_right=0.1), context=RUN),
        Stream(
            rows(distinct_completions=1.0, dead_groups=1.0, groups_all_right=0.1), context=RUN._replace(group_size=1)
        ),
    ],
    'data_exhausted': [
        # 0.3 apart, and of 8 held-out prompts two standard errors are 0.49
        Stream(rows(), context=RUN._replace(evaluations=evaluations((0, 0.45), (35, 0.55)), evaluation_prompts=8)),
        Stream(rows(retired=0.5, draws=3.0, dead_groups=0.7), context=RUN),
        # no evaluation since the start, or one beside which training is no better than at first
        Stream(rows(), context=RUN._replace(evaluations=evaluations((0, 0.35), (10, 0.4)))),
        Stream(rows(**{'reward/numeric': 0.9}), context=RUN._replace(evaluations=evaluations((0, 0.5), (35, 0.5)))),
    ],
    'loss_is_zero': [
        Stream(rows(3, loss=0.0, advantage_abs=0.0, grad_norm=0.0), context=RUN),
        Stream(rows(3, loss=1e-7), context=RUN._replace(updates=4)),
        Stream(rows(9, loss=from_step(4, 0.0, -0.1)), context=RUN),
    ],
    'entropy_collapse': [
        # certain, and right: nearly all groups are dead because they are all right
        Stream(
            rows(entropy=lambda step: max(0.5 - 0.05 * step, 0.001), dead_groups=0.95, groups_all_right=0.9),
            context=RUN,
        ),
        Stream(rows(entropy=0.001, reward=0.3), context=RUN),  # as certain as it was from the start, and as good
    ],
    'kl_runaway': [
        Stream(rows(20, kl_ref_sequence=lambda step: 1.0 * step), context=RUN),  # it gains
        Stream(rows(kl_ref_sequence=12.0, **{'reward/numeric': 0.5}), context=RUN),  # far, and stays there
        Stream(  # the demo with dpo: the reference is no better at the end, and the policy is
            rows(kl_ref_sequence=lambda step: 1.0 * step, **{'reward/numeric': 0.35}),
            context=RUN._replace(source='reference'),
        ),
    ],
    'likelihood_displacement': [
        Stream(rows(20, probe_logprob_change=lambda step: -0.1 * step), context=RUN),  # a better way to say it
        Stream(rows(probe_logprob_change=-0.05, **{'reward/numeric': 0.5}), context=RUN),
        Stream(rows(10, probe_logprob_change=None, logprob_change_better=0.0), context=RUN),
    ],
    'truncation': [Stream(rows(truncated=lambda step: 0.5 * (step % 2)), context=RUN)],
    'repetition': [Stream(rows(repetitive=0.5), context=RUN)],  # as from the start
    'language_mixing': [Stream(rows(language_mixed=lambda step: 0.5 * (step % 3 == 0)), context=RUN)],
    'length_hacking': [
        Stream(rows(20, length=lambda step: 20 + 2 * step, length_reward_correlation=0.6), context=RUN),  # it gains
        Stream(rows(length=lambda step: 20 + 2 * step, **{'reward/numeric': 0.5}), context=RUN),  # not paid for
    ],
    'wrong_answers_growing': [
        Stream(rows(length_wrong=lambda step: 20 + 2 * step, length_right=lambda step: 20 + 2 * step), context=RUN),
        Stream(rows(length_wrong=from_step(30, 30.0, 10.0), length_right=30.0), context=RUN),  # no longer than right
        Stream(rows(length_wrong=from_step(30, 31.0, 10.0), length_right=30.0, **{'reward/numeric': 0.8}), context=RUN),
        Stream(rows(length_wrong=from_step(30, 60.0, 20.0), **{'reward/numeric': 0.95}), context=RUN),  # few are left
    ],
    'hacked_part': [
        Stream(rows(**{'reward/format': from_step(20, 0.9, 0.1)}), context=TWO_PARTS),  # accuracy gains as well
        Stream(  # a penalty that goes away
            rows(**{'reward/format': from_step(30, 0.0, -0.9), 'reward/numeric': 0.4}), context=TWO_PARTS
        ),
    ],
    'overoptimization': [
        Stream(rows(**{'reward/model': from_step(30, 0.9, 0.4)}), context=JUDGED),
        Stream(rows(**{'reward/model': 0.4, 'reward/numeric': from_step(30, 0.3, 0.5)}), context=JUDGED),
    ],
    'unverified_reward': [
        Stream(rows(kl_ref_sequence=7.0, **{'reward/model': from_step(30, 0.9, 0.4)}), context=JUDGED),
        Stream(rows(kl_ref_sequence=4.0, **{'reward/model': from_step(30, 0.9, 0.4)}), context=UNVERIFIED),
        Stream(rows(kl_ref_sequence=7.0, reward_std=0.01, **{'reward/model': 0.6}), context=UNVERIFIED),
        Stream(
            rows(kl_ref_sequence=1.0, reward_std=from_step(30, 0.1, 0.4), **{'reward/model': from_step(30, 0.9, 0.4)}),
            context=UNVERIFIED,
        ),
        Stream(  # no learned one: what it pays for is what is wanted
            rows(kl_ref_sequence=7.0, **{'reward/repetition': from_step(30, 0.9, 0.4)}),
            context=UNVERIFIED._replace(parts=(('repetition', 1.0),)),
        ),
    ],
    'flaky_reward': [Stream(rows(reward_expired=lambda step: 0.5 * (step == 7), unscorable=0.01), context=RUN)],
    'falling_evaluation': [
        # within two standard errors; and the reward falls too, or has had no time to grow
        Stream(rows(), context=RUN._replace(evaluations=evaluations((0, 0.5), (30, 0.44)))),
        Stream(
            rows(reward=lambda step: 0.9 - 0.01 * step),
            context=RUN._replace(evaluations=evaluations((0, 0.6), (30, 0.4))),
        ),
        Stream(rows(1), context=RUN._replace(evaluations=evaluations((0, 0.6), (1, 0.4)))),
    ],
    'forgetting': [
        Stream(rows(retired=0.4), context=RUN._replace(evaluations=evaluations((0, 0.4), (30, 0.6)))),
        Stream(rows(retired=0.0), context=RUN._replace(evaluations=evaluations((0, 0.6), (30, 0.4)))),
    ],
    'sampler_mismatch': [
        Stream(rows(sampler_gap_mean=0.004, sampler_ess=0.97), context=RUN),  # bfloat16
        Stream(rows(sampler_gap_mean=0.05, sampler_ess=0.3), context=RUN._replace(stale=True)),
    ],
    'stale_tokens': [
        Stream(rows(stale_ess=0.7), context=RUN._replace(staleness=4)),
        Stream(rows(stale_ess=lambda step: 0.3 if step % 3 else 0.8), context=RUN._replace(staleness=4)),
    ],
    'correction_at_bound': [
        Stream(rows(correction_bound=0.05), context=RUN._replace(staleness=4, correction='truncated')),
        Stream(
            rows(correction_bound=lambda step: 0.3 if step % 3 else 0.0),
            context=RUN._replace(staleness=1, correction='icepop'),
        ),
    ],
    'clip_saturation': [Stream(rows(clip_low_share=0.08, clip_high_share=0.07), context=RUN)],  # GSPO
    'inert_settings': [
        Stream(rows(ratio_max=1.0), context=RUN),
        Stream(rows(9, ratio_max=1.0), context=RUN._replace(updates=4, critic_warmup=10)),
        Stream(rows(ratio_max=1.3), context=RUN._replace(updates=4, inert=('regularizer llds is 0',))),
    ],
    'gradient_spikes': [
        Stream(rows(grad_norm=lambda step: 2.6 if step == 33 else 0.13), context=RUN),
        Stream(rows(grad_norm=lambda step: 5.0 if step < 5 else 0.1), context=RUN),
        Stream(rows(grad_norm=from_step(20, 0.1, 0.0)), context=RUN),
        # all are clipped to 1 already, or spikes to four times the usual
        Stream(rows(grad_norm=from_step(39, 500.0, 1.0)), context=RUN),
        Stream(rows(grad_norm=from_step(39, 50.0, 0.1)), context=RUN._replace(max_grad_norm=0.4)),
    ],
}
