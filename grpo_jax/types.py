"""The values that flow through a step: Example -> Prompts -> Rollout -> Experience -> TrainState.

Axis letters (used in every shape of this package): P prompts, G group, B = P*G rows, Q prompt columns (left-padded),
C completion columns, T = Q + C, S cache columns, V vocabulary, L layers, D width, F mlp, N query heads, K kv heads,
H head dim.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar, no_type_check

from flax import struct
import jax
from jaxtyping import Bool, Float, Int
import numpy as np

from grpo_jax.example import Example as Example

if TYPE_CHECKING:
    from jaxtyping import Array as Array
else:
    Array = jax.Array | np.ndarray  # in signatures: JAX takes NumPy's arrays wherever it takes its own

T = TypeVar('T')


class Pytree:
    """The base of every pytree: what `pytree` adds to it, for type checkers."""

    if TYPE_CHECKING:

        def __init__(self, *leaves: Any, **named_leaves: Any): ...

        def replace(self, **leaves: Any) -> Self:
            """A copy with other leaves."""
            ...


def pytree(cls: type[T]) -> type[T]:
    """The class as a frozen dataclass that is a tree of its fields to JAX.

    Its fields are not checked: JAX puts shardings and abstract shapes in the places of arrays.
    """
    return no_type_check(struct.dataclass(cls))


@pytree
class Prompts(Pytree):
    """Tokenized prompts, left-padded."""

    tokens: Int[Array, 'P Q']
    mask: Bool[Array, 'P Q']
    ids: Int[Array, ' P']
    first: Int[Array, ' P'] | None = None  # number of a prompt's first sample here; None: 0, it has no earlier ones


@pytree
class Rollout(Pytree):
    """Sampled completions; rows are grouped by prompt: row b belongs to prompt b // G."""

    tokens: Int[Array, 'B T']  # prompt (left-padded), then completion (right-padded)
    prompt_mask: Bool[Array, 'B Q']
    completion_mask: Bool[Array, 'B C']  # tokens of the completion, the stop token included
    forced: Bool[Array, 'B C']  # tokens that were written and not sampled: they carry no loss
    logprobs: Float[Array, 'B C']  # the sampler's log pi_T(token), untruncated; 0 where masked
    truncated: Bool[Array, ' B']  # the budget ended before a stop token came
    version: Int[Array, 'B C']  # step of the weights that sampled the token

    @property
    def loss_mask(self) -> Bool[Array, 'B C']:
        """The sampled tokens."""
        return self.completion_mask & ~self.forced


class HeadOutput(NamedTuple):
    """What a policy says of the tokens of completions; 0 where masked."""

    logprobs: Float[Array, 'B C']  # of the tokens, under softmax(logits / temperature)
    entropy: Float[Array, 'B C'] | None = None  # of that distribution; None: not asked for
    top_logprobs: Float[Array, 'B C k'] | None = None  # of other tokens in the place of each; None: not asked for
    top_ids: Int[Array, 'B C k'] | None = None  # which tokens these are, where the head chooses the likeliest


@pytree
class Experience(Pytree):
    """What an update of the policy learns from: a rollout, its advantages, and logprobs by whom."""

    rollout: Rollout
    advantages: Float[Array, 'B 1'] | Float[Array, 'B C']
    rewards: Float[Array, ' B']
    old_logprobs: Float[Array, 'B C'] | None  # None: on-policy, the ratio is exactly 1
    ref_logprobs: Float[Array, 'B C'] | None  # None: the algorithm has no reference
    group_ids: Int[Array, ' B']
    forward_logprobs: Float[Array, 'B C'] | None = None  # by the learner where old_logprobs are not
    old_entropy: Float[Array, 'B C'] | None = None  # of the policy at the start of the step; None: nothing reads it
    values: Float[Array, 'B C'] | None = None  # of the critic at the start of the step; None: no critic
    returns: Float[Array, 'B C'] | None = None  # what the critic is to learn; NaN where nothing
    teacher_logprobs: Float[Array, 'B C'] | None = None  # None: there is no teacher
    teacher_top: Float[Array, 'B C k'] | None = None  # the teacher's logprobs of its likeliest tokens in each place
    teacher_ids: Int[Array, 'B C k'] | None = None  # which tokens these are
    correct: Float[Array, ' B'] | None = None  # the verifier's 1 right, 0 wrong, NaN unknown; None: as the rewards

    @property
    def loss_mask(self) -> Bool[Array, 'B C']:
        """The tokens that are learned from."""
        return self.rollout.loss_mask


@pytree
class LabelledBatch(Pytree):
    """What an update of a reward model learns from."""

    rollout: Rollout  # of completions that come with the data
    labels: Float[Array, 'B C']  # in [0, 1]
    label_mask: Bool[Array, 'B C']  # tokens that have a label

    @property
    def loss_mask(self) -> Bool[Array, 'B C']:
        """The tokens that are learned from."""
        return self.label_mask


@pytree
class TrainState(Pytree):
    """All that lasts from step to step, and so all that a checkpoint holds.

    Of params and ref_params a checkpoint has what is trained; beside adapters, the frozen weights have a digest there.
    aux has these keys: the first always, the next three for every policy (a cold start has no position), the others
    where the algorithm or the config asks for them:

        bad_steps i32[]        optimizer updates skipped: loss, gradient or result not finite   learner/update.py
        coefficients {f32[]}   kl_coef, entropy_coef, entropy_acts: numbers that may adapt      learner/update.py
        initial_entropy f32[]  of the policy in the first step                                  learner/update.py
        position i32[]         places visited so far in the data's shuffled order                     collect/draw.py
        critic                 its params and opt_state (PPO)                                   learner/critic.py
        tries, hits i32[N]     completions of each example, and right ones (curriculum)         collect/draw.py
        kept                   groups of earlier steps (resample, replay)                       collect/select.py
        history                moving averages of rewards, of the run and of each prompt        learner/experience.py
        probe                  prompts with their first right completions                       run/observers.py
    """

    step: Int[Array, '']  # the next one
    params: Any  # float32 master weights
    opt_state: Any
    ref_params: Any  # of the reference policy: the tree that is trained of params; None: there is none
    aux: dict[str, Any]


class Param(NamedTuple):
    """One row of the table: value at init is offset + scale * normal."""

    shape: tuple
    axes: tuple  # mesh axis, or None, of each dimension
    scale: float
    offset: float = 0.0


def map_table(function: Callable[[str, Param], Any], table: Any) -> Any:
    """The table's tree with function(path, param) at each leaf; path is like 'layers/wq'."""
    return jax.tree_util.tree_map_with_path(
        lambda path, param: function(jax.tree_util.keystr(path, simple=True, separator='/'), param),
        table,
        is_leaf=lambda node: isinstance(node, Param),
    )
