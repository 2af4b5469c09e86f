"""The Hugging Face hub: models and data sets that others published, through its cache on this machine."""

from collections.abc import Sequence
import functools
import os
import sys

from grpo_jax.errors import BadInput


def fetch(
    thing: str, path: str, patterns: Sequence[str], remedy: str, *, dataset: bool = False, revision: str = ''
) -> str:
    """The folder of a snapshot in the hub's cache, with all files that match the patterns; its name is the commit.

    The hub is asked for the revision (a commit, a tag or a branch; '' for the newest) and for what the cache lacks.
    Where the hub cannot be asked, or HF_HUB_OFFLINE=1 forbids it, the cache alone is read. BadInput, which names the
    config key `thing`, when neither has the snapshot: {hub} in the remedy stands for why, and for the command that
    fills the cache.
    """
    import huggingface_hub  # a quarter of a second, for what lies in no folder

    kind = 'dataset' if dataset else 'model'
    try:
        folder = huggingface_hub.snapshot_download(
            path, repo_type=kind, revision=revision or None, allow_patterns=list(patterns)
        )
    except Exception as error:  # the hub's client raises a different type for each way of failing
        command = ' '.join(
            ['hf download', path, *['--repo-type dataset'] * dataset, *[f'--revision {revision}'] * bool(revision)]
        )
        unasked = isinstance(error, huggingface_hub.errors.LocalEntryNotFoundError)  # then the cause says why
        name = type(error.__cause__ or error if unasked else error).__name__
        reason = f'the hub gave {name}, and its cache has none: get it with `{command}`'
        raise BadInput(thing, path, remedy.replace('{hub}', reason)) from None
    return folder


@functools.cache
def announce(path: str, folder: str, why: str):
    """Prints, once a process, which snapshot is read and why."""
    print(f'{path}: commit {os.path.basename(folder)} of the hub, {why}', file=sys.stderr, flush=True)
