"""Writes healthy/<seed>.json: what monitors read of a run of the demo, to four digits.

python -m grpo_jax.train --config=arithmetic --config.seed=1 --workdir=runs/1
python tests/golden/make_healthy.py runs/1 1
"""

import json
import os
import sys

from grpo_jax import diagnose
from grpo_jax.run.rows import read_rows

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'healthy')


def main():
    """The command."""
    workdir, seed = sys.argv[1:]
    rows = read_rows(os.path.join(workdir, 'metrics.jsonl'))
    evaluations = read_rows(os.path.join(workdir, 'evaluations.jsonl'))
    read = {name for monitor in diagnose.MONITORS.values() for name in monitor.reads} | {'reward/numeric'}
    present = sorted(read & {name for row in rows for name in row})
    columns = {name: _cut([row.get(name) for row in rows]) for name in present}
    kept = [{'step': row['step'], 'pass@1': row['pass@1']} for row in evaluations]
    with open(os.path.join(FOLDER, f'{seed}.json'), 'w', encoding='utf8') as file:
        file.write(json.dumps({'evaluations': kept, 'rows': columns}, separators=(',', ':')) + '\n')


def _cut(column):
    """The column's numbers to four digits; a single one where all are the same."""
    numbers = [None if value is None else float(f'{value:.4g}') for value in column]
    return numbers[0] if len(set(numbers)) == 1 else numbers


if __name__ == '__main__':
    main()
