"""The reference and the teacher, which stand beside the policy that learns, and the stage that computes logprobs.

`make_logprobs` makes this stage of a step: it uses the learner's programs, and with learner.old_logprobs=decode the
sampler's engine, which decodes the same tokens again.

A teacher is another model with the policy's tokenizer (on-policy distillation). It never changes, so no checkpoint
holds it: each start of a run reads it from config.teacher.path, and compares its digest with teacher.json in the
workdir. The reference is in the TrainState; to renew it, a run reads a checkpoint of the policy.
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
from grpo_jax.collect.options import EXCHANGED, READ_FROM_DATA, CollectOptions
from grpo_jax.errors import NO_VALUE, BadInput
from grpo_jax.hosts import json_file, processes
from grpo_jax.hosts.files import writing
from grpo_jax.learner.options import Learning
from grpo_jax.learner.programs import Learner, fetch_reference, make_teacher
from grpo_jax.models import hf, transformer
from grpo_jax.models.abstract import abstract_trained
from grpo_jax.models.hf import families
from grpo_jax.models.lora import OFF
from grpo_jax.run import checkpoint, digest
from grpo_jax.sampler import Sampling
from grpo_jax.sampler.engine import Sampler
from grpo_jax.sharding import batches, specs
from grpo_jax.sharding.compiled import Executable
from grpo_jax.sharding.mesh import ROW_AXES
from grpo_jax.sharding.sides import Sides, move_rows
from grpo_jax.types import Prompts, Rollout, TrainState

logger = logging.getLogger('grpo_jax')
TEACHER = 'teacher.json'  # in the workdir
RENEWED = 'reference_renewed'  # a metric
NEEDED = "set algorithm.teacher_coef, or algorithm.regularizers=('distill',), as the presets opd and opd_reward do"

Fields = dict[str, jax.Array]  # some fields of Experience, by name


class Logprobs(NamedTuple):
    """The stage of a step that computes the logprobs which an algorithm reads: of policy, reference and teacher."""

    compute: Callable[[TrainState, Rollout, Any], Fields]  # (state, rollout, packed rows) -> fields
    programs: dict[str, Executable]  # by name, without the learner's
    records: dict[str, Any]  # what is written into the workdir: JSON by file name


def make_logprobs(run: Any, learner: Learner, engine: Sampler | None) -> Logprobs:
    """The Logprobs of a Run; raises BadInput if the teacher has other weights than those that the run began with."""
    settings, algorithm = run.settings, run.algorithm
    scorers: list[Callable[..., Fields]] = [learner.logprobs]
    programs, records = {}, {}
    if algorithm.needs_teacher:
        teacher = open_teacher(run)
        scorers.append(lambda state, rollout, packed: teacher.score(rollout, packed))
        programs['teacher'] = teacher.program
        records[TEACHER] = {'path': settings.teacher.path, 'digest': teacher.digest}
    if settings.learning.decoded_fields and engine is not None:
        key = jax.random.key(settings.seed)
        scorers.append(make_decode_scorer(engine, key, settings.group_size, run.mesh, algorithm.needs_reference))

    def compute(state, rollout, packed):
        fields = {}
        for scorer in scorers:
            fields |= scorer(state, rollout, packed)
        return fields

    return Logprobs(compute, programs, records)


def make_decode_scorer(
    engine: Sampler, key: Any, group_size: int, mesh: jax.sharding.Mesh, with_reference: bool
) -> Callable[[TrainState, Rollout, Any], Fields]:
    """Makes score(state, rollout, packed) -> {old_logprobs, ref_logprobs: f32[B, C]}, for learner.old_logprobs=decode.

    The engine decodes the rollout's tokens again, in the same shapes. With the weights that sampled the tokens, the
    logprobs equal the sampler's bit for bit. All processes must call score together. key: the key of the rollout's
    noise. with_reference: whether ref_logprobs are computed too.
    """

    def score(state, rollout, packed):
        policies: Mapping[str, Any] = {'old_logprobs': state.params}
        if with_reference:
            policies |= {'ref_logprobs': fetch_reference(state)}
        queries = rollout.prompt_mask.shape[1]
        tokens, prompt_mask, mask = processes.fetch((rollout.tokens, rollout.prompt_mask, rollout.completion_mask))
        ids = np.arange(len(tokens) // group_size, dtype=np.int32)
        prompts = Prompts(
            tokens[::group_size, :queries], prompt_mask[::group_size], ids, thinking=np.zeros(len(ids), bool)
        )
        given = np.where(mask, tokens[:, queries:], -1)
        prompts, given = engine.put(prompts), engine.put(given)
        return {
            name: move_rows(engine(params, prompts, key, int(state.step), given=given).logprobs, mesh)
            for name, params in policies.items()
        }

    return score


def check_decoded(learning: Learning, sampling: Sampling, options: CollectOptions, algorithm: Algorithm) -> None:
    """Raises BadInput if learner.old_logprobs=decode, and the sampler cannot decode such rollouts again."""
    if not learning.decoded_fields:
        return
    hindered = {
        f'collection.source = {algorithm.source}': algorithm.source in ('reference', *READ_FROM_DATA),
        f'collection.dead_groups = {options.dead_groups}': options.dead_groups in EXCHANGED,
        f'collection.allocation = {options.allocation}': options.allocation != 'equal',
        f'collection.in_flight = {options.in_flight}': options.in_flight > 0,
        f'collection.staleness = {options.staleness}': options.staleness > 0,
        'rollout.weights_dtype = int8': sampling.weights_dtype == 'int8',
        'rollout.cache_dtype = int8': sampling.cache_dtype == 'int8',
    }
    for setting, hinders in hindered.items():
        if hinders:
            raise BadInput(
                'learner.old_logprobs',
                'decode',
                f"is for rollouts that the policy samples in one go, without int8; use 'forward', or change {setting}",
            )


def check_sides(sides: Sides | None, source: str, prompts: int) -> None:
    """Raises BadInput if the sampler's own mesh has nothing to sample, or does not divide the `prompts` of a step.

    sides: None where the sampler has no mesh of its own. source: collection.source.
    """
    if sides is None:
        return
    count, shards = sides.sampler.size, batches.devices_along(sides.sampler, ROW_AXES)
    if source in READ_FROM_DATA:
        remedy = f'has nothing to do, since collection.source={source} reads completions from the data; use 0'
        raise BadInput('mesh.sampler', count, remedy)
    if prompts % shards:
        near = max(n for n in range(1, shards) if prompts % n == 0) * count // shards
        remedy = f'cannot share data.prompts_per_step = {prompts} evenly among {shards} devices; choose {near}'
        raise BadInput('mesh.sampler', count, remedy)


class Teacher(NamedTuple):
    """A teacher's parameters and scorer. With teacher.park the parameters lie in the hosts' memory between uses."""

    program: Executable  # the scorer, from learner.programs.make_teacher
    params: Any  # float32
    shardings: Any  # of params on the devices, where the program reads them
    digest: str  # of params

    def score(self, rollout: Rollout, packed: Any) -> Fields:
        """{teacher_logprobs} of a rollout's tokens, also teacher_top and teacher_ids if the program returns them."""
        output = self.program(jax.device_put(self.params, self.shardings), rollout, packed)
        fields = {
            'teacher_logprobs': output.logprobs,
            'teacher_top': output.top_logprobs,
            'teacher_ids': output.top_ids,
        }
        return {name: x for name, x in fields.items() if x is not None}


