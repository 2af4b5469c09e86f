"""A control that knows nothing: a fair coin for each completion, whatever its text (compare arXiv 2506.10947).

In the paper every draw has a coin of its own. Here equal completions of a prompt share one, so that a run can be
repeated.
"""

import hashlib

from grpo_jax.example import Example


def reward(completion: str, example: Example) -> float:
    """1.0 or 0.0, half of the time each: a bit of the hash of the example's id and the completion."""
    content = f'{example.id} {completion}'.encode('utf8', 'surrogatepass')
    return float(hashlib.blake2b(content, digest_size=1).digest()[0] & 1)
