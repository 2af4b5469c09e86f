"""Refuses algorithms that cannot work and numbers that nothing reads, and warns of pieces that have no effect."""

from collections import defaultdict
from collections.abc import Mapping
import difflib
from types import ModuleType
from typing import TYPE_CHECKING, Any

from jaxtyping import Float
import numpy as np

from grpo_jax import coming_from, ranges
from grpo_jax.algorithms import kl as kls
from grpo_jax.algorithms import pieces
from grpo_jax.algorithms.group_math import GATES
from grpo_jax.errors import BadInput
from grpo_jax.types import HEAD_BY_TOKEN

if TYPE_CHECKING:
    from grpo_jax.algorithms.algorithm import Algorithm

CHOICES = {
    'kl_placement': ('loss', 'reward_token', 'reward_sequence'),
    'ratio_base': ('old', 'sampler'),
    'denominator': ('all', 'selected'),
    'dead_groups': ('keep', 'drop', 'reweight', 'resample', 'replay'),
    'gate': GATES,
    'source': ('policy', 'reference', 'demonstrations', 'pairs'),
}
# the choices of an algorithm that are read from config.collection
SECTIONS: dict[str, str] = {'dead_groups': 'collection', 'gate': 'collection', 'source': 'collection'}

# what a piece may read, by the key that chooses the piece; see losses.make_inputs, losses.prepare, host_advantages
_BY_ROW = ('mask', 'advantages', 'group_ids', 'correct')
_BY_TOKEN = (
    *_BY_ROW,
    *HEAD_BY_TOKEN,
    *('rewards', 'base_logprobs', 'log_ratio', 'token_ratio', 'sampler_logprobs', 'ref_logprobs', 'log_rho', 'drift'),
    'teacher_kl',
)
_OF_LOSS = (*_BY_TOKEN, 'ratio', 'weights', 'selected', 'top_covariance', 'entropy_coef', 'kl_coef')
READABLE = {
    'advantage': (
        *('rewards', 'correct', 'mask', 'completion_mask', 'tokens', 'token_rewards', 'step_rewards', 'parts'),
        *('part_weights', 'sizes', 'dead', 'discount', 'run_baseline', 'prompt_baselines', 'sampler_logprobs'),
        *('old_logprobs', 'old_entropy', 'initial_entropy', 'values', 'teacher_logprobs'),
    ),
    'ratio': _BY_TOKEN,
    'surrogate': (*_BY_TOKEN, 'ratio'),
    'kl': _OF_LOSS,
    'weights': _BY_ROW,
    'correction': (*_BY_TOKEN, 'ratio'),
    'selection': (*_BY_ROW, 'old_logprobs', 'old_entropy', 'log_rho', 'covariance'),
    'regularizers': _OF_LOSS,
}

# data of the ratio between the policy now and before the step
RATIOS = {'ratio', 'log_ratio', 'token_ratio'}


def is_corrected(section: Any) -> bool:
    """Whether config.algorithm (`section`) accounts for completions that other policies have sampled."""
    return section['correction'] != 'none' or section['ratio_base'] == 'sampler'


def refuse_misplaced_keys(section: Any) -> None:
    """Raises BadInput for a key of config.collection in config.algorithm (`section`), where nothing would read it."""
    for key, section_name in SECTIONS.items():
        if key in section:
            raise BadInput(f'algorithm.{key}', section[key], f'is read from {section_name}.{key}; set it there')


def check(algorithm: 'Algorithm') -> None:
    """Raises BadInput for an unknown choice, a number out of its range, and a combination that works in no run."""
    kl, placement = pieces.name_of(algorithm.kl), algorithm.kl_placement
    has_kl = 'ref_logprobs' in pieces.reads(algorithm.kl)
    for_reward = algorithm.kl is kls.k1  # whose value compute_advantages subtracts
    _check_choices(algorithm)
    _check_numbers(algorithm)
    if for_reward and placement == 'loss':
        raise BadInput(
            'algorithm.kl',
            kl,
            'as a loss its expected gradient is zero, so it only adds '
            'noise; use k2 (exact gradient) or k3, or set kl_placement to reward_token or reward_sequence',
        )
    if has_kl and not for_reward and placement != 'loss':
        raise BadInput('algorithm.kl', kl, f'only k1 is unbiased in the reward; use k1 with kl_placement={placement!r}')
    if has_kl == (algorithm.kl_coef == 0):
        raise BadInput(
            'algorithm.kl_coef',
            algorithm.kl_coef,
            f'does not fit algorithm.kl={kl!r}: set kl to k2 or k3 and kl_coef above 0, or kl to none and kl_coef to 0',
        )
    if not has_kl and placement != 'loss':
        raise BadInput('algorithm.kl_placement', placement, 'needs a KL estimator; set kl to k1 and kl_coef above 0')
    if placement == 'reward_sequence' and 'token_rewards' in algorithm.advantage_reads:
        remedy = f'advantage {pieces.name_of(algorithm.advantage)} reads rewards by token; use reward_token'
        raise BadInput('algorithm.kl_placement', placement, remedy)
    if algorithm.ratio_base == 'sampler' and 'log_rho' in pieces.reads(algorithm.correction):
        raise BadInput(
            'algorithm.correction',
            pieces.name_of(algorithm.correction),
            'the ratio is taken to the '
            'sampler already (ratio_base), so the drift would count twice; use correction none',
        )
    late = {*pieces.reads(algorithm.correction)} - {*READABLE['selection']}
    if algorithm.denominator == 'selected' and late:
        correction = pieces.name_of(algorithm.correction)
        remedy = f'correction {correction} reads {min(late)}, which comes after denominators are computed; use all'
        raise BadInput('algorithm.denominator', 'selected', remedy)
    if algorithm.baselines and algorithm.dead_groups == 'replay':
        raise BadInput(
            'collection.dead_groups',
            'replay',
            'learns once more from groups whose rewards are in the baseline of advantage '
            f'{pieces.name_of(algorithm.advantage)} already; use resample or keep',
        )
    if algorithm.kl_target and not has_kl:
        raise BadInput('algorithm.kl_target', algorithm.kl_target, 'needs a KL term; choose a kl, or set 0')
    if algorithm.entropy_target and not algorithm.needs_entropy_gradient:
        raise BadInput('algorithm.entropy_target', algorithm.entropy_target, "set regularizers=('entropy_bonus',) too")


