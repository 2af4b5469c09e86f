"""What a run writes for each step: rows for keeping, and curves and texts for looking, on TensorBoard and trackers."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import importlib
import io
import json
import logging
import os
import re
import socket
import struct
import sys
import time
from typing import Annotated, Any, NamedTuple
import uuid

import numpy as np

from grpo_jax import ranges
from grpo_jax.errors import BadInput
from grpo_jax.hosts import files, json_file
from grpo_jax.hosts.files import Lines, append_whole, atomic_write, cut_lines
from grpo_jax.ranges import OneOf
from grpo_jax.run import console
from grpo_jax.run.rows import LASTING, append_event, drop_events, plain_row, recorded_events
from grpo_jax.text import cut, during

logger = logging.getLogger('grpo_jax')
FLUSH_SECONDS = 120  # between two uploads, where the folder is on a mounted bucket
SAMPLES, LONGEST = 4, 2000  # completions of a step that are shown as text, and characters of one
# what the page of hyperparameters compares
COMPARED = ('reward', 'length', 'evaluation/reward', 'evaluation/greedy', 'evaluation/pass_at_1')
NAMES = ('wandb', 'trackio')  # modules, and extras of the package
IDS_FILE = 'trackers.json'  # of a workdir: the id of its run in every tracker
LOGIN_SECONDS = 30  # that a question for a key may wait for a person
FILES = ('metrics.jsonl', 'timings.jsonl', 'evaluations.jsonl')  # for keeping: a row a step, or an evaluation


class Dropped:
    """Counts what could not be written, by kind; a kind is a folder or a file of the workdir."""

    def __init__(self, workdir: str):
        self._workdir = workdir
        self.counts: Counter[str] = Counter()

    @contextlib.contextmanager
    def unless_written(self, step: int, kind: str) -> Iterator[None]:
        """A context in which something of a step is written; when the disk refuses it, it is counted and recorded.

        The first of a kind is a warning, each is an event.
        """
        try:
            yield
        except Exception as error:
            cause = files.disk_error(error)
            if cause is None:
                raise
            self.counts[kind] += 1
            reason = cause.strerror or str(cause)
            if self.counts[kind] == 1:
                path = os.path.join(self._workdir, kind)
                logger.warning('cannot write %s: %s; the run goes on without, and counts what it drops', path, reason)
            with contextlib.suppress(OSError):  # the same disk, at times
                append_event(self._workdir, step, 'dropped', kind=kind, reason=reason)

    def summary(self) -> str:
        """How many of each kind; '' for none."""
        return ', '.join(f'{count} of {kind}' for kind, count in sorted(self.counts.items()))


class Board:
    """A new event file in a folder; on resume TensorBoard leaves out what older ones have from first_step on."""

    def __init__(self, folder: str, first_step: int, config: Mapping[str, Any] | None = None):
        """config: the hyperparameters, as nested dicts."""
        # a second, where torch is installed
        event_pb2: Any = importlib.import_module('tensorboardX.proto.event_pb2')
        self._event, log = event_pb2.Event, event_pb2.SessionLog
        name = f'events.out.tfevents.{time.time():.6f}.{socket.gethostname()}'  # the names sort by time
        self._path, self._file = os.path.join(folder, name), None
        self._flushed = time.monotonic()
        self._begin = [
            self._event(file_version='brain.Event:2'),
            self._event(step=first_step, session_log=log(status=log.START)),
        ]
        if config is not None:
            from tensorboardX import summary

            parts = summary.hparams(dict(_flat(config)), dict.fromkeys(COMPARED, 0.0))
            self._begin += [self._event(summary=part) for part in parts]

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Writes the values of a step, by name. OSError when that cannot be; the file has none of it."""
        from tensorboardX import summary

        self._write(step, [summary.scalar(name, value) for name, value in values.items()])

    def text(self, step: int, name: str, text: str) -> None:
        """Writes a text of a step, its lines cut and inert. OSError when that cannot be; the file has none of it."""
        from tensorboardX import summary

        # a block of code, in which neither Markdown nor HTML means anything
        lines = [f'    {cut(line, LONGEST)}' for line in text.split('\n')]
        self._write(step, [summary.text(name, '\n'.join(lines))])

    def rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes histograms of rewards, lengths and advantages of a rollout's rows, and some of its completions."""
        from tensorboardX import summary

        summaries = []
        for name in ('reward', 'length', 'advantage'):
            values = [np.ravel(row[name]) for row in rows if row.get(name) is not None]
            known = np.concatenate([*values, []]).astype(float)
            known = known[np.isfinite(known)]
            if len(known):
                summaries.append(summary.histogram(f'rollout/{name}', known, bins=30))
        self._write(step, summaries)
        shown = []
        for row in rows[:SAMPLES]:
            reward = '?' if row.get('reward') is None else f'{row["reward"]:.3g}'
            shown.append(cut(f'{reward}  {row["prompt"]} -> {row["completion"]}', LONGEST))
        self.text(step, 'rollout/completions', '\n'.join(shown))

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        if self._file is not None:
            self._file.close()

    def _write(self, step, summaries):
        events = [*self._begin, *(self._event(step=step, summary=one) for one in summaries)]
        if self._file is None:
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            self._file = open(self._path, 'ab', buffering=0)
        size = os.fstat(self._file.fileno()).st_size
        try:
            append_whole(self._file, b''.join(map(_record, events)))
        except OSError:
            self._file.truncate(size)  # half a record would end the file for those who read it
            raise
        self._begin = []
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            os.fsync(self._file.fileno())
            self._flushed = time.monotonic()
        os.stat(self._path)  # a file that was removed takes what is written, and loses it


