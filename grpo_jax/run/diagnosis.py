"""The monitors beside a run's steps: what they newly see is printed, recorded, and may save or stop the run."""

import array
from collections.abc import Callable, Iterator, Mapping
import math
import os
from typing import Any

from grpo_jax import diagnose
from grpo_jax.hosts import processes
from grpo_jax.run.console import console
from grpo_jax.run.rows import append_event, json_float, read_rows

EVENT = 'diagnosis'


class Judge:
    """Judges a run's rows as they are written; the first process judges, the others only learn what follows from it.

    A resumed run begins with the rows and evaluations that its files have, so that it sees what an unbroken one sees.
    """

    def __init__(self, experiment, optimizer: str, show: Callable[[int, str, str], None]):
        """optimizer: its section of the config; show(step, name, text) puts a text beside the curves."""
        self._workdir, self._show = experiment.workdir, show
        self._on = experiment.settings.diagnose.on
        self._asks = False  # for what config.diagnose.on names, at the step at hand
        self._speaks = self._on != 'off' and processes.is_first()
        if self._speaks:
            self._context = diagnose.Context.from_config(experiment.config, optimizer=optimizer)
            self._places = {'step': 0}
            self._rows, self._evaluations = (
                _read(self._workdir, name, self._places) for name in ('metrics', 'evaluations')
            )

    def step(self, step: int, row: Mapping[str, Any]) -> None:
        """Takes a step's row. CannotWrite when a diagnosis cannot be recorded."""
        if self._speaks:
            self._rows.append(Row(row, step, self._places))
            self._say()

    def evaluation(self, step: int, results: Mapping[str, float], *, last: bool) -> None:
        """Takes an evaluation before step `step`; the last of a run, which no row follows, is judged at once."""
        if self._speaks:
            self._evaluations.append(Row(results, step, self._places))
            if last and self._rows:
                self._say()

    def asks(self, action: str, where: str) -> bool:
        """Whether a new diagnosis saves or stops the run; all processes must call it, in the same order."""
        return self._on == action and processes.agree(f'{where}, diagnosis', {}, self._asks)

    def _say(self):
        self._asks = False
        context = self._context._replace(evaluations=self._evaluations)
        for diagnosis in diagnose.new(self._rows, context):
            level = diagnose.MONITORS[diagnosis.monitor].level
            self._asks |= level == 'warning'
            console.print(f'{"diagnosis" if level == "warning" else level} at step {diagnosis.step}: {diagnosis}')
            fields = diagnosis._asdict()
            self._show(diagnosis.step, f'diagnosis/{diagnosis.monitor}', str(diagnosis))
            append_event(self._workdir, fields.pop('step'), EVENT, **fields)


class Row(Mapping[str, float]):
    """A row as monitors read it, the same before it is written and after: what is no number is not there.

    All rows of a run stay, so a row is a tenth of what a dict of it would be: places, of values by name, are shared.
    """

    __slots__ = ('_places', '_values')

    def __init__(self, row: Mapping[str, Any], step: int, places: dict[str, int]):
        values = ((name, json_float(value)) for name, value in row.items() if value is not None)
        numbers = {name: value for name, value in values if value is not None} | {'step': step}
        for name in numbers:
            places.setdefault(name, len(places))
        self._places = places
        self._values = array.array('d', [numbers.get(name, math.nan) for name in places])

    def __getitem__(self, name: str) -> float:
        place = self._places[name]
        value = self._values[place] if place < len(self._values) else math.nan
        if math.isnan(value):
            raise KeyError(name)
        return int(value) if name == 'step' else value

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._places if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _read(workdir, name, places):
    path = os.path.join(workdir, f'{name}.jsonl')
    return [Row(row, row['step'], places) for row in read_rows(path)] if os.path.exists(path) else []
