"""Each monitor speaks where it must, with the numbers, and is silent where it must be."""

import re
import shlex

from absl import flags
from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from grpo_jax import diagnose
from grpo_jax.configs import arithmetic, default
from grpo_jax.diagnose import MONITORS, Context
from grpo_jax.errors import BadInput
from grpo_jax.ranges import Kind
from grpo_jax.run.settings import Settings, kind_of
from tests import doc_examples
from tests.diagnose import streams
from tests.diagnose.streams import MUST, SILENT, rows

NAMES = [
    *('dead_all_right', 'dead_all_wrong', 'entropy_collapse', 'repetition', 'kl_runaway', 'length_hacking'),
    *('wrong_answers_growing', 'language_mixing', 'stagnation', 'hacked_part', 'likelihood_displacement'),
    *('sampler_mismatch', 'clip_saturation', 'inert_settings', 'loss_is_zero', 'gradient_spikes', 'truncation'),
    *('flaky_reward', 'dead_run', 'forgetting', 'overoptimization', 'falling_evaluation', 'data_exhausted'),
    *('large_updates', 'unverified_advantage', 'noisy_advantages', 'low_diversity', 'unverified_reward'),
    *('stale_tokens', 'correction_at_bound'),
]
SPEAKING = [(name, number) for name in MUST for number in range(len(MUST[name]))]
SPEECHLESS = [(name, number) for name in SILENT for number in range(len(SILENT[name]))]


def test_every_monitor_is_there_with_a_stream_in_which_it_speaks_and_one_in_which_it_does_not():
    assert set(MONITORS) == set(MUST) == set(SILENT) == set(NAMES)
    assert all(MUST.values()) and all(SILENT.values())


@pytest.mark.parametrize(('name', 'number'), SPEAKING)
def test_a_monitor_speaks_and_has_the_numbers(name, number):
    stream = MUST[name][number]
    diagnosis = MONITORS[name].judge(stream.rows, stream.context)
    assert diagnosis is not None
    assert stream.text in diagnosis.evidence
    assert diagnosis.monitor == name and diagnosis.step == stream.rows[-1]['step']
    assert all('\n' not in text and text for text in (diagnosis.seen, diagnosis.evidence, diagnosis.cause))
    assert '{' not in diagnosis.remedy


def test_every_answer_of_every_monitor_is_given_by_a_stream():
    given_answers = {
        (name, MONITORS[name].sign(stream.rows, stream.context).answer) for name in MUST for stream in MUST[name]
    }
    assert given_answers == {(name, answer) for name, monitor in MONITORS.items() for answer in monitor.answers}


@pytest.mark.parametrize(('name', 'number'), SPEECHLESS)
def test_a_monitor_is_silent_where_nothing_is_wrong(name, number):
    stream = SILENT[name][number]
    for count in range(len(stream.rows) + 1):
        known = [row for row in stream.context.evaluations if row['step'] < count]
        assert MONITORS[name].judge(stream.rows[:count], stream.context._replace(evaluations=known)) is None


def test_no_monitor_speaks_in_a_healthy_run():
    context = streams.RUN._replace(evaluations=streams.evaluations((0, 0.32), (20, 0.7), (40, 0.88)))
    assert diagnose.history(rows(), context) == []


@pytest.mark.parametrize('name', sorted(MONITORS))
def test_a_monitor_is_silent_without_its_metrics_and_on_nulls(name):
    for stream in MUST[name]:
        context = stream.context._replace(evaluations=())
        bare = [{'step': row['step'], 'finite': 1.0} for row in stream.rows]
        nulls = [{key: value if key == 'step' else None for key, value in row.items()} for row in stream.rows]
        assert MONITORS[name].judge(bare, context) is None
        assert MONITORS[name].judge(nulls, context) is None
        assert MONITORS[name].judge([], context) is None


def test_what_a_monitor_reads_is_what_it_is_said_to_read():
    """Without the metrics that it is said to read, each falls silent."""
    for name, monitor in MONITORS.items():
        names = [metric.replace('PART', 'format').replace('VERIFIER', 'numeric') for metric in monitor.reads]
        for stream in MUST[name]:
            table = [{key: value for key, value in row.items() if key not in names} for row in stream.rows]
            context = stream.context._replace(evaluations=()) if 'evaluation/pass@1' in names else stream.context
            assert monitor.judge(table, context) is None, name


def test_a_diagnosis_is_told_once_while_it_lasts():
    stream = MUST['truncation'][0]
    table = rows(30, truncated=streams.from_step(3, 0.4, 0.0))
    steps = [d.step for d in diagnose.history(table, stream.context) if d.monitor == 'truncation']
    assert steps == [4]


