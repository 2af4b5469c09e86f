"""The report of runs: what it says, what it draws, and what it does with files that are old, damaged or not there."""

import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from grpo_jax.errors import BadInput
from grpo_jax.tools import report
from grpo_jax.tools.report import content, page, panels, read, rollouts, verdict, write
from tests.report import runs

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


@pytest.fixture
def workdir(tmp_path):
    return runs.make(tmp_path / 'run')


def data_of(path):
    """The page's own data."""
    with open(path, encoding='utf8') as file:
        return json.loads(re.search(r'id="report-data">(.*?)</script>', file.read())[1])


def text_of(path):
    with open(path, encoding='utf8') as file:
        return file.read()


def panel(data, title):
    (one,) = (panel for section in data['sections'] for panel in section['panels'] if panel['title'] == title)
    return one


# what it says


def test_the_page_is_one_file_and_its_path_is_returned(workdir):
    path = report.write_report([workdir])
    assert path == os.path.join(workdir, 'report.html') and os.path.isfile(path)
    assert not os.path.exists(os.path.join(workdir, 'report_rollouts'))
    assert not re.search(r'(src|href)="(?!#|data:,)', text_of(path).split('<!-- data -->')[0].split('<style>')[0])


def test_the_verdict_is_the_evaluation_before_and_after_with_intervals():
    # 1 and 5 of 6 prompts, and Wilson's interval of 1 / 6 with Student's quantile for 6 trials
    run = read.Run('x', {'evaluation': {'prompts': 6}, 'steps': 4}, [], [], [
        {'step': 0, 'greedy': 1 / 6}, {'step': 4, 'greedy': 5 / 6}], [], [], [], [])  # fmt: skip
    text, meaning = verdict.headline(read.Variant('x', [run]))
    low, high = verdict.interval('greedy', 1 / 6, 6)
    assert 0 < low < 1 / 6 < high < 1 and f'16.7 % ({100 * low:.1f} to {100 * high:.1f})' in text
    assert 'moved from' in text and 'over 6 prompts' in meaning and 'overlap' in meaning


def test_a_clear_change_has_risen(tmp_path):
    rows = [{'step': 0, 'greedy': 0.4}, {'step': 9, 'greedy': 0.95}]
    run = read.Run('x', {'evaluation': {'prompts': 200}}, [], [], rows, [], [], [], [])
    assert ' rose from 40.0 %' in verdict.headline(read.Variant('x', [run]))[0]
    assert verdict.headline(read.Variant('x', [run]))[0].startswith('Greedy accuracy on held-out prompts')
    (tmp_path / 'contents.json').write_text('{"splits": {"train": {}, "test": {}}}')
    (tmp_path / 'config.json').write_text('{"data": {"held_out": 0.0}}')
    learned = read.Variant('x', [run._replace(folder=str(tmp_path))])
    assert verdict.headline(learned)[0].startswith('Greedy accuracy on training prompts')
    rows = rows[::-1]
    run = run._replace(evaluations=[row | {'step': i} for i, row in enumerate(rows)])
    assert ' fell from 95.0 %' in verdict.headline(read.Variant('x', [run]))[0]


@pytest.mark.parametrize('configured, actual', [(256, 256), (256, 101), (20, 7)])
def test_the_number_of_prompts_is_that_of_the_split_where_it_is_smaller(configured, actual):
    rows = [
        {'step': 0, 'greedy': 3 / actual, 'greedy/length': 29 / actual},
        {'step': 9, 'greedy': (actual - 1) / actual, 'greedy/length': 31 / actual},
    ]
    run = read.Run('x', {'evaluation': {'prompts': configured}}, [], [], rows, [], [], [], [])
    assert verdict.count_prompts(run) == actual


def test_rewards_have_no_interval_over_prompts():
    assert all(np.isnan(verdict.interval('reward', 0.5, 10)))
    assert all(np.isnan(verdict.interval('greedy/length', 0.5, 10)))


