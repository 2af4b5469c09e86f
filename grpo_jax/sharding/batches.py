"""Batches on the mesh: their sizes, their abstract arrays, and checks that the mesh divides them."""

from collections.abc import Iterable, Sequence
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import Mesh

from grpo_jax.errors import BadInput
from grpo_jax.hosts import processes
from grpo_jax.sharding import specs
from grpo_jax.sharding.compiled import abstract
from grpo_jax.sharding.mesh import ROW_AXES
from grpo_jax.types import Experience, Rollout


class Shapes(NamedTuple):
    """The sizes of a step's batch, for which executables are compiled."""

    prompts: int  # P
    group_size: int  # G
    queries: int  # Q
    tokens: int  # C


def put_rows(tree: Any, mesh: Mesh) -> Any:
    """Puts host arrays, whose first axis is rows, onto the mesh; every process passes all rows."""
    return processes.put(tree, specs.over_rows(mesh))


def abstract_rollout(shapes: Shapes, rows: Any) -> Any:
    """A Rollout of ShapeDtypeStructs; rows: the sharding for arrays over rows."""
    b, q, c = shapes.prompts * shapes.group_size, shapes.queries, shapes.tokens
    abstract_type: Any = Rollout  # Any, since beartype and pyright want arrays in its fields
    return abstract_type(
        tokens=abstract((b, q + c), jnp.int32, rows),
        prompt_mask=abstract((b, q), bool, rows),
        completion_mask=abstract((b, c), bool, rows),
        logprobs=abstract((b, c), jnp.float32, rows),
        truncated=abstract((b,), bool, rows),
        version=abstract((b, c), jnp.int32, rows),
        forced=abstract((b, c), bool, rows),
    )


def abstract_experience(shapes: Shapes, rows: Any, columns: int, known: Iterable[str], top_k: int = 0) -> Any:
    """An Experience of ShapeDtypeStructs.

    rows: the sharding for arrays over rows. columns: columns of the advantages. known: names of the optional fields
    that are there. top_k: how many of the teacher's tokens each position has; 0: no such fields.
    """
    rollout = abstract_rollout(shapes, rows)
    floats = rollout.logprobs
    abstract_type: Any = Experience
    by_row = {'correct': abstract(floats.shape[:1], jnp.float32, rows)}
    top = {'teacher_top': jnp.float32, 'teacher_ids': jnp.int32} if top_k else {}
    return abstract_type(
        rollout=rollout,
        advantages=abstract((floats.shape[0], columns), jnp.float32, rows),
        rewards=abstract(floats.shape[:1], jnp.float32, rows),
        group_ids=abstract(floats.shape[:1], jnp.int32, rows),
        **dict.fromkeys(('old_logprobs', 'ref_logprobs')) | {name: by_row.get(name, floats) for name in known},
        **{name: abstract((*floats.shape, top_k), dtype, rows) for name, dtype in top.items()},
    )


def check_divides(mesh: Mesh, name: str, count: int, axes: Sequence[str] = ROW_AXES):
    """Raises BadInput when the number of devices along `axes` does not divide the setting `name`, which is `count`."""
    devices = devices_along(mesh, axes)
    if count % devices:
        raise BadInput(
            name,
            count,
            f'must be a multiple of {" x ".join(f"mesh.{axis}" for axis in axes)} = {devices}; '
            f'choose {count + -count % devices}, the next one',
        )


def check_columns(mesh: Mesh, shapes: Shapes):
    """Raises BadInput when mesh axis context does not divide a row's columns, Q + C."""
    columns, devices = shapes.queries + shapes.tokens, mesh.shape['context']
    if columns % devices:
        remedy = f'must be a multiple of mesh.context = {devices}; choose {columns + -columns % devices}, the next one'
        raise BadInput('data.max_prompt_tokens + rollout.max_tokens', columns, remedy)


def devices_along(mesh: Mesh, axes: Sequence[str]) -> int:
    """How many devices the axes span together: the product of their sizes."""
    return math.prod(mesh.shape[axis] for axis in axes)
