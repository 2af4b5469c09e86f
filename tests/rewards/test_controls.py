"""Controls: rewards that say nothing about what is right, and evaluation that still knows."""

import numpy as np
import pytest

from grpo_jax import rewards
from grpo_jax.configs.labs import random_reward, shuffled_reward
from grpo_jax.rewards import coin, numeric, shuffled
from grpo_jax.types import Example

EXAMPLES = [Example(f'{i}+1=', str(i + 1), i, {}) for i in range(500)]


def test_a_coin_is_fair_whatever_is_right():
    right = np.array([coin.reward(example.answer, example) for example in EXAMPLES])
    wrong = np.array([coin.reward('0', example) for example in EXAMPLES])
    assert set(right) == {0.0, 1.0}
    # 0.022 is the standard error
    for share in (right.mean(), wrong.mean(), (right == wrong).mean()):
        assert abs(share - 0.5) < 0.08


def test_a_coin_is_a_function_of_prompt_and_completion():
    assert [coin.reward('7', e) for e in EXAMPLES] == [coin.reward('7', e._replace(answer='7')) for e in EXAMPLES]
    texts = [str(i) for i in range(500)]
    tossed = np.array([[coin.reward(text, example) for text in texts] for example in EXAMPLES[:2]])
    assert abs((tossed[0] == tossed[1]).mean() - 0.5) < 0.08


@pytest.mark.parametrize('completion', ['', '\0', '\ud800', '9' * 10**6, 'йцу你好'])
def test_any_completion_gets_a_coin(completion):
    assert coin.reward(completion, EXAMPLES[0]) in (0.0, 1.0)


def group(right, size=8):
    """(completions, examples) of all examples, `size` each, of which the first `right` are correct."""
    owners = [example for example in EXAMPLES for _ in range(size)]
    return [owner.answer if i % size < right else '0' for i, owner in enumerate(owners)], owners


def test_shuffled_rewards_are_those_of_the_group_and_say_nothing():
    completions, owners = group(right=2)
    dealt = np.reshape(shuffled.reward(completions, owners), (-1, 8))
    np.testing.assert_array_equal(dealt.sum(1), 2)
    # right completions (the first two) expect what wrong ones do: 1/4, with a standard error of 0.014 and less
    np.testing.assert_allclose(dealt.mean(0), 0.25, atol=0.08)
    assert abs(dealt[:, :2].mean() - dealt[:, 2:].mean()) < 0.06
    np.testing.assert_array_equal(dealt, np.reshape(shuffled.reward(completions, owners), (-1, 8)))


def test_shuffled_rewards_stay_with_their_prompt():
    examples = [EXAMPLES[0], EXAMPLES[1], EXAMPLES[2]._replace(answer='none')] * 2
    assert shuffled.reward(['1', '0', '5', '1', '0', '5'], examples) == [1.0, 0.0, None] * 2


@pytest.mark.parametrize('lab, name', [(random_reward, 'coin'), (shuffled_reward, 'shuffled')])
def test_a_lab_trains_on_its_control_and_evaluates_the_truth(lab, name):
    section = lab.get_config().reward
    reward_functions = rewards.build(rewards.RewardOptions.from_config(section), 32)
    completions, owners = group(right=3)
    nothing = np.zeros(len(completions), int)
    rewarded = rewards.compute_rewards(reward_functions, EXAMPLES, completions, nothing > 0, nothing)
    total, parts = rewarded.rewards, rewarded.parts
    np.testing.assert_array_equal(total, parts[name])
    np.testing.assert_array_equal(
        parts[reward_functions.verifier], [numeric.reward(*row) for row in zip(completions, owners, strict=True)]
    )
    truth = parts[reward_functions.verifier].reshape(-1, 8)
    assert abs(np.mean(total.reshape(-1, 8)[truth == 1]) - np.mean(total.reshape(-1, 8)[truth == 0])) < 0.06
