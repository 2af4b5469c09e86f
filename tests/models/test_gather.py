"""Gradients of gathers add up in order on GPUs as elsewhere, and no program of a run adds up in another way there."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.collect.draw import abstract_aux
from grpo_jax.configs import arithmetic
from grpo_jax.models import gather
from grpo_jax.run.open import make_run_learner, make_run_sampler, open_run, open_split
from grpo_jax.sampler import schedule
from grpo_jax.sharding import mesh


@pytest.mark.parametrize(('rows', 'count'), [(1, 40), (39, 7), (24, 190)])
def test_sums_in_order_are_those_of_a_scatter(rows, count):
    in_order, scattered = (jax.jit(add, static_argnums=0) for add in (gather._sum_in_order, gather._sum_by_scatter))
    for seed in range(10):
        rng = np.random.default_rng(seed)
        index, gradient = rng.integers(0, rows, count), rng.normal(size=(count, 3)).astype(np.float32)
        summed = np.asarray(in_order(rows, index, gradient))
        np.testing.assert_allclose(summed, scattered(rows, index, gradient), atol=1e-5)
        assert not np.any(summed[np.setdiff1d(np.arange(rows), index)])


def test_gradient_is_that_of_indexing():
    x, index = jax.random.normal(jax.random.key(0), (7, 4, 2)), jnp.array([3, 3, 0, 6, 3])
    weights = jnp.arange(5.0)[:, None, None]
    taken, indexed = (
        jax.value_and_grad(lambda x, read=read: jnp.sum(weights * read(x) ** 2))(x)
        for read in (lambda x: gather.take(x, index), lambda x: x[index])
    )
    jax.tree.map(np.testing.assert_array_equal, taken, indexed)


@pytest.mark.parametrize('platform', ['default', 'cuda'])
def test_picks_and_their_gradient(platform, monkeypatch):
    monkeypatch.setattr(jax.lax, 'platform_dependent', lambda *arrays, **branches: branches[platform](*arrays))
    x, index, weights = jax.random.normal(jax.random.key(0), (6, 4)), jnp.array([5, 0, 0, 3]), jnp.arange(1.0, 5.0)
    value, gradient = jax.value_and_grad(lambda x: jnp.sum(weights * gather.pick(x, index)))(x)
    chosen = np.arange(6)[:, None] == np.asarray(index)
    np.testing.assert_allclose(value, np.sum(weights * np.asarray(x).T[chosen.T]), rtol=1e-6)
    np.testing.assert_array_equal(gradient, np.where(chosen, weights, 0))
    several = jax.vmap(gather.pick, (None, 1), 1)(x, jnp.stack([index, index], 1))
    np.testing.assert_array_equal(several, np.asarray(x).T[chosen.T][:, None].repeat(2, 1))


@pytest.mark.parametrize(('preset', 'columns'), [('grpo', -1), ('ppo', 0)])
def test_no_program_of_a_run_scatters_in_any_order_on_a_gpu(preset, columns, tmp_path):
    """Of scatters that may meet, XLA's GPU compiler makes loops of one row after another."""
    config = arithmetic.get_config(preset)
    config.learner.pack_columns = columns
    run = dataclasses.replace(open_run(config, str(tmp_path)), mesh=mesh.make({}))  # one device
    shapes, examples = run.settings.step_shapes(run.algorithm), len(open_split(run, 'train').examples)
    learner = make_run_learner(run, abstract_aux(run.settings.collection, shapes, examples))
    sample = make_run_sampler(run, shapes)
    traced = [program.traced for program in learner.programs.values()]
    traced += [sample.programs.trace(key) for key in schedule.largest_programs(sample.schedule)]
    texts = [program.lower(lowering_platforms=('cuda',)).as_text() for program in traced]
    scatters = [scatter for text in texts for scatter in re.findall('"stablehlo.scatter".*', text)]
    assert len(scatters) > 10
    assert [scatter for scatter in scatters if 'unique_indices = true' not in scatter] == []
