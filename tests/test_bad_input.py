"""Bad input: status 2, one message with thing, value and remedy, and nothing overwritten."""

import json
import os
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

from grpo_jax import algorithms, evaluate, train
from grpo_jax.errors import BadInput
from grpo_jax.learner import critic
from grpo_jax.models import hf, transformer
from grpo_jax.models.hf import families
from grpo_jax.run.open import open_config
from grpo_jax.run.settings import Settings
from grpo_jax.sharding import compiled
from grpo_jax.tools import export
from tests import tiny_run

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MODEL = os.path.join(ROOT, 'configs/models/characters')

# what a command line can get wrong: (arguments, words of the message)
COMMANDS = {
    'missing model folder': (
        ['--config=configs/arithmetic.py', '--config.model.path=runs/none/there'],
        ['runs/none/there', 'Hugging Face folder'],
    ),
    'missing flag': ([], ['config']),
}


@pytest.mark.parametrize('name', COMMANDS)
def test_command_line(name, tmp_path):
    arguments, words = COMMANDS[name]
    workdir = tmp_path / 'run'
    done = subprocess.run(
        [sys.executable, '-m', 'grpo_jax.train', f'--workdir={workdir}', *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    assert 'Traceback' not in done.stderr
    message = [line for line in done.stderr.splitlines() if line.startswith('error: ')]
    assert len(message) == 1
    assert all(word in message[0] for word in words), message[0]
    assert not workdir.exists()


# what a config can get wrong: (changes of the tiny run, words of the message)
CONFIGS = {
    'group of one': ({'rollout__group_size': 1}, ['rollout.group_size = 1', 'at least 2']),
    'truncated sampling': ({'rollout__top_p': 0.9}, ['0.9', 'accept_bias']),
    'greedy training': ({'rollout__temperature': 0.0}, ['rollout.temperature = 0.0']),
    'unknown dtype': ({'model__dtype': 'float8'}, ['float8', 'bfloat16']),
    'unknown data set': ({'data__name': 'gsm9k'}, ['gsm9k', 'grpo_jax/data']),
    'unknown data option': ({'data__options': {'digit': 1}}, ['digit']),
    'unknown reward': ({'reward__parts': (('numerical', 1.0),)}, ['numerical', 'grpo_jax/rewards']),
    'verifier that is no part': ({'reward__verifier': 'format'}, ['format', 'numeric']),
    'unknown piece': ({'algorithm__surrogate': 'clamp'}, ['clamp', 'dual_clip']),
    'k1 in the loss': ({'algorithm__kl': 'k1', 'algorithm__kl_coef': 0.1}, ['k1', 'k2']),
    'no chat template': ({'data__chat': True}, ['chat template', 'data.chat=False']),
    'prompts all too long': ({'data__max_prompt_tokens': 2}, ['max_prompt_tokens', '4 tokens']),
    'too many devices': ({'mesh__data': 16}, ['16', '8']),
    'mesh that does not divide the model': ({'mesh__tensor': 4}, ['mesh.tensor = 4', 'lower it to']),
    'mesh that does not divide the batch': ({'mesh__data': 8}, ['multiple of', '8']),
    'minibatches that split groups': ({'learner__minibatches': 3}, ['minibatches', '3']),
    'beyond the context': ({'rollout__max_tokens': 1000}, ['1006', '512']),
    'unknown schedule': ({'optimizer__schedule': 'step'}, ['step', 'cosine']),
    'penalized sampling': ({'rollout__repetition_penalty': 1.1}, ['1.1', 'accept_bias']),
    'quantized sampling': ({'rollout__weights_dtype': 'int8'}, ['int8', 'accept_bias']),
    'unknown cache dtype': ({'rollout__cache_dtype': 'int4', 'rollout__accept_bias': True}, ['int4', 'int8']),
    'cache too small for a group': ({'rollout__cache_gib': 1e-6}, ['rollout.cache_gib', 'at least']),
    'negative cache': ({'rollout__cache_gib': -1.0}, ['rollout.cache_gib = -1.0']),
    'unknown kernels': ({'rollout__kernels': 'fast'}, ['fast', 'auto, on or off']),
    'empty stop string': ({'rollout__stop_strings': ('',)}, ['rollout.stop_strings', 'not empty']),
    'thinking longer than the completion': ({'rollout__thinking_tokens': 12}, ['thinking_tokens', '12']),
    'demonstrations that do not fit': (
        {'rollout__max_tokens': 1, 'supervised__updates': 4},
        ['rollout.max_tokens = 1'],
    ),
}


@pytest.mark.parametrize('name', CONFIGS)
def test_config(name, tmp_path):
    changes, words = CONFIGS[name]
    with pytest.raises(BadInput) as error:
        train.run(tiny_run.config(**changes), str(tmp_path / 'run'))
    assert all(word in str(error.value) for word in words), str(error.value)
    with pytest.raises(BadInput) as checked:  # --check has the same judgement
        train.check(tiny_run.config(**changes), str(tmp_path / 'run'))
    assert {*str(error.value).splitlines()} <= {*str(checked.value).splitlines()}
    assert not (tmp_path / 'run' / 'config.json').exists()  # the mended config may use the workdir


@pytest.mark.parametrize('changes', [{'algorithm__correction': 'truncated'}, {'algorithm__ratio_base': 'sampler'}])
def test_quantized_sampling_is_no_bias_where_a_correction_knows_of_it(changes):
    Settings.from_config(tiny_run.config(rollout__weights_dtype='int8', rollout__cache_dtype='int8', **changes))
    with pytest.raises(BadInput, match='accept_bias'):
        Settings.from_config(tiny_run.config(rollout__top_p=0.9, **changes))


def test_folder_without_weights(tmp_path):
    config = tiny_run.config(model__random_init=False, supervised__updates=0)
    with pytest.raises(BadInput, match=r'has no model\.safetensors.*random_init=True'):
        train.run(config, str(tmp_path / 'run'))


def test_damaged_weights_are_refused_before_anything_compiles(tmp_path, monkeypatch):
    shutil.copytree(MODEL, tmp_path / 'model')
    model_config = families.load_config(MODEL)
    params = jax.device_get(jax.jit(transformer.init, static_argnums=1)(jax.random.key(0), model_config))
    hf.save(str(tmp_path / 'model'), MODEL, params, model_config, np.float32)
    monkeypatch.setattr(compiled.Executable, 'lower', lambda _: pytest.fail('has compiled'))
    changes = {'model__path': str(tmp_path / 'model'), 'model__random_init': False, 'supervised__updates': 0}
    open_config(tiny_run.config(**changes), str(tmp_path / 'run'))
    weights = tmp_path / 'model' / 'model.safetensors'
    os.truncate(weights, weights.stat().st_size - 4)
    with pytest.raises(BadInput, match=r'model\.path = .*model\.safetensors.*not a safetensors file'):
        train.run(tiny_run.config(**changes), str(tmp_path / 'run'))
    open_config(tiny_run.config(**changes | {'model__random_init': True}), str(tmp_path / 'run'))
    (tmp_path / 'run' / 'checkpoints' / '2').mkdir(parents=True)  # a run that goes on reads no weights
    open_config(tiny_run.config(**changes), str(tmp_path / 'run'))


def test_a_reward_models_folder_is_no_policy(tmp_path):
    shutil.copytree(MODEL, tmp_path / 'model')
    model_config = families.load_config(MODEL)
    params = jax.device_get(
        critic.new_params(jax.jit(transformer.init, static_argnums=1)(jax.random.key(0), model_config))
    )
    hf.save(str(tmp_path / 'model'), MODEL, params, model_config, np.float32)
    config = tiny_run.config(model__path=str(tmp_path / 'model'), model__random_init=False)
    with pytest.raises(BadInput, match=r'do not fit config\.json: .*left over .*score\.weight'):
        open_config(config, str(tmp_path / 'run'))
    open_config(config, str(tmp_path / 'run'), head=True)


def test_tokenizer_larger_than_the_model(tmp_path):
    shutil.copytree(MODEL, tmp_path / 'model')
    path = tmp_path / 'model' / 'config.json'
    path.write_text(json.dumps(json.loads(path.read_text()) | {'vocab_size': 50}))
    with pytest.raises(BadInput, match='99 tokens and the model 50'):
        open_config(tiny_run.config(model__path=str(tmp_path / 'model')), str(tmp_path / 'run'))


def test_workdir_of_another_config_is_refused_and_left_alone(tmp_path):
    tiny_run.record(open_config(tiny_run.config(), str(tmp_path / 'run')))
    before = (tmp_path / 'run' / 'config.json').read_bytes()
    with pytest.raises(BadInput, match=r'holds another run, in which rollout.group_size is 4 and not 8'):
        open_config(tiny_run.config(rollout__group_size=8), str(tmp_path / 'run'))
    assert (tmp_path / 'run' / 'config.json').read_bytes() == before


def test_workdir_that_is_a_file(tmp_path):
    (tmp_path / 'run').write_text('mine')
    with pytest.raises(BadInput, match='is a file'):
        tiny_run.record(open_config(tiny_run.config(), str(tmp_path / 'run')))
    assert (tmp_path / 'run').read_text() == 'mine'


def test_a_number_of_the_algorithm_that_no_piece_has_is_refused():
    section = tiny_run.config().algorithm
    algorithms.make(section)


@pytest.mark.parametrize('key', ['dead_groups', 'source', 'max_draws'])
def test_a_moved_key_in_a_preset_of_ones_own_is_refused(key):
    config = tiny_run.config()
    with config.unlocked():
        config.algorithm[key] = config.collection[key]  # what a preset may do: it may bring numbers of its own
    with pytest.raises(BadInput, match=key):
        algorithms.make(config.algorithm, config.collection)


def test_a_workdir_of_an_earlier_version_is_refused_in_a_sentence(tmp_path):
    tiny_run.record(open_config(tiny_run.config(), str(tmp_path / 'run')))
    path = tmp_path / 'run' / 'config.json'
    recorded = json.loads(path.read_text())
    del recorded['collection']
    path.write_text(json.dumps(recorded))
    with pytest.raises(BadInput, match=r'was begun by grpo_jax \d.*without collection'):
        evaluate.open_recorded(str(tmp_path / 'run'))


def test_export_and_evaluate_without_a_run(tmp_path):
    with pytest.raises(BadInput, match='holds no run'):
        evaluate.open_recorded(str(tmp_path))
    (tmp_path / 'out').mkdir()
    with pytest.raises(BadInput, match='nothing is overwritten'):
        export.export(str(tmp_path), str(tmp_path / 'out'), 'float32')
