"""All monitors, and the diagnoses that they begin."""

from collections.abc import Sequence

from grpo_jax.diagnose import completions, groups, pay, policy, updates
from grpo_jax.diagnose.signs import Context, Diagnosis, Rows

MONITORS = {
    monitor.name: monitor for module in (groups, policy, completions, pay, updates) for monitor in module.MONITORS
}


def new_diagnoses(rows: Rows, context: Context) -> list[Diagnosis]:
    """Returns the Diagnoses that begin at the newest row, or at a newer evaluation.

    A monitor that has spoken within the last config.diagnose.repeat_after steps begins no new Diagnosis. This is a pure
    function of rows and context, so a resumed run and a reader of the run's files get the same Diagnoses.
    """
    begun = []
    for monitor in MONITORS.values():
        diagnosis = monitor.judge(rows, context)
        if not diagnosis:
            continue
        earlier = range(diagnosis.step - 1, diagnosis.step - 1 - context.options.repeat_after, -1)
        if not any(monitor.judge(*_cut_to_step(rows, context, time)) for time in earlier):
            begun.append(diagnosis)
    return begun


def history(rows: Rows, context: Context) -> list[Diagnosis]:
    """Returns all Diagnoses of a run, in the order in which they began."""
    times = sorted({row['step'] for row in (*rows, *context.evaluations)})
    return [diagnosis for time in times for diagnosis in new_diagnoses(*_cut_to_step(rows, context, time))]


def _cut_to_step(rows: Sequence, context, step):
    """(rows, Context) as they were at a step: without later rows and evaluations."""

    def until(table):
        count = len(table)
        while count and table[count - 1]['step'] > step:
            count -= 1
        return table[:count]

    return until(rows), context._replace(evaluations=until(context.evaluations))
