"""Presets times seeds: the runs, what is not run again, the table, and what is refused."""

import csv
import json
import math
import os
import subprocess
import sys

from absl import flags
from ml_collections import config_flags
import numpy as np
import pytest

from grpo_jax import algorithms, train
from grpo_jax.errors import BadInput
from grpo_jax.run import config_file
from grpo_jax.tools import sweep
from tests import small_model, tiny_run

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PRESETS, SEEDS = ['grpo', 'dr_grpo'], 2
SETTINGS = dict(steps=2, evaluation__prompts=4, log__rollouts=0, supervised__updates=2)


@pytest.fixture(scope='module', autouse=True)
def small(tmp_path_factory):
    SETTINGS['model__path'] = small_model.write(tmp_path_factory.mktemp('small'))


def get_config(preset='dr_grpo'):
    return tiny_run.config(preset=preset, **SETTINGS)


@pytest.fixture(scope='module')
def swept(tmp_path_factory):
    workdir = str(tmp_path_factory.mktemp('runs') / 'sweep')
    return workdir, sweep.run(get_config, PRESETS, SEEDS, workdir)


def read_table(workdir):
    with open(os.path.join(workdir, 'table.csv'), encoding='utf8', newline='') as file:
        return list(csv.DictReader(file))


def times(workdir):
    """When each run's metrics were written last."""
    return {
        (preset, seed): os.stat(os.path.join(workdir, preset, str(seed), 'metrics.jsonl')).st_mtime_ns
        for preset in PRESETS
        for seed in range(SEEDS)
    }


def test_every_preset_runs_with_every_seed(swept):
    workdir, _ = swept
    for preset in PRESETS:
        for seed in range(SEEDS):
            folder = os.path.join(workdir, preset, str(seed))
            assert [row['step'] for row in tiny_run.rows(folder)] == [0, 1]
            with open(os.path.join(folder, 'config.json'), encoding='utf8') as file:
                config = json.load(file)
            assert config['seed'] == seed
            assert config['algorithm']['kl'] == ('k3' if preset == 'grpo' else 'none')


def test_presets_share_the_cold_start_of_their_seed(swept):
    workdir, _ = swept
    before = {
        (preset, seed): tiny_run.rows(os.path.join(workdir, preset, str(seed)), 'evaluations.jsonl')[0]
        for preset in PRESETS
        for seed in range(SEEDS)
    }
    for seed in range(SEEDS):
        shared = tiny_run.rows(os.path.join(workdir, 'cold_start', str(seed)))
        assert len(shared) == get_config().supervised.updates
        for preset in PRESETS:
            assert tiny_run.rows(os.path.join(workdir, preset, str(seed), 'cold_start')) == shared
        assert before['grpo', seed] == before['dr_grpo', seed]
    assert before['grpo', 0] != before['grpo', 1]


def test_the_table_holds_the_numbers_of_the_runs(swept):
    workdir, rows = swept
    table = read_table(workdir)
    assert [row['preset'] for row in table] == [row['preset'] for row in rows]
    assert {row['preset']: row['status'] for row in table} == dict.fromkeys(PRESETS, '2/2')
    finals = [float(row['reward_after_mean']) for row in table]
    assert finals == sorted(finals, reverse=True)
    for row in table:
        folders = [os.path.join(workdir, row['preset'], str(seed)) for seed in range(SEEDS)]
        # two steps: the last quarter is the last step
        last = [tiny_run.rows(folder)[-1] for folder in folders]
        after = [tiny_run.rows(folder, 'evaluations.jsonl')[-1] for folder in folders]
        for column, values in {
            'reward_last': [x['reward'] for x in last],
            'entropy': [x['entropy'] for x in last],
            'length': [x['length'] for x in last],
            'greedy_after': [x['greedy'] for x in after],
            'pass@1_after': [x['pass@1'] for x in after],
            'reward_after': [x['reward'] for x in after],
        }.items():
            numbers = [float(row[f'{column}_{part}']) for part in ('mean', 'min', 'max')]
            np.testing.assert_allclose(numbers, [np.mean(values), min(values), max(values)], err_msg=column)
        assert 0 < float(row['seconds_min']) < 60  # of the stages, and not the MiB of the host beside them


