"""Well-formed reasoning: 1 if the completion is <think>...</think> then <answer>...</answer>, each once."""

from grpo_jax.example import Example
from grpo_jax.ranges import Texts


def reward(completion: str, example: Example, *, tags: Texts) -> float:
    """1.0 for the tags of these names in order, each once, with nothing but white space outside, else 0.0.

    DeepSeek-R1's format reward (arXiv 2501.12948) has the tags think and answer.
    """
    rest = completion
    for tag in tags:
        opening, closing = f'<{tag}>', f'</{tag}>'
        inside, closed, after = rest.partition(closing)
        once = completion.count(opening) == completion.count(closing) == 1
        if not (once and closed and inside.lstrip().startswith(opening)):
            return 0.0
        rest = after
    return float(not rest.strip())
