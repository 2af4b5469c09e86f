"""Searches mesh, microbatches, packing, chunk, remat and offload for the fastest step that fits a slice.

Formulas (grpo_jax.tools.preflight.formulas) order all settings. The best ones are compiled, and each compiled setting
corrects the estimates of the others.
"""

from collections.abc import Callable, Iterator
import contextlib
import hashlib
import itertools
import json
import os
from typing import Any, NamedTuple

import jax

from grpo_jax import PACKAGE
from grpo_jax.algorithms import is_corrected
from grpo_jax.errors import BadInput
from grpo_jax.hosts import json_file
from grpo_jax.models import lora
from grpo_jax.run import console
from grpo_jax.sharding import specs
from grpo_jax.sharding.mesh import AXES
from grpo_jax.tools.preflight import advice, compiler, formulas
from grpo_jax.tools.preflight import plan as plans
from grpo_jax.tools.preflight import verdict as verdicts
from grpo_jax.tools.preflight.report import GIB, WIDTH

MARGIN = 0.05  # share of a chip's memory that a found setting leaves free
CHUNKS = 0, 512, 2048  # values of learner.chunk to try
PHASES = 'rollout', 'logprobs', 'update'


class Tried(NamedTuple):
    """A setting that was compiled, with its estimate and its verdict."""

    setting: formulas.Setting
    guess: formulas.Guess
    verdict: verdicts.Verdict

    @property
    def fits(self) -> bool:
        """Whether the setting fits and leaves MARGIN free."""
        return self.verdict.fits and self.verdict.free_share >= MARGIN


def search(plan: plans.PlannedRun, compiling: compiler.Compiling, most: int, tell: Callable[[str], Any]) -> list[Tried]:
    """Compiles the plan's own setting and then at most `most` others, and returns them in this order.

    Each time, the setting with the least estimated time is compiled next. The search ends early when no estimate is
    below the best compiled setting that fits. tell(text) is called before another setting is compiled.
    """
    guesses = {setting: formulas.guess(plan, setting) for setting in list_settings(plan)}
    own = formulas.setting_of(plan.config)
    tried = [_compile_setting(plan, own, compiling)]
    for twin in (own, own._replace(pack_columns=formulas.packed_columns(plan))):
        guesses.pop(twin, None)
    while guesses and len(tried) <= most:
        corrected = {setting: _correct_guess(setting, guess, tried) for setting, guess in guesses.items()}
        fitting = {setting: seconds for setting, (seconds, memory) in corrected.items() if memory <= plan.chip.memory}
        if any(not setting.offload for setting in fitting):  # the transfers of offload are not in the estimate
            fitting = {setting: seconds for setting, seconds in fitting.items() if not setting.offload}
        best = min((one.verdict.largest_bound for one in tried if one.fits), default=float('inf'))
        setting = min(fitting, key=lambda setting: fitting[setting], default=None)
        if setting is None or fitting[setting] >= best:
            break
        tell(f'trying {setting_flags(plan, setting)}')
        try:
            tried.append(_compile_setting(plan, setting, compiling))
        except BadInput as error:  # sizes that do not divide
            tell(str(error))
        del guesses[setting]
    return tried


