"""Hugging Face folders: models, tokenizers and adapters as others publish them."""

from grpo_jax.models.hf.load import (
    check_weights,
    config_files,
    copy_files,
    eos_tokens,
    find,
    has_head,
    load_params,
    load_tokenizer,
    save,
    stop_tokens,
)

__all__ = [
    'check_weights',
    'config_files',
    'copy_files',
    'eos_tokens',
    'find',
    'has_head',
    'load_params',
    'load_tokenizer',
    'save',
    'stop_tokens',
]