def open_teacher(run: Any) -> Teacher:
    """The Teacher of a Run; raises BadInput if its weights are not those that the run began with."""
    source = run.settings.teacher
    folder = hf.find(source.path)
    config = families.load_config(folder)
    shardings = specs.params(transformer.param_table(config), run.mesh)
    params = hf.load_params(folder, config, shardings)
    program, weights_digest = make_teacher_program(run, config), digest.hash_tree(params)
    record = os.path.join(run.workdir, TEACHER)
    if os.path.isfile(record) and json_file.read_object(record).get('digest') != weights_digest:
        raise BadInput(
            'teacher.path',
            source.path,
            f'has other weights than those that the run in {run.workdir} began with; bring them back, or use another '
            '--workdir',
        )
    params = jax.device_put(params, specs.in_host(shardings)) if source.park else params
    return Teacher(program, params, shardings, weights_digest)


def make_teacher_program(run: Any, config: transformer.ModelConfig) -> Executable:
    """The Executable that scores a Run's rollouts with a teacher; config: the teacher's ModelConfig."""
    settings, algorithm = run.settings, run.algorithm
    learning = settings.learning._replace(lora=OFF, dtype=settings.teacher.dtype)
    shapes = settings.step_shapes(algorithm)
    return make_teacher(config, algorithm, run.mesh, shapes, learning, run.model.config.vocab_size)


