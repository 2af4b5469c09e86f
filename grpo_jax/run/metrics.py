"""What a run writes down: metrics.jsonl, timings.jsonl, TensorBoard, rollout dumps; and how far it is."""

from collections.abc import Iterable, Mapping, Sequence
import contextlib
import json
import logging
import os
from typing import Any

from jaxtyping import Bool, Int
import numpy as np

from grpo_jax.errors import BadInput
from grpo_jax.hosts import processes
from grpo_jax.hosts.files import Lines, atomic_write, cut_lines
from grpo_jax.rewards import Rewards
from grpo_jax.run import board, console, events, trackers
from grpo_jax.run.dropped import Dropped
from grpo_jax.text import during
from grpo_jax.types import Rollout

logger = logging.getLogger('grpo_jax')
FILES = ('metrics.jsonl', 'timings.jsonl', 'evaluations.jsonl')  # for keeping: a row a step, or an evaluation


def open_writer(
    workdir: str,
    first_step: int,
    steps: int,
    title: str,
    shown: Sequence[str] = (),
    subject: trackers.Subject | None = None,
) -> 'Writer | SilentWriter':
    """The first process's Writer, or a SilentWriter in the others.

    `shown` names the metrics that the console shows now and then; without them a line a step has what matters. subject:
    what trackers and TensorBoard are told of the run.
    """
    return Writer(workdir, first_step, steps, title, shown, subject) if processes.is_first() else SilentWriter(workdir)


class Writer:
    """Writes one row a step; on resume the rows from first_step on are dropped, so that none repeats.

    A context manager: its end closes every file, also after an exception. What is for keeping (metrics.jsonl,
    timings.jsonl, evaluations.jsonl) raises CannotWrite when the disk refuses it; what is for looking is dropped.

    metrics.jsonl holds only what is a function of config and seed, so that a resumed run's file equals an
    uninterrupted one's; times go to timings.jsonl.
    """

    def __init__(self, workdir, first_step, steps, title, shown, subject=None):
        self._shown, self._workdir = shown, workdir
        logged = trackers.last_steps(workdir, FILES)
        with contextlib.ExitStack() as opened:
            self._metrics, self._timings, self._evaluations = (
                opened.enter_context(_reopen(os.path.join(workdir, name), first_step)) for name in FILES
            )
            events.cut(workdir, first_step)
            self._files = opened.pop_all()
        self._dropped = Dropped(workdir)
        config = subject.config if subject else None
        self._board = board.Board(os.path.join(workdir, 'tensorboard'), first_step, config)
        self._trackers = None
        if subject and first_step < steps:
            self._trackers = trackers.Trackers(workdir, subject, first_step, logged)
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
        return self._dropped.unless_written(step, kind)

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
        if self._dropped.counts:
            logger.warning('%s of %s could not be written and are missing', self._dropped.summary(), self._workdir)
            self._dropped.counts.clear()


class SilentWriter:
    """Stands in for a Writer in all processes but the first: the same methods, which write nothing."""

    def __init__(self, workdir):
        self._dropped = Dropped(workdir)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def step(self, step: int, row: Mapping[str, Any], timings: Mapping[str, float]) -> None:
        """Writes nothing."""

    def sampling(self, tokens: int, live: int, slots: int) -> None:
        """Shows nothing."""

    def stage(self, name: str) -> None:
        """Shows nothing."""

    def evaluation(self, step: int, results: Mapping[str, float]) -> None:
        """Writes nothing."""

    def rollouts(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Writes nothing."""

    def text(self, step: int, name: str, text: str) -> None:
        """Writes nothing."""

    def optional(self, step: int, kind: str) -> contextlib.AbstractContextManager[None]:
        """A context that writes something for looking; a full disk drops it, as in the Writer."""
        return self._dropped.unless_written(step, kind)

    def close(self) -> None:
        """Closes nothing."""


def decode_completions(
    tokenizer: Any, rollout: Rollout
) -> tuple[list[str], Bool[np.ndarray, ' B'], Int[np.ndarray, ' B']]:
    """(texts, truncated, lengths in tokens) of a rollout's completions, on the host; special tokens are not shown."""
    tokens, mask, truncated = processes.fetch((rollout.tokens, rollout.completion_mask, rollout.truncated))
    tokens = tokens[:, -mask.shape[1] :]
    texts = tokenizer.batch_decode(
        [row[in_completion] for row, in_completion in zip(tokens, mask, strict=True)], skip_special_tokens=True
    )
    return texts, truncated, mask.sum(1)


def completion_metrics(rewarded: Rewards) -> dict[str, Any]:
    """Means of the parts and failures of a reward, and lengths and truncation, by name."""
    lengths = rewarded.lengths
    row = {f'reward/{name}': _mean(values) for name, values in rewarded.parts.items()}
    row |= {f'reward_{name}': failed.mean() for name, failed in rewarded.failures.items()}
    return row | {
        'length': lengths.mean(),
        'length_p95': np.quantile(lengths, 0.95),
        'length_longest': lengths.max(),
        'truncated': rewarded.truncated.mean(),
        'tokens': lengths.sum(),
    }


def sampler_metrics(engine: Any) -> dict[str, Any]:
    """The schedule of the engine's last rollout by name, a function of the completions' lengths; {} without engine."""
    if engine is None:
        return {}
    stats = engine.stats
    return {
        'sampler/steps': stats.steps,
        'sampler/utilisation': stats.utilisation,
        'sampler/decode_batches': stats.decode_batches,
        'sampler/preempted': stats.preempted,
        'sampler/cache_mib': stats.peak_bytes / 2**20,
        **_merged(engine.programs.inspection),
    }


def _merged(inspection):
    """What became of adapters in the sampler's weights by name; RuntimeError where they were not merged."""
    if inspection is None:
        return {}
    checksum, share, due = processes.fetch(inspection)
    if share < 0.5 * due:
        raise RuntimeError(
            f"{share:.1%} of the sampler's adapted weights differ from the frozen ones, and {due:.1%} would with its "
            'adapters: they were not merged'
        )
    return {'sampler/checksum': int(checksum), 'sampler/merged_share': float(share)}


def _mean(values):
    """The mean of those of a part's rewards that are numbers; NaN where none is."""
    return np.nanmean(values) if np.isfinite(values).any() else np.nan


def plain_row(step: int, row: Mapping[str, Any]) -> dict[str, Any]:
    """A step's row as metrics.jsonl has it."""
    return {'step': step} | {name: json_float(value) for name, value in sorted(row.items())}


def json_float(value: Any) -> float | None:
    """A number as a float that JSON can hold; None for NaN and infinities."""
    value = float(value)
    return value if np.isfinite(value) else None


def read_rows(path: str | os.PathLike) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl file as dicts."""
    with open(path, encoding='utf8') as lines:
        return [json.loads(line) for line in lines]


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
