"""All monitors, and the diagnoses that they begin."""

from collections.abc import Sequence
import functools

from grpo_jax.diagnose import completions, groups, pay, policy, updates
from grpo_jax.diagnose.signs import Context, Diagnosis, Rows, newest_step

MONITORS = {
    monitor.name: monitor for module in (updates, groups, policy, completions, pay) for monitor in module.MONITORS
}


def new_diagnoses(rows: Rows, context: Context) -> list[Diagnosis]:
    """Returns the Diagnoses that begin at the newest row, or at a newer evaluation; monitors without `because` first.

    A monitor that has spoken within the last config.diagnose.repeat_after steps begins no new Diagnosis. A monitor
    waits while one that explains it (Monitor.because) sees something, or did so within as many steps. This is a pure
    function of rows and context, so a resumed run and a reader of the run's files get the same Diagnoses.
    """
    back = context.options.repeat_after

    @functools.cache
    def judge(name, step):
        return MONITORS[name].judge(*_cut_to_step(rows, context, step))

    def speaks(name, step):
        """Whether a monitor sees something at a step, and no monitor of its `because` does or did lately."""
        causes = MONITORS[name].because
        return judge(name, step) and not any(
            judge(cause, time) for cause in causes for time in range(step, step - back - 1, -1)
        )

    now = newest_step(rows, context)
    begun = [
        name
        for name in MONITORS
        if speaks(name, now) and not any(speaks(name, time) for time in range(now - 1, now - 1 - back, -1))
    ]
    return [judge(name, now) for name in sorted(begun, key=lambda name: bool(MONITORS[name].because))]


def history(rows: Rows, context: Context) -> list[Diagnosis]:
    """Returns all Diagnoses of a run, in the order in which they began."""
    times = sorted({row['step'] for row in (*rows, *context.evaluations)})
    return [diagnosis for time in times for diagnosis in new_diagnoses(*_cut_to_step(rows, context, time))]


def describe_remedy(monitor: str, rows: Rows, context: Context) -> tuple[str, bool]:
    """(a sentence, whether it helped) on a monitor's remedy, taken config.diagnose.patience steps ago.

    It helped if the monitor sees nothing any more.
    """
    diagnosis = MONITORS[monitor].judge(rows, context)
    seen = f'is still there ({diagnosis.evidence}): that did not help' if diagnosis else 'is gone: that helped'
    return f'{monitor} {seen}, {context.options.patience} steps after its remedy was taken', not diagnosis


def _cut_to_step(rows: Sequence, context, step):
    """(rows, Context) as they were at a step: without later rows and evaluations."""

    def until(table):
        count = len(table)
        while count and table[count - 1]['step'] > step:
            count -= 1
        return table[:count]

    return until(rows), context._replace(evaluations=until(context.evaluations))
