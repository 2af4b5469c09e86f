"""Advice on settings: published ranges with their sources, and from a run's timings what its steps wait for.

Advice is no diagnosis: it may read timings, while diagnoses are functions of metrics.jsonl, and so of the seed.
"""

from collections.abc import Callable, Container, Mapping, Sequence
import math
import statistics
from typing import Any, NamedTuple

import jax

from grpo_jax.algorithms import is_corrected
from grpo_jax.models import transformer

# parameters; nothing is published on smaller models. The demo's models have some hundred thousand
SMALLEST = 300_000_000
LARGE = 7_000_000_000
UPDATES = 'learner.epochs x learner.minibatches'
STAGES = ('sample', 'reward', 'observe', 'update')  # of a step, in timings.jsonl
FEWER = 1.3  # so many times fewer decode steps are worth learning from older tokens
HIDDEN = 0.1  # so large a share of a step, if it need not be waited for, is worth older tokens
IDLE = 0.3  # share of the time in which a side may be idle


class Published(NamedTuple):
    """The range of a setting in papers and reports, and the kind of run that they are about."""

    setting: str
    least: float
    most: float
    methods: str  # the kind of run, in words
    sources: str
    only: Mapping[str, Container[Any]] = {}  # keys of the config -> their values in such runs
    also: tuple[float, ...] = ()  # published values outside the range
    parameters: tuple[float, float] = (SMALLEST, math.inf)  # size of the model: from, and below

    @property
    def models(self) -> str:
        """The model sizes that the range is for, in words."""
        least, below = (f'{count / 1e9:g} billion' for count in self.parameters)
        return f'{least} parameters and more' if math.isinf(self.parameters[1]) else f'{least} to {below} parameters'

    @property
    def values(self) -> str:
        """The published values in words."""
        others = ''.join(f', or {value:g}' for value in self.also)
        return f'{self.least:g} to {self.most:g}{others}'

    def holds(self, value: float) -> bool:
        """Whether a value was published."""
        return self.least <= value <= self.most or value in self.also


_SAMPLED = {'collection.source': ('policy',)}
_WHOLE, _ADAPTERS = {'model.lora.rank': (0,)}, {'model.lora.rank': range(1, 2**31)}  # what the run trains
_TOKEN_CLIP = {'algorithm.ratio': ('token',), 'algorithm.surrogate': ('clip', 'dual_clip')}
_SEQUENCE_CLIP = {
    'algorithm.ratio': ('sequence_geometric', 'sequence_geometric_token'),
    'algorithm.surrogate': ('clip', 'dual_clip'),
}

PUBLISHED = (
    Published(
        'rollout.group_size', 2, 64, 'completions of the policy',
        '2-GRPO (2510.00977) 2, Dr. GRPO (2503.20783) 8, DeepSeek-R1 (2501.12948) 16, DeepSeekMath (2402.03300) 64; '
        '1 where a critic or the batch is the baseline (1707.06347, 2501.03262)',
        _SAMPLED, (1,),
    ),
    Published(
        'optimizer.learning_rate', 1e-7, 5e-6, 'completions of the policy',
        'RLOO in marin 1e-7 (issue 2024), DeepSeekMath, Dr. GRPO and LLDS (2512.04220) 1e-6, common guides up to 5e-6',
        _SAMPLED | _WHOLE, (0.0,), (SMALLEST, LARGE),
    ),
    Published(
        'optimizer.learning_rate', 1e-7, 3e-6, 'completions of the policy',
        'DeepSeekMath and DAPO (2503.14476) 1e-6, DeepSeek-R1 3e-6', _SAMPLED | _WHOLE, (0.0,), (LARGE, math.inf),
    ),
    Published(
        'optimizer.learning_rate', 1e-6, 5e-5, 'completions of the policy, adapters',
        "ten times the rate without adapters: LoRA Without Regret (Schulman et al. 2025), verl's guide; Unsloth's 5e-6",
        _SAMPLED | _ADAPTERS, (0.0,),
    ),
    Published(
        'optimizer.learning_rate', 5e-7, 1e-6, 'DPO', 'DPO (2305.18290) 1e-6, later reports 5e-7',
        {'algorithm.surrogate': ('dpo',)} | _WHOLE, (0.0,),
    ),
    Published(
        'optimizer.learning_rate', 1e-5, 2e-5, 'imitation of demonstrations', 'supervised fine-tuning, common recipes',
        {'collection.source': ('demonstrations',)} | _WHOLE, (0.0,),
    ),
    Published(
        'algorithm.kl_coef', 1e-3, 0.05, 'all',
        'none in DAPO and Dr. GRPO, DeepSeek-R1 0.001, DeepSeekMath 0.04, PPO and RLOO (2402.14740) up to 0.05',
        {}, (0.0,),
    ),
    Published(
        'rollout.temperature', 0.7, 1.0, 'completions of the policy',
        'DeepSeek-R1 1 and 0.7, Lite PPO (2508.08221) 0.99, Dr. GRPO 1', _SAMPLED,
    ),
    Published(
        'algorithm.clip_low', 0.1, 0.2, 'ratios of tokens',
        'PPO (1707.06347) 0.1 to 0.2, DAPO 0.2, DeepSeek-R1 10', _TOKEN_CLIP, (10.0,),
    ),
    Published(
        'algorithm.clip_high', 0.1, 0.28, 'ratios of tokens',
        'PPO 0.1 to 0.2, DAPO 0.28, DeepSeek-R1 10', _TOKEN_CLIP, (10.0,),
    ),
    Published(
        'algorithm.clip_low', 3e-4, 2e-3, 'geometric ratios of sequences',
        'GSPO (2507.18071) 3e-4, LUSPO (2602.05261) 2e-3', _SEQUENCE_CLIP,
    ),
    Published(
        'algorithm.clip_high', 4e-4, 2.5e-3, 'geometric ratios of sequences',
        'GSPO 4e-4, LUSPO 2.5e-3', _SEQUENCE_CLIP,
    ),
    Published(
        UPDATES, 1, 16, 'completions of the policy',
        'DeepSeekMath 1, GSPO 4, DAPO and DeepSeek-R1 16', _SAMPLED,
    ),
    Published(
        'rollout.max_tokens', 256, 32768, 'completions of the policy',
        "TRL's default 256, DeepSeekMath 1024, Dr. GRPO 3000, DAPO 20480, DeepSeek-R1 32768", _SAMPLED,
    ),
)  # fmt: skip


