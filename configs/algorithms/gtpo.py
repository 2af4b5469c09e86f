"""GTPO (arXiv 2508.03772; not the token- or turn-level methods of the same name): conflicting tokens of bad
completions are spared, those of good ones count double, and high entropy is punished. No reference.

The paper: G = 8, LoRA of rank 128.
"""


def apply(algorithm):
    algorithm.advantage, algorithm.surrogate, algorithm.weights = 'gtpo', 'policy_gradient', 'sequence_mean'
