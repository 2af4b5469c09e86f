"""Evaluates a run or a Hugging Face folder with the training's own verifier, prompts and template.

Examples:
    python -m grpo_jax.evaluate --workdir=runs/arithmetic --samples=32
    python -m grpo_jax.evaluate --config=gsm8k --config.model.path=Qwen/Qwen3-0.6B --out=runs/qwen3
"""

from collections.abc import Callable, Iterator, Mapping
import functools
import json
import os
from typing import Any, NamedTuple

from absl import flags
import jax
import numpy as np

from grpo_jax import data, rewards
from grpo_jax.errors import BadInput
from grpo_jax.figures import (
    LEVEL,
    RESAMPLES,
    Completions,
    Judged,
    compute_figures,
    judge,
    summarize,
    summarize_by_subject,
)
from grpo_jax.hosts import files, json_file, processes
from grpo_jax.run import checkpoint, cli, measure, recorded
from grpo_jax.run.console import console, make_table, show_tables
from grpo_jax.run.experiment import Experiment, open_experiment
from grpo_jax.run.rows import json_float
from grpo_jax.sampler import programs
from grpo_jax.sharding import batches
from grpo_jax.sharding.mesh import ROW_AXES
from grpo_jax.text import columns, cut, during
from grpo_jax.types import Rollout

FREE_CACHE = 2**26  # bytes of keys and values on a device that an evaluation may take however small a step is
# fields of Sampling that a report leaves out
UNRECORDED = ('thinking_text', 'cache_bytes', 'kernels', 'greedy', 'lora')
NOISE = 0x5EED  # folded into the run's key: evaluation must not reuse training's noise
TIES = 'maj@k: share of correct ones among the most frequent answers; a tie is a fair draw, unread answers do not vote'


class Evaluator(NamedTuple):
    """The compiled programs and the prompts of an evaluation."""

    experiment: Experiment
    split: str
    dataset: data.Dataset
    shapes: batches.Shapes  # of a batch: `samples` completions a prompt, and then a greedy one
    sample: Callable  # (params, Prompts, key, step) -> Rollout
    samples: int


def make(experiment: Experiment, samples: int, split: str = 'test') -> Evaluator:
    """Evaluator of an experiment over evaluation.prompts of a split, spread evenly."""
    if samples < 1:
        raise BadInput('evaluation.samples', samples, 'must be at least 1')
    dataset = experiment.load(split)
    rewards.check_parameters(experiment.reward_functions, dataset.examples)
    dataset = data.pick(dataset, data.spread(len(dataset.examples), experiment.config.evaluation.prompts))
    shapes = batch_shapes(experiment, samples, len(dataset.examples))
    return Evaluator(experiment, split, dataset, shapes, experiment.sampler(shapes, greedy=1), samples)


def batch_shapes(experiment: Experiment, samples: int, prompts: int) -> batches.Shapes:
    """The Shapes of as many of the prompts as are evaluated at once: `samples` completions and a greedy one of each."""
    return shapes_at_once(experiment, samples + 1, prompts)


