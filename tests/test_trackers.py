"""Trackers: what they get, one run in each of them through stops and resumes, and failures that stop nothing."""

import glob
import importlib.util
import io
import json
import os
import re
import struct
import subprocess
import sys
import types

import numpy as np
import pytest
from tensorboardX.proto import event_pb2
from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

from grpo_jax import train
from grpo_jax.configs import default
from grpo_jax.errors import BadInput
from grpo_jax.run import writer
from grpo_jax.run.rows import append_event, recorded_events
from grpo_jax.run.settings import Settings
from grpo_jax.run.writer import Tracking, Writer
from tests import tiny_run

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CONFIG = {'steps': 4, 'optimizer': {'learning_rate': 0.5}, 'reward': {'parts': [['numeric', 1.0]]}, 'model': {'x': 'y'}}


class Fake(types.ModuleType):
    """A tracker's module: runs by id, in which whatever is logged is kept."""

    def __init__(self, name, fails=()):
        super().__init__(name)
        self.begun, self.logged, self.ended, self.fails = [], {}, [], set(fails)

    def init(self, **options):
        print('* Created new run')  # noise
        self.begun.append(options)
        sys.excepthook = None
        self.fail('init')
        return types.SimpleNamespace(log=self.log, finish=self.finish)

    def log(self, values, step):
        self.fail(f'step {step}')
        self.logged.setdefault(step, {}).update(values)

    def finish(self):
        self.fail('finish')
        self.ended.append(True)

    def fail(self, when):
        if when in self.fails:
            raise SystemExit('the service\nis gone') if when == 'step 2' else RuntimeError('the service\nis gone')


@pytest.fixture
def fakes(monkeypatch):
    fakes = {name: Fake(name) for name in writer.NAMES}
    for name, fake in fakes.items():
        monkeypatch.setitem(sys.modules, name, fake)
    return fakes


def write(workdir, steps, first=0, names=writer.NAMES, total=4):
    """The steps of a run from `first` on, with the evaluation before the first one."""
    os.makedirs(workdir, exist_ok=True)
    tracking = Tracking(names, 'mine')
    with Writer(str(workdir), first, total, 'train', (), tracking, CONFIG) as writer:
        if first == 0:
            writer.evaluation(0, {'greedy': 0.25, 'pass@1': 0.5})
        for step in steps:
            writer.step(step, {'reward': step / 4, 'kl_ref': float('nan')}, {'sample': 2.0})


def test_a_tracker_gets_the_rows_of_the_files_and_the_config(fakes, tmp_path, capsys):
    hook = sys.excepthook
    write(tmp_path / 'x', range(2))
    for fake in fakes.values():
        assert fake.logged == {
            0: {'evaluation/greedy': 0.25, 'evaluation/pass@1': 0.5, 'reward': 0.0, 'seconds/sample': 2.0},
            1: {'reward': 0.25, 'seconds/sample': 2.0},
        }
        (begun,) = fake.begun
        assert begun['project'] == 'mine' and begun['config'] == CONFIG and begun['resume'] == 'allow'
        assert fake.ended == [True]
    assert sys.excepthook is hook and 'Created' not in capsys.readouterr().out


def test_events_go_to_a_tracker_once(fakes, tmp_path):
    tracking = Tracking(('wandb',))
    with Writer(str(tmp_path), 0, 4, 'train', (), tracking, CONFIG) as writer:
        append_event(tmp_path, 0, 'diagnosis', monitor='dead_run', seen='nothing')
        append_event(tmp_path, 0, 'diagnosis', monitor='truncation', seen='all')
        writer.step(0, {'reward': 1.0}, {})
        writer.step(1, {'reward': 1.0}, {})
        append_event(tmp_path, 1, 'dropped', kind='rollouts')
    logged = fakes['wandb'].logged
    assert logged[0]['event/diagnosis'] == (
        'step 0: monitor: dead_run, seen: nothing | step 0: monitor: truncation, seen: all'
    )
    assert logged[1] == {'reward': 1.0}
    assert logged[2] == {'event/dropped': 'step 1: kind: rollouts'}  # after the last step


