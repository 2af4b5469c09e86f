"""Trains a reward model and a policy in turn: iterative GRPO, DeepSeekMath (arXiv 2402.03300), algorithm 1.

An iteration trains the reward model on the newest completions and a share of older ones. Then it trains the policy
against this reward model. Both start from the models of the last iteration, whose policy is also the reference.

Examples:
    python -m grpo_jax iterate --config=arithmetic_iterative --workdir=runs/x --labelled=runs/policy/rollouts
    python -m grpo_jax iterate --config=arithmetic_iterative --workdir=runs/y --labelled=runs/x/rollouts --iterations=5
"""

from collections.abc import Sequence
import copy
import os
from typing import Any

from absl import flags

from grpo_jax import reward_model, train
from grpo_jax.errors import NO_VALUE, BadInput
from grpo_jax.hosts import json_file, processes
from grpo_jax.models.lora import turn_off
from grpo_jax.run import cli, console
from grpo_jax.run.loop import owns_workdir
from grpo_jax.run.rows import read_rows
from grpo_jax.run.settings import Settings
from grpo_jax.run.steering import record_origins, recorded_origins
from grpo_jax.tools import export


@owns_workdir
def run(config: Any, workdir: str, iterations: int, labelled: str) -> list[dict[str, Any]]:
    """Trains the iterations that are not done yet, and returns a dict of results for each iteration.

    The dict is the reward model's evaluation.json, with the policy's last evaluation as 'policy'. labelled: a folder of
    rollouts (jsonl) that reward.verifier judged, for the first reward model, which starts from model.path. Iteration i
    is in workdir/<i>/reward_model, workdir/<i>/policy and, as a Hugging Face folder, workdir/<i>/exported. Raises
    BadInput as `check` does.
    """
    check(config, iterations)
    rollouts, reward_folder, policy = [labelled], config.model.path, config.model.path
    results = []
    for i in range(iterations):
        folders = {name: os.path.join(workdir, str(i), name) for name in ('reward_model', 'policy', 'exported')}
        learning = reward_model_config(config, i, reward_folder, rollouts)
        reward_folder = os.path.join(folders['reward_model'], 'reward_model')
        if not os.path.isdir(reward_folder):
            reward_model.run(learning, folders['reward_model'])
            processes.exchange(f'the reward model in {folders["reward_model"]}', '')
        learning = policy_config(config, i, policy, reward_folder)
        if not train.is_finished(learning, folders['policy']):
            export.check_whole(folders['exported'], folders['policy'], config.steps)
            if i:  # every iteration reads the data's version that the first one read
                record_origins(folders['policy'], recorded_origins(os.path.join(workdir, '0', 'policy')))
            train.run(learning, folders['policy'])
        _check_rollouts(folders['policy'], config.steps)
        policy = folders['exported']
        if not os.path.exists(policy):
            export.export(folders['policy'], policy, 'float32', trust=True)  # the code is of the config given here
        processes.exchange(f'the policy of iteration {i}', '')
        rollouts.append(os.path.join(folders['policy'], 'rollouts'))
        results.append(
            json_file.read(os.path.join(folders['reward_model'], 'evaluation.json'))
            | {'policy': read_rows(os.path.join(folders['policy'], 'evaluations.jsonl'))[-1]}
        )
    return results


def check(config: Any, iterations: int) -> None:
    """Raises BadInput for a config with which `run` cannot work."""
    if iterations < 1:
        raise BadInput('--iterations', iterations, 'must be at least 1; raise it')
    if config.data.epochs:
        raise BadInput('data.epochs', config.data.epochs, 'an iteration is a number of steps; use 0, and set steps')
    if iterations > 1 and config.model.lora.base_dtype:
        raise BadInput(
            'model.lora.base_dtype',
            config.model.lora.base_dtype,
            "rounds weights in which earlier iterations' adapters are merged, so that little of them is left; use ''",
        )
    Settings.from_config(config)
    parts = [name for name, _ in config.reward.parts]
    if 'model' not in parts or not config.reward.verifier:
        raise BadInput(
            'reward.parts, verifier',
            (parts, config.reward.verifier),
            'must have the part model, and a verifier that labels completions for it; add what is missing (a verifier '
            'of weight 0 only labels)',
        )
    if config.reward_model.objective != 'pairwise':
        raise BadInput(
            'reward_model.objective', config.reward_model.objective, "a verifier's labels make pairs; choose pairwise"
        )
    if config.model.random_init:
        raise BadInput('model.random_init', True, 'iterations go on from the weights of model.path; set this to False')


