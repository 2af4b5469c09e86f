"""Prompts for the loop: load a data set, tokenize it once, and serve batches as a function of (seed, step).

A data set is a module of this package with `examples(split, **options) -> list of Example`; the file's name is the
name in config.data.name. In the list, the BadInput that reports a malformed row stands in its place. A data set that
is served by weight also has `weights(**options) -> dict of weights`, by the sources that meta['source'] names.
"""

from grpo_jax.data.dataset import (
    DataOptions,
    Dataset,
    PromptFormat,
    encode_prompt,
    examples,
    load,
    options_of,
    pick,
    prompts,
    spread,
)
from grpo_jax.data.order import indices, walk

__all__ = [
    'DataOptions',
    'Dataset',
    'PromptFormat',
    'encode_prompt',
    'examples',
    'indices',
    'load',
    'options_of',
    'pick',
    'prompts',
    'spread',
    'walk',
]