def test_a_run_that_goes_on_is_the_same_run_in_each_tracker_and_repeats_no_step(fakes, tmp_path):
    write(tmp_path / 'runs' / 'x', range(3))
    append_event(tmp_path / 'runs' / 'x', 1, 'dropped', kind='rollouts')
    for fake in fakes.values():
        fake.logged.clear()
    append_event(tmp_path / 'runs' / 'x', 2, 'amended', key='optimizer.learning_rate')
    write(tmp_path / 'runs' / 'x', range(2, 4), first=2)  # from the checkpoint of step 2
    for name, fake in fakes.items():
        # steps 0 to 2 are there
        assert fake.logged == {
            3: {'reward': 0.75, 'seconds/sample': 2.0, 'event/amended': 'step 2: key: optimizer.learning_rate'}
        }
        first, second = (begun['id' if name == 'wandb' else 'name'] for begun in fake.begun)
        assert first == second and re.fullmatch(r'runs-x-[0-9a-f]{8}', first)
    assert json.loads((tmp_path / 'runs' / 'x' / writer.IDS_FILE).read_text()) == {'id': first}


def test_a_run_may_have_a_name_and_stays_one_run(fakes, tmp_path):
    tracking = Tracking(writer.NAMES, 'mine', run_name='long one')
    for _ in range(2):
        with Writer(str(tmp_path), 0, 4, 'train', (), tracking, CONFIG):
            pass
    assert {begun['name'] for begun in fakes['wandb'].begun} == {'long one'}
    (name,) = {begun['id'] for begun in fakes['wandb'].begun} | {begun['name'] for begun in fakes['trackio'].begun}
    assert re.fullmatch('long-one-[0-9a-f]{8}', name)  # trackio tells runs apart by their names


def test_two_runs_of_one_name_are_two_runs(fakes, tmp_path):
    for folder in ('a/runs/x', 'b/runs/x', 'c/r\u00fcns/../runs/x y'):
        (tmp_path / folder).mkdir(parents=True)
        write(tmp_path / folder, [], names=('wandb',))
    ids = [begun['id'] for begun in fakes['wandb'].begun]
    assert len({*ids}) == 3 and ids[2].startswith('runs-x-y-')


def test_a_run_without_a_step_left_begins_nothing(fakes, tmp_path):
    write(tmp_path, [], first=4)
    assert not fakes['wandb'].begun and not (tmp_path / writer.IDS_FILE).exists()


@pytest.mark.parametrize('when', ['init', 'step 0', 'step 2', 'finish'])
def test_a_tracker_that_fails_is_dropped_with_one_warning_and_the_run_goes_on(fakes, tmp_path, caplog, when):
    fakes['wandb'].fails.add(when)
    write(tmp_path, range(4))
    assert [row['step'] for row in tiny_run.rows(tmp_path)] == [0, 1, 2, 3]
    assert [record.getMessage() for record in caplog.records] == [
        'wandb: the service is gone; the run goes on without it'
    ]
    assert sorted(fakes['trackio'].logged) == [0, 1, 2, 3]  # and the other one
    (event,) = recorded_events(tmp_path)
    assert (event['event'], event['kind'], event['reason']) == ('dropped', 'wandb', 'the service is gone')


def test_a_tracker_that_is_not_installed_is_refused_before_anything_is_done(tmp_path, monkeypatch):
    config = tiny_run.config(log__trackers=('wandb',))
    monkeypatch.setitem(sys.modules, 'wandb', None)  # as if there were none
    with pytest.raises(BadInput, match=r"log.trackers = 'wandb': cannot be imported.*pip install 'grpo_jax\[wandb\]'"):
        train.run(config, str(tmp_path / 'x'))
    assert not (tmp_path / 'x').exists()
    monkeypatch.delitem(sys.modules, 'wandb')
    if importlib.util.find_spec('wandb') is None:  # a folder that wandb has left is no wandb
        (tmp_path / 'wandb').mkdir()
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(BadInput, match='cannot be imported'):
            Tracking(('wandb',)).check()
        sys.modules.pop('wandb', None)


