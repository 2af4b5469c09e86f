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
    """The base of every class made by `pytree`; it tells type checkers what the decorator adds."""

    if TYPE_CHECKING:

        def __init__(self, *leaves: Any, **named_leaves: Any): ...

        def replace(self, **leaves: Any) -> Self:
            """Returns a copy with these leaves replaced."""
            ...


def pytree(cls: type[T]) -> type[T]:
    """Decorates a class, which becomes a frozen dataclass that JAX treats as a tree of its fields.

    The fields' types are not checked at run time, since JAX puts shardings and abstract shapes in the places of arrays.
    """
    return no_type_check(struct.dataclass(cls))


@pytree
class Prompts(Pytree):
    """Tokenized prompts, left-padded."""

    tokens: Int[Array, 'P Q']
    mask: Bool[Array, 'P Q']
    ids: Int[Array, ' P']
    first: Int[Array, ' P'] | None = None  # number of the prompt's first sample; None: 0, it has no earlier samples
    # whether the prompt ends inside thinking; None: it does where Sampling.thinking_start is '', and not elsewhere
    thinking: Bool[Array, ' P'] | None = None


@pytree
class Rollout(Pytree):
    """Sampled completions. The rows of a prompt are adjacent: row b belongs to prompt b // G, and is sample b % G.

    Where groups differ in size, G is the unit in which completions are allocated, and a prompt has several units; then
    collect.draw.Draw.grouping says which rows form a group.
    """

    tokens: Int[Array, 'B T']  # prompt (left-padded), then completion (right-padded)
    prompt_mask: Bool[Array, 'B Q']
    completion_mask: Bool[Array, 'B C']  # of the completion and its stop token; False in rows that an Experience drops
    forced: Bool[Array, 'B C']  # tokens that were written and not sampled; they have no loss
    logprobs: Float[Array, 'B C']  # the sampler's log pi_T(token), untruncated; 0 where masked
    truncated: Bool[Array, ' B']  # no stop token or string has come: the budget ended, or the row goes on
    version: Int[Array, 'B C']  # the step whose weights sampled the token; while its draw waits, see collect.schedule

    @property
    def loss_mask(self) -> Bool[Array, 'B C']:
        """True for the completion's tokens that were sampled, and not forced."""
        return self.completion_mask & ~self.forced


class HeadOutput(NamedTuple):
    """Logprobs and entropies that a policy gives completion tokens; 0 where masked."""

    logprobs: Float[Array, 'B C']  # of the tokens, under softmax(logits / temperature)
    entropy: Float[Array, 'B C'] | None = None  # of that distribution, in nats; None: not computed
    top_logprobs: Float[Array, 'B C k'] | None = None  # of k other tokens in each place; None: not computed
    top_ids: Int[Array, 'B C k'] | None = None  # their ids, if the head has chosen the likeliest


# fields [B, C] of HeadOutput: a piece may read them by name. learner/logprobs.py gives all of them; losses.policy_loss
# and meters.py make a HeadOutput of these two alone, so others are None there
HEAD_BY_TOKEN = ('logprobs', 'entropy')


@pytree
class Experience(Pytree):
    """What an update of the policy learns from: a rollout, its advantages, and its tokens' logprobs by policy."""

    rollout: Rollout
    advantages: Float[Array, 'B 1'] | Float[Array, 'B C']
    rewards: Float[Array, ' B']
    old_logprobs: Float[Array, 'B C'] | None  # None: on-policy, the ratio is exactly 1
    ref_logprobs: Float[Array, 'B C'] | None  # None: the algorithm has no reference
    group_ids: Int[Array, ' B']
    # by the learner at the start of the step; needed where the sampler has computed old_logprobs
    forward_logprobs: Float[Array, 'B C'] | None = None
    old_entropy: Float[Array, 'B C'] | None = None  # of the policy at the start of the step; None: nothing reads it
    values: Float[Array, 'B C'] | None = None  # by the critic at the start of the step; None: no critic
    returns: Float[Array, 'B C'] | None = None  # the critic's targets; NaN in rows without one
    teacher_logprobs: Float[Array, 'B C'] | None = None  # None: there is no teacher
    teacher_top: Float[Array, 'B C k'] | None = None  # the teacher's logprobs of its likeliest tokens in each place
    teacher_ids: Int[Array, 'B C k'] | None = None  # the ids of these tokens
    correct: Float[Array, ' B'] | None = None  # by the verifier: 1 right, 0 wrong, NaN unknown; None: no verifier

    @property
    def loss_mask(self) -> Bool[Array, 'B C']:
        """The tokens that have a loss: the sampled ones."""
        return self.rollout.loss_mask


@pytree
class LabelledBatch(Pytree):
    """What an update of a reward model learns from."""

    rollout: Rollout  # its completions come with the data
    labels: Float[Array, 'B C']  # in [0, 1]
    label_mask: Bool[Array, 'B C']  # tokens that have a label

    @property
    def loss_mask(self) -> Bool[Array, 'B C']:
        """The tokens that have a loss: those with a label."""
        return self.label_mask


@pytree
class TrainState(Pytree):
    """Everything that lasts from step to step. A checkpoint holds all of it but frozen weights.

    Frozen weights are those that adapters leave as they are; a checkpoint holds their digest instead.

    aux is a dict. bad_steps is always in it; coefficients and initial_entropy for every policy; position for every
    policy but that of a cold start; the other keys if the algorithm or the config needs them. The column at
    the right names the file that makes and changes each:

        bad_steps i32[]        optimizer updates skipped: loss, gradient or result not finite   learner/update.py
        coefficients {f32[]}   kl_coef, entropy_coef, entropy_acts: numbers that may adapt      learner/update.py
        initial_entropy f32[]  of the policy in the first step                                  learner/update.py
        position i32[]         places visited so far in the data's shuffled order               collect/draw.py
        critic                 its params and opt_state (PPO)                                   learner/critic.py
        tries, hits i32[N]     completions of each of N examples, and right ones (curriculum)   collect/draw.py
        kept                   groups of earlier steps (resample, replay)                       collect/select.py
        history                moving averages of rewards, of the run and of each prompt        learner/experience.py
        probe                  prompts with their first right completions                       run/observers.py
    """

    step: Int[Array, '']  # the number of the next step
    params: Any  # float32 master weights; with adapters, the frozen weights too
    opt_state: Any
    ref_params: Any  # the reference policy's parameters, only the trained ones; None: there is no reference
    aux: dict[str, Any]
    # what is under way between steps, on the host, see collect/pending.py; None: steps wait for all that they sample
    pending: Any = None


class Param(NamedTuple):
    """A parameter in a model's table; its initial value is offset + scale * standard normal noise."""

    shape: tuple
    axes: tuple  # for each dimension the mesh axis along which it is cut, or None
    scale: float
    offset: float = 0.0


def map_table(function: Callable[[str, Param], Any], table: Any) -> Any:
    """Returns a tree like the table, with function(path, param) in each Param's place; a path is like 'layers/wq'."""
    return jax.tree_util.tree_map_with_path(
        lambda path, param: function(jax.tree_util.keystr(path, simple=True, separator='/'), param),
        table,
        is_leaf=lambda node: isinstance(node, Param),
    )
