"""What a run was made from, and whether its files are whole."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from grpo_jax import train
from grpo_jax.collect.draw import abstract_aux
from grpo_jax.errors import BadInput
from grpo_jax.run.open import make_run_learner, make_run_sampler, open_run
from grpo_jax.sampler import schedule
from grpo_jax.sharding import compiled
from grpo_jax.tools import provenance
from tests import tiny_run

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@pytest.fixture(scope='module')
def made(tmp_path_factory):
    workdir = tmp_path_factory.mktemp('made') / 'run'
    train.run(tiny_run.config(steps=2, supervised__updates=2, evaluation__prompts=2, log__rollouts=1), str(workdir))
    return workdir


@pytest.fixture
def workdir(made, tmp_path):
    return shutil.copytree(made, tmp_path / 'run')


def test_a_whole_run_is_verified(made):
    assert list(provenance.verify(str(made))) == []


def test_the_description_has_code_devices_programs_and_events(made):
    text = '\n'.join(provenance.describe_run(str(made)))
    for words in ('seed 0, 2 steps', 'by grpo_jax', 'of 1 processes', 'jax', 'program update: ', 'checkpoints: 2'):
        assert words in text


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 8
    path.write_bytes(bytes(content))


def largest(folder):
    return max((path for path in folder.rglob('*') if path.is_file()), key=lambda path: path.stat().st_size)


DAMAGE = {
    'an array': (lambda w: flip(largest(w / 'checkpoints' / '2')), 'checkpoints/2'),
    "the cold start's array": (
        lambda w: flip(largest(w / 'cold_start' / 'checkpoints' / '2')),
        'cold_start/checkpoints/2',
    ),
    'an empty checkpoint': (lambda w: (w / 'checkpoints' / '9').mkdir(), 'checkpoints/9'),
    'config.json': (lambda w: (w / 'config.json').write_text('{'), 'config.json'),
    'no environment.json': (lambda w: (w / 'environment.json').unlink(), 'environment.json'),
    'a row of no sense': (lambda w: (w / 'metrics.jsonl').write_text('{"step": 0}\nx\n'), 'metrics.jsonl, line 2'),
    'a missing row': (lambda w: (w / 'metrics.jsonl').write_text('{"step": 0}\n'), 'has 1 rows'),
    'a repeated row': (
        lambda w: (w / 'timings.jsonl').write_text('{"step": 0}\n' * 2),
        'line 2: has step 0 in place of 1',
    ),
    'half a row': (lambda w: (w / 'evaluations.jsonl').write_text('{"step": 0}'), 'line 1: has no end'),
    'a dump': (lambda w: (w / 'rollouts' / '000001.jsonl').write_bytes(b'\xff\n'), 'rollouts/000001.jsonl, line 1'),
}


@pytest.mark.parametrize('damage, words', DAMAGE.values(), ids=DAMAGE)
@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')  # of arrays that came too late
def test_what_is_damaged_is_named(workdir, damage, words):
    damage(workdir)
    problems = list(provenance.verify(str(workdir)))
    assert problems and all('\n' not in problem for problem in problems)
    assert any(words in problem for problem in problems)


def test_the_command_ends_with_status_1_for_damage(workdir):
    (workdir / 'metrics.jsonl').write_text('x\n')
    done = subprocess.run(
        [sys.executable, '-m', 'grpo_jax', 'provenance', f'--workdir={workdir}', '--verify'],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1 and 'damaged: ' in done.stdout and 'Traceback' not in done.stderr


def test_two_runs_differ_in_settings_and_programs(long, made, tmp_path):
    other = tmp_path / 'other'
    train.run(tiny_run.config(steps=1, supervised__updates=0, evaluation__prompts=2, rollout__group_size=2), str(other))
    lines = list(provenance.describe_differences(str(made), str(other)))
    assert 'rollout.group_size: 4 became 2' in lines and 'the data are the same' in lines
    # dr_grpo needs no logprobs
    assert lines[0] == 'programs that differ: sample, update; that are the same: none'


def lowered_hashes(workdir, **changes):
    """The hash of each program of a run of the preset grpo, and of it with other settings; nothing is compiled."""
    config = tiny_run.config(**({'preset': 'grpo'} | changes))
    run = open_run(config, str(workdir))
    shapes = run.settings.step_shapes(run.algorithm)
    learner = make_run_learner(run, abstract_aux(run.settings.collection, shapes, 40))
    engine = make_run_sampler(run, shapes)
    traced = [engine.programs.trace(key) for key in schedule.largest_programs(engine.schedule)]
    sample = compiled.short_hash(' '.join(program.lower().as_text() for program in traced))
    programs = {'logprobs': learner.scorer, 'update': learner.update.program}
    texts = {name: program.traced.lower().as_text() for name, program in programs.items()}
    return {'sample': sample} | {name: compiled.short_hash(text) for name, text in texts.items()}


@pytest.fixture(scope='module')
def unchanged(tmp_path_factory):
    return lowered_hashes(tmp_path_factory.mktemp('lowered') / 'run')


ALL = {'sample', 'logprobs', 'update'}
# what is changed -> the programs that are others then; no other program is
NOTHING = {  # what lies in the state, or is computed on the host
    'seed': 3,
    'steps': 9,
    'log__rollouts': 1,
    'evaluation__prompts': 3,
    'reward__correct_at': 0.5,
    'algorithm__kl_coef': 0.1,
    'algorithm__advantage': 'group_mean',
}
EXPECTED = [
    (NOTHING, set()),
    ({'algorithm__surrogate': 'cispo'}, {'update'}),
    ({'learner__minibatches': 2}, {'logprobs', 'update'}),  # a second update needs the old policy's logprobs
    ({'algorithm__kl': 'none', 'algorithm__kl_coef': 0.0}, {'update'}),  # no program is a reference's own
    ({'rollout__top_p': 0.9, 'rollout__accept_bias': True}, {'sample'}),
    ({'rollout__temperature': 0.7}, ALL),  # the update computes logprobs at it too
]
MORE = [
    ({'algorithm__clip_high': 0.28}, {'update'}),
    ({'algorithm__weights': 'token_mean'}, {'update'}),
    ({'optimizer__learning_rate': 1e-3}, {'update'}),
    ({'optimizer__max_grad_norm': 0.5}, {'update'}),
    ({'learner__microbatches': 2}, {'logprobs', 'update'}),
    ({'rollout__group_size': 2}, ALL),
    ({'rollout__max_tokens': 16}, ALL),
    ({'data__prompts_per_step': 8}, ALL),
]


@pytest.mark.parametrize('changes, programs', EXPECTED + MORE, ids=[' '.join(c) for c, _ in EXPECTED + MORE])
def test_a_change_changes_these_programs_and_no_others(request, unchanged, tmp_path, changes, programs):
    if (changes, programs) in MORE:
        request.getfixturevalue('long')
    changed = lowered_hashes(tmp_path / 'run', **changes)
    assert {name for name, digest in changed.items() if digest != unchanged[name]} == programs


def write_run(folder, programs, **changes):
    """A folder with the texts of a run that was begun."""
    folder.mkdir()
    config = json.loads(json.dumps(tiny_run.config(**changes).to_dict()))
    for name, value in {'config': config, 'programs': programs}.items():
        (folder / f'{name}.json').write_text(json.dumps(value))
    return str(folder)


SAME = {'sample': 'a', 'logprobs': 'b', 'update': 'c'}


@pytest.mark.parametrize(
    'programs, sentence',
    [
        (SAME, 'programs that differ: none; that are the same: logprobs, sample, update'),
        (SAME | {'update': 'd'}, 'programs that differ: update; that are the same: logprobs, sample'),
        (SAME | {'update': 'd', 'sample': 'e'}, 'programs that differ: sample, update; that are the same: logprobs'),
        (
            {'sample': 'd', 'logprobs': 'e', 'update': 'f'},
            'programs that differ: logprobs, sample, update; that are the same: none',
        ),
        ({}, 'nothing is known of the programs: at least one of the runs has compiled none yet'),
    ],
)
def test_which_programs_differ_is_said_in_words(tmp_path, programs, sentence):
    one, two = write_run(tmp_path / 'a', SAME), write_run(tmp_path / 'b', programs)
    assert list(provenance.describe_differences(one, two)) == [
        sentence,
        'the data are the same',
        'settings that differ: none',
    ]


def test_settings_and_data_differ_in_words(tmp_path):
    one = write_run(tmp_path / 'a', SAME)
    other_data = write_run(tmp_path / 'b', SAME, data__template='{prompt}?')
    assert list(provenance.describe_differences(one, other_data))[1:] == [
        'the data differ', 'settings that differ: 1', "data.template: '{prompt}' became '{prompt}?'",
    ]  # fmt: skip
    other_seed = write_run(tmp_path / 'c', SAME, seed=2)
    *_, last = provenance.describe_differences(one, other_seed)
    assert last == 'seed: 0 became 2'
    more_prompts = write_run(tmp_path / 'd', SAME, data__prompts_per_step=8)
    assert 'the data are the same' in provenance.describe_differences(one, more_prompts)
    (tmp_path / 'a' / 'data.json').write_text('[{"commit": "x"}]')
    assert 'the data differ in where they are from' in provenance.describe_differences(one, other_seed)


def test_files_of_another_form_are_compared_as_far_as_they_go(tmp_path):
    one, two = write_run(tmp_path / 'a', SAME), write_run(tmp_path / 'b', ['x'])
    (tmp_path / 'a' / 'environment.json').write_text('{"code": 1}')
    (tmp_path / 'b' / 'environment.json').write_text('[{"code": 5, "devices": {"count": 2}}]')
    assert next(provenance.describe_differences(one, two)).startswith('nothing is known')
    assert 'devices count: None became 2' in provenance.describe_differences(one, two)


@pytest.mark.parametrize('flags', [(), ('--workdir=', '--other='), ('--workdir=', '')])
def test_the_command_takes_two_folders_with_and_without_the_names_of_flags(tmp_path, flags):
    folders = [write_run(tmp_path / 'a', SAME), write_run(tmp_path / 'b', SAME | {'update': 'd'})]
    command = [sys.executable, '-m', 'grpo_jax', 'provenance']
    command += [flag + folder for flag, folder in zip(flags or ('', ''), folders, strict=True)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith('programs that differ: update;'), done.stderr


def test_no_folder_or_three_are_refused(tmp_path):
    folder = write_run(tmp_path / 'a', SAME)
    for folders in ([], [folder] * 3):
        command = [sys.executable, '-m', 'grpo_jax', 'provenance', *folders]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 2 and done.stderr.startswith('error: folders = ')


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(BadInput, match='holds no run'):
        list(provenance.verify(str(tmp_path)))
