"""An algorithm is a value: a NamedTuple of small functions, which `make` puts together from a config section."""

from collections.abc import Callable, Mapping
import inspect
import math
from typing import Annotated, Any, NamedTuple

from jaxtyping import Float

from grpo_jax import ranges, user_files
from grpo_jax.algorithms import (
    advantages,
    checks,
    corrections,
    kl,
    pieces,
    ratios,
    regularizers,
    selections,
    surrogates,
    weights,
)
from grpo_jax.ranges import Coefficient, Fixed, Natural, NoKey, NotNegative, PositiveShare, Range, ReadWith, Share
from grpo_jax.types import Array

# config key -> the module from whose functions it chooses
MODULES = {
    'advantage': advantages,
    'ratio': ratios,
    'surrogate': surrogates,
    'kl': kl,
    'weights': weights,
    'correction': corrections,
    'selection': selections,
    'regularizers': regularizers,
}


def _regularized(name, *others):
    """The ReadWith of a number that counts only if a regularizer reads `name`, or a piece reads one of `others`."""
    return ReadWith('.reads', (name, *others), f'a regularizer that reads {name}')


VALUED = ReadWith('.needs_values', words='an advantage that reads values')
DISCOUNTED = ReadWith('.advantage_reads', ('discount', 'values'), 'an advantage that reads discount or values')
AVERAGED = ReadWith('.baselines', words='an advantage that reads run_baseline or prompt_baselines')


