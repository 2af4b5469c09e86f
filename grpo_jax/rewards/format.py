"""Well-formed reasoning: 1 if the completion is <think>...</think> then <answer>...</answer>, each once."""

from grpo_jax.example import Example
from grpo_jax.ranges import Texts


def reward(completion: str, example: Example, *, tags: Texts) -> float:
    """1.0 if the completion is <tag>...</tag> for each name in `tags`, in order and once, else 0.0.

    White space may stand between them. A first tag that the prompt opens (example.begun) counts as the completion's.
    DeepSeek-R1's format reward (arXiv 2501.12948) has the tags think and answer.
    """
    if tags and example.begun.startswith(f'<{tags[0]}>'):
        completion = example.begun + completion
    tail = completion
    for tag in tags:
        opening, closing = f'<{tag}>', f'</{tag}>'
        inside, closed, after = tail.partition(closing)
        once = completion.count(opening) == completion.count(closing) == 1
        if not (once and closed and inside.lstrip().startswith(opening)):
            return 0.0
        tail = after
    return float(not tail.strip())
