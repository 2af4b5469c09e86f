"""Sequence packing: a group's prompt once, its completions after it, and many groups in a row of fixed length.

The host chooses where each completion lies (`pack`). On the device, tokens are gathered into packed rows, and their
logprobs are scattered back to [B, C] (`microbatch_output`), so losses and metrics do not know of packing. The number of
microbatches is a value and not a shape: the program is compiled once, and its time follows the number of tokens.
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
ENOUGH = {'cpu': 512, 'gpu': 2048, 'tpu': 2048}  # columns of a row, above which longer rows gain little speed
LONGER = 1.5  # how many times the least length a row may have, if all rows together then have fewer columns


class PackSizes(NamedTuple):
    """The sizes of packed rows, and of the prompts and groups that are packed into them."""

    rows: int  # of a microbatch, on all devices
    columns: int
    block: int  # columns that share one prompt, see attention.PackedMask
    group_size: int
    queries: int  # columns of the longest prompt, Q
    tokens: int  # columns of the longest completion, C
    whole_groups: bool  # whether a group must lie in one row

    @property
    def completions(self):
        """How many completions of full length fit after a prompt of full length."""
        return (self.columns - self.queries) // self.tokens

    def occupied_columns(self, size):
        """The columns that `size` tokens of a group occupy: `size`, rounded up to whole blocks."""
        return size + -size % self.block

    def microbatches(self, groups):
        """The largest number of microbatches that `groups` groups can need."""
        return -(-groups * -(-self.group_size // self.completions) // self.rows)


@pytree
class PackedCells(Pytree):
    """Which token lies in which cell of the packed rows, by minibatch and microbatch."""

    cells: Int[Array, 'minibatches M rows columns']  # b * T + t of the token in its minibatch; -1: an empty cell
    count: Int[Array, ' minibatches']  # microbatches that hold tokens


def packed_sizes(mesh: Mesh, shapes: Shapes, learning: Learning, algorithm: Any) -> PackSizes | None:
    """The PackSizes of a step with these Shapes, None where rows are padded.

    Raises BadInput if pack_columns is too short, or no multiple of 8 x mesh.context.
    """
    if not learning.packs:
        return None
    columns, context_size = learning.pack_columns, mesh.shape['context']
    platform, whole_groups = mesh.devices.flat[0].platform, 'group_ids' in algorithm.reads
    if columns < 0:
        columns = choose_columns(shapes, device_share(mesh, shapes, learning), whole_groups, platform)
        columns += -columns % (BLOCK[platform] * context_size)
    block = math.gcd(columns // context_size, BLOCK[platform])
    rows = learning.pack_rows * devices_along(mesh, BATCH_AXES)
    sizes = PackSizes(rows, columns, block, shapes.group_size, shapes.queries, shapes.tokens, whole_groups)
    least, multiple = sizes.queries + sizes.tokens * (sizes.group_size if whole_groups else 1), 8 * context_size
    if columns < least:
        behind = 'its group' if whole_groups else 'a completion'
        least += -least % multiple
        remedy = f'is too short for a prompt of {sizes.queries} tokens with {behind}; choose {least} or more'
        raise BadInput('learner.pack_columns', columns, remedy)
    if columns % multiple:
        remedy = f'must be a multiple of 8 x mesh.context = {multiple}; raise it to {columns + -columns % multiple}'
        raise BadInput('learner.pack_columns', columns, remedy)
    return sizes


def device_share(mesh: Mesh, shapes: Shapes, learning: Learning) -> int:
    """The largest number of a minibatch's completions on one device."""
    return -(-shapes.prompts * shapes.group_size // (learning.minibatches * devices_along(mesh, BATCH_AXES)))


def choose_columns(shapes: Shapes, share: int, whole_groups: bool, platform: str) -> int:
    """The length of packed rows for learner.pack_columns = -1, before it is rounded for the mesh.

    A row has room for a whole number of full completions after their prompts. The least such length has at least
    ENOUGH columns, or holds all `share` completions that a device has of a minibatch. Of the lengths from there to
    LONGER times as much, the one is chosen for which a device's rows together have the fewest columns: a group that is
    split over rows repeats its prompt, and a small remainder of a group leaves columns empty.
    """
    group, block = shapes.group_size, BLOCK[platform]

    def columns_of(count):
        """The columns of `count` full completions after their full prompts, each group in whole blocks."""
        sizes = [group] * (count // group) + [count % group] * (count % group > 0)
        columns = [shapes.queries + size * shapes.tokens for size in sizes]
        return sum(n + -n % block for n in columns)

    step = group if whole_groups else 1
    counts = range(step, max(share, step) + 1, step)
    least = next((n for n in counts if columns_of(n) >= ENOUGH[platform]), counts[-1])
    fitting = itertools.takewhile(
        lambda n: columns_of(n) <= LONGER * columns_of(least), range(least, counts[-1] + 1, step)
    )

    def all_columns(count):
        """The columns of a device's rows together, if a row holds `count` completions."""
        rows = -(-share // group) * -(-group // count) if count < group else -(-share // count)
        return rows * columns_of(count)

    return columns_of(min(fitting, key=all_columns))


def cut_padded(sizes: PackSizes, share: int) -> int:
    """How many microbatches `share` padded rows are cut into: the fewest, each with no more tokens than a packed row.

    A microbatch has at least one row, even if that row is longer than a packed row. share: rows of a device.
    """
    width = sizes.queries + sizes.tokens
    return next(n for n in range(1, share + 1) if share % n == 0 and share // n * width <= max(sizes.columns, width))


def pack(prompt_mask, completion_mask, sizes: PackSizes, minibatches: int) -> PackedCells:
    """Chooses where rows with these masks, bool[B, Q] and bool[B, C], lie when packed; returns numpy PackedCells.

    Completions without tokens are left out. Groups are dealt to minibatches as descent.interleave deals them; within a
    minibatch, a packed row may lie on any device.
    """
    group, width = sizes.group_size, sizes.queries + sizes.tokens
    prompts = prompt_mask[::group].sum(1).reshape(-1, minibatches)
    lengths = completion_mask.sum(1).reshape(-1, minibatches, group)
    most = sizes.microbatches(len(prompts))
    cells = np.full((minibatches, most * sizes.rows, sizes.columns), -1, np.int32)
    count = np.zeros(minibatches, np.int32)
    for minibatch in range(minibatches):
        rows = _packed_rows(prompts[:, minibatch], lengths[:, minibatch], sizes)
        for row, portions in enumerate(rows):
            column = 0
            for prompt, members in portions:
                first = members[0][0] * width
                places = [np.arange(first + sizes.queries - prompt, first + sizes.queries)]
                places += [index * width + sizes.queries + np.arange(length) for index, length in members]
                places = np.concatenate(places)
                cells[minibatch, row, column : column + len(places)] = places
                column += sizes.occupied_columns(len(places))
        count[minibatch] = -(-len(rows) // sizes.rows)
    return PackedCells(cells.reshape(minibatches, most, sizes.rows, sizes.columns), count)


def _packed_rows(prompts, lengths, sizes):
    """The packed rows of a minibatch: each a list of (prompt length, [(row of the minibatch, completion length)]).

    The longest group is placed first, into the fullest packed row that has room for it. If no row has, some of its
    completions fill the emptiest row, and the others are placed like a group with the same prompt. A new row begins
    instead where groups must stay whole, or where these completions have no more tokens than the prompt that would be
    computed once more.
    """
    free, rows = np.zeros(0, int), []  # free columns of each row
    groups = [
        [(int(length), i * sizes.group_size + j) for j, length in enumerate(group_lengths) if length]
        for i, group_lengths in enumerate(lengths)
    ]
    for i in sorted(range(len(groups)), key=lambda i: -lengths[i].sum()):
        prompt, unplaced = int(prompts[i]), sorted(groups[i], reverse=True)
        while unplaced:
            fits = np.flatnonzero(free >= sizes.occupied_columns(prompt + _count_tokens(unplaced)))
            if len(fits):
                row, placed = fits[np.argmin(free[fits])], unplaced
            else:
                row = int(np.argmax(free)) if rows and not sizes.whole_groups else -1
                placed = _choose_fitting(unplaced, free[row] - prompt) if row >= 0 else []
                if _count_tokens(placed) <= prompt:
                    rows.append([])
                    free = np.append(free, sizes.columns)
                    row, placed = len(rows) - 1, _choose_fitting(unplaced, sizes.columns - prompt)
            rows[row].append((prompt, [(index, length) for length, index in placed]))
            free[row] -= sizes.occupied_columns(prompt + _count_tokens(placed))
            unplaced = [completion for completion in unplaced if completion not in placed]
    return rows


def _count_tokens(completions):
    """How many tokens a list of (length, row) completions has."""
    return sum(length for length, _ in completions)


def _choose_fitting(completions, free):
    """The (length, row) completions that fit into `free` columns, chosen greedily in their order."""
    fitting = []
    for completion in completions:
        if completion[0] <= free:
            fitting.append(completion)
            free -= completion[0]
    return fitting


class ForwardSpec(NamedTuple):
    """How a forward pass computes logprobs: static values, which programs close over."""

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
    """HeadOutput of the completion tokens in one microbatch, 0 for the rollout's other tokens.

    cells: what PackedCells has for the microbatch; None: rows are padded, and all completion tokens are in it. remat:
    see transformer.forward. ids: other tokens in each place whose logprobs are returned too, as top_logprobs.
    """
    if cells is None:
        return padded_logprobs(params, rollout, spec.model_config, spec.head, remat, ids)
    assert spec.sizes is not None, 'only packed rows have cells'
    sizes, head, model_config = spec.sizes, spec.head, spec.model_config
    text, columns = _gather_text(rollout, cells), rollout.completion_mask.shape[1]
    starts, lengths = text.start[:, :: sizes.block], text.length[:, :: sizes.block]
    visible = attention.PackedMask(text.part, text.positions, starts, lengths, sizes.block, sizes.queries, sizes.tokens)
    hidden = transformer.forward(
        params, text.tokens, text.positions, visible, model_config, remat=remat, mesh_ops=head.mesh_ops
    )
    before = head.mesh_ops.hidden(jax.vmap(gather.take)(hidden, text.source))
    places, nowhere = _completion_places(rollout, cells), rollout.completion_mask.size
    cell_ids = None if ids is None else jnp.take(ids.reshape(nowhere, -1), places, 0, mode='fill', fill_value=0)
    output = token_logprobs(params, before, text.tokens, text.part > 0, model_config, head, cell_ids)

    def unpack(values):  # [rows, columns, ...] -> [B, C, ...]
        empty = jnp.zeros((nowhere, *values.shape[2:]), values.dtype)
        return empty.at[places].set(values, mode='drop', unique_indices=True).reshape(-1, columns, *values.shape[2:])

    return jax.tree.map(unpack, output)


def rollout_output(params, rollout: Rollout, packed: PackedCells | None, spec: ForwardSpec) -> HeadOutput:
    """HeadOutput of all completion tokens of a step, without gradients; packed is None where rows are padded."""
    if packed is None:
        return microbatch_output(params, rollout, None, spec, 'none')
    assert spec.sizes is not None, 'only packed rows have cells'
    group_size = spec.sizes.group_size
    minibatches = jax.tree.map(lambda x: descent.interleave(x, len(packed.count), group_size), rollout)

    def minibatch_output(minibatch):
        rollout, packed = minibatch

        def output_of(index):
            return microbatch_output(params, rollout, packed.cells[index], spec, 'none')

        return descent.sum_over(output_of, packed.count, descent.zeros_like(output_of))

    outputs = jax.lax.map(minibatch_output, (minibatches, packed))
    return jax.tree.map(lambda x: descent.undo_interleave(x, group_size), outputs)


def cut_minibatch(
    minibatch: Experience, prepared: Any, packed: PackedCells | None, microbatches: int, together: int
) -> descent.Microbatches:
    """Cuts a minibatch into Microbatches, each of them (Experience, prepared, cells).

    prepared: what algorithms.prepare returns for the minibatch. packed: what PackedCells has for the minibatch; then
    each microbatch has the whole Experience, but only the tokens in its cells are in the completion mask. None: rows
    are padded, and cut into `microbatches` equal parts, which keep each `together` adjacent rows together; cells is
    None.
    """
    if packed is None:
        return descent.cut_rows((minibatch, prepared, None), microbatches, together)

    def get(index):
        rollout, cells = minibatch.rollout, packed.cells[index]
        mask, places = rollout.completion_mask, _completion_places(rollout, cells)
        present = jnp.zeros(mask.size, bool).at[places].set(True, mode='drop', unique_indices=True)
        rollout = rollout.replace(completion_mask=mask & present.reshape(mask.shape))
        return minibatch.replace(rollout=rollout), prepared, cells

    return descent.Microbatches(packed.count, get, lambda arrays, index: arrays)


def _completion_places(rollout, cells):
    """i32[rows, columns]: b * C + c of the completion token at each cell; B * C where there is none."""
    queries, columns = rollout.prompt_mask.shape[1], rollout.completion_mask.shape[1]
    row, column = jnp.divmod(cells, queries + columns)
    in_completion = (cells >= 0) & (column >= queries)
    return jnp.where(in_completion, row * columns + column - queries, rollout.completion_mask.size)


class Text(NamedTuple):
    """What lies in each cell of packed rows; all arrays are i32[rows, columns]."""

    tokens: jax.Array
    positions: jax.Array
    part: jax.Array  # as in attention.PackedMask: 0 a prompt, above 0 a completion, -1 an empty cell
    start: jax.Array  # column where the prompt of the token's group begins
    length: jax.Array  # tokens of that prompt
    source: jax.Array  # column whose hidden state predicts the token; for completion tokens alone


def _gather_text(rollout, cells):
    """The Text of a microbatch: a rollout's tokens, gathered into cells i32[rows, columns]."""
    queries = rollout.prompt_mask.shape[1]
    row, column = jnp.divmod(cells, rollout.tokens.shape[1])
    filled, in_prompt = cells >= 0, (cells >= 0) & (column < queries)
    mask = jnp.concatenate([rollout.prompt_mask, rollout.completion_mask], 1)
    positions = jnp.where(filled, transformer.positions_of(mask).reshape(-1)[cells], 0)
    places = jnp.arange(cells.shape[1])
    start = jax.lax.cummax(jnp.where(in_prompt & (positions == 0), places, 0), axis=1)
    length = jnp.where(filled, rollout.prompt_mask.sum(-1)[row], 0)
    return Text(
        tokens=jnp.where(filled, rollout.tokens.reshape(-1)[cells], 0),
        positions=positions,
        part=jnp.where(filled, jnp.where(in_prompt, 0, row + 1), -1),
        start=start,
        length=length,
        source=jnp.where(column == queries, start + length - 1, jnp.maximum(places - 1, 0)),
    )
