"""The shell around a run's steps: checkpoints, files, agreement of processes, signals, hangs, profiles, and closing."""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import logging
import os
import tempfile
import time
from typing import Any
import weakref

import jax

from grpo_jax.errors import CannotWrite, Diagnosed, InUse, Stopped
from grpo_jax.hosts import files, lock, processes
from grpo_jax.run import checkpoint, diagnosis, signals
from grpo_jax.run.console import console
from grpo_jax.run.rows import plain_row
from grpo_jax.run.writer import Subject, open_writer
from grpo_jax.text import during
from grpo_jax.types import TrainState

logger = logging.getLogger('grpo_jax')


class Loop:
    """A context in which a run takes its steps; whatever ends it, files and checkpoints are closed.

    `for step in loop.steps(state)` begins each step; `loop.log` and then `loop.finish` end it.
    """

    def __init__(self, experiment, steps: int, title: str, keep: int, shown: tuple[str, ...] = (), callback=None):
        """keep: checkpoints to keep; shown: see metrics.open_writer; callback(step, row) is called after each step."""
        self._experiment, self._workdir, self._cadence = experiment, experiment.workdir, experiment.settings.cadence
        self._most_skipped = experiment.settings.learning.max_bad_steps
        self._steps, self._title, self._keep, self._shown, self._callback = steps, title, keep, shown, callback
        self._stack = contextlib.ExitStack()
        self._seconds: dict[str, float] = {}  # of the step at hand, by stage
        self._finished: _Finished | None = None  # the last step

    def __enter__(self):
        with self._writing():
            self.checkpoints = self._stack.enter_context(checkpoint.manager(self._workdir, keep=self._keep))
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

    def restore(self, abstract: TrainState, read: Callable = checkpoint.read_tree) -> TrainState | None:
        """The TrainState of the newest sound checkpoint; None without one. read(folder, what is trained) reads it."""
        return checkpoint.restore_state(self._experiment, self.checkpoints, abstract, read)

    def steps(self, state: TrainState, profile: tuple[int, int] | None = None) -> Iterator[int]:
        """Yields the steps from the state's on; profile: the first and the last step that a trace shows."""
        first = int(state.step)
        subject = Subject(self._experiment.settings.tracking, self._experiment.config.to_dict())
        writer = open_writer(self._workdir, first, self._steps, self._title, self._shown, subject)
        self.writer = self._stack.enter_context(writer)
        trace = _Trace(profile, self._workdir, self.writer, self._stack)
        optimizer = 'optimizer' if self._title == 'train' else 'supervised.optimizer'
        self._judge = diagnosis.Judge(self._experiment, optimizer, self.writer.text)
        watched = self._stack.enter_context(contextlib.ExitStack())
        self._watch = watched.enter_context(signals.Signals(self._cadence.hang_after))
        for step in range(first, self._steps):
            self._watch.step(f'{self._title}, step {step}')
            self._seconds = {}
            with trace.around(step), jax.profiler.StepTraceAnnotation(self._title, step_num=step):
                yield step
        self._wait()
        if processes.agree(f'the end of {self._title}', {}, self._watch.stopping):
            raise Stopped(self._workdir, self._steps - 1)
        watched.close()  # what follows the last step may take any time, and a signal ends it

    @contextlib.contextmanager
    def stage(self, name: str):
        """Times a stage of the step, and names it in a trace."""
        began = time.monotonic()
        self.writer.stage(name)
        with jax.profiler.TraceAnnotation(name):
            yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - began

    @property
    def seconds(self) -> Mapping[str, float]:
        """What the stages of the step at hand have taken, by name."""
        return self._seconds

    def due(self, step: int, every: int) -> bool:
        """Whether something that comes every so many steps (0: never) comes at this one."""
        return every > 0 and step % every == 0

    def log(self, step: int, row: Mapping[str, Any], speeds: Mapping[str, float] | None = None):
        """Writes a step's metrics and timings, and what the monitors newly see in all rows so far.

        InUse or CannotWrite when the workdir is this process's no longer.
        """
        lock.check(self._workdir)
        self.writer.step(step, row, self._seconds | dict(speeds or {}))
        self._judge.step(step, row)
        self._watch.underway = True

    def evaluation(self, step: int, results: Mapping[str, float]):
        """Writes the results of an evaluation before step `step`, for the monitors too."""
        self.writer.evaluation(step, results)
        self._judge.evaluation(step, results, last=step == self._steps)

    def finish(self, step: int, state: TrainState, row: Mapping[str, Any]):
        """Ends a step in all processes, with a checkpoint where one is due, an update was skipped, or a diagnosis asks.

        Stopped when a signal came; Diagnosed when a diagnosis stops the run; FloatingPointError when more updates were
        skipped than the config allows; CannotWrite also for an earlier checkpoint, whose writing goes on beside the
        steps; what the callback raises.
        """
        skipped = row['finite'] < 1
        where = f'the end of {self._title}, step {step}'
        stop = processes.agree(where, row, self._watch.stopping)
        diagnosed = self._judge.asks('stop', where)
        saves = stop or skipped or diagnosed or self._judge.asks('save', where)
        with self._writing():
            self.checkpoints.check_for_errors()
            if self.due(step + 1, self._cadence.checkpoint) or step + 1 == self._steps or saves:
                self.writer.stage('save')
                checkpoint.save(self.checkpoints, state)
        self._finished = _Finished(state)
        if self._callback:
            self._callback(step, plain_row(step, row))
        if stop:  # whether this process was asked, or another one
            self._wait()
            raise Stopped(self._workdir, step)
        if diagnosed:
            self._wait()
            raise Diagnosed(self._workdir, step)
        if skipped:
            _check_skipped(self._workdir, step, int(state.aux['bad_steps']), self._most_skipped)

    def _writing(self):
        return files.foreign_writing(os.path.join(self._workdir, checkpoint.FOLDER))

    def _wait(self):
        """Waits until the last checkpoint is on the disk."""
        with self._writing():
            self.checkpoints.wait_until_finished()

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


