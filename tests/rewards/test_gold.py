"""The gold self-test on good data, on bad data, and with verifiers that take too much or too little."""

import os

import pytest

from grpo_jax import rewards, train
from grpo_jax.configs import default
from grpo_jax.errors import BadInput
from grpo_jax.rewards import gold, numeric
from grpo_jax.types import Example
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
    assert gold.change_answer(examples(answer)[0])[:2] == (answer, expected)


@pytest.mark.parametrize(
    'answer, wrong',
    [
        ('42', ['43']),
        ('1/2', ['1/3', '1', '2']),
        ('1e-05', ['1e-06', '1', '05']),
        ('1,234', ['1,235', '1', '234']),
        ('18.0', ['18.1', '0']),  # 18 is right
        ('4 of 7', ['4 of 8']),
        ('10,20', ['10,21', '10', '20']),
        ('1/0', ['1/1', '1', '0']),
    ],
)
def test_what_a_naive_reading_would_find_is_wrong_too(answer, wrong):
    assert list(gold.change_answer(examples(answer)[0])[1:]) == wrong


@pytest.mark.parametrize('answer', ['1/2', '1e-05', '3 to 4', '2^10', 'x', ''])
def test_gold_that_is_no_plain_number_is_refused_by_numeric(answer):
    with pytest.raises(BadInput, match=r'100\.00% of the gold answers'):
        check(0.5, [answer])
    assert numeric.reward(answer, examples(answer)[0]) is None


@pytest.mark.parametrize('answer', ['72', '-0.5', '1,234', '$18', '18 %', '**4**', 'He has 3 and 4, so\n#### 7', '18.'])
def test_gold_that_is_one_plain_number_is_read(answer):
    check(0.0, [answer])


def test_a_reward_model_has_no_self_test(capsys):
    section = default.get_config().reward
    section.update({'parts': [('mine', 1.0)], 'verifier': 'mine'})
    functions = {'mine': lambda completions, examples: [1.0] * len(completions)}
    with rewards.build(rewards.RewardOptions.from_config(section), 64, functions) as reward_functions:
        gold.check(reward_functions, examples('1'))
    assert 'none, since mine judges many completions at once' in capsys.readouterr().out


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


def test_a_run_on_bad_gold_stops_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr('grpo_jax.rewards.numeric.reward', lambda completion, example: 1.0)
    with pytest.raises(BadInput, match='accepted'):
        train.run(tiny_run.config(), str(tmp_path / 'run'))
    assert not os.path.exists(tmp_path / 'run' / 'config.json')
