"""GRPO-lambda (arXiv 2505.18086; not 2510.00194's eligibility traces, nor lambda-GRPO, 2510.06870): in the groups
that answer best, correct completions are paid less the longer they are. Otherwise grpo.

The paper does not print alpha; 0.2 stands here. No gate: groups that are all right
teach length. Of 2 prompts a share of 0.2 takes no group, and of 3 prompts one.
"""


def apply(algorithm, collection):
    collection.gate = 'none'
    algorithm.advantage, algorithm.surrogate, algorithm.weights = 'grpo_lambda', 'clip', 'sequence_mean'
    algorithm.kl, algorithm.kl_coef = 'k3', 0.04
