"""Adapters of a run beside the weights that they leave frozen: how they begin, and where the weights are read again.

A checkpoint has the adapters, and of the frozen weights a digest. These are read from config.model.path again or, where
the model was random, from the cold start's checkpoint or drawn again; others are refused.
"""

from collections.abc import Callable
import os
import shutil
from typing import Any

import jax

from grpo_jax.errors import BadInput
from grpo_jax.learner.state import without_frozen
from grpo_jax.models import lora, peft, transformer
from grpo_jax.run import checkpoint, digest
from grpo_jax.sharding import compiled
from grpo_jax.types import TrainState

COLD_START = 'cold_start'  # in the workdir


def adapt(experiment: Any, params: Any) -> Any:
    """The policy of a model's plain parameters: with adapters, where the config has some, that begin as it says."""
    model, model_config = experiment.settings.model, experiment.model_config
    if not model.lora.rank:
        return params
    shardings = jax.tree.map(lambda x: x.sharding, experiment.abstract_trained())
    if model.lora.path:
        trained = peft.load_adapters(model.lora.path, model_config, model.lora, shardings)
    else:
        draw = jax.jit(lora.init, static_argnums=(1, 2), out_shardings=shardings)
        trained = draw(experiment.key, model_config, model.lora)
    return lora.join(trained, lora.freeze(params, model.lora, model.dtype))


def restore_state(experiment: Any, checkpoints: Any, abstract: TrainState, read: Callable) -> TrainState | None:
    """checkpoint.restore of what is trained, with what is frozen of the parameters; arguments as there."""
    state = checkpoint.restore(checkpoints, without_frozen(abstract), read)
    if state is None:
        return None
    path = checkpoint.path_of(experiment.workdir, int(state.step))
    return state.replace(params=with_frozen(experiment, state.params, path))


def with_frozen(experiment: Any, trained: Any, path: str, workdir: str = '') -> Any:
    """The policy of a checkpoint's folder, of which `trained` was read, in the experiment's workdir or another.

    BadInput when the frozen weights are not those with which it was saved. All processes must call it.
    """
    model = experiment.settings.model
    if not model.lora.rank:
        return trained
    frozen = lora.freeze(_weights(experiment, workdir or experiment.workdir), model.lora, model.dtype)
    if digest.combined(frozen) != checkpoint.recorded_frozen(path):
        source = 'model.random_init' if model.random_init else 'model.path'
        raise BadInput(
            source,
            model.random_init or model.path,
            f'has other weights, or in another model.dtype, than those that the adapters of {path} were trained on; '
            'bring them back, or use another --workdir',
        )
    return lora.join(trained, frozen)


def _weights(experiment, workdir):
    """The plain parameters that stay frozen in a workdir's run."""
    folder = os.path.join(workdir, COLD_START)
    if not experiment.settings.model.random_init or not checkpoint.steps(folder):
        return experiment.whole_params()
    table = transformer.param_table(experiment.model_config)
    return checkpoint.read_params(folder, compiled.abstract_params(table, experiment.mesh))[0]


def copy_cold_start(experiment: Any, workdir: str, folder: str) -> None:
    """Copies what stays frozen in a workdir's run, where the cold start has made it, to the folder of another run."""
    model, source = experiment.settings.model, os.path.join(workdir, COLD_START)
    if model.lora.rank and model.random_init and checkpoint.steps(source):
        shutil.copytree(source, os.path.join(folder, COLD_START))


def check(options: lora.LoraOptions, model_config: transformer.ModelConfig) -> None:
    """BadInput when the PEFT folder that adapters are to begin with does not fit; only headers are read."""
    if options.path:
        peft.check(options.path, model_config, options)
