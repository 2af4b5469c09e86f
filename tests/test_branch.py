"""Whole runs that are steered: amended in place, branched, anchored to another policy, and moved to other devices."""

import hashlib
import json
import os
import shutil
from typing import Any

import jax
import numpy as np
import pytest

from grpo_jax import train
from grpo_jax.errors import BadInput
from grpo_jax.hosts import lock
from grpo_jax.run import branch, checkpoint
from grpo_jax.run.open import MAKING, open_config
from grpo_jax.run.rows import recorded_events
from grpo_jax.run.steering import Steering
from grpo_jax.run.writer import Writer
from grpo_jax.sharding import compiled
from grpo_jax.tools import export, provenance
from tests import small_model, test_multihost, tiny_run

AMEND = Steering(amend=True)
CHANGES: dict[str, Any] = dict(
    preset='grpo',
    supervised__updates=0,
    optimizer__learning_rate=1e-3,
    log__rollouts=0,
    diagnose__on='off',  # the events are of steering alone
)


def config(steps, **changes):
    return tiny_run.config(steps=steps, **CHANGES | changes)


def run(folder, steps=6, steered=None, **changes):
    return train.run(config(steps, **changes), str(folder), steering=steered)


@pytest.fixture
def divisible(tmp_path):
    """The folder of a model whose vocabulary two and four devices divide."""
    return small_model.write(tmp_path / 'divisible', vocab_size=104)


@pytest.fixture(scope='module')
def old(tmp_path_factory):
    """The workdir of a run of four steps, with a checkpoint after the second and the fourth."""
    workdir = tmp_path_factory.mktemp('old')
    run(workdir, 4)
    return workdir


@pytest.fixture
def copy(old, tmp_path):
    return shutil.copytree(old, tmp_path / 'copy')


def assert_equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(one), jax.device_get(other))


class Killed(BaseException):
    pass


def kill_at(monkeypatch, step):
    """The run ends where it writes that step down."""
    write = Writer.step

    def stop(self, at, *rest):
        if at == step:
            raise Killed
        write(self, at, *rest)

    monkeypatch.setattr(Writer, 'step', stop)


NEW: dict[str, Any] = dict(optimizer__learning_rate=3e-3, rollout__temperature=0.8, algorithm__clip_high=0.28)


def test_an_amended_run_is_the_old_one_to_that_step_and_the_new_one_from_there(old, copy, tmp_path, monkeypatch):
    # the new config alone, on the old run's checkpoint
    new = tmp_path / 'new'
    tiny_run.record(open_config(config(6, **NEW), str(new)))
    shutil.copytree(old / 'checkpoints', new / 'checkpoints')
    expected = run(new, **NEW)
    with monkeypatch.context() as patch:
        kill_at(patch, 5)
        with pytest.raises(Killed):
            run(copy, steered=AMEND, **NEW)
    # killed before its next checkpoint; the run is the new one now, and needs no flag
    assert_equal(run(copy, **NEW), expected)
    assert tiny_run.rows(copy) == tiny_run.rows(old) + tiny_run.rows(new)
    assert [(row['step'], row['key']) for row in recorded_events(copy)] == [
        (4, key) for key in ('algorithm.clip_high', 'optimizer.learning_rate', 'rollout.temperature')
    ]
    refused(
        r'is 0\.003 and not 0\.001; use Steering\(amend=True\)', copy, 6, **NEW | {'optimizer__learning_rate': 1e-3}
    )


def test_a_learning_rate_of_nothing_stops_the_policy_where_it_is(long, old, copy):
    state = run(copy, steered=AMEND, optimizer__learning_rate=0.0)
    was = checkpoint.read_tree(checkpoint.path_of(str(old), 4), {'params': state.params}, partial=True)['params']
    assert_equal(state.params, was)


def test_an_amended_kl_coef_acts_although_the_state_keeps_it(long, copy, monkeypatch):
    adapting: dict[str, Any] = dict(algorithm__kl_target=0.5, algorithm__kl_horizon=100.0)
    run(copy, 6, AMEND, **adapting)
    with monkeypatch.context() as patch:
        kill_at(patch, 7)
        with pytest.raises(Killed):
            run(copy, 8, AMEND, algorithm__kl_coef=0.5, **adapting)
    state = run(copy, 8, algorithm__kl_coef=0.5, **adapting)
    kl_coef = float(state.aux['coefficients']['kl_coef'])
    # kl is far below its target: two steps of 16 rows, each times 1 - 0.2 * 16 / 100
    assert kl_coef == pytest.approx(0.5 * 0.968**2)
    # another amendment leaves what the target has made of it
    state = run(copy, 10, AMEND, algorithm__kl_coef=0.5, optimizer__learning_rate=1e-4, **adapting)
    assert float(state.aux['coefficients']['kl_coef']) == pytest.approx(kl_coef * 0.968**2)