def reward_model_config(config: Any, i: int, folder: str, rollouts: Sequence[str]) -> Any:
    """Returns the config of iteration i's reward model.

    folder: the model that it starts from; rollouts: folders of completions, the newest last. Older ones together have
    the share reward_model.replay of the training data, and the newest has the rest.
    """
    changed, replay, older = _iteration_config(config, i, folder), config.reward_model.replay, len(rollouts) - 1
    weights = [replay / max(older, 1)] * older + [1 - replay if older else 1.0]
    sources = [
        {
            'name': 'rollouts',
            'source': str(k),
            'weight': weight,
            'options': {'folder': path, 'least': config.reward.correct_at, 'by': config.reward.verifier},
        }
        for k, (weight, path) in enumerate(zip(weights, rollouts, strict=True))
        if weight
    ]
    changed.data.name, changed.data.options = 'mixture', {'sources': sources}
    changed.data.path = changed.data.revision = ''
    turn_off(changed.model.lora)  # adapters are the policy's alone
    return changed


def policy_config(config: Any, i: int, folder: str, reward_folder: str) -> Any:
    """Returns iteration i's policy config. folder: of the model to start from; reward_folder: of the reward model."""
    changed = _iteration_config(config, i, folder)
    changed.supervised.updates = 0  # the config's updates are the reward model's
    changed.reward.options.model.folder = reward_folder
    changed.log.rollouts = 1
    if i:  # the adapters of the last iteration are merged in the weights
        changed.model.lora.path = ''
    return changed


def _iteration_config(config, i, folder):
    """A copy of the config with iteration i's seed, and with the model in `folder` as the start."""
    changed = copy.deepcopy(config)
    changed.seed, changed.model.path = config.seed + i, folder
    return changed


def _check_rollouts(workdir, steps):
    """Raises BadInput when a policy's run lacks rollouts of a step, since the next reward model learns from them."""
    folder = os.path.join(workdir, 'rollouts')
    count = len([name for name in os.listdir(folder) if name.endswith('.jsonl')]) if os.path.isdir(folder) else 0
    if count < steps:
        raise BadInput(
            folder,
            NO_VALUE,
            f'has rollouts of {count} steps, and {steps} were made; free disk space, delete {workdir}, and start again',
        )


def print_iterations(results: Sequence[dict[str, Any]]) -> None:
    """Prints a table with a row for each iteration. results: of `run`."""
    headings = [
        'iteration',
        'reward model:\npairs right',
        'area under\ncurve',
        'policy:\nreward',
        'policy:\ngreedy',
        'policy:\npass@1',
    ]
    rows = []
    for i, row in enumerate(results):
        numbers = [row['accuracy'], row['auc'], *(row['policy'].get(name) for name in ('reward', 'greedy', 'pass@1'))]
        rows.append([str(i), *('' if number is None else f'{number:.3f}' for number in numbers)])
    console.show_tables(console.make_table(headings, rows, title='held-out figures by iteration'))


def main() -> None:
    """Runs the command."""
    values = flags.FLAGS
    results = run(values.config, values.workdir, values.iterations, values.labelled)
    if processes.is_first():
        print_iterations(results)


if __name__ == '__main__':
    cli.define_flags()
    flags.DEFINE_integer('iterations', 3, 'How often the reward model and the policy are trained.')
    flags.DEFINE_string(
        'labelled', None, 'Folder of rollouts, scored by reward.verifier, for the first reward model.', required=True
    )
    cli.run(main)