def check_teacher(source: Any, algorithm: Algorithm, vocab_size: int) -> None:
    """Raises BadInput for a config.teacher that does not fit the algorithm; reads no file. source: a TeacherSource."""
    if not algorithm.needs_teacher:
        for key, value in source._asdict().items():
            if value != type(source)._field_defaults[key]:
                raise BadInput(f'teacher.{key}', value, f'nothing reads what a teacher says; {NEEDED}, or leave it out')
        return
    if not source.path:
        raise BadInput('teacher.path', NO_VALUE, 'is empty, and the algorithm learns from a teacher; name it')
    if algorithm.teacher_top_k > vocab_size:
        raise BadInput(
            'algorithm.teacher_top_k', algorithm.teacher_top_k, f"is above the policy's {vocab_size} tokens; use less"
        )


def check_teacher_model(
    path: str, tokenizer: Any, vocab_size: int, columns: int, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh
) -> None:
    """Raises BadInput for a model in config.teacher.path that cannot teach the policy; reads headers of weights alone.

    tokenizer, vocab_size: the policy's. columns: the most tokens of a prompt with its completion.
    """
    with _attribute_errors_to('teacher.path', path):
        folder = hf.find(path)
        hf.check_weights(folder, teacher_config(folder, path, vocab_size, columns, mesh))
        teacher_ids = hf.load_tokenizer(folder).get_vocab()
    for token, number in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        if teacher_ids.get(token) != number:
            differs = 'does not know it' if token not in teacher_ids else f'has {teacher_ids[token]} for it'
            raise BadInput(
                'teacher.path',
                path,
                f"is for other tokens: {token!r} is the policy's {number}, and the teacher's tokenizer {differs}; "
                'choose a teacher with the same tokenizer',
            )


def teacher_config(folder: str, path: str, vocab_size: int, columns: int, mesh: Any) -> transformer.ModelConfig:
    """The ModelConfig in a teacher's folder; raises BadInput if the teacher does not fit the policy or the mesh.

    path: config.teacher.path, for the message. vocab_size: the policy's. columns: as in check_teacher_model.
    """
    with _attribute_errors_to('teacher.path', path):
        config, context = families.load_config(folder), families.context_length(folder)
        specs.params(transformer.param_table(config), mesh)  # raises where an axis does not divide
    if config.vocab_size < vocab_size:
        remedy = f'has {config.vocab_size} tokens and the policy {vocab_size}; name a teacher that knows all of them'
        raise BadInput('teacher.path', path, remedy)
    if columns > context:
        raise BadInput(
            'teacher.path',
            path,
            f'reads {context} positions, and data.max_prompt_tokens + rollout.max_tokens are {columns}; lower either',
        )
    return config


