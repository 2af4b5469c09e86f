"""Settings of other frameworks: the tables of docs/coming_from.md name keys that exist, and runs refuse the names."""

import ast
import inspect
import json
import re

import pyarrow as pa
import pyarrow.parquet
import pytest

from grpo_jax import algorithms, coming_from, data, ranges, train
from grpo_jax.algorithms.algorithm import MODULES
from grpo_jax.configs import default
from grpo_jax.errors import BadInput
from grpo_jax.run import config_file, settings
from tests import doc_examples, small_model

PAGE = 'docs/coming_from.md'
SECTIONS = default.get_config()
OPTIONAL = ('data.options.folder', 'data.options.prompt_field', 'data.options.answer_field')  # of data.name='files'
KEY = re.compile(r'\b([a-z_]+(?:\.[a-z_0-9]+)+|steps|seed)(?:=(\'.*?\'|\(.*?\)))?')


def keys_in(text):
    """(key, value as a text or '') of each key of this project's that a text names."""
    return [(key, value) for key, value in KEY.findall(text) if key.split('.')[0] in SECTIONS]


def value_at(key):
    value = SECTIONS
    for name in key.split('.'):
        value = value[name]
    return value


@pytest.mark.parametrize('row', coming_from.settings(), ids=lambda row: f'{row.framework}-{row.name}')
def test_a_row_names_keys_that_exist_with_values_that_they_may_have(row):
    assert row.here or row.differs, 'a setting without an equivalent says why'
    keys = keys_in(row.here)
    assert bool(keys) == bool(row.here) and not re.sub(KEY, '', row.here).replace(' and ', ''), row.here
    code = ' '.join(re.findall('`(.*?)`', row.differs)) if row.framework not in ('verl', 'Tunix') else ''
    for key, value in keys + keys_in(code):
        if key in OPTIONAL or key in (other.name for other in coming_from.settings()):
            continue
        value_at(key)  # raises for a key that is not there
        kind, name = key.split('.')[-1], ast.literal_eval(value) if value else None
        if key.startswith('algorithm.') and kind in MODULES and name:
            for piece in [name] if isinstance(name, str) else name:
                assert inspect.isfunction(getattr(MODULES[kind], piece)), (key, piece)
        elif value:
            declared = ranges.keys_of(settings.Keys)
            for part in key.split('.')[:-1]:
                declared = ranges.keys_of(ranges.type_of(declared[part].annotation))
            ranges.check_value(key, name, declared[kind].annotation)


def test_a_name_is_explained_with_its_key():
    for row in coming_from.settings():
        name, _, value = row.name.partition('=')
        assert (row.here or 'is no key here') in coming_from.explain(name, value or '1'), row


@pytest.mark.parametrize('row', coming_from.settings()[::12], ids=lambda row: f'{row.framework}-{row.name}')
def test_a_name_is_refused_with_its_key_on_the_command_line(row):
    name, _, value = row.name.partition('=')
    try:
        value_at(name)
    except (KeyError, AttributeError, TypeError):
        with pytest.raises(BadInput) as error:
            config_file.Parser(['train', f'--config.{name}={value or 1}']).parse('arithmetic')
        assert (row.here or 'is no key here') in str(error.value)


@pytest.mark.parametrize(
    'line, key',
    [
        ('config.num_generations = 8', 'rollout.group_size'),
        ('config.algorithm.beta = 0.04', 'algorithm.kl_coef'),
        ('config.model.lora.r = 8', 'model.lora.rank'),
        (
            "config.model.lora.targets = 'q_proj|v_proj'",
            "model.lora.targets='wq' here, LoraConfig's target_modules=v_proj",
        ),
        ("config.model.lora.target_modules = ['q_proj']", 'model.lora.targets'),
        ("config.model.lora.targets = ['k_proj']", "model.lora.targets='wk'"),
        ('config.trainer.total_epochs = 3', 'verl'),
        ('config.data.options.train_files = 1', 'data.options.folder'),
        ('config.optimizer.bf16 = True', "model.dtype='bfloat16'"),
        ('config.update_from_flattened_dict({"rollout.val_kwargs.top_p": 0.7})', 'evaluation.top_p'),
        ('config.rollout.val_kwargs.n = 8', 'val_kwargs is a section of verl'),
    ],
)
def test_a_config_file_with_a_name_of_another_framework_is_refused_with_the_key(tmp_path, line, key):
    text = f'from grpo_jax.configs import default\ndef get_config():\n    config = default.get_config()\n    {line}\n'
    (tmp_path / 'mine.py').write_text(f'{text}    return config\n')
    with pytest.raises(BadInput, match=re.escape(key)):
        config = config_file.read_config(str(tmp_path / 'mine.py'))
        settings.Settings.from_config(config)
        data.locate(settings.DataOptions.from_config(config.data))
        algorithms.make(config.algorithm, config.collection)


