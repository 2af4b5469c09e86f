"""Rows that go on in the next step: which groups a step learns from, and that a resumed run does the same."""

import jax
import numpy as np
import pytest

from grpo_jax import train
from grpo_jax.sampler import engine as engines
from tests import tiny_run

CARRIED = dict(
    preset='grpo', algorithm__correction='truncated', collection__in_flight=4, rollout__max_tokens=24,
    evaluation__prompts=2, evaluation__samples=1, supervised__updates=0,
)  # fmt: skip


@pytest.fixture(autouse=True)
def cut(monkeypatch):
    """Steps may end after each 4 tokens, so that rows of 24 tokens are carried."""
    monkeypatch.setattr(engines, 'CUT', 4)


def test_every_group_is_learned_from_once_in_the_order_of_admission_among_the_complete(tmp_path):
    config = tiny_run.config(steps=6, **CARRIED)
    state = train.run(config, str(tmp_path))
    rows = tiny_run.rows(tmp_path)
    print(rows[-1])
    assert int(state.aux['position']) == 4 * 6 + 4  # admitted = learned + under way
    assert rows[0]['carried_rows'] == 0 and max(row['carried_rows'] for row in rows) > 0
    assert any(row['carried_tokens'] > 0 for row in rows)


@pytest.mark.parametrize(
    'changes',
    [
        dict(),
        dict(collection__in_flight=0, collection__staleness=1),
        dict(collection__staleness=2, collection__retire_above=0.5),
        dict(collection__in_flight=0, collection__staleness=1, preset='dapo', collection__max_draws=2),
    ],
    ids=['carried', 'stale', 'both', 'resampled'],
)
def test_a_resumed_run_is_the_same(changes, tmp_path):
    config = tiny_run.config(steps=6, **CARRIED | changes)
    straight = train.run(config, str(tmp_path / 'straight'))
    for config.steps in (2, 4, 6):
        resumed = train.run(config, str(tmp_path / 'parts'))
    assert tiny_run.rows(tmp_path / 'parts') == tiny_run.rows(tmp_path / 'straight')
    jax.tree.map(np.testing.assert_array_equal, straight.replace(pending=None), resumed.replace(pending=None))
    jax.tree.map(np.testing.assert_array_equal, straight.pending.pack(), resumed.pending.pack())