def test_only_known_trackers_are_taken():
    for value in (('mlflow',), 'wandb', (1,), None):
        with pytest.raises(BadInput, match=r'log\.trackers'):
            Tracking.from_config({'trackers': value, 'project': 'x'})
    config = default.get_config()
    config.log.trackers = ('trackio', 'wandb')
    assert Settings.from_config(config).log.tracking == Tracking(('trackio', 'wandb'), 'grpo_jax')


def test_extras_are_named_like_their_trackers():
    with open(os.path.join(ROOT, 'pyproject.toml'), encoding='utf8') as file:
        text = file.read()
    assert all(f'\n{name} = ["{name}' in text for name in writer.NAMES)


@pytest.mark.parametrize(
    ('contents', 'last'),
    [
        ('', -1),
        ('{"step": 0, "a": 1}\n{"step": 12}\n', 12),
        ('{"step": 3}\n{"step": 4, "a": 1', 3),  # half a row is none
    ],
)
def test_the_last_step_of_a_file_is_that_of_its_last_whole_row(tmp_path, contents, last):
    (tmp_path / 'a').write_text(contents)
    assert writer.last_steps(str(tmp_path), ['a', 'b']) == {'a': last, 'b': -1}


def test_a_run_is_tracked_from_its_config(fakes, tmp_path):
    config = tiny_run.config(
        steps=1, supervised__updates=0, log__trackers=('trackio',), log__project='sums', log__rollouts=1
    )
    train.run(config, str(tmp_path))
    row = {name: value for name, value in tiny_run.rows(tmp_path)[0].items() if value is not None and name != 'step'}
    logged = fakes['trackio'].logged
    assert logged[0].items() >= row.items() and logged[1]['evaluation/greedy'] >= 0
    assert fakes['trackio'].begun[0]['config']['steps'] == 1 and not fakes['wandb'].begun


# where they are installed


REAL = """
import sys
from tests.test_trackers import write
write(sys.argv[1], range(2), names=(sys.argv[2],), total=3)
write(sys.argv[1], range(1, 3), first=1, names=(sys.argv[2],), total=3)
"""


