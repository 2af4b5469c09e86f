"""Installs grpo_jax with its configs, which grpo_jax/configs links to; pyproject.toml holds the metadata."""

from setuptools import setup

setup()
