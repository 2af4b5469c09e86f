"""Samples and rewards completions of a policy, and writes a folder for distillation and rejection sampling.

Examples:
    python -m grpo_jax.sample --workdir=runs/teacher --to=runs/samples --samples=8
    python -m grpo_jax.sample --config=gsm8k --config.model.path=Qwen/Qwen3-0.6B --to=runs/qwen --prompts=1000
"""

from collections.abc import Iterable, Mapping, Sequence
import functools
import json
import os
from typing import Any, NamedTuple

from absl import flags
import jax

from grpo_jax import data, evaluate, rewards
from grpo_jax.collect.draw import decode_completions
from grpo_jax.errors import BadInput
from grpo_jax.figures import compute_figures, read_rewards, recorded_rewards, summarize, summarize_by_subject
from grpo_jax.hosts import files, json_file, lock, processes
from grpo_jax.ranges import Kind
from grpo_jax.rewards import gold
from grpo_jax.run import cli, digest, steering
from grpo_jax.run.open import Run, make_run_sampler, open_split
from grpo_jax.run.rows import read_rows, rollout_rows
from grpo_jax.run.settings import kind_of
from grpo_jax.text import during

FILE = 'sampling.json'  # origin of a folder's samples: policy, prompts, config
PLACES = ('model.workdir', 'model.path', 'model.adapters', 'config.model.lora.path')  # may differ: digests are compared
NOISE = 0x5A3B  # folded into the run's key: samples must not reuse the noise of training or evaluation


class Request(NamedTuple):
    """Which samples to make, and how many prompts a file has."""

    split: str = 'train'
    prompts: int = 0  # spread evenly over the split; 0: all
    samples: int = 4  # completions a prompt
    greedy: bool = False  # one completion a prompt, of the most likely tokens
    shard: int = 256  # prompts in a file


def run(
    config: Any,
    workdir: str | None,
    to: str,
    request: Request,
    trust: bool = False,
    examples: Mapping[str, Iterable] | Iterable | None = None,
) -> dict[str, Any]:
    """Samples a policy's completions into the folder `to`, prints their figures, and returns them.

    config, workdir, trust, examples: see evaluate.open_subject; request: which samples to make.
    to/<shard>.jsonl has rows like a run's rollouts, with advantage None. Existing shards are not sampled again, so the
    same command goes on. Raises BadInput for a folder that holds anything but a part of these samples.
    """
    check(to, request)
    policy = evaluate.open_subject(config, workdir, trust, examples=examples)
    opened = policy.run
    dataset = open_split(opened, request.split)
    gold.try_out(opened.rewards, dataset.examples)
    dataset = data.pick(dataset, data.spread(len(dataset.examples), request.prompts or len(dataset.examples)))
    params, model = policy.load()
    record = {
        'model': model | {'digest': digest.hash_tree(params)},
        'data': data.contents_of(dataset.examples)._asdict(),
        'request': request._asdict(),
        'config': opened.settings.recorded,
    }
    with lock.own(to, '--to'), opened.rewards:
        _claim_folder(to, record)
        make_shards(opened, dataset, params, to, request)
        if not processes.is_first():
            return {}
        content = summarize_samples(
            opened.rewards, dataset, to, request, opened.settings.sampling.temperature, opened.settings.seed
        )
        evaluate.print_report(content)
        return content


def check(to: str, request: Request) -> None:
    """Raises BadInput for an impossible request, and for a folder that holds other things than samples."""
    for name, least in [('prompts', 0), ('samples', 1), ('shard', 1)]:
        if getattr(request, name) < least:
            raise BadInput(f'--{name}', getattr(request, name), f'must be at least {least}; raise it')
    if request.greedy and request.samples > 1:
        raise BadInput('--samples', request.samples, 'would be equal completions with --greedy; use 1')
    if os.path.exists(to) and not os.path.isdir(to):
        raise BadInput('--to', to, 'is a file; name a folder')
    names = {*os.listdir(to)} if os.path.isdir(to) else set()
    if FILE not in names and names - {lock.FILE, f'{FILE}.writing'}:
        raise BadInput('--to', to, f'holds other things than samples, like {min(names)}; name a new folder')


def _claim_folder(to, record):
    """Writes `record`, the origin of the samples, to the folder; raises BadInput if it holds samples of another one."""
    path = os.path.join(to, FILE)
    if os.path.exists(path):
        recorded = json_file.read_object(path)
        changes = list(steering.differences(recorded, json.loads(json.dumps(record))))
        harmless = Kind.FREE, Kind.PATH
        for key, old, new in changes:
            kind = kind_of(key.removeprefix('config.')) if key.startswith('config.') else None
            if kind not in harmless and key not in PLACES:
                raise BadInput('--to', to, f'holds other samples: {key} was {old!r}, now {new!r}; name a new folder')
    processes.exchange_stop('the samples', {'record': json.dumps(record, sort_keys=True)})
    json_file.write(path, record)


