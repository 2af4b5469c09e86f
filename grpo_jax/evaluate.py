"""Evaluation with the training's own verifier, prompts and template. `python -m grpo_jax.evaluate`.

--workdir=runs/x [--samples=32]                                         the newest checkpoint of a run
--config=configs/gsm8k.py --config.model.path=FOLDER --out=DIR          any Hugging Face folder
"""

from collections.abc import Callable
import functools
import json
import os
import sys
from typing import NamedTuple

from absl import flags
import jax
from ml_collections import ConfigDict
import numpy as np
import rich.console
import rich.table

from grpo_jax import data, rewards, statistics
from grpo_jax.errors import BadInput
from grpo_jax.hosts import json_file, processes
from grpo_jax.models import transformer
from grpo_jax.run import checkpoint, cli, metrics
from grpo_jax.run.experiment import Experiment, open_experiment
from grpo_jax.sharding import batches, compiled

NOISE = 0x5EED  # folded into the run's key: evaluation must not reuse training's noise
LEVEL = 0.95  # of intervals
RESAMPLES = 2000
SUBJECTS = ('subject', 'level', 'source')  # fields of Example.meta that have a table
UNRECORDED = ('thinking_text', 'cache_bytes', 'kernels')  # fields of Sampling that a report leaves out
TIES = 'maj@k: share of correct ones among the most frequent answers; a tie is a fair draw, unread answers do not vote'


class Evaluator(NamedTuple):
    """The compiled programs and the prompts of an evaluation."""

    experiment: Experiment
    split: str
    dataset: data.Dataset
    greedy: Callable  # (params, Prompts, key, step) -> Rollout, one completion a prompt
    sampled: Callable  # the same with `samples` completions a prompt
    samples: int


class Verdicts(NamedTuple):
    """What came of n completions of each of N prompts."""

    rewarded: rewards.Rewards  # of N * n rows
    answers: np.ndarray  # str or None [N, n]: what the verifier read
    correct: dict[str, np.ndarray]  # bool[N, n] by the prefix of its figures: '' and, where there is one, 'strict/'


def make(experiment, samples, split='test'):
    """Evaluator of an experiment over evaluation.prompts of a split, spread evenly."""
    for name, value in [('evaluation.samples', samples), ('evaluation.prompts', experiment.config.evaluation.prompts)]:
        if value < 1:
            raise BadInput(name, value, 'must be at least 1')
    dataset = experiment.load(split)
    dataset = data.pick(dataset, data.spread(len(dataset.examples), experiment.config.evaluation.prompts))
    return Evaluator(experiment, split, dataset, *samplers(experiment, samples), samples)


def samplers(experiment, samples):
    """(greedy sampler of one completion a prompt, sampler of `samples` of them) of an experiment."""
    return experiment.sampler(1, temperature=0.0), experiment.sampler(samples)


def evaluate(evaluator, params):
    """Results by name, those of figures that any prompt has; the same params give the same results."""
    found = figures(*completed(evaluator, params))
    return {name: float(np.nanmean(values)) for name, values in found.items() if np.isfinite(values).any()}


def completed(evaluator, params):
    """The Verdicts of the greedy completions, one a prompt, and of the sampled ones."""
    experiment, dataset = evaluator.experiment, evaluator.dataset
    size, key = experiment.config.data.prompts_per_step, jax.random.fold_in(experiment.key, NOISE)
    both = [(evaluator.greedy, 1, ([], [], [])), (evaluator.sampled, evaluator.samples, ([], [], []))]
    for start in range(0, len(dataset.examples), size):
        real = min(size, len(dataset.examples) - start)
        chosen = [start + i if i < real else start for i in range(size)]
        _, prompts = data.prompts(dataset, chosen, experiment.config.data.max_prompt_tokens, experiment.pad_token)
        prompts = batches.put_rows(prompts, experiment.mesh)
        for sample, count, columns in both:
            completions = metrics.completions_of(experiment.tokenizer, sample(params, prompts, key, 0))
            for column, values in zip(columns, completions, strict=True):
                column += list(values[: real * count])
    return tuple(judge(experiment.reward_functions, dataset.examples, *columns) for _, _, columns in both)


