"""What a run writes down: metrics.jsonl, timings.jsonl, TensorBoard, rollout dumps, and the progress bar."""

import json
import os
import sys
import time

import numpy as np
import rich.progress
from tensorboardX import SummaryWriter

from grpo_jax.hosts import processes
from grpo_jax.sharding import chips


def writer(*arguments, **options):
    """Writer of the first process; what the others call in its place writes nothing."""
    return Writer(*arguments, **options) if processes.is_first() else Silence()


class Silence:
    """A Writer that writes nothing."""

    def __getattr__(self, name):
        return lambda *_: None


class Writer:
    """Writes one row a step; on resume the rows from first_step on are dropped, so that none repeats.

    metrics.jsonl holds only what is a function of config and seed, so that a resumed run's file equals an
    uninterrupted one's; times go to timings.jsonl.
    """

    def __init__(self, workdir, first_step, steps, title, shown=('reward', 'length')):
        self._shown = shown
        self._rollouts = os.path.join(workdir, 'rollouts')
        os.makedirs(self._rollouts, exist_ok=True)
        self._metrics = _reopen(os.path.join(workdir, 'metrics.jsonl'), first_step)
        self._timings = _reopen(os.path.join(workdir, 'timings.jsonl'), first_step)
        self._evaluations = _reopen(os.path.join(workdir, 'evaluations.jsonl'), first_step)
        self._board = SummaryWriter(os.path.join(workdir, 'tensorboard'), purge_step=first_step)
        self._progress = _Progress(first_step, steps, title)
        self._expected = None

    def step(self, step, row, timings):
        """Appends a step's metrics and timings (seconds by stage), and moves the progress bar."""
        row = {'step': step} | {name: round_trip(value) for name, value in sorted(row.items())}
        self._metrics.write(json.dumps(row) + '\n')
        self._timings.write(json.dumps({'step': step} | timings) + '\n')
        _to_disk(self._metrics)
        _to_disk(self._timings)
        for name, value in (row | {f'seconds/{k}': v for k, v in timings.items()}).items():
            if value is not None and name != 'step':
                self._board.add_scalar(name, value, step)
        self._expected = row.get('tokens')
        shown = {name: f'{row[name]:.3f}' for name in self._shown if row.get(name) is not None}
        if 'tokens' in row:
            shown['tokens/s'] = f'{row["tokens"] / timings["sample"]:.0f}'
        self._progress.step(step, '  '.join(f'{name} {value}' for name, value in shown.items()))

    def sampling(self, tokens, live, slots):
        """Shows how far a rollout is: its tokens, those of the last one for comparison, and the slots in use."""
        expected = f' of about {self._expected:.0f}' if self._expected else ''
        self._progress.show(f'sampling: {tokens}{expected} tokens, {live} of {slots} slots')

    def evaluation(self, step, results):
        """Appends the results of an evaluation before step `step`."""
        self._evaluations.write(json.dumps({'step': step} | results) + '\n')
        _to_disk(self._evaluations)
        for name, value in results.items():
            self._board.add_scalar(f'evaluation/{name.replace("@", "_at_")}', value, step)

    def rollouts(self, step, rows):
        """Writes the step's completions to rollouts/<step>.jsonl, one dict a completion."""
        path = os.path.join(self._rollouts, f'{step:06d}.jsonl')
        _write_whole(path, [json.dumps(row, ensure_ascii=False) + '\n' for row in rows])

    def close(self):
        """Flushes and closes every file and the progress bar."""
        self._progress.close()
        self._metrics.close()
        self._timings.close()
        self._evaluations.close()
        self._board.close()


def completions_of(tokenizer, rollout):
    """(texts, truncated bool[B], lengths i64[B]) of a rollout, on the host; special tokens are not shown."""
    tokens, mask, truncated = processes.fetch((rollout.tokens, rollout.completion_mask, rollout.truncated))
    tokens = tokens[:, -mask.shape[1] :]
    texts = tokenizer.batch_decode(
        [row[kept] for row, kept in zip(tokens, mask, strict=True)], skip_special_tokens=True
    )
    return texts, truncated, mask.sum(1)


def of_completions(rewarded):
    """Means of a rewards.Scored's parts and failures, and lengths and truncation, by name."""
    lengths = rewarded.lengths
    row = {f'reward/{name}': np.nanmean(values) for name, values in rewarded.parts.items()}
    row |= {f'reward_{name}': failed.mean() for name, failed in rewarded.failures.items()}
    return row | {
        'length': lengths.mean(),
        'length_p95': np.quantile(lengths, 0.95),
        'length_longest': lengths.max(),
        'truncated': rewarded.truncated.mean(),
        'tokens': lengths.sum(),
    }