def _check_choices(algorithm: 'Algorithm') -> None:
    """Raises BadInput for a choice that CHOICES lacks, and for gate 'none' with dead_groups other than 'keep'."""
    for key, choices in CHOICES.items():
        if getattr(algorithm, key) not in choices:
            raise BadInput(
                f'{SECTIONS.get(key, "algorithm")}.{key}', getattr(algorithm, key), 'choose ' + ' or '.join(choices)
            )
    if algorithm.gate == 'none' and algorithm.dead_groups != 'keep':
        raise BadInput(
            'collection.gate',
            'none',
            f'finds no dead group for collection.dead_groups={algorithm.dead_groups!r}; '
            'choose another gate, or dead_groups keep',
        )


def refuse_unused_numbers(algorithm: 'Algorithm', section: Any, modules: Mapping[str, ModuleType]) -> None:
    """Raises BadInput for a number of config.algorithm that nothing reads, unless it equals its default.

    A number that no piece has at all, like a misspelt one, is refused whatever its value. section: config.algorithm.
    modules: for each key that chooses a piece, the module with the pieces to choose from.
    """
    read = {number for key in modules for piece in algorithm.chosen(key) for number in pieces.numbers(piece)}
    readers, defaults = defaultdict[str, list[str]](list), dict(algorithm._field_defaults)
    for chooser, module in modules.items():
        for name, piece in sorted(pieces.list_pieces(module).items()):
            defaults |= pieces.numbers(piece)
            for number in pieces.numbers(piece):
                readers[number].append(f'{chooser} {name}')
    for path, marks in ranges.marks_of(type(algorithm), 'algorithm').items():
        number = path.partition('.')[2]
        unmet = [str(mark) for mark in marks if not mark.holds({'algorithm': algorithm})]
        readers[number] += unmet
        read |= set() if unmet else {number}
    for key in (key for key in section if key not in {*read, *modules, *CHOICES}):
        number = tuple(section[key]) if isinstance(section[key], list) else section[key]  # of config.json
        if key in defaults and (type(number) is bool, number) == (type(defaults[key]) is bool, defaults[key]):
            continue
        remedy = f'nothing reads it; leave it at its default, or choose {" or ".join(readers[key])}'
        if not readers[key]:
            near = difflib.get_close_matches(key, {*defaults, *read}, 1)
            hint = f'did you mean {near[0]}?' if near else 'correct the name, or leave it out'
            remedy = f'no piece has a number of this name; {coming_from.explain(f"algorithm.{key}") or hint}'
        raise BadInput(f'algorithm.{key}', section[key], remedy)


def refuse_unreadable(algorithm: 'Algorithm') -> None:
    """Raises BadInput for a piece that reads a name which READABLE does not list for the piece's key."""
    for key, names in READABLE.items():
        for piece in algorithm.chosen(key):
            unknown = [name for name in pieces.reads(piece) if name not in names]
            if unknown:
                near = difflib.get_close_matches(unknown[0], names, 1)
                hint = f'; did you mean {near[0]}?' if near else '; a number of the piece stands after a *'
                remedy = f'reads {unknown[0]}, and may read {", ".join(sorted(names))}{hint}'
                raise BadInput(f'algorithm.{key}', pieces.name_of(piece), remedy)


