"""Trains an outcome or process reward model: the policy's decoder with a scalar head, on the data set's labels.

The rewards `model` and `process` read the folder WORKDIR/reward_model.

Examples:
    python -m grpo_jax.reward_model --config=arithmetic_reward --workdir=runs/judge
    python -m grpo_jax.reward_model --config=process_reward --workdir=runs/steps --config.supervised.batch=16
"""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
import os
from typing import Any, NamedTuple

from absl import flags
from jax.sharding import Mesh
from jaxtyping import Shaped
import numpy as np

from grpo_jax import data, statistics, supervised
from grpo_jax.collect import demonstrations
from grpo_jax.errors import BadInput
from grpo_jax.hosts import json_file, processes
from grpo_jax.hosts.files import atomic_folder
from grpo_jax.learner import build_optimizer, reward_model
from grpo_jax.learner.programs import make_reward_learner
from grpo_jax.models import heads, hf
from grpo_jax.models.lora import LoraOptions
from grpo_jax.rewards import process
from grpo_jax.rewards.model import TEXTS_FILE, encode_completion
from grpo_jax.run import cli, console
from grpo_jax.run.loop import owns_workdir
from grpo_jax.run.open import Run, make_policy, open_config, open_splits
from grpo_jax.run.steering import read_contents
from grpo_jax.sharding import batches, compiled, specs
from grpo_jax.types import LabelledBatch, Rollout

RESAMPLES = 2000  # of the bootstrap


Marks = list[tuple[int, float]]  # (index of a token, label in [0, 1]) of a completion
Scores = tuple[Shaped[np.ndarray, ' _'], Shaped[np.ndarray, ' _']]  # (scores, labels) of an example's marks


class Labelled(NamedTuple):
    """Examples of a split with their labels."""

    dataset: data.Dataset
    completions: list[list[list[int]]]  # token ids of each completion of an example
    marks: list[list[Marks]]  # labels of each completion of an example


class Objective(NamedTuple):
    """A kind of labels, and how a reward model learns from them."""

    fields: tuple[str, ...]  # of an example's meta
    completions: int  # of an example
    loss: Callable  # a function of learner.reward_model
    encode: Callable  # (example, tokenizer, RewardModelOptions) -> (completions, marks)


@owns_workdir
def run(config, workdir):
    """Trains a reward model and returns its final TrainState; goes on where it stopped.

    Makes supervised.updates updates on the train split's labels, evaluates the model on the test split
    (evaluation.json), and saves it as a folder that the rewards `model` and `process` load. Raises BadInput without
    updates, and for adapters.
    """
    if not config.supervised.updates:
        raise BadInput('supervised.updates', 0, 'nothing to do; set the number of updates')
    if LoraOptions.from_config(config.model.lora).rank:
        raise BadInput('model.lora.rank', config.model.lora.rank, 'a reward model is trained as a whole; use 0')
    run = open_config(config, workdir, head=True)
    settings, tokenizer = run.settings, run.model.tokenizer
    settings.log.tracking.check()
    splits, options = open_splits(run), settings.reward_model
    run = dataclasses.replace(run, contents=read_contents(workdir, settings.recorded, splits._asdict()))
    objective, most = OBJECTIVES[options.objective], settings.sampling.max_tokens
    train, test = (read_labelled(split, objective, tokenizer, options, most, settings.data.name) for split in splits)
    shapes, pad_token = settings.shapes(settings.supervised.batch, objective.completions), settings.sampling.pad_token
    optimizer = build_optimizer(settings.supervised.optimizer, settings.supervised.updates)
    learner = make_reward_learner(run.model.config, objective.loss, optimizer, run.mesh, shapes, settings.learning)
    for program in (learner.values, learner.update):
        compiled.compile_all([program], program.name)

    def batch(step):
        chosen = data.indices(settings.seed, step, shapes.prompts, len(train.completions), train.dataset.sources)
        return labelled_batch(train, chosen, shapes, pad_token)

    def initial():
        return learner.initial(make_initial_params(run))

    training = supervised.Training(batch, learner, learner.update, learner.update, initial)
    state = supervised.make_trained(run, 'reward model', training)

    def predict(labelled):
        chosen = data.spread(len(labelled.marks), settings.evaluation.prompts)
        values = functools.partial(learner.values, state)
        return list(predictions(labelled, chosen, shapes, pad_token, values, run.mesh))

    results = judge(predict(train), predict(test), options.objective)
    json_file.write(os.path.join(workdir, 'evaluation.json'), results)
    params = processes.fetch(state.params)
    if processes.is_first():
        print_results(results)
        texts: dict = settings.data.prompt_format._asdict() | {'separator': options.separator}
        texts['chat_template_kwargs'] = dict(texts['chat_template_kwargs'])
        save_folder(workdir, run.model.folder, params, run.model.config, pad_token, texts)
    return state


