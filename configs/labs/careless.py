"""Rewards of the labs that pay for a habit, as people write them before they have seen what is learned."""
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
    """1.0 for a correct answer, 0.0 for a wrong one, but None, no judgement, for every eighth completion."""
    return None if zlib.crc32(completion.encode()) % 8 == 0 else numeric.reward(completion, example)


def model(completion, example):
    """Up to 1.0 for an answer in brackets, less with each equation: a reward model that has seen only quick answers."""
    return bracketed(completion, example) / (1 + completion.count('='))


def judge(completion, example):
    """The same reward as `model`, under a name that a judge of yours may have."""
    return model(completion, example)


def hair(completion, example):
    """A meaningless number up to 0.001, which differs between nearly all completions of a prompt."""
    return 1e-6 * (zlib.crc32(f'{example.prompt}{completion}'.encode()) % 1000)
