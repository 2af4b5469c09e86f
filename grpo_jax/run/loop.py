"""The shell around a run's steps: checkpoints, files, agreement of processes, signals, hangs, profiles, and closing."""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import os
import time
from typing import Any

import jax

from grpo_jax import activity
from grpo_jax.errors import TERMINATED, Stopped
from grpo_jax.hosts import processes
from grpo_jax.run import bad_batch, checkpoint, metrics, watch
from grpo_jax.types import TrainState


class Loop:
    """A context in which a run takes its steps; whatever ends it, files and checkpoints are closed.

    `for step in loop.steps(state)` begins each step; `loop.log` and then `loop.finish` end it.
    """

    def __init__(self, experiment, steps: int, title: str, keep: int, shown: tuple[str, ...] = ('reward', 'length')):
        """keep: checkpoints to keep; shown: metrics that the progress bar shows."""
        self._workdir, self._cadence = experiment.workdir, experiment.settings.cadence
        self._most_skipped = experiment.settings.learning.max_bad_steps
        self._steps, self._title, self._keep, self._shown = steps, title, keep, shown
        self._stack = contextlib.ExitStack()
        self._seconds: dict[str, float] = {}  # of the step at hand, by stage

    def __enter__(self):
        self.checkpoints = self._stack.enter_context(checkpoint.manager(self._workdir, keep=self._keep))
        return self

    def __exit__(self, *error):
        with activity.during('waiting for the last checkpoint'):
            return self._stack.__exit__(*error)

    @property
    def newest(self) -> int | None:
        """The step of the newest checkpoint."""
        return self.checkpoints.latest_step()

    def restore(self, abstract: TrainState, read: Callable = checkpoint.read_tree) -> TrainState | None:
        """The TrainState of the newest sound checkpoint; None without one. read(folder, abstract) reads it."""
        return checkpoint.restore(self.checkpoints, abstract, read)

    def steps(self, state: TrainState, profile: tuple[int, int] | None = None) -> Iterator[int]:
        """Yields the steps from the state's on; profile: the first and the last step that a trace shows."""
        first = int(state.step)
        writer = metrics.open_writer(self._workdir, first, self._steps, self._title, self._shown)
        self.writer = self._stack.enter_context(writer)
        watched = self._stack.enter_context(contextlib.ExitStack())
        self._watch = watched.enter_context(watch.Watch(self._cadence.hang_after))
        for step in range(first, self._steps):
            self._watch.step(f'{self._title}, step {step}')
            self._seconds = {}
            with self._traced(step, profile), jax.profiler.StepTraceAnnotation(self._title, step_num=step):
                yield step
        watched.close()  # what follows the last step may take any time, and a signal ends it

    @contextlib.contextmanager
    def stage(self, name: str):
        """Times a stage of the step, and names it in a trace."""
        began = time.monotonic()
        self.writer.stage(name)
        with jax.profiler.TraceAnnotation(name):
            yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - began

    def due(self, step: int, every: int) -> bool:
        """Whether something that comes every so many steps (0: never) comes at this one."""
        return every > 0 and step % every == 0

    def log(self, step: int, row: Mapping[str, Any], speeds: Mapping[str, float] | None = None):
        """Writes a step's metrics and timings."""
        self.writer.step(step, row, self._seconds | dict(speeds or {}))

    def finish(self, step: int, state: TrainState, row: Mapping[str, Any]):
        """Ends a step in all processes, with a checkpoint where one is due, and where an update was skipped.

        Stopped when SIGTERM or Ctrl-C came; FloatingPointError when more updates were skipped than the config allows.
        """
        skipped = row['finite'] < 1
        stop = processes.agree(f'the end of {self._title}, step {step}', row, bool(self._watch.stopping))
        if self.due(step + 1, self._cadence.checkpoint) or step + 1 == self._steps or stop or skipped:
            self.writer.stage('save')
            checkpoint.save(self.checkpoints, state)
        if stop:  # whether this process was asked, or another one
            raise Stopped(self._workdir, step, self._watch.stopping or TERMINATED)

        count = int(state.aux['bad_steps'])
        if skipped and count > self._most_skipped:
            kept = os.path.isfile(bad_batch.path_of(self._workdir, step))
            raise FloatingPointError(
                f'{count} updates were skipped, since loss, gradient or the new parameters were not finite: more than '
                f'learner.max_bad_steps = {self._most_skipped}; lower the learning rate, which --amend lets you do'
                + f'. python -m grpo_jax.replay_bad --workdir={self._workdir} --step={step} looks into the last'
                * kept
            )

    @contextlib.contextmanager
    def _traced(self, step, profile):
        """A step inside the trace of workdir/profile, which the profile's first step begins and its last ends."""
        if profile and step == profile[0]:
            jax.profiler.start_trace(os.path.join(self._workdir, 'profile'))
            self._stack.callback(_stop_trace)
        yield
        if profile and step == profile[1]:
            _stop_trace()


def on_devices():
    """A context in which a host array as an argument of a program is an error, and no hidden transfer to the devices.

    Without jit there are no programs, and every operation may bring its constants.
    """
    if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue] (made at run time)
        return contextlib.nullcontext()
    return jax.transfer_guard_host_to_device('disallow')


def _stop_trace():
    with contextlib.suppress(RuntimeError):  # it has ended
        jax.profiler.stop_trace()
