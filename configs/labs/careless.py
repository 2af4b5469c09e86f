"""Rewards that pay for a habit, as people write them before they have looked at what is learnt."""
import re


def equations(completion, example):
    """0.2 for every equation written down, asked for or not."""
    return 0.2 * completion.count('=')


def bracketed(completion, example):
    """1.0 for an answer in brackets, whatever it is."""
    return float(bool(re.search(r'\[\d+\]', completion)))


def bracketed_if_correct(completion, example, *, correct):
    """1.0 for a correct answer in brackets."""
    return float(bool(correct) and bracketed(completion, example))
