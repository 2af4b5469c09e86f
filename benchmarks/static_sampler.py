"""The usual sampler, to compare with: full-length cache, one loop for all rows that ends with the longest."""

import jax
import jax.numpy as jnp

from grpo_jax.models import attention, transformer
from grpo_jax.sampler import sampling


def sample(params, prompts, keys, limit, c, max_tokens, temperature):
    """(tokens i32[B, C], logprobs f32[B, C]) of B = len(keys) rows, up to limit i32[B] tokens.

    Prompts are prefilled once and stored once per group, as in the engine; what differs is the schedule.
    """
    group = keys.shape[0] // prompts.ids.shape[0]
    mask = prompts.mask[:, :-1]
    prompt_k, prompt_v = transformer.prefill(params, prompts.tokens[:, :-1], transformer.positions_of(mask), mask, c)
    rows = keys.shape[0]
    cache = jnp.zeros((2, c.layers, rows, c.kv_heads, max_tokens, c.head_dim))
    lengths = jnp.repeat(jnp.sum(prompts.mask, -1), group)

    def attend(q, k, v, layer, n, cache):
        at = (0, layer, 0, 0, n, 0)
        cache = jax.lax.dynamic_update_slice(cache, jnp.stack([k, v])[:, None].swapaxes(3, 4), at)
        q = q.reshape(-1, group, 1, c.kv_heads, c.heads // c.kv_heads, c.head_dim)
        to_prompt = jnp.einsum('pxtkgh,pksh->pxkgts', q, prompt_k[layer])
        to_prompt = jnp.where(mask[:, None, None, None, None], to_prompt, attention.MASKED)
        to_prompt = to_prompt.reshape(rows, c.kv_heads, -1, mask.shape[1])
        own_k, own_v = cache[0, layer], cache[1, layer]
        to_own = jnp.einsum('bkgh,bksh->bkgs', q.reshape(rows, c.kv_heads, -1, c.head_dim), own_k)
        to_own = jnp.where(jnp.arange(max_tokens) <= n, to_own, attention.MASKED)
        weights = jax.nn.softmax(jnp.concatenate([to_prompt, to_own], -1) * c.head_dim**-0.5, -1)
        of_prompt = weights[..., : mask.shape[1]].reshape(-1, group, c.kv_heads, c.heads // c.kv_heads, mask.shape[1])
        out = jnp.einsum('pxkgs,pksh->pxkgh', of_prompt, prompt_v[layer]).reshape(rows, c.kv_heads, -1, c.head_dim)
        out = out + jnp.einsum('bkgs,bksh->bkgh', weights[..., mask.shape[1] :], own_v)
        return out.reshape(rows, 1, c.heads, c.head_dim), cache

    def step(carry):
        last, tokens, logprobs, cache, n = carry
        angles = attention.rope_angles((lengths - 1 + n)[:, None], c.head_dim, c.rope_theta, c.rope_scaling)

        def layer_step(carry, inputs):
            x, cache = carry
            weights, layer = inputs
            return transformer.block(weights, x, angles, c, lambda q, k, v: attend(q, k, v, layer, n, cache)), None

        x = params['embed'][last][:, None]
        (x, cache), _ = jax.lax.scan(layer_step, (x, cache), (params['layers'], jnp.arange(c.layers)))
        logits = transformer.unembed(params, transformer.rms_norm(x, params['final_norm'], c.norm_eps)[:, 0], c)
        step_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, n)
        token = sampling.draw(logits, step_keys, temperature=temperature, top_p=1.0, top_k=0, min_p=0.0)
        alive = n < limit
        logprob = jnp.where(alive, sampling.logprob(logits, token, temperature), 0.0)
        tokens = jax.lax.dynamic_update_slice(tokens, jnp.where(alive, token, 0)[:, None], (0, n))
        logprobs = jax.lax.dynamic_update_slice(logprobs, logprob[:, None], (0, n))
        return token, tokens, logprobs, cache, n + 1

    first = jnp.repeat(prompts.tokens[:, -1], group)
    empty = (first, jnp.zeros((rows, max_tokens), jnp.int32), jnp.zeros((rows, max_tokens)), cache, jnp.int32(0))
    return jax.lax.while_loop(lambda carry: jnp.any(carry[-1] < limit), step, empty)[1:3]