def check_run(algorithm: 'Algorithm', *, group_size: int, prompts: int, updates: int) -> list[str]:
    """Returns warnings, a list of sentences, about choices that have no effect, or an unintended one, in a run.

    group_size: completions of a prompt. prompts: prompts of a step. updates: optimizer updates on one rollout. Raises
    BadInput if the algorithm cannot work with these numbers.
    """
    refuse_unreadable(algorithm)
    advantage, numbers = pieces.name_of(algorithm.advantage), pieces.numbers(algorithm.advantage)
    if group_size < 2 and not pieces.property_of(algorithm.advantage, 'alone'):
        remedy = f'advantage {advantage} compares completions of one prompt and needs at least 2; raise it'
        raise BadInput('rollout.group_size', group_size, remedy)
    if prompts < 2 and pieces.property_of(algorithm.advantage, 'over_batch'):
        raise BadInput(
            'data.prompts_per_step',
            prompts,
            f'advantage {advantage} normalizes over the batch, which '
            'with one group is that group; use 2 or more, or group_norm',
        )
    if numbers.get('pass_k', 0) > group_size:
        raise BadInput('algorithm.pass_k', numbers['pass_k'], f'is above rollout.group_size = {group_size}; lower it')
    warnings = []
    if numbers.get('pass_k') == group_size:
        warnings.append(
            f'advantage {advantage} has no signal with algorithm.pass_k = {group_size} = rollout.group_size: all '
            'completions of a group earn the same, whether one is right or all; lower pass_k, or raise group_size'
        )
    if updates == 1 and algorithm.ratio_base == 'old':
        warnings += [
            f'with one update per rollout the policy is still the old one: {text}; learner.minibatches=2 makes two'
            for text in [*list_inert(algorithm), *_list_unmoved(algorithm)]
        ]
    bounds, ratio = pieces.numbers(algorithm.surrogate), pieces.name_of(algorithm.ratio)
    if (
        pieces.property_of(algorithm.ratio, 'near_one')
        and 'clip_low' in bounds
        and max(bounds['clip_low'], bounds['clip_high']) >= 0.05
    ):
        warnings.append(
            f'{ratio} ratios lie within some 1e-3 of 1: a clip range of 0.05 or more never acts; '
            'GSPO uses 3e-4 and 4e-4'
        )
    suited = pieces.property_of(algorithm.ratio, 'suits_weights')
    if suited and pieces.name_of(algorithm.weights) != suited:
        warnings.append(f'ratio {ratio} is one number a row; without weights {suited} long rows count more')
    return warnings


def list_inert(algorithm: 'Algorithm') -> list[str]:
    """Returns a list of clauses, each about a piece that has no effect while the policy is still the old one."""
    clauses = []
    if pieces.property_of(algorithm.surrogate, 'bounded') and not pieces.is_as_written(algorithm.surrogate, 'clip'):
        clauses.append(f'the bound of surrogate {pieces.name_of(algorithm.surrogate)} has no effect')
    if pieces.property_of(algorithm.ratio, 'row_mean') and 'ratio' in algorithm.reads:
        clauses.append(f'ratio {pieces.name_of(algorithm.ratio)} gives the gradient of ratio token')
    return clauses + [
        f'regularizer {pieces.name_of(regularizer)} is 0'
        for regularizer in algorithm.regularizers
        if pieces.property_of(regularizer, 'zero_at_first')
    ]


def _list_unmoved(algorithm):
    """A list of clauses, each about a user's piece that reads a ratio and lacks the property `bounded`."""
    own = (algorithm.ratio, algorithm.surrogate, algorithm.kl, algorithm.correction, *algorithm.regularizers)
    return [
        f'{pieces.name_of(piece)} reads a ratio that is 1 throughout, so that only its slope there counts'
        for piece in own
        if pieces.is_own(piece) and RATIOS & {*pieces.reads(piece)} and not pieces.property_of(piece, 'bounded')
    ]


def check_outcomes(algorithm: 'Algorithm', correct: Float[np.ndarray, 'P G']) -> None:
    """Raises BadInput if an outcome is below 0 though the advantage is `nonnegative`; correct: the outcomes."""
    if pieces.property_of(algorithm.advantage, 'nonnegative') and np.nanmin(correct, initial=0.0) < 0:
        raise BadInput(
            'algorithm.advantage',
            pieces.name_of(algorithm.advantage),
            f'needs outcomes of at least 0, and there is {np.nanmin(correct):.3g}; '
            'give `correct`, or choose another advantage',
        )


def _check_numbers(algorithm):
    """Raises BadInput for a number out of range, a low bound above its high one, and a clip_low that bounds nothing."""
    ranges.check(type(algorithm), algorithm._asdict(), 'algorithm')
    numbers = {}
    for piece in (piece for key in READABLE for piece in algorithm.chosen(key)):
        ranges.check(piece, pieces.numbers(piece), 'algorithm')
        numbers |= pieces.numbers(piece)
    for name in ('icepop', 'geometric', 'covariance'):
        if numbers.get(f'{name}_low', 0) > numbers.get(f'{name}_high', np.inf):
            raise BadInput(f'algorithm.{name}_low', numbers[f'{name}_low'], f'is above {name}_high; lower it')
    if numbers.get('clip_low', 0) > 1 and numbers['clip_low'] != numbers.get('clip_high'):
        remedy = 'bounds nothing: a ratio is never below 0; choose at most 1, or clip_high for one bound of both sides'
        raise BadInput('algorithm.clip_low', numbers['clip_low'], remedy)