class Algorithm(NamedTuple):
    """The pieces of a policy-gradient method; replace one with `algorithm._replace(surrogate=mine)`.

    A piece's positional parameters name the data that it reads (see pieces); the docstring of each module of pieces
    lists the data that its pieces may read.
    """

    advantage: Fixed[Callable] = advantages.group_norm  # worth of a completion among others: f64[P, G] or f64[P, G, C]
    ratio: Fixed[Callable] = ratios.token  # the policy's probability over ratio_base's, by token or by row: f32[B, C]
    surrogate: Fixed[Callable] = surrogates.clip  # the policy loss of a token, with its trust region: f32[B, C]
    weights: Fixed[Callable] = weights.sequence_mean  # how the losses of tokens add up: f32[B, C]
    kl: Fixed[Callable] = kl.none  # estimator of the KL to the reference, weighted by kl_coef: f32[B, C]
    kl_coef: Coefficient = 0.0  # weight of `kl`, 0 where kl is none; above 0 a reference policy is kept
    # where the KL counts: loss; reward_sequence, subtracted from a completion's reward; reward_token, from each token's
    # reward, or from its advantage where the advantage reads no token_rewards
    kl_placement: Fixed[str] = 'loss'
    # the correction also weighs the KL term of the loss
    kl_corrected: Annotated[Fixed[bool], ReadWith('.corrects_kl', words='a correction and a kl in the loss')] = False
    regularizers: Fixed[tuple[Callable, ...]] = ()  # further terms of the loss: f32[B, C] each, added
    # factors of the surrogate, against logprobs of the sampler that differ from the learner's: f32[B, C]
    correction: Fixed[Callable] = corrections.none
    selection: Fixed[Callable] = selections.all_tokens  # tokens on which the surrogate acts: f32[B, C], 1 or 0
    ratio_base: Fixed[str] = 'old'  # logprobs that the ratio is taken to: old, or sampler (then without a correction)
    # tokens that the weights count: all, or selected (and corrected to above 0)
    denominator: Fixed[str] = 'all'
    dead_groups: NoKey[str] = 'keep'  # what becomes of groups that are dead
    gate: NoKey[str] = 'reward'  # what says that a group is dead: see group_math.judge_groups
    source: NoKey[str] = 'policy'  # of completions: policy, reference, demonstrations, pairs
    # discount factor by token, gamma, of an advantage that reads it and of the returns that a critic learns
    discount: Annotated[Share, DISCOUNTED] = 1.0
    critic_lambda: Annotated[Share, VALUED] = 0.95  # lambda of the returns that the critic learns
    critic_warmup: Annotated[Natural, VALUED] = 0  # steps at the start in which the critic learns alone
    # how far a critic's value may move in a step without more loss; 0: any
    value_clip: Annotated[NotNegative, VALUED] = 0.2
    # of advantages moving_mean, prompt_moving_mean: weight of a reward relative to the next one; 1: the mean of all
    # rewards; 0: the newest alone
    baseline_decay: Annotated[Share, AVERAGED] = 0.9
    advantage_clip: NotNegative = 0.0  # bound of |A|; 0: none
    teacher_coef: Coefficient = 0.0  # weight of the teacher's logprob less the policy's in a token's advantage
    # of regularizer distill: likeliest tokens that its KL sums over; 0: the sampled token alone
    teacher_top_k: Annotated[Natural, _regularized('teacher_kl')] = 0
    # share of tokens on which clip_cov and kl_cov act
    covariance_share: Annotated[PositiveShare, _regularized('top_covariance', 'covariance')] = 2e-4
    # weight of regularizer entropy_bonus; below 0 it pays for a narrow distribution
    entropy_coef: Annotated[float, Range(least=-1e6, most=1e6), _regularized('entropy_coef')] = 0.0
    entropy_target: Annotated[float, Range(least=0, most=100)] = 0.0  # nats that entropy_coef adapts to; 0: constant
    # change of entropy_coef a step
    entropy_delta: Annotated[
        float, Range(above=0, most=1e6), ReadWith('.entropy_target', words='an entropy_target above 0')
    ] = 0.005
    kl_target: Annotated[float, Range(least=0, most=1e3)] = 0.0  # nats a token that kl_coef adapts to; 0: constant
    # completions in which kl_coef may change by a fifth, about
    kl_horizon: Annotated[float, Range(least=1, most=1e12), ReadWith('.kl_target', words='a kl_target above 0')] = 1e4

    def chosen(self, key: str) -> tuple[Callable, ...]:
        """The algorithm's pieces under a key of MODULES, as a tuple: one piece, or for regularizers any number."""
        pieces_of_key = getattr(self, key)
        return pieces_of_key if isinstance(pieces_of_key, tuple) else (pieces_of_key,)

    @property
    def reads(self) -> set[str]:
        """Names of the data that the pieces on the device read, without the data that weights read."""
        on_device = (self.ratio, self.surrogate, self.kl, self.correction, self.selection, *self.regularizers)
        return {name for piece in on_device for name in pieces.reads(piece)}

    @property
    def needs_entropy_gradient(self) -> bool:
        """Whether the learner must differentiate the entropy."""
        return 'entropy' in self.reads

    @property
    def needs_reference(self) -> bool:
        """Whether a piece reads the reference policy's logprobs."""
        return 'ref_logprobs' in self.reads

    @property
    def advantage_reads(self) -> set[str]:
        """Names of the data that the advantage reads on the host."""
        return set(pieces.reads(self.advantage))

    @property
    def learns_from(self) -> tuple[str, ...]:
        """Which of reward, correct, parts, step_rewards, kl, teacher the advantage depends on; () if it is constant."""
        reads, names = self.advantage_reads, []
        if {'rewards', 'token_rewards'} & reads and not pieces.property_of(self.advantage, 'unrewarded'):
            names.append('reward')
        names += [name for name in ('correct', 'parts', 'step_rewards') if name in reads]
        names += ['kl'] * (self.kl_placement != 'loss')
        return (*names, *('teacher',) * bool(self.teacher_coef or 'teacher_logprobs' in reads))

    @property
    def baselines(self) -> tuple[str, ...]:
        """Names of the moving averages of rewards that the run must keep for the advantage."""
        if 'prompt_baselines' in self.advantage_reads:
            return ('run_baseline', 'prompt_baselines')  # a new prompt has the run's
        return ('run_baseline',) * ('run_baseline' in self.advantage_reads)

    @property
    def needs_values(self) -> bool:
        """Whether the advantage reads values, so that there must be a critic."""
        return 'values' in self.advantage_reads

    @property
    def needs_steps(self) -> bool:
        """Whether the advantage reads step_rewards, the rewards of a completion's steps."""
        return 'step_rewards' in self.advantage_reads

    @property
    def corrects_kl(self) -> bool:
        """Whether the loss has a KL term and a correction, which may weigh that term too."""
        return self.kl_coef > 0 and self.kl_placement == 'loss' and pieces.name_of(self.correction) != 'none'

    @property
    def takes_kl_off(self) -> bool:
        """Whether each token's KL is subtracted from its advantage.

        This is so for kl_placement reward_token, unless the advantage reads token_rewards, which contain the KL. Each
        token then pays for its own KL, and not for the KL of the tokens that follow it.
        """
        return self.kl_placement == 'reward_token' and 'token_rewards' not in self.advantage_reads

    @property
    def keeps_reference(self) -> bool:
        """Whether the algorithm needs a reference policy in the state, for logprobs or to sample from it."""
        return self.needs_reference or self.source == 'reference'

    @property
    def drops_dead_groups(self) -> bool:
        """Whether tokens of dead groups leave the completion mask, and so every denominator."""
        return self.dead_groups in ('drop', 'resample', 'replay')

    @property
    def needs_teacher(self) -> bool:
        """Whether the advantage or the loss reads a teacher's logprobs of the rollout."""
        return self.teacher_coef > 0 or 'teacher_kl' in self.reads or 'teacher_logprobs' in self.advantage_reads

    def needed_logprobs(self, updates: int) -> set[str]:
        """Returns which of old_logprobs, ref_logprobs and old_entropy must be computed before the update.

        updates: optimizer updates on one rollout. With one, the policy in the update is still the old policy, so
        old_logprobs are among the names only where something reads them before the update.
        """
        before = {*pieces.reads(self.selection), *self.advantage_reads, *(self.reads & {'top_covariance'})}
        if self.denominator == 'selected':
            before |= {*pieces.reads(self.correction)}
        needed = {'old_entropy'} & before
        if (
            before & {'old_logprobs', 'log_rho', 'covariance', 'top_covariance'}
            or self.kl_placement != 'loss'
            or self.teacher_coef
            or (updates > 1 and self.ratio_base == 'old')
        ):
            needed.add('old_logprobs')
        if self.needs_reference:
            needed.add('ref_logprobs')
        return needed

    @property
    def coefficients(self) -> dict[str, float]:
        """The numbers that may change during a run, by name, with their values at the start."""
        coefficients = {'kl_coef': self.kl_coef, 'entropy_coef': self.entropy_coef}
        return coefficients | ({'entropy_acts': 1.0} if self.entropy_target else {})

    @property
    def adapting(self) -> tuple[str, ...]:
        """The names of the coefficients that this algorithm changes during a run."""
        return ('kl_coef',) * bool(self.kl_target) + ('entropy_coef', 'entropy_acts') * bool(self.entropy_target)


