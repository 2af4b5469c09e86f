"""The console: what is being done, in lines that are ours alone."""

import importlib
import io
import itertools
import logging
import math
import os
import re
import subprocess
import sys
import threading
import time
import types
import uuid

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import algorithms, evaluate, text
from grpo_jax.hosts import processes
from grpo_jax.rewards import Rewards
from grpo_jax.run import console
from grpo_jax.run.settings import Settings
from grpo_jax.sharding import compiled
from grpo_jax.text import columns, during, shorten

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class Clock:
    """A time that passes when the test says so."""

    now = 0.0

    def monotonic(self):
        return self.now


class Screen(io.StringIO):
    """stderr, whose lines are kept with their times, and a console of its own."""

    def __init__(self, clock):
        super().__init__()
        self.clock, self.lines, self.console = clock, [], console.Console()

    def write(self, text):
        if text != '\n':
            self.lines.append((self.clock.now, text))
        return len(text)

    def wait(self, seconds):
        """Lets time pass, as the console's thread sees it."""
        for _ in range(seconds):
            self.clock.now += 1.0
            self.console.tick()

    @property
    def texts(self):
        return [text for _, text in self.lines]


@pytest.fixture
def screen(monkeypatch):
    clock = Clock()
    screen = Screen(clock)
    for module in (console, text):
        monkeypatch.setattr(module, 'time', clock)
    monkeypatch.setattr(text, 'listeners', [screen.console])
    monkeypatch.setattr(console, 'sys', types.SimpleNamespace(stderr=screen, stdout=sys.stdout))
    return screen


def test_what_lasts_is_named_and_then_heard_of_once_a_minute(screen):
    with during('compiling the update') as compiling:
        screen.clock.now = 0.5
        screen.console.tick()
        assert screen.texts == []
        screen.clock.now = 0.0
        screen.wait(130)
        compiling.result, compiling.note = 'compiled the update', 'from the cache'
    assert screen.lines == [
        (1.0, 'compiling the update'),
        (61.0, 'compiling the update, 1 min 1 s so far'),
        (121.0, 'compiling the update, 2 min 1 s so far'),
        (130.0, 'compiled the update in 2 min 10 s (from the cache)'),
    ]


def test_what_is_over_at_once_leaves_no_line(screen):
    with during('reading the data'):
        screen.clock.now = 0.9
        screen.console.tick()
    with during('compiling the update') as compiling:
        screen.clock.now += 0.05
        compiling.result = 'compiled the update'
    screen.wait(20)
    assert screen.texts == []


def test_of_what_is_being_done_at_once_the_innermost_is_named(screen):
    with during('train', 60):
        with during('evaluating', 256) as evaluating:
            evaluating.done = 64
            screen.wait(2)
        screen.wait(2)
    # 64 of 256 in one second: 192 more take three
    assert screen.texts == ['evaluating: 64 of 256, 3.0 s left', 'train: 0 of 60, 3.0 s so far']


def test_no_silence_is_longer_than_a_minute_whatever_happens(screen):
    with during('train', 5) as train:
        for step in range(5):
            train.enter('sample')
            screen.wait(70 * step)
            with during('evaluating'):
                screen.wait(30 * step)
            train.advance(step + 1, 'reward 0.5')
        screen.wait(300)
    times = [0.0, *(when for when, _ in screen.lines), screen.clock.now]
    assert max(after - before for before, after in itertools.pairwise(times)) <= 61.0


def test_a_run_of_many_steps_prints_ten_lines_and_where_it_stands(screen):
    with during('train', 60, 12) as train:
        for step in range(12, 60):
            screen.clock.now += 0.5
            train.advance(step + 1, f'reward {step / 100:.2f}')
        train.result = f'train: 60 of 60, {train.cells[0]},'
    # steps 18, 24, ... 54, after 3 s of 6 steps: 42 more take 21 s
    assert screen.texts[0] == 'train: 18 of 60, reward 0.17, 21 s left'
    assert [text.split(',')[0] for text in screen.texts] == [f'train: {n} of 60' for n in range(18, 61, 6)]
    assert screen.texts[-1] == 'train: 60 of 60, reward 0.59, in 24 s'


def test_the_stage_of_a_long_step_is_shown(screen):
    with during('train', 60) as train:
        train.advance(1, 'reward 0.50')
        train.enter('sample')
        train.stage = 'sample, 12 of about 90 tokens'
        screen.wait(61)  # a minute after the line that names it
    # one step in 61 s: 59 more take 3599
    assert screen.texts[-1].endswith('reward 0.50, 59 min 59 s left, sample, 12 of about 90 tokens (1 min 1 s)')


