"""Reward functions as people bring them from verl and TRL work as files, without a change."""

import pytest
from test_scoring import make

from grpo_jax import rewards
from grpo_jax.errors import BadInput
from grpo_jax.rewards import gold
from grpo_jax.types import Example

FILE = """\
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert extra_info is None or extra_info['index'] == 7
    return (solution_str == ground_truth) + 2 * (data_source == 'sums')

def as_dict(data_source, solution_str, ground_truth, extra_info, **kwargs):
    return {'score': float(solution_str == ground_truth), 'extra': sorted(extra_info), 'acc': True}

def batch(data_sources, solution_strs, ground_truths, extra_infos):
    assert set(data_sources) == {'sums'} and {info['index'] for info in extra_infos} == {7}
    return [{'score': float(a == b)} for a, b in zip(solution_strs, ground_truths, strict=True)]

def trl(prompts, completions, ground_truth, **kwargs):
    assert ground_truth == ['column'] * len(completions)
    return [float(len(text)) for text in completions]

def of_messages(prompts, completions, answer, **kwargs):
    assert {prompt[-1]['content'] for prompt in prompts} == {'1+1='}
    assert all(completion[0]['role'] == 'assistant' for completion in completions)
    return [float(completion[0]['content'] == gold) for completion, gold in zip(completions, answer, strict=True)]

def one_message(completion, prompt, **kwargs):
    return float(len(completion[-1]['content']) + len(prompt))

async def later(completion, example):
    return float(completion[0]['content'] == example.answer)
"""
COLUMNS = {'data_source': 'sums', 'extra_info': {'index': 7}}
CHAT = ({'role': 'system', 'content': 'Add.'}, {'role': 'user', 'content': '1+1='})


def paid(folder, name, meta, messages=(), **changes):
    """The rewards of the completions 2 and 33 of 1+1=, by a function of FILE."""
    (folder / 'brought.py').write_text(FILE)
    row = Example('1+1=', '2', 0, meta, messages)
    functions = make((f'{folder}/brought.py:{name}', 1.0), **changes)
    with functions:
        functions = gold.try_out(functions, [row])
        return rewards.compute_rewards(functions, [row], ['2', '33'], [False] * 2, [1, 2]).rewards.tolist()


@pytest.mark.parametrize(
    'name, meta, expected',
    [
        ('compute_score', COLUMNS, [3, 2]),
        ('compute_score', {'data_source': 'others'}, [1, 0]),
        ('as_dict', COLUMNS, [1, 0]),
        ('as_dict', {'data_source': 'sums'}, [1, 0]),
        ('batch', COLUMNS, [1, 0]),
        ('trl', {'ground_truth': 'column'}, [1, 2]),
    ],
)
def test_signatures_of_verl_get_what_they_name(tmp_path, name, meta, expected):
    assert paid(tmp_path, name, meta) == expected


def test_a_column_that_verls_function_needs_is_asked_for_before_the_run(tmp_path):
    with pytest.raises(BadInput, match="parameter 'data_source'"):
        paid(tmp_path, 'compute_score', {})


@pytest.mark.parametrize('messages', [(), CHAT])
@pytest.mark.parametrize('name, expected', [('of_messages', [1, 0]), ('later', [1, 0])])
def test_completions_and_prompts_are_messages_where_the_key_says_so(tmp_path, name, expected, messages):
    assert paid(tmp_path, name, {}, messages, completions='messages') == expected


def test_a_single_completion_and_its_chat_are_messages(tmp_path):
    assert paid(tmp_path, 'one_message', {}, CHAT, completions='messages') == [1 + 2, 2 + 2]


def test_a_function_of_messages_that_gets_texts_is_told_the_key(tmp_path):
    with pytest.raises(BadInput, match=r"reward\.completions='messages'"):
        paid(tmp_path, 'later', {})


def test_a_function_of_a_notebook_gets_messages_and_a_reward_of_the_project_texts():
    seen = []

    def mine(completions, **kwargs):
        seen.extend(completion[0]['content'] for completion in completions)
        return [0.5] * len(completions)

    parts = ('mine', 1.0), ('numeric', 1.0)
    functions = make(*parts, verifier='numeric', completions='messages', functions={'mine': mine})
    row = Example('1+1=', '2', 0, {})
    with functions:
        assert rewards.compute_rewards(functions, [row], ['2', '3'], [False] * 2, [1, 1]).rewards.tolist() == [1.5, 0.5]
    assert seen == ['2', '3']
