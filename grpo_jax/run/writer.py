"""Writes a run's steps: rows of JSON Lines files, which must not fail, and TensorBoard and trackers, which may."""

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

from flax import traverse_util
import numpy as np

from grpo_jax import ranges
from grpo_jax.errors import BadInput
from grpo_jax.hosts import files, json_file
from grpo_jax.hosts.files import Lines, append_whole, atomic_write, cut_lines
from grpo_jax.ranges import OneOf
from grpo_jax.run import console
from grpo_jax.run.rows import LASTING, append_event, describe_reward, drop_events, plain_row, recorded_events
from grpo_jax.text import during, shorten

logger = logging.getLogger('grpo_jax')
FLUSH_SECONDS = 120  # seconds between two fsyncs; on a mounted bucket, an fsync uploads the file
SAMPLES, LONGEST = 4, 2000  # completions of a step that TensorBoard shows as text, and most characters of a line
# metrics on TensorBoard's page of hyperparameters
COMPARED = ('reward', 'length', 'evaluation/reward', 'evaluation/greedy', 'evaluation/pass_at_1')
NAMES = ('wandb', 'trackio')  # names of modules and of this package's extras
TRACKED = ranges.ReadWith('log.tracking.trackers', words='log.trackers')
IDS_FILE = 'trackers.json'  # in a workdir: the id of its run, the same in all trackers
LOGIN_SECONDS = 30  # seconds that wandb waits for a person to type a key
FILES = 'metrics.jsonl', 'timings.jsonl', 'evaluations.jsonl'  # a row a step or evaluation; a full disk stops the run


