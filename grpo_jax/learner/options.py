"""The learner's options, config.learner as a typed value; and the optimizer, AdamW under a schedule."""

from collections.abc import Set
from typing import Annotated, Any, NamedTuple

import jax
import optax

from grpo_jax import ranges
from grpo_jax.errors import BadInput
from grpo_jax.models import transformer
from grpo_jax.models.linear import SUMMED_AXES
from grpo_jax.models.lora import OFF, LoraOptions
from grpo_jax.ranges import Amendable, Count, Free, Natural, NoKey, OneOf, Positive, Range, ReadWith, Share

OFFLOADABLE = ('optimizer', 'reference')
SCHEDULES = ('constant', 'cosine', 'linear')  # after warm-up
PACKED = ReadWith('.packs', words='packed rows (learner.pack_columns above 0, or -1 with learner.microbatches=1)')
Decay = Annotated[float, Range(least=0, most=0.999999)]  # nearer to 1, float32 has 1 - b as 0


class Minibatching(NamedTuple):
    """How a batch is cut into optimizer updates, and where the optimizer's moments lie between them."""

    group_size: int = 1  # rows that stay together
    epochs: int = 1
    minibatches: int = 1
    offload: bool = False  # the moments lie in the hosts' memory


class ExtraMetrics(NamedTuple):
    """Which metrics a learner computes beside the metrics of its loss."""

    outcomes: bool = False  # the policy on right and on wrong completions, by Experience.correct
    reference: bool = False  # the KL to a reference that no penalty reads
    ages: bool = False  # the correction by age of tokens, where earlier policies have sampled some


NOTHING = ExtraMetrics()


class Learning(NamedTuple):
    """config.learner: how an update is cut into minibatches and microbatches, and how it is computed.

    Apart from rounding, only epochs, minibatches, dtype, lora, old_logprobs, temperature, value_clip and critic_warmup
    change the result.
    """

    epochs: Amendable[Annotated[int, Range(least=1, most=10_000)]] = 1  # passes over a step's rollout
    minibatches: Amendable[Count] = 1  # optimizer updates a pass
    # gradients that add up to one update, where rows are padded; above 1 rows are padded where pack_columns is -1
    microbatches: Free[Count] = 1
    # tokens of a packed row: prompts once, then their completions; -1: chosen by the step's sizes; 0: rows are
    # padded; above 0 `microbatches` cuts a critic's rows alone
    pack_columns: Free[Annotated[int, Range(least=-1, most=2**31 - 1)]] = -1
    # packed rows of a microbatch on each device
    pack_rows: Annotated[Free[Count], PACKED] = 1
    # tokens whose logits exist at once, at most; 0: as many as take a 32nd of a chip's memory, from 128 to 4096
    chunk: Free[Natural] = 0
    # splash: in kernels, whose scores stay on the chip; xla; auto: splash on TPUs, cuDNN's kernels on NVIDIA GPUs,
    # where they can
    attention: Free[Annotated[str, OneOf(('auto', 'splash', 'xla'))]] = 'auto'
    # computed again in the backward pass: none; dots (all of a layer but products with weights), full (whole layers)
    remat: Free[Annotated[str, OneOf(tuple(transformer.REMAT))]] = 'none'
    # lie in the hosts' memory until they are used: optimizer, its moments; reference, its parameters
    offload: Free[frozenset[Annotated[str, OneOf(OFFLOADABLE)]]] = frozenset()
    # how a rollout's old_logprobs are computed: forward, in one pass of the learner; decode, by the sampler's programs,
    # token by token, bit-equal to the sampler's logprobs
    old_logprobs: Amendable[Annotated[str, OneOf(('forward', 'decode'))]] = 'forward'
    dtype: NoKey[str] = 'float32'  # of computation, and of what adapters leave frozen
    lora: NoKey[LoraOptions] = OFF  # adapters, which alone are trained then
    temperature: NoKey[float] = 1.0  # logits are divided by it before softmax
    value_clip: NoKey[float] = 0.0  # how far a critic's value may move in a step without more loss; 0: any
    critic_warmup: NoKey[int] = 0  # steps at the start in which the critic learns alone
    max_bad_steps: Free[Natural] = 10  # updates skipped in the whole run, the critic's too, above which the run stops

    @classmethod
    def from_config(cls, section, **others):
        """Reads config.learner; others: fields that are not keys of it. BadInput for a missing or wrong value."""
        values: dict[str, Any] = ranges.read_section(cls, section, 'learner') | others
        values['offload'] = frozenset(values['offload'])
        return cls(**values)

    @property
    def packs(self) -> bool:
        """Whether rows are packed: where pack_columns is above 0, or is -1 and microbatches is 1."""
        return self.pack_columns > 0 or (self.pack_columns < 0 and self.microbatches == 1)

    @property
    def updates(self) -> int:
        """The number of optimizer updates on one rollout: epochs times minibatches."""
        return self.epochs * self.minibatches

    @property
    def decoded_fields(self) -> tuple[str, ...]:
        """The fields of Experience that the sampler's programs compute, where an algorithm needs them."""
        return ('old_logprobs', 'ref_logprobs') if self.old_logprobs == 'decode' else ()

    def scored_fields(self, needed: Set[str]) -> set[str]:
        """The fields of Experience that the learner computes before the update; needed: Algorithm.needed_logprobs.

        With old_logprobs 'decode', what the sampler's programs compute is left out, and forward_logprobs is added where
        a step has several updates.
        """
        # an update moves the decoded logprobs by as much as its own have moved, see update.anchor_logprobs
        decoded = {*self.decoded_fields}
        return {*needed} - decoded | ({'forward_logprobs'} if decoded and self.updates > 1 else set())

    def known_fields(self, needed: Set[str]) -> set[str]:
        """The fields of Experience that learner or sampler compute before an update; needed: as in scored_fields."""
        return {*needed} | self.scored_fields(needed) | {*self.decoded_fields[:1]}

    def minibatching(self, group_size: int) -> Minibatching:
        """The Minibatching of a batch in groups of group_size rows."""
        return Minibatching(group_size, self.epochs, self.minibatches, 'optimizer' in self.offload)


