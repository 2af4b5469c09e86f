"""Helpers for notebooks: a check of the machine, a live plot, coloured tokens, and the report in a frame."""

from collections.abc import Callable, Mapping, Sequence
import html
import io
import math
import os
import subprocess
import sys
import time
from typing import Any
import warnings

import jax
import numpy as np

from grpo_jax.errors import BadInput
from grpo_jax.run import console
from grpo_jax.run.console import BLUE, make_panels
from grpo_jax.run.rows import describe_reward, read_rows
from grpo_jax.text import escape
from grpo_jax.tools.preflight import topology as topologies
from grpo_jax.tools.report.write import write_report

warnings.filterwarnings('ignore', message='IProgress not found')  # tqdm warns without widgets
REDRAW_SECONDS = 1.0
MOST_TOKENS = 2000  # shown of a completion
GENERATIONS = {
    'v5 lite': 'v5e',
    'v5e': 'v5e',
    'v5': 'v5p',
    'v6': 'v6e',
    'v4': 'v4',
}  # part of a device's kind -> generation


def topology(kind: str, count: int) -> str:
    """Returns preflight's name of a TPU slice, like 'v5e:2x4', from device kind and number of chips; else ''."""
    generation = next((name for text, name in GENERATIONS.items() if text in kind and 'TPU' in kind), '')
    sides = topologies.SIDES.get(generation, {}).get(count, '')
    return f'{generation}:{sides}' if sides else ''


def gpu_topology(devices: Sequence[Any]) -> str:
    """Returns preflight's name of jax's GPU devices, like 'gpu:a100-40', or by their GiB, like 'gpu:23.6'."""
    stats = devices[0].memory_stats() or {}
    memory = stats.get('bytes_limit', 0) / topologies.taken()
    return topologies.name_gpus(devices[0].device_kind, len(devices), memory)


def check_machine(experiment: str, settings: Mapping[str, Any] | None = None) -> str:
    """Prints the machine's devices, and for TPUs and GPUs preflight's verdict on an experiment.

    Returns 'tpu', 'gpu' or 'cpu'. experiment: NAME[:PRESET], as in --config; settings: changes of its config, by
    dotted key.
    """
    devices = jax.devices()
    kind, count = devices[0].device_kind, len(devices)
    if devices[0].platform == 'cpu':
        print(f'CPU, {os.cpu_count()} cores: small models only. Preflight plans TPUs and GPUs, so nothing is checked.')
    elif name := gpu_topology(devices) if devices[0].platform == 'gpu' else topology(kind, count):
        print(f'{count} x {kind}, {name}')
        print(preflight(experiment, name, settings)[1])
    else:
        print(f'{count} x {kind}: no slice that preflight knows')
    return devices[0].platform


def preflight_command(experiment: str, slice_name: str, settings: Mapping[str, Any] | None = None) -> list[str]:
    """Returns the arguments of `python -m` with which preflight checks an experiment; settings: as in check_machine."""
    changes = [f'--config.{name}={value}' for name, value in (settings or {}).items()]
    return ['grpo_jax', 'preflight', f'--config={experiment}', f'--topology={slice_name}', *changes]


def preflight(experiment: str, slice_name: str, settings: Mapping[str, Any] | None = None) -> tuple[int, str]:
    """Runs preflight in a child process. Returns (exit status, text): the output, or the last line of the error."""
    command = [sys.executable, '-m', *preflight_command(experiment, slice_name, settings)]
    done = subprocess.run(command, capture_output=True, text=True)
    last = console.one_line(done.stderr.strip().rpartition('\n')[2])
    return done.returncode, done.stdout if done.returncode in (0, 1) and done.stdout else last


class LivePlot:
    """Plots metrics in the cell's output while a run trains: `train.run(config, workdir, on_step=LivePlot(workdir))`.

    The plot begins with the steps in the workdir, so a cell that runs again goes on with the same plot. names: of the
    metrics, a panel each.
    """

    def __init__(self, workdir: str, names: Sequence[str] = ('reward', 'length', 'entropy')):
        from IPython import display

        path = os.path.join(workdir, 'metrics.jsonl')
        self._rows = read_rows(path) if os.path.exists(path) else []
        self._names, self._drawn = names, time.monotonic()
        self._image: Any = display.Image
        self._handle: Any = display.display(self._image(plot_rows(self._rows, self._names)), display_id=True)

    def __call__(self, step: int, row: Mapping[str, Any]) -> None:
        """Adds a step's row of metrics; draws at most once in REDRAW_SECONDS."""
        self._rows = [old for old in self._rows if old['step'] < step] + [dict(row)]
        if time.monotonic() - self._drawn > REDRAW_SECONDS:
            self.draw()

    def draw(self) -> None:
        """Draws the plot now."""
        self._drawn = time.monotonic()
        if self._handle is not None:  # None outside a notebook
            self._handle.update(self._image(plot_rows(self._rows, self._names)))


