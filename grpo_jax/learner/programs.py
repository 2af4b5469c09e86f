"""The learner's programs: where jit and shardings are applied to its mathematics.

A program is compiled once, for fixed shapes, before the first step. It then refuses arrays of any other shape, in an
error that names the program, so nothing recompiles silently.
"""

from collections.abc import Callable, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import optax

from grpo_jax import algorithms
from grpo_jax.errors import BadInput
from grpo_jax.hosts import processes
from grpo_jax.learner import critic, logprobs, packing, partition, reward_model
from grpo_jax.learner.options import NOTHING, ExtraMetrics, Learning, Optimizers
from grpo_jax.learner.update import UpdateSpec, new_aux, update
from grpo_jax.models import heads, lora, transformer
from grpo_jax.models.abstract import abstract_policy
from grpo_jax.models.linear import in_dtype
from grpo_jax.sharding import batches, chips, compiled, specs
from grpo_jax.sharding.batches import Shapes
from grpo_jax.sharding.compiled import Executable, abstract, abstract_params
from grpo_jax.sharding.mesh import BATCH_AXES
from grpo_jax.types import LabelledBatch, Rollout, TrainState

UNKNOWN_MEMORY = 2**34  # bytes, of a device that is not in the table of chips, such as a CPU


class Initial(NamedTuple):
    """Builds the first TrainState; parameters that adapters leave frozen go into it without a copy."""

    program: Any  # jitted, (trained parameters) -> TrainState without frozen parameters

    def __call__(self, params: Any) -> TrainState:
        """Returns the first TrainState, on the mesh; params: a policy's, or only the trained ones of lora.split.

        The first update donates the state, with its frozen parameters; the new state then holds the valid ones.
        """
        trained, frozen = lora.split(params)
        state = self.program(trained)
        return state.replace(params=lora.join(state.params, frozen))


class Update(NamedTuple):
    """The program that updates the policy, as a function of whole TrainStates."""

    program: Executable  # (TrainState, Experience, packed) -> (TrainState, metrics); the old state is donated

    def __call__(self, state: TrainState, experience: Any, packed: Any) -> tuple[TrainState, dict[str, Any]]:
        """(TrainState after the update, metrics); the old state is donated, but its pending, on the host, is kept."""
        updated, metrics = self.program(state.replace(pending=None), experience, packed)
        return updated.replace(pending=state.pending), metrics


class Learner(NamedTuple):
    """The learner of a policy: its programs, its packing, and the shapes of its TrainState."""

    initial: Initial  # (params) -> TrainState on the mesh
    sizes: packing.PackSizes | None  # of packed rows; None where rows are padded
    pack: Callable  # (Rollout) -> PackedCells on the mesh, or -> None where rows are padded
    scorer: Executable  # (params, Rollout, packed) -> HeadOutput, of the policy or a reference
    values: Executable | None  # (the critic's params, Rollout) -> f32[B, C]; None without a critic
    update: Update  # (TrainState, Experience, packed) -> (TrainState, metrics); the old state is donated
    abstract_state: TrainState  # shapes and shardings, to restore onto
    scorer_fields: frozenset[str]  # fields of Experience that the scorer computes before an update

    def logprobs(self, state: TrainState, rollout: Rollout, packed: packing.PackedCells | None) -> dict[str, jax.Array]:
        """The fields of Experience that the learner computes before an update, by name: scorer_fields, and `values`."""
        fields = {}
        if self.scorer_fields - {'ref_logprobs'}:
            output = self.scorer(state.params, rollout, packed)
            by_policy = {'old_logprobs': output.logprobs, 'forward_logprobs': output.logprobs}
            by_policy['old_entropy'] = output.entropy
            fields = {name: x for name, x in by_policy.items() if name in self.scorer_fields}
        if 'ref_logprobs' in self.scorer_fields:
            fields['ref_logprobs'] = self.scorer(fetch_reference(state), rollout, packed).logprobs
        if self.values is not None:
            fields['values'] = self.values(state.aux['critic']['params'], rollout)
        return fields

    @property
    def programs(self) -> dict[str, Executable]:
        """The learner's Executables that every step runs, by name."""
        programs = {'logprobs': self.scorer} if self.scorer_fields else {}
        if self.values is not None:
            programs['values'] = self.values
        return programs | {'update': self.update.program}