def test_other_processes_than_the_first_are_silent(screen, monkeypatch):
    monkeypatch.setattr(processes, 'speaks', lambda: False)
    with during('train', 60) as train:
        screen.wait(20)
        train.advance(6, '')
        train.result = 'train'
    logging.getLogger('grpo_jax').warning('the same in all')
    assert screen.texts == []


def test_times_are_written_in_words():
    texts = ['0.4 s', '9.4 s', '10 s', '59 s', '1 min 0 s', '2 min 5 s', '3 h 20 min']
    assert [console.duration(seconds) for seconds in (0.44, 9.4, 9.6, 59.4, 59.6, 125, 12000)] == texts


def test_a_step_of_training_has_a_line_and_the_end_repeats_none(screen):
    with during('train', 60, 12, lines=True) as train:
        for step in range(12, 60):
            screen.clock.now += 0.5
            train.advance(step + 1, f'reward {step / 100:.2f}')
        train.result = 'train: 60 of 60'
    assert [text.split(',')[0] for text in screen.texts] == [f'train: {n} of 60' for n in range(13, 61)] + [
        'train: 60 of 60 in 24 s'
    ]
    # one short step tells nothing of the others; after 1 s of two steps, 46 more take 23
    assert screen.texts[0] == 'train: 13 of 60, reward 0.12, 0.5 s so far'
    assert screen.texts[1] == 'train: 14 of 60, reward 0.13, 23 s left'


def test_a_line_leaves_out_the_last_cells_that_have_no_room():
    cells = ['reward 0.5', 'dead 3% wrong', 'length 12']
    whole = 'train: 1 of 9, reward 0.5, dead 3% wrong, length 12, 8 s left'
    assert console.fit('train: 1 of 9', cells, ['8 s left'], len(whole)) == whole
    assert console.fit('train: 1 of 9', cells, ['8 s left'], len(whole) - 1) == whole.replace(', length 12', '')
    assert console.fit('train: 1 of 9', cells, ['8 s left'], 25) == 'train: 1 of 9, 8 s left'
    for width in range(5, 80):
        assert len(console.fit('train: 1 of 9', cells, ['8 s left'], width)) <= width


def test_letters_of_two_columns_count_as_two_and_controls_as_what_is_shown():
    # the name takes 4 columns, and the escaped control 4
    assert console.fit('a', ['\u6b63\u78ba'], (), 7) == 'a, \u6b63\u78ba'
    assert console.fit('a', ['\u6b63\u78ba'], (), 6) == 'a'
    assert console.fit('a', ['\x1b'], (), 7) == 'a, \\x1b' and console.fit('a', ['\x1b'], (), 6) == 'a'


ROW = {
    'reward': 0.53515625,
    'reward/numeric': 0.5,
    'reward/format': 0.25,
    'dead_groups': 0.09375,
    'groups_all_right': 0.03125,
    'groups_all_wrong': 0.0625,
    'length': 16.42578125,
    'truncated': 0.0,
    'entropy': 0.2225,
    'tokens': 4205.0,
    'finite': 1.0,
    'kl_ref': None,
}


def test_the_line_of_a_step_has_dead_groups_and_the_rewards_parts():
    assert console.step_cells(ROW, {'sample': 0.5}) == [
        'reward 0.535',
        'dead 9%',
        'all right 3%',
        'all wrong 6%',
        'numeric 0.500',
        'format 0.250',
        'length 16.4',
        'entropy 0.223',
        '8410 tokens/s',
    ]
    assert console.step_cells(ROW | {'finite': 0.0}, {})[0] == 'update skipped'
    without = {name: value for name, value in ROW.items() if 'groups_' not in name}
    assert 'dead 9%' in console.step_cells(without, {})  # nothing tells right from wrong
    assert 'truncated 25%' in console.step_cells(ROW | {'truncated': 0.25}, {})
    assert 'truncated 0%' not in console.step_cells(ROW | {'truncated': 0.004}, {})


