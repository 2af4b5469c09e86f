"""Evaluation: figures by hand, tables by subject, and the command on a run and on a published model."""

import dataclasses
from fractions import Fraction
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from grpo_jax import evaluate, train
from grpo_jax.configs import tinystories
from grpo_jax.errors import BadInput
from grpo_jax.figures import Completions, compute_figures, judge, summarize, summarize_by_subject
from grpo_jax.rewards import numeric
from grpo_jax.run import cli
from grpo_jax.run.open import open_config, open_split
from grpo_jax.sampler import programs
from grpo_jax.statistics import share_interval
from grpo_jax.types import Example
from grpo_jax.workers import Expired
from tests import doc_examples, tiny_run

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
EXAMPLES = [
    Example('2+2=', '4', 0, {'subject': 'sums', 'level': 1}),
    Example('3+4=', '7', 1, {'subject': 'sums'}),
    Example('3*3=', '9', 2, {'subject': 'products', 'level': None}),
]
SAMPLES = ['#### 4', '4', '5', 'x', '7', '8', '8', '7', 'x', 'x', 'x', 'x']  # 4 of each
GREEDY = ['5', '#### 7', '8']


def hashed(completion, example):
    """A strict form: the number must follow ####."""
    return numeric.reward(completion, example) * ('####' in completion)


@pytest.fixture(scope='module')
def reward_functions(tmp_path_factory):
    config = tiny_run.config(reward__truncated_reward=-1.0)
    return open_config(config, str(tmp_path_factory.mktemp('none'))).rewards


def figures(reward_functions, examples=EXAMPLES, samples=SAMPLES):
    """The figures of those completions; every fifth sample is truncated, and all greedy ones."""
    truncated = [i % 5 == 4 for i in range(len(samples))]
    lengths, prompts = list(range(1, len(samples) + 1)), len(examples)
    sampled = judge(reward_functions, examples, Completions(samples, truncated, lengths))
    greedy = judge(reward_functions, examples, Completions(GREEDY[:prompts], [True] * prompts, [2] * prompts))
    return compute_figures(sampled, len(greedy.rewarded.texts), greedy)


def means(by_name):
    return {name: np.mean(values) for name, values in by_name.items()}


def test_figures_by_hand(reward_functions):
    # correct: 2 of 4, 2 of 4 (and a tie with 8), 0 of 4; truncated rows 4 and 9
    expected = {
        'greedy': 1 / 3,
        'pass@1': (1 / 2 + 1 / 2 + 0) / 3,
        'pass@2': (5 / 6 + 5 / 6 + 0) / 3,
        'pass@4': 2 / 3,
        'maj@4': (1 + 1 / 2 + 0) / 3,
        'reward': (4 - 2) / 12,
        'length': 6.5,
        'truncated': 2 / 12,
        'failed': 0,
        'unparsed': 5 / 12,
        'greedy/reward': (1 - 3) / 3,
        'greedy/length': 2,
        'greedy/truncated': 1,
        'greedy/failed': 0,
        'greedy/unparsed': 0,
    }
    assert means(figures(reward_functions)) == pytest.approx(expected)


def test_strict_figures_stand_beside_lenient_ones(reward_functions):
    measured = means(figures(reward_functions._replace(strict=hashed)))
    lenient = means(figures(reward_functions))
    assert {name: measured[name] for name in lenient} == lenient
    assert {name: value for name, value in measured.items() if name not in lenient} == pytest.approx(
        {
            'strict/greedy': 1 / 3,
            'strict/pass@1': 1 / 12,
            'strict/pass@2': (3 / 6) / 3,
            'strict/pass@4': 1 / 3,
            'strict/maj@4': (1 / 2) / 3,
        }
    )


def test_the_strict_vote_is_one_of_strict_answers(reward_functions):
    # strictly, what does not stand after #### is no answer, and does not vote
    strict = reward_functions._replace(
        strict=hashed, extract_strict=lambda text: text[1:] if text.startswith('#') else None
    )
    lenient = means(figures(reward_functions._replace(strict=hashed)))
    assert means(figures(strict))['strict/maj@4'] >= lenient['strict/maj@4']