def judge(reward_functions, examples, texts, truncated, lengths):
    """Verdicts of N * n completions; what the verifier cannot score, or fails at, counts as wrong."""
    rewarded = _scored(reward_functions, examples, texts, truncated, lengths)
    shape, correct = (len(examples), -1), {}
    answers = np.full(len(texts), None)
    if reward_functions.verifier:
        answers[:] = [reward_functions.extract(text) for text in texts]
        correct[''] = rewarded.parts[reward_functions.verifier].reshape(shape) >= 1
    if reward_functions.strict:
        alone = reward_functions._replace(
            parts={'strict': rewards.Part(reward_functions.strict, 1.0)}, verifier='strict'
        )
        strict = _scored(alone, examples, texts, truncated, lengths)
        correct['strict/'] = strict.parts['strict'].reshape(shape) >= 1
    return Verdicts(rewarded, answers.reshape(shape), correct)


def _scored(reward_functions, *columns):
    return processes.by_group(functools.partial(rewards.compute_rewards, reward_functions), *columns)


def figures(greedy, sampled):
    """f64[N] by name: one number a prompt, NaN where there is none.

    With a verifier: greedy (is the argmax completion correct), pass@k for powers of two up to the n samples, and for n,
    maj@n (statistics.majority), and unparsed (no answer could be read). Always: reward, length in tokens, truncated,
    and failed (a part of the reward ran out of time or memory). strict/ goes before figures of the verifier's stricter
    reading, greedy/ before those of greedy completions; the others are of the samples.
    """
    found = {}
    for prefix, correct in sampled.correct.items():
        n = correct.shape[1]
        found[f'{prefix}greedy'] = greedy.correct[prefix][:, 0].astype(float)
        for k in sorted({2**i for i in range(n.bit_length())} | {n}):
            found[f'{prefix}pass@{k}'] = statistics.pass_at_k(correct, k)
        found[f'{prefix}maj@{n}'] = statistics.majority(sampled.answers, correct)
    for prefix, (rewarded, answers, correct) in [('', sampled), ('greedy/', greedy)]:
        rows = {
            'reward': rewarded.rewards,
            'length': rewarded.lengths,
            'truncated': rewarded.truncated,
            'failed': np.any(list(rewarded.failures.values()), 0),
        }
        if correct:
            rows['unparsed'] = np.equal(answers, None)
        found |= {prefix + name: statistics.average(np.reshape(values, answers.shape)) for name, values in rows.items()}
    return found


def summary(found, seed, rows=slice(None)):
    """{'mean', 'low', 'high'} by name of the figures that any of the rows has: the value, and its interval."""
    found = {name: values[rows] for name, values in found.items() if np.isfinite(values[rows]).any()}
    low, high = statistics.bootstrap(np.stack(list(found.values()), 1), level=LEVEL, resamples=RESAMPLES, seed=seed)
    return {
        name: {'mean': float(np.nanmean(values)), 'low': float(low[i]), 'high': float(high[i])}
        for i, (name, values) in enumerate(found.items())
    }


def by_subject(found, examples, seed):
    """field -> value -> {'prompts', 'figures'} for the fields of SUBJECTS that divide the examples; see summary."""
    tables = {}
    for field in SUBJECTS:
        rows = {}
        for row, example in enumerate(examples):
            if example.meta.get(field) is not None:
                rows.setdefault(str(example.meta[field]), []).append(row)
        if 1 < len(rows) < len(examples):
            tables[field] = {
                value: {'prompts': len(rows[value]), 'figures': summary(found, seed, rows[value])}
                for value in sorted(rows)
            }
    return tables


