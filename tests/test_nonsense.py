"""Nonsense in any key of the config is refused before any work, in one line with the key, or ALLOWED has the reason."""

import functools
import json
import logging
import math
import random
import subprocess
import sys
import zlib

from absl import flags
from ml_collections import ConfigDict
import pytest

from grpo_jax import algorithms, data, ranges, train
from grpo_jax.algorithms import pieces
from grpo_jax.algorithms.algorithm import MODULES
from grpo_jax.errors import BadInput
from grpo_jax.models import hf
from grpo_jax.run import config_file
from grpo_jax.run.open import make_algorithm, open_run
from grpo_jax.run.settings import Settings
from tests import doc_examples, tiny_run
from tests.doc_examples import ROOT

NONSENSE = {
    'nan': math.nan,
    'infinite': math.inf,
    'negative': -1,
    'fraction': -0.5,
    'zero': 0,
    'huge': 10**30,
    'text': 'nonsense',
    'empty': '',
    'None': None,
    'True': True,
    'list': [1],
    'tuple': (),
    'dict': {'a': 1},
}
# (nonsense elsewhere, why it makes sense here, the keys)
ALLOWED = [
    (
        'zero',
        'none, never, all of them, or off',
        'collection.max_staleness collection.max_age collection.reference_every collection.retire_above '
        'collection.revisit '
        'collection.exploration collection.seeding learner.chunk '
        'data.options.blurts '
        'data.options.wrong data.options.slips data.options.share data.options.exchanges evaluation.every '
        'learner.pack_columns log.hang_after log.rollouts reward.length_shaping_weight reward.options.model.cap '
        'rollout.cache_gib rollout.min_p rollout.min_tokens rollout.thinking_tokens rollout.top_k supervised.updates '
        'algorithm.kl_target algorithm.advantage_clip algorithm.entropy_coef algorithm.entropy_target '
        'algorithm.critic_warmup algorithm.value_clip algorithm.sharpen algorithm.sharpen_cap '
        'algorithm.efficient_share algorithm.efficient_alpha algorithm.entropy_penalty algorithm.llds_coef '
        'algorithm.positive_nll_coef algorithm.distill_coef algorithm.teacher_coef algorithm.teacher_top_k '
        'algorithm.behaviour_coef algorithm.kl_cov_coef reward_model.replay '
        'reward.self_test reward.retries reward.most_missing learner.max_bad_steps log.kl_every '
        'log.probe_every model.lora.rank mesh.data mesh.sampler data.epochs evaluation.top_p evaluation.max_tokens '
        'evaluation.temperature data.held_out',
    ),
    ('zero', 'the first', 'seed reward.options.model.device reward.options.process.device'),
    ('zero', 'to keep nothing of the past', ' '.join(f'{name}.{key}' for name in (
        'optimizer', 'critic_optimizer', 'supervised.optimizer') for key in ('b1', 'b2'))),
    ('zero', 'learns nothing: for completions of a policy as it is', ' '.join(
        f'{name}.{key}' for name in ('optimizer', 'critic_optimizer', 'supervised.optimizer')
        for key in ('learning_rate', 'warmup', 'warmup_ratio', 'weight_decay'))),
    ('zero', 'an end of the range', 'algorithm.discount algorithm.baseline_decay algorithm.critic_lambda '
        'algorithm.gae_lambda '
        'algorithm.std_ddof algorithm.entropy_cut algorithm.clip_low algorithm.clip_high algorithm.icepop_low '
        'algorithm.geometric_low algorithm.veto_below algorithm.opsm_delta diagnose.entropy_floor '
        'diagnose.length_correlation diagnose.gain diagnose.distinct'),
    *((name, 'a reward, or what it is measured from, may be any number', 'reward.correct_at reward.failed '
        'reward.truncated_reward reward.options.countdown.partial reward.options.model.mean algorithm.baseline '
        'algorithm.covariance_low') for name in ('zero', 'negative', 'fraction')),
    ('negative', "chosen by the step's sizes", 'learner.pack_columns'),
    ('negative', 'chosen by what is paid', 'log.kl_every'),
    *((name, 'a penalty', 'reward.length_shaping_weight') for name in ('negative', 'fraction')),
    *((name, 'pays for a narrow distribution', 'algorithm.entropy_coef') for name in ('negative', 'fraction')),
    ('huge', 'a bound that nothing reaches', 'optimizer.max_grad_norm critic_optimizer.max_grad_norm '
        'supervised.optimizer.max_grad_norm algorithm.advantage_clip algorithm.value_clip algorithm.entropy_cut '
        'algorithm.log_clip algorithm.clip_high algorithm.dual_clip algorithm.cispo_cap algorithm.dppo_low '
        'algorithm.dppo_high algorithm.rho_max algorithm.icepop_high algorithm.product_max algorithm.geometric_high '
        'algorithm.opsm_delta algorithm.second_moment algorithm.covariance_high data.options.steps '
        'diagnose.entropy_floor diagnose.kl_token diagnose.kl_sequence diagnose.kl_unverified diagnose.length_growth '
        'diagnose.variance_high diagnose.part_growth '
        'diagnose.displacement diagnose.sampler_gap diagnose.gradient_spike'),
    ('text', 'any text', 'data.system reward_model.separator rollout.thinking_start rollout.thinking_end log.project '
        'log.run_name'),
    ('text', 'a place or a name that is looked up when its reader is chosen, or when the data are read',
        'reward.options.model.folder reward.options.process.folder data.options.folder data.options.name '
        'data.options.operations data.train_split data.test_split'),
    ('empty', 'none', 'data.path data.revision data.system reward.length_shaping reward.step_rewards reward.verifier '
        'rollout.cache_dtype rollout.weights_dtype rollout.thinking_start rollout.thinking_end '
        'data.test_split reward.options.model.folder '
        'reward.options.process.folder data.options.folder data.options.name reference.path '
        'model.lora.path teacher.path checkpoint.best log.run_name'),
    ('tuple', 'none', 'learner.offload rollout.stop_strings algorithm.regularizers log.trackers'),
    ('True', 'a choice of two', 'data.chat data.strict data.options.tags data.options.results model.random_init '
        'reward.options.code.all_pass model.lora.rslora '
        'reward.options.model.park reward.options.process.park reward.options.process.centred '
        'rollout.accept_bias data.options.short algorithm.kl_corrected '
        'algorithm.dpo_length_norm'),
]  # fmt: skip
MEANINGFUL = {(key, name) for name, _, names in ALLOWED for key in names.split()}
# what makes a number of config.algorithm one that is read, where no piece's signature has it
GAE, BONUS = {'advantage': 'gae'}, {'regularizers': ('entropy_bonus',)}
PLAIN = ('kl_coef', 'kl_target', 'kl_placement', 'ratio_base', 'denominator', 'advantage_clip', 'teacher_coef')
READ = {
    **{number: {} for number in (*MODULES, *PLAIN)},
    **{number: GAE for number in ('discount', 'critic_lambda', 'critic_warmup', 'value_clip')},
    'baseline_decay': {'advantage': 'moving_mean'},
    **{number: BONUS for number in ('entropy_coef', 'entropy_target')},
    'teacher_top_k': {'regularizers': ('distill',)},
    'entropy_delta': BONUS | {'entropy_target': 0.5},
    'kl_horizon': {'kl_target': 0.1},
    'kl_corrected': {'correction': 'truncated'},
}
BASE = tiny_run.config(algorithm__fixed_length=12)


