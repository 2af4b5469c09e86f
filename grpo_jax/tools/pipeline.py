"""Runs the stages of a recipe one after another; a stage uses the policies or completions of earlier stages.

The same command goes on with a stopped stage, and skips finished ones.

Examples:
    python -m grpo_jax pipeline --config=recipes/r1_small --workdir=runs/r1_small
    python -m grpo_jax pipeline --config=recipes/r1 --workdir=runs/r1 --config.mesh.fsdp=64
"""

from collections.abc import Sequence
import os
import re
import sys
from typing import Any, NamedTuple

from absl import flags
from ml_collections import ConfigDict, config_flags

from grpo_jax import sample, supervised, train
from grpo_jax.errors import NO_VALUE, BadInput
from grpo_jax.hosts import json_file, processes
from grpo_jax.run import cli, config_file, console
from grpo_jax.run.loop import owns_workdir
from grpo_jax.run.open import make_algorithm
from grpo_jax.run.rows import read_rows
from grpo_jax.run.settings import Settings
from grpo_jax.run.steering import record_origins, recorded_origins
from grpo_jax.tools import export

COMMANDS = {'supervised': supervised, 'train': train, 'sample': sample}
SAMPLED = 'sampled.json'  # the Request of a stage whose samples are complete
FIGURES = ('reward', 'greedy', 'pass@1')  # figures of evaluations that the table shows


class Stage(NamedTuple):
    """A command of a recipe. Its results are in workdir/<name>, see run_folder and policy_folder."""

    name: str
    command: str  # supervised, train, sample
    config: Any = None  # for supervised and train
    of: str = ''  # for sample: the stage whose policy is sampled, with that stage's config
    request: sample.Request = sample.Request()  # for sample


def run_folder(workdir: str, name: str) -> str:
    """Returns the workdir of a stage's run, or the folder of its samples."""
    return os.path.join(workdir, name, 'run')


def policy_folder(workdir: str, name: str) -> str:
    """Returns the Hugging Face folder of a stage's final policy."""
    return os.path.join(workdir, name, 'policy')


def begin_with(config: Any, workdir: str, name: str) -> None:
    """Changes a config so that its stage starts from the final policy of stage `name`, whose adapters are merged."""
    config.model.path, config.model.random_init, config.model.lora.path = policy_folder(workdir, name), False, ''


@owns_workdir
def run(stages: Sequence[Stage], workdir: str) -> dict[str, list[dict[str, float]]]:
    """Runs the stages that are not done yet. Returns {stage: rows of evaluations.jsonl} for the stages of train.

    stages: from a recipe's get_stages(config, workdir). A stage's run is in workdir/<name>/run, and its policy in
    workdir/<name>/policy. All configs are checked before the first stage begins. Raises BadInput as `check` does, and
    as a stage's command does for a config that has changed since the stage ran.
    """
    check(stages, workdir)
    evaluations = {}
    for i, stage in enumerate(stages):
        folder = run_folder(workdir, stage.name)
        if not _is_finished(stage, folder):
            if stage.command != 'sample':
                updates = stage.config.steps if stage.command == 'train' else stage.config.supervised.updates
                export.check_whole(policy_folder(workdir, stage.name), folder, updates)
            if processes.is_first():
                print(f'stage {i + 1} of {len(stages)}: {stage.name}', file=sys.stderr, flush=True)
            if stage.command == 'sample':
                sample.run(None, run_folder(workdir, stage.of), folder, stage.request, trust=True)
                json_file.write(os.path.join(workdir, stage.name, SAMPLED), stage.request._asdict())
            else:
                data = stage.config.data.to_dict()
                earlier = [other for other in stages[:i] if other.config is not None]
                same_data = [other.name for other in earlier if other.config.data.to_dict() == data]
                if same_data and not recorded_origins(folder):
                    # read the same commits of the hub as the first stage with these data
                    record_origins(folder, recorded_origins(run_folder(workdir, same_data[0])))
                COMMANDS[stage.command].run(stage.config, folder)
        if stage.command == 'sample':
            continue
        policy = policy_folder(workdir, stage.name)
        if not os.path.exists(policy):
            export.export(folder, policy, 'float32', trust=True)  # the code is of the config given here
        processes.exchange(f'the policy of stage {stage.name}', '')
        if stage.command == 'train':
            evaluations[stage.name] = read_rows(os.path.join(folder, 'evaluations.jsonl'))
    return evaluations


