"""A cache of the hub for the tests of data sets."""

import huggingface_hub.constants as constants
import pytest

from grpo_jax.hosts import hub


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """The folder of an empty cache that the hub's client reads, offline."""
    folder = tmp_path / 'hub'
    folder.mkdir()
    # the client reads its environment once, when it is imported
    monkeypatch.setattr(constants, 'HF_HUB_CACHE', str(folder))
    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
    hub.announce.cache_clear()
    return folder
