"""What a begun run goes on with, what --amend records, what only a branch can have; exact on each side of a change."""

import itertools
import json
import os
import shutil
import sys
from typing import Any

import pytest

from grpo_jax.errors import BadInput
from grpo_jax.hosts import json_file
from grpo_jax.ranges import Kind
from grpo_jax.run import steering
from grpo_jax.run.open import open_config
from grpo_jax.run.rows import recorded_events
from grpo_jax.run.settings import kind_of
from grpo_jax.run.steering import Change, Steering
from tests import small_model, tiny_run

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PLAIN, AMEND = Steering(), Steering(amend=True)


@pytest.mark.parametrize(
    'key, kind',
    [
        ('mesh.fsdp', Kind.FREE),
        ('learner.pack_columns', Kind.FREE),
        ('rollout.kernels', Kind.FREE),
        ('rollout.temperature', Kind.AMENDABLE),
        ('algorithm.clip_high', Kind.AMENDABLE),
        ('algorithm.a_number_of_my_own', Kind.AMENDABLE),
        ('reward.options.mine.bonus', Kind.AMENDABLE),
        ('reward.options.model.batch', Kind.FREE),
        ('algorithm.advantage', Kind.FIXED),
        ('data.options.digits', Kind.FIXED),
        ('data.options.folder', Kind.PATH),
        ('reward.parts', Kind.PARTS),
        ('seed', Kind.FIXED),
        ('unheard_of', Kind.FIXED),
    ],
)
def test_kinds(key, kind):
    assert kind_of(key) == kind


def test_weights_of_rewards_are_amendable_and_the_rewards_are_not():
    old = [['numeric', 1.0], ['format', 0.2]]
    assert Change('reward.parts', old, [['numeric', 1.0], ['format', 0.5]]).kind == Kind.AMENDABLE
    assert Change('reward.parts', old, [['numeric', 1.0]]).kind == Kind.FIXED
    assert Change('reward.parts', old, [['numeric', 1.0], ['length', 0.2]]).kind == Kind.FIXED


def refusal(workdir, steered: Steering | None = PLAIN, **changes):
    with pytest.raises(BadInput) as error:
        tiny_run.read(open_config(tiny_run.config(**changes), str(workdir), steered=steered), steered)
    text = str(error.value)
    assert '\n' not in text
    return text


@pytest.fixture
def begun(tmp_path):
    tiny_run.record(open_config(tiny_run.config(), str(tmp_path / 'run')))
    return tmp_path / 'run'


@pytest.fixture
def as_command(monkeypatch):
    """The process was begun by a command of the package, and not by a notebook's kernel or by pytest."""
    monkeypatch.setattr(sys, 'orig_argv', [sys.executable, '-m', 'grpo_jax.train', '--config=arithmetic'])


def test_in_a_notebook_the_refusal_offers_what_a_cell_can_say(begun):
    text = refusal(begun, optimizer__learning_rate=1e-7)
    assert 'use Steering(amend=True) to go on' in text and 'Steering(branch=DIR) to begin' in text and '--' not in text
    assert 'Steering(amend=True) cannot change seed in place' in refusal(begun, AMEND, seed=3)
    assert refusal(begun, None, optimizer__learning_rate=1e-7).endswith('or another workdir')


def test_the_refusal_names_every_change_and_both_ways_out_in_one_line(begun, as_command):
    before = (begun / 'config.json').read_bytes()
    text = refusal(begun, rollout__temperature=0.7, optimizer__learning_rate=1e-7, mesh__data=2)
    for part in ('optimizer.learning_rate is 0.0003 and not 1e-07', 'rollout.temperature is 1.0 and not 0.7'):
        assert part in text
    assert 'use --amend to go on' in text and '--branch=DIR to begin' in text and 'mesh.data' not in text
    assert (begun / 'config.json').read_bytes() == before and not (begun / 'events.jsonl').exists()


@pytest.mark.parametrize('steered', [PLAIN, AMEND])
def test_what_is_fixed_is_refused_with_and_without_amend(begun, steered, as_command):
    text = refusal(begun, steered, seed=3, optimizer__learning_rate=1e-7)
    assert (
        'holds another run' in text
        and 'seed is 0 and not 3' in text
        and '--amend cannot change seed in place' in text
        and '--branch=DIR' in text
    )


