"""DeepSeek-R1's GRPO (arXiv 2501.12948): a very wide clip, a small KL, the reference renewed every 400 steps.

The paper: 16 minibatches a rollout, G = 16, 32 prompts, learning rate 3e-6, rewards for accuracy, format and language.
"""


def apply(algorithm, collection):
    algorithm.advantage, algorithm.surrogate, algorithm.weights = 'group_norm', 'clip', 'sequence_mean'
    algorithm.clip_low, algorithm.clip_high, algorithm.kl, algorithm.kl_coef = 10.0, 10.0, 'k3', 1e-3
    collection.reference, collection.reference_every = 'hard', 400