def test_the_line_of_a_step_does_not_say_the_same_twice_and_nothing_of_what_is_not_known():
    alone = {'reward': 0.5, 'reward/numeric': 0.5, 'dead_groups': 0.0, 'entropy': None}
    assert console.step_cells(alone, {}) == ['reward 0.500']
    assert console.step_cells(alone | {'reward': 1.0}, {}) == ['reward 1.000', 'numeric 0.500']  # its weight is 2
    assert console.step_cells({'reward': None}, {}) == []
    # all groups were dead and dropped: no token is left, and means over tokens are 0
    dead = {'dead_groups': 1.0, 'entropy': 0.0, 'kl_ref': 0.0, 'logprob': None}
    assert console.step_cells(dead, {}) == ['dead 100%']
    assert console.step_cells(dead | {'logprob': -1.0}, {}) == ['dead 100%', 'entropy 0.000', 'kl 0.000']
    assert console.step_cells({'loss': 0.25, 'reward': 1.0}, {}, ('loss',)) == ['loss 0.250']


def rewarded(text, correct, reward=0.0):
    row = [np.array([value], float) for value in (len(text), reward, correct)]
    return Rewards(np.array([text], object), np.array([False]), *row, {}, {})


def test_the_sample_of_an_evaluation_is_one_line_with_its_verdict():
    line = evaluate.sample_line('795+407=', '1202', rewarded('1272', 0.0), 120)
    assert line == 'sample: 795+407= -> 1272 (wrong, the answer is 1202)'
    assert evaluate.sample_line('795+407=', '1202', rewarded('1202', 1.0), 120).endswith('-> 1202 (right)')
    assert evaluate.sample_line('Once', '', rewarded('upon', math.nan, 0.25), 120).endswith('-> upon (reward 0.25)')


@pytest.mark.parametrize('width', [60, 80, 120])
def test_hostile_completions_are_cut_and_never_obeyed(width):
    hostile = '\x1b[2J\x1b]0;owned\x07<script>\u202e\r\n' + 'x' * 2**20 + '\x1b[31m end'
    line = evaluate.sample_line(hostile, hostile, rewarded(hostile, 0.0), width)
    assert line.isprintable() and columns(line) <= width
    assert width < 120 or ('\\x1b[2J' in line and 'end (wrong' in line)  # beginning and end are there


def test_texts_are_cut_in_the_middle():
    assert shorten('0123456789', 10) == '0123456789'
    assert shorten('0123456789abc', 10) == '012 ... bc'
    assert shorten('\u6b63' * 10, 10) == '\u6b63 ... \u6b63'  # two columns each
    assert shorten('a' * 2**20, 4) == 'aaaa' and shorten('abc', 0) == ''


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_on_a_terminal_bars_come_and_go_and_results_stay(monkeypatch):
    terminal, shown = Terminal(), console.Console()
    monkeypatch.setenv('TERM', 'xterm')
    monkeypatch.setattr(sys, 'stderr', terminal)
    monkeypatch.setattr(text, 'listeners', [shown])
    stdout = sys.stdout
    with during('train', 60) as train:
        assert sys.stdout is stdout  # it is no terminal: what a program prints there goes there
        train.advance(6, 'reward 0.5')
        print('a line of a library', file=sys.stderr)
        time.sleep(0.5)  # bars are renewed four times a second
        train.result = 'train: 6 of 60'
    assert sys.stderr is terminal
    printed = terminal.getvalue()
    assert '6/60, ' in printed and 'left, reward 0.5' in printed and 'a line of a library' in printed
    assert 'train: 6 of 60 in' in printed.splitlines()[-1]
    assert not shown._running and shown._progress is None


def test_a_bar_shows_the_texts_of_others_and_obeys_none(monkeypatch):
    terminal, shown = Terminal(), console.Console()
    monkeypatch.setenv('TERM', 'xterm')
    monkeypatch.setenv('COLUMNS', '120')
    monkeypatch.setattr(sys, 'stderr', terminal)
    monkeypatch.setattr(text, 'listeners', [shown])
    with during('reading [red]a[/red]\x1b[2J', 3) as reading:
        reading.cells = ('[bold]b\x07', ':smile:')
        shown.tick()
    printed = terminal.getvalue()
    assert 'reading [red]a[/red]\\x1b[2J' in printed and '[bold]b\\x07, :smile:' in printed
    assert '\x1b[2J' not in printed and '\x07' not in printed