def test_spellings_of_one_answer_vote_together(reward_functions):
    examples, samples = EXAMPLES[1:2], ['0.5', '1/2', '7', '7.0', '.5']
    extract = dict(extract=lambda text: text)
    apart = figures(reward_functions._replace(**extract), examples, samples)
    joined = figures(
        reward_functions._replace(**extract, same=lambda a, b: Fraction(a) == Fraction(b)), examples, samples
    )
    # five votes of one each, two of them right; then three against two
    assert (apart['maj@5'], joined['maj@5']) == (pytest.approx([2 / 5]), [0])


def test_samples_that_are_no_power_of_two(reward_functions):
    names = figures(reward_functions, EXAMPLES[:2], SAMPLES[:6] + SAMPLES[4:8]).keys()
    assert [name for name in names if '@' in name] == ['pass@1', 'pass@2', 'pass@4', 'pass@5', 'maj@5']
    assert [name for name in figures(reward_functions, samples=['4', '7', '9']) if '@' in name] == ['pass@1', 'maj@1']


def test_without_a_verifier_there_are_no_answers(reward_functions):
    measured = figures(reward_functions._replace(options=reward_functions.options._replace(verifier=''), extract=None))
    assert list(measured) == [
        prefix + name for prefix in ('', 'greedy/') for name in ('reward', 'length', 'truncated', 'failed')
    ]


def test_what_cannot_be_scored_is_wrong_and_has_no_reward(reward_functions):
    unscorable = [EXAMPLES[0], EXAMPLES[1]._replace(answer='many')]
    measured = figures(reward_functions, unscorable, SAMPLES[:8])
    np.testing.assert_array_equal(measured['pass@1'], [0.5, 0])
    np.testing.assert_array_equal(measured['reward'], [0.5, np.nan])
    only = summarize(measured, 0, [1])
    assert 'reward' not in only and only['pass@1']['mean'] == 0
    assert summarize(measured, 0)['reward']['mean'] == 0.5


def test_a_verifier_that_fails_is_counted(reward_functions):
    def slow(completion, example):
        if completion == '5':
            raise Expired('too slow')
        return numeric.reward(completion, example)

    part = reward_functions.parts['numeric']._replace(function=slow)
    measured = figures(reward_functions._replace(parts={'numeric': part}, strict=slow))
    np.testing.assert_array_equal(measured['failed'], [1 / 4, 0, 0])
    np.testing.assert_array_equal(measured['pass@1'], measured['strict/pass@1'])


def test_tables_by_subject(reward_functions):
    measured = summarize_by_subject(figures(reward_functions), EXAMPLES, 0)
    assert list(measured) == ['subject'] and list(measured['subject']) == ['products', 'sums']
    products, sums = measured['subject'].values()
    assert (products['prompts'], sums['prompts']) == (1, 2)
    assert sums['figures']['greedy']['mean'] == 0.5 and sums['figures']['maj@4']['mean'] == 0.75
    low, high = share_interval(np.array([0.5, 1.0]), level=0.95)
    assert sums['figures']['maj@4'] == {'mean': 0.75, 'low': low, 'high': high}
    assert products['figures']['pass@4']['mean'] == 0 and products['figures']['unparsed']['mean'] == 1


def test_only_fields_that_divide_the_prompts_have_a_table():
    def of(*values):
        examples = [Example('', '', i, {'source': value}) for i, value in enumerate(values)]
        measured = summarize_by_subject({'length': np.arange(len(values), dtype=float)}, examples, 0)
        return {
            name: {value: group['figures']['length']['mean'] for value, group in table.items()}
            for name, table in measured.items()
        }

    assert of('a', 'a') == of('a', 'b') == of(None, None) == {}
    assert of('b', 'a', None, 'a') == {'source': {'a': 2, 'b': 0}}
    assert of(10, 2, 10) == {'source': {'10': 1, '2': 1}}


