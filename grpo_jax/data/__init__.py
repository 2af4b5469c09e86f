"""Prompts for the loop: loads a data set, tokenizes it once, and serves batches as a function of seed and position.

A data set is a module of this package with `examples(split, **options) -> list of Example`; the file's name is the
name in config.data.name. In the list, the BadInput that reports a malformed row stands in its place. A data set that
is served by weight also has `weights(**options) -> dict of weights`, by the sources that meta['source'] names. One that
reads files takes `folder`; its constant FILES, how names of its own files begin, tells which folders hold some.
"""

from grpo_jax.data.dataset import (
    DataOptions,
    Dataset,
    Splits,
    check_shared,
    examples,
    is_file,
    load,
    locate,
    options_of,
    pick,
    prompts,
    spread,
)
from grpo_jax.data.order import indices, revisit, walk
from grpo_jax.data.origin import Origin
from grpo_jax.data.prompt_format import PromptFormat, encode_prompt

__all__ = [
    'DataOptions',
    'Dataset',
    'Origin',
    'PromptFormat',
    'Splits',
    'check_shared',
    'encode_prompt',
    'examples',
    'indices',
    'is_file',
    'load',
    'locate',
    'options_of',
    'pick',
    'prompts',
    'revisit',
    'spread',
    'walk',
]
