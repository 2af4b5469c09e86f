"""Folders in buckets, gs://BUCKET/PATH and the like: read into a cache of this machine, and never written to."""

from collections.abc import Sequence
import contextlib
import fcntl
import fnmatch
import hashlib
import json
import os
import posixpath
import re
from typing import Any

from grpo_jax.errors import BadInput
from grpo_jax.hosts import files, json_file
from grpo_jax.text import during

# scheme -> the package of fsspec for it, none of which comes with this one
SCHEMES = {'gs': 'gcsfs', 's3': 's3fs', 'az': 'adlfs', 'abfs': 'adlfs', 'abfss': 'adlfs'}
# fields by which an implementation tells that a file has changed
IDENTITY = ('size', 'generation', 'etag', 'ETag', 'md5Hash', 'mtime', 'updated', 'LastModified', 'last_modified')
LISTING = '.bucket.json'  # in the cache: what each file was when it was fetched
MOUNT = 'mount the bucket (gcsfuse BUCKET DIR), and name DIR/...'
CHUNK = 2**23  # bytes
MIB = 2**20


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether a path names something of a bucket, or anything else by a scheme, which no folder is called like."""
    return bool(re.match(r'[A-Za-z][A-Za-z0-9+.-]*:/', os.fspath(path)))


def refuse(thing: str, path: str | None) -> None:
    """BadInput for a URL in the place of a folder: runs append to files, lock and rename, which buckets do not."""
    if path and is_url(path):
        raise BadInput(thing, path, f'must be a folder of this machine; {MOUNT}')


def download(thing: str, url: str, patterns: Sequence[str]) -> str:
    """The folder on this machine with the files below url that match the patterns, or the file that url is itself.

    What is there already and has not changed in the bucket is not read again; a file that came in part is read on from
    there. BadInput, which names the config key `thing`, where the bucket cannot be read or has no such file.
    """
    system, root = _open(thing, url)
    with _refusing(thing, url):
        single = system.isfile(root)
        listed = {root: system.info(root)} if single else system.find(root, detail=True)
    names = {path: posixpath.basename(root) if single else posixpath.relpath(path, root) for path in listed}
    chosen = ['*'] if single else patterns
    wanted = {name: (path, listed[path]) for path, name in names.items() if _matches(name, chosen)}
    if not wanted:
        raise BadInput(thing, url, f'has {len(names)} files, and none of {", ".join(patterns)}; name their folder')
    caches = os.environ.get('XDG_CACHE_HOME') or os.path.join(os.path.expanduser('~'), '.cache')
    folder = f'{posixpath.basename(url.rstrip("/"))[-100:]}-{hashlib.sha256(url.encode()).hexdigest()[:16]}'
    home = os.path.join(caches, 'grpo_jax', 'buckets', folder)
    with files.writing(home):
        os.makedirs(home, exist_ok=True)
        with open(os.path.join(home, f'{LISTING}.lock'), 'w', encoding='ascii') as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # one process of this machine is here at a time
            _download(thing, url, system, {os.path.join(home, name): entry for name, entry in wanted.items()})
            _remove_others(home, wanted, patterns)
    return os.path.join(home, *wanted) if single else home


def _open(thing, url):
    """(the file system of fsspec, the path in it) of a URL; BadInput for one that is not read here."""
    import fsspec  # a tenth of a second, for what lies in a bucket

    scheme, _, path = url.partition('://')
    if scheme not in SCHEMES or not path.strip('/') or '..' in path.split('/'):
        raise BadInput(thing, url, f'is nothing like gs://BUCKET/PATH; read are {", ".join(SCHEMES)}')
    try:
        return fsspec.core.url_to_fs(url)
    except ImportError:
        raise BadInput(thing, url, f'needs `pip install {SCHEMES[scheme]}`; or {MOUNT}') from None
    except Exception as error:  # each file system raises types of its own, as for credentials that are not there
        raise _refusal(thing, url, error) from None


@contextlib.contextmanager
def _refusing(thing, url):
    """A context in which what the file system of a bucket raises becomes BadInput."""
    try:
        yield
    except BadInput:
        raise
    except Exception as error:  # each file system raises types of its own
        raise _refusal(thing, url, error) from None


def _refusal(thing, url, error):
    reason = f'cannot be read, {type(error).__name__}: {str(error)[:200]}'
    return BadInput(thing, url, f'{reason}; see to its name and your credentials, or {MOUNT}')


def _matches(name, patterns):
    """Whether a file has a name that the patterns ask for, and that leads to no other place than its own."""
    if any(part in ('', '.', '..') or '\0' in part for part in name.split('/')):
        return False
    base = posixpath.basename(name)
    return not base.startswith(LISTING) and any(fnmatch.fnmatch(base, pattern) for pattern in patterns)


def _download(thing, url, system, entries):
    """Brings each file to its path, if it is not there as it is in the bucket."""
    due = {path: entry for path, entry in entries.items() if _recorded(path) != _identity(entry[1])}
    if not due:
        return
    total = sum(info['size'] for _, info in due.values())
    with during(f'fetching {url}, MiB', -(-total // MIB)) as fetching:
        done = 0
        for path, (remote, info) in due.items():
            os.makedirs(os.path.dirname(path), exist_ok=True)
            partial, identity = f'{path}.partial', _identity(info)
            if _recorded(partial) != identity or os.path.getsize(partial) > info['size']:
                open(partial, 'wb').close()
                _record(partial, identity)
            with open(partial, 'ab') as file:
                while (start := file.tell()) < info['size']:
                    with _refusing(thing, url):
                        content = system.cat_file(remote, start=start, end=min(start + CHUNK, info['size']))
                    if not content:
                        raise BadInput(thing, url, f'{remote} ends at byte {start} of {info["size"]}; fetch it again')
                    file.write(content)
                    fetching.done = (done + file.tell()) // MIB
            done += info['size']
            os.replace(partial, path)
            _record(path, identity)
            _record(partial, None)
        fetching.result = f'fetched {len(due)} files of {url}'


def _identity(info: dict[str, Any]) -> dict[str, str]:
    """What changes with the content of a file of a bucket."""
    return {key: str(info[key]) for key in IDENTITY if info.get(key) is not None}


def _recorded(path):
    """What the file at this path was in the bucket; None for a file that is not there."""
    listing = os.path.join(os.path.dirname(path), LISTING)
    recorded = json_file.read_object(listing, 'remove it') if os.path.exists(listing) else {}
    return recorded.get(os.path.basename(path)) if os.path.exists(path) else None


def _record(path, identity):
    listing, name = os.path.join(os.path.dirname(path), LISTING), os.path.basename(path)
    recorded = json_file.read_object(listing, 'remove it') if os.path.exists(listing) else {}
    recorded = {key: value for key, value in recorded.items() if key != name} | ({name: identity} if identity else {})
    with files.atomic_write(listing) as file:
        json.dump(recorded, file)


def _remove_others(home, wanted, patterns):
    """Removes what was fetched before by such patterns and is in the bucket no longer."""
    for folder, _, names in os.walk(home):
        for path in (os.path.join(folder, name) for name in names):
            name = os.path.relpath(path, home).replace(os.sep, '/')
            if name not in wanted and _matches(name, patterns):
                os.remove(path)