def keys(tree, prefix=''):
    """The dotted keys of nested sections, and of the sections themselves."""
    for name, value in tree.items():
        yield f'{prefix}{name}'
        if hasattr(value, 'items'):
            yield from keys(value, f'{prefix}{name}.')


def put(config, key, value):
    """The config with a value in place of a key's, whatever its type."""
    *path, name = key.split('.')
    section = config
    for part in path:
        section = section[part]
    with section.ignore_type(), section.unlocked():
        del section[name]  # else the new value would be cast to the old one's type
        section[name] = value
    return config


def offenders(key, make, judge, named=None):
    """A line for each nonsense of a key that is judged otherwise than ALLOWED says, or in another form than a line."""
    lines = []
    for name in tried(key):
        value = NONSENSE[name]
        try:
            judge(put(make(), key, value))
        except BadInput as error:
            message = str(error)
            if (named or key, name) in MEANINGFUL:
                lines.append(f'{key} = {value!r} is allowed, and refused: {message}')
            elif not all(key in line or 'covariance_low' in line for line in message.splitlines()):
                lines.append(f'{key} = {value!r}: {message}')
        else:
            if (named or key, name) not in MEANINGFUL:
                lines.append(f'{key} = {value!r} is accepted')
    return lines


def tried(key):
    """The names of the nonsense that a key is given."""
    return list(NONSENSE)


