"""What to change in a config that does not fit: candidates by arithmetic, the first that fits by compiling it."""

import logging
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax import evaluate
from grpo_jax.errors import BadInput
from grpo_jax.preflight import plan as plans
from grpo_jax.preflight import topology as topologies
from grpo_jax.preflight import verdict as verdicts
from grpo_jax.sharding.mesh import AXES

SQUARES = ('2x2', '2x4', '4x4', '4x8', '8x8', '8x16', '16x16')
CUBES = ('2x2x1', '2x2x2', '2x2x4', '2x4x4', '4x4x4', '4x4x8', '4x8x8', '8x8x8', '8x8x16')
SLICES = {'v5e': SQUARES, 'v6e': SQUARES, 'v4': CUBES, 'v5p': CUBES}
TRIES = 4  # candidates that are compiled
KEPT = {'none': 1.0, 'dots': 0.4, 'full': 0.2}  # of activations by learner.remat; estimates, to sort candidates out
ROOM = 0.95  # of the memory that a candidate may need by estimate
GIB = 2**30


class Candidate(NamedTuple):
    """A change of the config."""

    cost: float  # how little one wants it
    topology: str
    overrides: dict  # by dotted key
    smaller_cache: bool  # also rollout.cache_gib, by what is left for it


def advise(verdict, *, told, **compiling):
    """(Candidate, Verdict) of the least change found that fits, compiled; (None, None) when there is none.

    told(text) is called before a candidate is compiled; compiling is for compiler.measure.
    """
    base, tries = verdict, 0
    for candidate in candidates(verdict.plan):
        logging.disable(logging.WARNING)  # what the config made it warn of has been said
        found = sized(verdict.plan, candidate, base)
        logging.disable(logging.NOTSET)
        if found is None:
            continue
        candidate, plan = found
        told(f'trying {settings(verdict.plan, candidate)}')
        tried = verdicts.of(plan, **compiling)
        if tried.fits:
            return candidate, tried
        base, tries = tried, tries + 1  # the next estimates start from what is known now
        if tries == TRIES:
            break
    return None, None


def settings(plan, candidate):
    """The flags that make a candidate of the plan."""
    flags = [
        f'--config.{key}=' + (f'"{value}"' if isinstance(value, tuple) else f'{value}')
        for key, value in candidate.overrides.items()
    ]
    return ' '.join(([f'--topology={candidate.topology}'] if candidate.topology != plan.topology else []) + flags)


def candidates(plan):
    """[Candidate] from the least change on: what computes the same comes first, then fewer prompts, then more chips."""
    config, c, found = plan.config, plan.experiment.model_config, []
    kind, _, size = plan.topology.partition(':')
    sizes = SLICES[kind]
    larger = sizes[sizes.index(size) :] if size in sizes else (size,)
    for step, name in enumerate(larger):
        count = len(topologies.devices(f'{kind}:{name}', plan.slices))
        for mesh in plans.meshes(c, count, plan.slices):
            of_mesh = {f'mesh.{axis}': mesh[axis] for axis in AXES if mesh[axis] != config.mesh[axis]}
            shards = count // mesh['tensor']
            for halvings in range(3):
                prompts = config.data.prompts_per_step >> halvings
                rows = prompts * config.rollout.group_size // shards // config.learner.minibatches
                for micro in (config.learner.microbatches << n for n in range(10)):
                    if prompts % shards or micro > max(rows, 1):
                        continue
                    changes = of_mesh | ({'data.prompts_per_step': prompts} if halvings else {})
                    cost = 20 * step + 6 * halvings + (2 + mesh['tensor'] / 100) * bool(of_mesh)
                    if micro != config.learner.microbatches:
                        changes, cost = changes | {'learner.microbatches': micro}, cost + 1 + micro / 1000
                    found.append(Candidate(cost, f'{kind}:{name}', changes, False))
    less = [remat for remat in KEPT if KEPT[remat] < KEPT[config.learner.remat]]
    found += [
        x._replace(
            cost=x.cost + 0.5 - 0.2 * KEPT[remat],  # what recomputes less comes first
            overrides=x.overrides | {'learner.remat': remat},
        )
        for remat in less
        for x in found
    ]
    names = ('optimizer', 'reference') if plan.algorithm.keeps_reference else ('optimizer',)
    if set(names) - set(config.learner.offload):
        found += [
            x._replace(cost=x.cost + 1.6, overrides=x.overrides | {'learner.offload': names})
            for x in found
            if x.topology == plan.topology and not any(key.startswith(('mesh', 'data')) for key in x.overrides)
        ]
    found += [x._replace(cost=x.cost + 1.5, smaller_cache=True) for x in found]
    return sorted(
        (x for x in found if x.overrides or x.smaller_cache or x.topology != plan.topology),
        key=lambda candidate: candidate.cost,
    )