def test_the_table_for_people_and_the_curves_are_there(swept):
    workdir, rows = swept
    with open(os.path.join(workdir, 'table.md'), encoding='utf8') as file:
        lines = file.read().splitlines()
    assert lines[0].startswith('| preset | training reward, first quarter | last quarter | held-out reward before |')
    assert [line.split('`')[1] for line in lines[2:4]] == [row['preset'] for row in rows]
    with open(os.path.join(workdir, 'curves.png'), 'rb') as file:
        assert file.read(8) == b'\x89PNG\r\n\x1a\n'


def test_finished_runs_are_not_run_again_and_others_are(swept, monkeypatch, capsys):
    workdir, rows = swept
    calls, before = [], times(workdir)

    def broken(config, folder):
        calls.append(os.path.relpath(folder, workdir))
        raise FloatingPointError('too many\nbad steps')

    monkeypatch.setattr(train, 'run', broken)
    again = sweep.run(get_config, PRESETS, SEEDS, workdir)
    assert calls == [] and times(workdir) == before
    assert [row['status'] for row in again] == [row['status'] for row in rows]

    more = sweep.run(longer, PRESETS, SEEDS, workdir)
    assert calls == ['grpo/0', 'dr_grpo/0', 'grpo/1', 'dr_grpo/1'] and times(workdir) == before
    assert [row['status'] for row in more] == ['2/2 failed'] * 2
    assert 'grpo, seed 0, 1: too many bad steps' in capsys.readouterr().out
    failed = read_table(workdir)[-1]
    assert failed['reward_last_mean'] == '' and 'too many bad steps' in failed['failure']
    sweep.run(get_config, PRESETS, SEEDS, workdir)  # the table of the finished runs, as it was


def longer(preset='dr_grpo'):
    config = get_config(preset)
    config.steps = 3
    return config


@pytest.mark.parametrize(
    'key, value, words',
    [
        ('steps', 1, 'steps = 1: .* has 2 steps already; use another --workdir'),
        ('group_size', 2, 'grpo.*holds another run, in which rollout.group_size is 4 and not 2'),
    ],
)
def test_other_settings_in_a_folder_are_refused_before_any_run(swept, monkeypatch, key, value, words):
    # an old result must not pass for a new one
    workdir, _ = swept
    before = times(workdir)
    monkeypatch.setattr(train, 'run', lambda *_, **__: pytest.fail('refused before'))

    def other(preset='dr_grpo'):
        config = get_config(preset)
        section = config if key in config else config.rollout
        section[key] = value
        return config

    with pytest.raises(BadInput, match=words):
        sweep.run(other, ['grpo'], 1, workdir)
    assert times(workdir) == before


def test_a_preset_that_cannot_run_is_recorded_and_the_sweep_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(train, 'run', lambda config, folder: pytest.fail('refused before'))

    def config(preset='dr_grpo'):
        # shorter than every demonstration
        return tiny_run.config(preset=preset, rollout__max_tokens=1, supervised__updates=4)

    rows = sweep.run(config, PRESETS, 1, str(tmp_path / 'sweep'))
    assert [row['status'] for row in rows] == ['1/1 failed'] * 2
    assert all('rollout.max_tokens = 1' in row['failures'][0] for row in rows)
    assert not (tmp_path / 'sweep' / 'curves.png').exists()


def test_presets_that_learn_from_other_completions_are_marked(tmp_path, monkeypatch, capsys):
    # their training reward is not that of the policy's own samples
    monkeypatch.setattr(train, 'run', lambda config, folder: (_ for _ in ()).throw(FloatingPointError('no')))

    def config(preset='dr_grpo'):
        return tiny_run.config(preset=preset, supervised__updates=0)

    rows = sweep.run(config, ['dapo', 'rft', 'grpo'], 1, str(tmp_path))
    assert {row['preset']: row['mark'] for row in rows} == {'dapo': '*', 'rft': '*', 'grpo': ''}
    assert sweep.ELSEWHERE in ' '.join(capsys.readouterr().out.split())
    assert '`dapo`*' in (tmp_path / 'table.md').read_text(encoding='utf8')


