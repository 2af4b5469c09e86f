"""Scatters and gathers along the sides of a torus: lines of chips, and sums that travel around them."""

import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from grpo_jax.learner import partition
from grpo_jax.sharding import mesh as meshes
from grpo_jax.sharding import torus


def places(*sides):
    return list(itertools.product(*(range(side) for side in sides)))


@pytest.mark.parametrize(
    'at, sizes',
    [
        (places(8), [8]),
        (places(4, 4), [4, 4]),
        (places(2, 4), [4, 2]),
        (places(4, 4, 4), [4, 4, 4]),
        (places(16, 16), [16, 16]),
        ([(x if y % 2 else 3 - x, y) for y in range(2) for x in range(4)], [4, 2]),  # to and fro
        ([(0, 0), (1, 0), (1, 1), (0, 1)], [2, 2]),
        ([(0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 2)], [6]),  # no grid
        ([(0,)] * 8, [8]),  # devices that are nowhere
        ([(0,)], []),
    ],
)
def test_stages_are_the_sides_of_a_grid(at, sizes):
    stages = torus.lines(at)
    assert [len(groups[0]) for groups in stages] == sizes
    for groups in stages:
        assert sorted(itertools.chain(*groups)) == list(range(len(at)))
        if len(sizes) > 1:
            for group in groups:
                assert sum(len({at[i][side] for i in group}) > 1 for side in range(len(at[0]))) == 1


@pytest.mark.parametrize('at', [places(8), places(2, 4), places(2, 2, 2), [(0, 0), (1, 0), (1, 1), (0, 1)]])
@pytest.mark.parametrize('dimension', [0, 1])
def test_a_scatter_in_stages_is_that_of_all_at_once_and_a_gather_undoes_it(at, dimension):
    n, stages = len(at), torus.lines(at)
    mesh = meshes.make({'fsdp': n})
    cut = PartitionSpec(*('fsdp' if i == dimension else None for i in range(2)))
    x = jnp.asarray(np.random.default_rng(0).integers(-50, 50, (n, 16, 24)), jnp.float32)

    def scatter(x):
        for groups in reversed(stages):
            x = partition.scatter_around(x, groups, dimension)
        gathered = x
        for groups in stages:
            gathered = jax.lax.all_gather(gathered, 'fsdp', axis=dimension, axis_index_groups=groups, tiled=True)
        return x, gathered

    both = jax.shard_map(
        lambda x: scatter(x[0]),
        mesh=mesh,
        in_specs=PartitionSpec('fsdp'),
        out_specs=(cut, PartitionSpec()),
        check_vma=False,
    )
    for result in jax.jit(both)(x):
        np.testing.assert_array_equal(result, x.sum(0))


def test_the_stages_of_an_axis_are_those_of_its_devices():
    """The 4x4 of a mesh that is cut over both sides, of which each axis has one."""
    devices = np.array([SimpleNamespace(coords=(i // 4, i % 4, 0), core_on_chip=0) for i in range(16)])
    cut = SimpleNamespace(devices=devices.reshape(1, 4, 1, 4), axis_names=meshes.AXES)
    assert torus.stages(cut, 'fsdp') == torus.stages(cut, 'tensor') == [[[0, 1, 2, 3]]]
    whole = SimpleNamespace(devices=devices.reshape(1, 16, 1, 1), axis_names=meshes.AXES)
    assert [len(groups) for groups in torus.stages(whole, 'fsdp')] == [4, 4] and torus.stages(whole, 'data') == []
    assert torus.stages(meshes.make({'fsdp': 8}), 'fsdp') == [[list(range(8))]]
