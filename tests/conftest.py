"""8 fake CPU devices, set before jax is imported; where the real inputs are; Qwen's tokenizer; a tiny model."""

import functools
import gc
import importlib.util
import json
import logging
import os
import pathlib
import shutil
import signal
import sys
import tempfile

TESTS = pathlib.Path(__file__).parent
sys.path.insert(0, str(TESTS.parent))  # for configs

from tests import quick_compile

DEVICES = '--xla_force_host_platform_device_count=8'
flags = os.environ.get('XLA_FLAGS', ''), quick_compile.FLAGS, DEVICES
os.environ['XLA_FLAGS'] = ' '.join(flags)
os.environ['JAX_PLATFORMS'] = 'cpu'
if sys.modules.get('torch', sys) is None:  # pytest's workers are children too
    del sys.modules['torch']
os.environ['PYTHONPATH'] = os.pathsep.join(filter(None, (str(TESTS / 'children'), os.environ.get('PYTHONPATH'))))
# most of the suite's time is XLA compiling small programs, many of them the same ones
os.environ.setdefault('JAX_DISABLE_MOST_OPTIMIZATIONS', '1')
os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', os.path.join(tempfile.gettempdir(), 'grpo_jax-tests'))
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.05')
if 'PYTEST_XDIST_WORKER' in os.environ and hasattr(os, 'sched_setaffinity'):
    # each worker has cores of its own: threads of XLA wait by spinning, which takes a quarter of what they share
    worker, workers = int(os.environ['PYTEST_XDIST_WORKER'][2:]), int(os.environ['PYTEST_XDIST_WORKER_COUNT'])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[worker::workers] or cores)
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a background job ignores
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and this one under nohup

import jaxtyping

import tests.checked


def of_arrays():
    """The modules whose signatures have shapes and dtypes; checks of all others would take half of some tests' time."""
    for path in (TESTS.parent / 'grpo_jax').rglob('*.py'):
        if 'jaxtyping' in path.read_text(encoding='utf8'):
            yield '.'.join(path.relative_to(TESTS.parent).with_suffix('').parts)


# they are checked while tests run, see CHECKED, and at no other time
jaxtyping.jaxtyped = tests.checked.jaxtyped_if_checked
jaxtyping.install_import_hook(list(of_arrays()), 'tests.checked.checked')

import jax
import pytest

from grpo_jax.hosts import lock
from grpo_jax.models import hf, transformer
from grpo_jax.run import console
from grpo_jax.sharding import mesh as meshes
from tests import shared_programs
from tests.report import browser

jax.devices()  # which reads the flags; a process that a test starts has one device, unless the test says more
os.environ['XLA_FLAGS'] = os.environ['XLA_FLAGS'].replace(DEVICES, '')
# tracing makes many objects that stay, and the collector would look at all of them again and again
gc.freeze()
gc.set_threshold(50_000, 20, 20)
console.install()
shared_programs.install()
logging.getLogger('grpo_jax').propagate = True  # to caplog

DATA = os.environ.get('GRPO_JAX_DATA', 'data')
SMALL = ('algorithms', 'data', 'report', 'rewards')  # folders of tests that take little
# folders of tests of functions of arrays, and files of whole runs of most kinds, in which signatures are checked; to
# check what the other runs trace, which is the same, would take a sixth of their time
CHECKED = ('algorithms', 'learner', 'models', 'sampler', 'sharding', 'test_metrics.py', 'test_train.py')
SMOLLM2 = os.environ.get('GRPO_JAX_SMOLLM2', os.path.join(DATA, 'smollm2'))  # as data/tools/smollm2_to_hf.py writes it


def pytest_terminal_summary(terminalreporter):
    if not os.path.isdir(DATA):
        terminalreporter.write_line(
            f'NO REAL INPUTS: GRPO_JAX_DATA={DATA} is not a folder; tests on real data were skipped',
            red=True,
            bold=True,
        )
    if not os.path.isdir(SMOLLM2):
        terminalreporter.write_line(
            f'NO SMOLLM2: GRPO_JAX_SMOLLM2={SMOLLM2} is not a folder; its tokenizer and logits were not tested',
            red=True,
            bold=True,
        )
    if importlib.util.find_spec('libtpu') is None:
        terminalreporter.write_line(
            'NO TPU COMPILER: libtpu is not installed; nothing was compiled for TPUs', red=True, bold=True
        )
    if browser.executable() is None:
        terminalreporter.write_line(
            'NO BROWSER: chromium is not installed; the page of a report was opened by nobody', red=True, bold=True
        )


