"""All monitors, and what they newly see."""

from collections.abc import Sequence

from grpo_jax.diagnose import completions, groups, pay, policy, updates
from grpo_jax.diagnose.signs import Context, Diagnosis, Rows

MONITORS = {
    monitor.name: monitor for module in (groups, policy, completions, pay, updates) for monitor in module.MONITORS
}


def new(rows: Rows, context: Context) -> list[Diagnosis]:
    """The Diagnoses that set in at the newest row, or with the newest evaluation where that comes after it.

    One that was there within the last config.diagnose.repeat_after steps does not set in again. A pure function of rows
    and context: a resumed run, and whoever reads the files of a run, sees the same.
    """
    begun = []
    for monitor in MONITORS.values():
        diagnosis = monitor.judge(rows, context)
        if not diagnosis:
            continue
        earlier = range(diagnosis.step - 1, diagnosis.step - 1 - context.options.repeat_after, -1)
        if not any(monitor.judge(*_until(rows, context, time)) for time in earlier):
            begun.append(diagnosis)
    return begun


def history(rows: Rows, context: Context) -> list[Diagnosis]:
    """All Diagnoses of a run in the order in which they set in."""
    times = sorted({row['step'] for row in (*rows, *context.evaluations)})
    return [diagnosis for time in times for diagnosis in new(*_until(rows, context, time))]


def _until(rows: Sequence, context, step):
    """(rows, Context) as they were at a step."""

    def until(table):
        count = len(table)
        while count and table[count - 1]['step'] > step:
            count -= 1
        return table[:count]

    return until(rows), context._replace(evaluations=until(context.evaluations))