def test_what_does_not_fit_an_amendment_begins_anew_and_is_named(long, tmp_path, caplog):
    kept: dict[str, Any] = dict(
        preset='dapo', collection__dead_groups='replay', collection__max_staleness=2, algorithm__correction='truncated'
    )
    run(tmp_path, 2, **kept)
    caplog.clear()
    state = run(tmp_path, 3, AMEND, rollout__group_size=2, **kept)
    assert int(state.step) == 3 and int(state.aux['position']) == 12
    assert [text for text in caplog.messages if 'begins anew' in text] == ['begins anew: the groups of earlier steps']


def fingerprint(folder):
    """{path: content and time of change} of every file and folder."""
    content = {}
    for path in sorted(folder.rglob('*')):
        bytes_of = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ''
        content[str(path.relative_to(folder))] = (bytes_of, os.stat(path).st_mtime_ns)
    return content


def test_a_branch_is_the_new_config_on_the_parents_checkpoint_and_leaves_the_parents_bytes(copy, tmp_path):
    unfinished = copy / 'checkpoints' / '5.orbax-checkpoint-tmp'  # which opening it as one's own would remove
    unfinished.mkdir()
    before = fingerprint(copy)
    child = tmp_path / 'runs' / 'child'
    branched = run(copy, 6, Steering(branch=str(child)), **NEW)
    assert fingerprint(copy) == before
    unfinished.rmdir()
    assert_equal(run(copy, 6, AMEND, **NEW), branched)
    assert tiny_run.rows(child) == tiny_run.rows(copy)[4:]
    (row,) = recorded_events(child)
    assert row | {'changes': 0} == {'step': 4, 'event': 'branched', 'parent': str(copy), 'changes': 0}
    assert row['changes']['optimizer.learning_rate'] == [1e-3, 3e-3]
    assert list(provenance.verify(str(child))) == []


def test_fewer_steps_than_a_run_has_are_refused(copy, tmp_path):
    for steered in (None, Steering(branch=str(tmp_path / 'child'))):
        refused('steps = 3: the run has 4 already', copy, 3, steered)
    export.check_whole(str(tmp_path / 'exported'), str(copy), 9)
    (tmp_path / 'exported').mkdir()
    export.check_whole(str(tmp_path / 'exported'), str(copy), 4)
    with pytest.raises(BadInput, match=r'steps = 9: .*is the policy of step 4'):
        export.check_whole(str(tmp_path / 'exported'), str(copy), 9)


def test_the_probe_begins_anew_where_its_logprobs_would_be_of_another_temperature(tmp_path, caplog):
    probed = dict(log__probe_every=1, reward__parts=(('coin', 1.0),), reward__verifier='')
    run(tmp_path, 2, **probed)
    run(tmp_path, 3, AMEND, **probed, rollout__temperature=0.7)
    assert 'begins anew: the probe' in caplog.text


def test_a_run_goes_on_with_the_files_of_the_model_that_it_was_begun_with(old, tmp_path):
    folder = shutil.copytree(tiny_run.MODEL, tmp_path / 'model')
    moved = dict(CHANGES, model__path=str(folder))
    train.run(tiny_run.config(steps=1, **moved), str(tmp_path / 'run'))
    path = folder / 'tokenizer_config.json'
    path.write_text(json.dumps(json.loads(path.read_text()) | {'chat_template': 'another'}))
    begun = open_config(tiny_run.config(steps=2, **moved), str(tmp_path / 'run')).model
    assert begun.tokenizer.chat_template != 'another' and begun.folder == str(tmp_path / 'run' / 'model')
    assert open_config(tiny_run.config(steps=2, **moved), str(tmp_path / 'new')).model.folder == str(folder)


