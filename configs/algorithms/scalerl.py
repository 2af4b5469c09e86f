"""ScaleRL (arXiv 2510.13786): CISPO, advantages scaled by the batch, mean over prompts, dead groups left out.

The paper: rollouts up to 8 steps old, G = 16, float32 logits, prompts retired at a pass rate of 0.9.
"""


def apply(algorithm, collection):
    algorithm.advantage, algorithm.surrogate, algorithm.weights = 'batch_centred_std', 'cispo', 'prompt_mean'
    collection.dead_groups = 'drop'
