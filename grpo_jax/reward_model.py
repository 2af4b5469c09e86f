"""Trains an outcome or process reward model. `python -m grpo_jax.reward_model --config=... --workdir=...`.

The policy's decoder with a scalar head, on the data set's labels; its folder is workdir/reward_model.
"""

from collections.abc import Callable
import os
from typing import NamedTuple

from absl import flags
import numpy as np
import rich.console
import rich.table

from grpo_jax import data, supervised
from grpo_jax.errors import BadInput
from grpo_jax.hosts import json_file, processes
from grpo_jax.learner import optimizer as optimizers
from grpo_jax.learner import reward_model
from grpo_jax.learner.programs import make_reward_learner
from grpo_jax.models import heads, hf
from grpo_jax.rewards import process
from grpo_jax.rewards.model import TEXTS_FILE, encode_completion
from grpo_jax.run import cli, demonstrations
from grpo_jax.run.experiment import open_experiment
from grpo_jax.sharding import batches, specs
from grpo_jax.types import Experience

DRAWS = 2000  # of the bootstrap


class Labelled(NamedTuple):
    """Examples of a split with their labels."""

    dataset: data.Dataset
    completions: list  # token ids of each completion of an example
    marks: list  # for each completion of an example, a list of (index of a token, label in [0, 1])


class Objective(NamedTuple):
    """What a reward model is trained on."""

    fields: tuple  # of an example's meta
    completions: int  # of an example
    loss: Callable  # of learner.scores
    encode: Callable  # (example, tokenizer, section) -> (completions, marks)


def run(config, workdir):
    """The final TrainState of supervised.updates updates on the train split's labels; goes on where it stopped.

    Then it is judged on the test split (evaluation.json) and saved as a folder that the rewards model and process load.
    """
    section = config.reward_model
    if section.objective not in OBJECTIVES:
        raise BadInput('reward_model.objective', section.objective, f'choose one of {", ".join(OBJECTIVES)}')
    if section.after_error not in ('masked', 'wrong'):
        raise BadInput('reward_model.after_error', section.after_error, 'choose masked or wrong')
    if not config.supervised.updates:
        raise BadInput('supervised.updates', 0, 'nothing to do; set the number of updates')
    experiment, objective = open_experiment(config, workdir), OBJECTIVES[section.objective]
    train, test = read(experiment, objective, 'train'), read(experiment, objective, 'test')
    shapes = experiment.shapes(config.supervised.batch, objective.completions)
    learner = make_reward_learner(
        experiment.model_config,
        optimizers.make(config.supervised.optimizer, config.supervised.updates),
        experiment.mesh,
        shapes,
        loss=objective.loss,
        microbatches=config.learner.microbatches,
        remat=config.learner.remat,
        offload=tuple(config.learner.offload),
        dtype=experiment.dtype,
    )

    def experience(step):
        chosen = data.indices(config.seed, step, shapes.prompts, len(train.completions), train.dataset.sources)
        return as_experience(experiment, train, chosen, shapes)

    state = supervised.loop(experiment, learner, experience, 'reward model', train.dataset.examples, beginning)
    results = judge(*(score(experiment, learner, state, found, shapes) for found in (train, test)), section.objective)
    json_file.write(os.path.join(workdir, 'evaluation.json'), results)
    params = processes.fetch(state.params)
    if processes.is_first():
        table(results)
        save(experiment, params)
    return state


def beginning(experiment):
    """Parameters to start from: a policy's, or a reward model's, which has a head already."""
    if experiment.config.model.random_init or not hf.has_head(experiment.folder):
        return experiment.params()
    return hf.load_params(
        experiment.folder,
        experiment.model_config,
        specs.params(heads.param_table(experiment.model_config), experiment.mesh),
    )


def read(experiment, objective, split):
    """Labelled examples of a split."""
    marks = {}

    def encode(example):
        completions, marks[example.id] = objective.encode(example, experiment.tokenizer, experiment.config.reward_model)
        return completions

    dataset, completions = demonstrations.read(experiment, split, objective.fields, encode)
    return Labelled(dataset, completions, [marks[example.id] for example in dataset.examples])


def _pair(example, tokenizer, section):
    rows = [encode_completion(tokenizer, example.meta[field]) for field in ('demonstration', 'rejected')]
    return rows, [[(len(row) - 1, label)] for row, label in zip(rows, (1.0, 0.0), strict=True)]


