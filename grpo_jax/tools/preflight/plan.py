"""The programs of a run on a topology, abstract: what grpo_jax.train would compile there, from the config alone."""

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
    Model,
    Run,
    check_context,
    make_algorithm,
    make_run_learner,
    make_run_sampler,
    open_algorithm,
)
from grpo_jax.run.settings import Settings
from grpo_jax.sampler import schedule
from grpo_jax.sharding import batches, chips, compiled, specs
from grpo_jax.sharding.mesh import AXES, ROW_AXES
from grpo_jax.tools.preflight import topology

MODELS = os.path.join(PACKAGE, 'configs', 'models')


class Job(NamedTuple):
    """A program to compile."""

    name: str
    phase: str  # of a run: start, cold start, rollout, logprobs, update, evaluation
    trace: Callable  # () -> jax.stages.Traced
    alive: int  # bytes on a device beside the program's results and temporaries
    arguments: bool = True  # whether its arguments come on top of these
    holds: tuple[str, ...] = ('state',)  # what is among all of it, of state and the names in jobs_of's sizes
    runs: float = 0  # a step; 0: a variant of another one, or not in every step
    trip_counts: tuple[int, ...] = ()  # of loops whose text does not tell, the most: over steps, blocks of the prompt,
    # blocks of each chunk
    text_trip_counts: tuple[int, ...] = ()  # the same without those that the compiled text tells


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """A run on a topology."""

    config: Any
    topology: str
    slices: int
    run: Run
    chip: chips.Chip
    shapes: batches.Shapes
    learner: Learner
    teacher: compiled.Executable | None = None  # its program, where the algorithm learns from one
    teacher_bytes: int = 0  # of its weights on a device
    mean_tokens: int = 0  # of a completion, for packed rows; 0: all at full length

    @property
    def mesh(self):
        """Its jax Mesh."""
        return self.run.mesh

    @property
    def algorithm(self) -> Any:
        """Its Algorithm."""
        return self.run.algorithm

    @functools.cached_property
    def engine(self):
        """The sampler of training, or of evaluation where training reads its completions from the data."""
        if self.algorithm.source in READ_FROM_DATA:
            return self.evaluation_engine
        settings = self.run.settings
        shapes = draw_shapes(settings.collection, self.shapes, settings.data.prompts_per_step)
        return make_run_sampler(self.run, shapes)

    @functools.cached_property
    def evaluation_engine(self):
        """The sampler of evaluation."""
        evaluation = self.config.evaluation
        shapes = evaluate.make_shapes(self.run, evaluation.samples + 1, evaluation.prompts)
        return make_run_sampler(self.run, shapes, greedy=1)

    @property
    def links(self) -> tuple[float, float]:
        """Bytes a second that a chip sends over its links, see chips.Chip.links."""
        return self.chip.links([int(side) for side in self.topology.partition(':')[2].split('x')])

    def state_bytes(self):
        """Bytes of the TrainState on a device, and of the parameters among it."""
        return compiled.device_bytes(self.learner.state), compiled.device_bytes(self.learner.state.params)

    def trained_bytes(self) -> int:
        """Bytes on a device of the parameters that are trained: all of them, or the adapters."""
        return compiled.device_bytes(lora.split(self.learner.state.params)[0])

    def fetched_reference_bytes(self) -> int:
        """Bytes on a device of a reference that waits in the hosts' memory and is sampled from."""
        fetched = self.algorithm.source == 'reference' and 'reference' in self.config.learner.offload
        return fetched * self.trained_bytes()

    def row_shards(self):
        """Devices that the rows of a batch are split over."""
        return batches.devices_along(self.mesh, ROW_AXES)

    def microbatch(self) -> tuple[int, int]:
        """Rows of a microbatch on a device, and their tokens, padding and all."""
        if self.learner.sizes is not None:
            return self.config.learner.pack_rows, self.learner.sizes.columns
        learning = self.run.settings.learning
        share = packing.device_share(self.mesh, self.shapes, learning)
        return share // learning.microbatches, self.shapes.queries + self.shapes.tokens


def find_model(path):
    """The folder of a model, or that of a published model's shape in configs/models."""
    for folder in (path, os.path.join(PACKAGE, path)):
        if path and os.path.isdir(folder):
            return folder
    published = os.path.join(MODELS, os.path.basename(path).removesuffix('-Instruct').removesuffix('-it'))
    return published if path and os.path.isdir(published) else hf.find(path)