def _flat(tree, prefix=''):
    """(dotted name, number or text) of the leaves of nested dicts."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f'{prefix}{name}.')
        else:
            yield prefix + name, value if isinstance(value, (bool, int, float, str)) else repr(value)


def _record(event):
    """The bytes of an event in a TFRecord file: length, its checksum, content, its checksum."""
    from tensorboardX.record_writer import masked_crc32c

    event.wall_time = time.time()
    content = event.SerializeToString()
    length = struct.pack('<Q', len(content))
    return length + struct.pack('<I', masked_crc32c(length)) + content + struct.pack('<I', masked_crc32c(content))


class Tracking(NamedTuple):
    """Where the rows go besides: of config.log."""

    trackers: Sequence[Annotated[str, OneOf(NAMES)]] = ()  # besides the files and TensorBoard: wandb, trackio
    project: ranges.Text = 'grpo_jax'  # of the trackers

    @classmethod
    def from_config(cls, section):
        """Tracking of config.log; BadInput for a tracker that is none."""
        values: dict[str, Any] = ranges.read_section(cls, section, 'log')
        return cls(tuple(values['trackers']), values['project'])

    def check(self) -> None:
        """BadInput for a tracker that is not installed."""
        for name in self.trackers:
            try:
                usable = hasattr(importlib.import_module(name), 'init')  # else a folder of that name that lies here
            except Exception as error:
                usable, reason = False, f' ({console.one_line(str(error))})'
            else:
                reason = ''
            if not usable:
                raise BadInput('log.trackers', name, f"cannot be imported{reason}; pip install 'grpo_jax[{name}]'")


class Subject(NamedTuple):
    """What trackers and TensorBoard are told of a run at its start."""

    tracking: Tracking
    config: dict[str, Any]


class Trackers:
    """The trackers of a run, which has one id in all of them, from its first start to its end."""

    def __init__(self, workdir: str, subject: Subject, first_step: int, logged: Mapping[str, int]):
        """first_step: that the run goes on with; logged: what `last_steps` says of the files before they are cut."""
        self._workdir, self._subject, self._logged = workdir, subject, logged
        self._first_step, self._events = first_step, 0
        self._runs: dict[str, Any] = {}
        for name in dict.fromkeys(subject.tracking.trackers):
            self._attempt(name, first_step, lambda name=name: self._begin(name))

    def step(self, step: int, row: Mapping[str, Any], timings: Mapping[str, float]) -> None:
        """Logs a step's rows of metrics.jsonl and timings.jsonl, and the events since the last one."""
        if step > self._logged['metrics.jsonl']:  # else a step that is taken again, with the same numbers
            values = {name: value for name, value in row.items() if value is not None and name != 'step'}
            self._log(step, values | {f'seconds/{name}': value for name, value in timings.items()} | self._new_events())

    def evaluation(self, step: int, results: Mapping[str, float]) -> None:
        """Logs an evaluation before a step."""
        if step > self._logged['evaluations.jsonl']:
            self._log(step, {f'evaluation/{name}': value for name, value in results.items()})

    def close(self, step: int) -> None:
        """Ends the trackers, after `step` steps; a second call does nothing."""
        if self._runs and (rest := self._new_events()):
            self._log(step, rest)
        for name, run in [*self._runs.items()]:
            self._attempt(name, step, run.finish)
        self._runs.clear()

    def _begin(self, name):
        module: Any = importlib.import_module(name)
        about = {'project': self._subject.tracking.project, 'config': self._subject.config, 'resume': 'allow'}
        run_id = _run_id(self._workdir)
        hook = sys.excepthook
        try:
            if name == 'wandb':
                self._runs[name] = module.init(
                    id=run_id,
                    name=run_id,
                    dir=os.environ.get('WANDB_DIR', self._workdir),
                    allow_val_change=True,  # of an amended config
                    reinit='create_new',  # a run that a notebook has beside stays
                    settings={'console': 'off', 'silent': True, 'login_timeout': LOGIN_SECONDS},
                    **about,
                )
            else:  # of which a run's name is its id
                self._runs[name] = module.init(name=run_id, embed=False, **about)
        finally:
            sys.excepthook = hook  # wandb puts its own there

    def _log(self, step, values):
        for name, run in [*self._runs.items()]:
            self._attempt(name, step, lambda run=run: run.log(dict(values), step=step))

    def _attempt(self, name: str, step: int, action: Callable[[], Any]):
        """Does something with a tracker, in silence; one in which that fails is dropped."""
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                action()
        except (Exception, SystemExit) as error:
            self._runs.pop(name, None)
            reason = console.one_line(str(error))[:200] or type(error).__name__
            logger.warning('%s: %s; the run goes on without it', name, reason)
            with contextlib.suppress(OSError):  # on a full disk
                append_event(self._workdir, step, 'dropped', kind=name, reason=reason)

    def _new_events(self):
        """Texts of the events since the last call by name, but those that were logged before the run went on."""
        rows = recorded_events(self._workdir)
        texts: dict[str, list[str]] = {}
        for row in rows[self._events :]:
            anew = row['event'] in LASTING and row['step'] >= self._first_step
            if anew or row['step'] > self._logged['metrics.jsonl']:
                text = ', '.join(f'{key}: {value}' for key, value in row.items() if key not in ('step', 'event'))
                texts.setdefault(f'event/{row["event"]}', []).append(f'step {row["step"]}: {text}')
        self._events = len(rows)
        return {name: ' | '.join(lines) for name, lines in texts.items()}


