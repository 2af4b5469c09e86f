"""The shell around a run's steps: checkpoints, files, monitors, agreement of processes, signals, traces, closing."""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import functools
import inspect
import logging
import os
import tempfile
import time
from typing import Any, NamedTuple, ParamSpec, TypeVar
import weakref

import jax
import numpy as np

from grpo_jax import diagnose
from grpo_jax.collect.draw import Draw
from grpo_jax.errors import BadInput, CannotWrite, Diagnosed, InUse, Stopped
from grpo_jax.hosts import files, lock, processes
from grpo_jax.rewards import Rewards
from grpo_jax.run import checkpoint, rows
from grpo_jax.run.console import console
from grpo_jax.run.signals import Signals
from grpo_jax.run.writer import FILES, Dropped, Subject, Writer
from grpo_jax.text import during
from grpo_jax.types import Experience, TrainState

logger = logging.getLogger('grpo_jax')
P = ParamSpec('P')
R = TypeVar('R')
# what a run must be able to write, where it is there already
KEPT = ('config.json', 'programs.json', checkpoint.FOLDER, rows.EVENTS, *FILES)
MOST_UNREWARDED = 3  # such steps in a row: one may be chance, where few can be judged; three are a broken reward


def owns_workdir(run: Callable[P, R]) -> Callable[P, R]:
    """A function with the parameter workdir, which from now on runs as that folder's owner: see hosts.lock.own.

    With an argument steering that names a branch, it owns that one, and writes nothing to the workdir. BadInput also
    for files in there that cannot be written.
    """
    signature = inspect.signature(run)

    @functools.wraps(run)
    def owner(*args: P.args, **kwargs: P.kwargs) -> R:
        arguments = signature.bind(*args, **kwargs).arguments
        steering = arguments.get('steering')
        workdir = (steering and steering.branch) or arguments['workdir']  # a branch's parent is only read
        with lock.own(workdir):
            for path in (os.path.join(workdir, name) for name in KEPT):
                if os.path.exists(path) and not os.access(path, os.W_OK):
                    raise BadInput('--workdir', workdir, f'{path} cannot be written to; change that, or use another')
            return run(*args, **kwargs)

    return owner


class Shell:
    """A context around a run, which holds its checkpoints; whatever ends it, files and checkpoints are closed."""

    def __init__(self, workdir: str, keep: int):
        """keep: how many checkpoints stay."""
        self._workdir, self._stack = workdir, contextlib.ExitStack()
        self._finished: _Finished | None = None  # the last step
        with self._writing():
            self.checkpoints = self._stack.enter_context(checkpoint.manager(workdir, keep=keep))

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if error is not None:
            processes.report_failure(error)  # now: what follows may wait for the others
        if isinstance(error, Exception) and not isinstance(error, (Stopped, CannotWrite, InUse)):
            self._save_finished()
        try:
            with during('waiting for the last checkpoint'), self._writing():
                return self._stack.__exit__(kind, error, trace)
        except CannotWrite as failure:
            if error is None:
                raise
            if not isinstance(error, CannotWrite):
                logger.warning('%s', failure)  # and what has ended the run goes on

    @property
    def newest(self) -> int | None:
        """The step of the newest checkpoint."""
        return self.checkpoints.latest_step()

    def open_loop(
        self,
        run: Any,
        state: TrainState,
        steps: int,
        title: str,
        *,
        shown: tuple[str, ...] = (),
        profile: tuple[int, int] | None = None,
        on_step: Callable[[int, Mapping[str, Any]], Any] | None = None,
    ) -> 'Loop':
        """The Loop of a Run's steps from the state's on; it is closed with this context.

        title: what the console calls it; shown: metrics that the console has, see writer.Writer; profile: the first and
        the last step of a trace; on_step(step, row) is called after each step.
        """
        settings, first = run.settings, int(state.step)
        subject = Subject(settings.log.tracking, settings.config.to_dict())
        writer = None
        if processes.is_first():
            writer = self._stack.enter_context(Writer(self._workdir, first, steps, title, shown, subject))
        dropped = writer.dropped if writer else Dropped(self._workdir)
        trace = _Trace(profile, self._workdir, dropped, self._stack)
        optimizer = 'optimizer' if title == 'train' else 'supervised.optimizer'
        monitors = Monitors(
            self._workdir,
            diagnose.Context.from_config(settings.config, optimizer=optimizer),
            settings.diagnose.on,
            writer,
        )
        signals = self._stack.enter_context(contextlib.ExitStack())
        listening = signals.enter_context(Signals(settings.log.hang_after))
        return Loop(
            _Parts(writer, dropped, monitors, trace, listening, signals.close, on_step, run.model.tokenizer),
            self,
            self._workdir,
            settings.log.rollouts,
            settings.checkpoint.every,
            settings.learning.max_bad_steps,
            title,
            range(first, steps),
        )

    def save(self, state: TrainState) -> None:
        """Starts writing a checkpoint."""
        with self._writing():
            checkpoint.save(self.checkpoints, state)

    def check(self) -> None:
        """CannotWrite for an earlier checkpoint, whose writing goes on beside the steps."""
        with self._writing():
            self.checkpoints.check_for_errors()

    def wait(self) -> None:
        """Waits until the last checkpoint is on the disk."""
        with self._writing():
            self.checkpoints.wait_until_finished()

    def keep_finished(self, state: TrainState) -> None:
        """Takes the state of the last finished step, which an error is to save."""
        self._finished = _Finished(state)

    def _writing(self):
        return files.foreign_writing(os.path.join(self._workdir, checkpoint.FOLDER))

    def _save_finished(self):
        """Saves the state of the last finished step, where it is alive: an update takes the memory of its arrays.

        Processes that train as one do not, since only one of them may have come here.
        """
        state = None if self._finished is None or processes.several() else self._finished.state()
        if state is None or self.checkpoints.latest_step() == int(state.step):
            return
        try:
            checkpoint.save(self.checkpoints, state)
            self.checkpoints.wait_until_finished()
            console.print(
                f'step {int(state.step) - 1} of {self._workdir} is saved; the same command goes on from there'
            )
        except Exception as error:
            logger.warning('what there is could not be saved: %s', error)