def test_the_diagnosis_stands_at_the_top_with_its_remedy_and_in_the_timeline(workdir):
    text = text_of(report.write_report([workdir]))
    header, _, rest = text.partition('</header>')
    assert 'dead all right' in header and '<code><span class="word">--amend</span></code>' in header
    assert 'evidence' in rest and data_of(report.write_report([workdir]))['marks'] == [
        {'step': 2, 'text': 'dead all right'}
    ]


# curves


def test_curves_have_the_numbers_of_the_files(workdir):
    data = data_of(report.write_report([workdir]))
    (line,) = panel(data, 'Training reward')['lines']
    assert (line['steps'], line['values'], line['low']) == ([0, 1, 2, 3], [0, 0.1, 0.2, 0.3], None)
    groups = panel(data, 'Groups by pass rate')
    assert groups['stacked'] and [line['name'] for line in groups['lines']] == [
        'groups_all_wrong', 'groups_mixed', 'groups_all_right',
    ]  # fmt: skip
    (greedy,) = panel(data, 'Accuracy of greedy completions')['lines']
    assert greedy['low'][0] < 1 / 6 < greedy['high'][0]


def test_groups_by_pass_rate_are_stacked_in_order_and_once(tmp_path):
    folder = runs.make(tmp_path / 'run')
    names = [f'groups_{name}' for name in ('all_wrong', 'below_quarter', 'below_half', 'below_all', 'all_right')]
    rows = [{'step': i, 'groups_mixed': 0.6} | dict.fromkeys(names, 0.2) for i in range(2)]
    runs.write(folder, name='metrics.jsonl', rows=rows)
    data = data_of(report.write_report([folder]))
    assert [line['name'] for line in panel(data, 'Groups by pass rate')['lines']] == names
    assert panel(data, 'groups_mixed')['lines'][0]['values'] == [0.6, 0.6]  # among the others


def test_a_metric_with_a_name_like_a_pattern_is_drawn(tmp_path):
    folder = runs.make(tmp_path / 'run')
    runs.write(folder, name='metrics.jsonl', rows=[{'step': i, 'a[b]*?': i} for i in range(2)])
    assert panel(data_of(report.write_report([folder])), 'a[b]*?')['lines'][0]['values'] == [0, 1]


def test_every_metric_is_drawn_once(workdir):
    data = data_of(report.write_report([workdir]))
    drawn = [line['name'] for section in data['sections'] for panel in section['panels'] for line in panel['lines']]
    assert sorted(drawn) == sorted({
        'entropy', 'greedy', 'groups_all_right', 'groups_all_wrong', 'groups_mixed', 'own', 'pass@1', 'reward',
        'reward/a', 'sample', 'update',
    })  # fmt: skip
    (more,) = (section for section in data['sections'] if section['heading'] == 'More')
    assert [panel['title'] for panel in more['panels']] == ['own']


def test_runs_that_differ_by_seed_alone_are_one_curve_with_a_band(tmp_path):
    folders = [runs.make(tmp_path / str(seed), seed=seed) for seed in (0, 1, 4)]
    data = data_of(report.write_report(folders))
    (line,) = panel(data, 'Training reward')['lines']
    # rewards are 0.1 * (step + seed), seeds 0, 1 and 4
    assert line['values'] == pytest.approx([0.5 / 3, 0.8 / 3, 1.1 / 3, 1.4 / 3], rel=1e-5)
    assert (line['low'], line['high']) == ([0, 0.1, 0.2, 0.3], [0.4, 0.5, 0.6, 0.7])
    assert data['seeds'] == [3]


