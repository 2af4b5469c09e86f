"""What surrounds a run's steps: checkpoints, files, monitors, signals and traces; all processes stop together."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import importlib
import inspect
import logging
import os
import sys
import tempfile
import time
from typing import Any, ParamSpec, TypeVar
import weakref

from flax import traverse_util
import jax
import numpy as np

from grpo_jax import diagnose
from grpo_jax.collect.draw import Draw
from grpo_jax.diagnose import advice
from grpo_jax.errors import BadInput, CannotWrite, Diagnosed, InUse, Stopped
from grpo_jax.hosts import files, lock, processes
from grpo_jax.models.hf import families
from grpo_jax.rewards import RewardError, Rewards, RewardsMissing
from grpo_jax.run import checkpoint, measure, rows
from grpo_jax.run.console import console
from grpo_jax.run.signals import Signals
from grpo_jax.run.writer import FILES, Dropped, Writer, last_steps
from grpo_jax.sharding.sides import split_processes
from grpo_jax.text import during
from grpo_jax.types import Experience, TrainState

logger = logging.getLogger('grpo_jax')
P = ParamSpec('P')
R = TypeVar('R')
# files and folders that a run must be able to write; a workdir may have them already
KEPT = ('config.json', 'programs.json', checkpoint.FOLDER, rows.EVENTS, *FILES)
MEASURED = 10  # steps after which a run says what they have waited for
MOST_UNREWARDED = 3  # steps in a row without any reward: one may be chance, three are a broken reward


def owns_workdir(run: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function with a parameter workdir, so that it runs as the owner of that folder: see hosts.lock.own.

    When the argument steering names a branch, the function owns the branch's folder instead. The function raises
    BadInput when files in the folder cannot be written, and InUse as hosts.lock.own does.
    """
    signature = inspect.signature(run)

    @functools.wraps(run)
    def owner(*args: P.args, **kwargs: P.kwargs) -> R:
        arguments = signature.bind(*args, **kwargs).arguments
        steering = arguments.get('steering')
        workdir = (steering and steering.branch) or arguments['workdir']  # the parent of a branch is only read
        with lock.own(workdir):
            for path in (os.path.join(workdir, name) for name in KEPT):
                if os.path.exists(path) and not os.access(path, os.W_OK):
                    remedy = f'{path} cannot be written to; make it writable, or name another folder'
                    raise BadInput('--workdir', workdir, remedy)
            return run(*args, **kwargs)

    return owner


