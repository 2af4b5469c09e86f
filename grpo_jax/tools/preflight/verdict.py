"""Whether a plan fits its chips, and the least time that its programs can take there."""

from typing import NamedTuple

from grpo_jax.tools.preflight import compiler
from grpo_jax.tools.preflight import plan as plans

PHASES = ('start', 'cold start', 'rollout', 'logprobs', 'update', 'evaluation')
BOUNDS = 'products', 'HBM', 'sent', 'sent_slowly', 'network'


class Verdict(NamedTuple):
    """A plan and what its compiled programs need."""

    plan: plans.PlannedRun
    jobs: list[plans.Job]
    measured: list[compiler.Measured]
    sampler_bytes: dict[str, int]  # of the sampler's weights, rollout and cache on a device

    @property
    def totals(self) -> list[int | float]:
        """Bytes of a device in use while each program runs."""
        return [total(job, measured) for job, measured in self.runs]

    @property
    def phases(self) -> dict[str, tuple[int | float, str]]:
        """{phase: (bytes in use at most, name of the program that runs then)}."""
        runs = list(zip(self.jobs, self.totals, strict=True))
        return {
            phase: max((size, job.name) for job, size in runs if job.phase == phase)
            for phase in PHASES
            if any(job.phase == phase for job, _ in runs)
        }

    @property
    def peak(self) -> int | float:
        """The most bytes of a device in use."""
        return max(self.totals)

    @property
    def fits(self) -> bool:
        """Whether a chip has that many, and the compiler refused nothing."""
        return self.peak <= self.plan.chip.memory and not any(measured.refused for measured in self.measured)

    @property
    def free(self) -> int | float:
        """The share of a chip's memory that is never in use."""
        return 1 - self.peak / self.plan.chip.memory

    @property
    def bounds(self) -> dict[str, int | float]:
        """`bounds` of a step's programs, summed by name."""
        programs = [(job.runs, bounds(measured, self.plan)) for job, measured in self.runs]
        return {name: sum(runs * seconds[name] for runs, seconds in programs) for name in BOUNDS}

    @property
    def largest_bound(self) -> int | float:
        """The sum over a step's programs of the largest bound of each: none of them takes less."""
        return sum(job.runs * largest(bounds(measured, self.plan))[1] for job, measured in self.runs)

    @property
    def runs(self) -> list[tuple[plans.Job, compiler.Measured]]:
        """Its programs, and what is known of each."""
        return list(zip(self.jobs, self.measured, strict=True))


def compile_and_check(plan: plans.PlannedRun, compiling: compiler.Compiling) -> Verdict:
    """Verdict of a plan, after its programs have been compiled."""
    jobs, sampler_bytes = plans.jobs_of(plan)
    return Verdict(plan, jobs, compiler.measure(jobs, plan, compiling), sampler_bytes)


def total(job: plans.Job, measured: compiler.Measured) -> int | float:
    """Bytes of a device in use while a program runs: what waits, its arguments, results and temporaries."""
    if measured.refused:
        return job.alive + measured.refused
    return job.alive + measured.in_use - (not job.arguments) * measured.arguments


def bounds(measured: compiler.Measured, plan: plans.PlannedRun) -> dict[str, int | float]:
    """Least seconds of a run, each as if nothing else took any: of BOUNDS.

    products by what is multiplied in the compiled text; HBM; sent over links, all of which work, at the higher figure
    that is published, and sent_slowly from a corner of the slice at the lower one; network, between slices.
    """
    chip, (within, across) = plan.chip, measured.collective_bytes
    slowly, fast = plan.links
    return {
        'products': (measured.multiplied or measured.flops) / chip.flops,
        'HBM': measured.traffic / chip.bandwidth,
        'sent': within / fast if within else 0.0,
        'sent_slowly': within / slowly if within else 0.0,
        'network': across / chip.network,
    }


def largest(seconds: dict[str, int | float]) -> tuple[str, int | float]:
    """(name, seconds) of the largest of `bounds`; sent_slowly is none that a chip could not beat."""
    name = max((name for name in BOUNDS if name != 'sent_slowly'), key=lambda name: seconds[name])
    return name, seconds[name]


def largest_batch(verdict: Verdict) -> tuple[int, int]:
    """(prompts a step, rows of a microbatch on a device) that would fit, by arithmetic; rows are 0 when none would.

    The cache and the rollout grow with the prompts. The batch's other arrays are small beside them, and a microbatch
    has as many rows as now. The update's temporaries are taken as proportional to the rows of a microbatch, which
    overestimates them.
    """
    plan, chip = verdict.plan, verdict.plan.chip
    shards, engine = plan.row_shards(), plan.engine.schedule
    sampling = max(
        (
            size
            for job, size in zip(verdict.jobs, verdict.totals, strict=True)
            if job.phase in ('rollout', 'evaluation')
        ),
        default=0,
    )
    more = int((chip.memory - sampling) // (bytes_of_prompts(verdict) / engine.prompts))
    prompts = max(engine.prompts + more, 0) * shards
    by_name = {job.name: (job, measured) for job, measured in verdict.runs}
    update, measured = by_name['learner.update']
    temporaries = measured.temporaries or measured.refused - plan.state_bytes()[0]
    free = chip.memory - total(update, measured)
    rows = int(plan.microbatch()[0] * (1 + free / temporaries)) if 0 < temporaries < float('inf') else 0
    return prompts, max(rows, 0)


def bytes_of_prompts(verdict: Verdict) -> int:
    """Bytes on a device of the arrays that grow with the prompts: rollout and, without a budget, cache."""
    limited = verdict.plan.engine.schedule.budget
    return verdict.sampler_bytes['rollout'] + (0 if limited else verdict.sampler_bytes['cache'])
