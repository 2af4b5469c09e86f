"""Shows a Verdict as tables for people, and as JSON for programs."""

from typing import Any

import rich.table

from grpo_jax.run import console
from grpo_jax.sharding import compiled
from grpo_jax.sharding.mesh import AXES
from grpo_jax.tools.preflight import formulas, topology
from grpo_jax.tools.preflight import verdict as verdicts
from grpo_jax.tools.preflight.plan import PlannedRun
from grpo_jax.tools.preflight.verdict import Verdict

WIDTH = 150
GIB = 2**30


def as_json(verdict: Verdict) -> dict[str, Any]:
    """Returns all figures of a Verdict as a dict for JSON; bytes, seconds and operations are of one chip."""
    plan = verdict.plan
    prompts, rows = verdicts.largest_batch(verdict)
    return {
        'topology': plan.topology,
        'slices': plan.slices,
        'chips': plan.mesh.size,
        'mesh': mesh_sizes(plan),
        'sampler_devices': plan.run.sides.sampler.size if plan.run.sides else 0,
        'crossing_bytes': plan.crossing_bytes(),
        'memory': plan.chip.memory,
        'fits': verdict.fits,
        'peak': verdict.peak,
        'free': verdict.free_share,
        'state': plan.state_bytes()[0],
        'waiting': compiled.host_bytes(plan.learner.abstract_state),
        **verdict.sampler_bytes,
        'step_bounds': verdict.bounds,
        'step_largest_bound': verdict.largest_bound,
        'largest_prompts_per_step': prompts,
        'largest_microbatch_rows_of_a_chip': rows,
        'phases': {phase: {'bytes': size, 'program': name} for phase, (size, name) in verdict.phases.items()},
        'programs': [
            {
                'name': job.name,
                'phase': job.phase,
                'runs': job.runs,
                'in_use': size,
                **measured._asdict(),
                'fragmentation': measured.fragmentation,
                'bounds': verdicts.bounds(measured, plan),
            }
            for job, measured, size in zip(verdict.jobs, verdict.measured, verdict.totals, strict=True)
        ],
    }


def mesh_sizes(plan: PlannedRun) -> dict[str, int]:
    """Returns {axis: size} of the plan's mesh."""
    return {axis: plan.mesh.shape[axis] for axis in AXES}


def print_guess(plan: PlannedRun) -> None:
    """Prints estimates by formula, before anything is compiled: a plan's memory in use, and a step's least time."""
    guess = formulas.guess(plan, formulas.setting_of(plan.config))
    most, memory = max(guess.memory.values()), plan.chip.memory
    phases = ', '.join(f'{phase} {size / GIB:.1f}' for phase, size in guess.memory.items())
    seconds = sum(max(bounds.values()) for bounds in guess.seconds.values())
    # the compiler has counted a quarter more than the formula
    fits = 'likely to fit' if most < 0.75 * memory else 'may fit or not' if most < memory else 'unlikely to fit'
    least = f'; a step takes {seconds:.2g} s or more' * (seconds > 0)
    used = f'{most / GIB:.1f} of {memory / GIB:.1f} GiB in use at most ({phases})'
    print(f'Estimate by formula: {fits}, {used}{least}. Compiling now, to know.', flush=True)


def print_verdict(verdict: Verdict, *, legend: bool = True) -> None:
    """Prints the tables of a verdict; legend: whether to explain each column too."""
    plan = verdict.plan
    rows, columns = plan.microbatch()
    packed = 'padded' if plan.learner.sizes is None else 'packed'
    mesh = ' x '.join(f'{axis} {size}' for axis, size in mesh_sizes(plan).items())
    slices = f'{plan.slices} slices of ' if plan.slices > 1 else ''
    lines = [
        f'{slices}{plan.topology}: {plan.mesh.size} {"GPUs" if plan.on_gpus else "chips"} of '
        f'{plan.chip.memory / GIB:.2f} GiB; mesh {mesh}; '
        f'{rows} {packed} rows of {columns} tokens a microbatch and chip',
        programs_table(verdict),
        *(f'  {name}: {text}'.replace('\n', ' ') for name, text in columns_of(plan).items() if text and legend),
    ]
    apart = [
        (job.name, measured.repeated_share) for job, measured in verdict.runs if abs(measured.repeated_share) > 0.01
    ]
    lines += [
        f'{name}: the compiled text has {share:+.0%} of the products of the program before it was compiled'
        for name, share in apart
    ]
    unknown = [job.name for job, measured in verdict.runs if measured.unknown]
    if unknown:
        lines.append(f'with loops of unknown length, counted once: {", ".join(unknown)}')
    console.show_tables(*lines, phases_table(verdict), *summary(verdict), width=WIDTH)