def report(evaluator, params, model):
    """(the content of evaluation.json, the rows of completions.jsonl) of the policy; model says which one it is."""
    experiment, dataset, config = evaluator.experiment, evaluator.dataset, evaluator.experiment.config
    greedy, sampled = completed(evaluator, params)
    found = figures(greedy, sampled)
    content = {
        'model': model,
        'data': config.data.to_dict(),
        'split': evaluator.split,
        'prompts': len(dataset.examples),
        'first_prompt': experiment.tokenizer.decode(dataset.tokens[0]),
        'seed': config.seed,
        'samples': evaluator.samples,
        'sampling': {name: value for name, value in experiment.sampling()._asdict().items() if name not in UNRECORDED},
        'reward': config.reward.to_dict(),
        'verifier': experiment.reward_functions.verifier,
        'ties': TIES,
        'intervals': {'level': LEVEL, 'resamples': RESAMPLES, 'over': 'prompts'},
        'figures': summary(found, config.seed),
        'tables': by_subject(found, dataset.examples, config.seed),
    }
    return content, _rows(experiment.tokenizer, dataset, {'greedy': greedy, 'sampled': sampled})


def _rows(tokenizer, dataset, verdicts):
    """One dict a completion, with its prompt as the model saw it and what was made of it."""
    for index, (example, tokens) in enumerate(zip(dataset.examples, dataset.tokens, strict=True)):
        prompt = tokenizer.decode(tokens)
        for decoding, (rewarded, answers, correct) in verdicts.items():
            for sample, answer in enumerate(answers[index]):
                row = index * answers.shape[1] + sample
                yield {
                    'id': example.id,
                    'prompt': prompt,
                    'answer': example.answer,
                    'decoding': decoding,
                    'sample': sample,
                    'completion': rewarded.texts[row],
                    'length': int(rewarded.lengths[row]),
                    'truncated': bool(rewarded.truncated[row]),
                    'reward': metrics.round_trip(rewarded.rewards[row]),
                    'parts': {name: metrics.round_trip(x[row]) for name, x in rewarded.parts.items()},
                    'failed': [name for name, failed in rewarded.failures.items() if failed[row]],
                    'extracted': answer,
                    **{f'{prefix}correct': bool(hits[index, sample]) for prefix, hits in correct.items()},
                }


def show(content):
    """Prints the figures with their intervals, strict beside lenient, and the tables by subject."""
    console = rich.console.Console(width=None if sys.stdout.isatty() else 120)  # a pipe has no width of its own
    every, samples, interval = content['figures'], content['samples'], f'{LEVEL:.0%} interval'
    strict = {name.removeprefix('strict/'): value for name, value in every.items() if name.startswith('strict/')}
    console.print(
        f'{content["prompts"]} {content["split"]} prompts, {samples} samples at temperature '
        f'{content["sampling"]["temperature"]}, verifier {content["verifier"] or "none"}',
        highlight=False,
    )
    shown = _table('', '', 'mean', interval, *(['strict', interval] if strict else []))
    for name in every:
        if not name.startswith('strict/'):
            shown.add_row(name, *_cells(every, name), *(_cells(strict, name) if strict else ()))
    console.print(shown)
    if content['verifier']:
        console.print(TIES, highlight=False)
    heads = dict.fromkeys(
        ['greedy', 'pass@1', f'pass@{samples}', f'maj@{samples}']
        if content['verifier']
        else ['reward', 'length', 'truncated']
    )
    for field, groups in content['tables'].items():
        shown = _table(f'by {field}', field, 'prompts', *heads)
        for value, group in groups.items():
            cells = [' '.join(_cells(group['figures'], name, digits=2)) for name in heads]
            shown.add_row(value, str(group['prompts']), *cells)
        console.print(shown)


def _table(title, *headings):
    shown = rich.table.Table(title=title or None)
    for heading in headings:
        shown.add_column(heading, justify='right', no_wrap=True)
    return shown