def test_a_sweep_has_a_curve_for_each_preset(tmp_path):
    for preset, group in (('dapo', 4), ('grpo', 2)):
        for seed in (0, 1):
            folder = runs.make(tmp_path / preset / str(seed), seed=seed, rollout__group_size=group)
            begun_by(folder, 'python -m grpo_jax sweep --config=arithmetic --presets=dapo,grpo --workdir=x')
    runs.make(tmp_path / 'cold_start' / '0')
    page = report.write_report([str(tmp_path)])
    head = head_of(page)
    assert head['presets'] == 'dapo, grpo' and 'preset' not in head and 'pieces of dapo' in head
    data = data_of(page)
    assert (data['variants'], data['seeds']) == (['dapo', 'grpo'], [2, 2])
    assert len(panel(data, 'Training reward')['lines']) == 2
    assert (
        panel(data, 'Groups by pass rate: groups_mixed')['stacked'] is False
    )  # a picture of one metric, with both presets


def test_a_long_curve_is_drawn_by_means_with_the_least_and_the_greatest(monkeypatch):
    monkeypatch.setattr(panels, 'POINTS', 2)
    rows = [{'step': step, 'reward': value} for step, value in enumerate([0.0, 1.0, 2.0, 6.0])]
    run = read.Run('x', {}, rows, [], [], [], [], [], [])
    assert panels.make_line(read.Variant('x', [run]), 'metrics', 'reward') == {
        'steps': [0.5, 2.5], 'values': [0.5, 4.0], 'low': [0.0, 2.0], 'high': [1.0, 6.0]
    }  # fmt: skip


def test_what_is_no_finite_number_is_no_point():
    rows = [{'step': i, 'reward': x} for i, x in enumerate([None, 'x', True, [1], 10**400, float('nan'), 2.5])]
    run = read.Run('x', {}, rows, [], [], [], [], [], [])
    line = panels.make_line(read.Variant('x', [run]), 'metrics', 'reward')
    assert line is not None and (line['steps'], line['values']) == ([6], [2.5])


# comparison


def test_two_runs_are_compared_in_words(tmp_path):
    one = runs.make(tmp_path / 'one')
    two = runs.make(tmp_path / 'two', algorithm__clip_high=0.28)
    (tmp_path / 'two' / 'programs.json').write_text(json.dumps({'sample': 'a', 'logprobs': 'b', 'update': 'other'}))
    text = text_of(report.write_report([one, two]))
    assert 'programs that differ: update; that are the same: logprobs, sample' in text
    assert 'algorithm.clip_high: 0.2 became 0.28' in text and 'the data are the same' in text
    assert data_of(os.path.join(one, 'report_against_two.html'))['variants'] == ['one', 'two']


def test_a_page_with_others_leaves_the_runs_own_page_and_those_with_other_others(tmp_path):
    one, two = (runs.make(tmp_path / name, seed=seed) for seed, name in enumerate(('one', 'two')))
    deep = runs.make(tmp_path / 'sweep' / 'dapo' / '0', algorithm__clip_high=0.28)
    alone = text_of(report.write_report([one], inline_bytes=100))
    paths = [report.write_report([one, *others]) for others in ([two], [deep], [two, deep], [one])]
    names = ['report_against_two.html', 'report_against_sweep-dapo-0.html', 'report_against_two_sweep-dapo-0.html']
    assert [os.path.basename(path) for path in paths] == [*names, 'report.html']
    report.write_report([one], inline_bytes=100)
    report.write_report([one, two])
    assert text_of(os.path.join(one, 'report.html')) == alone
    assert os.listdir(os.path.join(one, 'report_rollouts'))  # of the own page


def test_a_page_with_very_many_others_has_a_name_that_fits(tmp_path):
    stems = {write.page_stem(['here', *(f'{letter}{i}' * 40 for i in range(9))]) for letter in 'ab'}
    assert len(stems) == 2 and all(len(os.path.basename(stem)) < 140 for stem in stems)


# what the head says


def head_of(path):
    """{name: value} of the facts in the head."""
    return dict(re.findall(r'<dt>(.*?)</dt><dd>(.*?)</dd>', text_of(path).partition('</dl>')[0]))


