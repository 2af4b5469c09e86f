"""Whether a plan fits its chips, and the least time that its programs can take there."""

from typing import NamedTuple

from grpo_jax.preflight import compiler
from grpo_jax.preflight import plan as plans

PHASES = ('start', 'cold start', 'rollout', 'score', 'update', 'evaluation')


class Verdict(NamedTuple):
    """A plan and what its compiled programs need."""

    plan: plans.Plan
    jobs: list[plans.Job]
    measured: list[compiler.Measured]
    held: dict[str, int]  # bytes of the sampler's weights, book and cache on a device

    @property
    def totals(self):
        """Bytes of a device in use while each program runs."""
        return [total(job, found) for job, found in zip(self.jobs, self.measured, strict=True)]

    @property
    def phases(self):
        """{phase: (bytes in use at most, name of the program that runs then)}."""
        runs = list(zip(self.jobs, self.totals, strict=True))
        return {
            phase: max((size, job.name) for job, size in runs if job.phase == phase)
            for phase in PHASES
            if any(job.phase == phase for job, _ in runs)
        }

    @property
    def peak(self):
        """The most bytes of a device in use."""
        return max(self.totals)

    @property
    def fits(self):
        """Whether that is there, and the compiler refused nothing."""
        return self.peak <= self.plan.chip.memory and not any(found.refused for found in self.measured)

    @property
    def free(self):
        """The share of a chip's memory that is never in use."""
        return 1 - self.peak / self.plan.chip.memory

    @property
    def seconds(self):
        """The least seconds of a step on the devices, all completions at full length."""
        return sum(
            job.runs * max(bounds(found, self.plan.chip).values())
            for job, found in zip(self.jobs, self.measured, strict=True)
        )


def of(plan, **compiling):
    """Verdict of a plan, whose programs it compiles; compiling is for compiler.measure."""
    jobs, held = plans.jobs_of(plan)
    measured = compiler.measure(jobs, plan.mesh, topology=plan.topology, slices=plan.slices, **compiling)
    return Verdict(plan, jobs, measured, held)


def total(job, found):
    """Bytes of a device in use while a program runs: what waits, its arguments, results and temporaries."""
    if found.refused:
        return job.alive + found.refused
    return job.alive + job.arguments * found.arguments + found.outputs + found.temporaries


def bounds(found, chip):
    """Least seconds of a run by what bounds it: products, memory, links between chips, network between slices."""
    within, across = found.collective_bytes
    return {
        'products': found.flops / chip.flops,
        'memory': found.traffic / chip.bandwidth,
        'links': within / chip.links,
        'network': across / chip.network,
    }


def largest_batch(verdict):
    """(prompts a step, rows of a microbatch on a device) that would fit, by arithmetic; rows are 0 when none would.

    The cache and the book grow with the prompts, the batch's other arrays are small beside them, and there are as many
    rows in a microbatch as now. The update's temporaries are taken as proportional to those rows, which is more than
    they are.
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
    a_prompt = programs_bytes(verdict) / engine.prompts
    more = int((chip.memory - sampling) // a_prompt)
    prompts = max(engine.prompts + more, 0) * shards
    update, found = next(
        (job, found) for job, found in zip(verdict.jobs, verdict.measured, strict=True) if job.name == 'learner.update'
    )
    temporaries = found.temporaries or found.refused - plan.state_bytes()[0]
    free = chip.memory - total(update, found)
    rows = int(plan.microbatch_rows() * (1 + free / temporaries)) if 0 < temporaries < float('inf') else 0
    return prompts, max(rows, 0)


def programs_bytes(verdict):
    """Bytes on a device of what grows with the prompts: book and, without a budget, cache."""
    limited = verdict.plan.engine.schedule.budget
    return verdict.held['book'] + (0 if limited else verdict.held['cache'])
