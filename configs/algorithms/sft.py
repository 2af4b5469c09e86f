"""Supervised fine-tuning: cross entropy on the data set's demonstrations, a token's weight the same everywhere.

Usual settings: learning rate 1e-5 to 2e-5. A step takes prompts_per_step x group_size demonstrations.
"""


def apply(algorithm, collection):
    collection.source, algorithm.advantage = 'demonstrations', 'ones'
    algorithm.surrogate, algorithm.weights = 'policy_gradient', 'token_mean'