# heading -> explanation of the column
PROGRAM_COLUMNS = {
    'program': '',
    'compile\ns': 'how long the compiler took, while it compiled other programs too',
    'arg\nGiB': "the program's arguments, on one chip",
    'out\nGiB': 'its results, except results that are written over an argument',
    'temp\nGiB': 'memory that it needs only while it runs',
    'peak\nGiB': 'the most of arg, out and temp at one time, as the compiler counts; 0.00: not counted',
    'gaps\nGiB': 'arg + out + temp - peak: memory that lies idle between them',
    'in use\nGiB': 'arg + out + temp, and all else that lies on the chip meanwhile; the largest must fit',
    'TFLOP': 'operations of its matrix products, in 10^12, with those that are computed twice',
    'HBM\nGB': "what it reads from and writes to the chip's memory",
    'collectives\nGB sent': 'what it sends to other chips, by kind',
    'products\nms': 'the least time of the matrix products alone',
    'HBM\nms': 'the least time of the reads and writes alone',
    'sent\nms': 'the least time of the sends alone: on a chip with all its links, and on one in a corner of the slice',
    'runs\na step': 'how often it runs in a step whose longest completion has the full length',
}
OF_TPUS = ('HBM\nGB', 'collectives\nGB sent', 'HBM\nms', 'sent\nms')  # columns that are not known of GPUs


def columns_of(plan: PlannedRun) -> dict[str, str]:
    """Returns {heading: explanation} of the columns in the table of programs; fewer for GPUs."""
    return {name: text for name, text in PROGRAM_COLUMNS.items() if not plan.on_gpus or name not in OF_TPUS}


def programs_table(verdict: Verdict) -> rich.table.Table:
    """Returns the table of programs: compile time, memory, work, and bounds of their time."""
    rows = []
    for job, measured, size in zip(verdict.jobs, verdict.measured, verdict.totals, strict=True):
        head = [job.name, 'cached' if measured.cached and not measured.refused else f'{measured.seconds:.0f}']
        in_use, operations = f'{size / GIB:.2f}', f'{(measured.multiplied or measured.flops) / 1e12:.2f}'
        if measured.refused:
            rows.append([*head, *'-----', in_use, operations, '', 'too large for the compiler', '', '', '', ''])
            continue
        bounds = verdicts.bounds(measured, verdict.plan)
        sizes = [measured.arguments, measured.outputs, measured.temporaries, measured.peak, measured.fragmentation]
        # collectives that send at least 5 MB
        sent = [f'{op} {size / 1e9:.2f}' for op, size in sorted(measured.within.items()) if size >= 5e6]
        sent += [f'{op} between slices {size / 1e9:.2f}' for op, size in sorted(measured.across.items()) if size >= 5e6]
        rows.append(
            [
                *head,
                *(f'{n / GIB:.2f}' for n in sizes),
                in_use,
                operations,
                f'{measured.traffic / 1e9:.1f}',
                ', '.join(sent),
                f'{bounds["products"] * 1e3:.1f}',
                f'{bounds["HBM"] * 1e3:.1f}',
                _sent_text(bounds, 1e3, 1),
                f'{job.runs:g}' if job.runs else '',
            ]
        )
    columns = columns_of(verdict.plan)
    rows = [[cell for name, cell in zip(PROGRAM_COLUMNS, row, strict=True) if name in columns] for row in rows]
    wrapped = [name for name in ('program', 'collectives\nGB sent') if name in columns]
    return console.make_table(list(columns), rows, title='Programs, figures of one chip', dense=True, wrapped=wrapped)