def sized(plan, candidate, base):
    """(Candidate, its Plan) that should fit by estimate from a Verdict, with the size of its cache; or None."""
    try:
        made = _made(plan, candidate)
        rest, held = estimate(made, base)
        most = ROOM * made.chip.memory
        if not candidate.smaller_cache:
            return (candidate, made) if max(rest['update'], rest['score'], rest['rollout'] + held) <= most else None
        budget = math.floor((most - rest['rollout']) / GIB * 4) / 4  # quarters of a GiB
        if max(rest['update'], rest['score']) > most or budget <= 0 or budget * GIB >= held:
            return None
        candidate = candidate._replace(overrides=candidate.overrides | {'rollout.cache_gib': budget})
        made = _made(plan, candidate)
        made.engine.schedule.fresh_batch()  # raises when the budget holds not even one group
        return candidate, made
    except BadInput:  # sizes that do not divide
        return None


def _made(plan, candidate):
    return plans.make(plans.changed(plan.config, candidate.overrides), candidate.topology, plan.slices)


def estimate(plan, base):
    """({'update', 'score', 'rollout'} bytes of a device in use then, without cache; bytes of cache) of a plan.

    What is in the state and the sampler's weights is exact. Temporaries are those of the base, a Verdict, in
    proportion: of the update to the rows of a microbatch on a device, of score to those of the batch, both without
    two copies of the gradient, and all to 1 / tensor.
    """
    before, (state, of_params) = base.plan, plan.state_bytes()
    state_before, params_before = before.state_bytes()
    cut = before.mesh.shape['tensor'] / plan.mesh.shape['tensor']
    phases = {phase: size for phase, (size, _) in base.phases.items()}

    def scaled(phase, fixed, rows):
        activations = max(phases.get(phase, 0) - state_before - fixed / of_params * params_before, 0)
        return state + fixed + activations * cut * rows

    def batch(which):
        return which.shapes.prompts * which.shapes.group_size / which.row_shards()

    kept = KEPT[plan.config.learner.remat] / KEPT[before.config.learner.remat]
    returns = 'reference' in set(plan.config.learner.offload) - set(before.config.learner.offload)
    rows = plan.microbatch_rows() / max(before.microbatch_rows(), 1)
    sampling = max(phases.get(phase, 0) for phase in ('rollout', 'evaluation'))
    extra = max(sampling - state_before - sum(base.held.values()), 0) * cut
    engines = {
        id(engine.schedule): engine.schedule
        for engine in (plan.engine, *evaluate.samplers(plan.experiment, plan.config.evaluation.samples))
    }
    whole = max(p.bytes(*p.whole) for p in engines.values())
    return {
        'update': scaled('update', 2 * of_params, rows * kept),
        'score': scaled('score', 0, batch(plan) / batch(before)) + returns * of_params,
        'rollout': state + plan.lent_bytes() + weight_bytes(plan) + base.held['book'] + extra,
    }, whole


def weight_bytes(plan):
    """Bytes of the sampler's weights on a device, all matrices in their dtype."""
    kind = jnp.dtype(plan.config.rollout.weights_dtype or plan.experiment.dtype)
    whole = sum(x.size for x in jax.tree.leaves(plan.learner.state.params))
    return whole * kind.itemsize // plan.mesh.shape['tensor']
