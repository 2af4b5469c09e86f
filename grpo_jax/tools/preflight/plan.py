"""Plans a run on a topology: the abstract programs that grpo_jax.train would compile there, from the config alone."""

from collections.abc import Callable
import dataclasses
import functools
import math
import os
from typing import Any, NamedTuple

import numpy as np

from grpo_jax import PACKAGE, evaluate, rewards, supervised
from grpo_jax.collect import policies
from grpo_jax.collect.draw import abstract_aux, draw_shapes
from grpo_jax.collect.options import READ_FROM_DATA
from grpo_jax.errors import BadInput
from grpo_jax.learner import packing
from grpo_jax.learner.experience import abstract_history
from grpo_jax.learner.programs import Learner
from grpo_jax.models import hf, lora, transformer
from grpo_jax.models.hf import families
from grpo_jax.run.open import (
    NOWHERE,
    Model,
    Run,
    check_context,
    make_algorithm,
    make_mesh_check,
    make_run_learner,
    make_run_sampler,
    open_algorithm,
)
from grpo_jax.run.settings import Settings
from grpo_jax.sampler import schedule
from grpo_jax.sharding import batches, chips, compiled, specs
from grpo_jax.sharding import mesh as meshes
from grpo_jax.sharding.mesh import AXES, ROW_AXES
from grpo_jax.sharding.sides import make_sides
from grpo_jax.tools.preflight import topology

MODELS = os.path.join(PACKAGE, 'configs', 'models')


class Job(NamedTuple):
    """A program to compile, and what else is on a device while it runs."""

    name: str
    phase: str  # of a run: start, cold start, rollout, logprobs, update, evaluation
    trace: Callable  # () -> jax.stages.Traced
    alive: int  # bytes on a device of other buffers in use, without this program's results and temporaries
    arguments: bool = True  # whether `alive` leaves out the program's arguments too
    holds: tuple[str, ...] = ('state',)  # buffers in use meanwhile: 'state', or keys of sampler_jobs's sizes
    runs: float = 0  # in a step; 0: a variant of another program, or not in every step
    # the most passes of each loop without a trip count: over steps, blocks of the prompt, blocks of each chunk
    trip_counts: tuple[int, ...] = ()
    text_trip_counts: tuple[int, ...] = ()  # trip_counts without the loops whose compiled text has a count


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """A run as it would be opened on the devices of a topology, with abstract arrays in place of real ones."""

    config: Any
    topology: str
    slices: int
    run: Run
    chip: chips.Chip
    shapes: batches.Shapes
    learner: Learner
    chosen: bool = False  # whether training would choose all axes of the mesh
    teacher: compiled.Executable | None = None  # the teacher's program, when the algorithm has a teacher
    teacher_bytes: int = 0  # of the teacher's weights on a device
    mean_tokens: int = 0  # mean length of a completion in packed rows; 0: all at full length

    @property
    def mesh(self):
        """The run's jax Mesh."""
        return self.run.mesh

    @property
    def algorithm(self) -> Any:
        """The run's Algorithm."""
        return self.run.algorithm

    @functools.cached_property
    def engine(self):
        """The sampler for training; the sampler for evaluations where training reads its completions from the data."""
        if self.algorithm.source in READ_FROM_DATA:
            return self.evaluation_engine
        settings = self.run.settings
        shapes = draw_shapes(settings.collection, self.shapes, settings.data.prompts_per_step)
        return make_run_sampler(self.run, shapes, carried=settings.collection.in_flight)

    @functools.cached_property
    def evaluation_engine(self):
        """The sampler for evaluations."""
        evaluation = self.config.evaluation
        shapes = evaluate.make_shapes(self.run, evaluation.samples + 1, evaluation.prompts)
        return make_run_sampler(self.run, shapes, greedy=1)

    @property
    def on_gpus(self) -> bool:
        """Whether the plan is for GPUs, whose traffic is not counted."""
        return topology.find_gpu(self.topology) is not None

    @property
    def links(self) -> tuple[float, float]:
        """(low, high): bytes a second that a chip sends over its links, see chips.Chip.links; (0, 0) for GPUs."""
        if self.on_gpus:
            return 0.0, 0.0
        return self.chip.links([int(side) for side in self.topology.partition(':')[2].split('x')])

    def state_bytes(self):
        """Returns (bytes of the TrainState on a device, bytes of the parameters in it)."""
        return compiled.device_bytes(self.learner.abstract_state), compiled.device_bytes(
            self.learner.abstract_state.params
        )

    def trained_bytes(self) -> int:
        """Returns the bytes on a device of the trained parameters: all parameters, or the adapters."""
        return compiled.device_bytes(lora.split(self.learner.abstract_state.params)[0])

    def fetched_reference_bytes(self) -> int:
        """Returns the bytes on a device of an offloaded reference that the sampler fetches; 0 without such a fetch."""
        fetched = self.algorithm.source == 'reference' and 'reference' in self.config.learner.offload
        return fetched * self.trained_bytes()

    def crossing_bytes(self) -> int:
        """Returns the bytes of weights sent to each of the sampler's own devices in a step; 0 without such devices."""
        spec, adapted = self.engine.programs.spec, self.run.settings.model.lora.rank > 0
        sent = lora.split(spec.abstract_params)[0] if adapted else spec.abstract_weights
        return compiled.device_bytes(sent) if self.run.sides else 0

    def row_shards(self):
        """Returns how many devices share the rows of a batch."""
        return batches.devices_along(self.mesh, ROW_AXES)

    def microbatch(self) -> tuple[int, int]:
        """Returns (rows of a microbatch on a device, tokens of a row with padding)."""
        if self.learner.sizes is not None:
            return self.config.learner.pack_rows, self.learner.sizes.columns
        learning = self.run.settings.learning
        share = packing.device_share(self.mesh, self.shapes, learning)
        return share // learning.microbatches, self.shapes.queries + self.shapes.tokens


