"""Drawing in a kernel, interpreted, against drawing from whole logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import sampler
from grpo_jax.models.kernels import draw_kernel
from grpo_jax.sampler import decode
from grpo_jax.sampler import sampling as distribution
from grpo_jax.sharding import mesh as meshes

PLAIN = sampler.Sampling(1.0, 8, (1,), 0)


@pytest.mark.parametrize(
    'vocabulary, tied, temperature, tensor',
    [
        (1300, True, 1.0, 1),
        (1300, False, 0.7, 1),
        (97, False, 1.3, 1),
        (3072, True, 1.0, 1),
        (1300, True, 1.0, 2),
        (2600, False, 0.7, 4),
    ],
)
def test_same_tokens_and_logprobs(vocabulary, tied, temperature, tensor):
    rng, rows = np.random.default_rng(vocabulary), 12
    hidden = jnp.asarray(rng.normal(size=(rows, 32)), jnp.float32)
    vectors = jnp.asarray(rng.normal(size=(vocabulary, 32)), jnp.float32)
    head = {'embed': vectors} if tied else {'lm_head': vectors.T}
    keys = jax.random.split(jax.random.key(3), rows)
    given_tokens = jnp.asarray([-1] * (rows - 2) + [0, vocabulary - 1], jnp.int32)

    def draw(hidden, head, keys, given_tokens):
        assert decode.can_use_draw_kernel(head, PLAIN, keys)
        return draw_kernel.draw(hidden, head, keys, given_tokens, temperature)

    if tensor > 1:
        same = jax.sharding.PartitionSpec()
        draw = jax.shard_map(
            draw,
            mesh=meshes.make({'tensor': tensor}),
            in_specs=(same,) * 4,
            out_specs=same,
            axis_names={'data', 'fsdp'},
            check_vma=False,
        )
    tokens, logprobs = jax.jit(draw)(hidden, head, keys, given_tokens)
    logits = hidden @ vectors.T
    expected = distribution.draw(logits, keys, temperature=temperature, top_p=1.0, top_k=0, min_p=0.0)
    expected = np.where(given_tokens >= 0, given_tokens, expected)
    np.testing.assert_array_equal(tokens, expected)
    np.testing.assert_allclose(logprobs, distribution.logprob(logits, expected, temperature), atol=5e-6)


def test_noise_is_jaxs():
    keys, ids = jax.random.split(jax.random.key(0), 3), jnp.broadcast_to(jnp.arange(5000), (3, 5000))
    data = jax.random.key_data(keys)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, (5000,)))(keys)
    np.testing.assert_array_equal(draw_kernel._gumbel(data[:, :1], data[:, 1:], ids), noise)


@pytest.mark.parametrize(
    'changes', [{'top_k': 3}, {'repetition_penalty': 1.1}, {'min_tokens': 2}, {'temperature': 0.0}]
)
def test_other_distributions_are_drawn_from_logits(changes):
    head, keys = {'embed': jnp.zeros((8, 4))}, jax.random.split(jax.random.key(0), 2)
    assert decode.can_use_draw_kernel(head, PLAIN, keys)
    assert not decode.can_use_draw_kernel(head, PLAIN._replace(**changes), keys)
    assert not decode.can_use_draw_kernel(head, PLAIN, jax.random.split(jax.random.key(0, impl='rbg'), 2))
