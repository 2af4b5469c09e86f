"""Data from Python: rows that lie in no file train, and are the run's from then on."""

import json
import os

import numpy as np
import pytest

from grpo_jax import evaluate, sample, train
from grpo_jax.errors import BadInput
from grpo_jax.example import Example
from grpo_jax.run import config_file
from grpo_jax.run.open import make_workdir, open_split, open_training
from grpo_jax.run.steering import Steering
from grpo_jax.tools import export, provenance, report, sweep
from grpo_jax.tools.preflight import plan
from tests import small_model, tiny_run

TRAIN = [{'prompt': f'{i}+3=', 'answer': i + 3, 'source': 'sums'} for i in range(40)]
TEST = [{'prompt': f'{i}+4=', 'answer': i + 4} for i in range(8)]
ROWS = {'train': TRAIN, 'test': TEST}


class Table:
    """Duck-typed, like a datasets.Dataset: its rows are mappings of plain and numpy values."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __iter__(self):
        return iter([row | {'answer': np.int64(row['answer']), 'vector': np.ones(2)} for row in self.rows])


def opened(workdir, examples, steered=None, **changes):
    run, splits = open_training(tiny_run.config(**changes), str(workdir), steered=steered, examples=examples)
    return run, splits


@pytest.mark.parametrize('kind', [list, iter, Table])
def test_rows_of_any_kind_are_read_as_those_of_a_file(tmp_path, kind):
    _, splits = opened(tmp_path / 'run', {split: kind(rows) for split, rows in ROWS.items()})
    first = splits.train.examples[0]
    assert (first.prompt, first.answer, first.id, first.meta['source']) == ('0+3=', '3', 0, 'sums')
    assert len(splits.train.examples) == 40 and len(splits.test.examples) == 8


def test_rows_to_learn_from_are_enough(tmp_path, caplog):
    for given in (TRAIN, Table(TRAIN), {'train': TRAIN}, {'train': TRAIN, 'test': []}):
        _, splits = opened(tmp_path / 'run', given)
        assert len(splits.test.examples) == 40 and splits.test.examples == splits.train.examples
    assert 'no test split' in caplog.text and 'folder' not in caplog.text  # a key that nobody set
    _, splits = opened(tmp_path / 'run', {'train': TRAIN}, data__held_out=0.3)
    assert 0 < len(splits.test.examples) < len(splits.train.examples) < 40


def test_examples_and_columns_of_other_names_are_taken(tmp_path):
    rows = [Example(row['prompt'], str(row['answer']), 9 + i, {}) for i, row in enumerate(TRAIN)]
    _, splits = opened(tmp_path / 'run', {'train': rows, 'test': TEST})
    assert splits.train.examples[0].id == 9
    renamed = {split: [{'q': r['prompt'], 'x': {'gold': r['answer']}} for r in rows] for split, rows in ROWS.items()}
    fields = {'folder': '', 'prompt_field': 'q', 'answer_field': 'x.gold'}
    _, splits = opened(tmp_path / 'run', renamed, data__name='files', data__options=fields)
    assert splits.test.examples[1].answer == '5'
    of_sums = tiny_run.config().data.options.to_dict()  # a config of sums, to which options of files were added
    for options in (fields | of_sums, of_sums | fields):
        _, splits = opened(tmp_path / 'run', renamed, data__options=options)
        assert splits.test.examples[1].answer == '5'


def test_a_run_goes_on_with_the_same_rows_alone(tmp_path, monkeypatch):
    run, _ = opened(tmp_path / 'run', ROWS)
    make_workdir(run, 0)
    make_workdir(opened(tmp_path / 'run', {'train': Table(TRAIN).rows, 'test': iter(TEST)})[0], 1)
    with pytest.raises(BadInput, match=r'content of the train split is .*: 1 appended'):
        opened(tmp_path / 'run', {'train': [*TRAIN, TEST[0]], 'test': TEST})
    other = [row | {'answer': 1} for row in TRAIN]
    with pytest.raises(BadInput, match='other answers'):
        opened(tmp_path / 'run', {'train': other, 'test': TEST})
    opened(tmp_path / 'run', {'train': other, 'test': TEST}, Steering(amend=True))
    # the command line
    with pytest.raises(BadInput, match=r'holds a run whose data came from Python; go on with train\.run') as error:
        open_training(tiny_run.config(), str(tmp_path / 'run'))
    assert '\n' not in str(error.value)
    with pytest.raises(BadInput, match=r"folder = '': names none; hand rows to train.run\(examples=\.\.\.\), or set"):
        open_training(tiny_run.config(data__name='files', data__options={'folder': ''}), str(tmp_path / 'other'))
    # files with the same rows
    for split, rows in ROWS.items():
        (tmp_path / f'{split}.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    open_training(tiny_run.config(data__name='files', data__options={'folder': str(tmp_path)}), str(tmp_path / 'run'))


def test_check_takes_rows_and_commands_on_the_run_say_where_they_are(tmp_path):
    run, _ = train.check(tiny_run.config(), str(tmp_path / 'run'), examples=ROWS)
    make_workdir(run, 0)
    with pytest.raises(BadInput, match=r'the rows of the run came from Python: give them again as examples=') as error:
        open_split(evaluate.open_recorded(str(tmp_path / 'run')), 'test')
    assert '\n' not in str(error.value)


@pytest.mark.parametrize(
    'examples, words',
    [
        ({'test': TEST}, "have no split 'train'"),
        ({'train': None}, "examples = {'train': None}: have no rows; give a list of dicts"),
        ('data/sums', "examples = {'train': 'data/sums'}: have no rows"),
        ({'train': ['prompt', 'answer'], 'test': TEST}, r"examples\['train'\]\[0\] = 'prompt': must be a dict or an"),
        ({'train': [{'prompt': ['1'], 'answer': 2}], 'test': TEST}, r"field 'prompt'"),
    ],
)
def test_what_cannot_be_read_is_a_line(tmp_path, examples, words):
    with pytest.raises(BadInput, match=words):
        opened(tmp_path / 'run', examples)


def test_a_run_of_rows_goes_on_and_is_evaluated_and_sampled_with_them(tmp_path):
    workdir = str(tmp_path / 'run')
    for steps in (1, 2):
        rows = {'train': iter(TRAIN), 'test': iter(TEST)}
        state = train.run(tiny_run.config(steps=steps), workdir, examples=rows)
        assert int(state.step) == steps
    content, completions = evaluate.open_report(evaluate.open_subject(None, workdir, examples=ROWS), 1, 'test')
    assert content['prompts'] == 2 and {row['prompt'] for row in completions} <= {row['prompt'] for row in TEST}
    figures = sample.run(None, workdir, str(tmp_path / 'samples'), sample.Request(samples=1, prompts=3), examples=TRAIN)
    assert figures['prompts'] == 3 and len(tiny_run.rows(tmp_path / 'samples', '000000.jsonl')) == 3
    # what reads no rows needs none
    assert not [*provenance.verify(workdir), *provenance.compare_contents(workdir)]
    assert 'examples of train.run' in '\n'.join(provenance.describe_run(workdir))
    assert os.path.isfile(report.write_report([workdir]))
    export.export(workdir, str(tmp_path / 'exported'), 'float32')


def test_a_sweep_trains_each_run_on_the_rows_and_finds_what_is_finished(tmp_path, capsys):
    def get_config(preset):
        short = dict(steps=1, supervised__updates=0)
        return tiny_run.config(preset=preset, **short)

    for _ in range(2):
        given = {'train': iter(TRAIN), 'test': iter(TEST)}
        rows = sweep.run(get_config, ['dr_grpo', 'grpo'], 1, str(tmp_path / 'sweep'), examples=given)
        assert [row['status'] for row in rows] == ['1/1', '1/1']
    assert capsys.readouterr().err.count(' of 2: ') == 2  # each was trained once
    contents = json.loads((tmp_path / 'sweep' / 'grpo' / '0' / 'contents.json').read_text())
    assert contents['splits']['train']['rows'] == 40


def test_a_model_is_evaluated_on_rows(tmp_path):
    folder = small_model.write_drawn(tmp_path / 'model', seed=0)
    made = tiny_run.config(model__path=folder, model__random_init=False)
    content, _ = evaluate.open_report(evaluate.open_subject(made, None, examples=ROWS), 1, 'test')
    assert content['prompts'] == 2 and content['split'] == 'test'


def test_a_run_on_other_data_is_evaluated_on_rows(tmp_path):
    made = tiny_run.config(steps=1, evaluation__every=0)
    train.run(made, str(tmp_path / 'run'))
    content, rows = evaluate.open_report(evaluate.open_subject(None, str(tmp_path / 'run'), examples=ROWS), 1, 'test')
    assert content['prompts'] == 2 and {row['prompt'] for row in rows} <= {row['prompt'] for row in TEST}


def test_preflight_plans_a_run_of_rows(tmp_path):
    run, _ = opened(tmp_path / 'run', ROWS)
    make_workdir(run, 0)
    recorded = config_file.read_recorded(str(tmp_path / 'run'), trust=False)
    recorded.mesh.update(data=0)
    assert plan.make(recorded, 'v5e:2x2').shapes.prompts == 4