def find_model(path):
    """Returns the folder of a model: `path`, else a published model's shape in configs/models, else hf.find's."""
    for folder in (path, os.path.join(PACKAGE, path)):
        if path and os.path.isdir(folder):
            return folder
    published = os.path.join(MODELS, os.path.basename(path).removesuffix('-Instruct').removesuffix('-it'))
    return published if path and os.path.isdir(published) else hf.find(path)


def make(config, name: str, slices: int = 1, mean_tokens: int = 0) -> PlannedRun:
    """Returns the PlannedRun of a config on `slices` slices of the topology `name`.

    Where mesh.data is 0, the PlannedRun's config has the mesh over all devices that training would choose there.
    mean_tokens: mean length of completions in packed rows; 0: all have full length. Raises BadInput for a config that
    cannot run there.
    """
    settings, name = Settings.from_config(config), topology.full_name(name)
    folder = find_model(settings.model.path)
    model_config = families.load_config(folder)
    check_context(settings.data.max_prompt_tokens + settings.sampling.max_tokens, folder)
    chosen = not settings.mesh.get('data', 1) and set(meshes.sizes_of(settings.mesh).values()) == {1}
    all_devices = topology.devices(name, slices)
    count = len(all_devices) - settings.mesh.get('sampler', 0)
    if count < len(all_devices) and slices > 1:
        raise BadInput('mesh.sampler', settings.mesh.sampler, f'takes one slice, and --slices={slices}; use 0')
    if count < 1:
        remedy = f'leaves the learner none of the {len(all_devices)} devices of {name}; choose less, or 0'
        raise BadInput('mesh.sampler', settings.mesh.sampler, remedy)
    settings = make_planned_mesh(settings, model_config, name, count, slices)
    config, mesh = settings.config, topology.mesh(name, settings.mesh, slices)
    if topology.find_gpu(name) and mesh.devices.flat[0].platform == 'cpu':
        settings = make_stand_in(settings, name)
    chip = topology.find_gpu(name) or chips.lookup(mesh.devices.flat[0].device_kind)
    if chip is None:
        raise BadInput(
            '--topology', name, f'has chips that preflight does not know; name a topology of {", ".join(chips.TPUS)}'
        )
    specs.params(lora.policy_table(model_config, settings.model.lora), mesh)  # raises where it does not divide
    ends = tuple(hf.eos_tokens(folder, 'config.json', model_config.vocab_size)) or (0,)
    sampling = settings.sampling.for_tokenizer(None, ends, ends[0])
    settings = settings._replace(sampling=sampling)
    reward_functions = rewards.build(settings.rewards, settings.sampling.max_tokens)
    both = make_sides(settings.mesh, mesh, all_devices)
    run = Run(settings, None, Model(model_config, None, folder), mesh, reward_functions, NOWHERE, sides=both)
    run = open_algorithm(run, make_algorithm(config))
    algorithm, shapes = run.algorithm, settings.step_shapes(run.algorithm)
    aux = abstract_aux(settings.collection, shapes, 1) | abstract_history(algorithm, 1)
    if mean_tokens > shapes.tokens:
        raise BadInput('--mean_tokens', mean_tokens, f'is more than a completion may have, {shapes.tokens}; lower it')
    learner = make_run_learner(run, aux)
    plan = PlannedRun(config, name, slices, run, chip, shapes, learner, chosen, mean_tokens=mean_tokens)
    if not algorithm.needs_teacher:
        return plan
    path, columns = settings.teacher.path, settings.data.max_prompt_tokens + settings.sampling.max_tokens
    teacher_config = policies.teacher_config(find_model(path), path, model_config.vocab_size, columns, mesh)
    weights = compiled.abstract_params(transformer.param_table(teacher_config), mesh)
    program = policies.make_teacher_program(run, teacher_config)
    return dataclasses.replace(plan, teacher=program, teacher_bytes=compiled.device_bytes(weights))