def a_seventh(key):
    """As tried, for the suite without --long: another seventh for each key."""
    return list(NONSENSE)[zlib.crc32(key.encode()) % 7 :: 7]


def check(lines):
    if lines:
        pytest.fail('\n'.join(lines), pytrace=False)


TOKENIZERS = functools.cache(hf.load_tokenizer)


@pytest.fixture(autouse=True)
def quick(monkeypatch, request):
    """A tokenizer is read once; warnings of what is inert are no matter here; without --long a seventh is tried."""
    monkeypatch.setattr(hf, 'load_tokenizer', TOKENIZERS)
    if not request.config.getoption('--long'):
        monkeypatch.setattr(sys.modules[__name__], 'tried', a_seventh)
    logger = logging.getLogger('grpo_jax')
    logger.disabled = True
    yield
    logger.disabled = False


@pytest.mark.parametrize('section', [*(name for name in BASE if name != 'algorithm'), 'reward.options'])
def test_nonsense_in_any_key_is_refused(section, tmp_path):
    def make():
        return tiny_run.config(algorithm__fixed_length=12)

    def judge(config):
        open_run(config, str(tmp_path / 'run'))

    own = {key: 'reward.options' if key.startswith('reward.options.') else key.split('.')[0] for key in keys(BASE)}
    every = [key for key, home in own.items() if home == section]
    check([line for key in every for line in offenders(key, make, judge)])
    assert not (tmp_path / 'run').exists()


def readers():
    """Number of config.algorithm -> the changes of preset grpo with which it is read."""
    read = dict(READ)
    for key, module in MODULES.items():
        for name, piece in pieces.list_pieces(module).items():
            for number in pieces.numbers(piece):
                read.setdefault(number, {key: (name,) if key == 'regularizers' else name})
    return read


def with_reader(changes):
    return tiny_run.config(preset='grpo', **{f'algorithm__{name}': value for name, value in changes.items()})


def test_every_number_of_the_algorithm_has_a_reader_here():
    assert set(readers()) >= set(BASE.algorithm)
    for changes in readers().values():
        make_algorithm(with_reader(changes))


@pytest.mark.parametrize('initial', 'abcdefghiklmnoprstvw')
def test_nonsense_in_a_number_of_the_algorithm_that_is_read_is_refused(initial):
    lines = []
    for number, changes in readers().items():
        if number[0] == initial:
            lines += offenders(f'algorithm.{number}', lambda c=changes: with_reader(c), make_algorithm)
    check(lines)


def test_all_initials_of_the_algorithms_keys_were_tried():
    assert {number[0] for number in readers()} <= set('abcdefghiklmnoprstvw')


@pytest.mark.parametrize('name', [name for name in config_file.experiments() if name != 'arithmetic_iterative'])
def test_nonsense_in_an_option_of_an_experiments_data_is_refused_before_any_row_is_read(name):
    def make():
        config = config_file.read_config(config_file.locate(name))
        config.data.path = ''  # no hub
        return config

    def judge(config):
        data.locate(Settings.from_config(config).data)

    options = [f'data.options.{key}' for key in make().data.options]
    check([line for key in options for line in offenders(key, make, judge)])


def test_every_exception_is_one_of_a_key_that_is_there():
    experiments = [config_file.read_config(config_file.locate(name)) for name in config_file.experiments()]
    there = {*keys(BASE), *(f'data.options.{key}' for config in experiments for key in config.data.options)}
    assert {key for key, _ in MEANINGFUL} <= there


