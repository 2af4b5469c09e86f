"""XRPO's sharpened advantage (arXiv 2510.06672): correct completions are paid more the less likely they were.

Its constants come from secondary sources and are not verified; the paper's allocation of completions to prompts and
its solved examples in the prompt are left out.
"""


def apply(algorithm):
    algorithm.advantage, algorithm.surrogate, algorithm.weights = 'xrpo_sharpen', 'clip', 'sequence_mean'
