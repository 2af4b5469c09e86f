"""Evaluates a run or a Hugging Face folder with the training's own verifier, prompts and template.

Examples:
    python -m grpo_jax.evaluate --workdir=runs/arithmetic --samples=32
    python -m grpo_jax.evaluate --config=gsm8k --config.model.path=Qwen/Qwen3-0.6B --out=runs/qwen3
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
import dataclasses
import json
import os
from typing import Any, NamedTuple

from absl import flags
import jax
import numpy as np

from grpo_jax import data, rewards
from grpo_jax.collect.draw import decode_completions
from grpo_jax.errors import NO_VALUE, BadInput
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
from grpo_jax.models.abstract import abstract_trained
from grpo_jax.rewards import gold
from grpo_jax.run import checkpoint, cli, config_file
from grpo_jax.run.console import console, make_table, show_tables
from grpo_jax.run.open import (
    NOWHERE,
    Run,
    check_context,
    make_policy,
    make_python_config,
    make_run_sampler,
    make_whole_policy,
    open_config,
    open_split,
)
from grpo_jax.run.rows import json_float
from grpo_jax.run.settings import Evaluation
from grpo_jax.sampler import programs
from grpo_jax.sampler.engine import Sampler
from grpo_jax.sampler.sampling import Sampling
from grpo_jax.sharding import batches
from grpo_jax.sharding import mesh as meshes
from grpo_jax.sharding.mesh import ROW_AXES
from grpo_jax.text import columns, during, exact_text, shorten
from grpo_jax.types import Prompts, Rollout

FREE_CACHE = 2**26  # bytes of keys and values on a device that an evaluation may always take
# fields of Sampling that evaluation.json leaves out
UNRECORDED = ('thinking_text', 'thinking_start', 'cache_bytes', 'kernels', 'greedy', 'lora')
NOISE = 0x5EED  # folded into the run's key: evaluation must not reuse training's noise
TIES = 'maj@n: share of correct ones among the most frequent answers; tied answers count alike, unread ones not at all'


class Evaluator(NamedTuple):
    """Evaluates policies on some prompts of a split: `evaluator(params)` returns figures by name."""

    split: str
    dataset: data.Dataset
    shapes: batches.Shapes  # of a batch: `samples` sampled completions a prompt, then one greedy completion
    engine: Sampler
    samples: int
    seed: int
    key: Any  # the sampler's random key
    tokenizer: Any
    reward_functions: rewards.RewardFunctions

    def __call__(self, params: Any) -> dict[str, float]:
        """Returns {figure: mean over prompts}, without figures that no prompt has. Prints one greedy completion.

        The same params give the same results.
        """
        greedy, sampled = complete(self, params)
        if processes.speaks():
            example = self.dataset.examples[0]
            prompt = example.prompt or exact_text(self.tokenizer, self.dataset.tokens[0])
            console.print(sample_line(prompt, example.answer, greedy.rewarded, console.width))
        figures = compute_figures(sampled, len(self.dataset.examples), greedy)
        return {name: float(np.nanmean(values)) for name, values in figures.items() if np.isfinite(values).any()}


def make_evaluator(run: Run, dataset: data.Dataset, split: str, samples: int = 0) -> Evaluator:
    """Returns a Run's Evaluator, with programs that are not compiled yet.

    dataset, split: the split and its name; samples: completions a prompt, 0 for evaluation.samples. The prompts are
    evaluation.prompts of the split, spread evenly. Raises BadInput for negative samples.
    """
    if samples < 0:
        raise BadInput('evaluation.samples', samples, 'must be at least 1; raise it')
    rewards.check_parameters(run.rewards, dataset.examples)
    settings, sampling = run.settings, run.settings.evaluation.sampling(run.settings.sampling)
    samples = samples or settings.evaluation.samples
    check_context(settings.data.max_prompt_tokens + sampling.max_tokens, run.model.folder, 'evaluation.max_tokens')
    dataset = data.pick(dataset, data.spread(len(dataset.examples), settings.evaluation.prompts))
    shapes = make_shapes(run, samples + 1, len(dataset.examples), sampling)
    run = dataclasses.replace(run, settings=settings._replace(sampling=sampling))
    engine = make_run_sampler(run, shapes, greedy=1)
    key = jax.random.fold_in(jax.random.key(settings.seed), NOISE)
    return Evaluator(
        dataset.split or split, dataset, shapes, engine, samples, settings.seed, key, run.model.tokenizer, run.rewards,
    )  # fmt: skip


def make_shapes(run: Run, group_size: int, prompts: int, sampling: Sampling | None = None) -> batches.Shapes:
    """Returns the Shapes of the prompts that are sampled at once: as many of `prompts` as the memory allows.

    sampling: of these prompts, in place of the rollouts'. Their keys and values may take rollout.cache_gib. Without
    that limit they may take as much as a training step's rollout, and at least FREE_CACHE.
    """
    training, mesh = run.settings, run.sides.sampler if run.sides else run.mesh
    settings = training._replace(sampling=sampling or training.sampling)

    def cache_bytes(settings, count, size):
        return programs.cache_bytes(run.model.config, mesh, settings.shapes(count, size), settings.sampling)

    step = training.data.prompts_per_step, training.group_size
    budget = training.sampling.cache_bytes or max(cache_bytes(training, *step), FREE_CACHE)
    least = batches.devices_along(mesh, ROW_AXES)
    most = max(budget // cache_bytes(settings, least, group_size), 1) * least
    rollouts = -(-prompts // most)
    at_once = -(-prompts // (rollouts * least)) * least
    return settings.shapes(at_once, group_size)


def sample_batches(
    dataset: data.Dataset,
    shapes: batches.Shapes,
    sampling: Sampling,
    put: Callable[[Prompts], Prompts],
    sample: Callable[[Prompts], Rollout],
) -> Iterator[tuple[range, Rollout]]:
    """Samples the prompts of a data set in order, in batches of shapes.prompts. Yields (indices, Rollout) of a batch.

    A batch's Rollout is sample(put(Prompts)): put lays them on the mesh. The last batch is filled up with a prompt, so
    that its Rollout may have more rows than its indices need.
    """
    for start in range(0, len(dataset.examples), shapes.prompts):
        real = range(start, min(start + shapes.prompts, len(dataset.examples)))
        chosen = [*real, *[start] * (shapes.prompts - len(real))]
        _, prompts = data.prompts(dataset, chosen, shapes.queries, sampling.pad_token, sampling.thinking_start)
        yield real, sample(put(prompts))


def sample_line(prompt: str, answer: str, rewarded: rewards.Rewards, width: int) -> str:
    """Returns a line of at most `width` columns: a prompt, the first completion of `rewarded`, and its verdict."""
    verdict = {1.0: 'right', 0.0: f'wrong, the answer is {shorten(str(answer), 20)}'}.get(float(rewarded.correct[0]))
    verdict = f' ({verdict or f"reward {rewarded.rewards[0]:.3g}"})'
    room = width - columns(verdict) - len('sample:  -> ')
    asked = shorten(prompt, room // 2)
    return f'sample: {asked} -> {shorten(rewarded.texts[0], room - columns(asked))}{verdict}'


def complete(evaluator: Evaluator, params: Any) -> tuple[Judged, Judged]:
    """Completes and judges the prompts. Returns (greedy, sampled): one and evaluator.samples completions a prompt."""
    dataset, shapes, group = evaluator.dataset, evaluator.shapes, evaluator.shapes.group_size
    greedy, sampled = Completions([], [], []), Completions([], [], [])
    sampling = evaluator.engine.programs.spec.sampling

    def sample(prompts):
        return evaluator.engine(params, prompts, evaluator.key, 0)  # the same noise at every step

    with during('evaluating', len(dataset.examples)) as evaluating:
        for indices, rollout in sample_batches(dataset, shapes, sampling, evaluator.engine.put, sample):
            decoded = decode_completions(evaluator.tokenizer, rollout, sampling.stop_tokens)
            for values, greedy_values, sampled_values in zip(decoded, greedy, sampled, strict=True):
                groups = [values[row : row + group] for row in range(0, len(indices) * group, group)]
                greedy_values.extend(values[-1] for values in groups)
                sampled_values.extend(value for values in groups for value in values[:-1])
            evaluating.done = indices.stop
        functions = evaluator.reward_functions
        evaluating.enter('judging')
        judged = judge(functions, dataset.examples, greedy), judge(functions, dataset.examples, sampled)
        evaluating.result = f'evaluated {len(dataset.examples)} prompts'
    return judged


def report(evaluator: Evaluator, params: Any) -> tuple[dict[str, Any], Iterator[dict]]:
    """Evaluates a policy. Returns (content of evaluation.json without model and config, rows of completions.jsonl)."""
    dataset, sampling = evaluator.dataset, evaluator.engine.programs.spec.sampling
    greedy, sampled = complete(evaluator, params)
    figures, seed = compute_figures(sampled, len(dataset.examples), greedy), evaluator.seed
    content = {
        'split': evaluator.split,
        'prompts': len(dataset.examples),
        'first_prompt': exact_text(evaluator.tokenizer, dataset.tokens[0]),
        'seed': seed,
        'samples': evaluator.samples,
        'sampling': {name: value for name, value in sampling._asdict().items() if name not in UNRECORDED},
        'verifier': evaluator.reward_functions.verifiers,
        'ties': TIES,
        'intervals': {'level': LEVEL, 'over': 'prompts', 'shares': 'Wilson', 'others': f'bootstrap of {RESAMPLES}'},
        'figures': summarize(figures, seed),
        'tables': summarize_by_subject(figures, dataset.examples, seed),
    }
    return content, _completion_rows(evaluator.tokenizer, dataset, {'greedy': greedy, 'sampled': sampled})


def _completion_rows(tokenizer, dataset, judged):
    """Yields a dict for each completion: prompt, text, reward and verdict. judged: {'greedy' or 'sampled': Judged}."""
    for index, (example, tokens) in enumerate(zip(dataset.examples, dataset.tokens, strict=True)):
        prompt = exact_text(tokenizer, tokens)
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
                    # None when the prompt's source has no such verifier
                    **{
                        f'{prefix}correct': None if hits[index, sample] is None else bool(hits[index, sample])
                        for prefix, hits in correct.items()
                    },
                }


def print_report(content: dict[str, Any]) -> None:
    """Prints the figures of evaluation.json with intervals, strict readings beside the usual, and tables by subject."""
    figures, samples, interval = content['figures'], content['samples'], f'{LEVEL:.0%} interval'
    strict = {name.removeprefix('strict/'): value for name, value in figures.items() if name.startswith('strict/')}
    show_tables(
        f'{content["prompts"]} {content["split"]} prompts, {samples} samples at temperature '
        f'{content["sampling"]["temperature"]}, verifier {content["verifier"] or "none"}',
        make_table(
            ['', 'mean', interval, *(['strict', interval] if strict else [])],
            [
                [name, *_cells(figures, name), *(_cells(strict, name) if strict else ())]
                for name in figures
                if not name.startswith('strict/')
            ],
        ),
        *([TIES] if content['verifier'] else []),
    )
    names = ['reward', 'length', 'truncated']
    if content['verifier']:
        names = [
            name for name in dict.fromkeys(['greedy', 'pass@1', f'pass@{samples}', f'maj@{samples}']) if name in figures
        ]
    for field, groups in content['tables'].items():
        rows = [
            [value, str(group['prompts']), *(' '.join(_cells(group['figures'], name, digits=2)) for name in names)]
            for value, group in groups.items()
        ]
        show_tables(make_table([field, 'prompts', *names], rows, title=f'by {field}'))


def _cells(summary, name, digits=3):
    """(value, interval) of a figure as texts; empty texts when the summary lacks the figure."""
    if name not in summary:
        return '', ''
    mean, low, high = (f'{summary[name][key]:.{digits}f}' for key in ('mean', 'low', 'high'))
    return mean, f'{low} to {high}'


def open_recorded(
    workdir: str,
    trust: bool = False,
    functions: Mapping | None = None,
    evaluation: Mapping | None = None,
    from_python: bool = False,
) -> Run:
    """Opens the Run of a workdir from its recorded config, on its mesh or, with more or fewer devices, on a chosen one.

    trust: whether the code files that the config names may run; functions: as given to train.run; evaluation: values
    for keys of config.evaluation; from_python: for rows from Python, as Settings.with_rows takes them. Raises BadInput
    when the config names code and trust is False.
    """
    config: Any = config_file.read_recorded(workdir, trust)
    config = make_python_config(config) if from_python else config
    if os.path.isdir(os.path.join(workdir, 'reward_model')):
        remedy = 'holds a reward model, in its folder reward_model, and no policy; name the folder of a policy'
        raise BadInput('--workdir', workdir, remedy)
    config.mesh = meshes.Axes()._asdict()
    config.evaluation.update(evaluation or {})
    recorded = NOWHERE if from_python else workdir  # rows from Python are not the data that workdir records
    run = open_config(config, recorded, folder=files.path_inside(workdir, 'model'), functions=functions)
    return dataclasses.replace(run, workdir=workdir)


def open_policy(run: Run, step: int | None = None) -> tuple[Any, int]:
    """(the policy's parameters on the mesh, its step) of a Run's checkpoint; step None: the newest sound one."""
    source = run.settings.model
    abstract = abstract_trained(run.model.config, source.lora, source.dtype, run.mesh)
    trained, step = checkpoint.read_params(run.workdir, abstract, step)
    return make_whole_policy(run, trained, checkpoint.path_of(run.workdir, step)), step


class Policy(NamedTuple):
    """A policy that completes prompts: its Run, and a function that loads its parameters."""

    run: Run
    load: Callable  # () -> (parameters on the mesh, {what names the policy})


def open_subject(
    config: Any,
    workdir: str | None,
    trust: bool = False,
    evaluation: Mapping | None = None,
    step: int | None = None,
    examples: Mapping[str, Iterable] | Iterable | None = None,
) -> Policy:
    """The Policy to evaluate or sample: the newest checkpoint in workdir or, without that, the model of the config.

    Its parameters are loaded later.

    config: only without workdir, for prompts and rewards; trust, evaluation: see open_recorded; step: the checkpoint's
    step, None for the newest; examples: rows, as train.run takes them, in place of the config's data, needed for a run
    that learned from rows. Raises BadInput when not exactly one of config and workdir is given, or for a model with
    random weights.
    """
    if (config is None) == (workdir is None):
        remedy = 'and --config: give one of them, the folder of a run, or the config of a model in model.path'
        raise BadInput('--workdir', NO_VALUE, remedy)
    if workdir is not None:
        run = open_recorded(workdir, trust, evaluation=evaluation, from_python=examples is not None)

        def load_run():
            params, saved_at = open_policy(run, step)
            return params, {'workdir': workdir, 'step': saved_at}

        return Policy(dataclasses.replace(run, settings=run.settings.with_rows(examples)), load_run)
    if config.model.random_init:
        raise BadInput('model.random_init', True, 'would take random weights; set it to False')
    run = open_config(config if examples is None else make_python_config(config), NOWHERE)
    run = dataclasses.replace(run, settings=run.settings.with_rows(examples))
    adapters_path = run.settings.model.lora.path
    model = {'path': config.model.path} | ({'adapters': adapters_path} if adapters_path else {})
    return Policy(run, lambda: (make_policy(run), model))


def open_report(policy: Policy, samples: int, split: str) -> tuple[dict[str, Any], Iterator[dict]]:
    """Evaluates a Policy. Returns (content of evaluation.json, rows of completions.jsonl); samples 0: as configured."""
    run, settings = policy.run, policy.run.settings
    dataset = open_split(run, split)
    evaluator = make_evaluator(run, dataset, split, samples)
    gold.try_out(run.rewards, dataset.examples)
    evaluator.engine.compile()
    params, model = policy.load()
    with run.rewards:
        content, completions = report(evaluator, params)
    config, origins = settings.config, settings.data.origins
    read = {'data': config.data.to_dict(), 'origins': [origin._asdict() for origin in origins if any(origin)]}
    return {'model': model} | read | content | {'reward': config.reward.to_dict()}, completions


def run(
    config: Any,
    workdir: str | None,
    out: str | None,
    samples: int,
    split: str,
    trust: bool = False,
    evaluation: Mapping | None = None,
    step: int | None = None,
) -> None:
    """Evaluates the run in workdir or, without workdir, the model in config.model.path. Prints the figures.

    Writes evaluation.json and completions.jsonl to the new folder out, or without out to workdir. samples: completions
    a prompt, 0: as configured; split: of the data; trust, evaluation, step: see open_subject. Raises BadInput when out
    exists, and without out and workdir.
    """
    folder = out or workdir
    if folder is None:
        raise BadInput('--out', NO_VALUE, 'is missing; name a new folder for the results, or a run in --workdir')
    if out and os.path.exists(out):
        raise BadInput('--out', out, 'exists; name a new folder, nothing is overwritten')
    content, rows = open_report(open_subject(config, workdir, trust, evaluation, step), samples, split)
    if not processes.is_first():
        return
    os.makedirs(folder, exist_ok=True)
    with files.atomic_write(os.path.join(folder, 'completions.jsonl')) as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + '\n' for row in rows)
    json_file.write(os.path.join(folder, 'evaluation.json'), content)
    print_report(content)


def main() -> None:
    """Runs the command."""
    values = flags.FLAGS
    changed = cli.read_section('evaluation')
    run(values.config, values.workdir, values.out, values.samples, values.split, values.trust, changed, values.step)


if __name__ == '__main__':
    cli.define_flags(required=False)
    cli.define_trust()
    flags.DEFINE_string('out', None, "New folder for the results; a run's own folder without it.")
    flags.DEFINE_integer('samples', 0, 'Completions a prompt; 0: evaluation.samples of the config.', lower_bound=0)
    flags.DEFINE_enum('split', 'test', ['test', 'train'], 'Split of the data.')
    cli.define_step()
    cli.define_section('evaluation', Evaluation)
    cli.run(main)