class RewardLearner(NamedTuple):
    """The learner of a reward model: its programs, and the shapes of its TrainState."""

    initial: Callable  # (params of a policy, or of a reward model that is trained further) -> TrainState on the mesh
    values: Executable  # (TrainState, Rollout) -> f32[B, C]
    update: Executable  # (TrainState, LabelledBatch) -> (TrainState, metrics); the old state is donated
    abstract_state: TrainState  # shapes and shardings, to restore onto


def make_learner(
    model_config: transformer.ModelConfig,
    algorithm: algorithms.Algorithm,
    optimizers: Optimizers,
    mesh: Mesh,
    shapes: Shapes,
    learning: Learning,
    other_aux: Any = None,
    extra: ExtraMetrics = NOTHING,
) -> Learner:
    """The Learner of an algorithm: its abstract TrainState and its programs, which are not compiled yet.

    shapes: of a step. other_aux: what other parts of a run keep in TrainState.aux, ShapeDtypeStructs by key; it begins
    as zeros. extra: metrics that are computed beside the metrics of the loss. Raises BadInput if minibatches,
    microbatches and mesh do not divide the batch, or if packed rows are too short.
    """
    check_sizes(algorithm, mesh, shapes, learning)
    sizes = packing.packed_sizes(mesh, shapes, learning, algorithm)
    learning = learning._replace(chunk=choose_chunk(learning.chunk, model_config.vocab_size, mesh))
    if sizes is not None and algorithm.needs_values and learning.pack_columns < 0:
        # a critic's padded rows are cut into microbatches of about as many tokens as packed rows have
        share = packing.device_share(mesh, shapes, learning)
        learning = learning._replace(microbatches=packing.cut_padded(sizes, share))
    spec = UpdateSpec(
        model_config=model_config,
        algorithm=algorithm,
        learning=learning,
        optimizer=optimizers.policy,
        critic_optimizer=optimizers.critic,
        group_size=shapes.group_size,
        mesh_ops=partition.make_mesh_ops(model_config, mesh, learning),
        sizes=sizes,
        learning_rate=optimizers.learning_rate,
        extra=extra,
    )
    state, needed = _abstract_state(spec, mesh, other_aux), algorithm.needed_logprobs(learning.updates)
    experience = _abstract_experience(spec, mesh, shapes, learning.known_fields(needed))
    packed = _abstract_cells(sizes, learning.minibatches, mesh, shapes)

    def initial(params):
        return new_state(params, spec, other_aux)

    def updated(state, experience, packed):
        return update(state, experience, packed, spec)

    def pack(rollout):  # chosen on the host
        if sizes is None:
            return None
        prompt_mask, completion_mask = processes.fetch((rollout.prompt_mask, rollout.completion_mask))
        packed = packing.pack(prompt_mask, completion_mask, sizes, learning.minibatches)
        return jax.tree.map(processes.put, packed, _packed_shardings(mesh))

    def values(params, rollout):
        return critic.values(params, rollout, model_config, remat='none', dtype=learning.dtype, mesh_ops=spec.mesh_ops)

    critic_values = None
    if algorithm.needs_values:
        inputs = state.aux['critic']['params'], experience.rollout
        critic_values = compiled.make_executable("the critic's values", values, inputs, mesh, specs.over_rows(mesh))
    scorer_inputs = state.params, experience.rollout, packed
    state_shardings = jax.tree.map(lambda x: x.sharding, state)
    return Learner(
        initial=Initial(jax.jit(initial, out_shardings=without_frozen(state_shardings))),
        sizes=sizes,
        pack=pack,
        scorer=make_scorer("the learner's logprobs", scorer_inputs, mesh, spec.forward, learning.dtype, needed),
        values=critic_values,
        update=Update(
            compiled.make_executable(
                'the update',
                updated,
                (state, experience, packed),
                mesh,
                (state_shardings, specs.replicated(mesh)),
                donate=0,
            )
        ),
        abstract_state=state,
        scorer_fields=frozenset(learning.scored_fields(needed)),
    )


