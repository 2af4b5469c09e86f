"""The learner's options: config.learner as a typed value."""

from collections.abc import Set
from typing import Annotated, Any, NamedTuple

from grpo_jax import ranges
from grpo_jax.models import transformer
from grpo_jax.models.lora import OFF, LoraOptions
from grpo_jax.ranges import Count, Natural, NotNegative, OneOf

OFFLOADABLE = ('optimizer', 'reference')


class Minibatching(NamedTuple):
    """How a batch is cut into optimizer updates, and where the optimizer's moments lie between them."""

    group_size: int = 1  # rows that stay together
    epochs: int = 1
    minibatches: int = 1
    offload: bool = False  # the moments lie in the hosts' memory


class ExtraMetrics(NamedTuple):
    """What a learner measures and does not learn from."""

    outcomes: bool = False  # the policy on right and on wrong completions, by Experience.correct
    reference: bool = False  # the KL to a reference that no penalty reads


NOTHING = ExtraMetrics()


class Learning(NamedTuple):
    """How an update is cut and computed.

    The result depends on epochs, minibatches, dtype, lora, old_logprobs, temperature, value_clip, critic_warmup alone.
    """

    epochs: Annotated[int, ranges.Range(least=1, most=10_000)] = 1  # passes over a step's rollout
    minibatches: Count = 1  # optimizer updates a pass
    microbatches: Count = 1  # gradients that add up to one update
    pack_columns: Annotated[int, ranges.Range(least=-1, most=2**31 - 1)] = -1  # tokens of a packed row; see packs
    pack_rows: Count = 1  # packed rows of a microbatch on each device
    chunk: Natural = 0  # tokens whose logits exist at once, at most; 0: see programs.choose_chunk
    attention: Annotated[str, OneOf(('auto', 'splash', 'xla'))] = 'auto'  # how it is computed; see partition
    remat: Annotated[str, OneOf(tuple(transformer.REMAT))] = 'none'
    offload: frozenset[Annotated[str, OneOf(OFFLOADABLE)]] = frozenset()  # what waits in the hosts' memory
    old_logprobs: Annotated[str, OneOf(('forward', 'decode'))] = 'forward'  # by which programs
    dtype: str = 'float32'  # of computation, and of what adapters leave frozen
    lora: LoraOptions = OFF  # adapters, which alone are trained then
    temperature: float = 1.0  # logprobs are those of softmax(logits / temperature)
    value_clip: NotNegative = 0.0  # how far a critic's value may move in a step without more loss; 0: any
    critic_warmup: Natural = 0  # steps at the start in which the critic learns alone
    max_bad_steps: Natural = 10  # skipped updates that stop the run

    @classmethod
    def from_config(cls, section, **others):
        """Learning of config.learner; others are its fields that stand elsewhere. BadInput for what cannot work."""
        values: dict[str, Any] = ranges.read_section(cls, section, 'learner', elsewhere=list(others)) | others
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

    def scored_fields(self, needed: Set[str]) -> set[str]:
        """The fields of Experience that the learner computes before the update, of those that an algorithm needs."""
        # an update moves the decoded logprobs by as much as its own have moved, see update.anchored
        return {*needed} - {*self.decoded} | ({'forward_logprobs'} if self.decoded and self.updates > 1 else set())

    def known_fields(self, needed: Set[str]) -> set[str]:
        """The fields of Experience that are known before the update, whoever computes them."""
        return {*needed} | self.scored_fields(needed) | {*self.decoded[:1]}

    def cut(self, group_size: int) -> Minibatching:
        """The Minibatching of a batch of groups."""
        return Minibatching(group_size, self.epochs, self.minibatches, 'optimizer' in self.offload)
