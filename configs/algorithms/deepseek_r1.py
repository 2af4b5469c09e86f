"""DeepSeek-R1's GRPO (arXiv 2501.12948): a very wide clip, a small KL, the reference renewed every 400 updates.

The paper: rollouts of 512 prompts in 16 minibatches, so updates of 32 prompts; G = 16, learning rate 3e-6, rewards for
accuracy, format and language. A step here is a rollout: with 16 updates in it, collection.reference_every is 25.
"""


def apply(algorithm, collection):
    algorithm.advantage, algorithm.surrogate, algorithm.weights = 'group_norm', 'clip', 'sequence_mean'
    algorithm.clip_low, algorithm.clip_high, algorithm.kl, algorithm.kl_coef = 10.0, 10.0, 'k3', 1e-3
    collection.reference, collection.reference_every = 'hard', 400
