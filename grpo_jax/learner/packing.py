"""Sequence packing: a group's prompt once, its completions behind it, and many groups in a row of fixed length.

The host chooses where each completion lies (`pack`); on the device the tokens are gathered into packed rows and their
logprobs scattered back (`completion_logprobs`), so that losses and metrics never know. How many microbatches a
step takes is a number and not a shape: the program is compiled once, and its time follows the tokens there are.
"""

import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int
import numpy as np

from grpo_jax.errors import BadInput
from grpo_jax.learner import descent, logprobs
from grpo_jax.learner.logprobs import Head, HeadOutput, token_logprobs
from grpo_jax.learner.options import Learning
from grpo_jax.models import attention, gather, transformer
from grpo_jax.sharding.batches import Shapes, devices_along
from grpo_jax.sharding.mesh import BATCH_AXES
from grpo_jax.types import Array, Experience, Pytree, Rollout, pytree

BLOCK = {'cpu': 32, 'gpu': 128, 'tpu': 256}  # columns of packed rows that attention takes at once
ENOUGH = {'cpu': 512, 'gpu': 2048, 'tpu': 2048}  # columns of a row at which longer ones gain little
LONGER = 1.5  # times as long a row may be, where all rows together are then shorter


class Packing(NamedTuple):
    """The sizes of packed rows."""

    rows: int  # of a microbatch, on all devices
    columns: int
    block: int  # columns that have one prompt, see attention.Packed
    group_size: int
    queries: int
    tokens: int
    whole_groups: bool  # a group may not be cut

    @property
    def completions(self):
        """How many completions of any length fit behind a prompt of any length."""
        return (self.columns - self.queries) // self.tokens

    def room(self, size):
        """Columns that `size` tokens of a group take: whole blocks."""
        return size + -size % self.block

    def microbatches(self, groups):
        """How many microbatches that many groups take at most."""
        return -(-groups * -(-self.group_size // self.completions) // self.rows)


@pytree
class PackedRows(Pytree):
    """Where the tokens of a step lie, by minibatch and microbatch."""

    cells: Int[Array, 'minibatches M rows columns']  # b * T + t of the token in its minibatch, -1: none
    count: Int[Array, ' minibatches']  # microbatches that hold any


def packed_sizes(mesh: Mesh, shapes: Shapes, learning: Learning, algorithm: Any) -> Packing | None:
    """The Packing of a step of these sizes, None where rows are padded; BadInput where they cannot work."""
    if not learning.packs:
        return None
    columns, along = learning.pack_columns, mesh.shape['context']
    platform, whole_groups = mesh.devices.flat[0].platform, 'group_ids' in algorithm.reads
    if columns < 0:
        columns = choose_columns(shapes, device_share(mesh, shapes, learning), whole_groups, platform)
        columns += -columns % (BLOCK[platform] * along)
    block = math.gcd(columns // along, BLOCK[platform])
    rows = learning.pack_rows * devices_along(mesh, BATCH_AXES)
    sizes = Packing(rows, columns, block, shapes.group_size, shapes.queries, shapes.tokens, whole_groups)
    least = sizes.queries + sizes.tokens * (sizes.group_size if whole_groups else 1)
    if columns < least:
        behind = 'its group' if whole_groups else 'a completion'
        raise BadInput(
            'learner.pack_columns',
            columns,
            f'holds no prompt of {sizes.queries} tokens with {behind}, {least} in all; choose at least that',
        )
    if learning.pack_rows < 1:
        raise BadInput('learner.pack_rows', learning.pack_rows, 'must be at least 1')
    if columns % (8 * along):
        raise BadInput(
            'learner.pack_columns',
            columns,
            f'must be a multiple of 8 x mesh.context = {8 * along}; the next one is {columns + -columns % (8 * along)}',
        )
    return sizes


def device_share(mesh: Mesh, shapes: Shapes, learning: Learning) -> int:
    """Completions of a minibatch that a device has, the most."""
    return -(-shapes.prompts * shapes.group_size // (learning.minibatches * devices_along(mesh, BATCH_AXES)))


def choose_columns(shapes: Shapes, share: int, whole_groups: bool, platform: str) -> int:
    """Columns of packed rows for learner.pack_columns = -1.

    They are ENOUGH, and those of full completions with their prompts, or hold a device's share of a minibatch's
    completions, if that is less. Of such lengths, up to LONGER times the least, it is that of which all rows have the
    fewest columns: a group that is cut repeats its prompt, and a last part that is small leaves columns empty.
    """
    group, block = shapes.group_size, BLOCK[platform]

    def room(count):
        """Columns of so many completions of full length behind their prompts, each group in whole blocks."""
        sizes = [group] * (count // group) + [count % group] * (count % group > 0)
        columns = [shapes.queries + size * shapes.tokens for size in sizes]
        return sum(n + -n % block for n in columns)

    step = group if whole_groups else 1
    counts = range(step, max(share, step) + 1, step)
    least = next((n for n in counts if room(n) >= ENOUGH[platform]), counts[-1])
    fitting = itertools.takewhile(lambda n: room(n) <= LONGER * room(least), range(least, counts[-1] + 1, step))

    def all_columns(count):
        """Columns of all rows of a device's share, that many completions to a row."""
        rows = -(-share // group) * -(-group // count) if count < group else -(-share // count)
        return rows * room(count)

    return room(min(fitting, key=all_columns))


def cut_padded(packing: Packing, share: int) -> int:
    """The fewest equal parts of a device's padded rows that have no more tokens than a packed row, or one row each."""
    width = packing.queries + packing.tokens
    return next(n for n in range(1, share + 1) if share % n == 0 and share // n * width <= max(packing.columns, width))


def pack(prompt_mask, completion_mask, packing: Packing, minibatches: int) -> PackedRows:
    """PackedRows, as numpy arrays, of masks bool[B, Q] and bool[B, C]; completions without tokens are left out.

    Groups are dealt to minibatches as descent.interleave does. Within one, a packed row may lie on any device.
    """
    group, width = packing.group_size, packing.queries + packing.tokens
    prompts = prompt_mask[::group].sum(1).reshape(-1, minibatches)
    lengths = completion_mask.sum(1).reshape(-1, minibatches, group)
    most = packing.microbatches(len(prompts))
    cells = np.full((minibatches, most * packing.rows, packing.columns), -1, np.int32)
    count = np.zeros(minibatches, np.int32)
    for part in range(minibatches):
        rows = _packed_rows(prompts[:, part], lengths[:, part], packing)
        for row, portions in enumerate(rows):
            column = 0
            for prompt, members in portions:
                first = members[0][0] * width
                text = [np.arange(first + packing.queries - prompt, first + packing.queries)]
                text += [index * width + packing.queries + np.arange(length) for index, length in members]
                text = np.concatenate(text)
                cells[part, row, column : column + len(text)] = text
                column += packing.room(len(text))
        count[part] = -(-len(rows) // packing.rows)
    return PackedRows(cells.reshape(minibatches, most, packing.rows, packing.columns), count)


def _packed_rows(prompts, lengths, packing):
    """Lists, one a packed row, of (prompt length, [(row, completion length)]).

    The longest group first, into the fullest packed row that has room for it. Where none has, a part of it fills the
    emptiest one, unless groups must be whole or the prompt, which is computed again, outweighs that part.
    """
    room, rows = np.zeros(0, int), []
    groups = [
        [(int(length), i * packing.group_size + j) for j, length in enumerate(group_lengths) if length]
        for i, group_lengths in enumerate(lengths)
    ]
    for i in sorted(range(len(groups)), key=lambda i: -lengths[i].sum()):
        prompt, left = int(prompts[i]), sorted(groups[i], reverse=True)
        while left:
            fits = np.flatnonzero(room >= packing.room(prompt + _tokens(left)))
            if len(fits):
                row, taken = fits[np.argmin(room[fits])], left
            else:
                row = int(np.argmax(room)) if rows and not packing.whole_groups else -1
                taken = _that_fit(left, room[row] - prompt) if row >= 0 else []
                if _tokens(taken) <= prompt:
                    rows.append([])
                    room = np.append(room, packing.columns)
                    row, taken = len(rows) - 1, _that_fit(left, packing.columns - prompt)
            rows[row].append((prompt, [(index, length) for length, index in taken]))
            room[row] -= packing.room(prompt + _tokens(taken))
            left = [completion for completion in left if completion not in taken]
    return rows


def _tokens(completions):
    return sum(length for length, _ in completions)


def _that_fit(completions, room):
    """Those of the (length, row) completions, taken in order, that fit into that many columns."""
    taken = []
    for completion in completions:
        if completion[0] <= room:
            taken.append(completion)
            room -= completion[0]
    return taken


class PackedLogprobs(NamedTuple):
    """What a microbatch of packed rows says of the tokens of a minibatch; 0 at tokens that are not in it."""

    logprobs: Float[Array, 'B C']
    entropy: Float[Array, 'B C']
    present: Bool[Array, 'B C']  # the tokens that are in it
    top_logprobs: Float[Array, 'B C k'] | None = None  # as in HeadOutput
    top_ids: Int[Array, 'B C k'] | None = None

    @property
    def output(self) -> HeadOutput:
        """What the head says of them."""
        return HeadOutput(self.logprobs, self.entropy, self.top_logprobs, self.top_ids)


def completion_logprobs(
    params,
    rollout: Rollout,
    cells: Int[Array, 'rows columns'],
    model_config: transformer.ModelConfig,
    packing: Packing,
    head: Head,
    remat: str,
    ids: Int[Array, 'B C k'] | None = None,
) -> PackedLogprobs:
    """PackedLogprobs of a microbatch, whose cells are those of PackedRows; ids as in logprobs.rollout_logprobs."""
    queries, columns = rollout.prompt_mask.shape[1], rollout.completion_mask.shape[1]
    text = _text(rollout, cells)
    starts, lengths = text.start[:, :: packing.block], text.length[:, :: packing.block]
    visible = attention.Packed(
        text.part, text.positions, starts, lengths, packing.block, packing.queries, packing.tokens
    )
    hidden = transformer.forward(
        params, text.tokens, text.positions, visible, model_config, remat=remat, collectives=head.collectives
    )
    before = head.collectives.hidden(jax.vmap(gather.take)(hidden, text.source))
    row, column = jnp.divmod(cells, queries + columns)
    nowhere = rollout.completion_mask.size
    places = jnp.where(text.part > 0, row * columns + column - queries, nowhere)
    own_ids = None if ids is None else jnp.take(ids.reshape(nowhere, -1), places, 0, mode='fill', fill_value=0)
    tokens = token_logprobs(params, before, text.tokens, text.part > 0, model_config, head, own_ids)

    def back(values):
        empty = jnp.zeros((nowhere, *values.shape[2:]), values.dtype)
        return empty.at[places].set(values, mode='drop', unique_indices=True).reshape(-1, columns, *values.shape[2:])

    logprobs, entropy, *top = jax.tree.map(back, tokens)
    return PackedLogprobs(logprobs, entropy, back(jnp.ones(places.shape, bool)), *top)


def rollout_logprobs(
    params, rollout: Rollout, packed: PackedRows, model_config: transformer.ModelConfig, packing: Packing, head: Head
) -> HeadOutput:
    """HeadOutput of all completions, without a gradient."""
    parts = jax.tree.map(lambda x: descent.interleave(x, len(packed.count), packing.group_size), rollout)

    def minibatch_logprobs(part):
        rollout, packed = part

        def add(index, seen):
            microbatch = completion_logprobs(params, rollout, packed.cells[index], model_config, packing, head, 'none')
            return _merged(microbatch, seen)

        empty, several = jnp.zeros(rollout.completion_mask.shape), (*rollout.completion_mask.shape, head.top_k)
        top = (jnp.zeros(several), jnp.zeros(several, jnp.int32)) if head.top_k else ()
        return jax.lax.fori_loop(0, packed.count, add, HeadOutput(empty, empty, *top))

    minibatches = jax.lax.map(minibatch_logprobs, (parts, packed))
    return jax.tree.map(lambda x: descent.deal_back(x, packing.group_size), minibatches)


def logprobs_of(
    params, rollout: Rollout, packed: PackedRows | None, model_config: transformer.ModelConfig, packing, head: Head
) -> HeadOutput:
    """HeadOutput of all completions, without a gradient, by packed rows, or by padded ones where packed is None."""
    if packed is None:
        return logprobs.rollout_logprobs(params, rollout, model_config, head, 'none')
    return rollout_logprobs(params, rollout, packed, model_config, packing, head)


def _merged(microbatch: PackedLogprobs, seen: HeadOutput):
    """HeadOutput of the tokens seen before and of those in the microbatch."""
    present = microbatch.present

    def merge(new, old):
        return jnp.where(present.reshape(*present.shape, *[1] * (new.ndim - 2)), new, old)

    return jax.tree.map(merge, microbatch.output, seen)


class Text(NamedTuple):
    """Packed rows, each i32[rows, columns]."""

    tokens: jax.Array
    positions: jax.Array
    part: jax.Array  # as in attention.Packed
    start: jax.Array  # column where the prompt of the token's group begins
    length: jax.Array  # of that prompt
    source: jax.Array  # column whose hidden state predicts the token, for those of completions


def _text(rollout, cells):
    """Text of a rollout's tokens at cells i32[rows, columns]."""
    queries = rollout.prompt_mask.shape[1]
    row, column = jnp.divmod(cells, rollout.tokens.shape[1])
    there, in_prompt = cells >= 0, (cells >= 0) & (column < queries)
    mask = jnp.concatenate([rollout.prompt_mask, rollout.completion_mask], 1)
    positions = jnp.where(there, transformer.positions_of(mask).reshape(-1)[cells], 0)
    places = jnp.arange(cells.shape[1])
    start = jax.lax.cummax(jnp.where(in_prompt & (positions == 0), places, 0), axis=1)
    length = jnp.where(there, rollout.prompt_mask.sum(-1)[row], 0)
    return Text(
        tokens=jnp.where(there, rollout.tokens.reshape(-1)[cells], 0),
        positions=positions,
        part=jnp.where(there, jnp.where(in_prompt, 0, row + 1), -1),
        start=start,
        length=length,
        source=jnp.where(column == queries, start + length - 1, jnp.maximum(places - 1, 0)),
    )


def only(experience: Experience, present: Bool[Array, 'B C']) -> Experience:
    """The Experience with those tokens alone in its completion mask."""
    rollout = experience.rollout
    return experience.replace(rollout=rollout.replace(completion_mask=rollout.completion_mask & present))


def accumulate(loss_of, params, minibatch: Experience, packed: PackedRows):
    """(loss, gradient, HeadOutput) of a minibatch, summed in float32 over its microbatches.

    packed is the minibatch's part of PackedRows; loss_of(params, cells of a microbatch) is (loss, PackedLogprobs of no
    other tokens).
    """

    def add(index, carry):
        loss, grads, seen = carry
        (more, microbatch), new = jax.value_and_grad(loss_of, has_aux=True)(params, packed.cells[index])
        seen = _merged(microbatch, seen)
        return loss + more, jax.tree.map(jnp.add, grads, new), seen

    zero = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    empty = jnp.zeros(minibatch.rollout.completion_mask.shape)
    return jax.lax.fori_loop(0, packed.count, add, (jnp.float32(0), zero, HeadOutput(empty, empty)))