class Optimization(NamedTuple):
    """The numbers of AdamW and its schedule, which counts optimizer updates."""

    learning_rate: Annotated[float, Range(least=0, most=10)] = 1e-6  # of AdamW, after warm-up
    schedule: Annotated[str, OneOf(SCHEDULES)] = 'constant'  # after warm-up: constant, linear or cosine to zero
    warmup: Natural = 0  # updates at the start, over which the learning rate rises
    warmup_ratio: Share = 0.0  # the same as a share of all updates, where warmup is 0
    b1: Decay = 0.9  # of AdamW's mean of gradients
    b2: Decay = 0.95  # of AdamW's mean of their squares
    eps: Annotated[float, Range(above=0, most=1)] = 1e-8  # of AdamW's divisor
    # of AdamW, on the parameters that the key decays names
    weight_decay: Annotated[float, Range(least=0, most=10)] = 0.0
    # parameters that decay: all, or matrices, which leaves out norms, biases and a value head
    decays: Annotated[str, OneOf(('all', 'matrices')), ReadWith('.weight_decay')] = 'all'
    max_grad_norm: Positive = 1.0  # norm to which longer gradients are scaled down

    @classmethod
    def from_config(cls, section, name='optimizer'):
        """Reads the config's section `name`; raises BadInput for a missing or wrong value, and two warm-ups."""
        options = cls(**ranges.read_section(cls, section, name))
        if options.warmup and options.warmup_ratio:
            remedy = f'is a second warm-up beside {name}.warmup = {options.warmup}; set one of the two to 0'
            raise BadInput(f'{name}.warmup_ratio', options.warmup_ratio, remedy)
        return options


class Optimizers(NamedTuple):
    """The optimizers of a run's policy and critic."""

    policy: optax.GradientTransformation
    critic: optax.GradientTransformation | None = None
    learning_rate: optax.Schedule | None = None  # of `policy`; metrics have the rate, unless it is None


def build_optimizer(optimization: Optimization, updates: int) -> optax.GradientTransformation:
    """Returns AdamW with learning_rates for `updates` optimizer updates, on gradients clipped to max_grad_norm."""
    return optax.chain(
        optax.clip_by_global_norm(optimization.max_grad_norm),
        optax.adamw(
            learning_rates(optimization, updates),
            b1=optimization.b1,
            b2=optimization.b2,
            eps=optimization.eps,
            weight_decay=optimization.weight_decay,
            mask=_find_matrices if optimization.weight_decay and optimization.decays == 'matrices' else None,
        ),
    )


def _find_matrices(params):
    """A tree of bools: which parameters are matrices, or adapters of matrices."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: any(getattr(key, 'key', None) in SUMMED_AXES for key in path), params
    )


def applied_updates(opt_state: optax.OptState) -> Any:
    """How many updates an optimizer of build_optimizer has made, i32[]; skipped ones do not count."""
    return optax.tree_utils.tree_get_all_with_path(opt_state, 'count')[-1][1]


def learning_rates(optimization: Optimization, updates: int) -> optax.Schedule:
    """The learning rate by update: a linear warm-up, then constant, or falling linearly or as a cosine to 0."""
    peak, warmup = optimization.learning_rate, optimization.warmup or round(optimization.warmup_ratio * updates)
    rest = max(updates - warmup, 1)
    decays = {
        'constant': lambda: optax.constant_schedule(peak),
        'linear': lambda: optax.linear_schedule(peak, 0.0, rest),
        'cosine': lambda: optax.cosine_decay_schedule(peak, rest),
    }
    # from peak / warmup, not 0: the first update of a run must count
    ramp = optax.linear_schedule(peak / max(warmup, 1), peak, max(warmup - 1, 1))
    return optax.join_schedules([ramp, decays[optimization.schedule]()], [warmup])
