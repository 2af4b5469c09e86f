"""The learner's options: config.learner as a typed value."""

from collections.abc import Set
from typing import Annotated, Any, NamedTuple

from grpo_jax import ranges
from grpo_jax.models import transformer
from grpo_jax.models.lora import OFF, LoraOptions
from grpo_jax.ranges import Amendable, Count, Free, Natural, NoKey, OneOf, Range

OFFLOADABLE = ('optimizer', 'reference')


class Cut(NamedTuple):
    """How a batch is cut into optimizer updates, and where the optimizer's moments lie between them."""

    group_size: int = 1  # rows that stay together
    epochs: int = 1
    minibatches: int = 1
    offload: bool = False  # the moments lie in the hosts' memory


class Observed(NamedTuple):
    """What a learner measures and does not learn from."""

    outcomes: bool = False  # the policy on right and on wrong completions, by Experience.correct
    reference: bool = False  # the KL to a reference that no penalty reads


NOTHING = Observed()


class Learning(NamedTuple):
    """How an update is cut and computed.

    The result depends on epochs, minibatches, dtype, lora, old_logprobs, temperature, value_clip, critic_warmup alone.
    """

    epochs: Amendable[Annotated[int, Range(least=1, most=10_000)]] = 1  # passes over a step's rollout
    minibatches: Amendable[Count] = 1  # optimizer updates a pass
    microbatches: Free[Count] = 1  # gradients that add up to one update, of padded rows; above 1 rows are padded
    # tokens of a packed row: prompts once, their completions behind; -1: chosen by the step's sizes; 0: rows are
    # padded; above 0 `microbatches` cuts a critic's rows alone
    pack_columns: Free[Annotated[int, Range(least=-1, most=2**31 - 1)]] = -1
    pack_rows: Free[Count] = 1  # packed rows of a microbatch on each device
    # tokens whose logits exist at once, at most; 0: as many as take a 32nd of a chip's memory, from 128 to 4096
    chunk: Free[Natural] = 0
    # splash: in kernels, whose scores stay on the chip; xla; auto: splash on TPUs, cuDNN's kernels on NVIDIA GPUs,
    # where they can
    attention: Free[Annotated[str, OneOf(('auto', 'splash', 'xla'))]] = 'auto'
    # computed again in the backward pass: none; dots (all of a layer but products with weights), full (whole layers)
    remat: Free[Annotated[str, OneOf(tuple(transformer.REMAT))]] = 'none'
    # waits in the hosts' memory until it is used: optimizer, reference
    offload: Free[frozenset[Annotated[str, OneOf(OFFLOADABLE)]]] = frozenset()
    # of a step's rollout: forward, in one pass; decode, by the sampler's programs again, token by token, bit-equal to
    # the sampler's own
    old_logprobs: Amendable[Annotated[str, OneOf(('forward', 'decode'))]] = 'forward'
    dtype: NoKey[str] = 'float32'  # of computation, and of what adapters leave frozen
    lora: NoKey[LoraOptions] = OFF  # adapters, which alone are trained then
    temperature: NoKey[float] = 1.0  # logprobs are those of softmax(logits / temperature)
    value_clip: NoKey[float] = 0.0  # how far a critic's value may move in a step without more loss; 0: any
    critic_warmup: NoKey[int] = 0  # steps at the start in which the critic learns alone
    max_bad_steps: Free[Natural] = 10  # more non-finite updates than this, in the whole run, stop it

    @classmethod
    def from_config(cls, section, **others):
        """Learning of config.learner; others are its fields that are no keys. BadInput for what cannot work."""
        values: dict[str, Any] = ranges.read_section(cls, section, 'learner') | others
        values['offload'] = frozenset(values['offload'])
        return cls(**values)

    @property
    def packs(self) -> bool:
        """Whether rows are packed: where pack_columns is above 0, or -1 and no microbatches are asked for."""
        return self.pack_columns > 0 or (self.pack_columns < 0 and self.microbatches == 1)

    @property
    def updates(self) -> int:
        """Optimizer updates on one rollout."""
        return self.epochs * self.minibatches

    @property
    def decoded(self) -> tuple[str, ...]:
        """The fields of Experience that the sampler's programs compute, where an algorithm needs them."""
        return ('old_logprobs', 'ref_logprobs') if self.old_logprobs == 'decode' else ()

    def computed_first(self, needed: Set[str]) -> set[str]:
        """The fields of Experience that the learner computes before the update, of those that an algorithm needs."""
        # an update moves the decoded logprobs by as much as its own have moved, see update.anchored
        return {*needed} - {*self.decoded} | ({'forward_logprobs'} if self.decoded and self.updates > 1 else set())

    def known_first(self, needed: Set[str]) -> set[str]:
        """The fields of Experience that are known before the update, whoever computes them."""
        return {*needed} | self.computed_first(needed) | {*self.decoded[:1]}

    def cut(self, group_size: int) -> Cut:
        """The Cut of a batch of groups."""
        return Cut(group_size, self.epochs, self.minibatches, 'optimizer' in self.offload)