def _point(example, tokenizer, section):
    row = encode_completion(tokenizer, example.meta['demonstration'])
    return [row], [[(len(row) - 1, _in_unit(example.meta['label'], example))]]


def _steps(example, tokenizer, section):
    steps, labels, separator = example.meta['steps'], example.meta['labels'], section['separator']
    if [step for step, _ in process.split(separator.join(steps), separator)] != [step.strip() for step in steps]:
        raise BadInput(
            f'steps of example {example.id}',
            steps,
            f'one is blank or holds {separator!r}, by which a '
            'completion is parted into steps; choose another reward_model.separator',
        )
    if len(steps) != len(labels):
        raise BadInput(f'labels of example {example.id}', len(labels), f'there must be one for each of {len(steps)}')
    row, last = process.tokenize(tokenizer, steps, separator)
    if section['after_error'] == 'wrong' and 0.0 in labels:
        first = labels.index(0.0)
        labels = labels[:first] + [0.0] * (len(labels) - first)
    return [row], [
        [(place, _in_unit(label, example)) for place, label in zip(last, labels, strict=True) if label is not None]
    ]


def _in_unit(label, example):
    if not isinstance(label, (int, float)) or not 0 <= label <= 1:
        raise BadInput(f'label of example {example.id}', label, 'must lie in [0, 1]')
    return float(label)


OBJECTIVES = {
    'pairwise': Objective(('demonstration', 'rejected'), 2, reward_model.pairwise, _pair),
    'pointwise': Objective(('demonstration', 'label'), 1, reward_model.labelled, _point),
    'steps': Objective(('steps', 'labels'), 1, reward_model.labelled, _steps),
}


def as_experience(experiment, found, chosen, shapes):
    """The chosen examples as the learner eats them: their labels in returns, loss_mask where there is one."""
    rollout = demonstrations.as_rollout(experiment, found.dataset, found.completions, chosen, shapes)
    labels = np.zeros(rollout.completion_mask.shape, np.float32)
    known = np.zeros(labels.shape, bool)
    for row, marks in enumerate(marks for index in chosen for marks in found.marks[index]):
        for place, label in marks:
            labels[row, place], known[row, place] = label, True
    rollout = rollout.replace(forced=rollout.completion_mask & ~known)
    zeros = np.zeros((len(labels), 1), np.float32)
    groups = np.repeat(np.arange(len(chosen), dtype=np.int32), shapes.group_size)
    return Experience(rollout, zeros, zeros[:, 0], None, None, groups, returns=labels)


def score(experiment, learner, state, found, shapes):
    """(scores f64[n], labels f64[n]) of each of up to evaluation.prompts examples, spread evenly over the split."""
    examples = data.spread(len(found.marks), experiment.config.evaluation.prompts)
    said = []
    for start in range(0, len(examples), shapes.prompts):
        block = examples[start : start + shapes.prompts]
        padded = np.pad(block, (0, shapes.prompts - len(block)), mode='edge')
        rollout = demonstrations.as_rollout(experiment, found.dataset, found.completions, padded, shapes)
        rows = processes.fetch(learner.logprobs(state, batches.put_rows(rollout, experiment.mesh))).astype(np.float64)
        for index, block_rows in zip(block, rows.reshape(shapes.prompts, shapes.group_size, -1), strict=False):
            values = [
                (row[place], label)
                for row, marks in zip(block_rows, found.marks[index], strict=True)
                for place, label in marks
            ]
            said.append(tuple(np.array(values, np.float64).reshape(-1, 2).T))
    return said