def default_numbers() -> dict[str, Any]:
    """Returns {name: default} of the numbers of all pieces; numbers without a default are left out."""
    all_pieces = (piece for module in MODULES.values() for piece in pieces.list_pieces(module).values())
    numbers = {name: value for piece in all_pieces for name, value in pieces.numbers(piece).items()}
    return {name: value for name, value in numbers.items() if value is not inspect.Parameter.empty}


def make(section: Any, collection: Any = None) -> Algorithm:
    """Makes the Algorithm of config.algorithm, which names pieces and lists numbers.

    A piece's keyword-only arguments are bound to the section's keys of the same names. collection: config.collection,
    which sets dead_groups, gate and source; None: their defaults. Raises BadInput for a missing key, an unknown piece,
    a value out of its range, a combination that cannot work, and what refuse_unused_numbers and refuse_misplaced_keys
    refuse.
    """
    checks.refuse_misplaced_keys(section)
    for key, value in ranges.take(section, list(MODULES), 'algorithm').items():
        ranges.check_value(f'algorithm.{key}', value, tuple[str, ...] if key == 'regularizers' else str)
    chosen_pieces: dict[str, Any] = {
        key: pieces.choose(module, key, section[key], section)
        for key, module in MODULES.items()
        if key != 'regularizers'
    }
    chosen_pieces['regularizers'] = tuple(
        pieces.choose(regularizers, 'regularizers', name, section) for name in section['regularizers']
    )
    numbers = {name: section[name] for name in Algorithm._fields if name not in chosen_pieces and name in section}
    if collection is not None:
        numbers |= {name: collection[name] for name in checks.SECTIONS}
    algorithm = Algorithm(**chosen_pieces, **numbers)
    checks.check(algorithm)
    checks.refuse_unused_numbers(algorithm, section, MODULES)
    return algorithm