def of_sampler(engine):
    """What the schedule of the last rollout was, by name; a function of the samples' lengths. {} without a sampler."""
    if engine is None:
        return {}
    stats = engine.stats
    return {
        'sampler/steps': stats.steps,
        'sampler/utilisation': stats.utilisation,
        'sampler/decode_batches': stats.decode_batches,
        'sampler/preempted': stats.preempted,
        'sampler/cache_mib': stats.peak_bytes / 2**20,
    }


def speed_of_sampler(engine):
    """Tokens a second of the last rollout, and the fraction of what memory bandwidth allows, where that is known."""
    if engine is None:
        return {}
    stats = engine.stats
    found = {'sampler/tokens_per_second': stats.tokens / stats.seconds}
    chip = chips.of(engine.device_kind)
    if chip:
        found['sampler/roofline'] = stats.bytes_read / chip.bandwidth / stats.seconds
    return found


def rollout_rows(examples, rewarded, experience):
    """One dict a completion, with its prompt, gold answer, rewards by part and advantage, for a dump."""
    group = len(rewarded.texts) // len(examples)
    advantages = processes.fetch(experience.advantages)
    owners = [examples[i // group] for i in range(len(rewarded.texts))]
    return [
        {
            'id': owners[i].id,
            'prompt': owners[i].prompt,
            'answer': owners[i].answer,
            'completion': text,
            'reward': round_trip(rewarded.rewards[i]),
            'parts': {name: round_trip(values[i]) for name, values in rewarded.parts.items()},
            'advantage': round_trip(advantages[i, 0]),
        }
        for i, text in enumerate(rewarded.texts)
    ]


class Stopwatch:
    """Seconds spent in named stages of one step."""

    def __init__(self):
        self.seconds = {}
        self._last = time.monotonic()

    def lap(self, name):
        """Adds the time since the last lap to stage `name`."""
        now = time.monotonic()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now


def round_trip(value):
    """value as a float that JSON can hold; None for NaN and infinities."""
    value = float(value)
    return value if np.isfinite(value) else None


def read(path):
    """The rows of a metrics.jsonl file as dicts."""
    with open(path, encoding='utf8') as lines:
        return [json.loads(line) for line in lines]


def _to_disk(file):
    """Makes what was written survive the machine; where a bucket is mounted, this is what uploads it."""
    file.flush()
    os.fsync(file.fileno())


def _reopen(path, first_step):
    """path opened for appending, cut to whole rows of steps before first_step."""
    kept = []
    if os.path.exists(path):
        with open(path, encoding='utf8') as lines:
            for line in lines:
                # a killed run may leave half a row, which is always of a step not yet in a checkpoint
                if line.endswith('\n') and json.loads(line)['step'] < first_step:
                    kept.append(line)
    _write_whole(path, kept)
    return open(path, 'a', encoding='utf8')


def _write_whole(path, lines):
    """Writes a file that is never seen half written."""
    with open(f'{path}.writing', 'w', encoding='utf8') as file:
        file.writelines(lines)
    os.replace(f'{path}.writing', path)


class _Progress:
    """A bar on a terminal, else a line every tenth of the run."""

    def __init__(self, first_step, steps, title):
        self._steps, self._title, self._begun = steps, title, time.monotonic()
        self._first, self._bar = first_step, None
        if sys.stderr.isatty():
            self._bar = rich.progress.Progress(
                rich.progress.TextColumn('{task.description}'),
                rich.progress.BarColumn(),
                rich.progress.MofNCompleteColumn(),
                rich.progress.TextColumn('{task.fields[shown]}'),
                rich.progress.TimeRemainingColumn(),
                console=rich.console.Console(stderr=True),
            )
            self._bar.start()
            self._task = self._bar.add_task(title, total=steps, completed=first_step, shown='')

    def step(self, step, text):
        if self._bar:
            self._bar.update(self._task, completed=step + 1, shown=text)
        elif (step + 1) % max(self._steps // 10, 1) == 0 or step + 1 == self._steps:
            elapsed = time.monotonic() - self._begun
            left = elapsed / (step + 1 - self._first) * (self._steps - step - 1)
            print(f'{self._title} {step + 1}/{self._steps}  {text}  {left:.0f} s left', file=sys.stderr, flush=True)

    def show(self, text):
        if self._bar:
            self._bar.update(self._task, shown=text)

    def close(self):
        if self._bar:
            self._bar.stop()
