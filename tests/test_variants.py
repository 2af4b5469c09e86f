"""A variant is as good as a preset: by file, by command, on record; a run keeps its pieces, and a report mixes none."""

import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

from absl import flags
import jax.numpy as jnp
from ml_collections import config_flags
import numpy as np
import pytest

from grpo_jax import algorithms, supervised, train
from grpo_jax.algorithms import checks, pieces
from grpo_jax.algorithms.algorithm import MODULES
from grpo_jax.configs import arithmetic, default
from grpo_jax.errors import BadInput
from grpo_jax.run import config_file, steering
from grpo_jax.run.open import make_algorithm, open_changes, open_run
from grpo_jax.run.rows import recorded_events
from grpo_jax.run.steering import Steering
from grpo_jax.sharding import compiled
from grpo_jax.tools import provenance, report, sweep
from grpo_jax.tools.report import content, read
from tests import small_model, tiny_run
from tests.report import runs

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SQUASH = """
import jax.numpy as jnp

from grpo_jax.ranges import Positive


def squash(ratio, advantages, *, width: Positive = 0.3):
    return -advantages * width * jnp.tanh((ratio - 1) / width)


def apply(algorithm):
    algorithm.surrogate, algorithm.width = 'squash.py:squash', 0.5
"""
# a piece of each kind, as a user may write it
MINE = """
def advantage(rewards, *, half: float = 0.5):
    return half * rewards
def ratio(log_ratio):
    return 1.0 + log_ratio
def surrogate(ratio, advantages):
    return -advantages * ratio
def kl(logprobs, ref_logprobs):
    return logprobs - ref_logprobs
def weights(mask):
    return mask / mask.sum()
def correction(log_rho):
    return 1.0 + log_rho
def selection(mask):
    return 1.0 * mask
def regularizers(logprobs, *, mine_coef: float = 0.1):
    return mine_coef * logprobs
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of the user's, where the process is, with his files."""
    (tmp_path / 'squash.py').write_text(SQUASH)
    (tmp_path / 'mine.py').write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('PYTHONPATH', ROOT)
    return tmp_path


def squash(ratio, advantages, *, width=0.3):
    return -advantages * width * jnp.tanh((ratio - 1) / width)


def parsed(*arguments):
    """The config of a command line."""
    values = flags.FlagValues()
    argv = ['train', *arguments]
    config_flags.DEFINE_config_file('config', None, flag_values=values, sys_argv=argv)
    values['config'].parser = config_file.Parser(argv)
    values(argv)
    return values.config


# by file


@pytest.mark.parametrize('key', MODULES)
def test_every_piece_can_be_a_function_of_a_file(folder, key):
    config = tiny_run.config(preset='grpo')
    config.algorithm[key] = ('mine.py:regularizers',) if key == 'regularizers' else f'mine.py:{key}'
    piece = getattr(algorithms.make(config.algorithm), key)
    assert pieces.name_of(piece[0] if key == 'regularizers' else piece) == key
    assert algorithms.describe_pieces(algorithms.make(config.algorithm))[key][0]['file'] == str(folder / 'mine.py')


def test_numbers_of_a_file_are_flags_with_their_ranges(folder):
    chosen = ['--config=arithmetic', '--config.algorithm.surrogate=squash.py:squash']
    config = parsed(*chosen, '--config.algorithm.width=0.4')
    # -2 w tanh(.2 / w) with w = .4
    loss = algorithms.make(config.algorithm).surrogate(jnp.array([[1.2]]), jnp.array([[2.0]]))
    np.testing.assert_allclose(loss, [[-0.8 * np.tanh(0.5)]], rtol=1e-6)
    config.algorithm.width = -1.0
    with pytest.raises(BadInput, match=r'algorithm\.width = -1\.0: must be a number above 0'):
        algorithms.make(config.algorithm)
    with pytest.raises(BadInput, match=r'config\.algorithm has no widht; did you mean width\?'):
        parsed(*chosen, '--config.algorithm.widht=0.4')
    regularized = parsed('--config=arithmetic', '--config.algorithm.regularizers=("mine.py:regularizers",)')
    assert regularized.algorithm.mine_coef == 0.1