def test_what_is_printed(reward_functions, capsys):
    measured = figures(reward_functions._replace(strict=hashed))
    content = {
        'prompts': 3,
        'split': 'test',
        'samples': 4,
        'sampling': {'temperature': 0.7},
        'verifier': 'numeric',
        'figures': summarize(measured, 0),
        'tables': summarize_by_subject(measured, EXAMPLES, 0),
    }
    evaluate.print_report(content)
    printed = capsys.readouterr().out
    assert '3 test prompts, 4 samples at temperature 0.7, verifier numeric' in printed and evaluate.TIES in printed
    rows = {
        cells[0]: cells[1:]
        for cells in (
            [cell.strip() for cell in line.strip('│┃').replace('┃', '│').split('│')]
            for line in printed.splitlines()
            if line[0] in '│┃'
        )
    }
    assert rows[''] == ['mean', '95% interval', 'strict', '95% interval']
    intervals = [share_interval(np.array(shares), level=0.95) for shares in ([0.5, 0.5, 0], [0.25, 0, 0])]
    expected = [f'{low:.3f} to {high:.3f}' for low, high in intervals]
    assert rows['pass@1'] == ['0.333', expected[0], '0.083', expected[1]]
    assert rows['length'][1].count(' to ') == 1
    assert rows['length'][2:] == ['', ''] and not any(name.startswith('strict') for name in rows)
    assert rows['subject'] == ['prompts', 'greedy', 'pass@1', 'pass@4', 'maj@4']
    assert rows['sums'][:2] == ['2', '0.50 {:.2f} to {:.2f}'.format(*share_interval(np.array([0.0, 1.0]), level=0.95))]


# whole evaluations


def read(folder):
    with open(os.path.join(folder, 'evaluation.json'), encoding='utf8') as file:
        return json.load(file)


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
    workdir = str(tmp_path_factory.mktemp('runs') / 'tiny')
    train.run(tiny_run.config(steps=1, evaluation__prompts=6, evaluation__samples=4), workdir)
    return workdir


def test_a_run_is_evaluated_as_it_was_in_training(workdir, capsys):
    evaluate.run(None, workdir, None, 0, 'test')
    content, rows = read(workdir), tiny_run.rows(workdir, 'completions.jsonl')
    last = tiny_run.rows(workdir, 'evaluations.jsonl')[-1]
    assert {'step': 1} | {name: value['mean'] for name, value in content['figures'].items()} == last
    assert content['model'] == {'workdir': workdir, 'step': 1}
    assert (content['verifier'], content['samples'], content['sampling']['temperature']) == ('numeric', 4, 1.0)
    assert all(value['low'] <= value['mean'] <= value['high'] for value in content['figures'].values())
    printed = capsys.readouterr().out
    assert '6 test prompts, 4 samples at temperature 1.0, verifier numeric' in printed
    assert 'pass@4' in printed and evaluate.TIES[:40] in printed
    # the dump says the same
    assert len(rows) == 6 * 5 and {row['decoding'] for row in rows} == {'greedy', 'sampled'}
    for decoding, name in (('greedy', 'greedy'), ('sampled', 'pass@1')):
        chosen = [row for row in rows if row['decoding'] == decoding]
        assert np.mean([row['correct'] for row in chosen]) == content['figures'][name]['mean']
        assert all(
            row['correct'] == (numeric.extract(row['completion']) == row['answer'])
            and row['extracted'] == numeric.extract(row['completion'])
            for row in chosen
        )
    assert content['first_prompt'] == rows[0]['prompt']


def test_other_samples_and_another_split(workdir, tmp_path):
    evaluate.run(None, workdir, str(tmp_path / 'out'), 2, 'train')
    content = read(tmp_path / 'out')
    assert (content['split'], content['samples']) == ('train', 2) and 'maj@2' in content['figures']
    ours, theirs = (tiny_run.rows(folder, 'completions.jsonl') for folder in (tmp_path / 'out', workdir))
    assert not {row['prompt'] for row in ours} & {row['prompt'] for row in theirs}