class Dropped:
    """Counts what a run could not write on a full disk, by kind: the name of a file or folder in the workdir."""

    def __init__(self, workdir: str):
        self._workdir = workdir
        self.counts: Counter[str] = Counter()

    @contextlib.contextmanager
    def unless_written(self, step: int, kind: str) -> Iterator[None]:
        """Opens a context that writes something of a step and ignores errors of the disk, which it counts by kind.

        Each error is an event `dropped`; the first of a kind is also a warning.
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
            with contextlib.suppress(OSError):  # events.jsonl may lie on the same full disk
                append_event(self._workdir, step, 'dropped', kind=kind, reason=reason)

    def summary(self) -> str:
        """The counts in words, like '2 of rollouts'; '' for none."""
        return ', '.join(f'{count} of {kind}' for kind, count in sorted(self.counts.items()))


class Board:
    """A new TensorBoard event file in a folder. TensorBoard ignores steps from first_step on in older files."""

    def __init__(self, folder: str, first_step: int, config: Mapping[str, Any] | None = None):
        """folder: for event files; first_step: the step that the run goes on with; config: hyperparameters, nested."""
        # imported here, since it takes a second where torch is installed
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

            values = traverse_util.flatten_dict(dict(config), sep='.').items()
            plain = {name: x if isinstance(x, (bool, int, float, str)) else repr(x) for name, x in values}
            parts = summary.hparams(plain, dict.fromkeys(COMPARED, 0.0))
            self._begin += [self._event(summary=part) for part in parts]

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Writes {name: value} of a step as curves. Raises OSError and writes nothing when the disk refuses."""
        from tensorboardX import summary

        self._write(step, [summary.scalar(name, value) for name, value in values.items()])

    def text(self, step: int, name: str, text: str) -> None:
        """Writes a text of a step, with long lines cut. Raises OSError and writes nothing when the disk refuses."""
        from tensorboardX import summary

        # indented as a block of code, so that TensorBoard renders no Markdown or HTML
        lines = [f'    {shorten(line, LONGEST)}' for line in text.split('\n')]
        self._write(step, [summary.text(name, '\n'.join(lines))])

    def rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes histograms of reward, length and advantage of rows of rollout_rows, and SAMPLES completions."""
        from tensorboardX import summary

        summaries = []
        for name in ('reward', 'length', 'advantage'):
            values = [np.ravel(row[name]) for row in rows if row.get(name) is not None]
            finite = np.concatenate([*values, []]).astype(float)
            finite = finite[np.isfinite(finite)]
            if len(finite):
                summaries.append(summary.histogram(f'rollout/{name}', finite, bins=30))
        self._write(step, summaries)
        shown = []
        for row in rows[:SAMPLES]:
            shown.append(shorten(f'{describe_reward(row)}  {row["prompt"]} -> {row["completion"]}', LONGEST))
        self.text(step, 'rollout/completions', '\n'.join(shown))

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        if self._file is not None:
            self._file.close()

    def _write(self, step, summaries):
        """Appends summaries of a step to the event file, which the first call makes; all, or none and an OSError."""
        events = [*self._begin, *(self._event(step=step, summary=value) for value in summaries)]
        if self._file is None:
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            self._file = open(self._path, 'ab', buffering=0)
        size = os.fstat(self._file.fileno()).st_size
        try:
            append_whole(self._file, b''.join(map(_encode_record, events)))
        except OSError:
            self._file.truncate(size)  # readers would stop at half a record
            raise
        self._begin = []
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            os.fsync(self._file.fileno())
            self._flushed = time.monotonic()
        os.stat(self._path)  # raises when the file was removed: its writes succeed, and are lost


def _encode_record(event):
    """The bytes of an event in a TFRecord file: length, checksum of the length, content, checksum of the content."""
    from tensorboardX.record_writer import masked_crc32c

    event.wall_time = time.time()
    content = event.SerializeToString()
    length = struct.pack('<Q', len(content))
    return length + struct.pack('<I', masked_crc32c(length)) + content + struct.pack('<I', masked_crc32c(content))


class Tracking(NamedTuple):
    """The trackers that also receive rows: keys of config.log."""

    trackers: Sequence[Annotated[str, OneOf(NAMES)]] = ()  # besides the files and TensorBoard: wandb, trackio
    # of the trackers
    project: Annotated[ranges.Text, TRACKED] = 'grpo_jax'
    # of the run in trackers; '': the last two folders of the workdir's path
    run_name: Annotated[str, TRACKED] = ''

    @classmethod
    def from_config(cls, section):
        """Tracking of config.log. Raises BadInput for an unknown tracker."""
        values: dict[str, Any] = ranges.read_section(cls, section, 'log')
        return cls(tuple(values['trackers']), values['project'], values['run_name'])

    def check(self) -> None:
        """Raises BadInput for a tracker that cannot be imported."""
        for name in self.trackers:
            try:
                # a folder of that name in the current one can be imported too, but has no init
                usable = hasattr(importlib.import_module(name), 'init')
            except Exception as error:
                usable, reason = False, f' ({console.one_line(str(error))})'
            else:
                reason = ''
            if not usable:
                raise BadInput('log.trackers', name, f"cannot be imported{reason}; run pip install 'grpo_jax[{name}]'")


UNTRACKED = Tracking()


class Trackers:
    """The trackers of a run. The run has the same id in all trackers and after each resume."""

    def __init__(
        self, workdir: str, tracking: Tracking, config: Mapping[str, Any], first_step: int, logged: Mapping[str, int]
    ):
        """first_step: the step that the run goes on with; logged: the last_steps before files were cut to this step."""
        self._workdir, self._tracking, self._config, self._logged = workdir, tracking, config, logged
        self._first_step, self._events = first_step, 0
        self._runs: dict[str, Any] = {}
        for name in dict.fromkeys(tracking.trackers):
            self._attempt(name, first_step, lambda name=name: self._begin(name))

    def step(self, step: int, row: Mapping[str, Any], timings: Mapping[str, float]) -> None:
        """Logs a step's metrics and timings, and events since the last call; a repeated step is not logged again."""
        if self._runs and step > self._logged['metrics.jsonl']:  # else the step is repeated, with the same numbers
            values = {name: value for name, value in row.items() if value is not None and name != 'step'}
            self._log(step, values | {f'seconds/{name}': value for name, value in timings.items()} | self._new_events())

    def evaluation(self, step: int, results: Mapping[str, float]) -> None:
        """Logs {figure: value} of an evaluation before a step, unless it was logged before a resume."""
        if step > self._logged['evaluations.jsonl']:
            self._log(step, {f'evaluation/{name}': value for name, value in results.items()})

    def close(self, step: int) -> None:
        """Ends the trackers, after `step` steps; a second call does nothing."""
        if self._runs and (events := self._new_events()):
            self._log(step, events)
        for name, run in [*self._runs.items()]:
            self._attempt(name, step, run.finish)
        self._runs.clear()

    def _begin(self, name):
        """Starts a tracker, or goes on with its run of this workdir."""
        module: Any = importlib.import_module(name)
        about = {'project': self._tracking.project, 'config': self._config, 'resume': 'allow'}
        run_id = _run_id(self._workdir, self._tracking.run_name)
        hook = sys.excepthook
        try:
            if name == 'wandb':
                self._runs[name] = module.init(
                    id=run_id,
                    name=self._tracking.run_name or run_id,
                    dir=os.environ.get('WANDB_DIR', self._workdir),
                    allow_val_change=True,  # the config may be amended
                    reinit='create_new',  # keeps another run of a notebook open
                    settings={'console': 'off', 'silent': True, 'login_timeout': LOGIN_SECONDS},
                    **about,
                )
            else:  # trackio identifies a run by its name
                self._runs[name] = module.init(name=run_id, embed=False, **about)
        finally:
            sys.excepthook = hook  # wandb replaces it

    def _log(self, step, values):
        """Logs {name: value} of a step to each tracker."""
        for name, run in [*self._runs.items()]:
            self._attempt(name, step, lambda run=run: run.log(dict(values), step=step))

    def _attempt(self, name: str, step: int, action: Callable[[], Any]):
        """Calls action() without output; drops the tracker `name` with a warning and an event when that fails."""
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
        """{'event/' + kind: text} of events since the last call, without those that were logged before a resume."""
        rows = recorded_events(self._workdir)
        texts: dict[str, list[str]] = {}
        for row in rows[self._events :]:
            is_new = row['event'] in LASTING and row['step'] >= self._first_step
            if is_new or row['step'] > self._logged['metrics.jsonl']:
                text = ', '.join(f'{key}: {value}' for key, value in row.items() if key not in ('step', 'event'))
                texts.setdefault(f'event/{row["event"]}', []).append(f'step {row["step"]}: {text}')
        self._events = len(rows)
        return {name: ' | '.join(lines) for name, lines in texts.items()}


