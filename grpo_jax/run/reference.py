"""Where the reference policy comes from, and how it is renewed: through a checkpoint of the policy."""

import logging
import os

import jax
import jax.numpy as jnp

from grpo_jax.errors import BadInput
from grpo_jax.hosts.files import foreign_writing
from grpo_jax.models import hf
from grpo_jax.run import checkpoint
from grpo_jax.run.settings import Settings
from grpo_jax.types import TrainState

logger = logging.getLogger('grpo_jax')


def refresh(settings: Settings, checkpoints, state: TrainState, abstract: TrainState) -> tuple[TrainState, bool]:
    """(TrainState, whether its reference was renewed) before a step, from the policy's checkpoint of that step.

    hard: the policy itself, every reference_every steps (DeepSeek-R1, arXiv 2501.12948: 400), and the adaptive kl_coef
    begins anew. polyak: ref + reference_mix (policy - ref) (TR-DPO, arXiv 2404.09656: 0.6 every 512). Renewing is a
    function of the checkpointed state, so that it happens again when a run resumes at that step.
    """
    collection, step = settings.collection, int(state.step)
    every = collection.reference_every
    if state.ref_params is None or not every or step == 0 or step % every:
        return state, False
    with foreign_writing(checkpoints.directory):
        if checkpoints.latest_step() != step:
            checkpoint.save(checkpoints, state)
        checkpoints.wait_until_finished()
    path = os.path.join(checkpoints.directory, str(step))
    if collection.reference == 'hard':
        policy = checkpoint.read_tree(path, {'params': abstract.ref_params}, partial=True)['params']
        coefficients = state.aux['coefficients'] | {'kl_coef': jnp.float32(settings.algorithm.kl_coef)}
        return state.replace(ref_params=policy, aux=state.aux | {'coefficients': coefficients}), True
    policy = checkpoint.read_tree(path, {'params': abstract.params}, partial=True)['params']
    share = collection.reference_mix

    def mixed(old, new, like):
        old = jax.device_put(old, new.sharding)  # it may wait in the hosts' memory
        return jax.device_put(old + share * (new - old), like.sharding)

    return state.replace(ref_params=jax.tree.map(mixed, state.ref_params, policy, abstract.ref_params)), True


def check(experiment, kept: bool) -> None:
    """BadInput when config.reference.path leads to no policy of the experiment's shapes; only headers are read.

    kept: the algorithm keeps a reference; BadInput for a path where it keeps none.
    """
    path = experiment.settings.reference.path
    if path and experiment.settings.model.lora.rank:
        raise BadInput(
            'reference.path',
            path,
            "the reference of adapters shares the policy's frozen weights; use '' or lora.rank 0",
        )
    if path and not kept:
        raise BadInput(
            'reference.path', path, "this algorithm keeps no reference; set algorithm.kl or log.kl_observe, or use ''"
        )
    if not path or checkpoint.steps(experiment.workdir):  # a run that goes on has its reference
        return
    if checkpoint.steps(path) or _is_checkpoint(path):
        folder = path if _is_checkpoint(path) else checkpoint.newest(path)
        checkpoint.check_params(folder, experiment.abstract_trained(), 'reference.path', path)
        return
    try:
        hf.check_weights(hf.find(path), experiment.model_config)
    except BadInput as error:
        raise BadInput('reference.path', path, error.args[2]) from None


def initial_state(experiment, learner, params) -> TrainState:
    """The TrainState at the start of a run from the policy's params."""
    return anchor(experiment, learner.initial(params), learner.state)


def anchor(experiment, state: TrainState, abstract: TrainState) -> TrainState:
    """The state of a new run with the policy of config.reference.path, if it names one, as its reference."""
    path = experiment.settings.reference.path
    if not path:
        return state
    where = ''
    if _is_checkpoint(path):
        policy = checkpoint.read_tree(os.path.abspath(path), {'params': abstract.ref_params}, partial=True)['params']
    elif checkpoint.steps(path):
        policy, step = checkpoint.read_params(path, abstract.ref_params)
        where = f', step {step}'
    else:
        shardings = jax.tree.map(lambda x: x.sharding, abstract.ref_params)
        policy = hf.load_params(hf.find(path), experiment.model_config, shardings)
    logger.warning('the reference is the policy of %s%s', path, where)
    return state.replace(ref_params=policy)


def _is_checkpoint(path):
    """Whether a path is the folder of a checkpoint."""
    return os.path.isfile(os.path.join(path, checkpoint.METADATA))
