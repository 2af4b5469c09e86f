"""The values that flow through a step: Example -> Prompts -> Rollout -> Experience -> TrainState.

Axis letters (used in every shape comment of this package): P prompts, G group, B = P*G rows,
Q prompt length (left-padded), C completion length, T = Q + C, S cache columns, V vocabulary,
L layers, D width, F mlp, N query heads, K kv heads, H head dim.
"""

from typing import Any, NamedTuple

from flax import struct
import jax

from grpo_jax.example import Example as Example


@struct.dataclass
class Prompts:
    """Tokenized prompts, left-padded."""

    tokens: jax.Array  # i32[P, Q]
    mask: jax.Array  # bool[P, Q]
    ids: jax.Array  # i32[P]


@struct.dataclass
class Rollout:
    """Sampled completions; rows are grouped by prompt: row b belongs to prompt b // G."""

    tokens: jax.Array  # i32[B, T] prompt (left-padded), then completion (right-padded)
    prompt_mask: jax.Array  # bool[B, Q]
    completion_mask: jax.Array  # bool[B, C] tokens of the completion, the stop token included
    forced: jax.Array  # bool[B, C] those that were written and not sampled: they carry no loss
    logprobs: jax.Array  # f32[B, C] sampler's log pi_T(token), untruncated; 0 where masked
    truncated: jax.Array  # bool[B] the budget ended before a stop token came
    version: jax.Array  # i32[B, C] step of the weights that sampled the token

    @property
    def loss_mask(self):
        """bool[B, C]: the sampled tokens."""
        return self.completion_mask & ~self.forced


@struct.dataclass
class Experience:
    """What the learner eats."""

    rollout: Rollout
    advantages: jax.Array  # f32[B, 1] or f32[B, C]
    rewards: jax.Array  # f32[B]
    old_logprobs: jax.Array | None  # f32[B, C]; None: on-policy, the ratio is exactly 1
    ref_logprobs: jax.Array | None  # f32[B, C]; None: the algorithm has no reference
    group_ids: jax.Array  # i32[B]
    old_entropy: jax.Array | None = None  # f32[B, C] of the policy at the start of the step; None: nothing reads it
    values: jax.Array | None = None  # f32[B, C] of the critic at the start of the step; None: no critic
    returns: jax.Array | None = None  # f32[B, C] what the critic is to learn


@struct.dataclass
class TrainState:
    """All that a checkpoint needs; the data position is a function of step."""

    step: jax.Array  # i32[]
    params: Any  # f32 master weights
    opt_state: Any
    ref_params: Any  # same tree as params, or None
    aux: dict[str, Any]  # bad_steps i32[]: updates skipped because loss or gradient was not finite


class Param(NamedTuple):
    """One row of the table: value at init is offset + scale * normal."""

    shape: tuple
    axes: tuple  # mesh axis, or None, of each dimension
    scale: float
    offset: float = 0.0


def map_table(function, table):
    """The table's tree with function(path, param) at each leaf; path is like 'layers/wq'."""
    return jax.tree_util.tree_map_with_path(
        lambda path, param: function('/'.join(key.key for key in path), param),
        table,
        is_leaf=lambda node: isinstance(node, Param),
    )
