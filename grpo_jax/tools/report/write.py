"""Writes the page of a report, once or whenever a run writes; many rollouts are written beside the page."""

from collections.abc import Sequence
import os
import re
import shutil
import time
import zlib

from grpo_jax.hosts.files import atomic_write, writing
from grpo_jax.text import escape
from grpo_jax.tools.report import content, page, rollouts
from grpo_jax.tools.report.read import Variant, find_runs, read_variants

STEM = 'report'  # how the names of the page, and of the files beside it, begin
LONGEST_STEM = 120
INLINE_BYTES = 12 << 20  # of rollouts in the page; when there are more, all lie in files beside it
LOOK_EVERY = 2.0  # seconds between looks at a run that is followed
FOLLOWED = ('metrics.jsonl', 'evaluations.jsonl', 'events.jsonl', 'rollouts')


def write_report(folders: Sequence[str], inline_bytes: int = INLINE_BYTES, stamp: int = 0) -> str:
    """Writes the report of runs into the first folder; returns its path, report.html or report_against_<others>.html.

    folders: of runs or sweeps; inline_bytes: most bytes of rollouts in the page; stamp: if not 0, the page reloads when
    the stamp file beside it changes. Raises BadInput for a folder without a run, and CannotWrite when the disk refuses
    the file; an earlier report then stays.
    """
    return _write(read_variants(folders), page_stem(folders), inline_bytes, stamp)


def follow(folders: Sequence[str], look_every: float = LOOK_EVERY) -> str:
    """Writes the report, and again whenever a run writes, until all are done; returns its path. look_every: seconds."""
    stamp, seen = 0, None
    while True:
        # a run that writes changes the sizes and times of these files
        runs = [run for folder in folders for run in find_runs(folder)]
        paths = [os.path.join(run, name) for run in runs for name in FOLLOWED]
        state = [(path, os.stat(path).st_mtime_ns, os.stat(path).st_size) for path in paths if os.path.exists(path)]
        if state != seen:
            variants = read_variants(folders)
            done = all(run.finished for variant in variants for run in variant.runs)
            stamp, seen = stamp + 1, state
            path = _write(variants, page_stem(folders), INLINE_BYTES, 0 if done else stamp)
            if stamp == 1 and not done:
                print(f'{path}, written again whenever the run writes', flush=True)
            with atomic_write(f'{page_stem(folders)}_stamp.js') as file:
                file.write(f'reportStamp({stamp});\n')
            if done:
                return path
        time.sleep(look_every)


def page_stem(folders: Sequence[str]) -> str:
    """Returns the path of the page without the ending, in folders[0]; the other folders are in its name."""
    first, *others = dict.fromkeys(os.path.abspath(folder) for folder in folders)
    names = []
    for other in others:
        parts = os.path.relpath(other, os.path.dirname(first)).split(os.sep)
        name = '-'.join(part for part in parts if part not in (os.curdir, os.pardir)) or os.path.basename(other)
        names.append(re.sub(r'[^\w.-]+', '-', name, flags=re.ASCII))
    stem = '_'.join([STEM, *['against'] * bool(names), *names])
    if len(stem) > LONGEST_STEM:
        stem = f'{stem[:LONGEST_STEM]}_{zlib.crc32(stem.encode()):08x}'
    return os.path.join(folders[0], stem)


def _write(variants: list[Variant], stem, inline_bytes, stamp):
    """Writes the page, with rollouts in it or, above inline_bytes, in files beside it. Returns the page's path."""
    notes: list[str] = []
    inline: list[tuple[str, str]] = []
    index, size, beside = [], 0, f'{stem}_rollouts'
    fresh = f'{beside}.writing'
    shutil.rmtree(fresh, ignore_errors=True)  # from a killed process
    for number, (name, run) in enumerate(content.shown_runs(variants)):
        steps = []
        for step, groups in rollouts.read_steps(run, notes):
            key, text = f'rollouts-{number}-{step}', page.as_json(groups)
            steps.append(step)
            size += len(text.encode())
            inline.append((key, text))
            if size > inline_bytes:  # too many: all rollouts go beside the page
                _write_beside(fresh, inline)
                inline.clear()
        index.append({'name': escape(name), 'steps': steps})
    split = os.path.isdir(fresh)
    if split:
        _write_beside(fresh, inline)
        inline.clear()
    data = content.make_data(variants) | {'rollouts': index, 'stem': os.path.basename(stem)}
    data |= {'stamp': stamp, 'split': split}
    header, path = content.make_header(variants, notes), f'{stem}.html'
    with writing(beside):
        shutil.rmtree(beside, ignore_errors=True)
        if split:
            os.replace(fresh, beside)
    page.write_page(path, header, data, inline)
    return path


def _write_beside(folder, blocks):
    """Writes a script into the folder for each (key, JSON of a step's rollouts) in blocks."""
    with writing(folder):
        os.makedirs(folder, exist_ok=True)
    for key, text in blocks:
        with atomic_write(os.path.join(folder, f'{key}.js')) as file:
            file.write(page.as_script(key, text))
