"""What a run writes down: files that are closed whatever happens, and the first process alone writes them."""

import fnmatch
import re

import jax
import numpy as np
import pytest

from grpo_jax import figures, train
from grpo_jax.collect.draw import abstract_aux, count_sizes
from grpo_jax.hosts import processes
from grpo_jax.rewards import Rewards
from grpo_jax.run import console
from grpo_jax.run.open import make_run_learner, open_run
from grpo_jax.run.writer import Writer
from grpo_jax.sharding import chips
from grpo_jax.tools.report import panels
from tests import doc_examples, small_model, tiny_run
from tests.fake_service import serving


def test_only_the_first_process_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, 'is_first', lambda: False)
    rows, changes = [], dict(steps=1, log__rollouts=1)
    train.run(tiny_run.config(**changes), str(tmp_path), on_step=lambda step, row: rows.append(row))
    assert [row['step'] for row in rows] == [0]  # it takes every step
    assert [path.name for path in tmp_path.iterdir()] == ['checkpoints']  # of which each process has a part


def test_an_exception_closes_the_files_with_all_rows_written(tmp_path):
    with pytest.raises(FloatingPointError), Writer(str(tmp_path), 0, 2, 'train') as writer:
        writer.step(0, {'reward': 1.0, 'loss': float('nan')}, {'sample': 1.0})
        raise FloatingPointError
    assert tiny_run.rows(tmp_path) == [{'step': 0, 'loss': None, 'reward': 1.0}]
    with pytest.raises(ValueError, match='closed file'):
        writer.step(1, {'reward': 1.0}, {'sample': 1.0})
    writer.close()  # once more does nothing


def test_a_table_in_a_pipe_is_wide_enough_for_its_cells(capsys):
    console.show_tables(
        'words', console.make_table(['name', 'mean'], [['reward', '0.500'], ['x' * 90, '']], title='title')
    )
    printed = capsys.readouterr().out
    assert 'words' in printed and '0.500' in printed and 'x' * 90 in printed


# every number has an entry in docs/metrics.md, and every entry a number


def entries(file):
    """The names in the tables of a file's section of docs/metrics.md."""
    page = doc_examples.read('docs/metrics.md')
    (section,) = re.findall(rf'^## {re.escape(file)}\n(.*?)(?=^## |\Z)', page, re.DOTALL | re.MULTILINE)
    cells = re.findall(r'^\| (`[^|]*) \|', section, re.MULTILINE)
    return [name for cell in cells for name in re.findall('`([^`]+)`', cell)]


EVERYTHING = {  # of one run: a cold start, adapters, resampling, prompts that retire, numbers that adapt, a baseline
    'preset': 'grpo',
    'steps': 1,
    'evaluation__prompts': 2,
    'supervised__updates': 40,  # so that some of the first completions are right, as the probe needs
    'supervised__optimizer__learning_rate': 1e-2,
    'model__lora__rank': 2,
    'algorithm__kl_target': 0.1,
    'algorithm__regularizers': ('entropy_bonus',),
    'algorithm__entropy_coef': 0.01,
    'algorithm__entropy_target': 1.0,
    'collection__retire_above': 0.9,
    'collection__revisit': 0.25,
    'collection__dead_groups': 'resample',
    'algorithm__advantage': 'prompt_moving_mean',
    'collection__max_draws': 2,
    'log__probe_every': 10,
}
WAITING = {
    'preset': 'grpo',
    'steps': 1,
    'evaluation__prompts': 2,
    'evaluation__samples': 1,
    'reward__length_shaping': 'overlong',
    'reward__length_shaping_weight': 0.1,
    'reward__options__overlong__margin': 4,
    'collection__in_flight': 2,
    'algorithm__correction': 'truncated',
    'mesh__sampler': 1,
}
UPDATES = {  # whose updates have other names, which are known without compiling them
    'a critic': dict(preset='ppo'),
    'padded': dict(preset='dr_grpo', learner__pack_columns=0),
    'process rewards': dict(algorithm__advantage='process', reward__step_rewards='calculator'),
    'pairs': dict(preset='dpo', collection__source='pairs', rollout__group_size=2),
}


