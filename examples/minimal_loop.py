"""GRPO in one screen: the steps of grpo_jax.train without its shell, from the public functions.

    python examples/minimal_loop.py

A random model of characters learns to begin its completions with the letter that the prompt ends with. What a real run
adds around these lines (checkpoints, several devices, compiled programs, evaluation) is in grpo_jax/train.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from grpo_jax import algorithms, learner, sampler
from grpo_jax.algorithms import advantages, ratios, surrogates, weights
from grpo_jax.models import transformer
from grpo_jax.types import Experience, Prompts

P, G, C, V = 16, 8, 4, 16  # prompts a step, completions of each, tokens of a completion, vocabulary
MODEL = transformer.ModelConfig(
    vocab_size=V, width=32, layers=2, heads=2, kv_heads=1, head_dim=16, mlp=64, norm_eps=1e-6, rope_theta=1e4,
    rope_scaling=(), qk_norm=True, qkv_bias=False, out_bias=False, mlp_bias=False, tie_embeddings=True,
)  # fmt: skip
SAMPLING = sampler.Sampling(temperature=1.0, max_tokens=C, stop_tokens=(0,), pad_token=0)
GRPO = algorithms.Algorithm(
    advantage=functools.partial(advantages.group_norm, std_ddof=1, std_eps=1e-6),
    ratio=ratios.token,
    surrogate=functools.partial(surrogates.clip, clip_low=0.2, clip_high=0.2),
    weights=weights.sequence_mean,
)
OPTIMIZER = optax.adam(3e-3)


@jax.jit
def sample(params, prompts, keys, step):
    """A Rollout of G completions for each prompt."""
    return sampler.generate(params, prompts, keys, step, MODEL, SAMPLING, {}, block=8)


@jax.jit
def update(params, opt_state, experience):
    """(params, opt_state) after one update on the experience."""

    def loss(params):
        logprobs, _ = learner.completion_logprobs(
            params, experience.rollout, MODEL, temperature=1.0, chunk=1024, remat='none'
        )
        return algorithms.policy_loss(GRPO, logprobs, experience)[0]

    gradient = jax.grad(loss)(params)
    changes, opt_state = OPTIMIZER.update(gradient, opt_state)
    return optax.apply_updates(params, changes), opt_state


def run(steps: int = 60) -> list[float]:
    """The mean reward of each step."""
    params = transformer.init(jax.random.key(0), MODEL)
    opt_state, mean_rewards = OPTIMIZER.init(params), []
    for step in range(steps):
        # 1. prompts, and G completions of each; the noise is a function of seed, step, prompt and sample
        tokens = np.random.default_rng(step).integers(1, V, (P, 3))
        prompts = Prompts(jnp.asarray(tokens, jnp.int32), jnp.ones((P, 3), bool), jnp.arange(P, dtype=jnp.int32))
        keys = sampler.row_keys(jax.random.key(1), step, prompts.ids, G)
        rollout = sample(params, prompts, keys, jnp.int32(step))
        # 2. rewards f64[P, G], and advantages within each group
        rewards = np.asarray(rollout.tokens[:, 3] == np.repeat(tokens[:, -1], G), float).reshape(P, G)
        advantage = algorithms.compute_advantages(GRPO, rewards, mask=np.asarray(rollout.loss_mask).reshape(P, G, C))
        # 3. the update; with one update a rollout the old policy is the one that learns
        group_ids = jnp.repeat(jnp.arange(P, dtype=jnp.int32), G)
        experience = Experience(rollout, jnp.asarray(advantage), jnp.ravel(rewards), None, None, group_ids)
        params, opt_state = update(params, opt_state, experience)
        mean_rewards.append(float(rewards.mean()))
        print(f'step {step}  reward {mean_rewards[-1]:.3f}')
    return mean_rewards


if __name__ == '__main__':
    run()