@pytest.mark.parametrize('columns_there', [40, 80, 200])
def test_the_line_of_a_step_fits_the_terminal(columns_there, monkeypatch):
    terminal, shown = Terminal(), console.Console()
    monkeypatch.setenv('TERM', 'xterm')
    monkeypatch.setenv('COLUMNS', str(columns_there))
    monkeypatch.setattr(sys, 'stderr', terminal)
    monkeypatch.setattr(text, 'listeners', [shown])
    with during('train', 60, lines=True) as train:
        train.advance(6, *console.step_cells(ROW, {'sample': 0.5}))
        assert shown.width == columns_there
    lines = [re.sub(r'\x1b\[[0-9;?]*[A-Za-z]', '', line) for line in re.split('[\r\n]', terminal.getvalue())]
    (line,) = {line for line in lines if 'train: 6 of 60' in line}
    assert len(line) <= columns_there and line.startswith('train: 6 of 60, reward 0.535')
    assert ('tokens/s' in line) == (columns_there == 200)
    assert max(map(len, lines)) <= columns_there


def test_a_warning_is_one_plain_line(capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger('grpo_jax'), 'propagate', False)
    logging.getLogger('grpo_jax').warning('%d rows\n  are malformed', 3)
    assert capsys.readouterr().err == 'warning: 3 rows are malformed\n'


def test_a_second_install_changes_nothing(capsys):
    console.install()
    console.install()
    logging.getLogger('grpo_jax').warning('once')
    assert capsys.readouterr().err.count('once') == 1


LIBRARIES = """
import logging, warnings
from absl import app, logging as absl_logging
from grpo_jax.run import console
console.install_for_command()

def main(_):  # absl.app puts its own handler to the root
    warnings.warn('of a library')
    absl_logging.info('of a library')
    absl_logging.warning('of a library')
    logging.getLogger('orbax').warning('of a library')
    logging.warning('of a config file')
    logging.getLogger('grpo_jax').warning('of ours')
    logging.getLogger('orbax').error('what must be heard')

app.run(main)
"""


def test_in_a_command_libraries_are_silent_but_for_errors():
    done = subprocess.run([sys.executable, '-c', LIBRARIES], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines() == [
        'warning: of a config file',
        'warning: of ours',
        'error: orbax: what must be heard',
    ]


# compiling


def executable(constant):
    return compiled.Executable(lambda: jax.jit(lambda x: x + constant).trace(jnp.ones(3)))


def test_compiling_says_what_came_from_the_cache(screen, monkeypatch):
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
    monkeypatch.setattr(console, 'TRIFLE', 0.0)
    try:
        constants = [float(uuid.uuid4().int % 2**20) for _ in range(3)]  # of which no cache has heard
        compiled.compile_all([executable(constants[0])], 'the update')
        compiled.compile_all([executable(constants[0])], 'the update')
        compiled.compile_all([executable(constant) for constant in constants], '3 programs')
    finally:
        jax.config.update('jax_persistent_cache_min_compile_time_secs', before)
    assert screen.texts == [
        'compiled the update in 0.0 s (not cached)',
        'compiled the update in 0.0 s (from the cache)',
        'compiled 3 programs in 0.0 s (1 from the cache)',
    ]


def test_an_interrupt_does_not_wait_for_the_compiler(monkeypatch):
    compiling, waited = threading.Event(), threading.Event()

    class Slow(compiled.Executable):
        def compile_lowered(self, lowered):
            compiling.set()
            waited.wait(60)

    def interrupt(*_):
        compiling.wait(60)
        raise KeyboardInterrupt

    slow = Slow(lambda: jax.jit(lambda x: x).trace(1.0))
    later = compiled.Executable(interrupt)  # tracing it is when Ctrl-C comes
    began = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            compiled.compile_all([slow, later], 'two programs')
        assert time.monotonic() - began < 30
    finally:
        waited.set()


# the config's own defaults


@pytest.mark.parametrize('name', sorted(n[:-3] for n in os.listdir(os.path.join(ROOT, 'configs')) if n.endswith('.py')))
def test_a_user_who_changed_nothing_gets_no_warning(name):
    if name in ('__init__', 'default'):  # default has no model and no data of its own
        pytest.skip('no experiment')
    config = importlib.import_module(f'configs.{name}').get_config()
    settings = Settings.from_config(config)
    algorithm = algorithms.make(config.algorithm, config.collection)
    sizes = dict(group_size=settings.group_size, prompts=settings.data.prompts_per_step)
    assert algorithms.check_run(algorithm, updates=settings.learning.updates, **sizes) == []
    assert config.algorithm.weights != 'fixed_length' or config.algorithm.fixed_length == config.rollout.max_tokens