@pytest.mark.parametrize(
    'word, message',
    [
        ('actor_rollout_ref.rollout.n=8', 'rollout.group_size'),
        ('+trainer.total_epochs=3', 'data.epochs'),
        ('steps=5', '--config.KEY=VALUE'),
        ('--num_generations=8', 'rollout.group_size'),
        ('--per-device-train-batch-size=8', 'data.prompts_per_step'),
        ('--lora_dropout=0.1', 'left out on purpose'),
        ('--loss_agg_mode=seq-mean-token-sum', "algorithm.weights='sequence_sum'"),
        ('--config=grpoo', 'choose one of'),
        ('--config=GSM9K', 'did you mean gsm8k'),
        ('--config=gsm8k:Dr-GRPO', 'did you mean dr_grpo'),
        ('--config=recipes/dappo', 'did you mean recipes/dapo'),
    ],
)
def test_a_word_on_the_command_line_that_is_no_flag_is_refused_with_what_is_meant(capsys, word, message):
    own = ['--workdir=w', word] if word.startswith('--config=') else ['--workdir=w', '--config=arithmetic', word]
    with pytest.raises((SystemExit, BadInput)) as error, doc_examples.parsed('train', own):
        pass
    assert message in (str(error.value) if isinstance(error.value, BadInput) else capsys.readouterr().err)


def test_all_foreign_flags_are_refused_at_once(capsys):
    own = ['--workdir=w', '--config=arithmetic', '--num_generations=8', '--beta', '0.04', '--learning_rate=1e-6']
    own += ['--config.steps=3', '--noconfig.data.chat', '--config.optimizer.learning_rate', '-1']  # which are known
    with pytest.raises(SystemExit), doc_examples.parsed('train', own):
        pass
    lines = capsys.readouterr().err.splitlines()
    meant = ('rollout.group_size', 'algorithm.kl_coef', 'optimizer.learning_rate')
    assert len(lines) == 3 and all(key in line for key, line in zip(meant, lines, strict=True)), lines


@pytest.mark.parametrize(
    'changes, meant',
    [
        ({'weights': 'dapo'}, "TRL's loss_type=dapo is algorithm.weights='token_mean' here"),
        ({'weights': 'seq-mean-token-sum'}, "algorithm.weights='sequence_sum' here"),
        ({'kl': 'low_var_kl'}, "algorithm.kl='k3' here"),
        ({'advantage': 'grpo'}, 'grpo is group_norm'),
        ({'ratio': 'sequence'}, "algorithm.ratio='sequence_geometric'"),
        ({'weights': 'nothing'}, 'choose one of'),
    ],
)
def test_a_value_of_another_framework_is_refused_with_the_one_that_is_meant(changes, meant):
    config = config_file.read_config(config_file.locate('arithmetic'), 'grpo')
    config.algorithm.update(changes)
    with pytest.raises(BadInput, match=re.escape(meant)):
        algorithms.make(config.algorithm, config.collection)


def test_names_that_no_framework_has_and_that_several_have_are_not_explained():
    assert not any(map(coming_from.explain, ('group_sise', 'path', 'data.fooo', 'reward_model.lenth')))
    two = coming_from.explain('train_batch_size')
    assert 'learner.minibatches' in two and 'data.prompts_per_step' in two


@pytest.fixture
def brought(tmp_path, monkeypatch):
    """A folder with the page's files, a model with a chat template, and 40 rows of data."""
    monkeypatch.chdir(tmp_path)
    doc_examples.write_files(PAGE, str(tmp_path))
    model = small_model.write(tmp_path / 'model')
    path = tmp_path / 'model' / 'tokenizer_config.json'
    template = '{% if enable_thinking %}!{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}'
    path.write_text(json.dumps(json.loads(path.read_text()) | {'chat_template': template}))
    (tmp_path / 'DATA').mkdir()
    for split in ('train', 'test'):
        rows = [
            {
                'problem': f'{i}+1{split[1]}=',
                'answer': str(i + 1),
                'prompt': [{'role': 'user', 'content': f'{i}+2{split[1]}='}],
                'data_source': 'sums',
                'reward_model': {'style': 'rule', 'ground_truth': str(i + 2)},
                'extra_info': {'index': i},
            }
            for i in range(40)
        ]
        pa.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / 'DATA' / f'{split}.parquet')
    return model


def shrunk(file, model):
    """The config of a file, with the sizes of a test."""
    config = config_file.read_config(file)
    config.model.path, config.model.random_init, config.model.dtype = model, True, 'float32'
    config.data.prompts_per_step, config.data.max_prompt_tokens = 4, 12
    config.rollout.max_tokens, config.rollout.group_size = 6, 2
    config.learner.minibatches, config.log.trackers = 2, ()
    config.evaluation.prompts, config.evaluation.samples = 4, 1
    config.reward.options.overlong.margin = 2
    if config.algorithm.weights == 'fixed_length':
        config.algorithm.fixed_length = 6
    return config


@pytest.mark.parametrize('file, steps', [('from_trl.py', 100), ('from_verl.py', 150)])
def test_the_file_of_the_page_is_a_run(brought, file, steps):
    run, _ = train.check(shrunk(file, brought), 'run')
    # verl: 15 epochs of 40 prompts by 4; TRL: 200 updates by 2 epochs of a minibatch, before it is made small
    assert run.settings.steps == steps


def test_a_step_of_the_script_that_was_brought_pays_its_rewards(brought, long):
    config = shrunk('from_trl.py', brought)
    config.steps, config.evaluation.every = 1, 0
    row = {}
    train.run(config, 'run', on_step=lambda step, last: row.update(last))
    assert {'reward/accuracy', 'reward/shape'} <= set(row) and row['finite'] == 1
