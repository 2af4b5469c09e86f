"""Updates that are skipped: what a run keeps of them, and what `grpo-jax replay_bad` finds out."""

import os

import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import algorithms, train
from grpo_jax.errors import BadInput
from grpo_jax.run import checkpoint
from grpo_jax.run.rows import recorded_events
from grpo_jax.tools import replay_bad
from tests import tiny_run


def broken(ratio, advantages, logprobs):
    return jnp.where(jnp.arange(ratio.shape[1]) == 0, jnp.nan, ratio)


@pytest.fixture(scope='module')
def config():
    under_way = dict(algorithm__correction='truncated', collection__staleness=1)  # in its checkpoints
    changes = dict(supervised__updates=0, learner__max_bad_steps=1, evaluation__prompts=2, checkpoint__every=50)
    return tiny_run.config(**changes, **under_way)


@pytest.fixture(scope='module')
def stopped(config, tmp_path_factory):
    """(workdir, algorithm) of a run whose updates are all skipped, until there are too many."""
    workdir, method = str(tmp_path_factory.mktemp('run')), algorithms.make(config.algorithm)._replace(surrogate=broken)
    with pytest.raises(FloatingPointError, match=r'max_bad_steps = 1; lower .*replay_bad .*--step=1') as error:
        train.run(config, workdir, algorithm=method)
    assert '2 updates were skipped' in str(error.value)
    return workdir, method


def sound():
    """The Algorithm of the config, which is not broken."""
    return algorithms.make(tiny_run.config(algorithm__correction='truncated').algorithm)


def test_a_skipped_update_is_kept_with_the_parameters_that_it_did_not_change(stopped):
    workdir, _ = stopped
    assert sorted(os.listdir(os.path.join(workdir, 'bad'))) == ['000000.npz', '000001.npz']
    assert [(row['step'], row['event'], row['batch']) for row in recorded_events(workdir) if 'batch' in row] == [
        (0, 'skipped', 'bad/000000.npz'),
        (1, 'skipped', 'bad/000001.npz'),
    ]
    assert checkpoint.steps(workdir) == [2, 1]


def test_the_batch_comes_back_as_it_was_written(stopped):
    batch = checkpoint.load_bad_batch(stopped[0], 1)
    assert batch.rollout.tokens.shape == (16, 18) and batch.rollout.completion_mask.dtype == bool
    assert batch.advantages.dtype == np.float32 and batch.values is None


def test_the_replay_names_the_term_and_its_tokens(stopped):
    workdir, method = stopped
    lines = list(replay_bad.run(workdir, 1, rows=3, algorithm=method))
    assert lines[0].endswith('with the parameters of checkpoint 2, which are those of the update')
    assert 'advantages of the batch: all finite' in lines and 'logprobs with these parameters: all finite' in lines
    (start,) = [i for i, line in enumerate(lines) if line.startswith('term surrogate')]
    assert '16 of' in lines[start] and 'are not finite' in lines[start]
    assert lines[start + 1].startswith('  row 0 (group 0), token 0 ') and lines[start + 1].endswith(': nan')
    assert lines[start + 4] == '  and 13 more in 16 rows; --rows shows more'
    assert lines[-1].startswith('the update again: loss nan') and lines[-1].endswith('1 of 1 updates skipped')


def test_the_replay_names_the_row_of_a_batch(stopped):
    workdir, batch = stopped[0], checkpoint.load_bad_batch(stopped[0], 1)
    batch.advantages[6] = np.inf
    checkpoint.dump_bad_batch(workdir, 4, batch)
    lines = list(replay_bad.run(workdir, 4, algorithm=sound()))
    (start,) = [i for i, line in enumerate(lines) if line.startswith('advantages of the batch')]
    assert lines[start + 1].startswith('  row 6 (group 1), token 0 ') and lines[start + 1].endswith(': inf')
    assert lines[-1].endswith('1 of 1 updates skipped')


def test_what_is_fine_by_now_is_said_to_be(stopped):
    lines = list(replay_bad.run(stopped[0], 1, algorithm=sound()))
    assert lines[-1].endswith('finite now: the cause was in the parameters')


def test_pieces_of_a_notebook_are_asked_for(stopped):
    with pytest.raises(BadInput, match=r"algorithm\.surrogate = '.*:broken': .*; pass the Algorithm as algorithm="):
        list(replay_bad.run(stopped[0], 1))


@pytest.mark.parametrize('step, words', [(7, 'choose one of 0, 1'), (-1, 'choose one of 0, 1')])
def test_a_step_without_a_batch_is_refused(stopped, step, words):
    with pytest.raises(BadInput, match=words):
        list(replay_bad.run(stopped[0], step))


@pytest.mark.parametrize('content', [b'', b'PK', b'x' * 1000])
def test_a_batch_that_cannot_be_read_is_refused(tmp_path, content):
    os.makedirs(tmp_path / 'bad')
    (tmp_path / 'bad' / '000003.npz').write_bytes(content)
    with pytest.raises(BadInput, match='cannot be read'):
        checkpoint.load_bad_batch(str(tmp_path), 3)


def test_other_parameters_are_named_where_the_checkpoint_is_gone(tmp_path):
    for step in (2, 9):
        (tmp_path / 'checkpoints' / str(step)).mkdir(parents=True)
    assert replay_bad.choose_checkpoint(str(tmp_path), 1) == (2, ', which are those of the update')
    chosen, remark = replay_bad.choose_checkpoint(str(tmp_path), 6)
    assert chosen == 9 and 'are gone' in remark