def make_initial_params(run: Run) -> Any:
    """Returns the parameters that training begins with: a reward model's if its folder has a head, else a policy's."""
    model = run.model
    if run.settings.model.random_init or not hf.has_head(model.folder):
        return make_policy(run)
    table = heads.param_table(model.config)
    return hf.load_params(model.folder, model.config, specs.params(table, run.mesh))


def read_labelled(
    split: data.Dataset, objective: Objective, tokenizer: Any, options: Any, most: int, name: str
) -> Labelled:
    """Returns the examples of a split that have the objective's fields, with their completions and labels.

    options: RewardModelOptions; most: longest completion in tokens; name: of the data set, for messages; see
    demonstrations.encode_completions.
    """
    marks = {}

    def encode(example):
        completions, marks[example.id] = objective.encode(example, tokenizer, options)
        return completions

    dataset, completions = demonstrations.encode_completions(split, objective.fields, encode, most, name)
    return Labelled(dataset, completions, [marks[example.id] for example in dataset.examples])


def _encode_pair(example, tokenizer, options):
    """(completions, marks): the chosen completion with label 1 at its last token, the rejected one with 0."""
    rows = [encode_completion(tokenizer, example.meta[field]) for field in ('demonstration', 'rejected')]
    return rows, [[(len(row) - 1, label)] for row, label in zip(rows, (1.0, 0.0), strict=True)]


def _encode_point(example, tokenizer, options):
    """(completions, marks): one completion with its label at its last token."""
    row = encode_completion(tokenizer, example.meta['demonstration'])
    return [row], [[(len(row) - 1, _check_label(example.meta['label'], example))]]


def _encode_steps(example, tokenizer, options):
    """(completions, marks): one completion of joined steps, with a label at the last token of each labelled step."""
    steps, labels, separator = example.meta['steps'], example.meta['labels'], options.separator
    if not all(isinstance(step, str) for step in steps):
        raise BadInput(f'steps of example {example.id}', str(steps)[:80], 'must be texts; mend its row')
    if [step for step, _ in process.split(separator.join(steps), separator)] != [step.strip() for step in steps]:
        raise BadInput(
            f'steps of example {example.id}',
            steps,
            f'one is blank or holds {separator!r}, which separates the steps of a completion; '
            'choose another reward_model.separator, or mend its row',
        )
    if len(steps) != len(labels):
        raise BadInput(f'labels of example {example.id}', len(labels), f'must be one for each of {len(steps)}; mend it')
    row, last = process.tokenize(tokenizer, steps, separator)
    if options.after_error == 'wrong' and 0.0 in labels:
        first = labels.index(0.0)
        labels = labels[:first] + [0.0] * (len(labels) - first)
    return [row], [
        [
            (position, _check_label(label, example))
            for position, label in zip(last, labels, strict=True)
            if label is not None
        ]
    ]


def _check_label(label, example):
    """The label as a float; raises BadInput when it lies outside [0, 1]."""
    if not isinstance(label, (int, float)) or not 0 <= label <= 1:
        raise BadInput(f'label of example {example.id}', label, 'must lie in [0, 1]; mend its row')
    return float(label)


OBJECTIVES = {
    'pairwise': Objective(('demonstration', 'rejected'), 2, reward_model.pairwise, _encode_pair),
    'pointwise': Objective(('demonstration', 'label'), 1, reward_model.labelled, _encode_point),
    'steps': Objective(('steps', 'labels'), 1, reward_model.labelled, _encode_steps),
}


def labelled_rollout(labelled: Labelled, chosen: Any, shapes: batches.Shapes, pad_token: int) -> Rollout:
    """Returns the completions of examples as a Rollout on the host; chosen: indices of examples."""
    _, prompts = data.prompts(labelled.dataset, chosen, shapes.queries, pad_token)
    return demonstrations.as_rollout(prompts, [labelled.completions[i] for i in chosen], shapes, pad_token)


def labelled_batch(labelled: Labelled, chosen: Any, shapes: batches.Shapes, pad_token: int) -> LabelledBatch:
    """Returns the completions and token labels of examples, on the host; chosen: indices of examples."""
    rollout = labelled_rollout(labelled, chosen, shapes, pad_token)
    labels = np.zeros(rollout.completion_mask.shape, np.float32)
    label_mask = np.zeros(labels.shape, bool)
    for row, marks in enumerate(marks for index in chosen for marks in labelled.marks[index]):
        for place, label in marks:
            labels[row, place], label_mask[row, place] = label, True
    return LabelledBatch(rollout, labels, label_mask & rollout.completion_mask)


def predictions(
    labelled: Labelled, chosen: Any, shapes: batches.Shapes, pad_token: int, values: Callable, mesh: Mesh
) -> Iterator[Scores]:
    """Yields (scores f64[n], labels f64[n]) of each chosen example; values(Rollout on the mesh) returns f32[B, C]."""
    for start in range(0, len(chosen), shapes.prompts):
        block = chosen[start : start + shapes.prompts]
        padded = np.pad(block, (0, shapes.prompts - len(block)), mode='edge')
        rollout = labelled_rollout(labelled, padded, shapes, pad_token)
        rows = processes.fetch(values(batches.put_rows(rollout, mesh))).astype(np.float64)
        for index, block_rows in zip(block, rows.reshape(shapes.prompts, shapes.group_size, -1), strict=False):
            pairs = [
                (row[place], label)
                for row, marks in zip(block_rows, labelled.marks[index], strict=True)
                for place, label in marks
            ]
            scores, labels = np.array(pairs, np.float64).reshape(-1, 2).T
            yield scores, labels