def test_a_command_that_cannot_steer_names_another_workdir(begun, as_command):
    text = refusal(begun, None, optimizer__learning_rate=1e-7)
    assert text.endswith('use the old value, or another --workdir') and '--amend' not in text


def test_free_changes_go_on_with_a_line_each(begun, caplog):
    changes = {'learner__remat': 'full', 'reward__workers': 2, 'log__rollouts': 3, 'steps': 9}
    for steered in (None, PLAIN):
        caplog.clear()
        run = open_config(tiny_run.config(**changes), str(begun), steered=steered)
        assert len(caplog.records) == 4 and "learner.remat: was 'none', now 'full'" in caplog.text
    tiny_run.record(run, 2)
    assert json.loads((begun / 'config.json').read_text())['learner']['remat'] == 'full'
    assert not recorded_events(begun)


def amend(workdir, step, steered=AMEND, **changes):
    tiny_run.record(open_config(tiny_run.config(**changes), str(workdir), steered=steered), step, steered)


def test_an_amendment_is_recorded_with_step_key_old_and_new(begun):
    amend(begun, 4, optimizer__learning_rate=1e-7, reward__parts=(('numeric', 2.0),), mesh__data=2)
    amended = {'step': 4, 'event': 'amended'}
    assert recorded_events(begun) == [
        amended | {'key': 'optimizer.learning_rate', 'old': 3e-4, 'new': 1e-7},
        amended | {'key': 'reward.parts', 'old': [['numeric', 1.0]], 'new': [['numeric', 2.0]]},
    ]
    # from now on the new values are the run's: no flag is needed, and the old ones are refused
    changes = {'optimizer__learning_rate': 1e-7, 'reward__parts': (('numeric', 2.0),), 'mesh__data': 2}
    amend(begun, 4, PLAIN, **changes)
    assert len(recorded_events(begun)) == 2
    assert 'optimizer.learning_rate is 1e-07 and not 0.0003' in refusal(begun)


class Killed(BaseException):
    pass


def kill_at(monkeypatch, target, name, count=0):
    """The call of that number to target.name is the last that the process does not make."""
    real, calls = getattr(target, name), itertools.count()

    def once(*arguments, **named):
        if next(calls) == count:
            raise Killed
        return real(*arguments, **named)

    monkeypatch.setattr(target, name, once)


CHANGES: dict[str, Any] = {'optimizer__learning_rate': 1e-7, 'rollout__temperature': 0.5}
MOMENTS = [('append', 0), ('append', 1), ('write', 0)]


@pytest.mark.parametrize('name, count', MOMENTS)
def test_an_amendment_that_was_killed_half_way_is_made_once_by_the_same_command(begun, monkeypatch, name, count):
    with monkeypatch.context() as patch:
        kill_at(patch, *killed_call(name), count)
        with pytest.raises(Killed):
            amend(begun, 4, **CHANGES)
    amend(begun, 4, **CHANGES)
    assert [row['key'] for row in recorded_events(begun)] == ['optimizer.learning_rate', 'rollout.temperature']
    amend(begun, 4, **CHANGES)
    assert len(recorded_events(begun)) == 2


@pytest.mark.parametrize('name, count', MOMENTS)
def test_an_amendment_that_was_killed_half_way_is_none_for_the_old_command(begun, monkeypatch, name, count):
    amend(begun, 2, algorithm__clip_low=0.1)
    with monkeypatch.context() as patch:
        kill_at(patch, *killed_call(name), count)
        with pytest.raises(Killed):
            amend(begun, 4, algorithm__clip_low=0.1, **CHANGES)
    assert steering.keys_amended_since(begun, 2, ()) == {'algorithm.clip_low'}
    amend(begun, 4, PLAIN, algorithm__clip_low=0.1)
    assert [row['key'] for row in recorded_events(begun)] == ['algorithm.clip_low']
    assert 'is 0.0003 and not' in refusal(begun, algorithm__clip_low=0.1, **CHANGES)


