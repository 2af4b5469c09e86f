"""Finds changes with which a config fits its devices: orders candidates by cost, and compiles the likely ones."""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import logging
import math
import shlex
from typing import Any, NamedTuple

import jax.numpy as jnp

from grpo_jax.diagnose.advice import count_parameters
from grpo_jax.errors import BadInput
from grpo_jax.sharding import mesh as meshes
from grpo_jax.sharding.mesh import AXES
from grpo_jax.tools.preflight import plan as plans
from grpo_jax.tools.preflight import topology as topologies
from grpo_jax.tools.preflight import verdict as verdicts
from grpo_jax.tools.preflight.compiler import Compiling
from grpo_jax.tools.preflight.verdict import Verdict

SLICES = {generation: tuple(sides.values()) for generation, sides in topologies.SIDES.items()}  # smallest first
TRIES = 4  # candidates that are compiled
SAVED = {'none': 1.0, 'dots': 0.4, 'full': 0.2}  # share of the activations by learner.remat; estimates
ROOM = 0.95  # share of the memory that a candidate may need by estimate
GIB = 2**30


class Costs(NamedTuple):
    """The cost of each kind of change: how unwelcome it is. A candidate's sum has no unit, and only gives an order."""

    larger_slice: float = 20.0  # a size up: more money, and chips that may not be free
    half_prompts: float = 6.0  # a halving: the only change that changes results
    other_mesh: float = 2.0  # other communication, and the user may have chosen the mesh on purpose
    tensor_shard: float = 0.01  # a shard: communication in every layer, so fewer shards come first
    smaller_cache: float = 1.5  # rows wait for room, so a rollout has more decode steps
    offload: float = 1.6  # a part of the state crosses the host's link in every step
    microbatches: float = 1.0  # smaller matrix products
    microbatch: float = 0.001  # a microbatch: fewer come first
    remat: float = 0.5  # computes activations twice
    saved: float = -0.2  # times the share of activations kept: less recomputation comes first


COSTS = Costs()


class Candidate(NamedTuple):
    """A change of the config and perhaps of the topology, with a cost."""

    cost: float  # sum of Costs
    topology: str
    overrides: dict[str, Any]  # by dotted key
    smaller_cache: bool  # whether rollout.cache_gib is set to the memory that is left

    def is_mesh(self, plan: plans.PlannedRun) -> bool:
        """Whether the candidate changes only the mesh of the plan."""
        return self.topology == plan.topology and all(key.startswith('mesh.') for key in self.overrides)

    def add_overrides(self, cost: float, **overrides: Any) -> 'Candidate':
        """Returns the candidate with further overrides and `cost` added; mesh__data=2 stands for {'mesh.data': 2}."""
        changes = {key.replace('__', '.'): value for key, value in overrides.items()}
        return self._replace(cost=self.cost + cost, overrides=self.overrides | changes)


def advise(
    verdict: Verdict, *, tell: Callable[[str], Any], compiling: Compiling
) -> tuple[Candidate, Verdict] | tuple[None, None]:
    """Returns the cheapest Candidate that fits and its Verdict; (None, None) when no compiled candidate fits.

    verdict: of a plan that does not fit. tell(text) is called before a candidate is compiled; at most TRIES are.
    """
    base, tries = verdict, 0
    for candidate in list_candidates(verdict.plan):
        with suppress_warnings():
            planned = plan_candidate(verdict.plan, candidate, base)
        if planned is None:
            continue
        candidate, plan = planned
        tell(f'trying {candidate_flags(verdict.plan, candidate)}')
        compiled = verdicts.compile_and_check(plan, compiling)
        if compiled.fits:
            return candidate, compiled
        base, tries = compiled, tries + 1  # the next estimates start from this compiled plan
        if tries == TRIES:
            break
    return None, None