def test_a_diagnosis_that_comes_and_goes_is_told_again_only_after_a_while():
    columns = {'truncated': lambda step: 0.4 if step % 4 < 2 or step > 90 else 0.0}
    steps = [d.step for d in diagnose.history(rows(40, **columns), streams.RUN) if d.monitor == 'truncation']
    assert steps == [1]
    columns = {'truncated': lambda step: 0.4 if step in (3, 4, 40, 41) else 0.0}
    steps = [d.step for d in diagnose.history(rows(50, **columns), streams.RUN) if d.monitor == 'truncation']
    assert steps == [4, 41]  # 37 steps apart, and diagnose.repeat_after is 20


def test_the_last_evaluation_of_a_run_is_judged_though_no_row_follows():
    context = streams.RUN._replace(evaluations=streams.evaluations((0, 0.95), (40, 0.8)))
    (diagnosis,) = diagnose.history(rows(), context)
    assert (diagnosis.monitor, diagnosis.step) == ('falling_evaluation', 40)


COLUMN = st.sampled_from([None, 0.0, 0.02, 0.5, 1.0, 30.0])


@settings(max_examples=40, deadline=None)
@given(
    columns=st.dictionaries(st.sampled_from(sorted(rows(1)[0])[:-1]), st.lists(COLUMN, min_size=12, max_size=12)),
    cut=st.integers(1, 11),
)
def test_more_rows_do_not_change_what_was_seen_before(columns, cut):
    columns.pop('step', None)
    table = rows(12, **{name: values.__getitem__ for name, values in columns.items()})
    context = streams.RUN._replace(evaluations=streams.evaluations((0, 0.5), (6, 0.2), (12, 0.1)))
    earlier = context._replace(evaluations=[row for row in context.evaluations if row['step'] < cut])
    whole = [d for d in diagnose.history(table, context) if d.step < cut]
    assert diagnose.history(table[:cut], earlier) == whole


def answers():
    """(name, Answer, remedy as the demo has it) of every monitor."""
    context = Context.from_config(arithmetic.get_config())
    for name, monitor in MONITORS.items():
        for answer in monitor.answers.values():
            yield name, answer, answer.remedy.format(**context.remedy_texts())


@pytest.mark.parametrize('remedy', sorted({remedy for _, _, remedy in answers() if remedy}))
def test_a_remedy_is_flags_that_exist_and_may_be_given(remedy):
    words = shlex.split(remedy)
    changed = [re.fullmatch(r'--config\.([\w.]+)=(.*)', word) for word in words if word.startswith('--config.')]
    assert changed and all(changed)
    ways = [word for word in words if not word.startswith('--config.')]
    kinds = {kind_of(match[1]) for match in changed}
    if not ways:
        assert kinds == {Kind.FREE}
    elif ways == ['--amend']:
        assert kinds <= {Kind.AMENDABLE, Kind.PARTS}
    elif ways == ['--branch=DIR']:  # which draws no weights and has no cold start
        assert not any(match[1].startswith('supervised') for match in changed)
    else:
        assert ways == ['--workdir=NEW']
    preset = 'grpo' if '--config.algorithm.kl_coef' in remedy and 'kl=' not in remedy else 'dr_grpo'  # has a penalty
    with doc_examples.parsed('train', [f'--config=arithmetic:{preset}', '--workdir=NEW', *words]):
        config = flags.FLAGS.config
    for match in changed:
        values = config, default.get_config('dr_grpo')
        for part in match[1].split('.'):
            values = [value[part] for value in values]
        assert type(values[0]) is type(values[1]) and values[0] is not None


def test_numbers_of_a_remedy_are_those_of_the_run():
    config = arithmetic.get_config()
    config.optimizer.learning_rate = 1.0
    context = Context.from_config(config)
    (diagnosis,) = [
        monitor.judge(MUST['entropy_collapse'][0].rows, context)
        for monitor in MONITORS.values()
        if monitor.name == 'entropy_collapse'
    ]
    # a tenth, and no more than the highest rate at which anything learns
    assert diagnosis.remedy == '--workdir=NEW --config.optimizer.learning_rate=0.00033'


def test_a_config_without_the_section_is_refused():
    config = arithmetic.get_config()
    with config.unlocked():
        del config['diagnose']
    with pytest.raises(BadInput, match=r'^diagnose is missing'):
        Settings.from_config(config)


def test_what_is_inert_is_read_from_the_algorithm_where_the_config_makes_one():
    assert Context.from_config(arithmetic.get_config('llds_grpo')).inert == ('regularizer llds is 0',)
    config = arithmetic.get_config()
    config.algorithm.surrogate, config.algorithm.clip_low = 'policy_gradient', 0.3  # which nothing reads then
    assert Context.from_config(config).inert == ()
