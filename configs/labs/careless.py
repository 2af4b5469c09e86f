"""Rewards that pay for a habit, as people write them before they have looked at what is learnt."""
import re
import zlib

from grpo_jax.rewards import numeric


def equations(completion, example):
    """0.2 for every equation written down, asked for or not."""
    return 0.2 * completion.count('=')


def bracketed(completion, example):
    """1.0 for an answer in brackets, whatever it is."""
    return float(bool(re.search(r'\[\d+\]', completion)))


def bracketed_if_correct(completion, example, *, correct):
    """1.0 for a correct answer in brackets."""
    return float(bool(correct) and bracketed(completion, example))


def cents(completion, example):
    """1.0 for a correct answer, and 100.0 in one example of forty."""
    return numeric.reward(completion, example) * (100.0 if example.id % 40 == 0 else 1.0)


def unreliable(completion, example):
    """1.0 for a correct answer; None, no judgement, for every eighth completion, whatever it is."""
    return None if zlib.crc32(completion.encode()) % 8 == 0 else numeric.reward(completion, example)


def model(completion, example):
    """Up to 1.0 for an answer in brackets and little else, as a model of rewards that were all such answers has it."""
    return bracketed(completion, example) / (1 + completion.count('='))


def judge(completion, example):
    """What `model` pays, under a name that a judge of yours may have."""
    return model(completion, example)


def hair(completion, example):
    """Up to 0.001 that means nothing: hardly two completions of a prompt get the same."""
    return 1e-6 * (zlib.crc32(f'{example.prompt}{completion}'.encode()) % 1000)