def shard_path(to: str, shard: int) -> str:
    """Returns the path of a shard."""
    return os.path.join(to, f'{shard:06d}.jsonl')


def make_shards(opened: Run, dataset: data.Dataset, params: Any, to: str, request: Request) -> None:
    """Samples the missing shards of a data set into the folder `to`, which the first process writes."""
    count = len(dataset.examples)
    shards = [range(start, min(start + request.shard, count)) for start in range(0, count, request.shard)]
    missing = [shard for shard in range(len(shards)) if not os.path.exists(shard_path(to, shard))]
    (missing, *_) = processes.gather(missing)
    if not missing:
        return
    shapes = evaluate.make_shapes(opened, request.samples, min(request.shard, count))
    sampler = make_run_sampler(opened, shapes, greedy=request.samples if request.greedy else 0).compile()
    key = jax.random.fold_in(jax.random.key(opened.settings.seed), NOISE)

    def sample_rows(part):
        """Samples and rewards a part of the data set; returns the rows of its completions."""
        rows = []
        compute = functools.partial(rewards.compute_rewards, opened.rewards)
        sample = functools.partial(sampler, params, key=key, step=0)
        sampling, tokenizer = opened.settings.sampling, opened.model.tokenizer
        for indices, rollout in evaluate.sample_batches(part, shapes, sampling, sampler.put, sample):
            examples = part.examples[indices.start : indices.stop]
            columns = decode_completions(tokenizer, rollout, sampling.stop_tokens)
            real = len(columns[0]) // shapes.prompts * len(examples)
            rewarded = processes.by_group(compute, examples, *(column[:real] for column in columns))
            rows += rollout_rows(examples, rollout, rewarded, None, tokenizer, opened.rewards)
        return rows

    done = count - sum(len(shards[shard]) for shard in missing)
    with during('sampling', count, done, lines=True) as sampling:
        for shard in missing:
            rows = sample_rows(data.pick(dataset, shards[shard]))
            if processes.is_first():
                with files.atomic_write(shard_path(to, shard)) as file:
                    file.writelines(json.dumps(row, ensure_ascii=False) + '\n' for row in rows)
            done += len(shards[shard])
            paid = [row['reward'] for row in rows if row['reward'] is not None]
            sampling.advance(done, f'reward {sum(paid) / max(len(paid), 1):.3f}')
        sampling.result = f'sampled {count} prompts'


def summarize_samples(
    reward_functions: rewards.RewardFunctions,
    dataset: data.Dataset,
    to: str,
    request: Request,
    temperature: float,
    seed: int,
) -> dict[str, Any]:
    """Returns the figures of the samples in the folder `to`, for evaluate.print_report; seed: of the bootstrap."""
    rows = read_samples(to, dataset, request)
    prompts = len(dataset.examples)
    judged = read_rewards(reward_functions, dataset.examples, recorded_rewards(rows), strict=False)
    figures = compute_figures(judged, prompts)
    return {
        'prompts': prompts,
        'split': request.split,
        'samples': request.samples,
        'sampling': {'temperature': 0.0 if request.greedy else temperature},
        'verifier': reward_functions.verifiers,
        'figures': summarize(figures, seed),
        'tables': summarize_by_subject(figures, dataset.examples, seed),
    }


def read_samples(to: str, dataset: data.Dataset, request: Request) -> Sequence[dict[str, Any]]:
    """Returns the rows of a folder's shards; raises BadInput for a shard that is damaged or has other prompts."""
    rows, shards = [], range(-(-len(dataset.examples) // request.shard))
    for shard in shards:
        path = shard_path(to, shard)
        ids = [e.id for e in dataset.examples[shard * request.shard : (shard + 1) * request.shard]]
        try:
            shard_rows = read_rows(path)
            sound = [row['id'] for row in shard_rows] == [i for i in ids for _ in range(request.samples)]
        except (ValueError, KeyError, TypeError):
            sound = False
        if not sound:
            raise BadInput('--to', path, 'is damaged; remove it, and the same command samples it again')
        rows += shard_rows
    return rows


def main() -> None:
    """Runs the command."""
    values = flags.FLAGS
    request = Request(values.split, values.prompts, values.samples, values.greedy, values.shard)
    run(values.config, values.workdir, values.to, request, values.trust)


if __name__ == '__main__':
    cli.define_flags(required=False)
    cli.define_trust()
    flags.DEFINE_string(
        'to', None, 'Folder of the samples; a folder that has a part of them is completed.', required=True
    )
    flags.DEFINE_enum('split', 'train', ['test', 'train'], 'Split of the data.')
    flags.DEFINE_integer('prompts', 0, 'Prompts, evenly over the split; 0: all.', lower_bound=0)
    flags.DEFINE_integer('samples', 4, 'Completions a prompt.', lower_bound=1)
    flags.DEFINE_bool('greedy', False, 'The most likely tokens instead of drawn ones; with --samples=1.')
    flags.DEFINE_integer('shard', 256, 'Prompts in a file.', lower_bound=1)
    cli.run(main)
