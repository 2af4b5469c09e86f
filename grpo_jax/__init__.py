"""Group Relative Policy Optimization of language models in JAX. Start reading at grpo_jax/train.py."""

from importlib import metadata
import os
import tomllib

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # of the repository

_PROJECT = os.path.join(ROOT, 'pyproject.toml')
if os.path.isfile(_PROJECT):  # a clone, whatever is installed beside it
    with open(_PROJECT, 'rb') as _file:
        __version__ = tomllib.load(_file)['project']['version']
else:
    __version__ = metadata.version('grpo_jax')