def begun_by(folder, command):
    """The folder of a run with the environment of a command."""
    devices = {'platform': 'gpu', 'kind': 'NVIDIA L4', 'count': 1, 'processes': 1}
    entry = {'begun': '2026-11-27T21:00:00+00:00', 'command': command, 'python': '3.12.3', 'cores': 12}
    with open(os.path.join(folder, 'environment.json'), 'w', encoding='utf8') as file:
        json.dump([entry | {'packages': {'jax': '0.11.2'}, 'devices': devices, 'code': {'version': '0.1.0'}}], file)
    return folder


def test_the_head_says_experiment_preset_pieces_time_and_machine(workdir):
    head = head_of(
        report.write_report([begun_by(workdir, 'python -m grpo_jax.train --config=arithmetic:rloo --workdir=x')])
    )
    assert (head['experiment'], head['preset'], head['machine']) == ('arithmetic', 'rloo', '1 x NVIDIA L4, 12 cores')
    assert head['pieces'] == 'advantage group_mean, ratio token, surrogate clip, weights fixed_length'
    # sample 1 s and update .5 + i s of the steps 0 to 3
    assert (
        head['time of all steps'] == '12 s'
        and head['steps begun'] == '2026-11-27 21:00'
        and head['jax'] == '0.11.2, Python 3.12.3'
    )


@pytest.mark.parametrize('command, expected', [
    ('python -m grpo_jax.train --config=configs/arithmetic.py --workdir=x', ('configs/arithmetic.py', 'dr_grpo')),
    ('grpo-jax train --config gsm8k --workdir=x', ('gsm8k', 'dr_grpo')),
    ('python -m grpo_jax sweep --config=arithmetic --presets=all --workdir=x', ('arithmetic', 'grpo')),
    ('python -m grpo_jax.train --config=gone.py --workdir=x', ('gone.py', '')),
    ('python notebook.py', ('', '')),
])  # fmt: skip
def test_experiment_and_preset_are_those_of_the_command(tmp_path, command, expected):
    folder = begun_by(runs.make(tmp_path / 'grpo' / '0'), command)
    assert content.find_experiment(read.read_run(folder)) == expected


def test_a_completion_has_its_terms_with_weights_and_what_was_learned_from():
    row = {
        'completion': 'c',
        'reward': 0.4,
        'parts': {'numeric': 1.0},
        'terms': {'numeric': [1.0, 1.0], 'o': [-1.2, 0.5]},
    }
    short = rollouts.make_row(row | {'learned_from': ['reward']})
    assert short['w'] == {'numeric': [1, 1], 'o': [-1.2, 0.5]} and 'p' not in short and 'u' not in short
    assert rollouts.make_row(row | {'learned_from': ['step_rewards', 'kl']})['u'] == ['step rewards', 'kl']
    assert rollouts.make_row(row | {'learned_from': []})['u'] == []
    tokens = row | {'tokens': ['c', 'd'], 'step_rewards': [None, 0.5]}
    assert rollouts.make_row(tokens)['s'] == [None, 0.5]


@pytest.mark.parametrize('seconds, text', [(0.4, ''), (61, '1 min 1 s'), (3600, '1 h'), (7384.6, '2 h 3 min')])
def test_times_are_said_in_two_units(seconds, text):
    assert (
        content.count_time(read.Run('x', {}, [], [{'step': 0, 'sample': seconds, 'host_mib': 9.0}], [], [], [], [], []))
        == text
    )


def test_the_time_has_the_cold_starts_updates(workdir):
    runs.write(workdir, name='cold_start/timings.jsonl', rows=[{'step': 0, 'update': 48.0}])
    assert content.count_time(read.read_run(workdir)) == '1 min'
    assert head_of(report.write_report([workdir]))['time of cold start and steps'] == '1 min'


