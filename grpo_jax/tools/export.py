"""Writes a trained policy as a Hugging Face folder.

Examples:
    python -m grpo_jax export --workdir=runs/arithmetic --out=runs/exported --dtype=bfloat16
    python -m grpo_jax export --workdir=runs/arithmetic --out=runs/exported --push=ORG/NAME"""

from collections.abc import Iterable, Mapping
import contextlib
import json
import os
import re
from typing import Any

from absl import flags
import jax
import ml_dtypes
import numpy as np

from grpo_jax import evaluate
from grpo_jax.errors import BadInput
from grpo_jax.hosts import files, hub, json_file, processes
from grpo_jax.hosts.files import atomic_folder
from grpo_jax.models import hf, lora
from grpo_jax.models.hf import peft
from grpo_jax.run import checkpoint, cli, config_file, steering
from grpo_jax.run.settings import recorded_form
from grpo_jax.text import escape
from grpo_jax.tools.provenance import as_object

DTYPES = {'float32': np.dtype(np.float32), 'bfloat16': np.dtype(ml_dtypes.bfloat16)}
FILE = 'README.md'
TEMPLATE = os.path.join(os.path.dirname(__file__), 'model_card.md.jinja')
HUB_NAME = re.compile(r'[\w-][\w.-]*/[\w-][\w.-]*')
FIGURES = re.compile(r'greedy|pass@\d+|maj@\d+|reward|length|truncated|unparsed')  # columns of the card's curve
MOST_ROWS = 20  # of the card's curve
UNMENTIONED = ('checkpoint', 'diagnose', 'log', 'mesh')  # sections of a config without effect on learning


def export(
    workdir: str,
    out: str,
    dtype: str,
    trust: bool = False,
    adapter: bool = False,
    push: str = '',
    step: int | None = None,
) -> None:
    """Writes a checkpoint's policy, with a model card, as a Hugging Face folder.

    out: a new folder; dtype: 'float32' or 'bfloat16'; trust: whether code files that the run's config names may run;
    adapter: whether to write the adapters alone, as a peft folder, instead of merged weights; push: ORG/NAME on the hub
    to which the folder is uploaded, '' for none; step: of the checkpoint, None for the newest. Raises BadInput, before
    anything is written, when the export or the upload cannot work.
    """
    if os.path.exists(out):
        raise BadInput('--out', out, 'exists, and nothing is overwritten; name a new folder')
    if push and processes.speaks():
        hub.check_upload('--push', push)
    run = evaluate.open_recorded(workdir, trust)
    model, model_config = run.settings.model, run.model.config
    if adapter and (not model.lora.rank or model.random_init):
        reason = "the adapters' random model is in no folder" if model.lora.rank else 'the run has no adapters'
        raise BadInput('--adapter', True, f'{reason}; leave it out to export the whole model')
    if adapter:
        peft.check_family('--adapter', True, model_config)
        if push and not base_model(run.settings.recorded):
            raise BadInput(
                '--push',
                push,
                f'would have adapters of model.path = {model.path!r}, a folder that nobody else has; push without '
                '--adapter, or train from a model that is on the hub',
            )
    policy, step = evaluate.open_policy(run, step)
    policy = processes.fetch(policy)
    if not processes.is_first():
        return
    with atomic_folder(out) as temporary:
        if adapter:
            trained, _ = lora.split(policy)
            base = base_model(run.settings.recorded) or os.path.abspath(
                model.path
            )  # the path may be read in another folder
            peft.save_adapters(temporary, trained, model_config, model.lora, base, DTYPES[dtype])
        else:
            params = jax.device_get({**policy, 'layers': lora.merge(policy['layers'])})
            hf.save(temporary, os.path.join(workdir, 'model'), params, model_config, DTYPES[dtype])
        name = push or os.path.basename(os.path.abspath(out))
        write_card(temporary, workdir, step, name, adapter)
    if push:
        hub.upload('--push', push, out, f'{os.path.basename(os.path.abspath(workdir))}, step {step}')