def _sent_text(bounds, unit, digits):
    """The bounds of sends as text: a range within a slice, then + the bound between slices. unit: 1 (s) or 1e3 (ms)."""
    ends = [f'{bounds[name] * unit:.{digits}f}' for name in ('sent', 'sent_slowly')]
    between = f' + {bounds["network"] * unit:.{digits}f}' if bounds['network'] else ''
    return (ends[0] if ends[0] == ends[1] else ' to '.join(ends)) + between


def phases_table(verdict: Verdict) -> rich.table.Table:
    """Returns the table of memory in use: for each phase the parts, the sum and the program with the most."""
    headings = ['phase', 'state', "sampler's weights", 'rollout', 'cache', 'the rest', 'sum', 'free', 'most during']
    sizes, rows = {'state': verdict.plan.state_bytes()[0]} | verdict.sampler_bytes, []
    for phase, (size, name) in verdict.phases.items():
        job = next(job for job in verdict.jobs if job.name == name)
        parts = [sizes[part] * (part in job.holds) for part in sizes]
        gib = [f'{n / GIB:.2f}' for n in (*parts, size - sum(parts), size)]
        rows.append([phase, *gib, f'{1 - size / verdict.plan.chip.memory:.0%}', name])
    return console.make_table(headings, rows, title='In use at the same time, GiB of one chip', dense=True)


def summary(verdict: Verdict) -> list[str]:
    """Returns lines of text: whether the plan fits, the largest batch, host memory, and the least time of a step."""
    prompts, rows = verdicts.largest_batch(verdict)
    memory, plan = verdict.plan.chip.memory / GIB, verdict.plan
    if verdict.fits:
        first = f'FITS: {verdict.peak / GIB:.2f} of {memory:.2f} GiB in use at most, {verdict.free_share:.0%} free'
    else:
        first = f'DOES NOT FIT: {verdict.peak / GIB:.2f} GiB needed, {memory:.2f} available'
    lines = [first]
    if verdict.fits:
        lines.append(
            f'room, estimated and not compiled: data.prompts_per_step={prompts} with microbatches as large as now, '
            f'or {rows} rows of a microbatch on a chip (now {plan.microbatch()[0]})'
        )
    if plan.on_gpus:
        lines.append(
            f'compiled for a {plan.mesh.devices.flat[0].platform}, with {topology.margin():.0%} more temporaries than '
            f'its compiler counts; jax takes {topology.taken():.0%} of a GPU, which {topology.FRACTION} changes'
        )
    if plan.run.sides:
        lines.append(
            f'the sampler has {plan.run.sides.sampler.size} more chips, and each of them is sent '
            f'{plan.crossing_bytes() / GIB:.2f} GiB of weights in a step; what it keeps and runs is among the programs'
        )
    waiting = compiled.host_bytes(plan.learner.abstract_state)
    if waiting:
        lines.append(
            f"{waiting / GIB:.2f} GiB of a chip's state wait in the hosts' memory; the time to move them is not counted"
        )
    if plan.teacher_bytes:
        waits = plan.run.settings.teacher.park
        where = "wait in the hosts' memory except while the teacher scores" if waits else 'stay there all the time'
        lines.append(f"{plan.teacher_bytes / GIB:.2f} GiB of a chip are the teacher's weights, which {where}")
    if verdict.fits and plan.on_gpus:
        if plan.chip.flops:
            lines.append(
                f'least time of the matrix products of a step: {verdict.bounds["products"]:.2f} s; the time of reads, '
                'writes and sends is not known of GPUs'
            )
    elif verdict.fits:
        shapes = plan.shapes
        tokens = shapes.prompts * shapes.group_size * shapes.tokens
        bounds, largest = verdict.bounds, verdict.largest_bound
        mean = f'. Packed rows: completions of {plan.mean_tokens} tokens on average' if plan.mean_tokens else ''
        lines.append(
            f'least time of a step on the devices when every completion has {shapes.tokens} tokens: products '
            f'{bounds["products"]:.2f} s, HBM {bounds["HBM"]:.2f} s, sent {_sent_text(bounds, 1, 2)} s; the largest '
            f'bound of each program, summed: {largest:.2f} s, at most {tokens / largest / plan.mesh.size:.0f} tokens a '
            f"second and chip. Bounds from the makers' figures, not measurements{mean}"
        )
    return lines
