"""Downloads folders from buckets, gs://BUCKET/PATH and the like, into a cache on this machine; never writes to them."""

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

# scheme -> the package with fsspec's file system for it; none of them is a dependency
SCHEMES = {'gs': 'gcsfs', 's3': 's3fs', 'az': 'adlfs', 'abfs': 'adlfs', 'abfss': 'adlfs'}
# fields of fsspec's file infos that change with the file; file systems have different ones
IDENTITY = ('size', 'generation', 'etag', 'ETag', 'md5Hash', 'mtime', 'updated', 'LastModified', 'last_modified')
LISTING = '.bucket.json'  # in each folder of the cache: _identity of each file when it was fetched
MOUNT = 'mount the bucket (one of gs:// with `gcsfuse BUCKET DIR`), and name DIR/...'
CHUNK = 2**23  # bytes
MIB = 2**20


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether a path begins with a scheme, a colon and a slash, such as gs:/, as the URLs of buckets do."""
    return bool(re.match(r'[A-Za-z][A-Za-z0-9+.-]*:/', os.fspath(path)))


def refuse(thing: str, path: str | None) -> None:
    """Raises BadInput(thing, path) for a bucket's URL, where a run could not append to files, lock or rename them."""
    if path and is_url(path):
        raise BadInput(thing, path, f'must be a folder of this machine; {MOUNT}')


def download(thing: str, url: str, patterns: Sequence[str]) -> str:
    """Downloads a bucket's file or folder into this machine's cache; returns the local path.

    url: of a file, or of a folder, whose files are taken if their base names match one of the patterns. Files in the
    cache that have not changed in the bucket are not read again; a partial file is continued. Raises BadInput, which
    names the config key `thing`, where the bucket cannot be read or has no such file.
    """
    system, root = _open_file_system(thing, url)
    with _refuse_errors(thing, url):
        single = system.isfile(root)
        listed = {root: system.info(root)} if single else system.find(root, detail=True)
    names = {path: posixpath.basename(root) if single else posixpath.relpath(path, root) for path in listed}
    matched = {
        name: (path, listed[path]) for path, name in names.items() if _matches(name, ['*'] if single else patterns)
    }
    if not matched:
        raise BadInput(thing, url, f'has {len(names)} files, none like {", ".join(patterns)}; name their folder')
    caches = os.environ.get('XDG_CACHE_HOME') or os.path.join(os.path.expanduser('~'), '.cache')
    folder = f'{posixpath.basename(url.rstrip("/"))[-100:]}-{hashlib.sha256(url.encode()).hexdigest()[:16]}'
    home = os.path.join(caches, 'grpo_jax', 'buckets', folder)
    with files.writing(home):
        os.makedirs(home, exist_ok=True)
        with open(os.path.join(home, f'{LISTING}.lock'), 'w', encoding='ascii') as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # one process on this machine downloads at a time
            _download_files(thing, url, system, {os.path.join(home, name): entry for name, entry in matched.items()})
            _remove_others(home, matched, patterns)
    return os.path.join(home, *matched) if single else home


def _open_file_system(thing, url):
    """(fsspec's file system, the path in it) for a URL; raises BadInput, which names `thing`, where there is none."""
    import fsspec  # takes a tenth of a second, which only buckets are worth

    scheme, _, path = url.partition('://')
    if scheme not in SCHEMES or not path.strip('/') or '..' in path.split('/'):
        raise BadInput(thing, url, f'is nothing like gs://BUCKET/PATH; begin it with one of {", ".join(SCHEMES)}')
    with _refuse_errors(thing, url):
        try:
            return fsspec.core.url_to_fs(url)
        except ImportError:
            raise BadInput(thing, url, f'needs a package; run `pip install {SCHEMES[scheme]}`, or {MOUNT}') from None


@contextlib.contextmanager
def _refuse_errors(thing, url):
    """A context that turns errors of a bucket's file system into BadInput(thing, url)."""
    try:
        yield
    except BadInput:
        raise
    except Exception as error:  # each file system has other types of errors, for missing credentials too
        reason = f'cannot be read, {type(error).__name__}: {str(error)[:200]}'
        raise BadInput(thing, url, f'{reason}; check its name and your credentials, or {MOUNT}') from None


def _matches(name, patterns):
    """Whether the base name of the relative path `name` matches a pattern, and no part of the path is '..'."""
    if any(part in ('', '.', '..') or '\0' in part for part in name.split('/')):
        return False
    base = posixpath.basename(name)
    return not base.startswith(LISTING) and any(fnmatch.fnmatch(base, pattern) for pattern in patterns)


def _download_files(thing, url, system, entries):
    """Downloads each file that is absent or has changed; entries: {local path: (path in the bucket, file info)}."""
    due = {path: entry for path, entry in entries.items() if _recorded_identity(path) != _identity(entry[1])}
    if not due:
        return
    total = sum(info['size'] for _, info in due.values())
    with during(f'fetching {url}, MiB', -(-total // MIB)) as fetching:
        done = 0
        for path, (remote, info) in due.items():
            os.makedirs(os.path.dirname(path), exist_ok=True)
            partial, identity = f'{path}.partial', _identity(info)
            if _recorded_identity(partial) != identity or os.path.getsize(partial) > info['size']:
                open(partial, 'wb').close()
                _record_identity(partial, identity)
            with open(partial, 'ab') as file:
                while (start := file.tell()) < info['size']:
                    with _refuse_errors(thing, url):
                        content = system.cat_file(remote, start=start, end=min(start + CHUNK, info['size']))
                    if not content:
                        raise BadInput(
                            thing, url, f'{remote} ends at byte {start} of {info["size"]}; run the command again'
                        )
                    file.write(content)
                    fetching.done = (done + file.tell()) // MIB
            done += info['size']
            os.replace(partial, path)
            _record_identity(path, identity)
            _record_identity(partial, None)
        fetching.result = f'fetched {len(due)} files of {url}'


def _identity(info: dict[str, Any]) -> dict[str, str]:
    """The fields of a file info that change with the file's content."""
    return {key: str(info[key]) for key in IDENTITY if info.get(key) is not None}


def _recorded_identity(path):
    """The _identity that LISTING records for a local file since its download; None if file or entry is absent."""
    listing = os.path.join(os.path.dirname(path), LISTING)
    recorded = json_file.read_object(listing, 'remove it') if os.path.exists(listing) else {}
    return recorded.get(os.path.basename(path)) if os.path.exists(path) else None


def _record_identity(path, identity):
    """Writes a local file's identity, from _identity, to its folder's LISTING; identity None removes the entry."""
    listing, name = os.path.join(os.path.dirname(path), LISTING), os.path.basename(path)
    recorded = json_file.read_object(listing, 'remove it') if os.path.exists(listing) else {}
    recorded = {key: value for key, value in recorded.items() if key != name} | ({name: identity} if identity else {})
    with files.atomic_write(listing) as file:
        json.dump(recorded, file)


def _remove_others(home, matched, patterns):
    """Removes cached files that match the patterns and are no longer in the bucket; matched: names in the bucket."""
    for folder, _, names in os.walk(home):
        for path in (os.path.join(folder, name) for name in names):
            name = os.path.relpath(path, home).replace(os.sep, '/')
            if name not in matched and _matches(name, patterns):
                os.remove(path)
