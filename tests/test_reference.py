"""When the reference policy is renewed, by what, and that a resumed run does the same."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import train
from grpo_jax.collect.options import CollectOptions
from grpo_jax.collect.policies import make_renewal
from grpo_jax.errors import BadInput
from grpo_jax.run import checkpoint
from grpo_jax.run.settings import Settings
from grpo_jax.types import TrainState
from tests import tiny_run


def state_of(step, policy, ref):
    return TrainState(
        jnp.int32(step),
        {'w': jnp.full(3, policy)},
        {},
        {'w': jnp.full(3, ref)},
        {'coefficients': {'kl_coef': jnp.float32(9), 'entropy_coef': jnp.float32(1)}},
    )


def refreshed(tmp_path, section, state):
    checkpoints = checkpoint.manager(str(tmp_path), keep=2)
    settings = Settings.from_config(tiny_run.config(preset='grpo', algorithm__kl_coef=0.5))
    settings = settings._replace(collection=CollectOptions(**{'reference_mix': 0.25} | section))
    new, row = make_renewal(SimpleNamespace(settings=settings), checkpoints, state)(state)
    checkpoints.close()
    return np.asarray(new.ref_params['w']), float(new.aux['coefficients']['kl_coef']), row


HARD = {'reference': 'hard', 'reference_every': 4}


@pytest.mark.parametrize(
    'section, step, expected, kl_coef, renewed',
    [
        (HARD, 0, 1.0, 9, False),
        (HARD, 3, 1.0, 9, False),
        (HARD, 4, 2.0, 0.5, True),
        (HARD, 8, 2.0, 0.5, True),
        ({'reference': 'polyak', 'reference_every': 4}, 4, 1.25, 9, True),
        ({'reference': 'frozen', 'reference_every': 0}, 4, 1.0, 9, False),
    ],
)
def test_schedule(tmp_path, section, step, expected, kl_coef, renewed):
    found = refreshed(tmp_path, section, state_of(step, 2.0, 1.0))
    np.testing.assert_array_equal(found[0], expected)
    assert found[1:] == (kl_coef, {'reference_renewed': renewed})


def test_the_policy_comes_from_its_checkpoint(tmp_path):
    # there is one of step 4 already: what it holds is the new reference
    checkpoints = checkpoint.manager(str(tmp_path), keep=2)
    checkpoint.save(checkpoints, state_of(4, 7.0, 1.0))
    checkpoints.close()
    assert np.all(refreshed(tmp_path, HARD, state_of(4, 2.0, 1.0))[0] == 7)


@pytest.mark.parametrize(
    'changes, words',
    [
        (dict(collection__reference='daily'), ['daily', 'polyak']),
        (dict(collection__reference='hard'), ['reference_every = 0', 'hard']),
        (dict(collection__reference_every=3), ['reference_every = 3', 'frozen']),
        (dict(collection__reference_mix=0.0), ['reference_mix = 0.0']),
    ],
)
def test_impossible_schedules_are_refused(changes, words):
    with pytest.raises(BadInput) as error:
        Settings.from_config(tiny_run.config(**changes))
    assert all(word in str(error.value) for word in words)


def test_a_run_resumes_exactly_across_a_renewal(long, tmp_path):
    changes = dict(
        preset='grpo',
        collection__reference='hard',
        collection__reference_every=2,
        supervised__updates=0,
        optimizer__learning_rate=1e-3,
    )
    straight = train.run(tiny_run.config(steps=5, **changes), str(tmp_path / 'straight'))
    rows = tiny_run.rows(tmp_path / 'straight')
    assert [row['reference_renewed'] for row in rows] == [0, 0, 1, 0, 1]
    assert rows[2]['kl_ref'] == 0 and rows[3]['kl_ref'] > 0
    train.run(tiny_run.config(steps=2, **changes), str(tmp_path / 'parts'))  # stops where the reference is due
    resumed = train.run(tiny_run.config(steps=5, **changes), str(tmp_path / 'parts'))
    jax.tree.map(np.testing.assert_array_equal, straight, resumed)
    assert tiny_run.rows(tmp_path / 'parts') == rows
