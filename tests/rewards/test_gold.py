"""The gold self-test on good data, on bad data, and with verifiers that take too much or too little."""

import os

import pytest

from grpo_jax import rewards, train
from grpo_jax.configs import default
from grpo_jax.data import gsm8k
from grpo_jax.data import math as problems
from grpo_jax.errors import BadInput
from grpo_jax.rewards import gold, math, numeric
from grpo_jax.rewards.math import numbers
from grpo_jax.types import Example
from grpo_jax.workers import Pool
from tests import tiny_run


def examples(*answers):
    return [Example('question', answer, i, {}) for i, answer in enumerate(answers)]


def check(bound, answers, function=None):
    """gold.check of answers by a function, or by numeric."""
    section = default.get_config().reward
    section.update({'parts': [('mine' if function else 'numeric', 1.0)], 'verifier': '' if function else 'numeric'})
    options = rewards.RewardOptions.from_config(section)
    with rewards.build(options, 64, {'mine': function} if function else None) as reward_functions:
        options = options._replace(self_test=bound, verifier='mine' if function else 'numeric')
        gold.check(reward_functions._replace(options=options), examples(*answers))


@pytest.mark.parametrize(
    'answer, expected',
    [
        ('42', '43'),
        ('9', '10'),
        ('1,099', '1,100'),
        ('1,000 kg', '1,001 kg'),
        ('0.50', '0.51'),
        (r'\frac{1}{2}', r'\frac{1}{3}'),
        ('even', 'even+1'),
        ('', '+1'),
        ('9' * 30, '9' * 12 + '1' + '0' * 18),
    ],
)
def test_a_changed_answer_is_one_off_in_its_last_number(answer, expected):
    assert gold.change_answer(examples(answer)[0]) == (answer, expected)


@pytest.mark.parametrize(
    'answer, expected',
    [
        ('42', ('43', '-42', '420')),
        ('-0.5', ('-0.6', '0.5', '-05')),
        ('1,234', ('1,235', '-1,234', '12340')),
        ('1.25', ('1.26', '-1.25', '12.5')),
        ('0', ('1',)),
        ('1/2', ('1/3', '2')),
        (r'\frac{1}{2}', (r'\frac{1}{3}', '2')),
        ('1e-05', ('1e-06', '-05')),
        ('(1, 2)', ('(1, 3)', '2')),
        ('2x', ('3x',)),
        (r'12\text{ ways}', (r'13\text{ ways}',)),
        ('2 + 3 = 5', ('2 + 3 = 6',)),  # of which 5 may be right
    ],
)
def test_several_changes_are_tried_and_what_a_naive_reading_finds(answer, expected):
    assert gold.perturb(examples(answer)[0]) == (answer, *expected)


@pytest.mark.parametrize(
    'answer', ['1/2', '1e-05', r'\frac{1}{2}', '3 or 4', '5 million', '2^3', '(1,2)', 'x_1', '4:30']
)
def test_numeric_refuses_gold_that_is_no_plain_number(answer):
    with pytest.raises(BadInput) as error:
        check(1.0, ['1', answer])
    assert 'example 1' in str(error.value) and answer in str(error.value) and 'plain number' in str(error.value)
    assert numeric.reward(answer, examples(answer)[0]) is None


def test_a_verifier_that_reads_naively_is_found_out():
    def naive(completion, example):
        return float(completion[-1:] == example.answer[-1:])

    with pytest.raises(BadInput, match="'2' accepted"):
        check(0.5, ['1/2'], naive)


def test_math_passes_with_golds_of_every_kind(real):
    folder = os.path.join(real, 'math')
    chosen = [
        *gsm8k.examples('test', folder=folder)[::60],
        *(e for e in problems.examples('math500', folder=folder)[::4] if numbers.fraction(e.answer) is not None),
    ]
    for example in chosen:
        right, *wrong = gold.perturb(example)
        assert math.reward(right, example, pool=Undecided()) == 1
        assert [math.reward(text, example, pool=Undecided()) for text in wrong] == [0] * len(wrong), example


class Undecided(Pool):
    """For answers that must be decided without algebra."""

    def __init__(self):
        super().__init__(1, deadline=1.0, memory_gib=1.0)

    def call_cached(self, function, *args):
        raise AssertionError(f'{function.__name__}{args}')


def test_good_data_pass_and_the_share_is_printed(capsys):
    check(0.0, ['42', '1,234', '-0.5'])
    assert 'gold self-test: 0 of 3 answers are misjudged by numeric (0.00%)' in capsys.readouterr().out


def test_gold_that_the_verifier_cannot_read_stops_the_run_above_the_bound(capsys):
    with pytest.raises(BadInput, match=r"25\.00% of the gold answers .* example 2 with answer 'many': 'many' refused"):
        check(0.2, ['1', '2', 'many', '4'])
    check(0.25, ['1', '2', 'many', '4'])
    assert '1 of 4' in capsys.readouterr().out


def test_a_verifier_that_takes_everything_is_found_out():
    with pytest.raises(BadInput, match=r"100\.00% .* '2' accepted"):
        check(0.5, ['1'], lambda completion, example: 1.0)


def test_a_verifier_that_fails_is_a_misjudgement():
    def nested(completion, example):
        return nested(completion, example)

    with pytest.raises(BadInput, match='recursion'):
        check(0.5, ['1'], nested)


def check_math(*answers):
    section = default.get_config().reward
    section.update({'parts': [('math', 1.0)], 'verifier': 'math', 'self_test': 1.0})
    with rewards.build(rewards.RewardOptions.from_config(section), 64) as reward_functions:
        gold.check(reward_functions, examples(*answers))


