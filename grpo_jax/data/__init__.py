"""Prompts for the loop: loads a data set, tokenizes it once, and serves batches as a function of seed and position.

A data set is a module of this package, or a user's FILE.py, with `examples(split, **options) -> list of Example`.
config.data.name names it. In the list, a BadInput stands in place of a malformed row. A data set that reads files takes
`folder`; its constant FILES is the prefix of its own file names, by which a folder of its files is recognized. A data
set that is served by weight also has `weights(**options) -> {meta['source']: weight}`.
"""

from grpo_jax.data.dataset import (
    Contents,
    DataOptions,
    Dataset,
    Splits,
    changes_since,
    check_shared,
    contents_of,
    examples,
    examples_in,
    load,
    locate,
    options_of,
    pick,
    prompts,
    source_of,
    spread,
    warn_of_count,
    warn_of_prompts,
)
from grpo_jax.data.order import indices, revisit, walk
from grpo_jax.data.origin import PYTHON, Origin, list_rows
from grpo_jax.data.prompt_format import PromptFormat, encode_prompt
from grpo_jax.data.records import MissingSplit
from grpo_jax.data.turns import encode_turn, find_end, find_template_end

__all__ = [
    'PYTHON',
    'Contents',
    'DataOptions',
    'Dataset',
    'MissingSplit',
    'Origin',
    'PromptFormat',
    'Splits',
    'changes_since',
    'check_shared',
    'contents_of',
    'encode_prompt',
    'encode_turn',
    'examples',
    'examples_in',
    'find_end',
    'find_template_end',
    'indices',
    'list_rows',
    'load',
    'locate',
    'options_of',
    'pick',
    'prompts',
    'revisit',
    'source_of',
    'spread',
    'walk',
    'warn_of_count',
    'warn_of_prompts',
]
