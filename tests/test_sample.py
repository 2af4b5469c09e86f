"""Sampling: the folder is that of a run straight through, goes on where it was, and another policy learns from it."""

import json
import os

import numpy as np
import pytest

from grpo_jax import figures, sample, supervised, train
from grpo_jax.configs import distill
from grpo_jax.errors import BadInput
from grpo_jax.rewards import numeric
from grpo_jax.sample import Request
from tests import tiny_run

REQUEST = Request(prompts=8, samples=4, shard=3)


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
    workdir = str(tmp_path_factory.mktemp('runs') / 'teacher')
    train.run(tiny_run.config(steps=1, log__rollouts=1), workdir)
    return workdir


@pytest.fixture(scope='module')
def samples(workdir, tmp_path_factory):
    """(folder, figures) of 8 prompts in shards of 3."""
    to = str(tmp_path_factory.mktemp('samples') / 'to')
    return to, sample.run(None, workdir, to, REQUEST)


def contents(folder):
    files = {}
    for name in sorted(os.listdir(folder)):
        with open(os.path.join(folder, name), 'rb') as file:
            files[name] = file.read()
    return files


def rows_of(folder):
    return [row for name in sorted(os.listdir(folder)) if name.endswith('l') for row in tiny_run.rows(folder, name)]


# what a dump has of completions that a step learned from
LEARNED = ('entropy', 'old_logprobs', 'ref_logprobs', 'learned_from')


def test_the_rows_are_those_of_a_runs_rollouts(workdir, samples):
    rows, dumped = rows_of(samples[0]), tiny_run.rows(workdir, 'rollouts/000000.jsonl')
    assert list(contents(samples[0])) == ['000000.jsonl', '000001.jsonl', '000002.jsonl', 'sampling.json']
    assert len(rows) == 8 * 4 and [*map(len, map(tiny_run.rows, [samples[0]] * 3, [*contents(samples[0])]))] == [
        12,
        12,
        8,
    ]
    assert list(rows[0]) == [name for name in dumped[0] if name not in LEARNED]
    assert all(row['correct'] == (numeric.extract(row['completion']) == row['answer']) for row in rows)
    assert all(len(row['tokens']) == len(row['logprobs']) == row['length'] for row in rows)
    assert len({row['completion'] for row in rows}) > 8 and {row['advantage'] for row in rows} == {None}


def test_figures_are_those_of_the_rows(samples, capsys):
    rows, measured = rows_of(samples[0]), samples[1]['figures']
    right = np.array([row['correct'] for row in rows]).reshape(8, 4)
    assert measured['pass@1']['mean'] == right.mean() and measured['pass@4']['mean'] == right.any(1).mean()
    assert measured['length']['mean'] == np.mean([row['length'] for row in rows])
    assert 'maj@4' in measured and 'greedy' not in measured


def test_figures_of_written_rows_by_hand():
    row = {'completion': '4', 'reward': 1.0, 'correct': True, 'parts': {'a': None}, 'length': 2, 'truncated': False}
    rewarded = figures.recorded_rewards([row, row | {'reward': None, 'correct': None, 'length': 4}])
    np.testing.assert_array_equal(rewarded.rewards, [1, np.nan])
    np.testing.assert_array_equal(rewarded.correct, [1, np.nan])
    np.testing.assert_array_equal(rewarded.parts['a'], [np.nan, np.nan])
    assert rewarded.lengths.tolist() == [2, 4] and rewarded.truncated.tolist() == [False, False]


def test_samples_that_were_killed_go_on_and_are_the_same(workdir, samples, tmp_path, monkeypatch):
    made, (path, whole) = [], (sample.rollout_rows, contents(samples[0]))

    def killed(*arguments):
        if made:
            raise KeyboardInterrupt
        made.append(path(*arguments))
        return made[0]

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(sample, 'rollout_rows', killed)
        sample.run(None, workdir, str(tmp_path / 'to'), REQUEST)
    assert list(contents(tmp_path / 'to')) == ['000000.jsonl', 'sampling.json']
    sample.run(None, workdir, str(tmp_path / 'to'), REQUEST)
    assert contents(tmp_path / 'to') == whole
    # and when everything is there, nothing is sampled
    monkeypatch.setattr(sample, 'make_run_sampler', None)
    assert sample.run(None, workdir, str(tmp_path / 'to'), REQUEST) == samples[1]


