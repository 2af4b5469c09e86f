"""The gold self-test on good data, on bad data, and with verifiers that take too much or too little."""

import os

import pytest

from configs import default
from grpo_jax import rewards, train
from grpo_jax.errors import BadInput
from grpo_jax.rewards import gold
from grpo_jax.types import Example
from tests import tiny_run


def examples(*answers):
    return [Example('question', answer, i, {}) for i, answer in enumerate(answers)]


def reward_functions(**functions):
    section = default.get_config().reward
    name = next(iter(functions), 'numeric')
    section.update({'parts': [(name, 1.0)], 'verifier': '' if functions else 'numeric'})
    return rewards.make(section, 64, functions)._replace(verifier=name)


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
    assert gold.of_answer(examples(answer)[0]) == (answer, expected)


def test_good_data_pass_and_the_share_is_printed(capsys):
    gold.check(reward_functions(), examples('42', '1,234', '-0.5'), 0.0)
    assert 'gold self-test: 0 of 3 answers are misjudged by numeric (0.00%)' in capsys.readouterr().out


def test_gold_that_the_verifier_cannot_read_stops_the_run_above_the_bound(capsys):
    with pytest.raises(BadInput, match=r"25\.00% of the gold answers .* example 2 with answer 'many': 'many' refused"):
        gold.check(reward_functions(), examples('1', '2', 'many', '4'), 0.2)
    gold.check(reward_functions(), examples('1', '2', 'many', '4'), 0.25)
    assert '1 of 4' in capsys.readouterr().out


def test_a_verifier_that_takes_everything_is_found_out():
    with pytest.raises(BadInput, match=r"100\.00% .* '2' accepted"):
        gold.check(reward_functions(generous=lambda completion, example: 1.0), examples('1'), 0.5)


def test_a_verifier_that_fails_is_a_misjudgement():
    def nested(completion, example):
        return nested(completion, example)

    with pytest.raises(BadInput, match='recursion'):
        gold.check(reward_functions(nested=nested), examples('1'), 0.5)


def test_a_run_on_bad_gold_stops_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr('grpo_jax.rewards.numeric.reward', lambda completion, example: 1.0)
    with pytest.raises(BadInput, match='accepted'):
        train.run(tiny_run.config(), str(tmp_path / 'run'))
    assert not os.path.exists(tmp_path / 'run' / 'config.json')
