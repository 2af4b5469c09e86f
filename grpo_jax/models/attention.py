"""Rotary positions and attention: the one place that multiplies queries with keys."""
import math

import jax
import jax.numpy as jnp
import numpy as np

MASKED = -2e38  # finite, so that a row without any allowed key yields a mean and not NaN


def attend(q, k, v, allowed):
    """Attention output [B, T, N, H] of queries [B, T, N, H] over keys and values [B, S, K, H].

    allowed bool[B, 1, T, S]. Logits and softmax are float32.
    """
    b, t, n, h = q.shape
    heads = k.shape[2]
    grouped = q.reshape(b, t, heads, n // heads, h)
    scores = jnp.einsum('btkgh,bskh->bkgts', grouped, k, preferred_element_type=jnp.float32) / math.sqrt(h)
    weights = jax.nn.softmax(jnp.where(allowed[:, :, None], scores, MASKED), -1).astype(q.dtype)
    out = jnp.einsum('bkgts,bskh->btkgh', weights, v, preferred_element_type=jnp.float32)
    return out.reshape(b, t, n, h).astype(q.dtype)


def causal(mask):
    """Allowed pairs bool[B, 1, T, T] of a left- or right-padded batch with mask bool[B, T]."""
    t = mask.shape[1]
    return (jnp.tril(jnp.ones((t, t), bool)) & mask[:, None, :])[:, None]


def rope_frequencies(head_dim, theta, scaling):
    """(inverse frequencies f64[H/2], factor on cos and sin) of the rotary embedding.

    `scaling` is a tuple of (name, value) pairs as in Hugging Face's rope_parameters; types default,
    linear, llama3 and yarn follow transformers' modeling_rope_utils (YaRN: arXiv 2309.00071).
    """
    base = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    options = dict(scaling)
    kind = options.get('rope_type', 'default')
    if kind == 'default':
        return base, 1.0
    factor = options['factor']
    if kind == 'linear':
        return base / factor, 1.0
    if kind == 'llama3':
        wavelength = 2 * np.pi / base
        original = options['original_max_position_embeddings']
        low, high = options['low_freq_factor'], options['high_freq_factor']
        smooth = np.clip((original / wavelength - low) / (high - low), 0, 1)
        return (1 - smooth) * base / factor + smooth * base, 1.0
    return _yarn(base, head_dim, theta, options)


def _yarn(base, head_dim, theta, options):
    factor, original = options['factor'], options['original_max_position_embeddings']

    def magnitude(scale, coefficient=1.0):
        return 0.1 * coefficient * math.log(scale) + 1.0 if scale > 1 else 1.0

    def dimension(rotations):
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(options.get('beta_fast') or 32)
    high = dimension(options.get('beta_slow') or 1)
    if options.get('truncate', True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 0.001), 0, 1)
    frequencies = ramp * base / factor + (1 - ramp) * base
    attention = options.get('attention_factor')
    if attention is None:
        mscale, mscale_all = options.get('mscale'), options.get('mscale_all_dim')
        attention = (magnitude(factor, mscale) / magnitude(factor, mscale_all)
                     if mscale and mscale_all else magnitude(factor))
    return frequencies, attention


def rope_angles(positions, head_dim, theta, scaling):
    """(cos, sin), each f32[B, T, 1, H/2], for positions i32[B, T]."""
    frequencies, factor = rope_frequencies(head_dim, theta, scaling)
    # float32: bfloat16 rounds position 257 to 256
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(frequencies, jnp.float32)
    return jnp.cos(angles)[:, :, None] * factor, jnp.sin(angles)[:, :, None] * factor


def rotate(x, angles):
    """x [B, T, N, H] turned by the angles; pairs are (i, i + H/2), Hugging Face's layout."""
    cos, sin = (angle[..., None, :] for angle in angles)
    halves = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, -1)
    # the reversal is a plain read to XLA on CPUs, where splitting and joining halves took half of a decode step
    turned = halves * cos + halves[..., ::-1, :] * jnp.concatenate([-sin, sin], -2)
    return turned.reshape(x.shape).astype(x.dtype)
