"""A cache of the Hugging Face hub as its client writes one, filled without the hub."""

import hashlib
import os

import huggingface_hub.constants as constants
import pytest


def write(folder, repository, commit, files, kind='dataset', refs=('main',)):
    """Puts a commit of a repository into the cache folder; files are bytes or functions of a path, by name.

    Each ref (a branch or a tag) names the commit from now on, as after a download. Returns the snapshot's folder.
    """
    home = folder / f'{kind}s--{repository.replace("/", "--")}'
    snapshot = home / 'snapshots' / commit
    (home / 'blobs').mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = snapshot / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if callable(content):
            content(path)
        else:
            path.write_bytes(content)
        blob = home / 'blobs' / hashlib.sha256(path.read_bytes()).hexdigest()
        path.replace(blob)
        path.symlink_to(os.path.relpath(blob, path.parent))
    for ref in refs:
        (home / 'refs' / ref).parent.mkdir(parents=True, exist_ok=True)
        (home / 'refs' / ref).write_text(commit)
    return snapshot


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """The folder of an empty cache that the hub's client reads, offline."""
    folder = tmp_path / 'hub'
    folder.mkdir()
    # the client reads its environment once, when it is imported
    monkeypatch.setattr(constants, 'HF_HUB_CACHE', str(folder))
    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
    return folder
