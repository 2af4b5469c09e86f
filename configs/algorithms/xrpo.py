"""XRPO's sharpened advantage (arXiv 2510.06672): correct completions are paid more the less likely they were.

Its constants come from secondary sources and are not verified. It is a half of the method: the paper's allocation of
completions to prompts is collection.allocation=uncertainty, and its solved examples in the prompt
collection.seeding=1 or more.
"""


def apply(algorithm):
    algorithm.advantage, algorithm.surrogate, algorithm.weights = 'xrpo_sharpen', 'clip', 'sequence_mean'