def shapes_at_once(experiment: Experiment, group_size: int, prompts: int) -> batches.Shapes:
    """The Shapes of as many of the prompts as are sampled at once.

    All of them are, if their keys and values need no more memory than rollout.cache_gib, or, where that is no limit,
    than those of a step's rollout or FREE_CACHE.
    """
    settings, mesh, sampling = experiment.settings, experiment.mesh, experiment.sampling

    def cache_bytes(count, size):
        return programs.cache_bytes(experiment.model_config, mesh, experiment.shapes(count, size), sampling)

    step = settings.data.prompts_per_step, settings.group_size
    budget = sampling.cache_bytes or max(cache_bytes(*step), FREE_CACHE)
    least = batches.devices_along(mesh, ROW_AXES)
    most = max(budget // cache_bytes(least, group_size), 1) * least
    rollouts = -(-prompts // most)
    at_once = -(-prompts // (rollouts * least)) * least
    return experiment.shapes(at_once, group_size)


def rollouts(
    experiment: Experiment, dataset: data.Dataset, prompts: int, sample: Callable, key: Any
) -> Iterator[tuple[range, Rollout]]:
    """Yields (indices, Rollout) of so many prompts of a data set at once, in order.

    Rows behind those of the indices fill up the last one. sample is (Prompts, key, step) -> Rollout.
    """
    for start in range(0, len(dataset.examples), prompts):
        real = range(start, min(start + prompts, len(dataset.examples)))
        chosen = [*real, *[start] * (prompts - len(real))]
        _, asked = data.prompts(dataset, chosen, experiment.config.data.max_prompt_tokens, experiment.pad_token)
        yield real, sample(batches.put_rows(asked, experiment.mesh), key, 0)


def evaluate(evaluator: Evaluator, params: Any) -> dict[str, float]:
    """Means by name of the figures that any prompt has; the same params give the same results.

    The console shows the first prompt's greedy completion.
    """
    greedy, sampled = complete(evaluator, params)
    if processes.speaks():
        example = evaluator.dataset.examples[0]
        asked = example.prompt or evaluator.experiment.tokenizer.decode(evaluator.dataset.tokens[0])
        console.print(sample_line(asked, example.answer, greedy.rewarded, console.width))
    figures = compute_figures(greedy, sampled)
    return {name: float(np.nanmean(values)) for name, values in figures.items() if np.isfinite(values).any()}


def sample_line(prompt: str, answer: str, rewarded: rewards.Rewards, width: int) -> str:
    """One line of at most `width` columns: a prompt, the first completion of `rewarded`, and its verdict."""
    verdict = {1.0: 'right', 0.0: f'wrong, the answer is {cut(str(answer), 20)}'}.get(float(rewarded.correct[0]))
    verdict = f' ({verdict or f"reward {rewarded.rewards[0]:.3g}"})'
    room = width - columns(verdict) - len('sample:  -> ')
    asked = cut(prompt, room // 2)
    return f'sample: {asked} -> {cut(rewarded.texts[0], room - columns(asked))}{verdict}'


def complete(evaluator: Evaluator, params: Any) -> tuple[Judged, Judged]:
    """The greedy completions, one a prompt, and the sampled ones, both judged."""
    experiment, dataset = evaluator.experiment, evaluator.dataset
    size, group = evaluator.shapes.prompts, evaluator.shapes.group_size
    key = jax.random.fold_in(experiment.key, NOISE)
    greedy, sampled = Completions([], [], []), Completions([], [], [])
    with during('evaluating', len(dataset.examples)) as evaluating:
        for indices, rollout in rollouts(experiment, dataset, size, functools.partial(evaluator.sample, params), key):
            every = measure.decode_completions(experiment.tokenizer, rollout)
            for values, greedy_values, sampled_values in zip(every, greedy, sampled, strict=True):
                groups = [values[row : row + group] for row in range(0, len(indices) * group, group)]
                greedy_values.extend(values[-1] for values in groups)
                sampled_values.extend(value for values in groups for value in values[:-1])
            evaluating.done = indices.stop
        functions = experiment.reward_functions
        evaluating.enter('judging')
        judged = judge(functions, dataset.examples, greedy), judge(functions, dataset.examples, sampled)
        evaluating.result = f'evaluated {len(dataset.examples)} prompts'
    return judged


def report(evaluator: Evaluator, params: Any, model: dict[str, Any]) -> tuple[dict[str, Any], Iterator[dict]]:
    """(content of evaluation.json, rows of completions.jsonl) of a policy; `model` names the policy."""
    experiment, dataset, config = evaluator.experiment, evaluator.dataset, evaluator.experiment.config
    greedy, sampled = complete(evaluator, params)
    figures = compute_figures(greedy, sampled)
    content = {
        'model': model,
        'data': config.data.to_dict(),
        'origins': [origin._asdict() for origin in experiment.settings.data.origins if any(origin)],
        'split': evaluator.split,
        'prompts': len(dataset.examples),
        'first_prompt': experiment.tokenizer.decode(dataset.tokens[0]),
        'seed': config.seed,
        'samples': evaluator.samples,
        'sampling': {name: value for name, value in experiment.sampling._asdict().items() if name not in UNRECORDED},
        'reward': config.reward.to_dict(),
        'verifier': experiment.reward_functions.verifiers,
        'ties': TIES,
        'intervals': {'level': LEVEL, 'over': 'prompts', 'shares': 'Wilson', 'others': f'bootstrap of {RESAMPLES}'},
        'figures': summarize(figures, config.seed),
        'tables': summarize_by_subject(figures, dataset.examples, config.seed),
    }
    return content, _rows(experiment.tokenizer, dataset, {'greedy': greedy, 'sampled': sampled})


def _rows(tokenizer, dataset, judged):
    """One dict a completion, with its prompt as the model saw it, its reward and its verdict."""
    for index, (example, tokens) in enumerate(zip(dataset.examples, dataset.tokens, strict=True)):
        prompt = tokenizer.decode(tokens)
        for decoding, (rewarded, answers, correct, _) in judged.items():
            samples = len(rewarded.texts) // len(dataset.examples)
            for sample in range(samples):
                row = index * samples + sample
                yield {
                    'id': example.id,
                    'prompt': prompt,
                    'answer': example.answer,
                    'decoding': decoding,
                    'sample': sample,
                    'completion': rewarded.texts[row],
                    'length': int(rewarded.lengths[row]),
                    'truncated': bool(rewarded.truncated[row]),
                    'reward': json_float(rewarded.rewards[row]),
                    'parts': {name: json_float(x[row]) for name, x in rewarded.parts.items()},
                    'failed': [name for name, failed in rewarded.failures.items() if failed[row]],
                    'extracted': answers[''][index, sample] if '' in answers else None,
                    **{f'{prefix}correct': _verdict(hits[index, sample]) for prefix, hits in correct.items()},
                }


def _verdict(hit):
    """A verdict as JSON has it; None where the source of the prompt has no such verifier."""
    return None if hit is None else bool(hit)


def print_report(content: dict[str, Any]) -> None:
    """Prints the figures with their intervals, strict beside lenient, and the tables by subject."""
    every, samples, interval = content['figures'], content['samples'], f'{LEVEL:.0%} interval'
    strict = {name.removeprefix('strict/'): value for name, value in every.items() if name.startswith('strict/')}
    show_tables(
        f'{content["prompts"]} {content["split"]} prompts, {samples} samples at temperature '
        f'{content["sampling"]["temperature"]}, verifier {content["verifier"] or "none"}',
        make_table(
            ['', 'mean', interval, *(['strict', interval] if strict else [])],
            [
                [name, *_cells(every, name), *(_cells(strict, name) if strict else ())]
                for name in every
                if not name.startswith('strict/')
            ],
        ),
        *([TIES] if content['verifier'] else []),
    )
    names = ['reward', 'length', 'truncated']
    if content['verifier']:
        names = [
            name for name in dict.fromkeys(['greedy', 'pass@1', f'pass@{samples}', f'maj@{samples}']) if name in every
        ]
    for field, groups in content['tables'].items():
        rows = [
            [value, str(group['prompts']), *(' '.join(_cells(group['figures'], name, digits=2)) for name in names)]
            for value, group in groups.items()
        ]
        show_tables(make_table([field, 'prompts', *names], rows, title=f'by {field}'))


def _cells(summary, name, digits=3):
    """Texts of a figure's value and interval, empty without it."""
    if name not in summary:
        return '', ''
    mean, low, high = (f'{summary[name][key]:.{digits}f}' for key in ('mean', 'low', 'high'))
    return mean, f'{low} to {high}'


def reopen(workdir: str, trust: bool = False, functions: Mapping | None = None) -> Experiment:
    """The Experiment of a workdir in which a run was started; functions: as train.run has had them.

    trust: the code that the recorded config names may run; without it, a config that names some is BadInput.
    """
    config = recorded.read_recorded(workdir, trust)
    return open_experiment(config, workdir, folder=files.inside(workdir, 'model'), functions=functions)


def load_policy(experiment: Experiment) -> Any:
    """The policy's parameters in the workdir's newest sound checkpoint, on the mesh."""
    return load_policy_and_step(experiment)[0]


def load_policy_and_step(experiment: Experiment) -> tuple[Any, int]:
    """As load_policy, and the checkpoint's step."""
    trained, step = checkpoint.read_params(experiment.workdir, experiment.abstract_trained())
    return checkpoint.with_frozen(experiment, trained, checkpoint.path_of(experiment.workdir, step)), step


class Policy(NamedTuple):
    """A policy that is to complete prompts."""

    experiment: Experiment
    load: Callable  # () -> (parameters on the mesh, {what names the policy})


def open_policy(config: Any, workdir: str | None, out: str | None, trust: bool = False) -> Policy:
    """The Policy of the newest checkpoint of a run's workdir (trust: see reopen), or else of the weights in model.path.

    Without workdir, config says what it completes and how that is judged, and out is the folder of what comes of it.
    """
    if (config is None) == (workdir is None):
        raise BadInput(
            '--workdir',
            workdir,
            'give the folder of a run; or, without it, --config, and the Hugging Face folder in model.path',
        )
    if workdir is not None:
        run = reopen(workdir, trust)

        def load_run():
            params, step = load_policy_and_step(run)
            return params, {'workdir': workdir, 'step': step}

        return Policy(run, load_run)
    if config.model.random_init:
        raise BadInput('model.random_init', True, 'would take random weights; set it to False')
    experiment = open_experiment(config, out or '')
    adapters_path = experiment.settings.model.lora.path
    model = {'path': config.model.path} | ({'adapters': adapters_path} if adapters_path else {})
    return Policy(experiment, lambda: (experiment.params(), model))


def report_policy(policy: Policy, samples: int, split: str) -> tuple[dict[str, Any], Iterator[dict]]:
    """The report of a policy; samples 0: evaluation.samples of its config."""
    experiment = policy.experiment
    evaluator = make(experiment, samples or experiment.config.evaluation.samples, split)
    params, model = policy.load()
    with experiment.reward_functions:
        return report(evaluator, params, model)


def run(config: Any, workdir: str | None, out: str | None, samples: int, split: str, trust: bool = False) -> None:
    """Evaluates the run in workdir (trust: see reopen), or else the folder in config.model.path; prints the figures.

    Writes evaluation.json and completions.jsonl to the new folder out, or without it to workdir.
    """
    folder = out or workdir
    if folder is None:
        raise BadInput('--out', out, 'name a new folder for the results of --config; or --workdir, to evaluate a run')
    if out and os.path.exists(out):
        raise BadInput('--out', out, 'exists; name a new folder, nothing is overwritten')
    content, rows = report_policy(open_policy(config, workdir, out, trust), samples, split)
    if not processes.is_first():
        return
    os.makedirs(folder, exist_ok=True)
    with files.atomic_write(os.path.join(folder, 'completions.jsonl')) as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + '\n' for row in rows)
    json_file.write(os.path.join(folder, 'evaluation.json'), content)
    print_report(content)


def main() -> None:
    """The command."""
    values = flags.FLAGS
    run(values.config, values.workdir, values.out, values.samples, values.split, values.trust)


if __name__ == '__main__':
    cli.define_flags(required=False)
    cli.define_trust()
    flags.DEFINE_string('out', None, "New folder for the results; a run's own folder without it.")
    flags.DEFINE_integer('samples', 0, 'Completions a prompt; 0: evaluation.samples of the config.', lower_bound=0)
    flags.DEFINE_enum('split', 'test', ['test', 'train'], 'Of the data.')
    cli.run(main)
