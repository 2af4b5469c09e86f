"""Group Relative Policy Optimization of language models in JAX. Start reading at grpo_jax/train.py."""

from importlib import metadata
import os
import tomllib

PACKAGE = os.path.dirname(os.path.abspath(__file__))  # its folder, which holds configs/

_PROJECT = os.path.join(os.path.dirname(PACKAGE), 'pyproject.toml')
if os.path.isfile(_PROJECT):  # a clone, whatever is installed beside it
    with open(_PROJECT, 'rb') as _file:
        __version__ = tomllib.load(_file)['project']['version']
else:
    __version__ = metadata.version('grpo_jax')