@pytest.mark.parametrize(
    'changes, message',
    [
        ({'optimizer__learning_rate': -1.0}, 'optimizer.learning_rate = -1.0: must be a number at least 0'),
        ({'rollout__temperature': 1e-9}, 'rollout.temperature = 1e-09: must be a number at least 0.01'),
        ({'optimizer__max_grad_norm': 0.0}, 'optimizer.max_grad_norm = 0.0: must be a number above 0'),
        ({'optimizer__eps': 1e-60}, 'optimizer.eps = 1e-60: must be a number above 0'),  # which is 0 in float32
        ({'optimizer__b1': 1 - 1e-12}, 'optimizer.b1 = 0.999.*: must be a number .* at most 0.999999'),  # 1 in float32
        ({'steps': 10**5000}, 'steps = int: must be a whole number'),  # which Python does not write out
        ({'checkpoint__keep': 0}, 'checkpoint.keep = 0: must be a whole number at least 1'),
        ({'seed': 2**32}, 'seed = 4294967296: must be a whole number at least 0 and at most 4294967295'),
        ({'algorithm__clip_low': 1.5, 'preset': 'grpo'}, 'algorithm.clip_low = 1.5: bounds nothing'),
        ({'algorithm__gae_lambda': 2.0, 'preset': 'ppo'}, 'algorithm.gae_lambda = 2.0: .* at most 1'),
        ({'algorithm__std_eps': 0.0, 'preset': 'grpo'}, 'algorithm.std_eps = 0.0: must be a number above 0'),
        ({'algorithm__vespo_powers': (1.0, 2.0, 3.0)}, 'algorithm.vespo_powers = .*: nothing reads it'),
        ({'algorithm__vespo_powers': (1.0,), 'algorithm__surrogate': 'vespo'}, r'must be a tuple \(a number .*, a'),
        ({'reward__parts': (('numeric', 1.0), ('numeric', 0.5))}, 'reward.parts = .*: has numeric twice'),
        ({'reward__parts': ('numeric', 1.0)}, 'reward.parts = .*: must be pairs'),
        ({'reward__parts': (('numeric', math.nan),)}, 'reward.parts = nan: must be a finite number'),
        ({'reward__parts': (('build', 1.0),)}, "reward.parts = 'build': no such file"),
        ({'reward__options__cosine__right': (1.0, 2.0, 3.0)}, r'cosine.right = .*: must be a tuple.* of 2'),
        ({'reward__options__format__tags': ()}, r'format.tags = \(\): must be a tuple.* not empty'),
        ({'reward__options': {'format': {'tag': ('a',)}}}, 'format.tag = .*: is no key; did you mean tags'),
        ({'rollout__stop_strings': ('a', '')}, 'rollout.stop_strings = .*: must be a tuple, each a text'),
        ({'learner__offload': ('optimizer', 'policy')}, 'learner.offload = .*: must be .* optimizer or reference'),
        ({'data__template': 'no place'}, "data.template = 'no place': must hold {prompt}"),
        ({'data__name': '../evil'}, "data.name = '../evil': no such file"),
        ({'data__name': 'dataset'}, 'data.options.digits = 1: is no key'),
        ({'rollout__group_size': 10**9}, 'rollout.group_size = 4000000000: are rows of .* 18 tokens'),
        ({'supervised__batch': 2**27}, 'supervised.batch = 134217728: are rows'),
        ({'learner__minibatches': 3}, 'learner.minibatches = 3: must divide the 4 prompts of a step'),
        (
            {'supervised__updates': 1, 'supervised__batch': 6, 'mesh__data': 4},
            'supervised.batch = 6: must be a multiple of',
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else ', '.join(value),
)
def test_known_nonsense_is_refused_before_anything_is_compiled(changes, message, tmp_path):
    with pytest.raises(BadInput, match=message):
        open_run(tiny_run.config(**changes), str(tmp_path / 'run'))
    assert not (tmp_path / 'run').exists()


def test_a_section_without_a_key_is_refused():
    for key in (
        'steps',
        'rollout',
        'rollout.max_tokens',
        'algorithm.value_clip',
        'algorithm.surrogate',
        'log.rollouts',
    ):
        config = tiny_run.config()
        *path, name = key.split('.')
        with config.unlocked():
            del (config[path[0]] if path else config)[name]
        with pytest.raises(BadInput, match=f'{key} is missing'):
            make_algorithm(config)


def of_range(low: ranges.Share = 0.5, *, high: float | None = None, names: 'Unknown' = (), plain=1):  # noqa: F821
    """Parameters as a user writes them: annotated, with a name that nobody knows, or plainly."""


@pytest.mark.parametrize(
    'values, message',
    [
        ({'low': 0.5, 'high': None, 'names': object(), 'plain': 'text'}, None),
        ({'high': 2}, None),
        ({'low': 1.01}, 'own.low = 1.01: must be a number at least 0 and at most 1'),
        ({'low': True}, 'own.low = True'),
        ({'high': 'x'}, "own.high = 'x': must be a number or None"),
        ({'high': 1e39}, 'own.high = 1e.39'),
        ({'unknown': 3}, None),
    ],
)
def test_what_is_annotated_is_checked_and_nothing_else(values, message):
    if message is None:
        ranges.check(of_range, values, 'own')
    else:
        with pytest.raises(BadInput, match=message):
            ranges.check(of_range, values, 'own')


# the command line


def ended(capsys, *arguments):
    """What a command line comes to: the config, or the line that it ends with."""
    capsys.readouterr()
    try:
        with doc_examples.parsed('show', arguments):
            config = flags.FLAGS.config
            make_algorithm(config)
            return config
    except BadInput as error:
        line, *others = (f'error: {refusal}' for refusal in error.refusals)
        assert len({*others}) == len(others) < 5, error
    except SystemExit as stop:
        assert stop.code == 2
        line = capsys.readouterr().err.removesuffix('\n')
    assert line.startswith('error: ') and '\n' not in line and len(line) < 3000, line
    return line


@pytest.mark.parametrize(
    'argument, words',
    [
        ('reward.parts=numeric', 'reward.parts'),
        ("reward.parts=(('numeric', 1.0))", 'reward.parts'),
        ("reward.parts=('numeric', 1.0", 'reward.parts'),
        ('reward.parts=', 'reward.parts'),
        ('reward.parts=' + '(' * 500, 'reward.parts'),
        ("reward.parts=__import__('os')", 'reward.parts'),
        ('reward.parts=5', 'reward.parts'),
        ('reward.parts={}', 'reward.parts'),
        ('reward.parts=((None, None),)', 'reward.parts'),
        ('reward.parts[0]=5', 'reward.parts'),
        ('learner.offload[3]=x', 'index'),
        ('x=1', 'config has no x'),
        ('rollout=1', 'rollout'),
        ('rollout={}', 'rollout'),
        ('rollout.max_tokens.x=1', 'rollout.max_tokens.x'),
        ('.steps=3', 'config has no'),
        ('=3', ''),
        ('__class__=3', 'config has no __class__'),
        ('data.name=../evil', '../evil'),
        ('data.options.sources=5', 'sources'),
        ('data.options=5', 'data.options'),
        ('learner.offload=(optimizer', 'learner.offload'),
        ('rollout.stop_strings=', 'rollout.stop_strings'),
        ('algorithm.vespo_powers=(1,(2', 'algorithm.vespo_powers'),
        ('steps=' + '9' * 6000, 'steps'),
        ('steps=' + '9' * 400, 'steps'),
        ('steps', 'steps'),
        ('steps=many', 'many'),
        ('rollout.cache_gib=nan', 'rollout.cache_gib'),
        ('model.random_init=maybe', 'model.random_init'),
        ('reward.options.cosine.right=(1', 'reward.options.cosine.right'),
    ],
    ids=lambda text: text[:40],
)  # fmt: skip
def test_an_odd_override_ends_in_one_line(argument, words, capsys):
    line = ended(capsys, '--config=arithmetic', f'--config.{argument}')
    assert isinstance(line, str) and words in line, line


@pytest.mark.parametrize('preset', ['nope', '../x', 'a.b', '\0', 'grpo ', '__init__', 'a:b', '😀', '/', '.'])
def test_an_odd_preset_ends_in_one_line(preset, capsys):
    line = ended(capsys, f'--config=arithmetic:{preset}')
    assert isinstance(line, str) and ('no such file' in line or 'apply' in line), line


@pytest.mark.parametrize('file', ['', ':', '/', 'README.md', 'nope', '\0', 'configs/algorithms/grpo.py'])
def test_an_odd_config_ends_in_one_line(file, capsys):
    assert isinstance(ended(capsys, f'--config={file}'), str)


ODD = ['optimizer.learning_rate=-1', 'seed=-1']


def test_the_command_ends_with_status_2_and_a_line_for_each(tmp_path):
    words = [sys.executable, '-m', 'grpo_jax.train', '--config=arithmetic', f'--workdir={tmp_path / "run"}']
    words += [f'--config.{argument}' for argument in ODD]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stdout == ''
    lines = [line for line in done.stderr.splitlines() if not line.startswith('reading the ')]
    assert len(lines) == len(ODD) and all(line.startswith('error: ') for line in lines), lines
    assert all(any(argument.split('=')[0] in line for line in lines) for argument in ODD)
    assert not (tmp_path / 'run').exists()


# many overrides at random

TEXTS = [
    'nan',
    'inf',
    '-1',
    '-0.5',
    '0',
    '1',
    '2',
    '0.5',
    '3.0',
    '1e-9',
    '1e30',
    '9' * 30,
    'nonsense',
    '',
    'None',
    'True',
]
TEXTS += ['()', '(1,)', "('a',)", '((', '{}', '[1]']


def draw(rng):
    """Overrides of one to four keys: nonsense, or near to what was there, or as it is."""
    every = [key for key in keys(BASE) if not hasattr(tiny_value(key), 'items')]
    for key in rng.sample(every, rng.randint(1, 4)):
        value = tiny_value(key)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        near = [value * 2, value + 1, type(value)(value / 2)] if number else [value, value]
        yield f'--config.{key}={rng.choice([rng.choice(TEXTS), *near, *near])}'


def tiny_value(key):
    value = BASE
    for part in key.split('.'):
        value = value[part]
    return value


def assert_makes_sense(config):
    """What holds of any config that is accepted."""
    ranges.check_finite(config)
    settings, algorithm = Settings.from_config(config), make_algorithm(config)
    assert min(settings.steps, settings.group_size, settings.data.prompts_per_step, settings.checkpoint.keep) >= 1
    assert 0 < settings.sampling.temperature <= 100 and 0 < settings.sampling.top_p <= 1
    for optimization in (settings.optimizer, settings.critic_optimizer, settings.supervised.optimizer):
        assert optimization.max_grad_norm > 0 and 0 <= optimization.learning_rate <= 10
        assert 0 <= optimization.b1 < 1 and 0 <= optimization.b2 < 1 and optimization.eps > 0
    assert all(math.isfinite(weight) for _, weight in settings.rewards.parts)
    assert len(dict(settings.rewards.parts)) == len(settings.rewards.parts)
    assert isinstance(algorithm, algorithms.Algorithm)
    recorded = ConfigDict(json.loads(json.dumps(config.to_dict(), allow_nan=False)))
    sections = dict(algorithm=None, mesh=None, rewards=None, config=None)  # have lists where a config has tuples
    assert Settings.from_config(recorded)._replace(**sections) == settings._replace(**sections)


@pytest.mark.parametrize('seed', range(10))
def test_thirty_random_overrides_end_in_one_line_or_in_a_config_that_makes_sense(seed, capsys, request):
    if seed > 2:
        request.getfixturevalue('long')
    rng, accepted = random.Random(seed), 0
    for _ in range(30):
        config = ended(capsys, '--config=arithmetic', *draw(rng))
        if not isinstance(config, str):
            accepted += 1
            assert_makes_sense(config)
    assert 3 <= accepted <= 27  # a draw that were all of one kind would show nothing


@pytest.mark.parametrize('seed', range(10))
def test_what_is_accepted_of_random_overrides_trains_a_step(seed, capsys, tmp_path, long):
    rng, trained = random.Random(seed), 0
    while trained < 2:
        overrides = [argument for argument in draw(rng) if '.model.' not in argument]
        config = ended(capsys, '--config=arithmetic', *overrides)
        if isinstance(config, str):
            continue
        config.steps, config.supervised.updates, config.data.options.count = 1, min(config.supervised.updates, 1), 40
        config.evaluation.prompts, config.evaluation.samples = 4, 2
        config.data.prompts_per_step, config.rollout.group_size = 4, 4
        try:
            state = train.run(config, str(tmp_path / str(trained)))
        except BadInput:
            continue
        trained += 1
        assert int(state.step) == 1, overrides
