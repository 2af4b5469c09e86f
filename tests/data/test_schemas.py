"""Well-known data sets as small invented copies: each is read by flags alone, and its gold answers earn full reward."""

import functools
import json
import os
import pathlib
import subprocess
import sys

from absl import flags
from ml_collections import config_flags
import pytest

from grpo_jax import evaluate, reward_model, rewards, sample, train
from grpo_jax.errors import BadInput
from grpo_jax.run import config_file
from grpo_jax.run.open import NOWHERE, open_config, open_split, open_splits
from grpo_jax.run.rows import evaluated_prompts
from grpo_jax.tools import export, provenance, report, show, sweep
from grpo_jax.tools.preflight import plan

FIELD = pathlib.Path(__file__).resolve().parent.parent / 'field'
OPTION = 'data.options.'
DEMONSTRATED = {'preset': 'sft', 'reward.verifier': '', 'reward.parts': (('format', 1.0),), 'rollout.max_tokens': 40}
PAIRS = {'preset': 'dpo', 'data.name': 'preferences', 'reward.verifier': '', 'reward.parts': (('format', 1.0),)}
STEPS = {'data.name': 'step_labels', 'reward.verifier': '', 'supervised.updates': 1, 'reward_model.objective': 'steps'}
CODE = {'data.name': 'code', 'reward.parts': (('code', 1.0),), 'reward.verifier': 'code'}
MATH = {'reward.parts': (('math', 1.0),), 'reward.verifier': 'math'}
COUNTDOWN = {'reward.parts': (('countdown', 1.0),), 'reward.verifier': 'countdown', OPTION + 'columns.numbers': 'nums'}
MAKE = {'data.template': 'Make {target} of {nums}.', OPTION + 'prompt_field': '', OPTION + 'answer_field': ''}
GROUND_TRUTH = {OPTION + 'answer_field': 'reward_model.ground_truth'}
PROBLEM = {OPTION + 'prompt_field': 'problem'}
CHOICES = '{question}\n{choices.label.0}. {choices.text.0}\n{choices.label.1}. {choices.text.1}'
# folder of the copy -> settings; those with `evaluated` are test sets
SCHEMAS = {
    'gsm8k.jsonl': {'data.name': 'gsm8k'},
    'math500.parquet': {'data.name': 'math', 'evaluated': True} | MATH,
    'dapo_processed.jsonl': {OPTION + 'answer_field': 'solution'},
    'dapo_raw.parquet': GROUND_TRUTH | {'data.held_out': 0.3},
    'dapo_raw_name.parquet': GROUND_TRUTH,
    'numina_cot.jsonl': {'data.name': 'math'} | MATH,
    'numina_15.parquet': PROBLEM | MATH | {OPTION + 'without.answer': 'proof|notfound'},
    'countdown.jsonl': COUNTDOWN | MAKE,
    'tldr.jsonl': DEMONSTRATED | {OPTION + 'columns.demonstration': 'completion'},
    'uf_trl.parquet': PAIRS,
    'uf_h4.jsonl': PAIRS,
    'prm_trl.jsonl': STEPS,
    'prm800k.parquet': STEPS,
    'humanevalplus.jsonl': CODE | {'evaluated': True},
    'mbppplus.parquet': CODE | {'evaluated': True},
    'verl_gsm8k.parquet': GROUND_TRUTH,
    'openr1.jsonl': PROBLEM,
    'deepscaler.json': PROBLEM,
    'rlvr_gsm.jsonl': {OPTION + 'prompt_field': 'messages', OPTION + 'answer_field': 'ground_truth'},
    'aime.jsonl': {OPTION + 'prompt_field': 'Problem', OPTION + 'answer_field': 'Answer', 'evaluated': True}
    | {'data.test_split': 'train'},
    'alpaca.jsonl': {'data.template': '{instruction}\n{input}', OPTION + 'prompt_field': ''}
    | {OPTION + 'answer_field': 'output'},
    # of this test's own
    'apps.jsonl': CODE,
    'arc.parquet': MATH | {'data.template': CHOICES, OPTION + 'prompt_field': '', OPTION + 'answer_field': 'answerKey'},
    'golds_in_json.jsonl': {OPTION + 'answer_field': 'reward_model.ground_truth.0'},
    'olympiad.jsonl': MATH | {OPTION + 'prompt_field': 'question', OPTION + 'answer_field': 'final_answer'},
    'shepherd.jsonl': STEPS,
    'simple.csv': {OPTION + 'prompt_field': 'q'},
}
IN_THE_SUITE = 'countdown.jsonl'  # of what goes through every command
SUMS = [(3 + 7 * i, 5 + 4 * i) for i in range(12)]
OWN = {
    'apps.jsonl': lambda i, a, b: {
        'question': f'Read two numbers, write their sum and {i}.',
        'input_output': json.dumps({'inputs': ['1 2\n'], 'outputs': [f'3 {i}\n']}),
        'solutions': json.dumps([f'print(sum(map(int, input().split())), {i})']),
    },
    'arc.parquet': lambda i, a, b: {
        'question': f'What is {a}+{b}?',
        'choices': {'text': [str(a + b), str(a)], 'label': ['A', 'B']},
        'answerKey': 'A',
    },
    'golds_in_json.jsonl': lambda i, a, b: {
        'prompt': [{'role': 'user', 'content': f'{a}+{b}'}],
        'reward_model': {'ground_truth': json.dumps([str(a + b)])},
    },
    'olympiad.jsonl': lambda i, a, b: {'question': f'Compute ${a}+{b}$.', 'final_answer': [f'${a + b}$']},
    'shepherd.jsonl': lambda i, a, b: {
        'input': f'What is {a}+{b}? Step 1: I add. ки\nStep 2: {a + b} ки',
        'label': f'What is {a}+{b}? Step 1: I add. +\nStep 2: {a + b} {"+-"[i % 2]}',
    },
}


