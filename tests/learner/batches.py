"""Random batches of 4 groups of 4 completions of up to 6 tokens, and batches at the edges, for whole steps."""

import numpy as np

from tests.learner.plain_advantages import Batch

P, G, C = 4, 4, 6
B, NAN = P * G, np.nan


def draw(seed):
    """A batch with unknown rewards and verdicts, rows without a token, truncated and forced ones, groups of a kind."""
    rng = np.random.default_rng(seed)
    lengths = np.where(rng.uniform(size=B) < 0.12, 0, rng.integers(1, C + 1, B))
    completion = np.arange(C) < lengths[:, None]
    correct = (rng.uniform(size=(P, G)) < rng.choice([0.2, 0.5, 0.8], (P, 1))).astype(float)
    if seed % 2:
        correct[rng.integers(P)] = rng.integers(2)  # a group all right or all wrong
    shaped = rng.choice([0.0, 0.1, 0.3], (P, G)) if seed % 3 else np.zeros((P, G))
    rewards = np.where(rng.uniform(size=(P, G)) < 0.12, NAN, correct + shaped)
    correct = np.where(rng.uniform(size=(P, G)) < 0.12, NAN, correct)
    if seed % 5 == 0:
        rewards[0, 1:] = NAN  # a group of which one alone is known
        rewards[3] = NAN
    moves = rng.normal(0, 0.25, (5, B, C)) * rng.choice([1.0, 1.0, 1.0, 4.0], (5, B, C))
    new = rng.normal(-1.8, 0.4, (B, C))
    old, ref, sampler, teacher = (np.minimum(new + move, -0.02) for move in moves[:4])
    masked = np.where(completion, 1, 0)
    return Batch(
        rewards=rewards,
        correct=correct,
        completion=completion,
        forced=completion & (rng.uniform(size=(B, C)) < 0.1),
        tokens=rng.integers(0, 3, (B, C)) * masked,
        new=new,
        old=old * masked,
        ref=ref * masked,
        sampler=sampler * masked,
        teacher=teacher * masked,
        entropy=rng.uniform(0.1, 1.2, (B, C)) * masked,
        values=rng.normal(0.4, 0.3, (B, C)),
        new_values=rng.normal(0.4, 0.4, (B, C)),
        steps=np.where(rng.uniform(size=(B, C)) < 0.4, rng.uniform(0, 1, (B, C)).round(1), NAN),
        run_baseline=rng.uniform(),
        prompt_baselines=np.repeat(rng.uniform(size=(P, 1)), G, 1),
        initial_entropy=NAN if seed % 2 else 0.5,
    )


RANDOM = {f'random {seed}': draw(seed) for seed in range(20)}


def regrouped(batch, *shape):
    """The same completions in groups of another size."""
    names = ('rewards', 'correct', 'prompt_baselines')
    return batch._replace(**{name: getattr(batch, name).reshape(shape) for name in names})


def apart(batch, name, least, most):
    """Logprobs of one policy moved by that many nats."""
    move = np.random.default_rng(1).uniform(least, most, (B, C))
    return batch._replace(**{name: np.where(batch.completion, getattr(batch, name) + move, 0)})


PLAIN = draw(1)
EDGES = {
    'groups of one': regrouped(PLAIN, B, 1),
    'one group': regrouped(PLAIN, 1, B),
    'equal rewards': PLAIN._replace(rewards=np.full((P, G), 0.7), correct=np.zeros((P, G))),
    'all right': PLAIN._replace(rewards=np.ones((P, G)), correct=np.ones((P, G))),
    'nothing known': PLAIN._replace(rewards=np.full((P, G), NAN), correct=np.full((P, G), NAN)),
    'no verdict known': PLAIN._replace(correct=np.full((P, G), NAN)),
    'no token': PLAIN._replace(completion=PLAIN.completion & False, forced=PLAIN.forced & False),
    'all forced': PLAIN._replace(forced=PLAIN.completion),
    'one token': PLAIN._replace(
        completion=(np.arange(B) == 5)[:, None] & (np.arange(C) < 1), forced=PLAIN.forced & False
    ),
    'one update': PLAIN._replace(old=PLAIN.new * PLAIN.completion, sampler=PLAIN.new * PLAIN.completion),
    'equal to the reference': PLAIN._replace(ref=PLAIN.new * PLAIN.completion),
    'far where nothing was sampled': PLAIN._replace(
        **{
            name: np.where(PLAIN.mask, getattr(PLAIN, name), value)
            for name, value in dict(old=-2e4, ref=-1e4, sampler=0.0, teacher=-3e4, entropy=1e4, values=1e4).items()
        }
    ),
    'policy far below': apart(PLAIN, 'old', 30, 200),
    'policy far above': apart(PLAIN, 'old', -200, -30),
    'reference far': apart(PLAIN, 'ref', -90, 90),
    'sampler far': apart(PLAIN, 'sampler', -90, 90),
}
