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
from jaxtyping import Int
import numpy as np

from grpo_jax.errors import BadInput
from grpo_jax.learner import descent
from grpo_jax.learner.logprobs import Head, padded_logprobs, token_logprobs
from grpo_jax.learner.options import Learning
from grpo_jax.models import attention, gather, transformer
from grpo_jax.sharding.batches import Shapes, devices_along
from grpo_jax.sharding.mesh import BATCH_AXES
from grpo_jax.types import Array, Experience, HeadOutput, Pytree, Rollout, pytree

BLOCK = {'cpu': 32, 'gpu': 128, 'tpu': 256}  # columns of packed rows that attention takes at once
ENOUGH = {'cpu': 512, 'gpu': 2048, 'tpu': 2048}  # columns of a row at which longer ones gain little
LONGER = 1.5  # times as long a row may be, where all rows together are then shorter


class PackSizes(NamedTuple):
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
class PackedCells(Pytree):
    """Where the tokens of a step lie, by minibatch and microbatch."""

    cells: Int[Array, 'minibatches M rows columns']  # b * T + t of the token in its minibatch, -1: none
    count: Int[Array, ' minibatches']  # microbatches that hold any


def packed_sizes(mesh: Mesh, shapes: Shapes, learning: Learning, algorithm: Any) -> PackSizes | None:
    """The PackSizes of a step of these sizes, None where rows are padded; BadInput where they cannot work."""
    if not learning.packs:
        return None
    columns, along = learning.pack_columns, mesh.shape['context']
    platform, whole_groups = mesh.devices.flat[0].platform, 'group_ids' in algorithm.reads
    if columns < 0:
        columns = choose_columns(shapes, device_share(mesh, shapes, learning), whole_groups, platform)
        columns += -columns % (BLOCK[platform] * along)
    block = math.gcd(columns // along, BLOCK[platform])
    rows = learning.pack_rows * devices_along(mesh, BATCH_AXES)
    sizes = PackSizes(rows, columns, block, shapes.group_size, shapes.queries, shapes.tokens, whole_groups)
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


def cut_padded(sizes: PackSizes, share: int) -> int:
    """The fewest equal parts of a device's padded rows that have no more tokens than a packed row, or one row each."""
    width = sizes.queries + sizes.tokens
    return next(n for n in range(1, share + 1) if share % n == 0 and share // n * width <= max(sizes.columns, width))


def pack(prompt_mask, completion_mask, sizes: PackSizes, minibatches: int) -> PackedCells:
    """PackedCells, as numpy arrays, of masks bool[B, Q] and bool[B, C]; completions without tokens are left out.

    Groups are dealt to minibatches as descent.interleave does. Within one, a packed row may lie on any device.
    """
    group, width = sizes.group_size, sizes.queries + sizes.tokens
    prompts = prompt_mask[::group].sum(1).reshape(-1, minibatches)
    lengths = completion_mask.sum(1).reshape(-1, minibatches, group)
    most = sizes.microbatches(len(prompts))
    cells = np.full((minibatches, most * sizes.rows, sizes.columns), -1, np.int32)
    count = np.zeros(minibatches, np.int32)
    for part in range(minibatches):
        rows = _packed_rows(prompts[:, part], lengths[:, part], sizes)
        for row, portions in enumerate(rows):
            column = 0
            for prompt, members in portions:
                first = members[0][0] * width
                text = [np.arange(first + sizes.queries - prompt, first + sizes.queries)]
                text += [index * width + sizes.queries + np.arange(length) for index, length in members]
                text = np.concatenate(text)
                cells[part, row, column : column + len(text)] = text
                column += sizes.room(len(text))
        count[part] = -(-len(rows) // sizes.rows)
    return PackedCells(cells.reshape(minibatches, most, sizes.rows, sizes.columns), count)


def _packed_rows(prompts, lengths, sizes):
    """Lists, one a packed row, of (prompt length, [(row, completion length)]).

    The longest group first, into the fullest packed row that has room for it. Where none has, a part of it fills the
    emptiest one, unless groups must be whole or the prompt, which is computed again, outweighs that part.
    """
    room, rows = np.zeros(0, int), []
    groups = [
        [(int(length), i * sizes.group_size + j) for j, length in enumerate(group_lengths) if length]
        for i, group_lengths in enumerate(lengths)
    ]
    for i in sorted(range(len(groups)), key=lambda i: -lengths[i].sum()):
        prompt, left = int(prompts[i]), sorted(groups[i], reverse=True)
        while left:
            fits = np.flatnonzero(room >= sizes.room(prompt + _tokens(left)))
            if len(fits):
                row, taken = fits[np.argmin(room[fits])], left
            else:
                row = int(np.argmax(room)) if rows and not sizes.whole_groups else -1
                taken = _that_fit(left, room[row] - prompt) if row >= 0 else []
                if _tokens(taken) <= prompt:
                    rows.append([])
                    room = np.append(room, sizes.columns)
                    row, taken = len(rows) - 1, _that_fit(left, sizes.columns - prompt)
            rows[row].append((prompt, [(index, length) for length, index in taken]))
            room[row] -= sizes.room(prompt + _tokens(taken))
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


class ForwardSpec(NamedTuple):
    """How logprobs of completions are computed: static values, which programs close over."""

    model_config: transformer.ModelConfig
    head: Head
    sizes: PackSizes | None = None  # of packed rows; None: rows are padded


def microbatch_output(
    params,
    rollout: Rollout,
    cells: Int[Array, 'rows columns'] | None,
    spec: ForwardSpec,
    remat: str,
    ids: Int[Array, 'B C k'] | None = None,
) -> HeadOutput:
    """HeadOutput of a rollout's completion tokens at cells of PackedCells, 0 at all others.

    Where cells is None, that of all completion tokens, by padded rows. remat is that of transformer.forward; of the
    tokens `ids`, logprobs come too.
    """
    if cells is None:
        return padded_logprobs(params, rollout, spec.model_config, spec.head, remat, ids)
    assert spec.sizes is not None, 'cells are those of packed rows'
    sizes, head, model_config = spec.sizes, spec.head, spec.model_config
    text, columns = _text(rollout, cells), rollout.completion_mask.shape[1]
    starts, lengths = text.start[:, :: sizes.block], text.length[:, :: sizes.block]
    visible = attention.Packed(text.part, text.positions, starts, lengths, sizes.block, sizes.queries, sizes.tokens)
    hidden = transformer.forward(
        params, text.tokens, text.positions, visible, model_config, remat=remat, collectives=head.collectives
    )
    before = head.collectives.hidden(jax.vmap(gather.take)(hidden, text.source))
    places, nowhere = _completion_places(rollout, cells), rollout.completion_mask.size
    cell_ids = None if ids is None else jnp.take(ids.reshape(nowhere, -1), places, 0, mode='fill', fill_value=0)
    output = token_logprobs(params, before, text.tokens, text.part > 0, model_config, head, cell_ids)

    def back(values):
        empty = jnp.zeros((nowhere, *values.shape[2:]), values.dtype)
        return empty.at[places].set(values, mode='drop', unique_indices=True).reshape(-1, columns, *values.shape[2:])

    return jax.tree.map(back, output)


def rollout_output(params, rollout: Rollout, packed: PackedCells | None, spec: ForwardSpec) -> HeadOutput:
    """HeadOutput of all completion tokens, without a gradient; packed is None where rows are padded."""
    if packed is None:
        return microbatch_output(params, rollout, None, spec, 'none')
    assert spec.sizes is not None, 'cells are those of packed rows'
    group_size = spec.sizes.group_size
    parts = jax.tree.map(lambda x: descent.interleave(x, len(packed.count), group_size), rollout)

    def minibatch_output(part):
        rollout, packed = part

        def output_of(index):
            return microbatch_output(params, rollout, packed.cells[index], spec, 'none')

        return descent.sum_over(output_of, packed.count, descent.zeros_like(output_of))

    outputs = jax.lax.map(minibatch_output, (parts, packed))
    return jax.tree.map(lambda x: descent.deal_back(x, group_size), outputs)


def cut(
    minibatch: Experience, prepared: Any, packed: PackedCells | None, microbatches: int, together: int
) -> descent.Microbatches:
    """Microbatches of a minibatch, each (its Experience, what is prepared of it, its cells).

    By packed, the minibatch's part of PackedCells, each has the whole Experience with the tokens at its cells alone in
    the completion mask. Where packed is None, rows are padded: each has an equal part of the rows, and no cells.
    """
    if packed is None:
        return descent.cut_rows((minibatch, prepared, None), microbatches, together)

    def part(index):
        rollout, cells = minibatch.rollout, packed.cells[index]
        mask, places = rollout.completion_mask, _completion_places(rollout, cells)
        present = jnp.zeros(mask.size, bool).at[places].set(True, mode='drop', unique_indices=True)
        rollout = rollout.replace(completion_mask=mask & present.reshape(mask.shape))
        return minibatch.replace(rollout=rollout), prepared, cells

    return descent.Microbatches(packed.count, part, lambda arrays, index: arrays)


def _completion_places(rollout, cells):
    """i32[rows, columns]: b * C + c of the completion token at each cell; B * C where there is none."""
    queries, columns = rollout.prompt_mask.shape[1], rollout.completion_mask.shape[1]
    row, column = jnp.divmod(cells, queries + columns)
    in_completion = (cells >= 0) & (column >= queries)
    return jnp.where(in_completion, row * columns + column - queries, rollout.completion_mask.size)


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
