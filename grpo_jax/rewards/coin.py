"""A control without information: each completion is paid by a fair coin, whatever its text (compare arXiv 2506.10947).

In the paper each completion has its own toss. Here equal completions of a prompt share a toss, so that a run can be
repeated.
"""

import hashlib

from grpo_jax.example import Example


def reward(completion: str, example: Example) -> float:
    """1.0 or 0.0 with equal probability: one bit of a hash over the example's id and the completion."""
    content = f'{example.id} {completion}'.encode('utf8', 'surrogatepass')
    return float(hashlib.blake2b(content, digest_size=1).digest()[0] & 1)