def test_a_preset_is_a_file(folder):
    config = parsed('--config=arithmetic:squash.py', '--config.algorithm.width=0.2')
    assert (config.algorithm.surrogate, config.algorithm.width) == ('squash.py:squash', 0.2)
    assert default.get_config('squash.py').algorithm.width == 0.5
    (folder / 'own.py').write_text(
        'from grpo_jax.configs import arithmetic\n\n\ndef get_config(preset="squash.py"):\n'
        '    config = arithmetic.get_config(preset)\n    config.algorithm.width = 0.7\n    return config\n'
    )
    assert make_algorithm(parsed('--config=own.py')).surrogate.keywords['width'] == 0.7


def test_files_of_presets_and_pieces_may_lie_beside_the_config(folder, monkeypatch):
    (folder / 'own.py').write_text(
        'from grpo_jax.configs import arithmetic\n\n\ndef get_config(preset="dr_grpo"):\n'
        '    config = arithmetic.get_config(preset)\n    config.algorithm.regularizers = ("mine.py:regularizers",)\n'
        '    return config\n'
    )
    (folder / 'elsewhere').mkdir()
    monkeypatch.chdir(folder / 'elsewhere')
    config = parsed('--config=../own.py:squash.py')
    assert config.algorithm.surrogate == '../squash.py:squash'
    assert config.algorithm.regularizers == ('../mine.py:regularizers',)
    made = make_algorithm(config)
    assert pieces.name_of(made.surrogate) == 'squash' and pieces.name_of(made.regularizers[0]) == 'regularizers'


def test_a_misspelt_number_is_refused_with_the_nearest(folder):
    config = arithmetic.get_config('squash.py')
    config.algorithm.widht = 0.7
    with pytest.raises(BadInput, match=r'algorithm\.widht = 0\.7: no piece has a number of .*; did you mean width'):
        make_algorithm(config)


def test_the_refusal_of_an_unknown_name_says_what_is_near_and_how_a_file_is_named():
    config = tiny_run.config(algorithm__surrogate='clipp')
    with pytest.raises(BadInput, match=r'choose one of .*sapo.*, or give FILE\.py:NAME of yours; did you mean clip'):
        make_algorithm(config)
    with pytest.raises(BadInput, match=r"preset = 'grop'.*or give FILE\.py of yours; did you mean grpo\?"):
        default.get_config('grop')