def last_steps(workdir: str, names: Sequence[str]) -> dict[str, int]:
    """The step of the last whole row of a run's files by their names, -1 without one."""
    last = {}
    for name in names:
        last[name] = -1
        path = os.path.join(workdir, name)
        if os.path.exists(path):
            with open(path, 'rb') as lines:
                for match in re.finditer(rb'^\{"step": (\d+).*\}\n', lines.read(), re.MULTILINE):
                    last[name] = int(match[1])
    return last


def _run_id(workdir):
    """The id of a workdir's run: that which is recorded, else a new one that is recorded now."""
    path = os.path.join(workdir, IDS_FILE)
    if os.path.exists(path):
        return json_file.read_object(path)['id']
    place = '-'.join(os.path.abspath(workdir).split(os.sep)[-2:])
    run_id = f'{re.sub(r"[^A-Za-z0-9_.-]", "-", place)[:80].lstrip("-")}-{uuid.uuid4().hex[:8]}'
    json_file.write(path, {'id': run_id})
    return run_id


class Writer:
    """Writes one row a step; on resume the rows from first_step on are dropped, so that none repeats.

    Only the first of several processes has one.

    A context manager: its end closes every file, also after an exception. What is for keeping (metrics.jsonl,
    timings.jsonl, evaluations.jsonl) raises CannotWrite when the disk refuses it; what is for looking is dropped.

    metrics.jsonl holds only what is a function of config and seed, so that a resumed run's file equals an
    uninterrupted one's; times go to timings.jsonl.
    """

    def __init__(
        self,
        workdir: str,
        first_step: int,
        steps: int,
        title: str,
        shown: Sequence[str] = (),
        subject: Subject | None = None,
    ):
        """shown: the metrics that the console shows now and then; without them a line a step has what matters.

        subject: what trackers and TensorBoard are told of the run.
        """
        self._shown, self._workdir = shown, workdir
        logged = last_steps(workdir, FILES)
        with contextlib.ExitStack() as opened:
            self._metrics, self._timings, self._evaluations = (
                opened.enter_context(_reopen(os.path.join(workdir, name), first_step)) for name in FILES
            )
            drop_events(workdir, first_step)
            self._files = opened.pop_all()
        self.dropped = Dropped(workdir)
        config = subject.config if subject else None
        self._board = Board(os.path.join(workdir, 'tensorboard'), first_step, config)
        self._trackers = None
        if subject and first_step < steps:
            self._trackers = Trackers(workdir, subject, first_step, logged)
        self._progress = contextlib.ExitStack()
        self._steps = self._progress.enter_context(during(title, steps, first_step, lines=not shown))
        self._expected = None  # tokens of a rollout: those of the last one

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def step(self, step: int, row: Mapping[str, Any], timings: Mapping[str, float]) -> None:
        """Appends a step's metrics and timings (seconds by stage), and shows them."""
        row = plain_row(step, row)
        self._metrics.append(json.dumps(row))
        self._timings.append(json.dumps({'step': step, **timings}))
        curves = (row | {f'seconds/{k}': v for k, v in timings.items()}).items()
        with self.optional(step, 'tensorboard'):
            self._board.add(step, {name: value for name, value in curves if value is not None and name != 'step'})
        if self._trackers:
            self._trackers.step(step, row, timings)
        self._expected = row.get('tokens')
        self._steps.advance(step + 1, *console.step_cells(row, timings, self._shown))

    def stage(self, name: str) -> None:
        """Shows which stage of the step begins."""
        self._steps.enter(name)

    def sampling(self, tokens: int, live: int, slots: int) -> None:
        """Shows how far a rollout is: its tokens beside those of the last rollout, and the slots in use."""
        expected = f' of about {self._expected:.0f}' if self._expected else ''
        self._steps.stage = f'sample, {tokens}{expected} tokens, {live} of {slots} slots'

    def evaluation(self, step: int, results: Mapping[str, float]) -> None:
        """Appends the results of an evaluation before step `step`."""
        self._evaluations.append(json.dumps({'step': step, **results}))
        with self.optional(step, 'tensorboard'):
            self._board.add(step, {f'evaluation/{k.replace("@", "_at_")}': value for k, value in results.items()})
        if self._trackers:
            self._trackers.evaluation(step, results)

    def rollouts(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Writes the step's completions to rollouts/<step>.jsonl, one dict a completion; dropped on a full disk.

        TensorBoard gets histograms of them, and some as text.
        """
        rows = list(rows)
        with self.optional(step, 'tensorboard'):
            self._board.rollouts(step, rows)
        with self.optional(step, 'rollouts'):
            os.makedirs(os.path.join(self._workdir, 'rollouts'), exist_ok=True)
            with atomic_write(os.path.join(self._workdir, 'rollouts', f'{step:06d}.jsonl')) as file:
                file.writelines([json.dumps(row, ensure_ascii=False) + '\n' for row in rows])

    def text(self, step: int, name: str, text: str) -> None:
        """Puts a text beside the curves."""
        with self.optional(step, 'tensorboard'):
            self._board.text(step, name, text)

    def optional(self, step: int, kind: str) -> contextlib.AbstractContextManager[None]:
        """A context that writes something for looking into the workdir's folder `kind`; a full disk drops it."""
        return self.dropped.unless_written(step, kind)

    def close(self) -> None:
        """Closes every file; a second call does nothing."""
        steps = self._steps
        if steps.done > steps.first:
            steps.result = f'{steps.text}: {steps.done} of {steps.total}'
            if not steps.lines:  # else the line before has them
                steps.result += f', {", ".join(steps.cells)},'
        self._progress.close()
        self._files.close()
        if self._trackers:
            self._trackers.close(steps.done)
        with self.optional(steps.done, 'tensorboard'):
            self._board.close()
        if self.dropped.counts:
            logger.warning('%s of %s could not be written and are missing', self.dropped.summary(), self._workdir)
            self.dropped.counts.clear()


def _reopen(path, first_step):
    """The Lines of path, cut to whole rows of steps before first_step, which takes no space.

    A killed run may leave half a row, which is always of a step not yet in a checkpoint. BadInput for a damaged row.
    """

    def earlier(line):
        try:
            return json.loads(line)['step'] < first_step
        except (ValueError, KeyError, TypeError):
            raise BadInput(path, line[:60].decode(errors='replace'), 'is no row; bring the file back') from None

    cut_lines(path, earlier)
    return Lines(path)