def make_scorer(
    name: str, inputs: tuple, mesh: Mesh, spec: packing.ForwardSpec, dtype: Any, needed: Set[str]
) -> Executable:
    """The Executable (params, Rollout, packed) -> HeadOutput of all completion tokens, without a gradient.

    name: what messages call it. inputs: the three arguments as abstract arrays; packed is None where rows are padded.
    dtype: of the computation. needed: fields of Experience; without old_entropy no entropy is returned.
    """
    head = spec.head._replace(entropy_gradient=False)

    def score(params, rollout, packed):
        output = packing.rollout_output(in_dtype(params, dtype), rollout, packed, spec._replace(head=head))
        return output if 'old_entropy' in needed else output._replace(entropy=None)

    return compiled.make_executable(name, score, inputs, mesh, specs.over_rows(mesh))


def make_teacher(
    model_config: transformer.ModelConfig,
    algorithm: algorithms.Algorithm,
    mesh: Mesh,
    shapes: Shapes,
    learning: Learning,
    vocab_size: int,
) -> Executable:
    """The scorer of a teacher: an Executable like make_scorer's, which also returns its teacher_top_k likeliest tokens.

    model_config: the teacher's. learning: the policy's, with the teacher's dtype; rows are packed as the policy's are.
    vocab_size: the policy's; ids from it on are never among the likeliest tokens.
    """
    sizes = packing.packed_sizes(mesh, shapes, learning, algorithm)
    head = logprobs.Head(
        learning.temperature,
        choose_chunk(learning.chunk, model_config.vocab_size, mesh),
        mesh_ops=partition.make_mesh_ops(model_config, mesh, learning),
        top_k=algorithm.teacher_top_k,
        top_below=vocab_size,
    )
    params = abstract_params(transformer.param_table(model_config), mesh)
    rollout = batches.abstract_rollout(shapes, specs.over_rows(mesh))
    inputs = params, rollout, _abstract_cells(sizes, learning.minibatches, mesh, shapes)
    spec = packing.ForwardSpec(model_config, head, sizes)
    return make_scorer("the teacher's logprobs", inputs, mesh, spec, learning.dtype, frozenset())


def make_reward_learner(
    model_config: transformer.ModelConfig,
    loss: Callable,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    shapes: Shapes,
    learning: Learning,
) -> RewardLearner:
    """The RewardLearner that minimizes `loss`, a function of learner.reward_model.

    shapes: of a batch, with which one update is made, whatever learning's epochs and minibatches are. Raises BadInput
    if microbatches and mesh do not divide the batch.
    """
    table = heads.param_table(model_config)
    if shapes.prompts % learning.microbatches:
        remedy = f'does not cut {shapes.prompts} examples into equal parts; choose a divisor'
        raise BadInput('learner.microbatches', learning.microbatches, remedy)
    batches.check_divides(mesh, 'supervised.batch / learner.microbatches', shapes.prompts // learning.microbatches)
    batches.check_columns(mesh, shapes)
    learning = learning._replace(epochs=1, minibatches=1)
    mesh_ops = partition.make_mesh_ops(model_config, mesh, learning._replace(lora=lora.OFF))
    spec = reward_model.RewardSpec(model_config, loss, optimizer, learning, shapes.group_size, mesh_ops)

    def new_state(params):
        params = params if 'value_head' in params else critic.new_params(params)
        return TrainState(jnp.int32(0), params, optimizer.init(params), None, {'bad_steps': jnp.int32(0)})

    def values(state, rollout):
        return reward_model.completion_values(state.params, rollout, spec)

    def updated(state, batch):
        return reward_model.update_reward_model(state, batch, spec)

    shape = jax.eval_shape(new_state, abstract_params(transformer.param_table(model_config), mesh))
    param_shardings = specs.params(table, mesh)
    in_host = 'optimizer' in learning.offload
    state_shardings = jax.tree.map(lambda _: specs.replicated(mesh), shape).replace(
        params=param_shardings, opt_state=moment_shardings(optimizer, shape.opt_state, param_shardings, mesh, in_host)
    )
    state = compiled.with_shardings(shape, state_shardings)
    rows = specs.over_rows(mesh)
    rollout = batches.abstract_rollout(shapes, rows)
    batch = LabelledBatch(rollout, rollout.logprobs, rollout.completion_mask)
    return RewardLearner(
        initial=jax.jit(new_state, out_shardings=state_shardings),
        values=compiled.make_executable("the reward model's values", values, (state, rollout), mesh, rows),
        update=compiled.make_executable(
            'the update', updated, (state, batch), mesh, (state_shardings, specs.replicated(mesh)), donate=0
        ),
        abstract_state=state,
    )


def new_state(params: Any, spec: UpdateSpec, other_aux: Any) -> TrainState:
    """The TrainState at the start of a run, on the policy's trained params; `other_aux` joins its aux, as zeros."""
    reference = jax.tree.map(jnp.copy, params) if spec.keeps_reference else None
    aux = new_aux(spec.algorithm, params, spec.critic_optimizer)
    aux |= jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), other_aux or {})
    return TrainState(jnp.int32(0), params, spec.optimizer.init(params), reference, aux)