@pytest.mark.parametrize(
    'name, text, words',
    [
        ('nowhere.py:squash', None, 'names no file; FILE.py of FILE.py:NAME is looked for in '),
        ('bad.py:squash', 'x = 1\ny = (\n', 'bad.py, line 2: SyntaxError'),
        ('bad.py:squash', 'x = 1\ny = 1 / 0\n', 'bad.py, line 2: ZeroDivisionError'),
        ('bad.py:squash', 'x = 1\n', "has no function 'squash'"),
        ('bad.py', 'x = 1\n', 'names no file; FILE.py of FILE.py:NAME'),
        ('bad.py:squash', 'def squash(ratio, *, width): return ratio\n', 'its number width has no default'),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line(folder, name, text, words):
    if text is not None:
        (folder / 'bad.py').write_text(text)
    with pytest.raises(BadInput) as error:
        make_algorithm(tiny_run.config(algorithm__surrogate=name))
    assert str(error.value).startswith(f"algorithm.surrogate = '{name}': ")
    assert words in str(error.value) and '\n' not in str(error.value)


# on record


def begin(config, workdir, algorithm=None):
    """A workdir that has begun, without a step."""
    tiny_run.record(open_run(config, str(workdir), algorithm))
    with open(workdir / 'pieces.json', encoding='utf8') as file:
        return json.load(file)


def refusal(config, workdir, algorithm=None, steered=None):
    with pytest.raises(BadInput) as error:
        open_run(config, str(workdir), algorithm, steered=steered)
    return str(error.value)


def by_file(**changes):
    return tiny_run.config(algorithm__surrogate='squash.py:squash', **changes)


def test_a_runs_folder_says_which_pieces_it_has(folder):
    recorded = begin(by_file(), folder / 'run')
    digest = subprocess.run(['sha256sum', 'squash.py'], capture_output=True, text=True, check=True).stdout.split()[0]
    assert recorded['surrogate'] == [{'name': 'squash', 'file': str(folder / 'squash.py'), 'sha256': digest}]
    (advantage,) = recorded['advantage']
    assert advantage['module'] == 'grpo_jax.algorithms.advantages' and 'sha256' not in advantage
    with open(folder / 'run' / 'config.json', encoding='utf8') as file:
        assert json.load(file)['algorithm']['width'] == 0.3  # all numbers, of which none was set
    lines = '\n'.join(provenance.describe_run(str(folder / 'run')))
    assert f'algorithm.surrogate: squash of squash.py, sha256 {digest[:12]}' in lines
    assert ('surrogate', f'squash of squash.py, sha256 {digest[:12]}') in list(
        content.facts(read.read_variants([str(folder / 'run')])[0], ['grpo'])
    )
    assert list(provenance.verify(str(folder / 'run'))) == []
    (folder / 'run' / 'pieces.json').write_text('{"surrogate": [3]}')
    assert 'pieces of the run' in refusal(by_file(), folder / 'run')
    assert any('pieces of the run' in note for note in read.read_run(str(folder / 'run')).notes)


def test_an_edited_file_is_refused_and_a_moved_one_is_not(folder):
    begin(by_file(), folder / 'run')
    (folder / 'moved').mkdir()
    shutil.move(folder / 'squash.py', folder / 'moved' / 'squash.py')
    moved = tiny_run.config(algorithm__surrogate='moved/squash.py:squash')
    tiny_run.record(open_run(moved, str(folder / 'run')))
    (folder / 'moved' / 'squash.py').write_text(SQUASH.replace('jnp.tanh', 'jnp.sin'))
    for steered in (None, Steering(amend=True)):
        text = refusal(moved, folder / 'run', steered=steered)
        assert "algorithm.surrogate is 'squash of squash.py, sha256 " in text and '\n' not in text
        assert "and not 'squash of squash.py, sha256 " in text and 'branch=DIR' in text
    assert "squash.py:squash' and not 'clip'" in refusal(tiny_run.config(), folder / 'run')


def test_another_number_is_amended(folder):
    begin(by_file(), folder / 'run')
    assert 'Steering(amend=True)' in refusal(by_file(algorithm__width=0.4), folder / 'run')
    steered = Steering(amend=True)
    tiny_run.record(open_run(by_file(algorithm__width=0.4), str(folder / 'run'), steered=steered), 3, steered)
    (event,) = recorded_events(folder / 'run')
    assert (event['key'], event['old'], event['new']) == ('algorithm.width', 0.3, 0.4)


def test_an_algorithm_that_was_given_is_the_runs_from_then_on(tmp_path):
    config = tiny_run.config()
    made = algorithms.make(config.algorithm)
    given = made._replace(surrogate=squash)
    recorded = begin(config, tmp_path / 'run', given)
    assert recorded['surrogate'][0]['name'] == 'squash' and len(recorded['surrogate'][0]['sha256']) == 64
    with open(tmp_path / 'run' / 'config.json', encoding='utf8') as file:
        section = json.load(file)['algorithm']
    assert section['surrogate'] == f'{__name__}:squash' and section['width'] == 0.3
    assert not open_changes(config, str(tmp_path / 'run'), given)  # the same goes on
    text = refusal(config, tmp_path / 'run')  # left out
    assert f"algorithm.surrogate is '{__name__}:squash' and not 'clip'" in text and 'branch=DIR' in text

    text = refusal(config, tmp_path / 'run', made._replace(surrogate=edited_squash()))  # of the same name
    assert "algorithm.surrogate is 'squash of " in text and "and not 'squash of " in text
    assert 'algorithm.kl_coef' in refusal(config, tmp_path / 'run', given._replace(kl_coef=0.2))
    plain = tmp_path / 'plain'
    begin(config, plain)
    assert "algorithm.surrogate is 'clip' and not" in refusal(config, plain, given)
    lines = list(provenance.describe_differences(str(plain), str(tmp_path / 'run')))
    assert any(line.startswith("piece algorithm.surrogate: 'clip' became 'squash of ") for line in lines)


def edited_squash():
    def squash(ratio, advantages, *, width=0.3):
        return -advantages * width * jnp.sin((ratio - 1) / width)

    return squash


def make_squash(width):
    def inner(ratio, advantages):
        return -advantages * width * ratio

    return inner


def test_a_digest_knows_what_a_function_closes_over_and_functions_without_source():
    first, again, second = (pieces.describe(make_squash(width)) for width in (0.3, 0.3, 0.4))
    assert first == again != second
    names = [{}, {}, {}]
    for text, variables in zip(('x + 1', 'x + 1', 'x + 2'), names, strict=True):
        exec(f'def mine(x): return {text}', variables)
    first, again, second = (pieces.describe(variables['mine']) for variables in names)
    assert first == again != second


def test_a_piece_of_the_package_is_its_name_and_version():
    (described,) = algorithms.describe_pieces(algorithms.make(tiny_run.config().algorithm))['surrogate']
    assert described['name'] == 'clip' and set(described) == {'name', 'module', 'version'}


def programs(hashes):
    return {name: SimpleNamespace(hash=text) for name, text in hashes.items()}


def write_programs(workdir, hashes):
    with open(workdir / 'programs.json', 'w', encoding='utf8') as file:
        json.dump(hashes, file)


@pytest.mark.parametrize('own', [True, False])
def test_other_programs_are_refused_or_said_where_nothing_else_has_changed(folder, caplog, own, monkeypatch):
    monkeypatch.setattr(steering, '_describe_clone', lambda root: {})
    config, run = by_file() if own else tiny_run.config(), folder / 'run'
    begin(config, run)
    write_programs(run, {'update': 'a', 'sample': 'b'})
    recorded = open_run(config, str(run)).settings.recorded
    same, other = (programs({'update': text, 'sample': 'b', 'logprobs': 'c'}) for text in 'ax')
    steering.check_programs(str(run), recorded, same)
    steering.check_programs(str(run), recorded | {'steps': 9}, other)  # they may follow from that
    assert 'programs' not in caplog.text
    if own:
        with pytest.raises(BadInput, match=r"programs = \['update'\].* what squash of squash\.py, sha256 "):
            steering.check_programs(str(run), recorded, other)
    else:
        steering.check_programs(str(run), recorded, other)
        assert 'programs update differ from those of the last start' in caplog.text
    text = (run / 'environment.json').read_text()
    (run / 'environment.json').write_text(text.replace('"python": "', '"python": "0'))
    steering.check_programs(str(run), recorded, other)  # of another version of Python


# a ratio that is always 1


def ratio_free(logprobs, advantages):
    return -advantages * logprobs


@pytest.mark.parametrize('updates', [1, 2])
@pytest.mark.parametrize('piece, reads', [(squash, True), (ratio_free, False)])
def test_a_piece_of_ones_own_that_reads_a_ratio_of_1_is_said(piece, reads, updates):
    algorithm = algorithms.make(tiny_run.config().algorithm)._replace(surrogate=piece)
    said = checks.check_run(algorithm, group_size=4, prompts=4, updates=updates)
    assert any('squash reads a ratio that is 1 throughout' in text for text in said) == (reads and updates == 1)
    assert all('learner.minibatches=2' in text for text in said)


def test_a_bounded_piece_of_a_file_is_said_once_and_with_the_name_of_a_shipped_one_too():
    @pieces.properties(bounded=True)
    def clip(ratio, advantages, *, clip_low=0.2, clip_high=0.2):
        return -advantages * ratio

    algorithm = algorithms.make(tiny_run.config().algorithm)._replace(surrogate=clip)
    (text,) = checks.check_run(algorithm, group_size=4, prompts=4, updates=1)
    assert 'the bound of surrogate clip has no effect' in text


# the report


def with_pieces(folder, text):
    """Gives the hand-made run in a folder a piece of a user's, whose source is this text."""
    entry = {'name': 'half', 'module': '__main__', 'sha256': text * 64}
    with open(os.path.join(folder, 'pieces.json'), 'w', encoding='utf8') as file:
        json.dump({'surrogate': [entry]}, file)


def test_a_variant_and_its_baseline_are_two_curves(tmp_path):
    for seed in (0, 1, 2):
        runs.make(tmp_path / 'base' / str(seed), seed=seed)
        with_pieces(runs.make(tmp_path / 'half' / str(seed), seed=seed), 'a')
    variants = read.read_variants([str(tmp_path)])
    assert [(v.name, [run.config['seed'] for run in v.runs]) for v in variants] == [
        ('base', [0, 1, 2]), ('half', [0, 1, 2]),
    ]  # fmt: skip
    assert not any(run.notes for variant in variants for run in variant.runs)


def test_other_programs_are_another_curve(tmp_path):
    folders = [runs.make(tmp_path / str(seed), seed=seed) for seed in (0, 1, 2)]
    write_programs(tmp_path / '1', {'update': 'other'})
    assert [[run.config['seed'] for run in v.runs] for v in read.read_variants(folders)] == [[0, 2], [1]]
    # of another machine they are no sign of another algorithm
    (tmp_path / '1' / 'environment.json').write_text('[{"python": "3.13.0"}]')
    assert [[run.config['seed'] for run in v.runs] for v in read.read_variants(folders)] == [[0, 1, 2]]


def test_programs_of_several_machines_are_never_mixed(tmp_path):
    def curves(*ran):  # machine and programs of each run, which are its seeds 0, 1, ...
        folders = []
        for seed, (machine, programs) in enumerate(ran):
            folder = tmp_path / '-'.join(map('_'.join, ran)) / str(seed)
            folders.append(runs.make(folder, seed=seed))
            write_programs(folder, {'update': programs})
            (folder / 'environment.json').write_text(json.dumps([{'python': machine}]))
        return [[run.config['seed'] for run in variant.runs] for variant in read.read_variants(folders)]

    assert curves(('A', 'P1'), ('A', 'P2'), ('B', 'P2')) == [[0], [1, 2]]
    assert curves(('B', 'P2'), ('A', 'P1'), ('A', 'P2')) == [[0, 2], [1]]
    # which of A's programs is B's, nobody can know: B's is a curve of its own
    assert curves(('A', 'P1'), ('A', 'P2'), ('B', 'Q')) == [[0], [1], [2]]
    assert curves(('A', 'P1'), ('A', 'P1'), ('B', 'Q'), ('B', 'Q')) == [[0, 1, 2, 3]]
    assert curves(('A', 'P1'), ('B', 'P1'), ('B', 'P2'), ('C', 'P1')) == [[0, 1, 3], [2]]


def test_one_seed_twice_is_said_and_no_curve(tmp_path):
    folders = [runs.make(tmp_path / name / '0') for name in 'ab'] + [runs.make(tmp_path / 'b' / '1', seed=1)]
    variants = read.read_variants(folders)
    assert [[run.config['seed'] for run in v.runs] for v in variants] == [[0, 1], [0]]
    with open(report.write_report(folders), encoding='utf8') as file:
        assert 'have one seed, settings, pieces and programs, and are not one curve' in file.read()


# sweeps


@pytest.fixture(scope='module')
def small(tmp_path_factory):
    return small_model.write(tmp_path_factory.mktemp('small'))


def get_config(preset='dr_grpo', **changes):
    return tiny_run.config(preset=preset, **dict(steps=2, evaluation__prompts=4, log__rollouts=0) | changes)


def test_a_sweep_refuses_a_folder_with_other_settings_before_any_run(folder, monkeypatch):
    monkeypatch.setattr(train, 'run', lambda *_, **__: pytest.fail('refused before'))
    begin(get_config('squash.py'), folder / 'sweep' / 'squash' / '1')
    with pytest.raises(BadInput, match=r'squash/1.*optimizer\.learning_rate is 0\.0003 and not 0\.5'):
        sweep.run(lambda preset: get_config(preset, optimizer__learning_rate=0.5), ['squash.py'], 2, 'sweep')
    (folder / 'squash.py').write_text(SQUASH.replace('jnp.tanh', 'jnp.sin'))
    with pytest.raises(BadInput, match=r'algorithm\.surrogate is .squash of squash\.py'):
        sweep.run(get_config, ['grpo', 'squash.py'], 2, 'sweep')
    assert os.listdir('sweep') == ['squash']


def test_a_failure_is_said_at_once_and_rows_print_as_a_table(folder, monkeypatch, capsys):
    def fail(config, workdir, **_):
        raise FloatingPointError(f'of {os.path.basename(os.path.dirname(workdir))}')

    monkeypatch.setattr(train, 'run', fail)
    assert sweep.choose_presets('grpo,squash.py') == ['grpo', 'squash.py']
    rows = sweep.run(get_config, ['grpo', 'squash.py'], 1, 'sweep')
    lines = capsys.readouterr().err.splitlines()
    assert lines.index('grpo, seed 0, failed: of grpo') < lines.index('2 of 2: squash, seed 0')
    assert 'squash' in str(rows) and '1/1 failed' in str(rows) and str(rows).count('\n') > 3


def test_two_presets_of_one_name_are_refused(folder):
    (folder / 'grpo.py').write_text(SQUASH)
    with pytest.raises(BadInput, match='grpo'):
        sweep.run(get_config, ['grpo.py'], 1, 'sweep')
    assert not os.path.exists('sweep')


def test_a_finished_cold_start_is_not_compiled_again(small, tmp_path, monkeypatch):
    config = get_config(model__path=small, supervised__updates=2)
    state = supervised.run(config, str(tmp_path))
    monkeypatch.setattr(compiled.Executable, 'compile', lambda self: pytest.fail(f'{self.name} is compiled'))
    assert int(supervised.run(config, str(tmp_path)).step) == int(state.step) == 2


# whole lives


def flags_of(small):
    return [
        *tiny_run.FLAGS,
        f'--config.model.path={small}',
        '--config.rollout.max_tokens=12',
        '--config.supervised.updates=0',
        '--config.evaluation.prompts=4',
        '--config.evaluation.samples=4',
        '--config.checkpoint.every=2',
        '--config.learner.minibatches=2',
        '--config.steps=4',
    ]


def command(name, *arguments):
    """(status, stdout, stderr) of a command in the user's folder."""
    done = subprocess.run(
        [sys.executable, '-m', 'grpo_jax', name, *arguments], capture_output=True, text=True, timeout=600
    )
    assert 'Traceback' not in done.stderr
    return done.returncode, done.stdout, done.stderr


def begin_and_kill(*arguments):
    """kill -9 of a training after its second step."""
    process = subprocess.Popen(
        [sys.executable, '-m', 'grpo_jax.train', *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    path = os.path.join(arguments[-1].partition('=')[2], 'metrics.jsonl')
    while process.poll() is None and not (os.path.exists(path) and len(tiny_run.rows(os.path.dirname(path))) > 1):
        pass
    process.kill()
    assert process.wait() == -9, 'it ended before it could be killed'


@pytest.mark.parametrize(
    'chosen',
    [
        ['--config=arithmetic', '--config.algorithm.surrogate=squash.py:squash', '--config.algorithm.width=0.5'],
        ['--config=arithmetic:squash.py'],
    ],
    ids=['piece', 'preset'],
)
def test_a_variant_of_a_file_lives_by_command(long, folder, small, chosen):
    own = flags_of(small)
    begin_and_kill(*chosen, *own, '--workdir=runs/killed')
    assert command('train', *chosen, *own, '--workdir=runs/killed')[0] == 0  # goes on
    assert command('train', *chosen, *own, '--workdir=runs/straight')[0] == 0
    killed, straight = (tiny_run.rows(f'runs/{name}') for name in ('killed', 'straight'))
    assert killed == straight and len(killed) == 4
    assert command('train', '--config=arithmetic', *own, '--workdir=runs/base')[0] == 0
    status, path, _ = command('report', '--workdir=runs/killed', '--against=runs/base')
    with open(path.strip(), encoding='utf8') as file:
        page = file.read()
    assert status == 0 and 'squash of squash.py, sha256 ' in page and 'killed' in page and 'base' in page
    assert command('evaluate', '--workdir=runs/killed')[0] == 0
    status, out, _ = command('provenance', 'runs/base', 'runs/killed')
    assert status == 0 and "piece algorithm.surrogate: 'clip' became 'squash of squash.py" in out
    # with other pieces it does not go on
    status, _, errors = command('train', '--config=arithmetic', *own, '--workdir=runs/killed')
    assert status == 2 and "algorithm.surrogate is 'squash.py:squash' and not 'clip'" in errors
    (folder / 'squash.py').write_text(SQUASH.replace('jnp.tanh', 'jnp.sin'))
    status, _, errors = command('train', *chosen, *own, '--workdir=runs/killed')
    assert status == 2 and "algorithm.surrogate is 'squash of squash.py, sha256 " in errors
    assert command('train', *chosen, *own, '--config.steps=5', '--branch=runs/y', '--workdir=runs/killed')[0] == 0
    (event,) = [row for row in recorded_events('runs/y') if row['event'] == 'branched']
    assert event['changes']['algorithm.surrogate'][0].startswith('squash of squash.py, sha256 ')


def test_a_variant_of_a_file_is_swept_beside_its_baseline_by_command(long, folder, small):
    chosen = ['--config=arithmetic', '--presets=dr_grpo,squash.py', '--seeds=2']
    arguments = [*chosen, '--workdir=runs/sweep', *flags_of(small)]
    status, out, errors = command('sweep', *arguments)
    assert status == 0, errors
    assert 'squash' in out and 'dr_grpo' in out
    variants = read.read_variants(['runs/sweep'])
    assert [(v.name, [run.config['seed'] for run in v.runs]) for v in variants] == [
        ('dr_grpo', [0, 1]), ('squash', [0, 1]),
    ]  # fmt: skip
    (folder / 'squash.py').write_text(SQUASH.replace('jnp.tanh', 'jnp.sin'))
    status, _, errors = command('sweep', *arguments)
    assert status == 2 and "algorithm.surrogate is 'squash of squash.py" in errors


def test_a_variant_of_a_notebook_lives_too(long, folder, small):
    def own_config(preset='dr_grpo'):
        return get_config(preset, model__path=small, learner__minibatches=2, steps=4)

    config = own_config()
    variant = algorithms.make(config.algorithm)._replace(surrogate=squash)

    def kill(step, row):
        if step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train.run(config, 'runs/killed', algorithm=variant, on_step=kill)
    train.run(config, 'runs/killed', algorithm=variant)
    train.run(config, 'runs/straight', algorithm=variant)
    train.run(config, 'runs/base')
    killed, straight, base = (tiny_run.rows(f'runs/{name}') for name in ('killed', 'straight', 'base'))
    assert killed == straight != base and len(killed) == 4
    assert [v.name for v in read.read_variants(['runs/killed', 'runs/base'])] == ['killed', 'base']
    assert command('evaluate', '--workdir=runs/killed')[0] == 0
    for other in ({}, {'algorithm': variant._replace(surrogate=make_squash(0.2))}):
        with pytest.raises(BadInput, match=r'algorithm\.surrogate is .*squash.* and not .*branch=DIR'):
            train.run(config, 'runs/killed', **other)
    status, _, errors = command('train', '--config=arithmetic', *flags_of(small), '--workdir=runs/killed')
    assert status == 2 and ':squash' in errors
    rows = sweep.run(own_config, ['dr_grpo'], 2, 'runs/sweep', {'own': variant})
    assert {row['preset']: row['status'] for row in rows} == {'dr_grpo': '2/2', 'own': '2/2'}
    assert [v.name for v in read.read_variants(['runs/sweep'])] == ['dr_grpo', 'own']
