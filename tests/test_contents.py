"""The same path is not the same content: what data and users' files hold decides whether a run goes on."""

import json
import logging

import pytest

from grpo_jax import data
from grpo_jax.errors import BadInput
from grpo_jax.example import Example
from grpo_jax.run import checkpoint, steering
from grpo_jax.run.open import make_workdir, open_training
from grpo_jax.run.rows import recorded_events
from grpo_jax.run.steering import Steering
from grpo_jax.tools import provenance
from tests import tiny_run


def write_rows(folder, split, count, plus=0, **more):
    folder.mkdir(exist_ok=True)
    first = 3 + (split == 'test')
    rows = [{'prompt': f'{i}+{first}=', 'answer': i + first + plus, **more} for i in range(count)]
    (folder / f'{split}.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with data, a reward and its helper; a run of it has begun."""
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / 'd', 'train', 40)
    write_rows(tmp_path / 'd', 'test', 8)
    (tmp_path / 'mine.py').write_text('from its_words import N\n\n\ndef mine(completion, example):\n    return N\n')
    (tmp_path / 'its_words.py').write_text('N = 1.0\n')
    begin()
    return tmp_path


def config(**changes):
    parts = (('numeric', 1.0), ('mine.py:mine', 1.0))
    changes = {'data__name': 'files', 'data__options': {'folder': 'd'}, 'reward__parts': parts} | changes
    return tiny_run.config(**changes)


def begin(step=0, steered=None, **changes):
    run, _ = open_training(config(**changes), 'run', steered=steered)
    with run.rewards:
        make_workdir(run, step)
    return run


def refusal(steered=None):
    with pytest.raises(BadInput) as error:
        open_training(config(), 'run', steered=steered)
    return str(error.value)


def append(here):
    write_rows(here / 'd', 'train', 41)
    return "content of the train split is '40 rows, sha256 ", ': 1 appended'


def change_gold(here):
    write_rows(here / 'd', 'train', 40, plus=7)
    return 'content of the train split is', ': other answers'


def change_columns(here):
    write_rows(here / 'd', 'train', 40, source='x')
    return 'content of the train split is', ': other columns'


def append_and_change(here):
    write_rows(here / 'd', 'train', 42, plus=7)
    return 'content of the train split is', ': 2 appended and other answers'


def shorten(here):
    write_rows(here / 'd', 'test', 7)
    return 'content of the test split is', ': 1 fewer'


def edit(here):
    (here / 'mine.py').write_text('def mine(completion, example):\n    return 5.0\n')
    return 'content of mine.py is', 'sha256'


def edit_helper(here):
    (here / 'its_words.py').write_text('N = 50.0\n')
    return 'content of its_words.py is', 'sha256'


CHANGES = [append, change_gold, change_columns, append_and_change, shorten, edit, edit_helper]


@pytest.mark.parametrize('change', CHANGES)
def test_other_contents_under_the_same_path_are_refused_amended_and_recorded(here, change, request):
    if change not in (change_gold, append_and_change, edit_helper):
        request.getfixturevalue('long')
    assert list(provenance.compare_contents('run')) == []
    words = change(here)
    (said,) = provenance.compare_contents('run')
    text = refusal()
    for steered in (None, Steering()):
        text = refusal(steered)
        assert all(word in text for word in words) and '\n' not in text and 'holds ' in text
    assert 'use Steering(amend=True) to go on from here' in text
    assert said.partition(':')[0] in text
    amended = Steering(amend=True)
    run = begin(4, amended)
    (event,) = recorded_events('run')
    assert (event['event'], event['step']) == ('amended', 4) and event['key'] in text and event['new'] in text
    assert list(provenance.compare_contents('run')) == []
    begin(5)  # and goes on with these
    assert len(recorded_events('run')) == 1
    train = {change.key for change in run.contents.changes} == {checkpoint.TRAIN_SPLIT}
    parts = checkpoint.parts_to_reset(steering.keys_amended_since('run', 4, ()))
    assert parts == (checkpoint.DATA_PARTS if train else set())


def test_files_and_data_that_were_moved_go_on(here):
    (here / 'later').mkdir()
    for name in ('d', 'mine.py', 'its_words.py'):
        (here / name).rename(here / 'later' / name)
    parts = (('numeric', 1.0), ('later/mine.py:mine', 1.0))
    with pytest.raises(BadInput, match=r'reward\.parts is'):  # a key of its own
        begin(reward__parts=parts)
    (here / 'later' / 'mine.py').rename(here / 'mine.py')
    (here / 'later' / 'its_words.py').rename(here / 'its_words.py')
    begin(data__options={'folder': 'later/d'})
    assert not recorded_events('run')


def test_an_edited_function_of_a_notebook_is_refused(tmp_path):
    parts = (('numeric', 1.0), ('own', 1.0))

    def own(completion, example):
        return 1.0

    def start(function):
        return open_training(tiny_run.config(reward__parts=parts), str(tmp_path / 'run'), functions={'own': function})[
            0
        ]

    make_workdir(start(own), 0)
    start(own)
    first = own

    def own(completion, example):
        return 2.0

    with pytest.raises(BadInput, match='content of the function own is'):
        start(own)
    start(first)


def test_the_source_of_a_config_is_recorded_and_its_values_decide(here, monkeypatch, caplog):
    from grpo_jax import user_files

    (here / 'exp.py').write_text('import its_steps\n')
    (here / 'its_steps.py').write_text('STEPS = 1\n')
    monkeypatch.setattr(user_files, 'CONFIG_FILES', {str(here / 'exp.py')})
    begin()
    recorded = json.loads((here / 'run' / 'contents.json').read_text())
    assert set(recorded['configs']) == {str(here / 'exp.py'), str(here / 'its_steps.py')}
    (here / 'its_steps.py').write_text('STEPS = 2\n')
    with caplog.at_level(logging.WARNING):
        begin(steps=9)
    assert 'source of the config its_steps.py: was' in caplog.text and not recorded_events('run')


def test_a_digest_is_the_same_in_every_process_whatever_the_columns_hold(tmp_path):
    class Odd:
        pass

    def described(**meta):
        return data.contents_of([Example('1', '1', 0, meta)]).columns

    import numpy as np

    assert described(x=Odd()) == described(x=Odd())  # except for the address, one is the other
    assert described(x={'b', 'a', 'c'}) == described(x={'c', 'b', 'a'}) != described(x={'b', 'a'})
    assert described(x=np.arange(5000)) != described(x=np.arange(5000)[::-1])
    assert described(x={(1, 2): 3}) != described(x={(1, 2): 4})
    assert described(x=float('nan')) == described(x=float('nan'))


def test_a_contents_json_of_another_form_is_refused(here):
    (here / 'run' / 'contents.json').write_text('{"splits": 3}')
    assert 'contents of the run' in refusal()