def test_an_evaluation_has_a_sampling_of_its_own_which_the_recorded_config_lacks(workdir, tmp_path):
    own = {'temperature': 0.5, 'top_p': 0.8, 'max_tokens': 3, 'samples': 2}
    evaluate.run(None, workdir, str(tmp_path / 'out'), 0, 'test', evaluation=own)
    content, rows = read(tmp_path / 'out'), tiny_run.rows(tmp_path / 'out', 'completions.jsonl')
    assert {name: content['sampling'][name] for name in ('temperature', 'top_p', 'max_tokens')} | {'samples': 2} == own
    assert max(row['length'] for row in rows) == 3 and 'pass@2' in content['figures']
    with pytest.raises(BadInput, match=r'evaluation\.top_p = 2\.0: must be a number at least 0 and at most 1'):
        evaluate.run(None, workdir, str(tmp_path / 'other'), 0, 'test', evaluation={'top_p': 2.0})


def test_a_checkpoint_is_chosen_by_its_step(workdir, tmp_path):
    with pytest.raises(BadInput, match=r'--step = 7: has no checkpoint .*choose one of \[1'):
        evaluate.run(None, workdir, str(tmp_path / 'out'), 0, 'test', step=7)
    evaluate.run(None, workdir, str(tmp_path / 'out'), 0, 'test', step=1)
    assert read(tmp_path / 'out')['model']['step'] == 1


def test_the_commands_flags_are_keys_of_the_evaluation():
    with doc_examples.parsed('evaluate', ['--workdir=w', '--config.evaluation.top_p=0.7', '--step=3']):
        assert (cli.read_section('evaluation'), doc_examples.flags.FLAGS.step) == ({'top_p': 0.7}, 3)
    with doc_examples.parsed('evaluate', ['--config=arithmetic', '--config.evaluation.top_p=0.7']):
        assert doc_examples.flags.FLAGS.config.evaluation.top_p == 0.7
    done = command('--workdir=w', '--config.rollout.top_p=0.7')
    assert done.returncode == 2 and 'a recorded run keeps its settings, except for keys in --help' in done.stderr


@pytest.mark.parametrize(
    'changes, message',
    [
        ({'evaluation__temperature': 0.001}, 'at least 0.01'),
        ({'evaluation__max_tokens': 4, 'rollout__thinking_tokens': 4}, 'rollout.thinking_tokens'),
        ({'checkpoint__best': 'greedy', 'evaluation__every': 0}, 'evaluation.every = 0'),
        ({'evaluation__max_tokens': 100_000}, r'data.max_prompt_tokens \+ evaluation.max_tokens'),
    ],
)
def test_evaluations_that_cannot_be_are_refused(tmp_path, changes, message):
    with pytest.raises(BadInput, match=message):
        train.check(tiny_run.config(**changes), str(tmp_path / 'run'))


def with_cache(opened, cache_bytes):
    """The Run with another budget of keys and values."""
    settings = opened.settings
    sampling = settings.sampling._replace(cache_bytes=cache_bytes)
    return dataclasses.replace(opened, settings=settings._replace(sampling=sampling))