def fetch_reference(state: TrainState) -> Any:
    """All parameters of the reference policy, on the devices; moves them there from the hosts' memory if need be."""
    trained, frozen = lora.split(state.params)
    return lora.join(jax.device_put(state.ref_params, jax.tree.map(lambda x: x.sharding, trained)), frozen)


def without_frozen(state: TrainState) -> TrainState:
    """The state without its frozen parameters, which is what a checkpoint holds."""
    return state.replace(params=lora.split(state.params)[0])


def check_sizes(
    algorithm: algorithms.Algorithm,
    mesh: Mesh,
    shapes: Shapes,
    learning: Learning,
    prompts: str = 'data.prompts_per_step',
) -> None:
    """Raises BadInput if a batch cannot be cut or packed as learning says; compiles nothing.

    shapes: of the batch. prompts: the config key that sets the number of prompts, for the message.
    """
    padded = not learning.packs or algorithm.needs_values  # a critic's rows are padded
    microbatches = learning.minibatches * (learning.microbatches if padded else 1)  # of the whole batch
    rows = shapes.prompts * shapes.group_size
    if shapes.prompts % learning.minibatches or rows % microbatches:
        if not padded:
            remedy = f'must divide the {shapes.prompts} prompts of a step; choose another number'
            raise BadInput('learner.minibatches', learning.minibatches, remedy)
        raise BadInput(
            'learner.minibatches, learner.microbatches',
            (learning.minibatches, learning.microbatches),
            f'minibatches must divide the {shapes.prompts} prompts of a step, and minibatches x microbatches its '
            f'{rows} completions; choose other numbers',
        )
    batches.check_divides(mesh, prompts, shapes.prompts)
    if padded:
        batches.check_divides(mesh, 'rows of a microbatch', rows // microbatches, BATCH_AXES)
    batches.check_columns(mesh, shapes)
    if 'group_ids' in algorithm.reads and shapes.prompts % microbatches:
        raise BadInput(
            'learner.microbatches',
            learning.microbatches,
            f'cuts groups of {shapes.group_size} apart, and this loss needs whole groups; choose a divisor of the '
            "minibatch's prompts",
        )
    packing.packed_sizes(mesh, shapes, learning, algorithm)


def choose_chunk(chunk: int, vocab_size: int, mesh: Mesh) -> int:
    """How many tokens have logits at once: learner.chunk, or for 0 a number that fits the device's memory.

    That number is the power of two within logprobs.CHUNKS whose float32 logits fill at most logprobs.SHARE of the
    memory. It depends on the device's kind and its part of the vocabulary alone, so preflight finds it for devices that
    are not here.
    """
    if chunk:
        return chunk
    chip = chips.lookup(mesh.devices.flat[0].device_kind)
    memory = chip.memory if chip and chip.memory else UNKNOWN_MEMORY
    fewest, most = logprobs.CHUNKS
    tokens = max(int(memory * logprobs.SHARE) // (4 * (vocab_size // mesh.shape['tensor'])), 1)
    return min(max(1 << (tokens.bit_length() - 1), fewest), most)


def _abstract_experience(spec, mesh, shapes, logprob_fields):
    """The abstract Experience that an update gets; logprob_fields: Learning.known_fields."""
    algorithm = spec.algorithm
    columns = shapes.tokens if algorithms.is_by_token(algorithm) else 1
    fields = [*logprob_fields, *(('values', 'returns') if algorithm.needs_values else ())]
    fields += ['correct'] * (spec.extra.outcomes or 'correct' in algorithm.reads)
    fields += ['teacher_logprobs'] * algorithm.needs_teacher
    return batches.abstract_experience(shapes, specs.over_rows(mesh), columns, fields, algorithm.teacher_top_k)


def _packed_shardings(mesh):
    """The shardings of PackedCells: cells are cut over the rows and columns of packed rows, counts are not cut."""
    cells = NamedSharding(mesh, PartitionSpec(None, None, BATCH_AXES, 'context'))
    return packing.PackedCells(cells, specs.replicated(mesh))


def _abstract_cells(sizes, minibatches, mesh, shapes):
    """The abstract PackedCells of a step, or None where rows are padded."""
    if sizes is None:
        return None
    microbatches = sizes.microbatches(shapes.prompts // minibatches)
    shardings = _packed_shardings(mesh)
    return packing.PackedCells(
        abstract((minibatches, microbatches, sizes.rows, sizes.columns), jnp.int32, shardings.cells),
        abstract((minibatches,), jnp.int32, shardings.count),
    )


def _abstract_state(spec, mesh, other_aux):
    """The abstract TrainState with its shardings; optimizer moments, reference and critic are cut like the parameters.

    Moments and reference lie in the hosts' memory where learner.offload names them.
    """
    learning = spec.learning
    params, frozen = lora.split(abstract_policy(spec.model_config, learning.lora, learning.dtype, mesh))
    shape = jax.eval_shape(lambda params: new_state(params, spec, other_aux), params)
    param_shardings, everywhere = jax.tree.map(lambda x: x.sharding, params), specs.replicated(mesh)
    in_host = 'optimizer' in learning.offload
    aux = jax.tree.map(lambda _: everywhere, shape.aux)
    if 'critic' in aux:
        critic_shardings = specs.params(heads.param_table(spec.model_config), mesh)
        moments = shape.aux['critic']['opt_state']
        aux['critic'] = {
            'params': critic_shardings,
            'opt_state': moment_shardings(spec.critic_optimizer, moments, critic_shardings, mesh, in_host),
        }
    reference = specs.in_host(param_shardings) if 'reference' in learning.offload else param_shardings
    shardings = shape.replace(
        step=everywhere,
        params=param_shardings,
        aux=aux,
        ref_params=None if shape.ref_params is None else reference,
        opt_state=moment_shardings(spec.optimizer, shape.opt_state, param_shardings, mesh, in_host),
    )
    state = compiled.with_shardings(shape, shardings)
    return state.replace(params=lora.join(state.params, frozen))


def moment_shardings(optimizer, opt_state, param_shardings, mesh, in_host: bool = False):
    """The shardings of an optimizer's abstract state: the moments of a parameter are cut like the parameter.

    in_host: the state lies in the hosts' memory.
    """
    shardings = optax.tree_utils.tree_map_params(
        optimizer,
        lambda _, sharding: sharding,
        opt_state,
        param_shardings,
        transform_non_params=lambda _: specs.replicated(mesh),
    )
    return specs.in_host(shardings) if in_host else shardings