def check_whole(out: str, workdir: str, steps: int) -> None:
    """Raises BadInput when the run in workdir would train on to `steps` steps, and `out` has an earlier policy."""
    done = max(checkpoint.steps(workdir), default=0)
    if os.path.exists(out) and done < steps:
        remedy = f'{out} is the policy of step {done}, from which later runs began; use {done}, or name a new --workdir'
        raise BadInput('steps', steps, remedy)


def write_card(folder: str, workdir: str, step: int, name: str, adapter: bool = False) -> None:
    """Writes README.md, the card of a run's policy, into a model folder.

    workdir, step: the run and the policy's step; name: of the model; adapter: whether the folder has adapters alone.
    The card shows only the last part of paths on this machine, and leaves out files of the run that are absent or
    damaged.
    """
    from huggingface_hub import ModelCard, ModelCardData  # a quarter of a second

    config = as_object(_read_json(workdir, 'config.json'))
    origins = _read_json(workdir, 'data.json')
    origins = [as_object(origin) for origin in origins] if isinstance(origins, list) else []
    evaluation = as_object(_read_json(workdir, 'evaluation.json'))
    environments = _read_json(workdir, steering.ENVIRONMENT)
    environment = as_object(environments[-1]) if isinstance(environments, list) and environments else {}
    rows = _evaluations_until(workdir, step)  # none in supervised training; GRPO evaluates before the first step
    base, model = base_model(config), as_object(config.get('model'))
    random = 'random weights' if model.get('random_init') else 'a model of a folder'
    head = ModelCardData(
        base_model=base or None,
        library_name='peft' if adapter else 'transformers',
        pipeline_tag='text-generation',
        tags=[*['grpo', 'reinforcement-learning'] * bool(rows), 'grpo_jax'],
        datasets=list(dict.fromkeys(str(origin.get('path')) for origin in origins if origin.get('commit'))) or None,
    )
    card = ModelCard.from_template(
        head,
        TEMPLATE,
        code=_as_code,
        named=_name_values,
        name=escape(name),
        step=step,
        adapter=adapter,
        rewarded=bool(rows),
        begun=f'[{base}]({hub.page_url(base)})' if base else random,
        # adapters need the model that training began with, and its tokenizer
        loaded=repr((base or _cut_folders(str(model.get('path')))) if adapter else name),
        called=repr(name),
        data=as_object(config.get('data')),
        origins=origins,
        curve=_curve_table(rows),
        evaluation=evaluation,
        evaluated=as_object(evaluation.get('model')).get('step'),
        figures=_figures_table(evaluation),
        settings=_settings_table(config),
        environment=environment,
        version=steering.code_name(as_object(environment.get('code'))),
        packages=_name_values(as_object(environment.get('packages'))),
        devices=as_object(environment.get('devices')),
        programs=_name_values(as_object(_read_json(workdir, 'programs.json'))),
    )
    with files.atomic_write(os.path.join(folder, FILE)) as file:
        file.write(str(card))


def _read_json(workdir, name) -> Any:
    """The content of a JSON file in workdir; None when it is absent or damaged."""
    with contextlib.suppress(BadInput):
        return json_file.read(os.path.join(workdir, name))
    return None


def _evaluations_until(workdir, step):
    """The rows of a run's evaluations.jsonl up to `step`; [] without the file."""
    rows = []
    with contextlib.suppress(OSError), open(os.path.join(workdir, 'evaluations.jsonl'), encoding='utf8') as lines:
        for line in lines:
            with contextlib.suppress(ValueError):  # a run that was killed may leave half a row
                row = as_object(json.loads(line))
                if row.get('step', 0) <= step:
                    rows.append(row)
    return rows