@contextlib.contextmanager
def suppress_warnings() -> Iterator[None]:
    """Suppresses warnings in the block, since the first plan of the config has already given them."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def candidate_flags(plan: plans.PlannedRun, candidate: Candidate) -> str:
    """Returns the flags, as text, that turn the plan into a candidate; of a changed mesh each axis above 1 is named."""
    overrides = candidate.overrides
    if any(key.startswith('mesh.') for key in overrides):
        axes = {f'mesh.{axis}': overrides.get(f'mesh.{axis}', plan.config.mesh[axis]) for axis in AXES}
        overrides = {key: size for key, size in axes.items() if size > 1 or key in overrides} | overrides
    flags = [
        f'--config.{key}=' + (f'"{value}"' if isinstance(value, tuple) else f'{value}')
        for key, value in overrides.items()
    ]
    return ' '.join(([f'--topology={candidate.topology}'] if candidate.topology != plan.topology else []) + flags)


def train_flags(plan: plans.PlannedRun, given: Sequence[str], candidate: Candidate | None = None) -> str:
    """Returns the flags to train with, as text: the --config flags given, the mesh, and the candidate's changes.

    given: the words of the command line; flags of keys that the mesh or the candidate sets are left out.
    """
    overrides = {f'mesh.{name}': size for name in (*AXES, 'sampler') if (size := plan.config.mesh.get(name, 0)) > 1}
    if candidate is None:
        candidate = Candidate(0.0, plan.topology, {}, False)
    candidate = candidate._replace(overrides=overrides | candidate.overrides, topology=plan.topology)
    changed = tuple(f'--config.{key}=' for key in candidate.overrides)
    kept = [word for word in given if word.startswith('--config') and not word.startswith(changed)]
    return ' '.join(filter(None, [shlex.join(kept), candidate_flags(plan, candidate)]))


def list_candidates(plan: plans.PlannedRun) -> list[Candidate]:
    """Returns the candidates, cheapest first: changes without effect on results, fewer prompts, then more chips."""
    remat, offload = plan.config.learner.remat, set(plan.config.learner.offload)
    every = list(_meshes_and_batches(plan))
    every += [
        candidate.add_overrides(COSTS.remat + COSTS.saved * SAVED[less], learner__remat=less)
        for less in SAVED
        if SAVED[less] < SAVED[remat]
        for candidate in every
    ]
    names = ('optimizer', 'reference') if plan.learner.abstract_state.ref_params is not None else ('optimizer',)
    if set(names) - offload:
        every += [
            candidate.add_overrides(COSTS.offload, learner__offload=names)
            for candidate in every
            if candidate.topology == plan.topology
            and not any(key.startswith(('mesh', 'data')) for key in candidate.overrides)
        ]
    every += [candidate.add_overrides(COSTS.smaller_cache)._replace(smaller_cache=True) for candidate in every]
    changes = [x for x in every if x.overrides or x.smaller_cache or x.topology != plan.topology]
    return sorted(changes, key=lambda candidate: candidate.cost)


def _meshes_and_batches(plan: plans.PlannedRun) -> Iterator[Candidate]:
    """Yields candidates of all slices, meshes, prompts a step and microbatches; one of them changes nothing."""
    config, own = plan.config, meshes.sizes_of(plan.config.mesh)
    kind, _, size = plan.topology.partition(':')
    sizes = SLICES.get(kind, ())
    larger = sizes[sizes.index(size) :] if size in sizes else (size,)
    for step, name in enumerate(larger):
        count = len(topologies.devices(f'{kind}:{name}', plan.slices)) - config.mesh.get('sampler', 0)
        choices = meshes.list_meshes({}, plan.run.model.config, count, plan.slices)
        if name == size and own not in choices:  # a mesh that the user has chosen
            choices = [own, *choices]
        for mesh in choices:
            axes = {f'mesh.{axis}': mesh[axis] for axis in AXES if mesh[axis] != config.mesh[axis]}
            mesh_cost = (COSTS.other_mesh + COSTS.tensor_shard * mesh['tensor']) * bool(axes)
            shards = count // mesh['tensor']
            for halvings in range(3):
                prompts = config.data.prompts_per_step >> halvings
                rows = prompts * config.rollout.group_size // shards // config.learner.minibatches
                for microbatches in (config.learner.microbatches << n for n in range(10)):
                    if prompts % shards or microbatches > max(rows, 1):
                        continue
                    cost = COSTS.larger_slice * step + COSTS.half_prompts * halvings + mesh_cost
                    changes = axes | ({'data.prompts_per_step': prompts} if halvings else {})
                    if microbatches != config.learner.microbatches:
                        changes = changes | {'learner.microbatches': microbatches}
                        cost += COSTS.microbatches + COSTS.microbatch * microbatches
                    yield Candidate(cost, f'{kind}:{name}', changes, False)


def plan_candidate(
    plan: plans.PlannedRun, candidate: Candidate, base: Verdict
) -> tuple[Candidate, plans.PlannedRun] | None:
    """Returns (candidate, its plan) if the plan fits by an estimate from the compiled `base`; else None.

    A candidate with smaller_cache is returned with the override rollout.cache_gib.
    """
    try:
        changed = plan_changes(plan, candidate)
        phases, cache = estimate_memory(changed, base)
        most = ROOM * changed.chip.memory
        if not candidate.smaller_cache:
            fits = max(phases['update'], phases['logprobs'], phases['rollout'] + cache) <= most
            return (candidate, changed) if fits else None
        budget = math.floor((most - phases['rollout']) / GIB * 4) / 4  # quarters of a GiB
        if max(phases['update'], phases['logprobs']) > most or budget <= 0 or budget * GIB >= cache:
            return None
        candidate = candidate.add_overrides(0.0, rollout__cache_gib=budget)
        changed = plan_changes(plan, candidate)
        changed.engine.schedule.fresh_batch()  # raises when the budget holds not even one group
        return candidate, changed
    except BadInput:  # sizes that do not divide
        return None


def plan_changes(plan: plans.PlannedRun, candidate: Candidate) -> plans.PlannedRun:
    """Returns the plan with a candidate's changes; raises BadInput for sizes that do not divide."""
    return plans.make(
        plans.change_config(plan.config, candidate.overrides), candidate.topology, plan.slices, plan.mean_tokens
    )