def plot_rows(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> bytes:
    """Returns the bytes of a PNG with a panel for each metric in `names`, drawn by step. rows: of metrics.jsonl."""
    figure, panels = make_panels(1, len(names), (3.2 * len(names), 2.4))
    steps = [row['step'] for row in rows]
    for panel, name in zip(panels, names, strict=True):
        values = np.array([math.nan if row.get(name) is None else row[name] for row in rows], float)
        panel.plot(steps, values, color=BLUE, linewidth=1.5, marker='o' if len(rows) == 1 else '')
        panel.set_title(name, loc='left', fontsize=9)
    file = io.BytesIO()
    figure.savefig(file, dpi=100)
    return file.getvalue()


def show_tokens(rows: Sequence[Mapping[str, Any]], by: str = 'logprob') -> Any:
    """Returns completions of a dump as HTML for a notebook's cell, each token coloured by a number.

    rows: of a dump; by: a key of COLOURS. Negative numbers are orange and positive ones blue; the pointer on a token
    shows its number. Texts are escaped, so HTML in them has no effect.
    """
    from IPython import display

    return display.HTML(tokens_as_html(rows, by))


def tokens_as_html(rows: Sequence[Mapping[str, Any]], by: str = 'logprob') -> str:
    """Returns the HTML of show_tokens as text. Raises BadInput for a `by` that is unknown or missing in the rows."""
    if by not in COLOURS:
        raise BadInput('by', by, f'choose one of {", ".join(COLOURS)}')
    lines = []
    for row in rows:
        tokens, numbers = row.get('tokens') or [row['completion']], COLOURS[by](row)
        if numbers is None:
            choices = ', '.join(name for name, read in COLOURS.items() if read(row) is not None)
            raise BadInput('by', by, f'is not in this dump; choose one of {choices}')
        numbers = [*numbers, *[numbers[-1] if numbers else 0.0] * len(tokens)][: len(tokens)]
        largest = max(map(abs, numbers), default=0.0) or 1.0
        spans = []
        for token, number in zip(tokens[:MOST_TOKENS], numbers[:MOST_TOKENS], strict=True):
            share = number / largest
            colour = '42,111,187' if share > 0 else '217,130,43'
            style = f'background:rgba({colour},{min(abs(share), 1.0) * 0.6:.2f})'
            spans.append(f'<span style="{style}" title="{number:.4g}">{_escape_html(token)}</span>')
        lines.append(
            f'<div style="margin:4px 0"><b>{_escape_html(describe_reward(row))}</b> '
            f'<span style="opacity:.6">{_escape_html(row["prompt"])}</span>'
            f'{"".join(spans)}</div>'
        )
    return f'<div style="font-family:monospace;white-space:pre-wrap;overflow-wrap:anywhere">{"".join(lines)}</div>'


def _advantages(row):
    """The advantage of each token of a dump's row; a completion's one advantage counts for all tokens."""
    advantage = row['advantage']
    return [advantage or 0.0] * max(len(row.get('tokens') or ()), 1) if not isinstance(advantage, list) else advantage


def _kl(row):
    """The estimator k3 of the KL to the reference for each token; None when the row lacks the logprobs."""
    pairs = _pairs(row, 'ref_logprobs', 'old_logprobs') or _pairs(row, 'ref_logprobs', 'logprobs')
    return [math.expm1(reference - policy) - (reference - policy) for reference, policy in pairs] if pairs else None


def _pairs(row, first, second):
    """[(number of `first`, number of `second`)] for each token of a row; None when the row lacks one of the lists."""
    return [*zip(row[first], row[second], strict=True)] if first in row and second in row else None


# name -> function that returns a number for each token of a row, or None when the row lacks them
COLOURS: dict[str, Callable[[Mapping[str, Any]], list[float] | None]] = {
    'advantage': _advantages,
    'logprob': lambda row: row.get('logprobs'),
    'entropy': lambda row: row.get('entropy'),
    'ratio': lambda row: (
        [math.expm1(old - sampled) for old, sampled in pairs]
        if (pairs := _pairs(row, 'old_logprobs', 'logprobs'))
        else None
    ),
    'kl': _kl,
}


def _escape_html(text):
    """A text, cut to 20 * MOST_TOKENS characters, as HTML that only shows it."""
    return html.escape(escape(text[: 20 * MOST_TOKENS]))


def show_report(workdir: str) -> Any:
    """Writes a run's report, and returns it as HTML for a notebook's cell, in a sandboxed frame."""
    from IPython import display

    with open(write_report([workdir]), encoding='utf8') as file:
        page = html.escape(file.read(), quote=True)
    return display.HTML(f'<iframe srcdoc="{page}" sandbox="allow-scripts" width="100%" height="800"></iframe>')
