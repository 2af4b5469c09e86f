"""Trackers: a run's rows also go to Weights & Biases or Trackio, by the names in config.log.trackers.

They get what the files get: metrics, times, evaluations, events, and the config as hyperparameters. A tracker is for
looking: what fails in one drops it with a warning, and the run goes on. One that was dropped begins again on resume.
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import importlib
import io
import logging
import os
import re
import sys
from typing import Annotated, Any, NamedTuple
import uuid

from grpo_jax import ranges
from grpo_jax.errors import BadInput
from grpo_jax.hosts import json_file
from grpo_jax.ranges import OneOf
from grpo_jax.run import console, events

logger = logging.getLogger('grpo_jax')
NAMES = ('wandb', 'trackio')  # modules, and extras of the package
FILE = 'trackers.json'  # of a workdir: the id of its run in every tracker
LOGIN_SECONDS = 30  # that a question for a key may wait for a person


class Tracking(NamedTuple):
    """Where the rows go besides: of config.log."""

    trackers: Sequence[Annotated[str, OneOf(NAMES)]] = ()
    project: ranges.Text = 'grpo_jax'

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
                events.append(self._workdir, step, 'dropped', kind=name, reason=reason)

    def _new_events(self):
        """Texts of the events since the last call by name, but those that were logged before the run went on."""
        rows = events.recorded(self._workdir)
        texts: dict[str, list[str]] = {}
        for row in rows[self._events :]:
            anew = row['event'] in events.LASTING and row['step'] >= self._first_step
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
    path = os.path.join(workdir, FILE)
    if os.path.exists(path):
        return json_file.read_object(path)['id']
    place = '-'.join(os.path.abspath(workdir).split(os.sep)[-2:])
    run_id = f'{re.sub(r"[^A-Za-z0-9_.-]", "-", place)[:80].lstrip("-")}-{uuid.uuid4().hex[:8]}'
    json_file.write(path, {'id': run_id})
    return run_id
