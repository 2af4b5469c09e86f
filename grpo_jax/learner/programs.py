"""The learner's programs: where jit and shardings are applied to its mathematics.

A program is compiled once, for fixed shapes, before the first step; a compiled program refuses any other shape by name,
so nothing recompiles silently.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import optax

from grpo_jax import algorithms
from grpo_jax.errors import BadInput
from grpo_jax.hosts import processes
from grpo_jax.learner import critic, logprobs, packing, partition, reward_model
from grpo_jax.learner.optimizer import Optimizers
from grpo_jax.learner.options import NOTHING, Learning, Observed
from grpo_jax.learner.state import Initial, new_state, reference_params, without_frozen
from grpo_jax.learner.update import Setup, update
from grpo_jax.models import heads, lora, transformer
from grpo_jax.models.linear import in_dtype
from grpo_jax.sharding import batches, compiled, specs
from grpo_jax.sharding.batches import Shapes
from grpo_jax.sharding.compiled import Executable, abstract, abstract_params
from grpo_jax.sharding.mesh import BATCH_AXES
from grpo_jax.types import LabelledBatch, TrainState


class Learner(NamedTuple):
    """The learner of a policy."""

    initial: Initial  # (params) -> TrainState on the mesh
    packing: packing.Packing | None  # None where rows are padded
    pack: Callable  # (Rollout) -> PackedRows on the mesh; None where rows are padded
    logprobs: Executable  # (TrainState, Rollout, packed) -> dict of the fields of Experience that must be known first
    update: Executable  # (TrainState, Experience, packed) -> (TrainState, metrics); the old state is donated
    state: TrainState  # abstract, with shardings, to restore onto
    reference: Executable | None  # (TrainState, Rollout, packed) -> metrics; None where no KL is observed

    @property
    def programs(self) -> dict[str, Executable]:
        """The compiled programs by name that every step runs."""
        return {'logprobs': self.logprobs, 'update': self.update}


class RewardLearner(NamedTuple):
    """The learner of a reward model."""

    initial: Callable  # (params of a policy, or of a reward model that is to learn on) -> TrainState on the mesh
    values: Executable  # (TrainState, Rollout) -> f32[B, C]
    update: Executable  # (TrainState, LabelledBatch) -> (TrainState, metrics); the old state is donated
    state: TrainState  # abstract, with shardings, to restore onto


def make_learner(
    model_config: transformer.ModelConfig,
    algorithm: algorithms.Algorithm,
    optimizers: Optimizers,
    mesh: Mesh,
    shapes: Shapes,
    learning: Learning,
    collected: Any = None,
    observed: Observed = NOTHING,
) -> Learner:
    """The Learner of an algorithm.

    collected is a tree of ShapeDtypeStructs that joins the state's aux, as zeros: what collect keeps between
    steps; observed is what it measures besides. BadInput when minibatches, microbatches and mesh do not divide the
    batch, or packed rows are too short.
    """
    learning, sizes = _choose_sizes(learning, model_config, algorithm, mesh, shapes)
    setup = Setup(
        model_config, algorithm, learning, optimizers.policy, optimizers.critic, shapes.group_size,
        partition.make_collectives(model_config, mesh, learning.lora, learning.attention),
        sizes, optimizers.learning_rate, observed,
    )  # fmt: skip
    state, needed = _abstract_state(setup, mesh, collected), algorithm.needed_logprobs(learning.updates)
    known, needed = learning.known_first(needed), learning.computed_first(needed)
    experience = _abstract_experience(setup, mesh, shapes, known)
    packed = _abstract_packed(sizes, learning.minibatches, mesh, shapes)

    def initial(params):
        return new_state(params, setup, collected)

    def known_first(state, rollout, packed):
        return _known_first(state, rollout, packed, setup, needed)

    def updated(state, experience, packed):
        return update(state, experience, packed, setup)

    def pack(rollout):  # chosen on the host
        if sizes is None:
            return None
        prompt_mask, completion_mask = processes.fetch((rollout.prompt_mask, rollout.completion_mask))
        packed = packing.pack(prompt_mask, completion_mask, sizes, learning.minibatches)
        return jax.tree.map(processes.put, packed, _packed_shardings(mesh))

    scored = state, experience.rollout, packed
    state_shardings = jax.tree.map(lambda x: x.sharding, state)
    return Learner(
        initial=Initial(jax.jit(initial, out_shardings=without_frozen(state_shardings))),
        packing=sizes,
        pack=pack,
        logprobs=compiled.make_executable("the learner's logprobs", known_first, scored, mesh, specs.over_rows(mesh)),
        update=compiled.make_executable(
            'the update',
            updated,
            (state, experience, packed),
            mesh,
            (state_shardings, specs.replicated(mesh)),
            donate=0,
        ),
        state=state,
        reference=_make_reference_observer(setup, scored, mesh),
    )


def _choose_sizes(learning, model_config, algorithm, mesh, shapes):
    """(the Learning with what it leaves to be chosen, its Packing); BadInput as of check_sizes.

    Where the length of packed rows is chosen, a critic's padded ones are cut into microbatches of about as many tokens.
    """
    check_sizes(algorithm, mesh, shapes, learning)
    sizes = packing.packed_sizes(mesh, shapes, learning, algorithm)
    learning = learning._replace(chunk=logprobs.choose_chunk(learning.chunk, model_config.vocab_size, mesh))
    if sizes is not None and algorithm.needs_values and learning.pack_columns < 0:
        share = packing.device_share(mesh, shapes, learning)
        learning = learning._replace(microbatches=packing.cut_padded(sizes, share))
    return learning, sizes


def _make_reference_observer(setup, scored, mesh):
    """Learner.reference, algorithms.reference_metrics of a rollout under the state's policy and its reference.

    None where the update has the KL itself, or nobody asks for it.
    """
    if setup.algorithm.needs_reference or not setup.observed.reference:
        return None

    def observe_reference(state, rollout, packed):
        policy, *_ = _token_logprobs(state.params, rollout, packed, setup)
        reference, *_ = _token_logprobs(reference_params(state, setup.learning), rollout, packed, setup)
        metrics = algorithms.reference_metrics(policy, reference, rollout.loss_mask)
        return {name: x.value if isinstance(x, algorithms.PooledMean) else x for name, x in metrics.items()}

    replicated = specs.replicated(mesh)
    return compiled.make_executable("the learner's reference", observe_reference, scored, mesh, replicated)


def make_teacher(
    model_config: transformer.ModelConfig,
    algorithm: algorithms.Algorithm,
    mesh: Mesh,
    shapes: Shapes,
    learning: Learning,
    vocab_size: int,
) -> Executable:
    """The Executable (params, Rollout, packed) -> dict of the fields of Experience that a teacher knows.

    learning is the policy's, with the teacher's dtype; vocab_size is the policy's, the teacher's tokens beyond it are
    none. Rows are packed as the policy's are.
    """
    collectives = partition.make_collectives(model_config, mesh, attend_by=learning.attention)
    sizes = packing.packed_sizes(mesh, shapes, learning, algorithm)
    chunk = logprobs.choose_chunk(learning.chunk, model_config.vocab_size, mesh)
    head = logprobs.Head(learning.temperature, chunk, False, collectives, algorithm.teacher_top_k, vocab_size)

    def known(params, rollout, packed):
        compute = in_dtype(params, learning.dtype)
        output = packing.logprobs_of(compute, rollout, packed, model_config, sizes, head)
        fields = {
            'teacher_logprobs': output.logprobs,
            'teacher_top': output.top_logprobs,
            'teacher_ids': output.top_ids,
        }
        return {name: value for name, value in fields.items() if value is not None}

    params = abstract_params(transformer.param_table(model_config), mesh)
    rollout = batches.abstract_rollout(shapes, specs.over_rows(mesh))
    packed = _abstract_packed(sizes, learning.minibatches, mesh, shapes)
    return compiled.make_executable(
        "the teacher's logprobs", known, (params, rollout, packed), mesh, specs.over_rows(mesh)
    )


def make_reward_learner(
    model_config: transformer.ModelConfig,
    loss: Callable,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    shapes: Shapes,
    learning: Learning,
) -> RewardLearner:
    """The RewardLearner of a loss of learner.reward_model.

    BadInput when microbatches and mesh do not divide the batch.
    """
    table = heads.param_table(model_config)
    if shapes.prompts % learning.microbatches:
        raise BadInput(
            'learner.microbatches',
            learning.microbatches,
            f'does not cut {shapes.prompts} examples into equal parts; choose a divisor',
        )
    batches.check_divides(mesh, 'supervised.batch / learner.microbatches', shapes.prompts // learning.microbatches)
    batches.check_columns(mesh, shapes)
    learning = learning._replace(epochs=1, minibatches=1)
    collectives = partition.make_collectives(model_config, mesh, attend_by=learning.attention)
    setup = reward_model.RewardSetup(model_config, loss, optimizer, learning, shapes.group_size, collectives)

    def new_state(params):
        params = params if 'value_head' in params else critic.new(params)
        return TrainState(jnp.int32(0), params, optimizer.init(params), None, {'bad_steps': jnp.int32(0)})

    def values(state, rollout):
        return reward_model.completion_values(state.params, rollout, setup)

    def updated(state, batch):
        return reward_model.update_reward_model(state, batch, setup)

    shape = jax.eval_shape(new_state, abstract_params(transformer.param_table(model_config), mesh))
    param_shardings = specs.params(table, mesh)
    in_host = 'optimizer' in learning.offload
    state_shardings = jax.tree.map(lambda _: specs.replicated(mesh), shape).replace(
        params=param_shardings, opt_state=moment_shardings(optimizer, shape.opt_state, param_shardings, mesh, in_host)
    )
    state = _laid_out(shape, state_shardings)
    rows = specs.over_rows(mesh)
    rollout = batches.abstract_rollout(shapes, rows)
    batch = LabelledBatch(rollout, rollout.logprobs, rollout.completion_mask)
    return RewardLearner(
        initial=jax.jit(new_state, out_shardings=state_shardings),
        values=compiled.make_executable("the reward model's values", values, (state, rollout), mesh, rows),
        update=compiled.make_executable(
            'the update', updated, (state, batch), mesh, (state_shardings, specs.replicated(mesh)), donate=0
        ),
        state=state,
    )


def check_sizes(
    algorithm: algorithms.Algorithm,
    mesh: Mesh,
    shapes: Shapes,
    learning: Learning,
    prompts: str = 'data.prompts_per_step',
) -> None:
    """BadInput when the batch cannot be cut or packed as learning says; prompts: the key that says how many there are.

    Nothing is compiled.
    """
    padded = not learning.packs or algorithm.needs_values  # a critic's rows are padded
    cut, rows = learning.minibatches * (learning.microbatches if padded else 1), shapes.prompts * shapes.group_size
    if shapes.prompts % learning.minibatches or rows % cut:
        raise BadInput(
            'learner.minibatches x microbatches',
            (learning.minibatches, learning.microbatches),
            f'does not cut {shapes.prompts} prompts of {shapes.group_size} completions into equal parts '
            'of whole groups; choose divisors',
        )
    batches.check_divides(mesh, prompts, shapes.prompts)
    if padded:
        batches.check_divides(mesh, 'rows of a microbatch', rows // cut, BATCH_AXES)
    batches.check_columns(mesh, shapes)
    if 'group_ids' in algorithm.reads and shapes.prompts % cut:
        raise BadInput(
            'learner.microbatches',
            learning.microbatches,
            f'cuts groups of {shapes.group_size} apart, and the loss is one of whole groups; choose a divisor of the '
            "minibatch's prompts",
        )
    packing.packed_sizes(mesh, shapes, learning, algorithm)


def _abstract_experience(setup, mesh, shapes, needed):
    """The abstract Experience of a step, with the logprobs that are needed first."""
    algorithm = setup.algorithm
    columns = shapes.tokens if algorithms.by_token(algorithm) else 1
    known = [*needed, *(('values', 'returns') if algorithm.needs_values else ())]
    known += ['correct'] * (setup.observed.outcomes or 'correct' in algorithm.reads)
    known += ['teacher_logprobs'] * algorithm.needs_teacher
    return batches.abstract_experience(shapes, specs.over_rows(mesh), columns, known, algorithm.teacher_top_k)


def _packed_shardings(mesh):
    cells = NamedSharding(mesh, PartitionSpec(None, None, BATCH_AXES, 'context'))
    return packing.PackedRows(cells, specs.replicated(mesh))


def _abstract_packed(sizes, minibatches, mesh, shapes):
    """Abstract PackedRows of a step, None where rows are padded."""
    if sizes is None:
        return None
    microbatches = sizes.microbatches(shapes.prompts // minibatches)
    shardings = _packed_shardings(mesh)
    return packing.PackedRows(
        abstract((minibatches, microbatches, sizes.rows, sizes.columns), jnp.int32, shardings.cells),
        abstract((minibatches,), jnp.int32, shardings.count),
    )


def _known_first(state, rollout, packed, setup, needed):
    """The fields of Experience that `needed` names, and the critic's values where there is one."""
    learning, model_config, fields = setup.learning, setup.model_config, {}
    if {'old_logprobs', 'forward_logprobs', 'old_entropy'} & needed:
        fields['old_logprobs'], fields['old_entropy'], *_ = _token_logprobs(state.params, rollout, packed, setup)
        fields['forward_logprobs'] = fields['old_logprobs']
    if 'ref_logprobs' in needed:
        fields['ref_logprobs'], *_ = _token_logprobs(reference_params(state, learning), rollout, packed, setup)
    fields = {name: fields[name] for name in needed}
    if setup.algorithm.needs_values:
        fields['values'] = critic.values(
            state.aux['critic']['params'],
            rollout,
            model_config,
            remat='none',
            dtype=learning.dtype,
            collectives=setup.collectives,
        )
    return fields