@pytest.fixture(scope='module')
def copies(tmp_path_factory):
    """The folder of all copies."""
    folder = tmp_path_factory.mktemp('copies')
    subprocess.run([sys.executable, FIELD / 'field.py', folder], check=True)
    for name, make in OWN.items():
        rows = [make(i, a, b) for i, (a, b) in enumerate(SUMS)]
        (folder / name).mkdir()
        if name.endswith('parquet'):
            import pyarrow.parquet

            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / name / 'whatever.parquet')
        else:
            (folder / name / 'train.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows), 'utf8')
    (folder / 'simple.csv').write_text('q,answer\n' + ''.join(f'"{a} and {b}, added",{a + b}\n' for a, b in SUMS))
    return folder


def make_config(folder, name, **changes):
    """The config of a command line: the tiny one of the field, with a schema's settings as flags."""
    settings = {'data.name': 'files', OPTION + 'folder': os.path.join(folder, name)} | SCHEMAS[name] | changes
    preset = settings.pop('preset', 'dr_grpo')
    settings.pop('evaluated', None)
    argv = ['train', f'--config={FIELD / "tiny.py"}:{preset}', *(f'--config.{k}={v}' for k, v in settings.items())]
    values = flags.FlagValues()
    config_flags.DEFINE_config_file('config', None, flag_values=values, sys_argv=argv)
    values['config'].parser = config_file.Parser(argv)
    values(argv)
    return values['config'].value


def gold_rewards(run, examples):
    """What the verifier pays for the text of each example's gold answer."""
    golds, count = [example.answer for example in examples], len(examples)
    with rewards.build(run.settings.rewards, 512) as functions:
        paid = rewards.compute_rewards(functions, examples, golds, [False] * count, [5] * count)
    return list(paid.parts[functions.verifier])


@pytest.mark.parametrize('name', SCHEMAS)
def test_a_schema_is_read_by_config_alone_and_its_golds_earn_full_reward(copies, name, caplog):
    config, schema = make_config(copies, name), SCHEMAS[name]
    if schema.get('data.name') == 'step_labels':
        run = open_config(config, NOWHERE, head=True)
        objective, options = reward_model.OBJECTIVES['steps'], run.settings.reward_model
        read = [
            reward_model.read_labelled(split, objective, run.model.tokenizer, options, 300, name)
            for split in open_splits(run)
        ]
        assert {label for rows in read[0].marks for row in rows for _, label in row} == {0.0, 1.0}
        return
    if schema.get('evaluated'):
        run = open_config(config, NOWHERE)
        dataset = open_split(run, 'test')
    else:
        run, (dataset, _) = train.check(config, NOWHERE)
    assert all(example.prompt.strip() for example in dataset.examples)
    if schema.get('reward.verifier') == '':
        assert all(example.meta['demonstration'].strip() for example in dataset.examples)
    elif 'countdown' in name:
        solved = [e._replace(answer='+'.join(map(str, e.meta['nums'][:2])) + '-1') for e in dataset.examples]
        assert set(gold_rewards(run, solved)) == {1.0} and dataset.examples[0].prompt == 'Make 7 of [3, 5, 1].'
    else:
        assert set(gold_rewards(run, dataset.examples)) == {1.0}


@pytest.mark.parametrize('name', [n for n in SCHEMAS if not SCHEMAS[n].get('evaluated')])
def test_a_schema_goes_through_every_command(request, copies, name, tmp_path):
    if name != IN_THE_SUITE:
        request.getfixturevalue('long')
    config, workdir, samples = make_config(copies, name), str(tmp_path / 'run'), str(tmp_path / 'samples')
    steps = SCHEMAS[name].get('data.name') == 'step_labels'
    shown = make_config(copies, name, **{'supervised.updates': 0} if steps else {})
    assert any(line.startswith('ids ') for line in show.lines(shown, 1))
    assert plan.make(config, 'gpu:a100-40').shapes.prompts % config.data.prompts_per_step == 0
    if steps:
        config.rollout.max_tokens = 64
        reward_model.run(config, workdir)
    else:
        train.run(config, workdir)
        config.steps = 2
        assert train.run(config, workdir).step == 2
        content, _ = evaluate.open_report(evaluate.open_subject(None, workdir), 1, 'test')
        assert 0 < content['prompts'] <= config.evaluation.prompts
        assert sample.run(None, workdir, samples, sample.Request(samples=1, prompts=2))['prompts'] == 2
        preset = SCHEMAS[name].get('preset', 'dr_grpo')
        get_config = functools.partial(make_config, copies, name)
        rows = sweep.run(lambda preset: get_config(preset=preset), [preset], 2, str(tmp_path / 'sweep'))
        assert [row['status'] for row in rows] == ['2/2']
        table = (tmp_path / 'sweep' / 'table.md').read_text()
        assert (sweep.LEARNED in table) == (evaluated_prompts(workdir) == 'training')
        export.export(workdir, str(tmp_path / 'exported'), 'float32')
    assert os.path.isfile(report.write_report([workdir]))
    assert not [*provenance.verify(workdir), *provenance.compare_contents(workdir)]
    assert any(line.startswith('data: ') for line in provenance.describe_run(workdir))


def test_without_a_test_split_evaluations_are_of_training_prompts_and_a_line_says_so(copies, caplog):
    _, (learned, evaluated) = train.check(make_config(copies, 'openr1.jsonl'), NOWHERE)
    assert evaluated is learned and evaluated.split == 'train'
    assert caplog.text.count('no test split: evaluations are of prompts of the train split') == 1
    assert 'data.held_out' in caplog.text


def test_a_held_out_share_is_a_function_of_ids_and_keeps_equal_prompts_together(copies):
    config = make_config(copies, 'dapo_raw.parquet')
    _, (learned, evaluated) = train.check(config, NOWHERE)
    sides = [{e.id for e in split.examples} for split in (learned, evaluated)]
    assert len(sides[0]) + len(sides[1]) == 36 and min(map(len, sides)) > 0
    assert not {e.prompt for e in learned.examples} & {e.prompt for e in evaluated.examples}
    config.seed, config.data.prompts_per_step = 7, 8
    assert {e.id for e in open_split(open_config(config, NOWHERE), 'test').examples} == sides[1]
    config.data.held_out = 0.6  # a greater share has all of a smaller one
    assert sides[1] < {e.id for e in open_split(open_config(config, NOWHERE), 'test').examples}


@pytest.mark.parametrize(
    'name, changes, words',
    [
        ('aime.jsonl', {'data.test_split': 'test', 'data.train_split': 'test'}, 'holds no test.jsonl'),
        ('alpaca.jsonl', {'data.template': '{instructions}'}, "names 'instructions', which is no column; name one of"),
        ('openr1.jsonl', {'reward.parts': (('numeric', 1.0), ('code', 1.0))}, "reads the column 'before' of the data"),
        (
            'countdown.jsonl',
            {OPTION + 'columns.numbers': 'numb'},
            "columns.numbers = 'numb': is in no row; name one of target, nums",
        ),
    ],
)
def test_what_cannot_work_ends_in_one_line_with_the_remedy(copies, name, changes, words):
    with pytest.raises(BadInput) as refused:
        train.check(make_config(copies, name, **changes), NOWHERE)
    assert words in str(refused.value), refused.value
