"""Writes a trained policy as a Hugging Face folder.

Examples:
    python -m grpo_jax.export --workdir=runs/arithmetic --out=runs/exported
    python -m grpo_jax.export --workdir=runs/arithmetic --out=runs/exported16 --dtype=bfloat16
"""

import os

from absl import flags
import ml_dtypes
import numpy as np

from grpo_jax import evaluate
from grpo_jax.errors import BadInput
from grpo_jax.hosts import processes
from grpo_jax.hosts.files import atomic_folder
from grpo_jax.models import hf
from grpo_jax.run import cli
from grpo_jax.text import escape

DTYPES = {'float32': np.dtype(np.float32), 'bfloat16': np.dtype(ml_dtypes.bfloat16)}


def export(workdir: str, out: str, dtype: str, trust: bool = False) -> None:
    """Writes the newest checkpoint's policy to the new folder `out`, in dtype 'float32' or 'bfloat16'.

    trust: the files of code that the run's config names may run, as they do when it is opened.
    """
    if os.path.exists(out):
        raise BadInput('--out', out, 'exists; name a new folder, nothing is overwritten')
    experiment = evaluate.reopen(workdir, trust)
    params = processes.fetch(evaluate.load_policy(experiment))
    if not processes.is_first():
        return
    with atomic_folder(out) as temporary:
        hf.save(temporary, os.path.join(workdir, 'model'), params, experiment.model_config, DTYPES[dtype])


def main() -> None:
    """The command."""
    export(flags.FLAGS.workdir, flags.FLAGS.out, flags.FLAGS.dtype, flags.FLAGS.trust)
    print(escape(f'wrote {flags.FLAGS.out}'))


if __name__ == '__main__':
    flags.DEFINE_string('workdir', None, 'Folder of the run.', required=True)
    flags.DEFINE_string('out', None, 'Folder to write; must not exist.', required=True)
    flags.DEFINE_enum('dtype', 'float32', sorted(DTYPES), 'Of the written weights.')
    cli.define_trust()
    cli.run(main)
