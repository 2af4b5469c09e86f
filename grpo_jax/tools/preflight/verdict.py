"""Tells whether a plan fits its chips, and the least time of its programs."""

from typing import NamedTuple

from grpo_jax.sharding import batches
from grpo_jax.sharding.mesh import ROW_AXES
from grpo_jax.tools.preflight import compiler
from grpo_jax.tools.preflight import plan as plans

PHASES = ('start', 'cold start', 'rollout', 'logprobs', 'update', 'evaluation')
BOUNDS = 'products', 'HBM', 'sent', 'sent_slowly', 'network'


class Verdict(NamedTuple):
    """A plan with its compiled programs: whether it fits, and its least time. `measured` is in the order of `jobs`."""

    plan: plans.PlannedRun
    jobs: list[plans.Job]
    measured: list[compiler.Measured]
    sampler_bytes: dict[str, int]  # {'weights', 'rollout', 'cache'} of the sampler on a device

    @property
    def totals(self) -> list[int | float]:
        """Bytes in use on a device while each program runs, in the order of `jobs`."""
        return [bytes_in_use(job, measured) for job, measured in self.runs]

    @property
    def phases(self) -> dict[str, tuple[int | float, str]]:
        """{phase: (most bytes in use on a device, name of the program that runs then)}."""
        runs = list(zip(self.jobs, self.totals, strict=True))
        return {
            phase: max((size, job.name) for job, size in runs if job.phase == phase)
            for phase in PHASES
            if any(job.phase == phase for job, _ in runs)
        }

    @property
    def peak(self) -> int | float:
        """The most bytes in use on a device."""
        return max(self.totals)

    @property
    def fits(self) -> bool:
        """Whether the peak fits a chip's memory, and the compiler refused no program."""
        return self.peak <= self.plan.chip.memory and not any(measured.refused for measured in self.measured)

    @property
    def free_share(self) -> int | float:
        """The share of a chip's memory that is never in use; negative when the peak is above the memory."""
        return 1 - self.peak / self.plan.chip.memory

    @property
    def bounds(self) -> dict[str, int | float]:
        """{name: seconds} for BOUNDS, each summed over all runs of programs in a step."""
        programs = [(job.runs, bounds(measured, self.plan)) for job, measured in self.runs]
        return {name: sum(runs * seconds[name] for runs, seconds in programs) for name in BOUNDS}

    @property
    def largest_bound(self) -> int | float:
        """Least seconds of a step: the largest bound of each run of a program, summed."""
        return sum(job.runs * find_largest(bounds(measured, self.plan))[1] for job, measured in self.runs)

    @property
    def runs(self) -> list[tuple[plans.Job, compiler.Measured]]:
        """(job, its measurements) of each program."""
        return list(zip(self.jobs, self.measured, strict=True))


def compile_and_check(plan: plans.PlannedRun, compiling: compiler.Compiling) -> Verdict:
    """Compiles a plan's programs, or reads them from the cache, and returns the Verdict."""
    jobs, sampler_bytes = plans.list_jobs(plan)
    return Verdict(plan, jobs, compiler.measure(jobs, plan, compiling), sampler_bytes)


def bytes_in_use(job: plans.Job, measured: compiler.Measured) -> int | float:
    """Returns the bytes in use on a device while a program runs: its own, and all other live buffers."""
    if measured.refused:
        return job.alive + measured.refused
    return job.alive + measured.in_use - (not job.arguments) * measured.arguments


def bounds(measured: compiler.Measured, plan: plans.PlannedRun) -> dict[str, int | float]:
    """Returns {name: least seconds} of one run of a program, for BOUNDS; each bound ignores the others.

    products: of the compiled text; HBM: traffic; sent: over all links of a chip at the higher published speed;
    sent_slowly: over the links of a chip in a corner of the slice at the lower one; network: between slices. A bound is
    0 where the chip's speed is not known.
    """
    chip, (within, across) = plan.chip, measured.collective_bytes
    slowly, fast = plan.links
    return {
        'products': _divide(measured.multiplied or measured.flops, chip.flops),
        'HBM': _divide(measured.traffic, chip.bandwidth),
        'sent': _divide(within, fast),
        'sent_slowly': _divide(within, slowly),
        'network': _divide(across, chip.network),
    }


def _divide(amount, speed):
    """Seconds that an amount takes at a speed; 0 for an unknown speed."""
    return amount / speed if speed else 0.0


def find_largest(seconds: dict[str, int | float]) -> tuple[str, int | float]:
    """Returns (name, seconds) of the largest bound. sent_slowly does not count, since a chip can be faster."""
    name = max((name for name in BOUNDS if name != 'sent_slowly'), key=lambda name: seconds[name])
    return name, seconds[name]


def largest_batch(verdict: Verdict) -> tuple[int, int]:
    """Estimates the largest (prompts a step, rows of a microbatch on a device) that fit; 0 rows when none fits.

    More prompts need more cache and rollout; other arrays of the batch are small, and the microbatch keeps its rows.
    The update's temporaries are taken as proportional to the rows of a microbatch, which overestimates them.
    """
    plan, chip = verdict.plan, verdict.plan.chip
    shards, engine = batches.devices_along(plan.engine.mesh, ROW_AXES), plan.engine.schedule
    sampling = max(
        (
            size
            for job, size in zip(verdict.jobs, verdict.totals, strict=True)
            if job.phase in ('rollout', 'evaluation')
        ),
        default=0,
    )
    more = int((chip.memory - sampling) // (prompt_bytes(verdict) / engine.prompts))
    prompts = max(engine.prompts + more, 0) * shards
    by_name = {job.name: (job, measured) for job, measured in verdict.runs}
    update, measured = by_name['learner.update']
    temporaries = measured.temporaries or measured.refused - plan.state_bytes()[0]
    free = chip.memory - bytes_in_use(update, measured)
    rows = int(plan.microbatch()[0] * (1 + free / temporaries)) if 0 < temporaries < float('inf') else 0
    return prompts, max(rows, 0)


def prompt_bytes(verdict: Verdict) -> int:
    """Returns the bytes on a device that grow with the prompts: the rollout and, without a budget for it, the cache."""
    limited = verdict.plan.engine.schedule.budget
    return verdict.sampler_bytes['rollout'] + (0 if limited else verdict.sampler_bytes['cache'])
