"""Folders of peft: its adapters give its logits here, ours give ours there, and what is no plain LoRA is refused."""

import json
import os
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_hf import load, unpack
from test_transformer import logits

from grpo_jax.errors import BadInput
from grpo_jax.models import lora
from grpo_jax.models.hf import peft
from grpo_jax.models.lora import LoraOptions
from tests.golden import make_golden, make_peft

OPTIONS = LoraOptions(rank=3, alpha=5.0, targets='w[qkvo]|w_gate|w_down')
WEIGHTS = 'adapter_model.safetensors'


@pytest.fixture(scope='module')
def base(tmp_path_factory):
    """(ModelConfig, parameters) of the model that the golden adapters are on."""
    folder = tmp_path_factory.mktemp('qwen2')
    unpack('qwen2', folder)
    return load(folder)


def read(folder, c, options):
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = lora.split(lora.policy_table(c, options))[0]
    return peft.load_adapters(folder, c, options, lora.map_table(lambda *_: device, abstract))


def with_adapters(base, trained, options):
    return lora.join(trained, lora.freeze(base[1], options, 'float32'))


def merged(policy):
    return {**policy, 'layers': lora.merge(policy['layers'])}


def test_adapters_that_peft_saved_give_the_logits_of_peft(base):
    policy = with_adapters(base, read(make_peft.FOLDER, base[0], OPTIONS), OPTIONS)
    golden = np.load(os.path.join(make_peft.FOLDER, 'logits.npz'))
    tokens, mask = golden['tokens'], golden['mask']
    for params in (policy, merged(policy)):
        np.testing.assert_allclose(logits(params, tokens, mask, base[0])[mask], golden['logits'][mask], atol=1e-5)
    without = logits(base[1], tokens, mask, base[0])
    assert np.abs(without - golden['logits'])[mask].mean() > 0.1


def test_what_was_read_is_written_as_peft_wrote_it(base, tmp_path):
    trained = jax.device_get(read(make_peft.FOLDER, base[0], OPTIONS))
    peft.save_adapters(tmp_path, trained, base[0], OPTIONS, 'the/base', np.float32)
    ours, theirs = (load_file(os.path.join(folder, WEIGHTS)) for folder in (tmp_path, make_peft.FOLDER))
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        np.testing.assert_array_equal(ours[name], array, err_msg=name)
    ours, theirs = (
        json.loads(pathlib.Path(folder, 'adapter_config.json').read_text(encoding='utf8'))
        for folder in (tmp_path, make_peft.FOLDER)
    )
    assert ours.keys() <= theirs.keys()
    different = {'base_model_name_or_path', 'lora_dropout', 'target_modules'}
    assert {name for name, value in ours.items() if value != theirs[name]} == different
    assert ours['base_model_name_or_path'] == 'the/base' and ours['lora_dropout'] == 0
    assert sorted(ours['target_modules']) == sorted(theirs['target_modules'])


@pytest.fixture
def folder(tmp_path):
    """A copy of the golden folder, to be spoilt."""
    return shutil.copytree(make_peft.FOLDER, tmp_path / 'peft')


def spoil(folder, **settings):
    path = folder / 'adapter_config.json'
    config = json.loads(path.read_text(encoding='utf8')) | settings
    path.write_text(json.dumps(config), encoding='utf8')


@pytest.mark.parametrize(
    'settings, message',
    [
        (dict(peft_type='IA3'), 'peft_type.*whose peft_type is LORA'),
        (dict(use_dora=True), 'use_dora.*folder of plain LoRA'),
        (dict(bias='all'), 'bias.*folder of plain LoRA'),
        (dict(modules_to_save=['lm_head']), 'modules_to_save'),
        (dict(rank_pattern={'q_proj': 8}), 'rank_pattern'),
        (dict(layers_to_transform=[0]), 'layers_to_transform'),
        (dict(init_lora_weights='pissa_niter_4'), 'init_lora_weights.*has changed the weights of the model'),
        (dict(r=4), r'model.lora.rank = 3: is not r = 4'),
        (dict(lora_alpha=6), r'model.lora.alpha = 5.0: is not lora_alpha = 6'),
        (dict(use_rslora=True), 'model.lora.rslora = False: is not use_rslora = True'),
    ],
)
def test_other_methods_and_other_numbers_are_refused(base, folder, settings, message):
    spoil(folder, **settings)
    with pytest.raises(BadInput, match=message):
        peft.check(folder, base[0], OPTIONS)


def test_other_targets_are_refused_by_name(base, folder):
    with pytest.raises(BadInput, match=r"model.lora.targets = '\.\*'.*missing.*up_proj.*left over \[\]"):
        peft.check(folder, base[0], OPTIONS._replace(targets='.*'))
    with pytest.raises(BadInput, match=r'left over.*down_proj'):
        peft.check(folder, base[0], OPTIONS._replace(targets='w[qkvo]|w_gate'))


def test_tensors_that_do_not_fit_and_damaged_files_are_refused(base, folder):
    path, name = folder / WEIGHTS, 'base_model.model.model.layers.1.mlp.down_proj.lora_B.weight'
    tensors = load_file(path)
    for spoilt, message in (
        (tensors[name][:-1], f'{name}.*must be'),
        (tensors[name].astype(np.int32), 'I32.*is none of'),
        (np.full_like(tensors[name], np.nan), 'not finite'),
    ):
        save_file(tensors | {name: spoilt}, path)
        with pytest.raises(BadInput, match=message):
            read(folder, base[0], OPTIONS)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(BadInput, match='not a safetensors file'):
        read(folder, base[0], OPTIONS)
    path.unlink()
    with pytest.raises(BadInput, match='not a safetensors file'):
        peft.check(folder, base[0], OPTIONS)
    with pytest.raises(BadInput, match=r'adapter_config.json'):
        peft.check(folder / 'nowhere', base[0], OPTIONS)


def random_adapters(c, options):
    trained, _ = lora.split(lora.policy_table(c, options))
    noise = np.random.default_rng(0)
    return lora.map_table(lambda _, p: jnp.asarray(0.3 * noise.normal(size=p.shape), jnp.float32), trained)


@pytest.mark.filterwarnings('ignore:`is_gradient_checkpointing` is deprecated:FutureWarning')  # peft asks for it
@pytest.mark.parametrize('family', ['llama', 'qwen3'])
@pytest.mark.parametrize('options', [LoraOptions(4, 6.0), LoraOptions(2, 3.0, 'w[qv]|w_up', True)])
def test_peft_loads_what_is_written_and_computes_the_same(family, options, tmp_path):
    library = pytest.importorskip('peft', reason='peft is not installed: pip install peft')
    model = make_golden.make(family, make_golden.FAMILIES[family])
    model.save_pretrained(tmp_path / 'base')
    base = load(tmp_path / 'base')
    trained = random_adapters(base[0], options)
    peft.save_adapters(
        tmp_path / 'adapter', jax.device_get(trained), base[0], options, str(tmp_path / 'base'), np.float32
    )
    theirs = library.PeftModel.from_pretrained(model, str(tmp_path / 'adapter')).eval()
    tokens, mask = make_golden.batch()
    expected = make_golden.logits(theirs, tokens, mask)
    ours = logits(with_adapters(base, trained, options), tokens, mask, base[0])
    np.testing.assert_allclose(ours[mask], expected[mask], atol=1e-5)
    assert np.abs(expected - logits(base[1], tokens, mask, base[0]))[mask].mean() > 0.1
    theirs.save_pretrained(tmp_path / 'again')  # and back
    jax.tree.map(np.testing.assert_array_equal, read(tmp_path / 'again', base[0], options), trained)
