"""Scatters and gathers along the sides of a torus: lines of chips, and sums that travel around them."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
import numpy as np
import pytest

from grpo_jax.sharding import mesh as meshes
from grpo_jax.sharding import torus


@dataclasses.dataclass(frozen=True)
class Chip:
    """What is read of a device."""

    coords: tuple[int, ...]
    core_on_chip: int = 0
    platform: str = 'tpu'


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
    stages = torus.make_stages(at)
    assert [len(groups[0]) for groups in stages] == sizes
    for groups in stages:
        assert sorted(itertools.chain(*groups)) == list(range(len(at)))
        if len(sizes) > 1:
            for group in groups:
                assert sum(len({at[i][side] for i in group}) > 1 for side in range(len(at[0]))) == 1


@pytest.mark.parametrize('at', [places(8), places(2, 4), places(2, 2, 2), [(0, 0), (1, 0), (1, 1), (0, 1)]])
@pytest.mark.parametrize('dimension', [0, 1])
def test_a_scatter_in_stages_is_that_of_all_at_once_and_a_gather_undoes_it(at, dimension):
    mesh, axis = meshes.make({'fsdp': len(at)}), torus.Axis('fsdp', torus.make_stages(at), 'tpu')
    cut = PartitionSpec(*('fsdp' if i == dimension else None for i in range(2)))
    x = jnp.asarray(np.random.default_rng(0).integers(-50, 50, (len(at), 16, 24)), jnp.float32)

    def scatter_and_gather(x):
        part = axis.scatter(x[0], dimension)
        return part, axis.gather(part, dimension), axis._replace(platform='cpu').scatter(x[0], dimension)

    both = jax.shard_map(
        scatter_and_gather,
        mesh=mesh,
        in_specs=PartitionSpec('fsdp'),
        out_specs=(cut, PartitionSpec(), cut),
        check_vma=False,
    )
    for result in jax.jit(both)(x):
        np.testing.assert_array_equal(result, x.sum(0))


def test_the_stages_of_an_axis_are_those_of_its_devices():
    """The 4x4 of a mesh that is cut over both sides, of which each axis has one."""
    devices = np.array([Chip((i // 4, i % 4, 0)) for i in range(16)])
    cut = Mesh(devices.reshape(1, 4, 1, 4), meshes.AXES)
    for name in 'fsdp', 'tensor':
        assert torus.make_axis(cut, name) == torus.Axis(name, [[[0, 1, 2, 3]]], 'tpu')
    shuffled = np.random.default_rng(0).permutation(devices)
    whole = meshes.arrange(list(shuffled), (1, 16, 1, 1))
    assert [len(groups) for groups in torus.make_axis(whole, 'fsdp').stages] == [4, 4]
    assert torus.make_axis(whole, 'data').stages == []
    assert torus.make_axis(meshes.make({'fsdp': 8}), 'fsdp') == torus.Axis('fsdp', [[list(range(8))]], 'cpu')
