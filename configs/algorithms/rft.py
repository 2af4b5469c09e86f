"""Rejection-sampling fine-tuning (arXiv 2308.01825): samples of the frozen initial policy, the correct ones imitated.

The paper also: duplicates of a solution removed, several passes over the kept samples.
"""


def apply(algorithm, collection):
    collection.source, algorithm.advantage = 'reference', 'correct'
    algorithm.surrogate, algorithm.weights = 'policy_gradient', 'sequence_mean'
