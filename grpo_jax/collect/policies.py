"""Other policies beside the one that learns: the reference and its renewals, a teacher, and logprobs by any of them.

`make_logprobs` is the stage of a step that computes them: by the learner's programs, or by the sampler's engine, which
decodes the same tokens again (`learner.old_logprobs`).

A teacher is another model with the policy's tokenizer (on-policy distillation). It never changes, so no checkpoint
holds it: each start of a run reads it from config.teacher.path, and the workdir knows the digest of the weights that
the run began with. The reference lies in the TrainState, and is renewed through a checkpoint of the policy.
"""

from collections.abc import Callable, Mapping
import contextlib
import logging
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.algorithms import Algorithm
from grpo_jax.collect.options import READ_FROM_DATA, Collection
from grpo_jax.errors import BadInput
from grpo_jax.hosts import json_file, processes
from grpo_jax.hosts.files import foreign_writing
from grpo_jax.learner.options import Learning
from grpo_jax.learner.programs import Learner, fetch_reference, make_teacher
from grpo_jax.models import hf, lora, transformer
from grpo_jax.models.hf import families
from grpo_jax.models.lora import OFF
from grpo_jax.run import checkpoint, digest
from grpo_jax.sampler import Sampling
from grpo_jax.sampler.engine import Engine
from grpo_jax.sharding import batches, specs
from grpo_jax.sharding.compiled import Executable
from grpo_jax.types import Prompts, Rollout, TrainState

logger = logging.getLogger('grpo_jax')
TEACHER = 'teacher.json'  # in the workdir
RENEWED = 'reference_renewed'  # a metric
NEEDED = "set algorithm.teacher_coef, or algorithm.regularizers=('distill',), as the presets opd and opd_reward do"

Fields = dict[str, jax.Array]  # of Experience, by name


class Logprobs(NamedTuple):
    """Computes the logprobs that an algorithm reads: by the policy, the reference and the teacher."""

    compute: Callable[[TrainState, Rollout, Any], Fields]  # of the step's state, its rollout, and the packed rows
    programs: dict[str, Executable]  # by name, besides the learner's own
    records: dict[str, Any]  # what the workdir is to know of it: JSON by file


def make_logprobs(run: Any, learner: Learner, engine: Engine | None) -> Logprobs:
    """The Logprobs of a Run: by the learner, then a teacher and the sampler's programs where they are asked for.

    BadInput for a teacher of other weights than those that the run began with.
    """
    settings, algorithm = run.settings, run.algorithm
    scorers: list[Callable[..., Fields]] = [learner.logprobs]
    programs, records = {}, {}
    if algorithm.needs_teacher:
        teacher = open_teacher(run)
        scorers.append(lambda state, rollout, packed: teacher.score(rollout, packed))
        programs['teacher'] = teacher.program
        records[TEACHER] = {'path': settings.teacher.path, 'digest': teacher.digest}
    if settings.learning.decoded and engine is not None:
        key = jax.random.key(settings.seed)
        scorers.append(decode_again(engine, key, settings.group_size, run.mesh, algorithm.needs_reference))

    def compute(state, rollout, packed):
        fields = {}
        for scorer in scorers:
            fields |= scorer(state, rollout, packed)
        return fields

    return Logprobs(compute, programs, records)