class _Parts(NamedTuple):
    """What a Loop is made of."""

    writer: Writer | None  # of the first process
    dropped: Dropped
    monitors: 'Monitors'
    trace: '_Trace'
    signals: Signals
    close_signals: Callable[[], None]
    on_step: Callable[[int, Mapping[str, Any]], Any] | None
    tokenizer: Any  # of completions that are dumped


class Loop:
    """A run's steps: `for step in loop.steps()` begins each step; `loop.log` and then `loop.finish` end it."""

    def __init__(
        self,
        parts: _Parts,
        shell: Shell,
        workdir: str,
        dump_every: int,
        save_every: int,
        most_skipped: int,
        title: str,
        steps: range,
    ):
        self._parts, self._shell, self._workdir = parts, shell, workdir
        self._dump_every, self._save_every = dump_every, save_every
        self._most_skipped, self._title, self._steps = most_skipped, title, steps
        self.seconds: dict[str, float] = {}  # that the stages of the step at hand have taken, by name

    def steps(self) -> Iterator[int]:
        """Yields the steps; Stopped behind the last one when a signal came."""
        parts = self._parts
        for step in self._steps:
            parts.signals.step(f'{self._title}, step {step}')
            self.seconds.clear()
            with parts.trace.around(step), jax.profiler.StepTraceAnnotation(self._title, step_num=step):
                yield step
        self._shell.wait()
        if processes.exchange_stop(f'the end of {self._title}', {}, parts.signals.stopping):
            raise Stopped(self._workdir, self._steps.stop - 1)
        parts.close_signals()  # what follows the last step may take any time, and a signal ends it

    @contextlib.contextmanager
    def stage(self, name: str):
        """Times a stage of the step, and names it in a trace."""
        began = time.monotonic()
        if self._parts.writer:
            self._parts.writer.stage(name)
        with jax.profiler.TraceAnnotation(name):
            yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began

    def progress(self, tokens: int, live: int, slots: int) -> None:
        """Shows how far a rollout is: its tokens, and the slots in use."""
        if self._parts.writer:
            self._parts.writer.sampling(tokens, live, slots)

    def due(self, step: int, every: int) -> bool:
        """Whether something that comes every so many steps (0: never) comes at this one."""
        return every > 0 and step % every == 0

    def log(self, step: int, row: Mapping[str, Any], speeds: Mapping[str, float] | None = None):
        """Writes a step's metrics and timings, and what the monitors newly see in all rows so far.

        From now on there is something that a checkpoint would save, so that a signal waits for the end of a step.
        InUse or CannotWrite when the workdir is this process's no longer.
        """
        lock.check(self._workdir)
        if self._parts.writer:
            self._parts.writer.step(step, row, self.seconds | dict(speeds or {}))
        self._parts.monitors.step(step, row)
        self._parts.signals.underway = True

    def evaluate_if_due(self, step: int, every: int, evaluate: Callable[[Any], Mapping[str, float]], params: Any):
        """Evaluates the policy's params before the first step, and every so many steps (0: never)."""
        if step == 0 or self.due(step, every):
            with self.stage('evaluate'):
                self.log_evaluation(step, evaluate(params))

    def log_evaluation(self, step: int, results: Mapping[str, float]):
        """Writes the results of an evaluation before step `step`, for the monitors too."""
        if self._parts.writer:
            self._parts.writer.evaluation(step, results)
        self._parts.monitors.evaluation(step, results, last=step == self._steps.stop)

    def dump_if_due(self, step: int, draw: Draw, rewarded: Rewards, experience: Experience):
        """Writes a step's completions, every log.rollouts steps; all processes must call it."""
        if self.due(step, self._dump_every):
            dumped = rows.rollout_rows(draw.examples, draw.rollout, rewarded, experience, self._parts.tokenizer)
            if self._parts.writer:
                self._parts.writer.rollouts(step, dumped)

    def finish(self, step: int, state: TrainState, row: Mapping[str, Any], experience: Experience | None = None):
        """Ends a step in all processes, with a checkpoint where one is due, an update was skipped, or a monitor asks.

        The experience of a skipped update is written for `grpo-jax replay_bad`. Stopped when a signal came; Diagnosed
        when a diagnosis stops the run; FloatingPointError when more updates were skipped than the config allows;
        CannotWrite also for an earlier checkpoint, whose writing goes on beside the steps; what the callback raises.
        """
        parts, where = self._parts, f'the end of {self._title}, step {step}'
        skipped = row['finite'] < 1  # the mean over the step's updates
        if skipped and experience is not None:
            with parts.dropped.unless_written(step, checkpoint.BAD):
                checkpoint.dump_bad_batch(self._workdir, step, experience)
        stop = processes.exchange_stop(where, row, parts.signals.stopping)
        diagnosed = parts.monitors.asks('stop', where)
        saves = stop or skipped or diagnosed or parts.monitors.asks('save', where)
        self._shell.check()
        if self.due(step + 1, self._save_every) or step + 1 == self._steps.stop or saves:
            if parts.writer:
                parts.writer.stage('save')
            self._shell.save(state)
        self._shell.keep_finished(state)
        if parts.on_step:
            parts.on_step(step, rows.plain_row(step, row))
        if stop:  # whether this process was asked, or another one
            self._shell.wait()
            raise Stopped(self._workdir, step)
        if diagnosed:
            self._shell.wait()
            raise Diagnosed(self._workdir, step)
        if skipped and (count := int(state.aux['bad_steps'])) > self._most_skipped:
            text = (
                f'{count} updates were skipped, since loss, gradient or the new parameters were not finite: more than '
                f'learner.max_bad_steps = {self._most_skipped}; lower the learning rate, which --amend lets you do'
            )
            if os.path.isfile(checkpoint.bad_batch_path(self._workdir, step)):
                text += f'. python -m grpo_jax replay_bad --workdir={self._workdir} --step={step} looks into the last'
            raise FloatingPointError(text)


