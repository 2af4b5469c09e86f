"""Writes the page of a report and, where they are many, its rollouts beside it; once, or whenever a run writes."""

from collections.abc import Sequence
import os
import shutil
import time

from grpo_jax.hosts.files import atomic_write, writing
from grpo_jax.text import escape
from grpo_jax.tools.report import content, page, rollouts
from grpo_jax.tools.report.read import Variant, find_runs, read_variants

FILE, BESIDE, STAMP = 'report.html', 'report_rollouts', 'report_stamp.js'
INLINE_BYTES = 12 << 20  # of rollouts in the page; more lie in files beside it, which the page loads as it shows them
LOOK_EVERY = 2.0  # seconds between looks at a run that is watched
WATCHED = ('metrics.jsonl', 'evaluations.jsonl', 'events.jsonl', 'rollouts')


def write_report(folders: Sequence[str], inline_bytes: int = INLINE_BYTES, stamp: int = 0) -> str:
    """Writes report.html into the first of the folders, and returns its path.

    stamp: a number that is not 0 makes a page that reloads itself when the stamp beside it changes. BadInput for a
    folder without a run, CannotWrite when the disk refuses it; the report that was there stays then.
    """
    return _write(read_variants(folders), folders[0], inline_bytes, stamp)


def watch(folders: Sequence[str], look_every: float = LOOK_EVERY) -> str:
    """The path of the report, which is written again whenever a run writes, until all runs are finished."""
    stamp, seen = 0, None
    while True:
        # what changes when a run writes: sizes and times of the files that a report reads
        runs = [run for folder in folders for run in find_runs(folder)]
        paths = [os.path.join(run, name) for run in runs for name in WATCHED]
        state = [(path, os.stat(path).st_mtime_ns, os.stat(path).st_size) for path in paths if os.path.exists(path)]
        if state != seen:
            variants = read_variants(folders)
            done = all(run.finished for variant in variants for run in variant.runs)
            stamp, seen = stamp + 1, state
            path = _write(variants, folders[0], INLINE_BYTES, 0 if done else stamp)
            if stamp == 1 and not done:
                print(f'{path}, written again whenever the run writes', flush=True)
            with atomic_write(os.path.join(folders[0], STAMP)) as file:
                file.write(f'reportStamp({stamp});\n')
            if done:
                return path
        time.sleep(look_every)


def _write(variants: list[Variant], folder, inline_bytes, stamp):
    """Writes the page, and its rollouts into it or beside it."""
    notes: list[str] = []
    inline: list[tuple[str, str]] = []
    index, size, beside = [], 0, os.path.join(folder, BESIDE)
    fresh = f'{beside}.writing'
    shutil.rmtree(fresh, ignore_errors=True)  # of a process that was killed
    for number, (name, run) in enumerate(content.shown_runs(variants)):
        steps = []
        for step, groups in rollouts.read_steps(run, notes):
            key, text = f'rollouts-{number}-{step}', page.as_json(groups)
            steps.append(step)
            size += len(text.encode())
            inline.append((key, text))
            if size > inline_bytes:  # from here on all of them lie beside the page
                _write_beside(fresh, inline)
                inline.clear()
        index.append({'name': escape(name), 'steps': steps})
    split = os.path.isdir(fresh)
    if split:
        _write_beside(fresh, inline)
        inline.clear()
    data = content.make_data(variants) | {'rollouts': index, 'beside': BESIDE if split or stamp else ''}
    data |= {'stamp': stamp, 'split': split}
    header, path = content.make_header(variants, notes), os.path.join(folder, FILE)
    with writing(beside):
        shutil.rmtree(beside, ignore_errors=True)
        if split:
            os.replace(fresh, beside)
    page.write_page(path, header, data, inline)
    return path


def _write_beside(folder, blocks):
    with writing(folder):
        os.makedirs(folder, exist_ok=True)
    for key, text in blocks:
        with atomic_write(os.path.join(folder, f'{key}.js')) as file:
            file.write(page.as_script(key, text))
