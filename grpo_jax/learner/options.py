"""The learner's options: config.learner as a typed value."""

from typing import Any, NamedTuple

from grpo_jax.errors import BadInput
from grpo_jax.models import transformer

OFFLOADABLE = ('optimizer', 'reference')


class Cut(NamedTuple):
    """How a batch is cut into optimizer updates, and where the optimizer's moments lie between them."""

    group_size: int = 1  # rows that stay together
    epochs: int = 1
    minibatches: int = 1
    offload: bool = False  # the moments lie in the hosts' memory


class Learning(NamedTuple):
    """How an update is cut and computed.

    The result depends on epochs, minibatches, dtype, temperature, value_clip and critic_warmup alone.
    """

    epochs: int = 1  # passes over a step's rollout
    minibatches: int = 1  # optimizer updates a pass
    microbatches: int = 1  # gradients that add up to one update
    pack_columns: int = 0  # tokens of a packed row; 0: rows are padded
    pack_rows: int = 1  # packed rows of a microbatch on each device
    chunk: int = 4096  # tokens whose logits exist at once
    remat: str = 'none'  # a name of transformer.REMAT
    offload: frozenset[str] = frozenset()  # what waits in the hosts' memory, of OFFLOADABLE
    dtype: str = 'float32'  # of computation
    temperature: float = 1.0  # logprobs are those of softmax(logits / temperature)
    value_clip: float = 0.0  # how far a critic's value may move in a step without more loss; 0: any
    critic_warmup: int = 0  # steps at the start in which the critic learns alone
    max_bad_steps: int = 10  # skipped updates that stop the run

    @classmethod
    def from_config(cls, section, **others):
        """Learning of config.learner; others are its fields that stand elsewhere. BadInput for what cannot work."""
        values: dict[str, Any] = {name: section[name] for name in cls._fields if name in section} | others
        values['offload'] = frozenset(section['offload'])
        learning = cls(**values)
        if learning.remat not in transformer.REMAT:
            raise BadInput('learner.remat', learning.remat, 'choose ' + ', '.join(transformer.REMAT))
        if learning.offload - set(OFFLOADABLE):
            raise BadInput('learner.offload', section['offload'], 'choose from optimizer and reference')
        for name in ('epochs', 'minibatches', 'microbatches', 'chunk'):
            if getattr(learning, name) < 1:
                raise BadInput(f'learner.{name}', getattr(learning, name), 'must be at least 1')
        return learning

    @property
    def updates(self) -> int:
        """Optimizer updates on one rollout."""
        return self.epochs * self.minibatches

    def cut(self, group_size: int) -> Cut:
        """The Cut of a batch of groups."""
        return Cut(group_size, self.epochs, self.minibatches, 'optimizer' in self.offload)