def list_settings(plan: plans.PlannedRun) -> Iterator[formulas.Setting]:
    """Yields all settings of the search: each mesh of list_meshes with all values of the other fields."""
    config, shapes = plan.config, plan.shapes
    rows = shapes.prompts * shapes.group_size // config.learner.minibatches
    kept = [(), ('optimizer',)] + [('optimizer', 'reference')] * (plan.learner.abstract_state.ref_params is not None)
    for data, fsdp, tensor in list_meshes(plan):
        shards = data * fsdp
        powers = [2**k for k in range((rows // shards).bit_length())]
        batches = [(n, 0) for n in powers if rows % (n * shards) == 0]
        batches += [(config.learner.microbatches, columns) for columns in row_lengths(shapes)]
        for (microbatches, columns), chunk, remat, offload in itertools.product(batches, CHUNKS, advice.SAVED, kept):
            yield formulas.Setting(data, fsdp, tensor, microbatches, columns, chunk, remat, offload)


def list_meshes(plan: plans.PlannedRun) -> Iterator[tuple[int, int, int]]:
    """Yields (data, fsdp, tensor) of each mesh that divides slices, weights and prompts; the axis context stays."""
    run, slices, context = plan.run, plan.slices, plan.mesh.shape['context']
    count = plan.mesh.size // context
    for tensor in _divisors(count // slices):
        for fsdp in _divisors(count // slices // tensor):
            sizes = {'data': count // tensor // fsdp, 'fsdp': fsdp, 'context': context, 'tensor': tensor}
            shape = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes))
            with contextlib.suppress(BadInput):  # an axis does not divide a matrix
                specs.params(lora.policy_table(run.model.config, run.settings.model.lora), shape)
                if run.model.config.kv_heads % tensor == 0 and plan.shapes.prompts % (count // tensor * context) == 0:
                    yield sizes['data'], fsdp, tensor


def describe_split(plan: plans.PlannedRun) -> str:
    """Returns a sentence on the best split of the chips between learner and sampler, and whether it pays.

    Times are by the formulas, for numbers of sampler chips that are powers of two. With collection.staleness both sides
    work at once, and a step takes as long as the slower side. A split pays if this is less than the time of one mesh,
    on which the two take turns. plan: without mesh.sampler.
    """
    changes = {'collection.staleness': max(plan.config.collection.staleness, 1)}
    if not is_corrected(plan.config.algorithm):
        changes['algorithm.correction'] = 'truncated'
    splits = []
    for count in (2**k for k in range((plan.mesh.size - 1).bit_length())):
        free = {'mesh.data': 0, 'mesh.fsdp': 1, 'mesh.tensor': 1, 'mesh.sampler': count}
        # sizes that do not divide, settings that exclude each other, and (from jax) chips that form no rectangle
        with contextlib.suppress(BadInput, AssertionError), advice.suppress_warnings():
            made = advice.plan_changes(plan, advice.Candidate(0.0, plan.topology, free | changes, smaller_cache=False))
            made.engine.schedule.fresh_batch()  # raises where not even one group fits
            axes = {f'mesh.{axis}': made.mesh.shape[axis] for axis in AXES}
            splits.append((guess_sides(made), free | axes | changes))
    if not splits:
        return 'no split of the chips between learner and sampler divides model and batch, and fits'
    (sampling, learning), changes = min(splits, key=lambda split: max(split[0]))
    count, step, turns = changes['mesh.sampler'], max(sampling, learning), sum(guess_sides(plan))
    text = f'{plan.mesh.size - count} chips of the learner and {count} of the sampler take {step:.3g} s a step'
    if step >= turns:
        return f'no split of the chips pays: by the formulas {text}, and all in turns {turns:.3g} s'
    idle, side = 1 - min(sampling, learning) / step, 'sampler' if sampling < learning else 'learner'
    flags = advice.candidate_flags(plan, advice.Candidate(0.0, plan.topology, changes, smaller_cache=False))
    return f"by the formulas {text}, and all in turns {turns:.3g} s, with the {side}'s idle for {idle:.0%}: {flags}"


def guess_sides(plan: plans.PlannedRun) -> tuple[float, float]:
    """Returns a step's estimated seconds (sampler, learner); raises BadInput where a side has too little memory."""
    setting, sides = formulas.setting_of(plan.config), plan.run.sides
    guess = sampler = formulas.guess(plan, setting)
    if sides:
        sampler = formulas.guess(plan, setting._replace(data=sides.sampler.size // setting.tensor, fsdp=1))
        state = plan.state_bytes()[0] * plan.mesh.shape['fsdp']  # which the sampler's chips do not hold
        if max(guess.memory['update'], sampler.memory['rollout'] - state) > (1 - MARGIN) * plan.chip.memory:
            raise BadInput('mesh.sampler', sides.sampler.size, 'leaves a side too little memory; choose another number')
    learning = ('update', 'logprobs') if plan.learner.scorer_fields else ('update',)
    return max(sampler.seconds['rollout'].values()), sum(max(guess.seconds[phase].values()) for phase in learning)


def row_lengths(shapes: Any) -> list[int]:
    """Returns lengths of packed rows to try, multiples of 256: a prompt and its group, half its group, or two rows."""
    members = {shapes.group_size, max(shapes.group_size // 2, 1), min(shapes.group_size, 2)}
    return sorted({-(-(shapes.queries + n * shapes.tokens) // 256) * 256 for n in members})


def _divisors(n):
    """The divisors of n, rising."""
    return [k for k in range(1, n + 1) if n % k == 0]


def setting_flags(plan: plans.PlannedRun, setting: formulas.Setting) -> str:
    """Returns the flags, as text, that turn the plan into a setting; 'as it is' without any."""
    return advice.candidate_flags(plan, _as_candidate(plan, setting)) or 'as it is'


def _as_candidate(plan, setting):
    """The advice.Candidate that turns the plan into a setting, with cost 0."""
    return advice.Candidate(0.0, plan.topology, setting.overrides(plan.config), smaller_cache=False)


def _compile_setting(plan, setting, compiling):
    """Compiles the plan with a setting, and returns the Tried; raises BadInput for sizes that do not divide."""
    with advice.suppress_warnings():
        made = advice.plan_changes(plan, _as_candidate(plan, setting))
    return Tried(setting, formulas.guess(plan, setting), verdicts.compile_and_check(made, compiling))


def _correct_guess(setting, guess, tried):
    """(seconds of a step, most bytes in use) by a setting's guess, corrected; MARGIN is added to the bytes.

    Each figure is multiplied by compiled / guessed of the setting in `tried` that shares most fields.
    """
    nearest = max(reversed(tried), key=lambda one: sum(a == b for a, b in zip(one.setting, setting, strict=True)))
    seconds = memory = 0.0
    measured = phase_bounds(nearest.verdict)
    for phase in [phase for phase in PHASES if phase in measured]:
        bounds = []
        for name, amount in guess.seconds[phase].items():
            actual, guessed = measured[phase][name], nearest.guess.seconds[phase][name]
            bounds.append(amount * actual / guessed if actual and guessed else amount)
        seconds += max(bounds)
        used, _ = nearest.verdict.phases[phase]
        memory = max(memory, guess.memory[phase] * used / nearest.guess.memory[phase])
    return seconds, memory / (1 - MARGIN)


def phase_bounds(verdict: verdicts.Verdict) -> dict[str, dict[str, float]]:
    """Returns {phase: {bound: seconds in a step}} of a verdict, summed over programs, for PHASES."""
    sums: dict[str, dict[str, float]] = {}
    for job, measured in verdict.runs:
        if job.phase in PHASES:
            phase = sums.setdefault(job.phase, dict.fromkeys(verdicts.BOUNDS, 0.0))
            for name, seconds in verdicts.bounds(measured, verdict.plan).items():
                phase[name] += job.runs * seconds
    return sums


def make_rows(plan: plans.PlannedRun, tried: list[Tried]) -> list[dict[str, Any]]:
    """Returns a dict of figures for each compiled setting: settings that fit before others, and faster ones first."""
    rows = [
        {
            'flags': setting_flags(plan, one.setting),
            'fits': one.fits,
            'in_use': one.verdict.peak,
            'guess': sum(max(one.guess.seconds[phase].values()) for phase in phase_bounds(one.verdict)),
            'phases': {phase: verdicts.find_largest(bounds) for phase, bounds in phase_bounds(one.verdict).items()},
            'step': one.verdict.largest_bound,
        }
        for one in tried
    ]
    return sorted(rows, key=lambda row: (not row['fits'], row['step']))


def read_or_search(
    plan: plans.PlannedRun, compiling: compiler.Compiling, most: int, tell: Callable[[str], Any]
) -> list[dict[str, Any]]:
    """Returns make_rows of a search: from the cache if the same search ran with the same sources and versions."""
    sources = hashlib.sha256()
    for folder, _, files in sorted(os.walk(PACKAGE)):
        for name in sorted(name for name in files if name.endswith(('.py', '.json'))):
            with open(os.path.join(folder, name), 'rb') as file:
                sources.update(file.read())
    shape = repr(plan.run.model.config)
    inputs = [plan.config.to_json(), shape, sources.hexdigest(), plan.mean_tokens, most]
    key = compiler.cache_key(json.dumps(inputs), plan.topology, plan.slices)
    path = os.path.join(compiling.cache, f'search-{key}.json')
    if os.path.exists(path):
        with open(path, encoding='utf8') as file:
            return json.load(file)
    rows = make_rows(plan, search(plan, compiling, most, tell))
    json_file.write(path, rows)
    return rows


def print_rows(plan: plans.PlannedRun, rows: list[dict[str, Any]], host_seconds: float) -> None:
    """Prints the table of make_rows and the flags of the best setting. host_seconds: added to each step."""
    headings = [
        'step at\nleast, s',
        *(f'{phase}, s' for phase in PHASES),
        'formulas\nsaid, s',
        'in use\nGiB',
        'fits',
        'flags',
    ]
    lines = []
    for row in rows:
        bounds = [row['phases'].get(phase) for phase in PHASES]
        lines.append(
            [
                f'{row["step"] + host_seconds:.2f}',
                *(f'{bound[1]:.2f} {bound[0]}' if bound else '' for bound in bounds),
                f'{row["guess"]:.2f}',
                f'{row["in_use"] / GIB:.2f}',
                'yes' if row['fits'] else 'no',
                row['flags'],
            ]
        )
    title = f"Settings that were compiled for {plan.topology}; bounds from the makers' figures, not measurements"
    best = rows[0]
    outcome = (
        f'the least of these that fit with {MARGIN:.0%} free: {best["flags"]}' if best['fits'] else 'none of these fits'
    )
    console.show_tables(
        console.make_table(headings, lines, title=title, dense=True, wrapped=('flags',)), outcome, width=WIDTH
    )