def serves_sampler(run: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function with parameters config and workdir, for a sampler whose devices belong to other processes.

    Where config.mesh.sampler gives the sampler such devices, the function runs in the learner's processes alone. The
    sampler's processes serve rollouts until it ends there; in them it returns None, or raises the learner's Stopped.
    """
    signature = inspect.signature(run)

    @functools.wraps(run)
    def shared(*args: P.args, **kwargs: P.kwargs) -> R:
        arguments = signature.bind(*args, **kwargs).arguments
        section, steering = arguments['config'].get('mesh', {}), arguments.get('steering')
        owners, own = find_sides(section)
        if not own or processes.in_group():  # as a cold start is
            return run(*args, **kwargs)
        workdir, serving = (steering and steering.branch) or arguments['workdir'], jax.process_index() in own
        transport = importlib.import_module('grpo_jax.hosts.transport')
        folder = None if section.get('transport') == 'devices' else os.path.join(workdir, transport.FOLDER)
        with processes.group(own if serving else owners), Signals(0) as heard:
            heard.has_progress = serving  # all that can be saved is on the learner's side
            others = owners if serving else own
            with transport.Link(others, folder, lambda: heard.stopping and processes.ask_to_stop()):
                if serving:
                    return importlib.import_module('grpo_jax.sampler.serve').serve_rollouts()
                return run(*args, **kwargs)

    return shared


def find_sides(section: Any) -> tuple[set[int], set[int]]:
    """(the learner's processes, the sampler's) for config.mesh, the section; two empty sets if they are not apart.

    They are not where a process has devices of both sides, nor for a section that `open_run` refuses.
    """
    count = section.get('sampler', 0)
    if not processes.has_others() or not isinstance(count, int) or count < 1:
        return set(), set()
    processes.start_devices()
    owners, own = split_processes(jax.devices(), count)
    return (owners, own) if owners and not owners & own else (set(), set())


def barrier(
    step: int | None,
    recorded: Mapping[str, Any],
    origins: Sequence[Any],
    programs: Mapping[str, Any],
    contents: Mapping[str, Any],
) -> None:
    """Waits until all processes are ready for the first step. Raises RuntimeError when they would not do the same.

    step: the newest checkpoint's, or None; recorded: the config as JSON has it; origins: where the data were read from;
    programs: Executables by name; contents: the digests of steering.Contents. The processes compare all of these.
    """
    values = {
        'step': step,
        'commits of the data': [origin.commit for origin in origins],
        'data': contents.get('splits'),
        'files': sorted(contents.get('files', {}).values()),
    }
    if processes.has_others():  # a hash needs traced programs, and a single process traces later
        values |= {f'program {name}': program.hash for name, program in programs.items()}
    with during('waiting for the other processes'):
        processes.exchange_stop('the start', values | traverse_util.flatten_dict({'config': dict(recorded)}, sep='.'))


class Shell:
    """A context around a run that opens its checkpoints and files, and closes them however the run ends."""

    def __init__(self, workdir: str, keep: int, best: str = ''):
        """Opens a workdir's checkpoints; the newest `keep` stay, and the checkpoint with the highest figure `best`."""
        self._workdir, self._stack = workdir, contextlib.ExitStack()
        self._finished: _Finished | None = None  # state after the last step
        self._best = checkpoint.Best(workdir, best) if best else None
        with self._writing():
            self.checkpoints = self._stack.enter_context(checkpoint.manager(workdir, keep=keep, best=self._best))

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if isinstance(error, RewardError) and (self._finished or self.newest is not None):
            error.status = error.AGAIN
        everywhere = isinstance(error, RewardsMissing)
        if error is not None and not everywhere:
            processes.report_failure(error)  # first, since closing may wait for the other processes
        if isinstance(error, Exception) and not isinstance(error, (Stopped, CannotWrite, InUse)):
            self._save_finished(everywhere)
        try:
            with during('waiting for the last checkpoint'), self._writing():
                return self._stack.__exit__(kind, error, trace)
        except CannotWrite as failure:
            if error is None:
                raise
            if not isinstance(error, CannotWrite):
                logger.warning('%s', failure)  # the error that ended the run is raised

    @property
    def newest(self) -> int | None:
        """The step of the newest checkpoint; None without one."""
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
        """The Loop over a Run's steps, from the state's step to `steps`; it is closed with this context.

        title: its name on the console; shown: metrics that the console shows, see writer.Writer; profile: first and
        last step of a profiler trace; on_step(step, row): called after each step.
        """
        settings, first = run.settings, int(state.step)
        writer = None
        if processes.is_first():
            if first:
                key = 'steps' if title == 'train' else 'supervised.updates'
                end = f'finished after {steps} steps' + f'; raise {key} to go on' * (title != 'cold start')
                again = last_steps(self._workdir, ['metrics.jsonl'])['metrics.jsonl'] + 1 - first
                lost = f', and does {again} more again, of which there is no checkpoint' * (again > 0)
                console.print(f'{title}: {f"goes on after {first} of {steps} steps{lost}" if first < steps else end}')
            writer = self._stack.enter_context(
                Writer(self._workdir, first, steps, title, shown, settings.log.tracking, settings.config.to_dict())
            )
        dropped = writer.dropped if writer else Dropped(self._workdir)
        trace = _Trace(profile, self._workdir, dropped, self._stack)
        optimizer = 'optimizer' if title == 'train' else 'supervised.optimizer'
        limits = diagnose.Limits.of(families.context_length(run.model.folder), run.model.tokenizer)
        context = diagnose.Context.from_config(settings.config, optimizer=optimizer, limits=limits)
        monitors = Monitors(self._workdir, context, settings.diagnose.on, writer)
        signals = self._stack.enter_context(contextlib.ExitStack())
        listening = signals.enter_context(Signals(settings.log.hang_after))
        return Loop(
            shell=self, workdir=self._workdir, title=title, numbers=range(first, steps),
            dump_every=settings.log.rollouts, save_every=settings.checkpoint.every,
            most_skipped=settings.learning.max_bad_steps, writer=writer, dropped=dropped, monitors=monitors,
            trace=trace, signals=listening, close_signals=signals.close, on_step=on_step,
            waits=make_waits(settings.config, context.acts), dump=make_dump(run),
        )  # fmt: skip

    def save(self, state: TrainState) -> None:
        """Starts to write a checkpoint. Raises CannotWrite when the disk refuses it."""
        with self._writing():
            checkpoint.save(self.checkpoints, state)

    def save_if_best(self, state: TrainState, results: Mapping[str, float]) -> None:
        """Saves a state if its evaluation, {figure: value} in `results`, is the best so far; never the state of step 0.

        Raises BadInput when the results of step 0 lack the figure checkpoint.best.
        """
        step = int(state.step)
        if self._best and self._best.add(step, results) and step:
            rows.append_event(self._workdir, step, 'best', figure=self._best.figure, value=self._best.value)
            if self.newest != step:
                self.save(state)

    def check(self) -> None:
        """Raises CannotWrite when an earlier checkpoint, which is written in the background, could not be written."""
        with self._writing():
            self.checkpoints.check_for_errors()

    def wait(self) -> None:
        """Waits until all checkpoints are on the disk. Raises CannotWrite when the disk refuses one."""
        with self._writing():
            self.checkpoints.wait_until_finished()

    def keep_finished(self, state: TrainState) -> None:
        """Remembers the state after the last finished step, which is saved if an error ends the run."""
        self._finished = _Finished(state)

    def _writing(self):
        """A context in which an error of the disk that holds the checkpoints is raised as CannotWrite."""
        return files.writing(os.path.join(self._workdir, checkpoint.FOLDER))

    def _save_finished(self, everywhere):
        """Saves the state after the last finished step, unless an update has already reused the memory of its arrays.

        everywhere: whether all processes have met the error; if not, and there are several, nothing is saved.
        """
        alone = len(processes.members()) > 1 and not everywhere
        state = None if self._finished is None or alone else self._finished.state()
        if state is None or self.checkpoints.latest_step() == int(state.step):
            return
        try:
            checkpoint.save(self.checkpoints, state)
            self.checkpoints.wait_until_finished()
            console.print(f'{int(state.step)} steps of {self._workdir} are saved; the same command goes on from there')
        except Exception as error:
            logger.warning('the last finished step could not be saved: %s', error)


def make_waits(config: Any, acts: Callable[[str], bool]) -> Callable[[Mapping[str, Any]], None]:
    """Makes note(row), which takes each step's metrics and timings, and after MEASURED steps prints what they wait for.

    config: the run's; acts(flags): whether the run could start with these flags, which the advice names.
    """
    # on a CPU the time of a decode step is in proportion to its rows
    in_flight = measure.choose_in_flight(config.data.prompts_per_step, jax.device_count())
    in_flight, begun = in_flight * (jax.default_backend() != 'cpu'), []

    def note(row):
        if len(begun) < MEASURED:
            begun.append(row)
            if len(begun) == MEASURED:
                for text in advice.describe_waits(begun, config, acts, in_flight):
                    console.print(f'note: {text}')

    return note


def make_dump(run: Any) -> Callable[[Draw, Rewards, Experience], list[dict[str, Any]]]:
    """Makes dump(draw, rewarded, experience) -> rows of a Run's dump: rollout_rows, each with `learned_from`."""

    def dump(draw, rewarded, experience):
        dumped = rows.rollout_rows(draw.examples, draw.rollout, rewarded, experience, run.model.tokenizer, run.rewards)
        return [row | {'learned_from': list(run.algorithm.learns_from)} for row in dumped]

    return dump


@dataclasses.dataclass
class Loop:
    """The loop over a run's steps: `for step in loop.steps()` begins a step, `loop.log` and `loop.finish` end it."""

    shell: Shell
    workdir: str
    title: str
    numbers: range  # of the steps
    dump_every: int  # steps between dumps of completions; 0: never
    save_every: int  # steps between checkpoints
    most_skipped: int  # updates that may be skipped
    writer: Writer | None  # None in all processes but the first
    dropped: Dropped
    monitors: 'Monitors'
    trace: '_Trace'
    signals: Signals
    close_signals: Callable[[], None]
    waits: Callable[[Mapping[str, Any]], None]  # (row of metrics and timings)
    dump: Callable[..., list[dict[str, Any]]]  # (draw, rewarded, experience) -> rows of a dump
    on_step: Callable[[int, Mapping[str, Any]], Any] | None
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)  # {stage: seconds} of the current step

    def steps(self) -> Iterator[int]:
        """Yields the step numbers, with timer and trace around each; raises Stopped after the last if a signal came."""
        for step in self.numbers:
            self.signals.step(f'{self.title}, step {step}')
            self.seconds.clear()
            with self.trace.around(step), jax.profiler.StepTraceAnnotation(self.title, step_num=step):
                yield step
        self.shell.wait()
        if processes.exchange_stop(f'the end of {self.title}', {}, self._stopping):
            raise Stopped(self.workdir, self.numbers.stop, self.numbers.stop)
        self.close_signals()  # after the last step a signal ends the process at once

    @property
    def _stopping(self):
        """Whether a signal has come to this process, or to one that serves it."""
        return self.signals.stopping or processes.asked_to_stop()

    @contextlib.contextmanager
    def stage(self, name: str):
        """Opens a context that times a stage of the step, and names it on the console and in the profiler trace."""
        began = time.monotonic()
        if self.writer:
            self.writer.stage(name)
        with jax.profiler.TraceAnnotation(name):
            yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began

    def show_progress(self, tokens: int, live: int, slots: int) -> None:
        """Shows the progress of a rollout: its tokens so far, and `live` of the sampler's `slots` in use."""
        if self.writer:
            self.writer.sampling(tokens, live, slots)

    def is_due(self, step: int, every: int) -> bool:
        """Whether a step is a multiple of `every`; False where `every` is 0."""
        return every > 0 and step % every == 0

    def log(self, step: int, row: Mapping[str, Any], speeds: Mapping[str, float] | None = None):
        """Writes a step's metrics and timings, and new diagnoses of the monitors.

        row: {metric: value}; speeds: further numbers for timings.jsonl. From now on a signal waits for the end of the
        step, since there is progress that a checkpoint saves. Raises InUse or CannotWrite when this process no longer
        owns the workdir or cannot write to it.
        """
        lock.check(self.workdir)
        timings = self.seconds | dict(speeds or {})
        self.signals.has_progress = True  # before anybody can read the row
        if self.writer:
            self.writer.step(step, row, timings)
            self.waits({**row, **timings})
        self.monitors.step(step, row)

    def evaluate_if_due(self, step: int, every: int, evaluate: Callable[[Any], Mapping[str, float]], state: TrainState):
        """Calls self.evaluate before step 0, and then every `every` steps if that is not 0."""
        if step == 0 or self.is_due(step, every):
            self.evaluate(step, evaluate, state)

    def evaluate(self, step: int, evaluate: Callable[[Any], Mapping[str, float]], state: TrainState):
        """Writes evaluate(params), {figure: value} before step `step`, and shows it to the monitors; saves the best."""
        with self.stage('evaluate'):
            results = evaluate(state.params)
            if self.writer:
                self.writer.evaluation(step, results)
            self.monitors.evaluation(step, results, last=step == self.numbers.stop)
            self.shell.save_if_best(state, results)

    def dump_if_due(self, step: int, draw: Draw, rewarded: Rewards, experience: Experience):
        """Writes a step's completions, every log.rollouts steps and the last step's; all processes must call it."""
        if self.is_due(step, self.dump_every) or (self.dump_every and step + 1 == self.numbers.stop):
            dumped = self.dump(draw, rewarded, experience)
            if self.writer:
                self.writer.rollouts(step, dumped)

    def finish(self, step: int, state: TrainState, row: Mapping[str, Any], experience: Experience | None = None):
        """Ends a step; saves a checkpoint when one is due, an update was skipped, or the run stops or has a diagnosis.

        state: the state after the step; row: the step's metrics; experience: what the step learned from, written for
        `grpo-jax replay_bad` when an update was skipped. All processes must call it. Raises Stopped when a signal came,
        Diagnosed when a diagnosis stops the run, FloatingPointError when more updates were skipped than
        learner.max_bad_steps, CannotWrite when this checkpoint or an earlier one could not be written, RuntimeError
        when the rows of the processes differ, and errors of on_step.
        """
        where = f'the end of {self.title}, step {step}'
        skipped = row['finite'] < 1  # the mean over the step's updates
        if skipped and experience is not None:
            with self.dropped.unless_written(step, checkpoint.BAD):
                checkpoint.dump_bad_batch(self.workdir, step, experience)
        stop = processes.exchange_stop(where, row, self._stopping)
        diagnosed = self.monitors.asks('stop', where)
        saves = stop or skipped or diagnosed or self.monitors.asks('save', where)
        self.shell.check()
        if self.is_due(step + 1, self.save_every) or step + 1 == self.numbers.stop or saves:
            if self.writer:
                self.writer.stage('save')
            self.shell.save(state)
        self.shell.keep_finished(state)
        if self.on_step:
            self.on_step(step, rows.plain_row(step, row))
        if stop:  # a signal came in this process or in another one
            self.shell.wait()
            raise Stopped(self.workdir, step + 1, self.numbers.stop)
        if diagnosed:
            self.shell.wait()
            raise Diagnosed(self.workdir, step + 1, self.numbers.stop)
        if skipped and (count := int(state.aux['bad_steps'])) > self.most_skipped:
            text = (
                f'{count} updates were skipped, since loss, gradient or the new parameters were not finite: more than '
                f'learner.max_bad_steps = {self.most_skipped}; lower the learning rate, which --amend lets you do'
            )
            if os.path.isfile(checkpoint.bad_batch_path(self.workdir, step)):
                text += f'. python -m grpo_jax replay_bad --workdir={self.workdir} --step={step} looks into the last'
            raise FloatingPointError(text)