def make(config, name: str, slices: int = 1, mean_tokens: int = 0) -> PlannedRun:
    """PlannedRun of a config on `slices` slices of a topology; BadInput for what cannot work there.

    Where every axis of config.mesh is 1, a mesh over all devices is chosen, and stands in the PlannedRun's config.
    mean_tokens is that of completions, in packed rows; 0: all have their full length.
    """
    settings = Settings.from_config(config)
    folder = find_model(settings.model.path)
    model_config = families.load_config(folder)
    check_context(settings.data.max_prompt_tokens + settings.sampling.max_tokens, folder)
    config = with_mesh(config, model_config, name, len(topology.devices(name, slices)), slices)
    mesh = topology.mesh(name, config.mesh, slices)
    chip = chips.lookup(mesh.devices.flat[0].device_kind)
    if chip is None:
        raise BadInput('--topology', name, f'has chips of no known figures; choose one of {", ".join(chips.TPUS)}')
    specs.params(lora.policy_table(model_config, settings.model.lora), mesh)  # raises where an axis does not divide
    ends = tuple(hf.eos_tokens(folder, 'config.json', model_config.vocab_size)) or (0,)
    sampling = settings.sampling.for_tokenizer(None, ends, ends[0])
    settings = settings._replace(mesh=config.mesh, config=config, sampling=sampling)
    reward_functions = rewards.build(settings.rewards, settings.sampling.max_tokens)
    run = Run(settings, None, Model(model_config, None, folder), mesh, reward_functions, '')
    run = open_algorithm(run, make_algorithm(config))
    algorithm, shapes = run.algorithm, settings.step_shapes(run.algorithm)
    aux = abstract_aux(settings.collection, shapes, 1) | abstract_history(algorithm, 1)
    if mean_tokens > shapes.tokens:
        raise BadInput('--mean_tokens', mean_tokens, f'is more than a completion may have, {shapes.tokens}')
    plan = PlannedRun(config, name, slices, run, chip, shapes, make_run_learner(run, aux), mean_tokens=mean_tokens)
    if not algorithm.needs_teacher:
        return plan
    path, columns = settings.teacher.path, settings.data.max_prompt_tokens + settings.sampling.max_tokens
    config_of_teacher = policies.teacher_config(find_model(path), path, model_config.vocab_size, columns, mesh)
    weights = compiled.abstract_params(transformer.param_table(config_of_teacher), mesh)
    program = policies.make_teacher_program(run, config_of_teacher)
    return dataclasses.replace(plan, teacher=program, teacher_bytes=compiled.device_bytes(weights))