class _Trace:
    """A trace of some steps in workdir/profile, which the first of them begins and the last ends."""

    def __init__(self, profile, workdir, dropped, stack):
        """profile: the first and the last step, or None; stack: of the run, with which the trace ends at the latest."""
        self._first, self._last = profile or (None, None)
        self._workdir, self._dropped, self._stack = workdir, dropped, stack
        self._folder = ''  # where the trace is written: a disk may refuse the workdir, and jax can take no other then

    @contextlib.contextmanager
    def around(self, step):
        """A context for a step."""
        if step == self._first:
            self._folder = self._stack.enter_context(tempfile.TemporaryDirectory())
            jax.profiler.start_trace(self._folder)
            self._stack.callback(self._stop, step)
        yield
        if step == self._last:
            self._stop(step)

    def _stop(self, step):
        with contextlib.suppress(RuntimeError):  # it has ended
            jax.profiler.stop_trace()
            with self._dropped.unless_written(step, 'profile'):
                files.copy_folder(self._folder, os.path.join(self._workdir, 'profile'))


class _Finished:
    """The state after a step, for as long as its arrays are there: an update takes their memory.

    It keeps none of a reference in memory, which may be renewed meanwhile.
    """

    def __init__(self, state):
        self._state = state.replace(ref_params=None)
        self._reference = jax.tree.map(weakref.ref, state.ref_params)

    def state(self):
        """The TrainState, or None."""
        reference = [weak() for weak in jax.tree.leaves(self._reference)]
        if any(array is None or array.is_deleted() for array in [*reference, *jax.tree.leaves(self._state)]):
            return None
        return self._state.replace(ref_params=jax.tree.map(lambda weak: weak(), self._reference))