def judge(train: Sequence[Scores], test: Sequence[Scores], objective: str) -> dict[str, Any]:
    """Returns the results on the test split by name. A label of at least 0.5 is right, a score above 0 predicts it.

    train, test: (scores, labels) of each example; objective: a key of OBJECTIVES. majority: accuracy of always
    predicting the train split's commoner label; position: accuracy of predicting the commoner label at the same step.
    over_majority, over_position: the model's accuracy minus these. *_low and *_high: 95 % interval, by bootstrap over
    examples. train_mean, train_std: of the train scores, for rewards.model. For pairs, accuracy is the share with the
    chosen completion scored higher, and majority is 0.5.
    """
    scores, labels = (np.concatenate(column) for column in zip(*test, strict=True))
    hits = [(values > 0) == (marked >= 0.5) for values, marked in test]
    if objective == 'pairwise':
        hits = [np.array([values[0] > values[1]]) for values, _ in test]
        baselines = {'majority': [np.full(1, 0.5) for _ in test]}
    else:
        baselines = {'majority': _baseline_hits(train, test, lambda position: 0)}
    if objective == 'steps':
        baselines['position'] = _baseline_hits(train, test, lambda position: position)
    wrong = statistics.precision_recall(scores <= 0, labels < 0.5)
    results = {
        'examples': len(test),
        'labels': len(labels),
        'wrong': int(np.sum(labels < 0.5)),
        'auc': statistics.auc(scores, labels >= 0.5),
        **{f'wrong_{name}': value for name, value in wrong.items()},
        **_mean_and_bounds('accuracy', hits),
    }
    for name, baseline in baselines.items():
        gains = [model - 1.0 * trivial for model, trivial in zip(hits, baseline, strict=True)]
        results |= {name: float(np.mean(np.concatenate(baseline)))} | _mean_and_bounds(f'over_{name}', gains)
    train_scores = np.concatenate([values for values, _ in train])
    return results | {'train_mean': float(train_scores.mean()), 'train_std': float(train_scores.std())}


def _baseline_hits(train, test, key):
    """[bool[n]] by test example: whether the commoner train label of the same key(position) equals each label."""
    votes, all_votes = {}, []
    for _, labels in train:
        for position, label in enumerate(labels):
            votes.setdefault(key(position), []).append(label >= 0.5)
            all_votes.append(label >= 0.5)
    commoner = {at: np.mean(labels) >= 0.5 for at, labels in votes.items()}
    default = np.mean(all_votes) >= 0.5
    return [
        np.array(
            [commoner.get(key(position), default) == (label >= 0.5) for position, label in enumerate(labels)], bool
        )
        for _, labels in test
    ]


def _mean_and_bounds(name, values):
    """{name, name_low, name_high}: the mean of all values, and its 95 % interval by bootstrap over examples."""
    totals, sizes = np.array([[np.sum(row), len(row)] for row in values]).T[:, :, None]
    (low,), (high,) = statistics.bootstrap_ratio(totals, sizes, tail=0.025, resamples=RESAMPLES, seed=0)
    return {name: float(totals.sum() / sizes.sum()), f'{name}_low': float(low), f'{name}_high': float(high)}


def print_results(results: dict[str, Any]) -> None:
    """Prints the results of judge."""
    rows = []
    for name, value in results.items():
        if not name.endswith(('_low', '_high')):
            low, high = (results.get(f'{name}_{end}') for end in ('low', 'high'))
            interval = '' if low is None else f' ({low:.3f} to {high:.3f})'
            rows.append([name, f'{value:.3f}{interval}' if isinstance(value, float) else str(value)])
    console.show_tables(console.make_table(['', ''], rows, title='held-out labels'))


def save_folder(
    workdir: str, source: str, params: Any, model_config: Any, pad_token: int, texts: dict[str, Any]
) -> None:
    """Writes the folder workdir/reward_model: a sequence classification model and the format of its texts.

    source: folder of the model that training began with; params: on the host; texts: the prompt format and the
    separator of steps. An existing folder stays: a finished run that is called again is only evaluated again.
    """
    folder = os.path.join(workdir, 'reward_model')
    if os.path.exists(folder):
        return
    with atomic_folder(folder) as temporary:
        hf.save(temporary, source, params, model_config, np.float32, pad_token_id=pad_token)
        json_file.write(os.path.join(temporary, TEXTS_FILE), texts)


def main() -> None:
    """Runs the command."""
    run(flags.FLAGS.config, flags.FLAGS.workdir)


if __name__ == '__main__':
    cli.define_flags()
    cli.run(main)