def describe_pieces(algorithm: Algorithm) -> dict[str, list[dict[str, str]]]:
    """What a run records of its pieces: {key of MODULES: [pieces.describe(piece), ...]}."""
    return {key: list(map(pieces.describe, algorithm.chosen(key))) for key in MODULES}


def to_section(algorithm: Algorithm) -> dict[str, Any]:
    """The section config.algorithm that says what an Algorithm is: names of pieces, and all numbers, by key.

    A value that a config cannot hold, such as an infinity or an array, stands there as its repr.
    """
    section = {name: x for name, x in algorithm._asdict().items() if name not in (*MODULES, *checks.SECTIONS)}
    for key in MODULES:
        names = tuple(map(pieces.full_name, algorithm.chosen(key)))
        for piece in algorithm.chosen(key):
            section |= pieces.numbers(piece)
        section[key] = names if key == 'regularizers' else names[0]
    for name, x in section.items():  # a config holds no infinity and no array
        if not isinstance(x, (bool, int, float, str, tuple)) or x in (math.inf, -math.inf):
            section[name] = repr(x)
    return section


def piece_files(section: Any) -> list[tuple[str, str]]:
    """(key, FILE.py:NAME) of each piece that config.algorithm (`section`) takes from a user's file."""
    values = [(key, section[key]) for key in MODULES]
    named = [(key, name) for key, x in values for name in (x if isinstance(x, (tuple, list)) else [x])]
    return [(key, name) for key, name in named if user_files.is_file(name)]


def file_numbers(section: Any) -> dict[str, Any]:
    """{name: default} of the numbers of a section's pieces in users' files; BadInput if a file cannot be loaded."""
    files = [user_files.load_function(f'algorithm.{key}', name) for key, name in piece_files(section)]
    return {number: default for piece in files for number, default in pieces.numbers(piece).items()}


def adapt(
    algorithm: Algorithm, coefficients: Mapping[str, float | Float[Array, '']], metrics: Mapping[str, Any], rows: int
) -> dict[str, Any]:
    """Returns the coefficients after a step, by name, from the coefficients before, and the step's metrics and rows.

    With a kl_target, kl_coef is multiplied by 1 + clip(kl / target - 1, +-0.2) rows / horizon (arXiv 1909.08593,
    section 2.2). With an entropy_target, entropy_coef rises by entropy_delta after a step with an entropy at or below
    the target, and entropy_acts is 1; after any other step entropy_coef falls as much, to 0 at least, and entropy_acts
    is 0 (arXiv 2505.22312, section 4.3).
    """
    adapted = dict(coefficients)
    if algorithm.kl_target:
        error = (metrics['kl_ref'] / algorithm.kl_target - 1).clip(-0.2, 0.2)
        adapted['kl_coef'] = coefficients['kl_coef'] * (1 + error * rows / algorithm.kl_horizon)
    if algorithm.entropy_target:
        low = metrics['entropy'] <= algorithm.entropy_target
        change = (2.0 * low - 1.0) * algorithm.entropy_delta
        adapted['entropy_coef'] = (coefficients['entropy_coef'] + change).clip(0.0)
        adapted['entropy_acts'] = 1.0 * low
    return adapted