def _token_logprobs(params, rollout, packed, setup):
    """HeadOutput of a rollout under a policy, without a gradient."""
    head, compute = setup.head._replace(entropy_gradient=False), in_dtype(params, setup.learning.dtype)
    return packing.logprobs_of(compute, rollout, packed, setup.model_config, setup.packing, head)


def _abstract_state(setup, mesh, collected):
    """The abstract TrainState with its shardings: moments, reference and critic lie like the parameters.

    What learner.offload names lies in the hosts' memory.
    """
    learning = setup.learning
    params, frozen = lora.split(lora.abstract_params(setup.model_config, learning.lora, learning.dtype, mesh))
    shape = jax.eval_shape(lambda params: new_state(params, setup, collected), params)
    param_shardings, everywhere = jax.tree.map(lambda x: x.sharding, params), specs.replicated(mesh)
    in_host = 'optimizer' in learning.offload
    aux = jax.tree.map(lambda _: everywhere, shape.aux)
    if 'critic' in aux:
        critic_shardings = specs.params(heads.param_table(setup.model_config), mesh)
        moments = shape.aux['critic']['opt_state']
        aux['critic'] = {
            'params': critic_shardings,
            'opt_state': moment_shardings(setup.critic_optimizer, moments, critic_shardings, mesh, in_host),
        }
    reference = specs.in_host(param_shardings) if 'reference' in learning.offload else param_shardings
    shardings = shape.replace(
        step=everywhere,
        params=param_shardings,
        aux=aux,
        ref_params=None if shape.ref_params is None else reference,
        opt_state=moment_shardings(setup.optimizer, shape.opt_state, param_shardings, mesh, in_host),
    )
    state = _laid_out(shape, shardings)
    return state.replace(params=lora.join(state.params, frozen))


def moment_shardings(optimizer, opt_state, param_shardings, mesh, in_host: bool = False):
    """Shardings of an optimizer's abstract state: what it keeps of each parameter lies like the parameter.

    in_host: all of it lies in the hosts' memory.
    """
    shardings = optax.tree_utils.tree_map_params(
        optimizer,
        lambda _, sharding: sharding,
        opt_state,
        param_shardings,
        transform_non_params=lambda _: specs.replicated(mesh),
    )
    return specs.in_host(shardings) if in_host else shardings


def _laid_out(shapes, shardings):
    return jax.tree.map(lambda x, sharding: abstract(x.shape, x.dtype, sharding), shapes, shardings)