def estimate_memory(plan: plans.PlannedRun, base: Verdict) -> tuple[dict[str, Any], int | float]:
    """Estimates a plan's memory on a device, in bytes, from the compiled base.

    Returns ({phase: bytes in use without the cache}, bytes of the cache), for the phases update, logprobs and rollout.
    State and sampler weights are exact. Temporaries are scaled from the base: in an update (without two copies of the
    gradient) by the tokens of a microbatch on a device, in a logprobs pass by the rows of the batch, and everywhere by
    1 / tensor.
    """
    before, (state, _), trained = base.plan, plan.state_bytes(), plan.trained_bytes()
    (state_before, _), trained_before = before.state_bytes(), before.trained_bytes()
    cut = before.mesh.shape['tensor'] / plan.mesh.shape['tensor']
    phases = {phase: size for phase, (size, _) in base.phases.items()}

    def scaled(phase: str, fixed: int, rows: float) -> float:
        activations = max(phases.get(phase, 0) - state_before - fixed / trained * trained_before, 0)
        return state + fixed + activations * cut * rows

    def batch_rows(plan: plans.PlannedRun) -> float:
        return plan.shapes.prompts * plan.shapes.group_size / plan.row_shards()

    saved = SAVED[plan.config.learner.remat] / SAVED[before.config.learner.remat]
    returns = 'reference' in set(plan.config.learner.offload) - set(before.config.learner.offload)
    rows = math.prod(plan.microbatch()) / max(math.prod(before.microbatch()), 1)
    sampling = max(phases.get(phase, 0) for phase in ('rollout', 'evaluation'))
    extra = max(sampling - state_before - sum(base.sampler_bytes.values()), 0) * cut
    engines = plan.engine, plan.evaluation_engine
    whole = max(engine.schedule.bytes(*engine.schedule.whole_batch) for engine in engines)
    return {
        'update': scaled('update', 2 * trained, rows * saved),
        'logprobs': scaled('logprobs', 0, batch_rows(plan) / batch_rows(before)) + returns * trained,
        'rollout': state * (plan.run.sides is None)
        + plan.fetched_reference_bytes()
        + weight_bytes(plan)
        + base.sampler_bytes['rollout']
        + extra,
    }, whole


def weight_bytes(plan: plans.PlannedRun) -> int:
    """Returns the bytes of the sampler's weights on a device, with all matrices in the sampler's dtype."""
    kind = jnp.dtype(plan.run.settings.sampling.weights_dtype or plan.run.settings.sampling.dtype)
    whole = count_parameters(plan.run.model.config)
    return whole * kind.itemsize // plan.mesh.shape['tensor']