def test_a_gold_answer_that_nobody_can_meet_is_counted(capsys):
    check_math('18', '30个', 'B) 12', 'proof')
    assert '1 of 4 answers are misjudged by math' in capsys.readouterr().out


def test_gold_answers_are_also_asked_as_models_give_them(capsys, monkeypatch):
    def bare_text(completion, example, *, pool):
        return float(completion == example.answer)

    monkeypatch.setattr('grpo_jax.rewards.math.reward', bare_text)
    check_math('18')
    assert '1 of 1 answers are misjudged by math' in capsys.readouterr().out


def test_a_run_on_bad_gold_stops_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr('grpo_jax.rewards.numeric.reward', lambda completion, example: 1.0)
    with pytest.raises(BadInput, match='accepted'):
        train.run(tiny_run.config(), str(tmp_path / 'run'))
    assert not os.path.exists(tmp_path / 'run' / 'config.json')


@pytest.mark.parametrize('name', ['model', 'process'])
def test_a_reward_model_has_no_self_test(capsys, name):
    section = default.get_config().reward
    section.update({'parts': [(name, 1.0)], 'verifier': name})
    with rewards.build(rewards.RewardOptions.from_config(section), 64) as reward_functions:
        gold.check(reward_functions, examples('1'))
    assert f'none, since {name} judges without gold answers' in capsys.readouterr().out


VERIFIERS = """
import asyncio

def batched(completions, examples):
    return [float(text == example.answer) for text, example in zip(completions, examples)]

async def asynchronous(completion, example):
    await asyncio.sleep(0.001)
    return float(completion == example.answer)

def like_trl(prompts, completions, answer, **kwargs):
    assert len(prompts) == len(completions) == len(answer)
    return [None if text == 'many' else float(text == right) for text, right in zip(completions, answer)]

def all_right(completions, examples):
    return [1.0] * len(completions)

async def all_wrong(completion, example):
    return 0.0

def half(completions, examples):
    return [float(text == example.answer and example.id % 2) for text, example in zip(completions, examples)]

def hangs(completions, examples):
    raise TimeoutError('of a judge')

async def waits(completion, example):
    await asyncio.sleep(60)

def too_few(completions, examples):
    return [1.0]

async def breaks(completion, example):
    return {}[completion]
"""


def check_file(tmp_path, name, answers, bound=0.0, handed=False, **changes):
    """gold.check by a function of VERIFIERS, in a file or handed over."""
    path, functions = tmp_path / 'mine.py', {}
    path.write_text(VERIFIERS)
    exec(VERIFIERS, functions)
    functions = {name: functions[name]}
    section = default.get_config().reward
    part = name if handed else f'{path}:{name}'
    section.update({'parts': [(part, 1.0)], 'verifier': name, 'self_test': bound} | changes)
    options = rewards.RewardOptions.from_config(section)
    with rewards.build(options, 64, functions if handed else None) as reward_functions:
        gold.check(reward_functions, examples(*answers))


@pytest.mark.parametrize('handed', [False, True])
@pytest.mark.parametrize('name', ['batched', 'asynchronous', 'like_trl'])
def test_a_verifier_of_many_completions_at_once_passes_the_self_test(tmp_path, capsys, name, handed):
    check_file(tmp_path, name, ['42', '1,234', '-0.5'], handed=handed)
    assert f'gold self-test: 0 of 3 answers are misjudged by {name} (0.00%)' in capsys.readouterr().out


@pytest.mark.parametrize(
    'name, words',
    [
        ('all_right', r"100\.00% .* '2' accepted"),
        ('all_wrong', r"100\.00% .* '1' refused"),
        ('half', r"50\.00% .* example 0 .* '1' refused"),
        ('hangs', r'100\.00% .* of a judge'),
        ('too_few', r'mine\.py, line \d+: returned \[1\.0\], and not a list of 8 rewards'),
        ('breaks', r"mine\.py, line \d+: KeyError: '1', in `return {}\[completion\]`"),
    ],
)
def test_a_verifier_of_many_completions_at_once_is_found_out(tmp_path, name, words):
    with pytest.raises(BadInput, match=words):
        check_file(tmp_path, name, ['1', '2'], retries=0)


def test_a_verifier_that_waits_for_ever_is_found_out(tmp_path):
    with pytest.raises(BadInput, match=r'100\.00%'):
        check_file(tmp_path, 'waits', ['1'], deadline=0.1)


def test_a_verifier_whose_calls_may_cost_judges_some_of_many(tmp_path, capsys):
    check_file(tmp_path, 'asynchronous', [str(i) for i in range(1, 1001)])
    assert 'gold self-test: 0 of 256 (of 1000) answers are misjudged' in capsys.readouterr().out


def test_of_very_many_answers_some_are_asked_and_the_same_whatever_other_rows_there_are(monkeypatch, capsys):
    monkeypatch.setattr(gold, 'MOST_ASKED', 20)
    asked: list[set[int]] = []
    for count in (200, 210):
        answers, read = examples(*map(str, range(count))), set()
        section = default.get_config().reward
        with rewards.build(rewards.RewardOptions.from_config(section), 64) as functions:
            part = functions.parts['numeric']

            def judge(completion, example, part=part, read=read):
                read.add(example.id)
                return part.function(completion, example)

            gold.check(functions._replace(parts={'numeric': part._replace(function=judge)}), answers)
        asked.append(read)
    assert 'gold self-test: 0 of 20 (of 200) answers are misjudged' in capsys.readouterr().out
    assert len(asked[0]) == 20 and len(asked[0] & asked[1]) >= 20 - 10
