"""Installs grpo_jax, whose metadata pyproject.toml holds; configs/, launch/ and notebooks/ are used from a clone."""

from setuptools import setup

setup()