def test_noise_is_by_prompt_and_sample_whatever_the_shard(workdir, samples, tmp_path):
    sample.run(None, workdir, str(tmp_path / 'to'), REQUEST._replace(shard=8, samples=2))
    texts = [row['completion'] for row in rows_of(samples[0])]
    fewer = [row['completion'] for row in rows_of(tmp_path / 'to')]
    assert fewer == [text for i, text in enumerate(texts) if i % 4 < 2]


def test_greedy_samples_are_one_a_prompt_and_not_the_drawn_ones(workdir, samples, tmp_path):
    content = sample.run(None, workdir, str(tmp_path / 'to'), Request('test', 3, 1, greedy=True))
    rows = rows_of(tmp_path / 'to')
    assert len(rows) == 3 and content['sampling']['temperature'] == 0 and next(iter(content['figures'])) == 'pass@1'
    assert not {row['prompt'] for row in rows} & {row['prompt'] for row in rows_of(samples[0])}


def student(samples, **changes):
    """A small run on what configs/distill.py reads; even wrong sums count as demonstrations."""
    name = distill.get_config('sft').data.name
    return tiny_run.config(data__name=name, data__options={'folder': samples[0], 'least': -9.0}, **changes)


def test_another_policy_learns_from_samples(samples, tmp_path):
    config = student(samples, supervised__updates=2)
    assert int(supervised.run(config, str(tmp_path / 'run')).step) == 2


def test_the_preset_of_distillation_learns_from_samples(samples, tmp_path, long):
    state = train.run(student(samples, preset='sft', steps=2), str(tmp_path / 'run'))
    assert int(state.step) == 2


def test_a_folder_of_other_samples_is_refused(workdir, samples, tmp_path):
    to = str(tmp_path / 'to')
    whole = contents(samples[0])
    for request, words in [
        (REQUEST._replace(samples=2), 'request.samples was 4, now 2'),
        (REQUEST._replace(prompts=7), 'data.answers was'),
        (REQUEST._replace(split='test'), 'data.answers was'),
        (REQUEST._replace(shard=4), 'request.shard was 3, now 4'),
    ]:
        with pytest.raises(BadInput, match=words):
            sample.run(None, workdir, samples[0], request)
    assert contents(samples[0]) == whole
    for given, words in [
        ((None, workdir, workdir, REQUEST), 'holds other things than samples'),
        ((None, workdir, os.path.join(workdir, 'config.json'), REQUEST), 'is a file'),
        ((None, None, to, REQUEST), '--workdir'),
        ((tiny_run.config(), None, to, REQUEST), 'random weights'),
        ((None, workdir, to, REQUEST._replace(greedy=True)), '--greedy'),
        ((None, workdir, to, REQUEST._replace(samples=0)), 'at least 1'),
    ]:
        with pytest.raises(BadInput, match=words):
            sample.run(*given)
    assert not os.listdir(tmp_path)


def test_another_policy_or_config_does_not_go_on(workdir, samples, tmp_path):
    path = os.path.join(samples[0], 'sampling.json')
    with open(path, encoding='utf8') as file:
        record = json.load(file)
    for section, key, value, words in [
        ('model', 'digest', 'other', 'model.digest was'),
        ('config', 'seed', 9, 'config.seed was'),
        ('config', 'steps', 9, ''),  # of which no completion is a function
    ]:
        other = tmp_path / key
        other.mkdir()
        for name, content in contents(samples[0]).items():
            (other / name).write_bytes(content)
        (other / 'sampling.json').write_text(json.dumps(record | {section: record[section] | {key: value}}))
        if words:
            with pytest.raises(BadInput, match=words):
                sample.run(None, workdir, str(other), REQUEST)
        else:
            sample.run(None, workdir, str(other), REQUEST)


def test_a_damaged_shard_is_named(workdir, samples, tmp_path):
    for name, content in contents(samples[0]).items():
        (tmp_path / name).write_bytes(content[:-40] if name == '000001.jsonl' else content)
    with pytest.raises(BadInput, match=r'000001\.jsonl.*remove it'):
        sample.run(None, workdir, str(tmp_path), REQUEST)
    (tmp_path / '000001.jsonl').unlink()
    sample.run(None, workdir, str(tmp_path), REQUEST)
    assert contents(tmp_path) == contents(samples[0])