@pytest.fixture(scope='session', autouse=True)
def small_runs():
    """Runs without a mesh of their own take one of the fake devices; none waits for others or draws its curve anew."""
    drawn, draw_curve = {}, console.draw_curve

    @functools.wraps(draw_curve)
    def draw_once(workdir):
        """The path of a curve.png with the bytes of the first one that was drawn."""
        path = os.path.join(workdir, 'curve.png')
        if not drawn:
            drawn['png'] = pathlib.Path(draw_curve(workdir)).read_bytes()
        pathlib.Path(path).write_bytes(drawn['png'])
        return path

    with pytest.MonkeyPatch.context() as patch:  # of the session, since runs of a module's fixtures begin before tests
        patch.setattr(meshes, 'devices_here', lambda: jax.devices()[:1])
        patch.setattr(lock, 'SETTLE_SECONDS', 0.05)
        patch.setattr(console, 'draw_curve', draw_once)
        yield


@pytest.fixture(scope='session')
def chromium():
    """A headless Chromium for the session; skips where there is none."""
    if browser.executable() is None:
        pytest.skip('no chromium')
    with browser.Chromium() as opened:
        yield opened


@pytest.fixture(scope='session')
def real():
    """The folder of real inputs; skips where there is none."""
    if not os.path.isdir(DATA):
        pytest.skip(f'no real inputs in {DATA}')
    return DATA


@pytest.fixture(scope='session')
def tiny():
    """(ModelConfig, params) of a two-layer Qwen3-like model with grouped queries."""
    c = transformer.ModelConfig(
        vocab_size=64,
        width=32,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=8,
        mlp=48,
        norm_eps=1e-6,
        rope_theta=1e4,
        rope_scaling=(),
        qk_norm=True,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        tie_embeddings=True,
    )
    return c, jax.jit(transformer.init, static_argnums=1)(jax.random.key(0), c)


@pytest.fixture(scope='session')
def smollm2():
    """The folder of SmolLM2-135M-Instruct; skips where there is none."""
    if not os.path.isdir(SMOLLM2):
        pytest.skip(f'no SmolLM2 in {SMOLLM2}')
    return SMOLLM2


@pytest.fixture(scope='session')
def qwen3(real, tmp_path_factory):
    """Qwen3's tokenizer."""
    return assemble_qwen(real, 'qwen3', tmp_path_factory.mktemp('qwen3'))


@pytest.fixture(scope='session')
def qwen25(real, tmp_path_factory):
    """Qwen2.5's tokenizer."""
    return assemble_qwen(real, 'qwen2.5', tmp_path_factory.mktemp('qwen2.5'))


def assemble_qwen(real, name, folder):
    """A tokenizer of the family, in a folder assembled of vocab.json, merges.txt and its tokenizer_config.json."""
    parts = os.path.join(real, 'tokenizers', 'qwen2.5')
    config = os.path.join(real, 'tokenizers', name, 'tokenizer_config.json')
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(os.path.join(real, 'tools'))
        tool = importlib.import_module('qwen_tokenizer')
    with open(os.path.join(parts, 'vocab.json'), encoding='utf8') as file:
        vocab = json.load(file)
    with open(config, encoding='utf8') as file:
        built = tool.build(vocab, tool.read_merges(os.path.join(parts, 'merges.txt')), json.load(file))
    (folder / 'tokenizer.json').write_text(json.dumps(built, ensure_ascii=False), encoding='utf8')
    shutil.copy(config, folder)
    return hf.load_tokenizer(str(folder))


@pytest.hookimpl(tryfirst=True)  # before fixtures, which run programs too
def pytest_runtest_setup(item):
    """Switches the checks of shapes and dtypes on for CHECKED, or for all with --long."""
    checked = item.config.getoption('--long') or {item.path.parent.name, item.path.name} & {*CHECKED}
    jaxtyping.config.update('jaxtyping_disable', not checked)


def pytest_collection_modifyitems(items):
    """Puts what takes long first, file by file, half of it for each of two workers.

    What one takes over from the other at the end is small then, and no fixture of a file that takes long is made twice.
    """
    small = [item for item in items if item.path.parent.name in SMALL]
    large = [item for item in items if item.path.parent.name not in SMALL]
    early = set(list(dict.fromkeys(item.path for item in large))[::2])
    first = [item for item in large if item.path in early]
    rest = [item for item in large if item.path not in early]
    place = max(len(items) // 2 - len(first), 0)
    items[:] = first + small[:place] + rest + small[place:]


def pytest_addoption(parser):
    parser.addoption('--long', action='store_true', help='also whole data sets, and minutes of fuzzing')


@pytest.fixture(scope='session')  # before all fixtures of less scope, which a skipped test does not need
def long(request):
    """For tests of many minutes; skips without --long."""
    if not request.config.getoption('--long'):
        pytest.skip('needs --long')