def half(ratio, advantages):
    return -0.5 * advantages * ratio


def constant(completion, example):
    return 0.25


def with_reward(preset='dr_grpo'):
    config = get_config(preset)
    config.steps, config.supervised.updates = 1, 0
    config.reward.parts = (('numeric', 1.0), ('constant', 0.5))
    return config


def test_a_variant_and_a_reward_of_a_notebook_are_swept_beside_presets(long, tmp_path, monkeypatch):
    workdir = str(tmp_path / 'sweep')
    variant = algorithms.make(get_config().algorithm)._replace(surrogate=half)
    rows = sweep.run(with_reward, ['dr_grpo'], 1, workdir, {'half': variant}, {'constant': constant})
    assert {row['preset']: row['status'] for row in rows} == {'dr_grpo': '1/1', 'half': '1/1'}
    losses = {name: tiny_run.rows(os.path.join(workdir, name, '0'))[0] for name in ('dr_grpo', 'half')}
    assert all(row['reward/constant'] == 0.25 for row in losses.values())
    assert losses['half']['loss'] == pytest.approx(losses['dr_grpo']['loss'] / 2)  # at the same first ratio, 1
    monkeypatch.setattr(train, 'run', lambda *_, **__: pytest.fail('nothing is run again'))
    sweep.run(with_reward, ['dr_grpo'], 1, workdir, {'half': variant}, {'constant': constant})
    other = variant._replace(surrogate=lambda ratio, advantages: -advantages * ratio)
    with pytest.raises(BadInput, match=r"half/0.*algorithm\.surrogate is 'half of .* and not '<lambda> of "):
        sweep.run(with_reward, ['dr_grpo'], 1, workdir, {'half': other}, {'constant': constant})
    with pytest.raises(BadInput, match='reward constant'):
        sweep.run(
            with_reward, ['dr_grpo'], 1, workdir, {'half': variant}, {'constant': lambda completion, example: 1.0}
        )


@pytest.mark.parametrize('name', ['grpo', '../x', 'cold_start', 'two words', ''])
def test_a_variant_has_a_name_of_its_own(name, tmp_path):
    with pytest.raises(BadInput, match='variants'):
        sweep.run(get_config, ['dr_grpo'], 1, str(tmp_path / 'x'), {name: algorithms.make(get_config().algorithm)})
    assert not (tmp_path / 'x').exists()


def test_a_sweep_of_nothing_is_refused(tmp_path):
    for presets, seeds in (([], 1), (['grpo'], 0)):
        with pytest.raises(BadInput, match='nothing to run'):
            sweep.run(get_config, presets, seeds, str(tmp_path / 'x'))


def row_of(preset, *values):
    return {'preset': preset, 'runs': {seed: {'reward_after': value} for seed, value in enumerate(values)}}


def test_a_comparison_is_of_seeds_and_says_when_it_shows_nothing():
    # differences 0.1, 0.2, 0.3: mean 0.2, standard error 0.1 / sqrt(3), t of two degrees of freedom 4.3027
    rows = [row_of('a', 0.5, 0.7, 0.9, math.nan), row_of('b', 0.4, 0.5, 0.6)]
    found = sweep.compare(rows, 'a', 'b')
    assert (found.seeds, found.mean) == (3, pytest.approx(0.2))
    assert (found.low, found.high) == (pytest.approx(0.2 - 0.24841, abs=1e-4), pytest.approx(0.2 + 0.24841, abs=1e-4))
    assert str(found) == (
        'reward_after, a - b: +0.200, 95% interval -0.048 to +0.448 (3 seeds): '
        'no difference that these seeds could show'
    )
    rows = [row_of('a', 0.5, 0.61), row_of('b', 0.6, 0.7)]
    # -0.1 and -0.09: mean -0.095, half width 12.706 * 0.005
    assert str(sweep.compare(rows, 'a', 'b')).endswith('-0.159 to -0.031 (2 seeds): a is lower')
    assert str(sweep.compare(rows, 'b', 'a')).endswith('+0.031 to +0.159 (2 seeds): b is higher')


