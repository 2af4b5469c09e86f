"""8 fake CPU devices, set before jax is imported; where the real inputs are; a tiny model."""
import os
import sys
import tempfile

os.environ['XLA_FLAGS'] = os.environ.get('XLA_FLAGS', '') + ' --xla_force_host_platform_device_count=8'
os.environ['JAX_PLATFORMS'] = 'cpu'
# most of the suite's time is XLA compiling small programs, many of them the same ones
os.environ.setdefault('JAX_DISABLE_MOST_OPTIMIZATIONS', '1')
os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', os.path.join(tempfile.gettempdir(), 'grpo_jax-tests'))
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.2')
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # for configs

import jax
import pytest

from grpo_jax.models import transformer

DATA = os.environ.get('GRPO_JAX_DATA', '../shared/data')


def pytest_terminal_summary(terminalreporter):
    if not os.path.isdir(DATA):
        terminalreporter.write_line(f'NO REAL INPUTS: GRPO_JAX_DATA={DATA} is not a folder; tests on real data were '
                                    'skipped', red=True, bold=True)


@pytest.fixture(scope='session')
def real():
    """The folder of real inputs; skips where there is none."""
    if not os.path.isdir(DATA):
        pytest.skip(f'no real inputs in {DATA}')
    return DATA


@pytest.fixture(scope='session')
def tiny():
    """(ModelConfig, params) of a two-layer Qwen3-like model with grouped queries."""
    c = transformer.ModelConfig(
        vocab_size=64, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=48, norm_eps=1e-6, rope_theta=1e4,
        rope_scaling=(), qk_norm=True, qkv_bias=False, out_bias=False, mlp_bias=False, tie_embeddings=True)
    return c, jax.jit(transformer.init, static_argnums=1)(jax.random.key(0), c)