def base_model(config: Mapping[str, Any]) -> str:
    """Returns the hub name of the model that a config begins with; '' for random weights and for a local folder."""
    model = as_object(config.get('model'))
    path = str(model.get('path', ''))
    local = model.get('random_init') or path.startswith('configs/') or os.path.isdir(path)
    return path if not local and HUB_NAME.fullmatch(path) else ''


def _curve_table(rows) -> str:
    """The Markdown table of evaluations: a row for each of at most MOST_ROWS steps; '' without any of FIGURES."""
    names = [name for name in dict.fromkeys(key for row in rows for key in row) if FIGURES.fullmatch(name)]
    kept = rows if len(rows) <= MOST_ROWS else [*rows[:: -(-len(rows) // (MOST_ROWS - 1))], rows[-1]]
    cells = [[row.get('step'), *(row.get(name) for name in names)] for row in kept]
    return _table(['step', *names], cells) if names else ''


def _figures_table(evaluation) -> str:
    """The Markdown table of evaluation.json's figures, each with its interval; '' without figures."""
    keys = ('mean', 'low', 'high')
    figures = {name: as_object(value) for name, value in as_object(evaluation.get('figures')).items()}
    rows = [[name, *(value.get(key) for key in keys)] for name, value in figures.items()]
    return _table(['figure', *keys], rows) if rows else ''


def _settings_table(config) -> str:
    """The Markdown table of the settings that differ from default.py, except for the sections UNMENTIONED."""
    changes = steering.differences(recorded_form(config_file.read_defaults()), config)
    changes = [change for change in changes if change.key.split('.')[0] not in UNMENTIONED]
    return _table(['key', 'value'], [[change.key, change.new] for change in changes])


def _table(names: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """The Markdown table with these headings and rows of cells."""
    names = list(names)
    lines = [f'| {" | ".join(names)} |', '|---' * len(names) + '|']
    return '\n'.join([*lines, *(f'| {" | ".join(map(_as_code, row))} |' for row in rows)])


def _name_values(values):
    """A list of texts 'name value', one for each item of a dict; empty values are left out."""
    return [f'{name} {_as_code(value)}' for name, value in values.items() if value]


def _as_code(value):
    """A value as Markdown code, in which Markdown has no effect; floats to four digits; '' for None."""
    if value is None:
        return ''
    if isinstance(value, float):
        return f'{value:.4g}'
    value = _cut_folders(value)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f'`{escape(text).replace("`", chr(39)).replace("|", chr(92) + "|")}`' if text else ''


def _cut_folders(value):
    """The value, with each absolute path and path from ~ in it cut to its last part."""
    if isinstance(value, str):
        return os.path.basename(os.path.normpath(value)) if re.match(r'[/~\\]|[A-Za-z]:\\', value) else value
    if isinstance(value, dict):
        return {key: _cut_folders(inner) for key, inner in value.items()}
    return [_cut_folders(inner) for inner in value] if isinstance(value, list) else value


def main() -> None:
    """Runs the command."""
    values = flags.FLAGS
    chosen = values.adapter, values.push, values.step
    export(values.workdir, values.out, values.dtype, values.trust, *chosen)
    print(escape(f'wrote {values.out}' + f', and uploaded it to {hub.page_url(values.push)}' * bool(values.push)))


if __name__ == '__main__':
    flags.DEFINE_string('workdir', None, 'Folder of the run whose policy is exported.', required=True)
    flags.DEFINE_string('out', None, 'New folder for the model.', required=True)
    flags.DEFINE_enum('dtype', 'float32', sorted(DTYPES), 'Type of the numbers in the exported weights.')
    flags.DEFINE_bool('adapter', False, 'Export the adapters alone, for peft, and not the model with them merged in.')
    flags.DEFINE_string(
        'push',
        '',
        'ORG/NAME of a model on the Hugging Face hub, to which the folder is uploaded; a new model is private.',
    )
    cli.define_step()
    cli.define_trust()
    cli.run(main)
