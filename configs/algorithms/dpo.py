"""DPO (arXiv 2305.18290) on pairs of the best and the worst completion, sampled by the frozen initial policy.

The paper: beta 0.1, learning rate 1e-6 (5e-7 is usual), pairs ranked by people. Rows of a group outside the pair
are computed and carry no loss: a small group_size wastes least.
"""


def apply(algorithm, collection):
    collection.source, algorithm.advantage = 'reference', 'best_and_worst'
    algorithm.surrogate, algorithm.weights = 'dpo', 'pair_mean'