def with_mesh(config, model_config, name, count, slices):
    """The config with a mesh of `count` devices: its own, or one along fsdp where all axes are 1."""
    section = config.mesh
    wanted = math.prod(section[axis] for axis in AXES)
    if wanted == count:
        return config
    chosen = choose_mesh(config, model_config, count, slices)
    if wanted > 1:
        rest = wanted // section.fsdp  # the nearest: other axes as they are
        near = dict(section) | {'fsdp': count // rest} if count % rest == 0 else chosen
        raise BadInput(
            'mesh',
            dict(section),
            f'has {wanted} devices and {name} has {count}; the nearest that fits is '
            + ' '.join(f'{axis}={near[axis]}' for axis in AXES),
        )
    return changed(config, {f'mesh.{axis}': size for axis, size in chosen.items()})


def choose_mesh(config, model_config, count, slices):
    """{axis: size}: data over slices and fsdp within; tensor, and then data, take what rows or width do not divide."""
    rows = config.data.prompts_per_step
    batch = rows * config.rollout.group_size // (config.learner.minibatches * config.learner.microbatches)
    candidates = meshes(model_config, count, slices)
    return next(
        (
            sizes
            for sizes in candidates
            if not rows % (count // sizes['tensor']) and not batch % (count // sizes['tensor'])
        ),
        candidates[0],
    )


def meshes(model_config, count, slices):
    """[{axis: size}] of meshes that divide the model, by tensor, which must divide the heads of keys and values."""
    within, candidates = count // slices, []
    for tensor in (n for n in range(1, within + 1) if within % n == 0 and model_config.kv_heads % n == 0):
        cut = within // tensor
        fsdp = max(n for n in range(1, cut + 1) if cut % n == 0 and model_config.width % n == 0)
        candidates.append(dict.fromkeys(AXES, 1) | {'data': count // tensor // fsdp, 'fsdp': fsdp, 'tensor': tensor})
    return candidates


def changed(config, overrides):
    """A copy of the config with other values, by dotted key."""
    config = config.copy_and_resolve_references()
    for key, value in overrides.items():
        *path, last = key.split('.')
        section = config
        for part in path:
            section = section[part]
        section[last] = value
    return config


def jobs_of(plan):
    """([Job], the slowest to compile first; bytes on a device of the sampler's weights, rollout and cache, by name)."""
    run, settings, algorithm = plan.run, plan.run.settings, plan.algorithm
    shapes, learner = plan.shapes, plan.learner
    trained, frozen = lora.split(learner.state.params)
    state, param_bytes = plan.state_bytes()
    rollout = compiled.device_bytes(batches.abstract_rollout(shapes, specs.over_rows(run.mesh)))
    jobs = [
        Job('learner.update', 'update', lambda: learner.update.traced, 0, runs=1),
        Job('learner.initial', 'start', lambda: learner.initial.program.trace(trained), compiled.device_bytes(frozen)),
    ]
    # of the policy, of a reference, and of both where a KL is observed that no loss reads
    scorings = bool(learner.needed - {'ref_logprobs'}) + ('ref_logprobs' in learner.needed)
    if settings.log.kl_every and not algorithm.needs_reference:
        scorings += 2 / settings.log.kl_every
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
        jobs.append(Job('cold start: learner.update', 'cold start', lambda: cold.update.traced, 0, holds=()))
    reads = algorithm.source in READ_FROM_DATA
    phase = 'evaluation' if reads else 'rollout'
    more, sizes = sampler_jobs(plan.engine, phase, state + plan.fetched_reference_bytes(), param_bytes)
    jobs += more
    if plan.evaluation_engine is not plan.engine:
        jobs += [
            job._replace(holds=('state', 'weights'))  # its cache is another one
            for job in sampler_jobs(plan.evaluation_engine, 'evaluation', state, param_bytes)[0]
        ]
    resting = plan.teacher_bytes * (not settings.teacher.park)
    packed = dict.fromkeys(('trip_counts', 'text_trip_counts'), packed_trip_counts(plan))
    return [
        job._replace(alive=job.alive + resting, **packed if job.phase in ('update', 'logprobs') else {}) for job in jobs
    ], sizes


def packed_trip_counts(plan: PlannedRun) -> tuple[int, ...]:
    """(microbatches of packed rows in a minibatch,); () where rows are padded.

    The packer is asked, with prompts at full length, and the completions of each group as long as those of
    completion_lengths.
    """
    learning, shapes, sizes = plan.run.settings.learning, plan.shapes, plan.learner.sizes
    if sizes is None:
        return ()
    rows = shapes.prompts * shapes.group_size
    lengths = completion_lengths(rows, shapes.tokens, plan.mean_tokens or shapes.tokens)
    # dealt out, so that each group has short and long ones
    lengths = lengths.reshape(shapes.group_size, shapes.prompts).T.reshape(-1)
    packed = packing.pack(
        np.ones((rows, shapes.queries), bool), np.arange(shapes.tokens) < lengths[:, None], sizes, learning.minibatches
    )
    return (math.ceil(packed.count.mean()),)


def completion_lengths(count: int, most: int, mean: float) -> np.ndarray:
    """i64[count], rising, of that mean: those of an exponential distribution that ends at `most`."""
    places = -np.log1p(-(np.arange(count) + 0.5) / count)
    least, greatest = 0.0, 64.0 * most
    for _ in range(60):  # the scale whose mean is wanted
        scale = (least + greatest) / 2
        low = np.minimum(places * scale, most).mean() < mean
        least, greatest = (scale, greatest) if low else (least, scale)
    return np.full(count, most) if mean >= most else np.clip(np.rint(places * scale), 1, most).astype(int)


def sampler_jobs(engine, phase, state, params):
    """([Job], bytes of weights, rollout state and cache by name) of an engine's programs that need most memory.

    All smaller sizes of a decode batch need less. Of an evaluation's, only the largest decode program counts: the
    others differ from those of the rollout by the number of rows. state and params are bytes of one device.
    """
    spec, keys = engine.programs.spec, schedule.largest(engine.schedule)
    keys += [schedule.INSPECT] * bool(spec.sampling.lora.rank)
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
        alive, arguments, holds = state, True, ('state', *sizes)
        if key.kind == 'weights':
            alive, runs, holds = state - params, 1, ('state', 'weights')
        elif key.kind == 'open':
            runs = times
        elif key.kind == 'decode':
            segments = math.ceil(sum(engine.schedule.chunks) / engine.schedule.segment)
            runs = times * segments if cache_bytes[key] == sizes['cache'] else 0
            cache = batches_of[key].cache  # kernels have no loops over its blocks
            blocks = () if cache.prompt.flat else tuple(chunk.k.shape[1] for chunk in (cache.prompt, *cache.chunks))
            trip_counts = (engine.schedule.segment, *blocks)
        elif key.kind != 'resume':  # what these read is among what is alive
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