class _Trace:
    """The profiler trace of some steps, written to workdir/profile after the last of them."""

    def __init__(self, profile, workdir, dropped, stack):
        """profile: (first step, last step), or None; stack: contexts of the run, whose end also ends the trace."""
        self._first, self._last = profile or (None, None)
        self._workdir, self._dropped, self._stack = workdir, dropped, stack
        self._folder = ''  # a temporary one: jax could not change the folder when the workdir's disk refuses the trace

    @contextlib.contextmanager
    def around(self, step):
        """A context around a step, which starts the trace before its first step and ends it after its last."""
        if step == self._first:
            self._folder = self._stack.enter_context(tempfile.TemporaryDirectory())
            jax.profiler.start_trace(self._folder)
            self._stack.callback(self._stop, step)
        yield
        if step == self._last:
            self._stop(step)

    def _stop(self, step):
        """Ends the trace and copies it into the workdir, unless it has ended already."""
        with contextlib.suppress(RuntimeError):  # the trace has ended already
            jax.profiler.stop_trace()
            with self._dropped.unless_written(step, 'profile'):
                files.copy_folder(self._folder, os.path.join(self._workdir, 'profile'))


class _Finished:
    """Holds the state after a step, until an update reuses the memory of its arrays.

    The reference policy is held by weak references, so that its memory is freed when a new reference replaces it.
    """

    def __init__(self, state):
        self._state, self._pending = state.replace(ref_params=None, pending=None), state.pending
        self._reference = jax.tree.map(weakref.ref, state.ref_params)

    def state(self):
        """The TrainState; None when one of its arrays is gone."""
        reference = [weak() for weak in jax.tree.leaves(self._reference)]
        if any(array is None or array.is_deleted() for array in [*reference, *jax.tree.leaves(self._state)]):
            return None
        reference = jax.tree.map(lambda weak: weak(), self._reference)
        return self._state.replace(ref_params=reference, pending=self._pending)