class _Trace:
    """A trace of some steps in workdir/profile, which the first of them begins and the last ends."""

    def __init__(self, profile, workdir, writer, stack):
        """profile: the first and the last step, or None; stack: of the run, with which the trace ends at the latest."""
        self._first, self._last = profile or (None, None)
        self._workdir, self._writer, self._stack = workdir, writer, stack

    @contextlib.contextmanager
    def around(self, step):
        """A context for a step."""
        if step == self._first:
            # not in the workdir: where a disk refuses a trace, jax can take no other one
            self._folder = self._stack.enter_context(tempfile.TemporaryDirectory())
            jax.profiler.start_trace(self._folder)
            self._stack.callback(self._stop, step)
        yield
        if step == self._last:
            self._stop(step)

    def _stop(self, step):
        with contextlib.suppress(RuntimeError):  # it has ended
            jax.profiler.stop_trace()
            with self._writer.optional(step, 'profile'):
                files.copy_folder(self._folder, os.path.join(self._workdir, 'profile'))


def _check_skipped(workdir, step, count, most):
    """FloatingPointError when more updates were skipped than may be."""
    if count > most:
        path = checkpoint.bad_batch_path(workdir, step)
        advice = f'. python -m grpo_jax replay_bad --workdir={workdir} --step={step} looks into the last'
        raise FloatingPointError(
            f'{count} updates were skipped, since loss, gradient or the new parameters were not finite: more than '
            f'learner.max_bad_steps = {most}; lower the learning rate, which --amend lets you do'
            + advice
            * os.path.isfile(path)
        )


def on_devices():
    """A context in which a host array as an argument of a program is an error, and no hidden transfer to the devices.

    Without jit there are no programs, and every operation may bring its constants.
    """
    if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue] (made at run time)
        return contextlib.nullcontext()
    return jax.transfer_guard_host_to_device('disallow')


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