def test_every_metric_that_is_drawn_has_what_the_page_of_metrics_says(workdir):
    data = data_of(report.write_report([workdir]))
    said = {
        line['name']: line['meaning']
        for section in data['sections']
        for panel in section['panels']
        for line in panel['lines']
    }
    assert said['reward'].startswith('Mean of the total reward, shaping by length included. Unit: reward. Usual: rises')
    assert said['reward/a'].startswith('Mean of a part over the completions') and said['own'] == ''
    assert said['greedy'].startswith('Share of prompts whose most likely completion is right')
    assert said['update'].startswith('Seconds of each stage')
    assert not [name for name, text in said.items() if name != 'own' and not re.fullmatch(r'[A-Z1-9].*\.', text)]


def test_a_folder_named_twice_counts_once(workdir):
    assert data_of(report.write_report([workdir, workdir + '/']))['seeds'] == [1]


# rollouts


def test_a_group_holds_its_completions_with_the_numbers_of_their_tokens():
    first, second = rollouts.make_groups([*runs.groups(1, size=2), *runs.groups(2, size=1)])
    assert (first['prompt'], len(first['rows']), len(second['rows'])) == ('prompt 1', 2, 1)
    row = first['rows'][0]
    assert row['k'] == ['w1', ' 0', '<end>'] and row['l'] == [-0.5] * 3 and row['a'] == 0.75
    assert 'c' not in row  # the tokens hold the text
    assert row['p'] == {'numeric': 1, 'format': 0.5} and row['v'] is True


def test_an_old_dump_without_tokens_has_its_texts():
    row = {'id': 1, 'prompt': 'p', 'answer': 'a', 'completion': 'c', 'reward': None, 'correct': None, 'parts': {}}
    (group,) = rollouts.make_groups([row])
    assert group['rows'] == [{'r': None, 'p': {}, 'c': 'c', 'a': None}]


def test_a_list_that_does_not_fit_the_tokens_is_left_out():
    row = {'completion': 'ab', 'tokens': ['a', 'b'], 'logprobs': [-1.0], 'entropy': 'x', 'ref_logprobs': [None, -2.0]}
    short = rollouts.make_row(row)
    assert 'l' not in short and 'e' not in short and short['f'] == [None, -2]


def test_many_rollouts_lie_beside_the_page_a_file_a_step(workdir):
    path = report.write_report([workdir], inline_bytes=100)
    names = sorted(os.listdir(os.path.join(workdir, 'report_rollouts')))
    assert names == ['rollouts-0-0.js', 'rollouts-0-2.js'] and 'id="rollouts-0-0"' not in text_of(path)
    report.write_report([workdir])  # all fit into the page again
    assert not os.path.exists(os.path.join(workdir, 'report_rollouts'))


@pytest.mark.parametrize('name', runs.HOSTILE)
def test_a_text_leaves_neither_its_block_nor_its_string(name):
    text = runs.HOSTILE[name]
    for written in (page.as_json([text]), page.as_script('k', json.dumps(text))):
        assert not set(written) & set('<>&\u2028\u2029\x00\x1b\x9b') and written.encode('utf8')
    assert json.loads(page.as_json([text])) == [text]


# files that are old, damaged or not there


@pytest.mark.parametrize('steps, evaluated', [(0, False), (1, False), (1, True), (3, True)])
def test_a_run_that_has_just_begun_has_a_report(tmp_path, steps, evaluated):
    path = report.write_report([runs.make(tmp_path / 'run', steps=steps, evaluated=evaluated)])
    text = text_of(path)
    assert 'in progress' in text
    assert evaluated or (f'{steps} steps are done.' if steps else 'No step is done yet.') in text


def test_a_folder_without_a_run_is_refused_in_one_line(tmp_path):
    with pytest.raises(BadInput, match='holds no run'):
        report.write_report([str(tmp_path)])
    with pytest.raises(BadInput, match='holds no run'):
        report.write_report([str(tmp_path / 'nothing')])
    assert not list(tmp_path.iterdir())