class Monitors:
    """Runs the monitors after each step; a new diagnosis is printed and recorded, and may save or stop the run.

    Monitors run in the first process, which tells the others whether to save or stop. A resumed run reads the rows and
    evaluations in its files, so that it comes to the same diagnoses as an uninterrupted run. Where --amend changed what
    a diagnosis named, config.diagnose.patience steps later the run says whether that helped.
    """

    def __init__(self, workdir: str, context: diagnose.Context, on: str, writer: Writer | None):
        """context: settings that monitors read; on: config.diagnose.on; writer: writes a diagnosis to TensorBoard."""
        self._workdir, self._on, self._writer = workdir, on, writer
        self._asks = False  # whether a diagnosis of this step asks for the action that `on` names
        self._speaks = on != 'off' and processes.is_first()
        self._rows, self._evaluations = [], []
        self._context = context._replace(evaluations=self._evaluations)  # a list, which grows
        for name, monitored in (('metrics', self._rows), ('evaluations', self._evaluations)):
            path = os.path.join(workdir, f'{name}.jsonl')
            if self._speaks and os.path.exists(path):
                monitored += [_monitored_row(row, row['step']) for row in rows.read_rows(path)]
        self._amended = diagnose.find_amended(rows.recorded_events(workdir)) if self._speaks else {}

    def step(self, step: int, row: Mapping[str, Any]) -> None:
        """Runs the monitors on a step's metrics. Raises CannotWrite when a diagnosis cannot be recorded."""
        if self._speaks:
            self._rows.append(_monitored_row(row, step))
            self._diagnose()
            for monitor in self._amended.get(step + 1 - self._context.options.patience, ()):
                text, helped = diagnose.describe_remedy(monitor, self._rows, self._context)
                console.print(f'remedy at step {step}: {text}')
                rows.append_event(self._workdir, step, 'remedy', monitor=monitor, text=text, helped=helped)

    def evaluation(self, step: int, results: Mapping[str, float], *, last: bool) -> None:
        """Adds an evaluation before step `step`; if it is the run's last, no row follows, and the monitors run now."""
        if self._speaks:
            self._evaluations.append(_monitored_row(results, step))
            if last and self._rows:
                self._diagnose()

    def asks(self, action: str, where: str) -> bool:
        """Whether a new diagnosis asks for the action, save or stop; all processes must call it, in the same order."""
        return self._on == action and processes.exchange_stop(f'{where}, diagnosis', {}, self._asks)

    def _diagnose(self):
        """Prints and records the new diagnoses of all rows so far."""
        self._asks = False
        for diagnosis in diagnose.new_diagnoses(self._rows, self._context):
            command = diagnose.command_with(diagnosis.remedy, self._workdir, sys.orig_argv)
            diagnosis = diagnosis._replace(command=command)
            level = diagnose.MONITORS[diagnosis.monitor].level
            self._asks |= level == 'warning'
            console.print(f'{"diagnosis" if level == "warning" else level} at step {diagnosis.step}: {diagnosis}')
            fields = diagnosis._asdict()
            if self._writer:
                self._writer.text(diagnosis.step, f'diagnosis/{diagnosis.monitor}', str(diagnosis))
            rows.append_event(self._workdir, fields.pop('step'), 'diagnosis', **fields)