@contextlib.contextmanager
def _attribute_errors_to(key, path):
    """A context that turns a BadInput about a model's files into one about the config key `key`, with value `path`."""
    try:
        yield
    except BadInput as error:
        thing, value, remedy = error.args
        if thing == 'model.path':  # its value may be a file in the folder
            raise BadInput(key, value, remedy) from None
        raise BadInput(key, path, str(error)) from None


def make_renewal(
    run: Any, checkpoints: Any, abstract: TrainState
) -> Callable[[TrainState], tuple[TrainState, dict[str, bool]]]:
    """Makes renew(state) -> (TrainState, {'reference_renewed': bool}), to be called before each step.

    Every collection.reference_every steps, renew reads the policy from the checkpoint of that step, saved first if
    there is none, and makes a new reference of it. With 'hard' the policy becomes the reference, and an adaptive
    kl_coef begins anew (DeepSeek-R1, arXiv 2501.12948: every 400 steps). With 'polyak' the reference becomes
    ref + reference_mix (policy - ref) (TR-DPO, arXiv 2404.09656: 0.6 every 512). The result depends on the checkpoint
    alone, so a run that resumes at that step renews in the same way.

    checkpoints: the workdir's CheckpointManager. abstract: the TrainState's shapes and shardings.
    """
    options, kl_coef = run.settings.collection, run.settings.algorithm.kl_coef

    def renew(state):
        step = int(state.step)
        if state.ref_params is None or not options.reference_every or step == 0 or step % options.reference_every:
            return state, {RENEWED: False}
        with writing(checkpoints.directory):
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
            return jax.device_put(old + options.reference_mix * (new - old), like.sharding)

        return state.replace(ref_params=jax.tree.map(mixed, state.ref_params, policy, abstract.ref_params)), {
            RENEWED: True
        }

    return renew


def check_reference(
    path: str,
    keeps_reference: bool,
    workdir: str,
    source: Any,
    config: transformer.ModelConfig,
    mesh: jax.sharding.Mesh,
) -> None:
    """Raises BadInput if config.reference.path (`path`) does not hold a policy in the run's shapes.

    Only headers of weights are read. keeps_reference: whether the run keeps a reference; if not, any path is refused.
    workdir: if it has a checkpoint, the path's files are not read. source: config.model, a ModelSource. config: the
    policy's ModelConfig.
    """
    if path and source.lora.rank:
        remedy = "cannot be another model: with adapters it has the policy's frozen weights; use '' or lora.rank 0"
        raise BadInput('reference.path', path, remedy)
    if path and not keeps_reference:
        raise BadInput(
            'reference.path', path, "this algorithm keeps no reference; set algorithm.kl or log.kl_every, or use ''"
        )
    if not path or checkpoint.steps(workdir):  # a run that goes on has its reference
        return
    if checkpoint.steps(path) or checkpoint.is_checkpoint(path):
        trained = abstract_trained(config, source.lora, source.dtype, mesh)
        checkpoint.check_params(path, trained, 'reference.path', path)
        return
    with _attribute_errors_to('reference.path', path):
        hf.check_weights(hf.find(path), config)


def load_reference(state: TrainState, abstract: TrainState, path: str, config: transformer.ModelConfig) -> TrainState:
    """The state of a new run with the policy in config.reference.path (`path`) as its reference.

    The state is unchanged if path is ''. abstract: its shapes and shardings. config: the policy's ModelConfig.
    """
    if not path:
        return state
    at_step = ''
    if checkpoint.is_checkpoint(path):
        policy = checkpoint.read_tree(os.path.abspath(path), {'params': abstract.ref_params}, partial=True)['params']
    elif checkpoint.steps(path):
        policy, step = checkpoint.read_params(path, abstract.ref_params)
        at_step = f', step {step}'
    else:
        shardings = jax.tree.map(lambda x: x.sharding, abstract.ref_params)
        policy = hf.load_params(hf.find(path), config, shardings)
    logger.warning('the reference is the policy of %s%s', path, at_step)
    return state.replace(ref_params=policy)