def killed_call(name):
    return (steering, 'append_event') if name == 'append' else (json_file, 'write')


def test_events_that_a_crash_left_alone_are_none():
    def row(key, old, new):
        return {'step': 1, 'event': 'amended', 'key': key, 'old': old, 'new': new}

    other = {'step': 3, 'event': 'rewards'}
    rows = [row('a.b', 1, 2), other, row('a.b', 2, 3), row('c', 0, 1), row('a.b', 3, 2)]
    assert steering.valid_rows(rows, {'a': {'b': 2}, 'c': 1}) == rows
    assert steering.valid_rows(rows, {'a': {'b': 3}, 'c': 0}) == rows[:3]
    assert steering.valid_rows(rows, {'a': {'b': 1}, 'c': 0}) == [other]
    assert steering.valid_rows(rows, {}) == [other]


def folder_of_sums(folder, rows=8, plus=0):
    folder.mkdir()
    for split, first in (('train', 0), ('test', 1)):
        lines = [{'prompt': f'{i}+{first}=', 'answer': str(i + first + plus)} for i in range(rows)]
        (folder / f'{split}.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
    return str(folder)


def from_files(folder):
    return {'data__name': 'files', 'data__options': {'folder': folder}, 'supervised__updates': 0}


def test_data_that_moved_are_the_same_data_and_others_are_not(tmp_path):
    begun, folder = tmp_path / 'run', folder_of_sums(tmp_path / 'sums')
    tiny_run.record(open_config(tiny_run.config(**from_files(folder)), str(begun)))
    shutil.move(folder, tmp_path / 'moved')
    moved = tiny_run.config(**from_files(str(tmp_path / 'moved')))
    tiny_run.record(open_config(moved, str(begun)), 2)
    tiny_run.record(open_config(moved, str(begun)), 2)  # the digest stays
    for other in (folder_of_sums(tmp_path / 'fewer', 7), folder_of_sums(tmp_path / 'wrong', plus=1)):
        text = refusal(begun, AMEND, **from_files(other))
        assert f'and not {other!r}' in text and 'branch=DIR' in text


def test_a_model_that_moved_is_the_same_model_and_another_is_not(tmp_path):
    begun, folder = tmp_path / 'run', small_model.write_drawn(tmp_path / 'weights', seed=0)
    changes = {'supervised__updates': 0, 'model__random_init': False}
    tiny_run.record(open_config(tiny_run.config(model__path=folder, **changes), str(begun)))
    shutil.copytree(folder, tmp_path / 'copy')
    copy = {'model__path': str(tmp_path / 'copy'), **changes}
    open_config(tiny_run.config(**copy), str(begun))
    weights = tmp_path / 'copy' / 'model.safetensors'
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert 'model.path' in refusal(begun, AMEND, **copy)  # the run has no checkpoint, and would begin from these
    weights.write_bytes(content)
    path = tmp_path / 'copy' / 'config.json'
    path.write_text(json.dumps(json.loads(path.read_text()) | {'rms_norm_eps': 1e-3}))
    assert 'model.path' in refusal(begun, AMEND, **copy)


def test_a_run_of_a_version_whose_config_lacks_a_key_is_refused(begun):
    recorded = json.loads((begun / 'config.json').read_text())
    adapters = recorded['model'].pop('lora')
    (begun / 'config.json').write_text(json.dumps(recorded))
    assert steering.changes(begun, recorded | {'model': recorded['model'] | {'lora': adapters}}) == (
        Change('model.lora', None, adapters),
    )
    for steered in (None, PLAIN, AMEND):
        assert 'model.lora is None and not ' in refusal(begun, steered)
    # and one whose adapters' base had no dtype of its own
    earlier = {name: value for name, value in adapters.items() if name != 'base_dtype'}
    (begun / 'config.json').write_text(json.dumps(recorded | {'model': recorded['model'] | {'lora': earlier}}))
    for steered in (None, PLAIN, AMEND):
        assert "model.lora.base_dtype is None and not ''" in refusal(begun, steered)