def _monitored_row(row, step):
    """{metric: float} of a row, and its step, as monitors read it: without NaN, infinities, meaningless entropies."""
    numbers = {name: rows.json_float(value) for name, value in row.items() if value is not None}
    if 'logprob' in numbers and numbers['logprob'] is None:
        numbers.pop('entropy', None)  # 0, since no token was left: all groups were dead, and dropped
    return {name: value for name, value in numbers.items() if value is not None} | {'step': step}


def check_rewarded(workdir: str | os.PathLike, step: int, rewarded: Rewards) -> None:
    """Records an event and warns when no completion of a step has a finite reward, so that nothing can be learned.

    Raises BadInput at the last of MOST_UNREWARDED such steps in a row. Earlier steps are counted by their events, so
    that a run that was resumed in between counts them too.
    """
    if np.isfinite(rewarded.rewards).any():
        return
    unrewarded = {name: int(np.sum(~np.isfinite(values))) for name, values in rewarded.parts.items()}
    parts = ', '.join(f'{name} gives {count} times None or NaN' for name, count in unrewarded.items())
    count = len(rewarded.rewards)
    rows.append_event(workdir, step, 'rewards', completions=count, without_reward=unrewarded)
    steps = {row['step'] for row in rows.recorded_events(workdir) if row['event'] == 'rewards'}
    if all(step - k in steps for k in range(1, MOST_UNREWARDED)):
        raise BadInput(
            'reward.parts',
            sorted(unrewarded),
            f'none of {count} completions has a finite reward, {MOST_UNREWARDED} steps in a row (steps '
            f'{step - MOST_UNREWARDED + 1} to {step}): {parts}; mend the reward, or take data that it can judge',
        )
    logger.warning('step %d: none of %d completions has a finite reward: %s', step, count, parts)