def _is_finished(stage, folder):
    """Whether a stage's command has nothing left to do. folder: see run_folder."""
    if stage.command == 'sample':
        path = os.path.join(os.path.dirname(folder), SAMPLED)
        return os.path.isfile(path) and json_file.read(path) == stage.request._asdict()
    return COMMANDS[stage.command].is_finished(stage.config, folder)


def check(stages: Sequence[Stage], workdir: str) -> None:
    """Raises BadInput for stages that cannot follow one another, for an unknown command, and for a wrong config."""
    names = [stage.name for stage in stages]
    if not names or len({*names}) < len(names) or not all(re.fullmatch(r'\w+', name) for name in names):
        raise BadInput('stages', names, 'give one or more, each with a name of its own in letters, digits and _')
    trained = {}
    for stage in stages:
        if stage.command not in COMMANDS:
            raise BadInput(f'stage {stage.name}', stage.command, f'is no command; choose one of {", ".join(COMMANDS)}')
        if stage.command == 'sample':
            if stage.of not in trained:
                remedy = f'name one of {", ".join(trained)}' if trained else 'put one before it'
                raise BadInput(f'stage {stage.name}', stage.of, f'is no earlier stage with a policy; {remedy}')
            sample.check(run_folder(workdir, stage.name), stage.request)
            continue
        if not isinstance(stage.config, ConfigDict):
            raise BadInput(f'config of stage {stage.name}', stage.config, 'is no ConfigDict; begin with get_config()')
        settings = Settings.from_config(stage.config)
        if stage.command == 'train':
            make_algorithm(stage.config)
        if stage.command == 'train' and settings.data.epochs:
            remedy = 'a stage is a number of steps; use 0, and set steps'
            raise BadInput(f'data.epochs of stage {stage.name}', settings.data.epochs, remedy)
        if stage.command == 'supervised' and not settings.supervised.updates:
            raise BadInput(f'supervised.updates of stage {stage.name}', 0, 'leaves nothing to do; raise it')
        options = settings.model.lora
        for name, earlier in trained.items():
            if settings.model.path != policy_folder(workdir, name):
                continue
            # the stage starts from the policy of an earlier one, with merged adapters
            if options.path and options.path == earlier.path:
                remedy = f"is in the weights of stage {name} already; set it to '', or use pipeline.begin_with"
                raise BadInput(f'model.lora.path of stage {stage.name}', options.path, remedy)
            if options.base_dtype and earlier.base_dtype:
                raise BadInput(
                    f'model.lora.base_dtype of stage {stage.name}',
                    options.base_dtype,
                    f'rounds weights in which adapters of stage {name} are merged, so that little of them is left; '
                    "use ''",
                )
        trained[stage.name] = options


def read_stages(name: str, config: Any, workdir: str) -> list[Stage]:
    """Returns get_stages(config, workdir) of the recipe `name`; raises BadInput for an experiment without stages."""
    path = config_file.locate(name.partition(':')[0])
    with open(path, encoding='utf8') as file:
        if 'def get_stages(' not in file.read():
            raise BadInput(
                '--config', name, 'has no get_stages(config, workdir), so it is no recipe; train it with grpo_jax.train'
            )
    stages = config_file.call_function(path, 'get_stages', config, workdir)
    # compare fields, not classes: this module runs as __main__, and a recipe imports another copy of Stage
    if not (isinstance(stages, list) and all(getattr(stage, '_fields', ()) == Stage._fields for stage in stages)):
        raise BadInput(
            path, NO_VALUE, f'returns a {type(stages).__name__} from get_stages(); return a list of pipeline.Stage'
        )
    return stages


def print_evaluations(evaluations: dict[str, list[dict[str, float]]]) -> None:
    """Prints a table with a row for each stage: held-out figures before and after the stage. evaluations: of `run`."""
    headings = ['stage', *(f'{name}\n{when}' for name in FIGURES for when in ('before', 'after'))]
    rows = []
    for stage, evaluated in evaluations.items():
        numbers = [row.get(name) for name in FIGURES for row in (evaluated[0], evaluated[-1])]
        rows.append([stage, *('' if number is None else f'{number:.3f}' for number in numbers)])
    console.show_tables(console.make_table(headings, rows, title='held-out figures by stage'))


def main() -> None:
    """Runs the command."""
    values = flags.FLAGS
    name = config_flags.get_config_filename(values['config'])
    evaluations = run(read_stages(name, values.config, values.workdir), values.workdir)
    if processes.is_first():
        print_evaluations(evaluations)


if __name__ == '__main__':
    cli.define_flags()
    cli.run(main)