def advise(config: Any, model_config: transformer.ModelConfig) -> list[str]:
    """Returns a line for each setting of a config that lies outside its published range.

    Returns [] for models with random weights and for models that are smaller than all published ones.
    """
    parameters = count_parameters(model_config)
    if config['model']['random_init'] or parameters < SMALLEST:
        return []
    lines = []
    for published in PUBLISHED:
        least, below = published.parameters
        value = _setting_value(config, published.setting)
        fits = all(_setting_value(config, key) in values for key, values in published.only.items())
        if fits and least <= parameters < below and not published.holds(value):
            lines.append(
                f'{published.setting} = {value:g} was not published for such a run ({published.methods}, '
                f'{published.models}): {published.values}; {published.sources}'
            )
    return lines


def describe_waits(
    rows: Sequence[Mapping[str, Any]], config: Any, acts: Callable[[str], bool] = bool, in_flight: int = 0
) -> list[str]:
    """Returns sentences on what a run's steps wait for, with flags that shorten it; [] where no flags would pay.

    rows: of timings.jsonl, with sampler/steps and sampler/decode_batches of metrics.jsonl; config: a ConfigDict, or the
    content of config.json; acts(flags): whether a run can start with flags; in_flight: the value of
    collection.in_flight that may be proposed, 0 where the time of a decode step is in proportion to its rows.
    """

    def usual(*names):
        """The median over rows of the sum of these columns; 0.0 where no row has all of them."""
        sums = [sum(row[name] for name in names) for row in rows if all(row.get(name) is not None for name in names)]
        return statistics.median(sums) if sums else 0.0

    def tell(before, setting, after):
        """Adds a sentence with the flags of a setting of config.collection, if the run can start with them."""
        flags = f'--branch=DIR --config.collection.{setting}{correction}'
        if acts(flags):
            lines.append(f'{before}: {flags} {after}')

    collection, lines = config['collection'], []
    correction = '' if is_corrected(config['algorithm']) else ' --config.algorithm.correction=truncated'
    ahead = collection['staleness']
    if not ahead and not collection['in_flight'] and config['learner']['old_logprobs'] != 'decode':
        steps, fewer = usual('sampler/steps'), usual('sampler/steps_carried')
        at_once = in_flight and usual('sampler/decode_batches') == 1  # else not all rows fit the cache
        if at_once and steps >= FEWER * fewer:
            before = f'the longest completions make a step take {steps:.0f} decode steps'
            tell(before, f'in_flight={in_flight}', f'would take {steps / fewer:.1f} times fewer')
        step, wait = usual(*STAGES), usual('reward/wait_seconds')
        if (hidden := min(wait, step - wait)) > HIDDEN * step:
            before = f'a step waits {wait:.3g} of its {step:.3g} s for rewards'
            tell(before, 'staleness=1', f'would hide {hidden / wait:.0%} of that')
    times = {side: usual(f'{side}/gap_seconds', f'{side}/busy_seconds') for side in ('sampler', 'learner')}
    idle = sorted((usual(f'{side}/gap_seconds') / time, side) for side, time in times.items() if time)
    if idle and idle[-1][0] >= IDLE:
        (least, less), (most, side) = idle
        before = f"the {side}'s devices are idle {most:.0%} of the time, and the {less}'s {least:.0%}"
        if least >= IDLE or not ahead:
            tell(before, f'staleness={ahead + 1}', 'would let both work at once')
        else:
            other = f'{"below" if side == "sampler" else "above"} {config["mesh"]["sampler"]}'
            lines.append(f'{before}: a mesh.sampler {other} would leave less idle')
    return lines


def count_parameters(model_config: transformer.ModelConfig) -> int:
    """Returns how many parameters a model has."""
    sizes = transformer.map_table(lambda path, param: math.prod(param.shape), transformer.param_table(model_config))
    return sum(jax.tree.leaves(sizes))


def _setting_value(config, setting):
    """The value of a setting in a config: a dotted key, or UPDATES."""
    if setting == UPDATES:
        return config['learner']['epochs'] * config['learner']['minibatches']
    for key in setting.split('.'):
        config = config[key]
    return config
