"""The Hugging Face hub: models and data sets that others published, through its cache on this machine."""

from collections.abc import Sequence
import contextlib
import functools
import re
import sys

from grpo_jax.errors import BadInput
from grpo_jax.text import escape


def fetch(
    thing: str, path: str, patterns: Sequence[str], remedy: str, *, dataset: bool = False, revision: str = ''
) -> str:
    """The folder of a snapshot in the hub's cache, with all files that match the patterns; its name is the commit.

    The hub is asked for the revision (a commit, a tag or a branch; '' for the newest) and for what the cache lacks, but
    not for a commit that is there. Where the hub cannot be asked, or HF_HUB_OFFLINE=1 forbids it, the cache alone is
    read. BadInput, which names the config key `thing`, when neither has the snapshot: {hub} in the remedy stands for
    why, and for the command that fills the cache.
    """
    import huggingface_hub.errors  # a quarter of a second, for what lies in no folder
    import huggingface_hub.utils

    class Bar(huggingface_hub.utils.tqdm):
        """A progress bar of the client that leaves no line behind, and none in a file."""

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **{'disable': None} | kwargs | {'leave': False})

    missing = huggingface_hub.errors.LocalEntryNotFoundError
    download = functools.partial(
        huggingface_hub.snapshot_download,
        path,
        repo_type='dataset' if dataset else 'model',
        revision=revision or None,
        allow_patterns=list(patterns),
        tqdm_class=Bar,
    )
    if re.fullmatch('[0-9a-f]{40}', revision):  # it cannot move, and without network the client would try for long
        with contextlib.suppress(missing):
            return download(local_files_only=True)
    try:
        return download()
    except Exception as error:  # the client raises a different type for each way of failing
        command = ' '.join(
            ['hf download', path, *['--repo-type dataset'] * dataset, *[f'--revision {revision}'] * bool(revision)]
        )
        cause = (error.__cause__ or error) if isinstance(error, missing) else error
        reason = f"the hub's cache does not have it, and the hub gave {type(cause).__name__}: get it with `{command}`"
        raise BadInput(thing, path, remedy.replace('{hub}', reason)) from None


@functools.cache
def announce(line: str):
    """Prints a line, once a process: what is read from where."""
    print(escape(line), file=sys.stderr, flush=True)
