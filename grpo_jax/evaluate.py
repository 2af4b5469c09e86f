"""Evaluation with the training's own verifier: greedy accuracy, pass@k, maj@k. `python -m grpo_jax.evaluate`."""
import collections
from collections.abc import Callable
import json
import os
from typing import NamedTuple

from absl import flags
import jax
from ml_collections import ConfigDict
import numpy as np
import rich.console
import rich.table

from grpo_jax import checkpoint, data, experiment, metrics, program, rewards
from grpo_jax.distributed import placement, programs
from grpo_jax.errors import BadInput

NOISE = 0x5EED  # folded into the run's key: evaluation must not reuse training's noise


class Evaluator(NamedTuple):
    """The compiled programs and the prompts of an evaluation."""

    ex: experiment.Experiment
    dataset: data.Dataset
    greedy: Callable    # (params, Prompts, key, step) -> Rollout, one completion a prompt
    sampled: Callable   # the same with `samples` completions a prompt
    samples: int


def make(ex, samples):
    """Evaluator of an experiment over evaluation.prompts of its test split, spread evenly."""
    config = ex.config
    dataset = ex.load('test')
    chosen = np.unique(np.linspace(0, len(dataset.examples) - 1, config.evaluation.prompts).astype(int))
    dataset = data.pick(dataset, chosen)

    return Evaluator(ex, dataset, ex.sampler(1, temperature=0.0), ex.sampler(samples), samples)


def evaluate(evaluator, params):
    """Results by name, floats in [0, 1] but for reward and length; the same params give the same results.

    greedy: share of prompts whose argmax completion is correct. pass@1 and pass@k: unbiased estimates
    from the k sampled completions (arXiv 2107.03374, eq. 1). maj@k: share won by the most frequent
    extracted answer, ties counting their share of correct ones. Without a verifier there are only
    reward, length and truncated, of the sampled completions.
    """
    ex, k = evaluator.ex, evaluator.samples
    found = collections.defaultdict(list)
    for examples, greedy, sampled in _completions(evaluator, params):
        texts, truncated, lengths = sampled
        total, parts = rewards.score(ex.scorer, examples, texts, truncated)
        found['reward'] += np.nanmean(total.reshape(-1, k), 1).tolist()
        found['length'] += lengths.reshape(-1, k).mean(1).tolist()
        found['truncated'] += np.reshape(truncated, (-1, k)).mean(1).tolist()
        if not ex.scorer.verifier:
            continue
        correct = parts[ex.scorer.verifier].reshape(-1, k) >= 1
        answers = np.array([ex.scorer.extract(text) for text in texts], object).reshape(-1, k)
        first = rewards.score(ex.scorer, examples, greedy[0], greedy[1])[1][ex.scorer.verifier]
        found['greedy'] += (first >= 1).astype(float).tolist()
        found['pass@1'] += correct.mean(1).tolist()
        found[f'pass@{k}'] += [pass_at_k(k, int(row.sum()), k) for row in correct]
        found[f'maj@{k}'] += [majority(row, hits) for row, hits in zip(answers, correct, strict=True)]
    return {name: float(np.mean(values)) for name, values in found.items()}


def pass_at_k(n, correct, k):
    """1 - C(n - correct, k) / C(n, k): the chance that k of n samples hold a correct one."""
    if n - correct < k:
        return 1.0
    return 1.0 - float(np.prod(1.0 - k / np.arange(n - correct + 1, n + 1)))


def majority(answers, correct):
    """Share of correctness of the most frequent answer; None answers do not vote, ties are shared evenly."""
    votes = collections.Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    top = max(votes.values())
    winners = [answer for answer, count in votes.items() if count == top]
    right = {answer for answer, hit in zip(answers, correct, strict=True) if hit}
    return sum(winner in right for winner in winners) / len(winners)


def table(path):
    """Prints the first and the last row of an evaluations.jsonl side by side."""
    rows = metrics.read(path)
    first, last = rows[0], rows[-1]
    shown = rich.table.Table(title='held-out prompts')
    for name in ('', f'step {first["step"]}', f'step {last["step"]}', 'change'):
        shown.add_column(name, justify='right')
    for name in [n for n in first if n != 'step']:
        shown.add_row(name, f'{first[name]:.3f}', f'{last[name]:.3f}', f'{last[name] - first[name]:+.3f}')
    rich.console.Console().print(shown)


def _completions(evaluator, params):
    """Yields (examples, greedy completions, sampled completions) by batches of prompts_per_step."""
    ex, dataset = evaluator.ex, evaluator.dataset
    size = ex.config.data.prompts_per_step
    key = jax.random.fold_in(ex.key, NOISE)
    for start in range(0, len(dataset.examples), size):
        real = min(size, len(dataset.examples) - start)
        chosen = [start + i if i < real else start for i in range(size)]
        examples, prompts = data.prompts(dataset, chosen, ex.config.data.max_prompt_tokens, ex.pad_token)
        prompts = placement.put_rows(prompts, ex.mesh)
        both = [sample(params, prompts, key, 0) for sample in (evaluator.greedy, evaluator.sampled)]
        greedy, sampled = (metrics.completions_of(ex.tokenizer, rollout) for rollout in both)
        keep = real * evaluator.samples
        yield examples[:real], [x[:real] for x in greedy], [x[:keep] for x in sampled]


def main():
    """The command: evaluates the newest checkpoint of a workdir, and prints and writes evaluation.json."""
    workdir, samples = flags.FLAGS.workdir, flags.FLAGS.samples
    ex = reopen(workdir)
    results = evaluate(make(ex, samples or ex.config.evaluation.samples), load_policy(ex))
    for name, value in results.items():
        print(f'{name:10s} {value:.4f}')
    checkpoint.write_json(os.path.join(workdir, 'evaluation.json'), results)


def reopen(workdir):
    """The Experiment of a workdir that a run has begun."""
    path = os.path.join(workdir, 'config.json')
    if not os.path.isfile(path):
        raise BadInput('--workdir', workdir, 'holds no run (no config.json)')
    with open(path, encoding='utf8') as file:
        config = ConfigDict(json.load(file))
    return experiment.enter(config, workdir, folder=os.path.join(workdir, 'model'))


def load_policy(ex):
    """The policy's parameters in the workdir's newest checkpoint, on the mesh."""
    params = programs.abstract_params(ex.c, ex.mesh)
    with checkpoint.manager(ex.workdir, keep=None) as checkpoints:
        return checkpoint.restore_params(checkpoints, params)


if __name__ == '__main__':
    flags.DEFINE_string('workdir', None, 'Folder of the run.', required=True)
    flags.DEFINE_integer('samples', 0, 'Completions a prompt; 0: evaluation.samples of the config.')
    program.run(main)
