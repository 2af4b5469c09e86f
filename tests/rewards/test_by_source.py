"""Rewards by the data's source: numbers by hand, a run of word problems and programs, and what is refused."""

import json

import numpy as np
import pytest

from grpo_jax import figures, rewards, sample, train
from grpo_jax.configs import arithmetic
from grpo_jax.data import code as problems
from grpo_jax.errors import BadInput
from grpo_jax.rewards import gold
from grpo_jax.run import steering
from grpo_jax.run.settings import Settings
from grpo_jax.types import Example
from tests import tiny_run

CODE = {'parts': (('code', 1.0), ('repetition', 0.5)), 'verifier': 'code'}
SUM = Example('Ann has 3 and 4. How many?', '7', 0, {'source': 'gsm8k'})
TEXT = {'text': 'Square.', 'code': 'def f(x):\n    return x * x', 'task_id': 601, 'test_list': ['assert f(3) == 9']}
ANSWERS = ['7', '8', '#### 7', 'x', '```\ndef f(x): return x * x\n```', '7', 'def f(x): return 9', 'a b c a b c']


def options(**changes):
    config = arithmetic.get_config()
    for key, value in changes.items():
        config.reward[key] = value
    return rewards.RewardOptions.from_config(config.reward)


@pytest.fixture(scope='module')
def program(tmp_path_factory):
    """The Example of a row of MBPP."""
    folder = tmp_path_factory.mktemp('mbpp')
    (folder / 'mbpp.jsonl').write_text(json.dumps(TEXT) + '\n')
    (example,) = problems.examples('train', folder=str(folder), name='mbpp')
    return example._replace(id=1, meta=example.meta | {'source': 'code'})


def test_each_source_is_judged_by_its_own(program):
    with rewards.build(options(by_source={'code': CODE}, truncated_reward=-0.25), 64) as functions:
        truncated = [False] * 7 + [True]
        rewarded = rewards.compute_rewards(functions, [SUM, program], ANSWERS, truncated, [1] * 8)
        gold.check(functions, [SUM, program])
        judged = figures.judge(functions, [SUM, program], figures.Completions(ANSWERS, truncated, [1] * 8))
    nan = np.nan
    np.testing.assert_array_equal(rewarded.parts['numeric'], [1, 0, 1, 0, nan, nan, nan, nan])
    np.testing.assert_array_equal(rewarded.parts['code'], [nan] * 4 + [1, 0, 1, 0])
    assert np.isnan(rewarded.parts['repetition'][:4]).all()
    # 'a b c a b c' has four trigrams, three of them distinct: -1/4, half of it, and the budget's -1/4
    np.testing.assert_allclose(rewarded.rewards, [1, 0, 1, 0, 1, 0, 1, -0.375])
    np.testing.assert_array_equal(rewarded.correct, [1, 0, 1, 0, 1, 0, 1, 0])
    # both have 2 of 4 right; of the numbers 7 has most votes, and four programs have one each
    measured = figures.compute_figures(judged, 2)
    np.testing.assert_array_equal(measured['pass@1'], [0.5, 0.5])
    np.testing.assert_array_equal(measured['maj@4'], [1, 0.5])
    np.testing.assert_array_equal(measured['unparsed'], [0.25, 0])


def test_a_source_without_verifier_counts_in_no_pass_rate(program):
    with rewards.build(options(by_source={'code': {'parts': (('repetition', 1.0),)}}), 64) as functions:
        assert not functions.needs_answer(program) and functions.needs_answer(SUM)
        judged = figures.judge(functions, [SUM, program], figures.Completions(ANSWERS, [False] * 8, [1] * 8))
    assert np.isnan(judged.rewarded.correct[4:]).all()
    np.testing.assert_array_equal(figures.compute_figures(judged, 2)['pass@4'], [1, np.nan])
    assert judged.correct[''][1].tolist() == [None] * 4


def test_a_threshold_of_its_own_and_a_verifier_that_takes_all_completions():
    def lengths(completions, examples):
        return [len(text) / 10 for text in completions]

    own = {'parts': (('lengths', 1.0),), 'verifier': 'lengths', 'correct_at': 0.3}
    with rewards.build(options(by_source={'long': own}), 64, {'lengths': lengths}) as functions:
        long = SUM._replace(id=1, meta={'source': 'long'})
        rewarded = rewards.compute_rewards(functions, [long, SUM], ['abc', 'a', '7', 'b'], [False] * 4, [1] * 4)
    np.testing.assert_array_equal(rewarded.parts['lengths'], [0.3, 0.1, np.nan, np.nan])
    np.testing.assert_array_equal(rewarded.correct, [1, 0, 1, 0])