def test_what_cannot_be_compared_is_refused():
    rows = [row_of('a', 0.5, 0.6), row_of('b', 0.4)]
    with pytest.raises(BadInput, match='an interval needs 2'):
        sweep.compare(rows, 'a', 'b')
    with pytest.raises(BadInput, match='is not in this sweep; choose one of a, b'):
        sweep.compare(rows, 'a', 'c')


def test_unknown_preset_is_refused_with_the_choices_before_anything_is_written(tmp_path):
    with pytest.raises(BadInput, match=r"--presets = 'grop': .* dapo, .*dr_grpo"):
        sweep.choose_presets('dapo,grop')
    done = subprocess.run(
        [
            sys.executable,
            '-m',
            'grpo_jax',
            'sweep',
            '--config=configs/arithmetic.py',
            '--presets=dapo,grop',
            f'--workdir={tmp_path / "sweep"}',
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2 and 'Traceback' not in done.stderr
    assert "error: --presets = 'grop'" in done.stderr
    assert not (tmp_path / 'sweep').exists()


def test_all_names_every_file_of_the_presets():
    chosen = sweep.choose_presets('all')
    assert {'grpo', 'dr_grpo', 'dapo', 'rloo'} <= set(chosen) and '__init__' not in chosen
    assert sweep.choose_presets('rloo,grpo,rloo') == ['rloo', 'grpo']


def flag_of(*arguments):
    """The --config flag of a command line, parsed beside the process's own flags."""
    values = flags.FlagValues()
    argv = ['sweep', f'--config={os.path.join(ROOT, "configs", "arithmetic.py")}{arguments[0]}', *arguments[1:]]
    config_flags.DEFINE_config_file('config', None, flag_values=values, sys_argv=argv)
    values['config'].parser = config_file.Parser(argv)
    values(argv)
    return values['config']


def test_overrides_hold_for_every_preset():
    flag = flag_of(
        '',
        '--config.steps=20',
        '--config.data.options.digits=1',
        '--config.algorithm.clip_high=0.3',
        "--config.reward.parts=(('numeric', 2.0),)",
    )
    get_config = sweep.config_from_flag(flag)
    for preset in ('dapo', 'grpo'):
        config = get_config(preset)
        assert (config.steps, config.data.options.digits, config.algorithm.clip_high) == (20, 1, 0.3)
        assert config.reward.parts == (('numeric', 2.0),)
        assert config.algorithm.kl == ('k3' if preset == 'grpo' else 'none')
    assert get_config() is not get_config() and get_config('grpo').rollout.group_size == 8


@pytest.mark.parametrize('arguments, words', [((':dapo',), 'leave out'), (('', '--config.seed=3'), '--seeds')])
def test_what_the_sweep_decides_itself_is_refused(arguments, words):
    with pytest.raises(BadInput, match=words):
        sweep.config_from_flag(flag_of(*arguments))


def test_a_piece_that_cannot_work_is_refused_before_the_first_run(tmp_path, monkeypatch):
    monkeypatch.setattr(train, 'run', lambda config, folder: pytest.fail('refused before'))
    (tmp_path / 'soft.py').write_text('def soft(ratio, advantages, *, clip_lo):\n    return -ratio * advantages\n')

    def config(preset='dr_grpo'):
        changed = tiny_run.config(preset=preset)
        if preset == 'grpo':
            changed.algorithm.surrogate = f'{tmp_path}/soft.py:soft'
        return changed

    with pytest.raises(BadInput, match='clip_lo'):
        sweep.run(config, ['dr_grpo', 'grpo'], 1, str(tmp_path / 'sweep'))
    assert not (tmp_path / 'sweep').exists()
