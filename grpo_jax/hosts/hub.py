"""The Hugging Face hub: downloads models and data sets into the hub's cache on this machine, and uploads models."""

from collections.abc import Sequence
import contextlib
import functools
import re
import shlex
import sys

from grpo_jax.errors import BadInput
from grpo_jax.text import escape


def fetch(
    thing: str, path: str, patterns: Sequence[str], remedy: str, *, dataset: bool = False, revision: str = ''
) -> str:
    """Downloads a model or data set into the hub's cache, where it is not yet, and returns the folder of the snapshot.

    The folder has all files that match the patterns; its name is the commit. path: name on the hub. dataset: whether
    it names a data set. revision: a commit, a tag or a branch; '': the newest. A commit in the cache is used without
    asking the hub. The cache is also used where the hub cannot be reached, or HF_HUB_OFFLINE=1 forbids it. Raises
    BadInput(thing, path, remedy) when neither has the snapshot; {hub} in remedy becomes the reason, with the command
    that fills the cache.
    """
    import huggingface_hub.errors  # takes a quarter of a second, which local folders do not need
    import huggingface_hub.utils

    class Bar(huggingface_hub.utils.tqdm):
        """The client's progress bar, removed at the end, and shown only on terminals."""

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
    if re.fullmatch('[0-9a-f]{40}', revision):  # a commit cannot change; without network the client would try for long
        with contextlib.suppress(missing):
            return download(local_files_only=True)
    try:
        return download()
    except Exception as error:  # the client raises a different type for each way of failing
        command = ' '.join(
            ['hf download', path, *['--repo-type dataset'] * dataset, *[f'--revision {revision}'] * bool(revision)]
        )
        cause = (error.__cause__ or error) if isinstance(error, missing) else error
        reason = f"the hub's cache does not have it, and the hub gave {type(cause).__name__}: "
        if getattr(getattr(cause, 'response', None), 'status_code', 0) in (401, 403):
            page = page_url(f'datasets/{path}' if dataset else path)
            reason += (
                f'check the name; if it is gated or private, accept its terms at {page}, then set HF_TOKEN to a token '
                'that may read it, or run `hf auth login` (on pods launch with --env=HF_TOKEN)'
            )
        else:
            reason += f'get it with `{command}`'
        raise BadInput(thing, path, remedy.replace('{hub}', reason)) from None


def check_upload(thing: str, name: str) -> None:
    """Raises BadInput(thing, name) where uploads to the model ORG/NAME would fail: name, token, network or rights."""
    import huggingface_hub.constants

    if not re.fullmatch(r'[\w-][\w.-]*/[\w-][\w.-]*', name):
        raise BadInput(thing, name, 'is no name of a model on the hub; write ORG/NAME')
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        raise BadInput(thing, name, 'needs the hub, which HF_HUB_OFFLINE=1 forbids; unset it, or leave the flag out')
    if not huggingface_hub.get_token():
        raise BadInput(thing, name, 'needs a token that may write; run `hf auth login`, or leave the flag out')
    try:
        user = huggingface_hub.HfApi().whoami()
    except Exception as error:  # the client raises a different type for each way of failing
        remedy = 'check the network and the token (`hf auth login`), or leave the flag out'
        raise BadInput(thing, name, f'the hub gave {type(error).__name__}; {remedy}') from None
    if ((user.get('auth') or {}).get('accessToken') or {}).get('role') == 'read':
        raise BadInput(thing, name, 'the token may only read; run `hf auth login` with one that may write')
    owners = [user.get('name'), *(organization.get('name') for organization in user.get('orgs') or ())]
    if name.split('/')[0] not in owners:
        raise BadInput(
            thing, name, f'the token may not write there; choose an owner from {", ".join(map(str, owners))}'
        )


def upload(thing: str, name: str, folder: str, message: str) -> None:
    """Uploads a folder as one commit to the model ORG/NAME on the hub; a new model is made private.

    Raises BadInput(thing, name), with a command to upload by hand, where the hub gives an error.
    """
    import huggingface_hub

    api = huggingface_hub.HfApi()
    try:
        api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message=message)
    except Exception as error:  # the client raises a different type for each way of failing
        command = shlex.join(['hf', 'upload', name, folder])
        reason = f'{type(error).__name__}: {str(error)[:200]}'
        raise BadInput(thing, name, f'the hub gave {reason}; {folder} is whole, upload it with `{command}`') from None


def page_url(name: str) -> str:
    """The URL of a model's page on the hub."""
    return f'https://huggingface.co/{name}'


@functools.cache
def announce(line: str):
    """Prints a line on stderr; does nothing for a line that this process has printed before by this function."""
    print(escape(line), file=sys.stderr, flush=True)