def decode_again(
    engine: Engine, key: Any, group_size: int, mesh: jax.sharding.Mesh, with_reference: bool
) -> Callable[[TrainState, Rollout, Any], Fields]:
    """(state, rollout, packed) -> old_logprobs, and ref_logprobs, by the programs that sampled: old_logprobs='decode'.

    The engine decodes the rollout's tokens again in the same shapes; with the weights that sampled them, the numbers
    are the sampler's bit for bit. All processes must call it.
    """

    def score(state, rollout, packed):
        policies: Mapping[str, Any] = {'old_logprobs': state.params}
        if with_reference:
            policies |= {'ref_logprobs': fetch_reference(state)}
        queries = rollout.prompt_mask.shape[1]
        tokens, masks = processes.fetch((rollout.tokens, (rollout.prompt_mask, rollout.completion_mask)))
        ids = np.arange(len(tokens) // group_size, dtype=np.int32)
        prompts = Prompts(tokens[::group_size, :queries], masks[0][::group_size], ids)
        given = np.where(masks[1], tokens[:, queries:], -1)
        prompts, given = batches.put_rows((prompts, given), mesh)
        return {
            name: engine(params, prompts, key, int(state.step), given=given).logprobs
            for name, params in policies.items()
        }

    return score


def check_decoded(learning: Learning, sampling: Sampling, options: Collection, algorithm: Algorithm) -> None:
    """BadInput for settings with which the sampler cannot compute a step's logprobs again."""
    if not learning.decoded:
        return
    hindered = {
        f'collection.source = {algorithm.source}': algorithm.source in ('reference', *READ_FROM_DATA),
        f'collection.dead_groups = {options.dead_groups}': options.dead_groups in ('resample', 'replay'),
        f'collection.allocation = {options.allocation}': options.allocation != 'equal',
        'rollout.weights_dtype = int8': sampling.weights_dtype == 'int8',
        'rollout.cache_dtype = int8': sampling.cache_dtype == 'int8',
    }
    for setting, hinders in hindered.items():
        if hinders:
            raise BadInput(
                'learner.old_logprobs',
                'decode',
                f'is for rollouts that the policy samples at once; {setting} is not so',
            )


class Teacher(NamedTuple):
    """A teacher on the devices, or in the hosts' memory until it is used."""

    program: Executable  # the scorer, of learner.programs.make_teacher
    params: Any  # float32
    shardings: Any  # of params on the devices, where the program reads them
    digest: str  # of params

    def score(self, rollout: Rollout, packed: Any) -> Fields:
        """The teacher's logprobs of a rollout, and of its likeliest tokens if asked for."""
        output = self.program(jax.device_put(self.params, self.shardings), rollout, packed)
        fields = {
            'teacher_logprobs': output.logprobs,
            'teacher_top': output.top_logprobs,
            'teacher_ids': output.top_ids,
        }
        return {name: x for name, x in fields.items() if x is not None}


def open_teacher(run: Any) -> Teacher:
    """The Teacher of a Run; BadInput when its weights are not those that the run began with."""
    source = run.settings.teacher
    folder = hf.find(source.path)
    config = families.load_config(folder)
    shardings = specs.params(transformer.param_table(config), run.mesh)
    params = hf.load_params(folder, config, shardings)
    program, known = make_teacher_program(run, config), digest.combined(params)
    record = os.path.join(run.workdir, TEACHER)
    if os.path.isfile(record) and json_file.read_object(record).get('digest') != known:
        raise BadInput(
            'teacher.path',
            source.path,
            f'has other weights than those that the run in {run.workdir} began with; bring them back, or use another '
            '--workdir',
        )
    params = jax.device_put(params, specs.in_host(shardings)) if source.park else params
    return Teacher(program, params, shardings, known)


def make_teacher_program(run: Any, config: transformer.ModelConfig) -> Executable:
    """The Executable of learner.programs.make_teacher for such a model as the teacher of a Run."""
    settings, algorithm = run.settings, run.algorithm
    learning = settings.learning._replace(lora=OFF, dtype=settings.teacher.dtype)
    shapes = settings.step_shapes(algorithm)
    return make_teacher(config, algorithm, run.mesh, shapes, learning, run.model.config.vocab_size)


def check_teacher(source: Any, algorithm: Algorithm, vocab_size: int) -> None:
    """BadInput where algorithm and config.teacher, a TeacherSource, do not go together; nothing is read."""
    if not algorithm.needs_teacher:
        for key, value in source._asdict().items():
            if value != type(source)._field_defaults[key]:
                raise BadInput(f'teacher.{key}', value, f'nothing reads what a teacher says; {NEEDED}, or leave it out')
        return
    if not source.path:
        raise BadInput('teacher.path', '', 'the algorithm learns from a teacher; name its folder or hub name')
    if algorithm.teacher_top_k > vocab_size:
        raise BadInput(
            'algorithm.teacher_top_k', algorithm.teacher_top_k, f"is above the policy's {vocab_size} tokens; use less"
        )


def check_teacher_model(
    path: str, tokenizer: Any, vocab_size: int, columns: int, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh
) -> None:
    """BadInput when the model in config.teacher.path cannot teach the policy; of its weights only headers are read.

    tokenizer, vocab_size: the policy's; columns: tokens of a prompt and its completion, at most.
    """
    with _as_teacher(path):
        folder = hf.find(path)
        hf.check_weights(folder, teacher_config(folder, path, vocab_size, columns, mesh))
        known = hf.load_tokenizer(folder).get_vocab()
    for token, number in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        if known.get(token) != number:
            other = 'does not know it' if token not in known else f'has {known[token]} for it'
            raise BadInput(
                'teacher.path',
                path,
                f"is for other tokens: {token!r} is the policy's {number}, and the teacher's tokenizer {other}; choose "
                'a teacher with the same tokenizer',
            )


def teacher_config(folder: str, path: str, vocab_size: int, columns: int, mesh: Any) -> transformer.ModelConfig:
    """The ModelConfig in a teacher's folder; BadInput where the teacher does not fit the policy or the mesh."""
    with _as_teacher(path):
        config, context = families.load_config(folder), families.context_length(folder)
        specs.params(transformer.param_table(config), mesh)  # raises where an axis does not divide
    if config.vocab_size < vocab_size:
        raise BadInput(
            'teacher.path',
            path,
            f'has {config.vocab_size} tokens and the policy {vocab_size}; a teacher must know all of them',
        )
    if columns > context:
        raise BadInput(
            'teacher.path',
            path,
            f'reads {context} positions, and data.max_prompt_tokens + rollout.max_tokens are {columns}; lower one',
        )
    return config


@contextlib.contextmanager
def _as_teacher(path):
    """What is wrong with a model is said of teacher.path."""
    try:
        yield
    except BadInput as error:
        name = 'teacher.path' if error.args[0] == 'model.path' else error.args[0]
        raise BadInput(name, path if name == 'teacher.path' else error.args[1], error.args[2]) from None


def make_renewal(
    run: Any, checkpoints: Any, abstract: TrainState
) -> Callable[[TrainState], tuple[TrainState, dict[str, bool]]]:
    """state -> (TrainState, {'reference_renewed': whether its reference was}) before a step of a Run.

    The new reference is read from the policy's checkpoint of that step. hard: the policy itself, every reference_every
    steps (DeepSeek-R1, arXiv 2501.12948: 400), and the adaptive kl_coef begins anew. polyak: ref + reference_mix
    (policy - ref) (TR-DPO, arXiv 2404.09656: 0.6 every 512). Renewing is a function of the checkpointed state, so that
    it happens again when a run resumes at that step.
    """
    options, kl_coef = run.settings.collection, run.settings.algorithm.kl_coef
    every, share = options.reference_every, options.reference_mix

    def renew(state):
        step = int(state.step)
        if state.ref_params is None or not every or step == 0 or step % every:
            return state, {RENEWED: False}
        with foreign_writing(checkpoints.directory):
            if checkpoints.latest_step() != step:
                checkpoint.save(checkpoints, state)
            checkpoints.wait_until_finished()
        path = os.path.join(checkpoints.directory, str(step))
        if options.reference == 'hard':
            policy = checkpoint.read_tree(path, {'params': abstract.ref_params}, partial=True)['params']
            coefficients = state.aux['coefficients'] | {'kl_coef': jnp.float32(kl_coef)}
            return state.replace(ref_params=policy, aux=state.aux | {'coefficients': coefficients}), {RENEWED: True}
        policy = checkpoint.read_tree(path, {'params': abstract.params}, partial=True)['params']

        def mixed(old, new, like):
            old = jax.device_put(old, new.sharding)  # it may wait in the hosts' memory
            return jax.device_put(old + share * (new - old), like.sharding)

        return state.replace(ref_params=jax.tree.map(mixed, state.ref_params, policy, abstract.ref_params)), {
            RENEWED: True
        }

    return renew


def check_reference(
    path: str, kept: bool, workdir: str, source: Any, config: transformer.ModelConfig, mesh: jax.sharding.Mesh
) -> None:
    """BadInput when config.reference.path leads to no policy of the run's shapes; only headers are read.

    kept: the algorithm keeps a reference; BadInput for a path where it keeps none. source: config.model, a ModelSource.
    """
    if path and source.lora.rank:
        raise BadInput(
            'reference.path',
            path,
            "the reference of adapters shares the policy's frozen weights; use '' or lora.rank 0",
        )
    if path and not kept:
        raise BadInput(
            'reference.path', path, "this algorithm keeps no reference; set algorithm.kl or log.kl_every, or use ''"
        )
    if not path or checkpoint.steps(workdir):  # a run that goes on has its reference
        return
    if checkpoint.steps(path) or _is_checkpoint(path):
        folder = path if _is_checkpoint(path) else checkpoint.newest(path)
        trained = lora.abstract_trained(config, source.lora, source.dtype, mesh)
        checkpoint.check_params(folder, trained, 'reference.path', path)
        return
    try:
        hf.check_weights(hf.find(path), config)
    except BadInput as error:
        raise BadInput('reference.path', path, error.args[2]) from None


def anchor(state: TrainState, abstract: TrainState, path: str, config: transformer.ModelConfig) -> TrainState:
    """The state of a new run with the policy of config.reference.path, if it names one, as its reference."""
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
        policy = hf.load_params(hf.find(path), config, shardings)
    logger.warning('the reference is the policy of %s%s', path, where)
    return state.replace(ref_params=policy)


def _is_checkpoint(path):
    """Whether a path is the folder of a checkpoint."""
    return os.path.isfile(os.path.join(path, checkpoint.METADATA))