def _cells(found, name, digits=3):
    """Texts of a figure's value and interval, empty without it."""
    if name not in found:
        return '', ''
    mean, low, high = (f'{found[name][key]:.{digits}f}' for key in ('mean', 'low', 'high'))
    return mean, f'{low} to {high}'


def table(path):
    """Prints the first and the last row of an evaluations.jsonl side by side; the first process does."""
    if not processes.is_first():
        return
    rows = metrics.read(path)
    first, last = rows[0], rows[-1]
    shown = _table('held-out prompts', '', f'step {first["step"]}', f'step {last["step"]}', 'change')
    for name in [n for n in first if n != 'step' and n in last]:
        shown.add_row(name, f'{first[name]:.3f}', f'{last[name]:.3f}', f'{last[name] - first[name]:+.3f}')
    rich.console.Console().print(shown)


def reopen(workdir):
    """The Experiment of a workdir that a run has begun."""
    path = os.path.join(workdir, 'config.json')
    if not os.path.isfile(path):
        raise BadInput('--workdir', workdir, 'holds no run (no config.json)')
    config = ConfigDict(json_file.read(path))
    return open_experiment(config, workdir, folder=os.path.join(workdir, 'model'))


def load_policy(experiment):
    """The policy's parameters in the workdir's newest checkpoint, on the mesh."""
    params = compiled.abstract_params(transformer.param_table(experiment.model_config), experiment.mesh)
    with checkpoint.manager(experiment.workdir, keep=None) as checkpoints:
        return checkpoint.restore_params(checkpoints, params)


def of_run(workdir, samples, split):
    """report of the newest checkpoint of a workdir; samples 0: evaluation.samples of its config."""
    experiment = reopen(workdir)
    evaluator = make(experiment, samples or experiment.config.evaluation.samples, split)
    params = load_policy(experiment)
    with checkpoint.manager(workdir, keep=None) as checkpoints:
        return report(evaluator, params, {'workdir': workdir, 'step': checkpoints.latest_step()})


def of_folder(config, out, samples, split):
    """report of the weights in config.model.path as they are, judged as in training by this config; see of_run."""
    if config.model.random_init:
        raise BadInput('model.random_init', True, 'would evaluate random weights; set it to False')
    experiment = open_experiment(config, out)
    evaluator = make(experiment, samples or config.evaluation.samples, split)
    return report(evaluator, experiment.params(), {'path': config.model.path})


def run(config, workdir, out, samples, split):
    """Evaluates the run in workdir, or else the folder in config.model.path; prints the figures.

    Writes evaluation.json and completions.jsonl to the new folder out, or without it to workdir.
    """
    if (config is None) == (workdir is None):
        raise BadInput(
            '--workdir',
            workdir,
            'give the folder of a run; or, without it, --config and --out, to '
            'evaluate the Hugging Face folder in model.path',
        )
    if config is not None and not out:
        raise BadInput('--out', out, 'name a new folder for the results')
    if out and os.path.exists(out):
        raise BadInput('--out', out, 'exists; name a new folder, nothing is overwritten')
    content, rows = of_folder(config, out, samples, split) if workdir is None else of_run(workdir, samples, split)
    if not processes.is_first():
        return
    folder = out or workdir
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, 'completions.jsonl'), 'w', encoding='utf8') as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + '\n' for row in rows)
    json_file.write(os.path.join(folder, 'evaluation.json'), content)
    show(content)


def main():
    """The command."""
    run(**{name: flags.FLAGS[name].value for name in ('config', 'workdir', 'out', 'samples', 'split')})


if __name__ == '__main__':
    cli.define_flags(required=False)
    flags.DEFINE_string('out', None, "New folder for the results; a run's own folder without it.")
    flags.DEFINE_integer('samples', 0, 'Completions a prompt; 0: evaluation.samples of the config.', lower_bound=0)
    flags.DEFINE_enum('split', 'test', ['test', 'train'], 'Of the data.')
    cli.run(main)