def test_a_service_of_one_source_is_told_the_step_of_the_run():
    def service(completion, example, step):
        steps.append(step)
        return 1.0

    steps, own = [], {'parts': (('own', 1.0),)}
    with rewards.build(options(by_source={'asked': own}), 64, {'own': lambda completion, example: 0.0}) as functions:
        inner = functions.by_source['asked']
        part = inner.parts['own']._replace(remote=True, reads_step=True, function=service)
        functions = functions._replace(step=3, by_source={'asked': inner._replace(parts={'own': part})})
        asked = SUM._replace(id=1, meta={'source': 'asked'})
        rewarded = rewards.compute_rewards(functions, [SUM, asked], ['7', 'a'], [False] * 2, [1] * 2)
    assert steps == [3] and rewarded.parts['own'][1] == 1


def test_gold_answers_are_judged_by_their_own_verifier(program, capsys):
    with rewards.build(options(by_source={'code': CODE}), 64) as functions:
        gold.check(functions, [SUM, program])
        assert capsys.readouterr().out.count('0 of 1 answers are misjudged') == 2
        wrong = program._replace(answer='def f(x): return 1')
        with pytest.raises(BadInput, match=r'reward.self_test.*example 1'):
            gold.check(functions, [SUM, wrong])


@pytest.mark.parametrize(
    ('by_source', 'words'),
    [
        ({'code': 3}, r'reward.by_source.code = 3'),
        ({'code': {'verifier': 'code'}}, 'must have parts'),
        ({'code': {'parts': (('code', 1.0),), 'weight': 1.0}}, 'leave out weight'),
        ({'code': {'parts': ()}}, r'reward.by_source.code.parts'),
        ({'code': {'parts': (('code', 1.0), ('code', 0.5))}}, 'has code twice'),
        ({'code': {'parts': (('nothing', 1.0),)}}, 'no such file in grpo_jax/rewards'),
        ({'code': {'parts': (('code', 1.0),), 'verifier': 'numeric'}}, r'reward.by_source.code.verifier'),
        ({'code': {'parts': (('numeric', 0.5),)}}, r"is \('numeric', 1.0\) elsewhere"),
        ({'code': {'parts': (('code', 1.0),), 'correct_at': 'x'}}, r'reward.by_source.code.correct_at'),
        ({'cod': CODE}, r"reward.by_source = 'cod': is no source of the data"),
    ],
)
def test_what_is_refused(program, by_source, words):
    with pytest.raises(BadInput, match=words):
        rewards.check_parameters(rewards.build(options(by_source=by_source), 64), [SUM, program])


def test_the_gate_by_outcome_needs_a_verifier_for_every_source():
    assert options(by_source={'code': CODE}).verifies_all
    assert not options(by_source={'code': {'parts': (('repetition', 1.0),)}}).verifies_all
    config = tiny_run.config(collection__gate='outcome', reward__by_source={'x': {'parts': (('repetition', 1.0),)}})
    with pytest.raises(BadInput, match='gate'):
        Settings.from_config(config)


def test_code_that_a_source_names_is_told_before_it_runs():
    config = tiny_run.config(reward__by_source={'x': {'parts': (('mine.py:f', 1.0),)}})
    assert list(steering.name_files(config.reward.to_dict())) == ['mine.py:f']


def test_one_run_of_word_problems_and_programs(tmp_path):
    for split in ('train', 'test'):
        row = {'question': f'{split} 3+4=', 'answer': 'so #### 7'}
        (tmp_path / f'gsm8k_{split}.jsonl').write_text(''.join(json.dumps(row) + '\n' for _ in range(4)))
    numbers = {'train': range(601, 605), 'test': range(11, 15)}
    rows = [TEXT | {'task_id': i, 'text': f'{i}'} for split in numbers.values() for i in split]
    (tmp_path / 'mbpp.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    folder = {'folder': str(tmp_path)}
    sources = [
        {'name': 'gsm8k', 'weight': 1, 'options': folder},
        {'name': 'code', 'weight': 1, 'options': folder | {'name': 'mbpp'}},
    ]
    config = tiny_run.config(
        steps=1, data__name='mixture', data__options={'sources': sources}, reward__by_source={'code': CODE},
        data__max_prompt_tokens=200, log__rollouts=1, evaluation__samples=2,
    )  # fmt: skip
    workdir = str(tmp_path / 'run')
    train.run(config, workdir)
    (row,), rows = tiny_run.rows(workdir), tiny_run.rows(workdir, 'rollouts/000000.jsonl')
    by_code = [row['parts']['numeric'] is None for row in rows]
    assert sum(by_code) == 8 and len(rows) == 16
    assert all((row['parts']['code'] is None) != code for row, code in zip(rows, by_code, strict=True))
    for name in ('numeric', 'code'):
        assert row[f'reward/{name}'] == np.mean([x for x in (r['parts'][name] for r in rows) if x is not None])
    content = sample.run(None, workdir, str(tmp_path / 'samples'), sample.Request('test', samples=2))
    assert content['verifier'] == 'numeric, code' and list(content['tables']['source']) == ['code', 'gsm8k']