def judge(train, test, objective):
    """Results on the test split by name, from (scores, labels) of each example; a label from 0.5 on is right.

    majority is the accuracy of the train split's commoner label, position that of the commoner one at the same step.
    over_majority and over_position are what the model's accuracy is above; *_low and *_high bound 95 % of
    bootstrap draws of examples. train_mean and train_std are of the scores, for rewards.model. For pairs, accuracy is
    the share whose chosen completion scores higher, and majority is a half.
    """
    every, labels = (np.concatenate(column) for column in zip(*test, strict=True))
    right = [(found > 0) == (label >= 0.5) for found, label in test]
    if objective == 'pairwise':
        right = [np.array([found[0] > found[1]]) for found, _ in test]
        baselines = {'majority': [np.full(1, 0.5) for _ in test]}
    else:
        baselines = {'majority': _commoner(train, test, lambda place: 0)}
    if objective == 'steps':
        baselines['position'] = _commoner(train, test, lambda place: place)
    known = np.concatenate([found for found, _ in train])
    results = {
        'examples': len(test),
        'labels': len(labels),
        'wrong': int(np.sum(labels < 0.5)),
        'auc': auc(every, labels >= 0.5),
        **_of_wrong(every, labels),
        **_bounded('accuracy', right),
    }
    for name, correct in baselines.items():
        results |= {name: float(np.mean(np.concatenate(correct)))}
        results |= _bounded(f'over_{name}', [a - 1.0 * b for a, b in zip(right, correct, strict=True)])
    return results | {'train_mean': float(known.mean()), 'train_std': float(known.std())}


def auc(found, right):
    """The chance that a right one scores higher than a wrong one, ties counting half; None without one of either."""
    good, bad = found[right], np.sort(found[~right])
    if not len(good) or not len(bad):
        return None
    return float(np.mean(np.searchsorted(bad, good, 'left') + np.searchsorted(bad, good, 'right')) / (2 * len(bad)))


def _of_wrong(found, labels):
    """Precision, recall and F1 of the wrong ones, those of a score of at most 0."""
    said, wrong = found <= 0, labels < 0.5
    hits = int(np.sum(said & wrong))
    return {
        'wrong_precision': hits / max(int(said.sum()), 1),
        'wrong_recall': hits / max(int(wrong.sum()), 1),
        'wrong_f1': 2 * hits / max(int(said.sum() + wrong.sum()), 1),
    }


def _commoner(train, test, key):
    """For each test example, whether the train split's commoner label at the same key(place) is each of its labels."""
    votes, every = {}, []
    for _, labels in train:
        for place, label in enumerate(labels):
            votes.setdefault(key(place), []).append(label >= 0.5)
            every.append(label >= 0.5)
    said = {place: np.mean(found) >= 0.5 for place, found in votes.items()}
    return [
        np.array(
            [said.get(key(place), np.mean(every) >= 0.5) == (label >= 0.5) for place, label in enumerate(labels)], bool
        )
        for _, labels in test
    ]


def _bounded(name, values):
    """The mean over all values of all examples, and its 2.5 % and 97.5 % quantiles over draws of examples."""
    totals, counts = np.array([[np.sum(row), len(row)] for row in values]).T
    draws = np.random.default_rng(0).integers(0, len(values), (DRAWS, len(values)))
    means = totals[draws].sum(1) / np.maximum(counts[draws].sum(1), 1)
    low, high = np.quantile(means, [0.025, 0.975])
    return {name: float(totals.sum() / counts.sum()), f'{name}_low': float(low), f'{name}_high': float(high)}


def table(results):
    """Prints the results."""
    shown = rich.table.Table(title='held-out labels')
    shown.add_column('')
    shown.add_column('', justify='right')
    for name, value in results.items():
        if not name.endswith(('_low', '_high')):
            bounds = f'{name}_low', f'{name}_high'
            between = f' ({results[bounds[0]]:.3f} to {results[bounds[1]]:.3f})' if bounds[0] in results else ''
            shown.add_row(name, f'{value:.3f}{between}' if isinstance(value, float) else str(value))
    rich.console.Console().print(shown)


def save(experiment, params):
    """Writes workdir/reward_model: a sequence classification, and how its texts are written."""
    folder = os.path.join(experiment.workdir, 'reward_model')
    if os.path.exists(folder):  # of this very run, which had come to its end
        return
    temporary = f'{folder}.writing'
    hf.save(
        temporary, experiment.folder, params, experiment.model_config, np.float32, pad_token_id=experiment.pad_token
    )
    section = experiment.config.data
    json_file.write(
        os.path.join(temporary, TEXTS_FILE),
        {
            'chat': section.chat,
            'system': section.system,
            'template': section.template,
            'separator': experiment.config.reward_model.separator,
        },
    )
    os.replace(temporary, folder)


def main():
    """The command."""
    run(flags.FLAGS.config, flags.FLAGS.workdir)


if __name__ == '__main__':
    cli.define_flags()
    cli.run(main)
