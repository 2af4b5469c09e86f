"""A control that knows nothing: a fair coin for each completion, whatever it says (compare arXiv 2506.10947).

There every draw has a coin of its own; here equal completions of a prompt have the same, so that a run can be repeated.
"""

import hashlib


def reward(completion, example):
    """1.0 or 0.0, half of the time each: a bit of the hash of the example's id and the completion."""
    content = f'{example.id} {completion}'.encode('utf8', 'surrogatepass')
    return float(hashlib.blake2b(content, digest_size=1).digest()[0] & 1)
