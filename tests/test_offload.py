"""learner.offload: what waits in the hosts' memory lies there between programs, and changes no number."""

import jax
import numpy as np
import pytest

from grpo_jax import train
from grpo_jax.errors import BadInput
from grpo_jax.run.settings import Settings
from grpo_jax.sharding import compiled
from tests import tiny_run

CHANGES = dict(preset='ppo', algorithm__kl_coef=0.1, supervised__updates=0, mesh__fsdp=2, optimizer__learning_rate=1e-3)
BOTH = ('optimizer', 'reference')


def run(folder, steps=5, **changes):
    return train.run(tiny_run.config(steps=steps, **CHANGES, **changes), str(folder))


@pytest.mark.parametrize('schedule', ['hard', 'polyak'])
def test_a_run_that_offloads_and_is_resumed_equals_one_that_does_not(long, tmp_path, schedule):
    renewed = dict(collection__reference=schedule, collection__reference_every=2)
    plain = run(tmp_path / 'plain', **renewed)
    run(tmp_path / 'parts', 2, learner__offload=BOTH, **renewed)  # where a renewal is due
    state = run(tmp_path / 'parts', learner__offload=BOTH, **renewed)
    waits = state.opt_state, state.ref_params, state.aux['critic']['opt_state']
    assert {x.sharding.memory_kind for x in jax.tree.leaves(waits)} == {'pinned_host'}
    assert {x.sharding.memory_kind for x in jax.tree.leaves(state.params)} == {'device'}
    assert compiled.device_bytes(state) < 0.3 * compiled.device_bytes(plain)  # 2 copies of the weights of 7
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9),
        jax.device_get(state),
        jax.device_get(plain),
    )
    rows, expected = (tiny_run.rows(tmp_path / name) for name in ('parts', 'plain'))
    assert [row['reference_renewed'] for row in rows] == [0, 0, 1, 0, 1]
    assert rows[4]['loss'] == pytest.approx(expected[4]['loss'], rel=1e-4)


def test_the_reference_can_be_sampled_from_where_it_waits(long, tmp_path):
    state = run(tmp_path, 1, collection__source='reference', learner__offload=('reference',))
    assert int(state.step) == 1


def test_other_names_are_refused():
    with pytest.raises(BadInput, match=r"learner.offload = \('moments',\)"):
        Settings.from_config(tiny_run.config(learner__offload=('moments',)))