def last_steps(workdir: str, names: Sequence[str]) -> dict[str, int]:
    """{file name: step of its last complete row} in a workdir; -1 without rows."""
    last = {}
    for name in names:
        last[name] = -1
        path = os.path.join(workdir, name)
        if os.path.exists(path):
            with open(path, 'rb') as lines:
                for match in re.finditer(rb'^\{"step": (\d+).*\}\n', lines.read(), re.MULTILINE):
                    last[name] = int(match[1])
    return last


def _run_id(workdir, name):
    """The id of a workdir's run in trackers, which begins with a name; makes and records it at the first call."""
    path = os.path.join(workdir, IDS_FILE)
    if os.path.exists(path):
        return json_file.read_object(path)['id']
    name = name or '-'.join(os.path.abspath(workdir).split(os.sep)[-2:])
    run_id = f'{re.sub(r"[^A-Za-z0-9_.-]", "-", name)[:80].lstrip("-")}-{uuid.uuid4().hex[:8]}'
    json_file.write(path, {'id': run_id})
    return run_id


class Writer:
    """Writes a row for each step and shows it on the console; a context manager, whose end closes every file.

    Only the first of several processes has one. On resume, rows from first_step on are removed, so that none repeats.
    When the disk refuses a write, files of FILES raise CannotWrite, and TensorBoard, rollouts and trackers are dropped.

    metrics.jsonl holds only functions of config and seed, so that the file of a resumed run equals an uninterrupted
    one's; times go to timings.jsonl.
    """

    def __init__(
        self,
        workdir: str,
        first_step: int,
        steps: int,
        title: str,
        shown: Sequence[str] = (),
        tracking: Tracking = UNTRACKED,
        config: Mapping[str, Any] | None = None,
    ):
        """first_step, steps: the first step and the number of all; title: of the run on the console.

        shown: metrics for a line on the console at each tenth; without it each step has a line of what matters in GRPO.
        tracking: the trackers; config: nested, for them and for TensorBoard.
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
        self._board = Board(os.path.join(workdir, 'tensorboard'), first_step, config)
        tracking = tracking if first_step < steps else UNTRACKED
        self._trackers = Trackers(workdir, tracking, config or {}, first_step, logged)
        self._progress = contextlib.ExitStack()
        self._steps = self._progress.enter_context(during(title, steps, first_step, lines=not shown))
        self._expected = None  # tokens of the last rollout

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def step(self, step: int, row: Mapping[str, Any], timings: Mapping[str, float]) -> None:
        """Writes and shows a step's metrics and timings. row: {metric: value}; timings: {stage: seconds}."""
        row = plain_row(step, row)
        self._metrics.append(json.dumps(row))
        self._timings.append(json.dumps({'step': step, **timings}))
        curves = (row | {f'seconds/{k}': v for k, v in timings.items()}).items()
        with self.dropped.unless_written(step, 'tensorboard'):
            self._board.add(step, {name: value for name, value in curves if value is not None and name != 'step'})
        self._trackers.step(step, row, timings)
        self._expected = row.get('tokens')
        cells = console.step_cells(row, timings, self._shown)
        self._steps.advance(step + 1, *([] if self._shown else [f'step {step}']), *cells)  # its number in the files

    def stage(self, name: str) -> None:
        """Shows the name of the step's stage that begins."""
        self._steps.enter(name)

    def sampling(self, tokens: int, live: int, slots: int) -> None:
        """Shows a rollout's progress: its tokens so far, the last rollout's tokens, and `live` of `slots` in use."""
        expected = f' of about {self._expected:.0f}' if self._expected else ''
        self._steps.stage = f'sample, {tokens}{expected} tokens, {live} of {slots} slots'

    def evaluation(self, step: int, results: Mapping[str, float]) -> None:
        """Writes {figure: value} of an evaluation before step `step`."""
        self._evaluations.append(json.dumps({'step': step, **results}))
        with self.dropped.unless_written(step, 'tensorboard'):
            self._board.add(step, {f'evaluation/{k.replace("@", "_at_")}': value for k, value in results.items()})
        self._trackers.evaluation(step, results)

    def rollouts(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Writes rows of rollout_rows to rollouts/<step>.jsonl and TensorBoard, or drops them on a full disk."""
        rows = list(rows)
        with self.dropped.unless_written(step, 'tensorboard'):
            self._board.rollouts(step, rows)
        with self.dropped.unless_written(step, 'rollouts'):
            os.makedirs(os.path.join(self._workdir, 'rollouts'), exist_ok=True)
            with atomic_write(os.path.join(self._workdir, 'rollouts', f'{step:06d}.jsonl')) as file:
                file.writelines([json.dumps(row, ensure_ascii=False) + '\n' for row in rows])

    def text(self, step: int, name: str, text: str) -> None:
        """Writes a text to TensorBoard; it is dropped on a full disk."""
        with self.dropped.unless_written(step, 'tensorboard'):
            self._board.text(step, name, text)

    def close(self) -> None:
        """Closes every file; a second call does nothing."""
        steps = self._steps
        if steps.done > steps.first:
            steps.result = f'{steps.text}: {steps.done} of {steps.total}'
            if not steps.lines:  # else the last step's line has the cells
                steps.result += f', {", ".join(steps.cells)},'
        self._progress.close()
        self._files.close()
        self._trackers.close(steps.done)
        with self.dropped.unless_written(steps.done, 'tensorboard'):
            self._board.close()
        if self.dropped.counts:
            logger.warning('%s of %s could not be written and are missing', self.dropped.summary(), self._workdir)
            self.dropped.counts.clear()


def _reopen(path, first_step):
    """Opens a file of rows for appending, and cuts it to complete rows of steps before first_step.

    Cutting needs no disk space. A killed run may leave half a row, whose step is never in a checkpoint yet. Raises
    BadInput for a damaged row.
    """

    def earlier(line):
        try:
            return json.loads(line)['step'] < first_step
        except (ValueError, KeyError, TypeError):
            begin = line[:60].decode(errors='replace')
            raise BadInput(
                path, begin, 'begins a line that is no row with a step; bring the file back from a copy'
            ) from None

    cut_lines(path, earlier)
    return Lines(path)