def run_really(name, tmp_path):
    pytest.importorskip(name, reason=f'{name} is not installed: pip install .[{name}]')
    offline = {'WANDB_MODE': 'offline', 'TRACKIO_DIR': str(tmp_path / 'trackio'), 'HF_HUB_OFFLINE': '1'}
    done = subprocess.run(
        [sys.executable, '-c', REAL, str(tmp_path / 'runs' / 'x'), name],
        cwd=ROOT,
        env=os.environ | offline,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and name not in done.stderr, done.stderr
    return json.loads((tmp_path / 'runs' / 'x' / writer.IDS_FILE).read_text())['id']


def leveldb_records(path):
    """The records of a file of wandb: LevelDB's log format behind 7 bytes."""
    with open(path, 'rb') as file:
        content = file.read()
    position, whole = 7, b''
    while position < len(content):
        if 2**15 - position % 2**15 < 7:  # what is left of a block holds no header
            position += 2**15 - position % 2**15
            continue
        size, kind = struct.unpack('<HB', content[position + 4 : position + 7])
        whole += content[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b''


def test_wandb_offline_has_the_rows(tmp_path):
    run_id = run_really('wandb', tmp_path)
    from wandb.proto import wandb_internal_pb2

    rows, ids = [], set()
    for path in glob.glob(str(tmp_path / 'runs' / 'x' / 'wandb' / 'offline-run-*' / '*.wandb')):
        for content in leveldb_records(path):
            record = wandb_internal_pb2.Record.FromString(content)
            ids |= {record.run.run_id} if record.run.run_id else set()
            if record.history.item:
                rows.append({(i.key or '.'.join(i.nested_key)): i.value_json for i in record.history.item})
    assert ids == {run_id}
    assert sorted((row['_step'], row['reward']) for row in rows if 'reward' in row) == [
        ('0', '0'),
        ('1', '0.25'),
        ('2', '0.5'),
    ]
    assert [row['evaluation/greedy'] for row in rows if 'evaluation/greedy' in row] == ['0.25']


def test_trackio_has_the_rows_locally(tmp_path, monkeypatch):
    run_id = run_really('trackio', tmp_path)
    import sqlite3

    connection = sqlite3.connect(tmp_path / 'trackio' / 'mine.db')
    rows = connection.execute('select run_name, step, metrics from metrics order by id').fetchall()
    connection.close()
    assert {name for name, _, _ in rows} == {run_id}
    rewards = [(step, json.loads(values)['reward']) for _, step, values in rows if 'reward' in json.loads(values)]
    assert rewards == [(0, 0.0), (1, 0.25), (2, 0.5)]


# TensorBoard


def records(folder):
    """The events that a reader of TensorBoard's files sees in a folder's only one."""
    (path,) = glob.glob(os.path.join(folder, 'events.out.tfevents.*'))
    with open(path, 'rb') as file:
        stream = io.BytesIO(file.read())
    read = []
    while header := stream.read(12):
        read.append(event_pb2.Event.FromString(stream.read(struct.unpack('<Q', header[:8])[0])))
        stream.read(4)
    return read


def summaries(folder):
    return {(event.step, value.tag): value for event in records(folder) for value in event.summary.value}


def test_tensorboard_has_the_config_as_hyperparameters(tmp_path):
    one = writer.Board(str(tmp_path), 0, CONFIG)
    one.add(0, {'reward': 0.5})
    one.close()
    content = summaries(tmp_path)[0, '_hparams_/session_start_info'].metadata.plugin_data.content
    started = HParamsPluginData.FromString(content).session_start_info.hparams
    assert started['steps'].number_value == 4 and started['optimizer.learning_rate'].number_value == 0.5
    assert started['model.x'].string_value == 'y' and started['reward.parts'].string_value == "[['numeric', 1.0]]"


def rollout_rows(completion):
    row = {'prompt': '1+1=', 'completion': completion, 'length': 1}
    return [
        row | {'reward': 1.0, 'advantage': 0.5},
        row | {'reward': None, 'advantage': [-0.5, float('nan')]},
        *[row | {'reward': 0.0, 'advantage': 0.0}] * 6,
    ]


def test_tensorboard_has_histograms_of_rewards_lengths_and_advantages(tmp_path):
    one = writer.Board(str(tmp_path), 0)
    one.rollouts(3, rollout_rows('2'))
    one.close()
    there = summaries(tmp_path)
    # 1 and six times 0; eight times 1; 0.5, -0.5 and six times 0
    expected = {'reward': (7, 0, 1, 1), 'length': (8, 1, 1, 8), 'advantage': (8, -0.5, 0.5, 0)}
    for name, (number, least, most, total) in expected.items():
        histogram = there[3, f'rollout/{name}'].histo
        assert (histogram.num, histogram.min, histogram.max, histogram.sum) == (number, least, most, total), name
        assert sum(histogram.bucket) == number


def test_texts_for_tensorboard_are_inert(tmp_path):
    one = writer.Board(str(tmp_path), 0)
    one.rollouts(0, rollout_rows('<script>alert(1)</script>\n\n# [x](javascript:1)\x1b[2J' + 'y' * 2**20))
    one.close()
    text = summaries(tmp_path)[0, 'rollout/completions/text_summary'].tensor.string_val[0].decode()
    lines = text.split('\n')
    assert len(lines) == writer.SAMPLES and all(line.startswith('    ') for line in lines)  # of a block of code
    assert all(line.isprintable() and len(line) <= writer.LONGEST + 4 for line in lines)
    assert lines[0].startswith('    1  1+1= -> <script>') and lines[1].startswith('    no reward  ')


def test_rollouts_of_nothing_are_no_histogram(tmp_path):
    one = writer.Board(str(tmp_path), 0)
    one.rollouts(0, [{'prompt': '', 'completion': '', 'reward': np.nan, 'advantage': []}])
    one.rollouts(1, [])
    one.close()
    assert not [tag for _, tag in summaries(tmp_path) if tag.startswith('rollout/') and 'completions' not in tag]


def test_the_rollouts_that_are_dumped_come_to_tensorboard(tmp_path):
    with Writer(str(tmp_path), 0, 2, 'train') as writer:
        writer.rollouts(0, iter(rollout_rows('2')))
    assert len((tmp_path / 'rollouts' / '000000.jsonl').read_text().splitlines()) == 8
    assert (0, 'rollout/reward') in summaries(tmp_path / 'tensorboard')
