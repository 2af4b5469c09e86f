"""Writes a trained policy as a Hugging Face folder.

Examples:
    python -m grpo_jax export --workdir=runs/arithmetic --out=runs/exported --dtype=bfloat16
    python -m grpo_jax export --workdir=runs/arithmetic --out=runs/exported --push=ORG/NAME
"""

import os

from absl import flags
import jax
import ml_dtypes
import numpy as np

from grpo_jax import evaluate
from grpo_jax.errors import BadInput
from grpo_jax.hosts import hub, processes
from grpo_jax.hosts.files import atomic_folder
from grpo_jax.models import hf, lora, peft
from grpo_jax.run import checkpoint, cli, model_card
from grpo_jax.text import escape

DTYPES = {'float32': np.dtype(np.float32), 'bfloat16': np.dtype(ml_dtypes.bfloat16)}


def export(workdir: str, out: str, dtype: str, trust: bool = False, *, adapter: bool = False, push: str = '') -> None:
    """Writes the newest checkpoint's policy to the new folder `out`, in dtype 'float32' or 'bfloat16', with its card.

    Adapters are merged into the weights, or with `adapter` written alone, as a folder of peft. trust: the files of code
    that the run's config names may run, as they do when it is opened. push: the name on the hub under which the folder
    is then uploaded; what would keep it from that is BadInput before anything is written.
    """
    if os.path.exists(out):
        raise BadInput('--out', out, 'exists; name a new folder, nothing is overwritten')
    if push and processes.speaks():
        hub.check_upload('--push', push)
    experiment = evaluate.reopen(workdir, trust)
    model = experiment.settings.model
    if adapter and (not model.lora.rank or model.random_init):
        reason = 'the run has no adapters' if not model.lora.rank else 'the weights beside them are in no folder'
        raise BadInput('--adapter', True, f'{reason}; export without it')
    if adapter:
        peft.check_family('--adapter', True, experiment.model_config)
        if push and not model_card.base_model(experiment.config.to_dict()):
            raise BadInput(
                '--push',
                push,
                f'would have adapters of model.path = {model.path!r}, a folder that nobody else has; push without '
                '--adapter, or begin a run from the name of the model on the hub',
            )
    policy, step = evaluate.load_policy_and_step(experiment)
    policy = processes.fetch(policy)
    if not processes.is_first():
        return
    with atomic_folder(out) as temporary:
        if adapter:
            trained, _ = lora.split(policy)
            peft.save_adapters(temporary, trained, experiment.model_config, model.lora, model.path, DTYPES[dtype])
        else:
            params = jax.device_get({**policy, 'layers': lora.merge(policy['layers'])})
            hf.save(temporary, os.path.join(workdir, 'model'), params, experiment.model_config, DTYPES[dtype])
        name = push or os.path.basename(os.path.abspath(out))
        model_card.write_card(temporary, workdir, step, name, adapter)
    if push:
        hub.upload('--push', push, out, f'{os.path.basename(os.path.abspath(workdir))}, step {step}')


def check_whole(out: str, workdir: str, steps: int) -> None:
    """BadInput where `out` has been exported from a workdir whose run is to have more steps than it has."""
    done = max(checkpoint.steps(workdir), default=0)
    if os.path.exists(out) and done < steps:
        remedy = f'{out} is the policy of {done}, with which others began; use that, or another --workdir'
        raise BadInput('steps', steps, remedy)


def main() -> None:
    """The command."""
    values = flags.FLAGS
    export(values.workdir, values.out, values.dtype, values.trust, adapter=values.adapter, push=values.push)
    print(escape(f'wrote {values.out}' + f', and uploaded it to {hub.page(values.push)}' * bool(values.push)))


if __name__ == '__main__':
    flags.DEFINE_string('workdir', None, 'Folder of the run.', required=True)
    flags.DEFINE_string('out', None, 'Folder to write; must not exist.', required=True)
    flags.DEFINE_enum('dtype', 'float32', sorted(DTYPES), 'Of the written weights.')
    flags.DEFINE_bool('adapter', False, 'Write adapters alone, as a folder of peft, not merged.')
    flags.DEFINE_string('push', '', 'ORG/NAME, a model on the Hugging Face hub to upload to; a new one is private.')
    cli.define_trust()
    cli.run(main)
