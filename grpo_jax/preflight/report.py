"""A verdict as tables for people and as JSON for programs."""

import rich.box
import rich.console
import rich.table

from grpo_jax.preflight import verdict as verdicts
from grpo_jax.sharding import compiled
from grpo_jax.sharding.mesh import AXES

GIB = 2**30


def as_json(verdict, advice=None):
    """Dict of everything that is printed; bytes, seconds and operations of one chip."""
    plan = verdict.plan
    prompts, rows = verdicts.largest_batch(verdict)
    found = {
        'topology': plan.topology,
        'slices': plan.slices,
        'chips': plan.mesh.size,
        'mesh': mesh_of(plan),
        'memory': plan.chip.memory,
        'fits': verdict.fits,
        'peak': verdict.peak,
        'free': verdict.free,
        'state': plan.state_bytes()[0],
        'waiting': compiled.waiting_bytes(plan.learner.state),
        **verdict.held,
        'step_seconds': verdict.seconds,
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
                'bounds': verdicts.bounds(measured, plan.chip),
            }
            for job, measured, size in zip(verdict.jobs, verdict.measured, verdict.totals, strict=True)
        ],
    }
    if advice:
        found['advice'] = {'settings': advice[0], 'verdict': as_json(advice[1])}
    return found


def mesh_of(plan):
    """{axis: size}."""
    return {axis: plan.mesh.shape[axis] for axis in AXES}


def show(verdict):
    """Prints the tables of a verdict."""
    plan, console = verdict.plan, rich.console.Console(width=150, soft_wrap=False)
    mesh = ' x '.join(f'{axis} {size}' for axis, size in mesh_of(plan).items())
    of_slices = f'{plan.slices} slices of ' if plan.slices > 1 else ''
    console.print(
        f'{of_slices}{plan.topology}: {plan.mesh.size} chips of {plan.chip.memory / GIB:.2f} GiB; '
        f'mesh {mesh}; {plan.microbatch_rows()} rows of a microbatch a chip',
        highlight=False,
    )
    console.print(programs_table(verdict))
    console.print(
        "arg, out, temp: bytes of the program; peak: the compiler's own figure; in use: with what waits "
        'beside it. TFLOP: matrix products, what is recomputed twice. Loops that end with the longest '
        'completion count in full.',
        highlight=False,
    )
    unknown = [job.name for job, found in zip(verdict.jobs, verdict.measured, strict=True) if found.unknown]
    if unknown:
        console.print(f'with loops of unknown length, counted once: {", ".join(unknown)}', highlight=False)
    console.print(phases_table(verdict))
    console.print(summary(verdict), highlight=False)


def _table(title, columns):
    table = rich.table.Table(title=title, box=rich.box.SIMPLE_HEAD, title_justify='left', pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify='right' if i else 'left', no_wrap=bool(i))
    return table


def programs_table(verdict):
    """Table of programs: compile time, memory, work, and what bounds their time."""
    table = _table(
        'Programs, figures of one chip',
        [
            'program',
            'compile\ns',
            'arg\nGiB',
            'out\nGiB',
            'temp\nGiB',
            'peak\nGiB',
            'in use\nGiB',
            'TFLOP',
            'HBM\nGB',
            'collectives\nGB sent',
            'at least\nms',
            'bound by',
            'runs\na step',
        ],
    )
    for job, found, size in zip(verdict.jobs, verdict.measured, verdict.totals, strict=True):
        if found.refused:
            table.add_row(
                job.name,
                f'{found.seconds:.0f}',
                '-',
                '-',
                '-',
                '-',
                f'{size / GIB:.2f}',
                f'{found.flops / 1e12:.2f}',
                '',
                'too large for the compiler',
                '',
                '',
                '',
            )
            continue
        bounds = verdicts.bounds(found, verdict.plan.chip)
        by = max(bounds, key=bounds.get)
        sizes = [found.arguments, found.outputs, found.temporaries, found.peak, size]
        table.add_row(
            job.name,
            'cached' if found.cached else f'{found.seconds:.0f}',
            *(f'{n / GIB:.2f}' for n in sizes),
            f'{found.flops / 1e12:.2f}',
            f'{found.traffic / 1e9:.1f}',
            _collectives(found),
            f'{bounds[by] * 1e3:.1f}',
            by,
            f'{job.runs:g}' if job.runs else '',
        )
    return table


def _collectives(found):
    kinds = [f'{op} {size / 1e9:.2f}' for op, size in sorted(found.within.items()) if size >= 5e6]
    kinds += [f'{op} between slices {size / 1e9:.2f}' for op, size in sorted(found.across.items()) if size >= 5e6]
    return '\n'.join(kinds)


def phases_table(verdict):
    """Table of what lives at the same time."""
    table = _table(
        'In use at the same time, GiB of one chip',
        ['phase', 'state', "sampler's weights", 'book', 'cache', 'the rest', 'sum', 'free', 'most during'],
    )
    sizes = {'state': verdict.plan.state_bytes()[0]} | verdict.held
    for phase, (size, name) in verdict.phases.items():
        job = next(job for job in verdict.jobs if job.name == name)
        parts = [sizes[part] * (part in job.holds) for part in sizes]
        table.add_row(
            phase,
            *(f'{n / GIB:.2f}' for n in (*parts, size - sum(parts), size)),
            f'{1 - size / verdict.plan.chip.memory:.0%}',
            name,
        )
    return table


def summary(verdict):
    """Lines: the verdict, the largest batch, and the least time of a step."""
    prompts, rows = verdicts.largest_batch(verdict)
    memory, plan = verdict.plan.chip.memory / GIB, verdict.plan
    if verdict.fits:
        first = f'FITS: {verdict.peak / GIB:.2f} of {memory:.2f} GiB in use at most, {verdict.free:.0%} free'
    else:
        first = f'DOES NOT FIT: {verdict.peak / GIB:.2f} GiB wanted, {memory:.2f} there'
    lines = [
        first,
        f'largest batch, by arithmetic and not compiled: data.prompts_per_step={prompts} with microbatches '
        f'as large as now; {rows} rows of a microbatch a chip (now {plan.microbatch_rows()})',
    ]
    waiting = compiled.waiting_bytes(plan.learner.state)
    if waiting:
        lines.append(
            f"{waiting / GIB:.2f} GiB of a chip's state wait in the hosts' memory; the time to move them is not counted"
        )
    if verdict.fits:
        shapes = plan.shapes
        tokens = shapes.prompts * shapes.group_size * shapes.tokens
        lines.append(
            f'a step takes at least {verdict.seconds:.2f} s on the devices when every completion has '
            f'{shapes.tokens} tokens: at most {tokens / verdict.seconds / plan.mesh.size:.0f} tokens a second '
            "and chip. A bound from the makers' figures, not a measurement"
        )
    return '\n'.join(lines)