def make_stand_in(settings: Settings, name: str) -> Settings:
    """Returns the Settings with which programs compiled for the CPU take as many bytes as for the GPU `name`.

    A CPU multiplies float16 as it is, but bfloat16 in float32. So bfloat16 becomes float16, except for a T4, which
    multiplies as the CPU. The learner's attention is one that writes scores to memory if the GPU's does.
    """
    t4 = name.startswith('gpu:t4')

    def with_half(options):
        return options._replace(dtype='float16') if options.dtype == 'bfloat16' and not t4 else options

    learning = settings.learning
    if learning.attention == 'auto':
        learning = learning._replace(attention='xla' if t4 else 'splash')  # splash writes no scores, as cuDNN's kernels
    return settings._replace(
        model=with_half(settings.model),
        sampling=with_half(settings.sampling),
        teacher=with_half(settings.teacher),
        learning=with_half(learning),
    )


def make_planned_mesh(settings: Settings, model_config: Any, name: str, count: int, slices: int) -> Settings:
    """Returns the Settings with a mesh of `count` devices; where mesh.data is 0, the mesh is the one training chooses.

    name: of the topology, for messages. Raises BadInput for axes whose product is another number.
    """
    section = settings.mesh
    teacher = settings.teacher.path and find_model(settings.teacher.path)
    fits = make_mesh_check(model_config, settings.model.lora, teacher, settings.dealt())
    sizes = meshes.sizes_of(section)
    if not section.get('data', 1):
        sizes = meshes.choose(section, model_config, [count], slices, fits)
    wanted = math.prod(sizes.values())
    if wanted == count:
        return settings.with_mesh(sizes)
    near, rest = meshes.choose({}, model_config, [count], slices, fits), wanted // sizes['fsdp']
    if count % rest == 0:
        near = sizes | {'fsdp': count // rest}  # the nearest: other axes as they are
    raise BadInput(
        'mesh',
        dict(section),
        f'has {wanted} devices and {name} has {count}{" beside mesh.sampler" * bool(section.get("sampler"))}; '
        'change the axes: the nearest that fits is ' + ' '.join(f'{axis}={near[axis]}' for axis in AXES),
    )


def change_config(config, overrides):
    """Returns a copy of the config with the values of overrides, {dotted key: value}."""
    config = config.copy_and_resolve_references()
    for key, value in overrides.items():
        *path, last = key.split('.')
        section = config
        for part in path:
            section = section[part]
        section[last] = value
    return config


def list_jobs(plan):
    """Returns (Jobs, sizes): a Job for each program that a plan's run compiles, and bytes of the sampler on a device.

    The learner's update, which compiles longest, is the first Job. sizes: see sampler_jobs.
    """
    run, settings, algorithm = plan.run, plan.run.settings, plan.algorithm
    shapes, learner = plan.shapes, plan.learner
    trained, frozen = lora.split(learner.abstract_state.params)
    state, param_bytes = plan.state_bytes()
    rollout = compiled.device_bytes(batches.abstract_rollout(shapes, specs.over_rows(run.mesh)))
    rollout *= 1 + settings.collection.staleness  # earlier draws wait on the devices
    jobs = [
        Job('learner.update', 'update', lambda: learner.update.program.traced, 0, runs=1),
        Job('learner.initial', 'start', lambda: learner.initial.program.trace(trained), compiled.device_bytes(frozen)),
    ]
    # passes over the batch: of the policy, of a reference, and of both when a KL is measured that no loss reads
    scorings = bool(learner.scorer_fields - {'ref_logprobs'}) + ('ref_logprobs' in learner.scorer_fields)
    if settings.log.kl_every and not algorithm.needs_reference:
        scorings += 2 / settings.log.kl_every
    collection = settings.collection
    if collection.staleness or (collection.in_flight and 'old_logprobs' not in learner.scorer_fields):
        scorings += 1  # compares the newest tokens with the sampler
    if scorings:
        fetched = plan.trained_bytes() * ('reference' in settings.learning.offload)
        alive = state + rollout + fetched
        jobs.insert(
            1, Job('learner.logprobs', 'logprobs', lambda: learner.scorer.traced, alive, arguments=False, runs=scorings)
        )
    if learner.values is not None:
        values = learner.values
        jobs.append(Job('learner.values', 'logprobs', lambda: values.traced, state + rollout, arguments=False, runs=1))
    if plan.teacher is not None:
        scorer = plan.teacher
        alive = state + rollout + plan.teacher_bytes * settings.teacher.park
        jobs.append(Job('teacher', 'logprobs', lambda: scorer.traced, alive, arguments=False, runs=1))
    if settings.supervised.updates:
        cold = supervised.make_supervised_learner(run)
        jobs.append(Job('cold start: learner.update', 'cold start', lambda: cold.update.program.traced, 0, holds=()))
    reads = algorithm.source in READ_FROM_DATA
    phase = 'evaluation' if reads else 'rollout'
    more, sizes = sampler_jobs(plan.engine, phase, state + plan.fetched_reference_bytes(), param_bytes)
    jobs += more
    if plan.evaluation_engine is not plan.engine:
        jobs += [
            job._replace(holds=tuple({*job.holds} & {'state', 'weights'}))  # training's cache is not in use then
            for job in sampler_jobs(plan.evaluation_engine, 'evaluation', state, param_bytes)[0]
        ]
    resting = plan.teacher_bytes * (not settings.teacher.park)
    packed = dict.fromkeys(('trip_counts', 'text_trip_counts'), packed_trip_counts(plan))
    return [
        job._replace(alive=job.alive + resting, **packed if job.phase in ('update', 'logprobs') else {}) for job in jobs
    ], sizes


def packed_trip_counts(plan: PlannedRun) -> tuple[int, ...]:
    """Returns (mean number of microbatches of packed rows in a minibatch,), a tuple; () when rows are padded.

    The learner's packer is run on prompts of full length and on completions of the lengths of completion_lengths.
    """
    learning, shapes, sizes = plan.run.settings.learning, plan.shapes, plan.learner.sizes
    if sizes is None:
        return ()
    rows = shapes.prompts * shapes.group_size
    lengths = completion_lengths(rows, shapes.tokens, plan.mean_tokens or shapes.tokens)
    # each group gets short and long completions
    lengths = lengths.reshape(shapes.group_size, shapes.prompts).T.reshape(-1)
    packed = packing.pack(
        np.ones((rows, shapes.queries), bool), np.arange(shapes.tokens) < lengths[:, None], sizes, learning.minibatches
    )
    return (math.ceil(packed.count.mean()),)


def completion_lengths(count: int, most: int, mean: float) -> np.ndarray:
    """Returns rising lengths i64[count] of this mean: quantiles of an exponential distribution, clipped at `most`."""
    places = -np.log1p(-(np.arange(count) + 0.5) / count)
    least, greatest = 0.0, 64.0 * most
    for _ in range(60):  # bisection for the scale that gives the mean
        scale = (least + greatest) / 2
        low = np.minimum(places * scale, most).mean() < mean
        least, greatest = (scale, greatest) if low else (least, scale)
    return np.full(count, most) if mean >= most else np.clip(np.rint(places * scale), 1, most).astype(int)


def sampler_jobs(engine, phase, state, params):
    """Returns (Jobs of an engine's largest programs, bytes on a device {'weights', 'rollout', 'cache'}).

    Programs for smaller decode batches need less memory. For an evaluation, only the largest decode program is a Job;
    its other programs differ from the rollout's by the number of rows. phase: 'rollout' or 'evaluation'; state, params:
    bytes on a device of the TrainState and of the policy's parameters. A sampler on devices of its own holds no
    TrainState there, but the frozen weights below adapters.
    """
    spec, keys = engine.programs.spec, schedule.largest_programs(engine.schedule)
    adapted, apart = bool(spec.sampling.lora.rank), engine.programs.sides is not None
    keys += [schedule.INSPECT] * adapted + [schedule.ADAPTERS] * (adapted and apart)
    sender = (schedule.ADAPTERS if adapted else schedule.WEIGHTS) if apart else None
    whole_state, state_name = state, ('state',) * (not apart)
    if apart:
        state = compiled.device_bytes(lora.split(spec.abstract_params)[1] or ())
    batches_of = {key: spec.abstract_batch(key) for key in keys if key.kind == 'decode'}
    cache_bytes = {
        key: compiled.device_bytes((batch.cache.prompt, batch.cache.chunks)) for key, batch in batches_of.items()
    }
    sizes = {
        'weights': compiled.device_bytes(spec.abstract_weights),
        'rollout': compiled.device_bytes(spec.abstract_state),
        'cache': max(cache_bytes.values()),
    }
    times = engine.schedule.prompts // engine.schedule.fresh_batch().prompts
    jobs = []
    for key in keys:
        runs, trip_counts = 0, ()
        alive, arguments, holds = state, True, (*state_name, *sizes)
        if key == sender:  # on the learner's devices
            alive, runs, holds = whole_state - params, 1, ('state',)
        elif key.kind == 'weights':
            alive, runs, holds = state - params * (not apart), 1, (*state_name, 'weights')
        elif key.kind in ('open', 'carry'):
            runs = times
        elif key.kind == 'decode':
            # with carried rows, the second chunk is for rows that begin after them; no row decodes in both chunks
            columns = engine.schedule.chunks[: 1 if engine.schedule.carried else None]
            segments = math.ceil(sum(columns) / engine.schedule.segment)
            runs = times * segments if cache_bytes[key] == sizes['cache'] else 0
            cache = batches_of[key].cache
            loops = not (spec.cache_format.flat or spec.cache_format.by_layer)  # over the cache's blocks
            blocks = tuple(chunk.k.shape[1] for chunk in (cache.prompt, *cache.chunks)) if loops else ()
            trip_counts = (engine.schedule.segment, *blocks)
        elif key.kind != 'resume':  # other programs' arguments are among the live buffers
            alive, arguments = state + sum(sizes.values()), False
        if phase == 'rollout' or (key.kind == 'decode' and runs):
            runs *= phase == 'rollout'
            trace = functools.partial(engine.programs.trace, key)
            jobs.append(
                Job(
                    f'{phase}: {key}',
                    phase,
                    trace,
                    alive,
                    arguments,
                    holds,
                    runs,
                    trip_counts,
                    trip_counts[:1] + trip_counts[2:],
                )
            )
    return jobs, sizes