def test_a_damaged_config_is_refused_and_the_old_report_stays(workdir):
    path = report.write_report([workdir])
    before = text_of(path)
    with open(os.path.join(workdir, 'config.json'), 'w', encoding='utf8') as file:
        file.write('{')
    with pytest.raises(BadInput, match=r'config\.json'):
        report.write_report([workdir])
    assert text_of(path) == before


DAMAGE = {
    'a row': ('metrics.jsonl', b'{"step": 0, "reward": 1}\nnonsense\n{"step": 1, "reward": 2}\n'),
    'no object': ('metrics.jsonl', b'[1]\n"x"\n{"step": 0, "reward": 1}\n'),
    'no step': ('metrics.jsonl', b'{"reward": 1}\n{"step": true}\n{"step": "1"}\n{"step": 1e400}\n'),
    'a deep row': ('metrics.jsonl', b'[' * 100_000 + b'\n'),
    'no text': ('rollouts/000000.jsonl', b'\xff\xfe\x00\n{"completion": 5}\n'),
    'an odd dump': ('rollouts/000000.jsonl', b'{"completion": "x", "parts": [1], "messages": 5, "tokens": [1]}\n'),
    'an event': ('events.jsonl', b'{"step": 1, "event": 5}\n{"step": 1, "event": "x", "monitor": {"a": [1]}}\n'),
    'an environment': ('environment.json', b'{'),
    'a list of texts': ('environment.json', b'["x", {"code": 5, "devices": []}]'),
}


@pytest.mark.parametrize('name, damaged', DAMAGE.values(), ids=DAMAGE)
def test_what_is_damaged_is_left_out_and_named(workdir, name, damaged):
    with open(os.path.join(workdir, name), 'wb') as file:
        file.write(damaged)
    text = text_of(report.write_report([workdir]))
    unsound = re.findall(r'<p class="note">.*?</p>', text)
    sound = name == 'events.jsonl' or damaged.startswith((b'{"completion": "x"', b'["x"'))
    assert sound or any(os.path.basename(name) in note for note in unsound)


def test_half_a_row_of_a_run_in_progress_is_no_damage(workdir):
    with open(os.path.join(workdir, 'metrics.jsonl'), 'ab') as file:
        file.write(b'{"step": 4, "rew')
    assert '<p class="note">' not in text_of(report.write_report([workdir]))


def test_supervised_training_is_finished_without_an_evaluation(tmp_path):
    folder = runs.make(tmp_path / 'run', evaluated=False, supervised__updates=runs.STEPS)
    assert read.read_run(folder).finished and 'in progress' not in text_of(report.write_report([folder]))


def test_a_run_of_other_metrics_has_them_in_more(tmp_path):
    folder = runs.make(tmp_path / 'run', evaluated=False)
    for name in ('events.jsonl', 'timings.jsonl', 'rollouts/000000.jsonl', 'rollouts/000002.jsonl'):
        os.remove(os.path.join(folder, name))
    runs.write(folder, name='metrics.jsonl', rows=[{'step': i, 'accuracy': i / 4, 'pairs_right': 1} for i in range(4)])
    path = report.write_report([folder])
    assert [section['heading'] for section in data_of(path)['sections']] == ['More']
    assert 'The last accuracy is 0.75' in text_of(path)


# hostile texts in the header, the timeline and the comparison