def names_of_update(changes, folder):
    """The metrics of the update of a run that is only traced."""
    opened = open_run(tiny_run.config(**changes), str(folder))
    settings = opened.settings
    aux = abstract_aux(settings.collection, settings.step_shapes(opened.algorithm), 40)
    return set(make_run_learner(opened, aux).update.program.traced.out_info[1])


def names_of_figures():
    """The figures of an evaluation whose verifier has a stricter reading."""
    flags = {'': np.ones((1, 2), bool), 'strict/': np.ones((1, 2), bool)}
    answers, one = dict.fromkeys(flags, np.full((1, 2), 'a', object)), np.ones(2)
    rewarded = Rewards(np.array(['a'] * 2, object), one > 1, one, one, one, {}, {'died': one > 1})
    judged = figures.Judged(rewarded, answers, flags)
    alone = judged._replace(rewarded=jax.tree.map(lambda x: x[:1], rewarded))
    return set(figures.compute_figures(judged, len(alone.rewarded.texts), alone))


@pytest.fixture(scope='module')
def written(tmp_path_factory):
    """File -> the names in its rows: of a run that has everything, on a chip that is known, and of other updates."""
    folder, names = tmp_path_factory.mktemp('kinds'), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chips, 'lookup', lambda kind: chips.Chip(flops=1e12, bandwidth=1e12))
        with serving(default='hash') as judge, serving(default='hash') as service:
            config = tiny_run.config(**EVERYTHING)
            config.reward.parts = (*config.reward.parts, ('judge', 0.0), ('http', 0.0))
            config.reward.options.judge.update(url=judge.url, rubric='Solution: {completion}')
            config.reward.options.http.update(url=service.url, batch=1)
            patch.setenv('NO_PROXY', '127.0.0.1')
            train.run(config, str(folder / 'run'))
    for file in ('metrics.jsonl', 'timings.jsonl', 'evaluations.jsonl', 'cold_start/metrics.jsonl'):
        names[file] = {name for row in tiny_run.rows(folder / 'run', file) for name in row} - {'step'}
    teacher = small_model.write_drawn(folder / 'teacher', seed=5)
    for changes in (*UPDATES.values(), dict(preset='opd', teacher__path=teacher)):
        names['metrics.jsonl'] |= names_of_update(changes, folder / 'other')
    # of rows that go on, of rewards by length, and of a sampler with a device of its own
    train.run(tiny_run.config(**WAITING), str(folder / 'waiting'))
    for file in ('metrics.jsonl', 'timings.jsonl'):
        names[file] |= {name for row in tiny_run.rows(folder / 'waiting', file) for name in row} - {'step'}
    names['metrics.jsonl'] |= set(count_sizes(np.ones(1, int)))  # of groups of several sizes
    names['evaluations.jsonl'] |= names_of_figures()
    return names


@pytest.mark.parametrize('file', ['metrics.jsonl', 'timings.jsonl', 'evaluations.jsonl', 'cold_start/metrics.jsonl'])
def test_every_metric_has_an_entry_and_every_entry_a_metric(written, file):
    patterns = entries(file)
    assert len(patterns) == len(set(patterns)), 'an entry comes twice'
    undocumented = {name for name in written[file] if not any(fnmatch.fnmatchcase(name, p) for p in patterns)}
    assert not undocumented, f'no entry in docs/metrics.md, {file}'
    field = 'cold_start' if '/' in file else file.removesuffix('.jsonl')
    assert not [name for name in written[file] if not panels.find_meaning(field, name)], 'nothing for the report'
    unwritten = [p for p in patterns if not fnmatch.filter(written[file], p)]
    assert not unwritten, f'an entry of docs/metrics.md, {file}, that no run writes'
