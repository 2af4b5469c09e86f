"""Batches on the mesh: their sizes, what divides them, and how host arrays of rows come onto it."""

import math
from typing import NamedTuple

import jax.numpy as jnp

from grpo_jax.errors import BadInput
from grpo_jax.hosts import processes
from grpo_jax.sharding import specs
from grpo_jax.sharding.compiled import abstract
from grpo_jax.sharding.mesh import ROW_AXES
from grpo_jax.types import Experience, Rollout


class Shapes(NamedTuple):
    """The sizes that programs are compiled for."""

    prompts: int  # P
    group_size: int  # G
    queries: int  # Q
    tokens: int  # C


def put_rows(tree, mesh):
    """Host arrays with a leading row axis, laid out on the mesh; every process has all rows."""
    return processes.put(tree, specs.rows(mesh))


def abstract_rollout(shapes, rows):
    """ShapeDtypeStructs of a Rollout of these shapes."""
    b, q, c = shapes.prompts * shapes.group_size, shapes.queries, shapes.tokens
    return Rollout(
        tokens=abstract((b, q + c), jnp.int32, rows),
        prompt_mask=abstract((b, q), bool, rows),
        completion_mask=abstract((b, c), bool, rows),
        logprobs=abstract((b, c), jnp.float32, rows),
        truncated=abstract((b,), bool, rows),
        version=abstract((b, c), jnp.int32, rows),
        forced=abstract((b, c), bool, rows),
    )


def abstract_experience(shapes, rows, columns, known):
    """ShapeDtypeStructs of an Experience with `columns` columns of advantages and the optional fields known."""
    rollout = abstract_rollout(shapes, rows)
    floats = rollout.logprobs
    return Experience(
        rollout=rollout,
        advantages=abstract((floats.shape[0], columns), jnp.float32, rows),
        rewards=abstract(floats.shape[:1], jnp.float32, rows),
        group_ids=abstract(floats.shape[:1], jnp.int32, rows),
        **dict.fromkeys(('old_logprobs', 'ref_logprobs')) | dict.fromkeys(known, floats),
    )


def check_divides(mesh, name, count, axes=ROW_AXES):
    """BadInput when the devices along the axes do not divide a count, which has that name."""
    devices = devices_along(mesh, axes)
    if count % devices:
        raise BadInput(
            name,
            count,
            f'must be a multiple of {" x ".join(f"mesh.{axis}" for axis in axes)} = {devices}; '
            f'the next one is {count + -count % devices}',
        )


def check_columns(mesh, shapes):
    """BadInput when the context axis does not divide the columns of a row."""
    columns, parts = shapes.queries + shapes.tokens, mesh.shape['context']
    if columns % parts:
        raise BadInput(
            'data.max_prompt_tokens + rollout.max_tokens',
            columns,
            f'must be a multiple of mesh.context = {parts}; the next one is {columns + -columns % parts}',
        )


def devices_along(mesh, axes):
    """The number of devices along the axes."""
    return math.prod(mesh.shape[axis] for axis in axes)
