"""Writes docs/troubleshooting.md: the tables of the monitors, around the text of troubleshooting_notes.md.

python docs/make_troubleshooting.py
"""

import inspect
import os
import re
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, 'docs'))

from make_algorithms import table  # noqa: E402
import make_config  # noqa: E402

from grpo_jax.diagnose import MONITORS, Context, DiagnoseOptions  # noqa: E402

TARGET = os.path.join(ROOT, 'docs', 'troubleshooting.md')
NOTES = os.path.join(ROOT, 'docs', 'troubleshooting_notes.md')


def text():
    """The whole page."""
    with open(NOTES, encoding='utf8') as file:
        notes = file.read()
    page = notes.replace('<!-- remedies -->', remedies()).replace('<!-- monitors -->', monitors())
    origin = 'docs/make_troubleshooting.py, from grpo_jax/diagnose and troubleshooting_notes.md'
    return f'<!-- Written by {origin}. -->\n\n{page}'


def remedies():
    """A row for each answer of each monitor; the symptom, the meters and the lab stand in the first."""
    numbers, rows = Context.from_config(make_config.defaults()).remedy_texts(), []
    for monitor in MONITORS.values():
        meters = ', '.join(f'`{name}`' for name in monitor.reads)
        lab = f'`configs/labs/{monitor.lab}.py`'
        first = (monitor.symptom, meters, f'`{monitor.name}`')
        for answer in monitor.answers.values():
            remedies = [f'`{text.format(**numbers)}`' for text in (answer.remedy, answer.otherwise) if text]
            remedy = ', else '.join(remedies) or ('none is needed' if monitor.level == 'note' else 'no flag')
            rows.append((*first, answer.cause, remedy, lab))
            first, lab = ('', '', ''), ''
    return table('symptom | meter | monitor | likely cause | remedy | lab', rows)


def monitors():
    """A row for each monitor: when it speaks, and the keys of its thresholds."""
    rows = []
    for monitor in MONITORS.values():
        when = inspect.getdoc(monitor.sign).split('\n\n')
        about = ' '.join(' '.join(paragraph.split()) for paragraph in when).removeprefix('A Sign if ')
        about = about if about.startswith('pass@') else about[0].upper() + about[1:]
        if monitor.because:
            about += f' Waits behind {", ".join(f"`{name}`" for name in monitor.because)}.'
        rows.append((f'`{monitor.name}`', monitor.level, about, ', '.join(f'`{key}`' for key in thresholds(monitor))))
    return table('monitor | level | speaks when | keys of `config.diagnose`', rows)


def thresholds(monitor):
    """The keys of config.diagnose that a monitor's function reads, and the functions of its module that it calls."""
    module, functions = inspect.getmodule(monitor.sign), [monitor.sign]
    for function in functions:  # which grows: called functions call others
        names = sorted(set(re.findall(r'\b(\w+)\(', inspect.getsource(function))))
        called = [getattr(module, name) for name in names if inspect.isfunction(getattr(module, name, None))]
        functions += [function for function in called if function not in functions]
    whole = ''.join(map(inspect.getsource, functions))
    keys = set(re.findall(r'options\.(\w+)', whole))
    if 'getattr(context.options, name)' in whole:
        keys |= {name for name in monitor.reads if name in DiagnoseOptions._fields}
    return [key for key in DiagnoseOptions._fields if key in keys]


if __name__ == '__main__':
    with open(TARGET, 'w', encoding='utf8') as target:
        target.write(text())
