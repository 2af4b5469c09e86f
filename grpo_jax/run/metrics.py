"""What a run writes down: metrics.jsonl, timings.jsonl, TensorBoard, rollout dumps; and how far it is."""

from collections.abc import Iterable, Mapping, Sequence
import contextlib
import json
import os
from typing import Any

from jaxtyping import Bool, Int
import numpy as np

from grpo_jax import activity
from grpo_jax.hosts import processes
from grpo_jax.hosts.files import atomic_write
from grpo_jax.rewards import Rewards
from grpo_jax.run import events
from grpo_jax.sharding import chips
from grpo_jax.types import Example, Experience, Rollout


def open_writer(
    workdir: str, first_step: int, steps: int, title: str, shown: Sequence[str] = ('reward', 'length')
) -> 'Writer | SilentWriter':
    """The first process's Writer, or a SilentWriter in the others; `shown` names metrics that the console shows."""
    return Writer(workdir, first_step, steps, title, shown) if processes.is_first() else SilentWriter()


class Writer:
    """Writes one row a step; on resume the rows from first_step on are dropped, so that none repeats.

    A context manager: its end closes every file, also after an exception.

    metrics.jsonl holds only what is a function of config and seed, so that a resumed run's file equals an
    uninterrupted one's; times go to timings.jsonl.
    """

    def __init__(self, workdir, first_step, steps, title, shown):
        from tensorboardX import SummaryWriter  # a second, where torch is installed

        self._shown = shown
        self._rollouts = os.path.join(workdir, 'rollouts')
        os.makedirs(self._rollouts, exist_ok=True)
        self._metrics = _reopen(os.path.join(workdir, 'metrics.jsonl'), first_step)
        self._timings = _reopen(os.path.join(workdir, 'timings.jsonl'), first_step)
        self._evaluations = _reopen(os.path.join(workdir, 'evaluations.jsonl'), first_step)
        events.cut(workdir, first_step)
        self._board = SummaryWriter(os.path.join(workdir, 'tensorboard'), purge_step=first_step)
        self._progress = contextlib.ExitStack()
        self._steps = self._progress.enter_context(activity.during(title, steps, first_step))
        self._expected = None  # tokens of a rollout: those of the last one

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def step(self, step: int, row: Mapping[str, Any], timings: Mapping[str, float]) -> None:
        """Appends a step's metrics and timings (seconds by stage), and shows them."""
        row = {'step': step} | {name: json_float(value) for name, value in sorted(row.items())}
        self._metrics.write(json.dumps(row) + '\n')
        self._timings.write(json.dumps({'step': step, **timings}) + '\n')
        _to_disk(self._metrics)
        _to_disk(self._timings)
        for name, value in (row | {f'seconds/{k}': v for k, v in timings.items()}).items():
            if value is not None and name != 'step':
                self._board.add_scalar(name, value, step)
        self._expected = row.get('tokens')
        shown = {name: f'{row[name]:.3f}' for name in self._shown if row.get(name) is not None}
        if 'tokens' in row:
            shown['tokens/s'] = f'{row["tokens"] / timings["sample"]:.0f}'
        self._steps.advance(step + 1, '  '.join(f'{name} {value}' for name, value in shown.items()))

    def stage(self, name: str) -> None:
        """Shows which stage of the step begins."""
        self._steps.enter(name)

    def sampling(self, tokens: int, live: int, slots: int) -> None:
        """Shows how far a rollout is: its tokens beside those of the last rollout, and the slots in use."""
        expected = f' of about {self._expected:.0f}' if self._expected else ''
        self._steps.stage = f'sample, {tokens}{expected} tokens, {live} of {slots} slots'

    def evaluation(self, step: int, results: Mapping[str, float]) -> None:
        """Appends the results of an evaluation before step `step`."""
        self._evaluations.write(json.dumps({'step': step, **results}) + '\n')
        _to_disk(self._evaluations)
        for name, value in results.items():
            self._board.add_scalar(f'evaluation/{name.replace("@", "_at_")}', value, step)

    def rollouts(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Writes the step's completions to rollouts/<step>.jsonl, one dict a completion."""
        path = os.path.join(self._rollouts, f'{step:06d}.jsonl')
        with atomic_write(path) as file:
            file.writelines([json.dumps(row, ensure_ascii=False) + '\n' for row in rows])

    def close(self) -> None:
        """Flushes and closes every file; a second call does nothing."""
        steps = self._steps
        if steps.done > steps.first:
            steps.result = f'{steps.text}: {steps.done} of {steps.total}, {steps.detail},'
        self._progress.close()
        self._metrics.close()
        self._timings.close()
        self._evaluations.close()
        self._board.close()


class SilentWriter:
    """Stands in for a Writer in all processes but the first: the same methods, which write nothing."""

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
    }


def sampler_speed(engine: Any) -> dict[str, float]:
    """Tokens a second of the last rollout, and the share of the memory bandwidth that it used where that is known."""
    if engine is None:
        return {}
    stats = engine.stats
    speed = {'sampler/tokens_per_second': stats.tokens / stats.seconds}
    chip = chips.lookup(engine.device_kind)
    if chip:
        speed['sampler/roofline'] = stats.bytes_read / chip.bandwidth / stats.seconds
    return speed


def rollout_rows(examples: Sequence[Example], rewarded: Rewards, experience: Experience) -> list[dict[str, Any]]:
    """One dict a completion, with its prompt, gold answer, rewards by part and advantage, for a dump.

    The advantage is one number where it is that of the whole completion, and a list with one for each of its tokens
    where it is by token.
    """
    group = len(rewarded.texts) // len(examples)
    advantages = processes.fetch(experience.advantages)
    return [
        {
            'id': examples[i // group].id,
            'prompt': examples[i // group].prompt,
            **({'messages': examples[i // group].messages} if examples[i // group].messages else {}),
            'answer': examples[i // group].answer,
            'completion': text,
            'reward': json_float(rewarded.rewards[i]),
            'correct': None if np.isnan(rewarded.correct[i]) else bool(rewarded.correct[i]),
            'parts': {name: json_float(values[i]) for name, values in rewarded.parts.items()},
            'advantage': _advantage(advantages[i], int(rewarded.lengths[i])),
        }
        for i, text in enumerate(rewarded.texts)
    ]


def _advantage(row, length):
    """The number of a completion, or the list of those of its tokens."""
    return json_float(row[0]) if len(row) == 1 else [json_float(value) for value in row[:length]]


def _mean(values):
    """The mean of those of a part's rewards that are numbers; NaN where none is."""
    return np.nanmean(values) if np.isfinite(values).any() else np.nan


def json_float(value: Any) -> float | None:
    """A number as a float that JSON can hold; None for NaN and infinities."""
    value = float(value)
    return value if np.isfinite(value) else None


def read_rows(path: str | os.PathLike) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl file as dicts."""
    with open(path, encoding='utf8') as lines:
        return [json.loads(line) for line in lines]


def _to_disk(file):
    """Makes what was written survive the machine; where a bucket is mounted, this is what uploads it."""
    file.flush()
    os.fsync(file.fileno())


def _reopen(path, first_step):
    """path opened for appending, cut to whole rows of steps before first_step."""
    earlier = []
    if os.path.exists(path):
        with open(path, encoding='utf8') as lines:
            for line in lines:
                # a killed run may leave half a row, which is always of a step not yet in a checkpoint
                if line.endswith('\n') and json.loads(line)['step'] < first_step:
                    earlier.append(line)
    with atomic_write(path) as file:
        file.writelines(earlier)
    return open(path, 'a', encoding='utf8')