class Monitors:
    """The monitors beside a run's steps: what they newly see is printed, recorded, and may save or stop the run.

    The first process judges, the others only learn what follows from it. A resumed run begins with the rows and
    evaluations that its files have, so that it sees what an unbroken one sees.
    """

    def __init__(self, workdir: str, context: diagnose.Context, on: str, writer: Writer | None):
        """on: config.diagnose.on; writer: puts a diagnosis beside the curves."""
        self._workdir, self._context, self._on, self._writer = workdir, context, on, writer
        self._asks = False  # for what `on` names, at the step at hand
        self._speaks = on != 'off' and processes.is_first()
        self._rows, self._evaluations = [], []
        for name, monitored in (('metrics', self._rows), ('evaluations', self._evaluations)):
            path = os.path.join(workdir, f'{name}.jsonl')
            if self._speaks and os.path.exists(path):
                monitored += [_monitored(row, row['step']) for row in rows.read_rows(path)]

    def step(self, step: int, row: Mapping[str, Any]) -> None:
        """Takes a step's row. CannotWrite when a diagnosis cannot be recorded."""
        if self._speaks:
            self._rows.append(_monitored(row, step))
            self._say()

    def evaluation(self, step: int, results: Mapping[str, float], *, last: bool) -> None:
        """Takes an evaluation before step `step`; the last of a run, which no row follows, is judged at once."""
        if self._speaks:
            self._evaluations.append(_monitored(results, step))
            if last and self._rows:
                self._say()

    def asks(self, action: str, where: str) -> bool:
        """Whether a new diagnosis saves or stops the run; all processes must call it, in the same order."""
        return self._on == action and processes.exchange_stop(f'{where}, diagnosis', {}, self._asks)

    def _say(self):
        self._asks = False
        context = self._context._replace(evaluations=self._evaluations)
        for diagnosis in diagnose.new(self._rows, context):
            level = diagnose.MONITORS[diagnosis.monitor].level
            self._asks |= level == 'warning'
            console.print(f'{"diagnosis" if level == "warning" else level} at step {diagnosis.step}: {diagnosis}')
            fields = diagnosis._asdict()
            if self._writer:
                self._writer.text(diagnosis.step, f'diagnosis/{diagnosis.monitor}', str(diagnosis))
            rows.append_event(self._workdir, fields.pop('step'), 'diagnosis', **fields)


def _monitored(row, step):
    """A row as monitors read it, the same before it is written and after: what is no number is not there."""
    numbers = {name: rows.json_float(value) for name, value in row.items() if value is not None}
    return {name: value for name, value in numbers.items() if value is not None} | {'step': step}


def check_rewarded(workdir: str | os.PathLike, step: int, rewarded: Rewards) -> None:
    """Records and reports a step in which no completion has a finite reward, so that nothing can be learned.

    BadInput at the last of MOST_UNREWARDED in a row; those before count by their events, also when a run was stopped
    between.
    """
    if np.isfinite(rewarded.rewards).any():
        return
    lacking = {name: int(np.sum(~np.isfinite(values))) for name, values in rewarded.parts.items()}
    parts = ', '.join(f'{name} gives {count} times None or NaN' for name, count in lacking.items())
    count = len(rewarded.rewards)
    rows.append_event(workdir, step, 'rewards', completions=count, without_reward=lacking)
    before = {row['step'] for row in rows.recorded_events(workdir) if row['event'] == 'rewards'}
    if all(step - k in before for k in range(1, MOST_UNREWARDED)):
        raise BadInput(
            'reward.parts',
            sorted(lacking),
            f'none of {count} completions has a finite reward, {MOST_UNREWARDED} steps in a row (steps '
            f'{step - MOST_UNREWARDED + 1} to {step}): {parts}; mend the reward, or take data that it can judge',
        )
    logger.warning('step %d: none of %d completions has a finite reward: %s', step, count, parts)