@pytest.mark.parametrize('name', ['script', 'image', 'separators', 'ansi', 'nul', 'surrogate', 'bidi', 'template'])
def test_texts_of_the_config_and_of_events_are_texts(tmp_path, name):
    text = runs.HOSTILE[name]
    folder = runs.make(tmp_path / 'run')
    config = os.path.join(folder, 'config.json')
    with open(config, encoding='utf8') as file:
        changed = json.load(file)
    changed['data']['name'] = changed['model']['path'] = text
    with open(config, 'w', encoding='utf8') as file:
        json.dump(changed, file)
    row = {'step': 1, 'event': text, 'monitor': text, text: text}
    runs.write(folder, name='events.jsonl', rows=[row, row | {'event': 'diagnosis', 'remedy': text, 'seen': text}])
    runs.write(folder, name='metrics.jsonl', rows=[{'step': 0, text: 1.0, 'reward': 0.5}])
    written = text_of(report.write_report([folder, runs.make(tmp_path / 'other')]))
    assert written.count('<script>') == len(page.SCRIPTS) and '<img' not in written and '<svg' not in written
    assert not set(written) & set('\x00\x1b\x9b\u2028\u2029\u202e')


# following


def test_a_finished_run_is_written_once_and_left(workdir, capsys):
    assert report.follow([workdir], look_every=0) == os.path.join(workdir, 'report.html')
    assert data_of(os.path.join(workdir, 'report.html'))['stamp'] == 0


def test_a_run_in_progress_is_written_whenever_it_writes(tmp_path, monkeypatch):
    folder, stamps = runs.make(tmp_path / 'run', steps=2, evaluated=False), []

    def next_look(seconds):
        stamps.append(data_of(os.path.join(folder, 'report.html'))['stamp'])
        if len(stamps) == 2:  # nothing had changed for a look; now the run ends
            runs.make(folder)

    monkeypatch.setattr(write.time, 'sleep', next_look)
    report.follow([folder])
    assert stamps == [1, 1] and data_of(os.path.join(folder, 'report.html'))['stamp'] == 0
    assert 'in progress' not in text_of(os.path.join(folder, 'report.html'))
    assert text_of(os.path.join(folder, 'report_stamp.js')) == 'reportStamp(2);\n'


def test_the_command_prints_the_path_and_refuses_in_one_line(workdir, tmp_path):
    def run(folder):
        command = [sys.executable, '-m', 'grpo_jax', 'report', f'--workdir={folder}']
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)

    done = run(workdir)
    assert (done.returncode, done.stdout) == (0, os.path.join(workdir, 'report.html\n'))
    done = run(tmp_path / 'nothing')
    assert done.returncode == 2 and done.stderr.startswith('error: ') and done.stderr.count('\n') == 1


def test_content_shows_the_settings_that_a_reader_asks_for(workdir):
    facts = dict(content.facts(read.Variant('run', [read.read_run(workdir)]), ['']))
    assert facts['completions a prompt'] == '4' and facts['data'] == 'arithmetic' and facts['seed'] == '0'


# the demo's script


@pytest.mark.parametrize(
    'status, commands', [(0, ['pip', 'grpo_jax.train', 'grpo_jax']), (42, ['pip', 'grpo_jax.train'])]
)
def test_the_demo_ends_with_its_report(tmp_path, status, commands):
    shutil.copytree(os.path.join(ROOT, 'launch'), tmp_path / 'launch')
    python = tmp_path / '.venv' / 'bin' / 'python'
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/bash\necho "$@" >> {tmp_path}/log\n[ "$2" != grpo_jax.train ] || exit {status}\n')
    (python.parent / 'sleep').write_text('#!/bin/bash\nexit 1\n')  # what says that it is still installing
    for program in python.parent.iterdir():
        program.chmod(0o755)
    script = ['bash', str(tmp_path / 'launch' / 'local.sh'), 'runs/mine']
    path = f'{python.parent}:{os.environ["PATH"]}'
    environment = os.environ | {'PYTHON': sys.executable, 'PATH': path}
    done = subprocess.run(script, capture_output=True, env=environment, timeout=60)
    lines = [line.split() for line in (tmp_path / 'log').read_text().splitlines()]
    assert done.returncode == status and [line[1] for line in lines] == commands
    assert all(line[-1] == '--workdir=runs/mine' for line in lines[1:])