def test_prompts_are_evaluated_at_once_as_far_as_memory_goes(tmp_path):
    opened = open_config(tiny_run.config(), str(tmp_path))
    # 5 completions a prompt: one prompt's take so many bytes, and 256 MiB are always free
    one = evaluate.make_shapes(opened, 5, 1)
    row_bytes = programs.cache_bytes(opened.model.config, opened.mesh, one, opened.settings.sampling)
    most = evaluate.FREE_CACHE // row_bytes
    assert (one.prompts, one.group_size) == (1, 5) and most > 6
    assert evaluate.make_shapes(opened, 5, 6).prompts == 6
    assert evaluate.make_shapes(opened, 5, most).prompts == most
    assert evaluate.make_shapes(opened, 5, most + 1).prompts == -(-(most + 1) // 2)  # two equal batches
    # memory for four prompts: six are two batches of three
    little = with_cache(opened, 4 * row_bytes)
    assert evaluate.make_shapes(little, 5, 6).prompts == 3
    # one prompt that is more than the memory goes alone
    least = with_cache(opened, row_bytes // 2)
    assert evaluate.make_shapes(least, 5, 6).prompts == 1


def test_batches_change_no_completion(workdir, tmp_path):
    evaluate.run(None, workdir, None, 0, 'test')
    whole = tiny_run.rows(workdir, 'completions.jsonl')
    opened = evaluate.open_recorded(workdir)
    sampling, shapes = opened.settings.sampling, evaluate.make_shapes(opened, 5, 1)
    small = with_cache(opened, 4 * programs.cache_bytes(opened.model.config, opened.mesh, shapes, sampling))
    evaluator = evaluate.make_evaluator(small, open_split(small, 'test'), 'test', 4)
    assert evaluator.shapes.prompts == 3
    _, rows = evaluate.report(evaluator, evaluate.open_policy(small)[0])
    assert list(rows) == whole


def stories(**changes):
    config = tinystories.get_config()
    config.evaluation.prompts = config.data.prompts_per_step = 4
    config.rollout.max_tokens = 8
    config.model.update(changes)
    return config


def command(*arguments):
    return subprocess.run(
        [sys.executable, '-m', 'grpo_jax.evaluate', *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300
    )


def test_a_published_model_is_evaluated_without_a_run_and_twice_the_same(real, tmp_path):
    model = os.path.join(real, 'models', 'stories260K')
    done = command(
        '--config=configs/tinystories.py',
        f'--config.model.path={model}',
        f'--out={tmp_path / "a"}',
        '--samples=3',
        '--config.evaluation.prompts=4',
        '--config.data.prompts_per_step=4',
        '--config.rollout.max_tokens=8',
    )
    assert done.returncode == 0, done.stderr
    assert '4 test prompts, 3 samples' in done.stdout
    evaluate.run(stories(path=model), None, str(tmp_path / 'b'), 3, 'test')
    for name in ('evaluation.json', 'completions.jsonl'):
        assert (tmp_path / 'a' / name).read_bytes() == (tmp_path / 'b' / name).read_bytes(), name
    content, rows = read(tmp_path / 'a'), tiny_run.rows(tmp_path / 'a', 'completions.jsonl')
    assert content['model'] == {'path': model} and content['first_prompt'].startswith('<s> dog. The bear')
    # karpathy's model, not a random one: its stories are words
    assert rows[0]['completion'].startswith('He said') and len(rows) == 4 * (1 + 3)
    assert len({row['completion'] for row in rows}) > 8


def test_the_command_says_in_one_line_what_it_lacks():
    done = command('--samples=4')
    assert done.returncode == 2 and 'Traceback' not in done.stderr, done.stderr
    message = [line for line in done.stderr.splitlines() if line.startswith('error: ')]
    assert len(message) == 1 and all(word in message[0] for word in ('--workdir', '--out')), done.stderr


def test_input_that_cannot_be_evaluated(workdir, tmp_path):
    out = str(tmp_path / 'out')
    for given, words in [
        ((stories(), workdir, out), 'give one of them'),
        ((stories(), None, None), '--out'),
        ((stories(), None, str(tmp_path)), 'nothing is overwritten'),
        ((None, workdir, str(tmp_path)), 'nothing is overwritten'),
        ((None, str(tmp_path), None), 'holds no run'),
        ((stories(random_init=True), None, out), 'random weights'),
        ((stories(path='runs/none/there'), None, out), 'no such folder'),
    ]:
        with pytest.raises(BadInput, match=words):
            evaluate.run(*given, 0, 'test')
    config = tiny_run.config(evaluation__prompts=0)
    with pytest.raises(BadInput, match=r'evaluation.prompts = 0'):
        opened = open_config(config, out)
        evaluate.make_evaluator(opened, open_split(opened, 'test'), 'test', 1)
    assert not os.listdir(tmp_path)