def test_the_same_command_goes_on_with_the_branch(long, copy, tmp_path, monkeypatch):
    child = tmp_path / 'child'
    steered = Steering(branch=str(child))
    with monkeypatch.context() as patch:
        patch.setattr(branch, 'make_workdir', lambda *_: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            run(copy, 6, steered, seed=5)
    assert not child.exists()
    (child / MAKING / 'checkpoints').mkdir(parents=True)  # as kill -9 leaves it while the parts are moved
    (child / 'checkpoints' / '4').mkdir(parents=True)
    (child / lock.FILE).write_text('{}')
    with monkeypatch.context() as patch:
        kill_at(patch, 5)
        with pytest.raises(Killed):
            run(copy, 6, steered, seed=5)
    assert len(tiny_run.rows(child)) == 1
    shutil.rmtree(copy / 'checkpoints')  # the parent is not needed any more
    assert int(run(copy, 6, steered, seed=5).step) == 6
    assert [row['step'] for row in tiny_run.rows(child)] == [4, 5] and not (child / MAKING).exists()
    assert len(recorded_events(child)) == 1
    assert int(run(child, 7, seed=5).step) == 7  # as a run of its own


def refused(match, *arguments, **changes):
    with pytest.raises(BadInput, match=match) as error:
        run(*arguments, **changes)
    assert '\n' not in str(error.value)


def test_folders_that_are_no_branch_are_refused_and_left_alone(old, copy, divisible, tmp_path, monkeypatch):
    monkeypatch.setattr(compiled.Executable, 'lower', lambda _: pytest.fail('has compiled'))
    (tmp_path / 'mine').mkdir()
    (tmp_path / 'mine' / 'letter.txt').write_text('dear')
    refused('is there and holds no run', copy, 6, Steering(branch=str(tmp_path / 'mine')))
    refused('must not lie in one another', copy, 6, Steering(branch=str(copy)))
    refused('must not lie in one another', copy, 6, Steering(branch=str(copy / 'child')))
    refused('was not begun from', copy, 6, Steering(branch=str(old)))
    refused('holds no run', tmp_path / 'none', 6, Steering(branch=str(tmp_path / 'child')))
    cold = r'supervised.updates is 0 and not 200; a run and its branches keep .* cold start'
    refused(cold, copy, 6, Steering(branch=str(tmp_path / 'child')), supervised__updates=200)
    shutil.rmtree(copy / 'checkpoints')
    refused('holds no finished checkpoint', copy, 6, Steering(branch=str(tmp_path / 'child')))
    branch = Steering(branch=str(tmp_path / 'child'))
    refused(r'params/embed is .* in this model', old, 6, branch, model__path=divisible)
    assert not (tmp_path / 'child').exists()


def test_a_branch_on_other_data_begins_them_anew(old, tmp_path, caplog):
    options = {'digits': 1, 'count': 30, 'blurts': 0.5, 'wrong': 0.5}
    state = run(old, 5, Steering(branch=str(tmp_path / 'child')), data__options=options)
    assert int(state.aux['position']) == 4  # prompts of one step, not of five
    assert 'begins anew: the position in the data' in caplog.messages


@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')  # of arrays that came too late
def test_a_branch_begins_from_the_newest_sound_checkpoint(long, copy, tmp_path):
    (array,) = (copy / 'checkpoints' / '4' / 'default' / 'd').glob('*')
    array.write_bytes(array.read_bytes()[:-1])
    before = fingerprint(copy)
    run(copy, 3, Steering(branch=str(tmp_path / 'child')), reference__path=str(copy))
    assert fingerprint(copy) == before and recorded_events(tmp_path / 'child')[0]['step'] == 2


def test_a_branch_to_an_algorithm_with_a_critic_begins_it_anew_and_back_drops_it(long, old, tmp_path, caplog):
    state = run(old, 5, Steering(branch=str(tmp_path / 'critic')), preset='ppo')
    assert int(state.step) == 5 and 'begins anew: the critic' in caplog.messages
    # the optimizer goes on: Adam has counted one update a step
    assert int(jax.tree.leaves(state.opt_state)[0]) == 5
    caplog.clear()
    state = run(tmp_path / 'critic', 6, Steering(branch=str(tmp_path / 'back')), preset='dr_grpo')
    assert state.ref_params is None
    assert {text for text in caplog.messages if 'not used any more' in text} == {
        'not used any more: the critic',
        'not used any more: the reference policy',
    }


def test_a_branch_keeps_its_parents_reference_unless_it_names_another(long, old, tmp_path):
    plain = run(old, 5, Steering(branch=str(tmp_path / 'plain')))
    kept = checkpoint.read_tree(checkpoint.path_of(str(old), 4), {'ref_params': plain.ref_params}, partial=True)
    assert_equal(plain.ref_params, kept['ref_params'])
    policy = checkpoint.read_tree(checkpoint.path_of(str(old), 4), {'params': plain.params}, partial=True)['params']
    assert float(jax.tree.leaves(jax.tree.map(lambda a, b: abs(a - b).max(), policy, plain.ref_params))[0]) > 0
    export.export(str(old), str(tmp_path / 'exported'), 'float32')
    for number, path in enumerate([old, old / 'checkpoints' / '4', tmp_path / 'exported']):
        child = tmp_path / str(number)
        state = run(old, 5, Steering(branch=str(child)), reference__path=str(path))
        assert_equal(state.ref_params, policy)
        assert tiny_run.rows(child)[0]['kl_ref'] == pytest.approx(0, abs=1e-6)


def test_a_new_run_is_anchored_to_the_policy_of_another(old, tmp_path):
    state = run(tmp_path / 'run', 1, reference__path=str(old))
    assert_equal(state.ref_params, checkpoint.read_params(str(old), state.params)[0])


def test_references_that_cannot_be_are_refused_before_anything_compiles(old, divisible, tmp_path, monkeypatch):
    monkeypatch.setattr(compiled.Executable, 'lower', lambda _: pytest.fail('has compiled'))
    where = tmp_path / 'run'
    refused('keeps no reference', where, 6, preset='dr_grpo', reference__path=str(old))
    refused('no such folder', where, 6, reference__path=str(tmp_path / 'nowhere'))
    refused('reference.path = .*no model.safetensors', where, 6, reference__path=divisible)
    refused('reference.path = .*in this model', where, 6, reference__path=str(old), model__path=divisible)
    assert not where.exists()


MOVES = {
    'from 8 devices to 4': (dict(mesh__data=4, mesh__fsdp=2), dict(mesh__data=2, mesh__fsdp=2)),
    'from 4 devices to 1': (dict(mesh__data=2, mesh__fsdp=2), {}),
    'from 1 device to 8': ({}, dict(mesh__fsdp=4, mesh__context=2)),
    'from fsdp to tensor': (dict(mesh__fsdp=2), dict(mesh__tensor=2)),
    'from packed rows to padded ones': (dict(learner__pack_columns=64), dict(learner__microbatches=2)),
    'from padded rows to packed ones': ({}, dict(learner__pack_columns=64, learner__remat='full', learner__chunk=8)),
    'from offloaded to not': (dict(learner__offload=('optimizer', 'reference')), {}),
    'from not offloaded to it': ({}, dict(learner__offload=('optimizer', 'reference'))),
    'all at once': (
        dict(mesh__data=2, mesh__fsdp=2, learner__pack_columns=64, learner__offload=('optimizer',)),
        dict(learner__microbatches=2),
    ),
}


@pytest.mark.parametrize('before, after', MOVES.values(), ids=MOVES)
def test_a_run_that_is_moved_goes_on_with_the_same_losses(long, divisible, tmp_path, before, after, caplog):
    shared = {'data__prompts_per_step': 8, 'model__path': divisible}
    before, after = (shared | changes for changes in (before, after))
    run(tmp_path / 'moved', 2, **before)
    shutil.copytree(tmp_path / 'moved', tmp_path / 'unmoved')
    caplog.clear()
    state = run(tmp_path / 'moved', 3, **after)
    unmoved = run(tmp_path / 'unmoved', 3, **before)
    rows, expected = tiny_run.rows(tmp_path / 'moved'), tiny_run.rows(tmp_path / 'unmoved')
    assert len(rows) == len(expected) == 3 and int(state.step) == 3
    for name in ('loss', 'reward', 'length', 'grad_norm', 'entropy', 'kl_ref'):
        assert rows[2][name] == pytest.approx(expected[2][name], abs=1e-5), name
    assert int(state.aux['position']) == int(unmoved.aux['position'])
    assert not recorded_events(tmp_path / 'moved')
    assert sum(': was ' in text for text in caplog.messages) > 0


def test_two_processes_amend_and_branch_what_one_began_as_one_does(long, tmp_path):
    one, two = tmp_path / 'one', tmp_path / 'two'
    test_multihost.Run(one, 1, '--config.steps=2').succeeds()
    shutil.copytree(one, two)
    new = ('--config.optimizer.learning_rate=1e-4', '--amend')
    for count, workdir in enumerate((one, two), 1):
        test_multihost.Run(workdir, count, *new).succeeds()
        branched = (f'--branch={workdir}_branch', '--config.optimizer.learning_rate=1e-4', '--config.seed=3')
        test_multihost.Run(workdir, count, *branched, '--config.steps=6').succeeds()
    test_multihost.assert_equal(two, one)
    assert recorded_events(two) == recorded_events(one) != []
    rows = tiny_run.rows(tmp_path / 'one_branch')
    assert tiny_run.rows(tmp_path / 'two_branch') == rows and [row['step'] for row in rows] == [4, 5]
    assert json.loads((two / 'config.json').read_text())['optimizer']['learning_rate'] == 1e-4
