"""Hugging Face folders: logits of transformers, folders that transformers reads back, and refusals."""

import dataclasses
import glob
import json
import os
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_transformer import logits
from transformers import AutoTokenizer

from grpo_jax.errors import BadInput
from grpo_jax.models import hf, transformer
from grpo_jax.models.hf import families
from grpo_jax.models.hf import names as tensor_names
from grpo_jax.models.hf import tensors as tensor_files
from tests.golden import make_golden

GOLDEN = os.path.dirname(make_golden.__file__)
BASE = dict(rope_type='default', rope_theta=1e4)
# what the golden files do not hold together: (family, settings)
VARIANTS = {
    'llama': ('llama', dict(tie_word_embeddings=True)),
    'llama, one kv head': ('llama', dict(num_key_value_heads=1, rms_norm_eps=1e-2)),
    'llama, no groups': ('llama', dict(num_key_value_heads=4, rope_parameters=BASE | dict(rope_theta=100.0))),
    'llama, biases': ('llama', dict(attention_bias=True, mlp_bias=True)),
    'llama, linear': ('llama', dict(rope_parameters=BASE | dict(rope_type='linear', factor=4.0))),
    'llama, llama3': ('llama', make_golden.FAMILIES['llama']),
    'qwen2': ('qwen2', dict(tie_word_embeddings=False)),
    'qwen2, yarn': ('qwen2', make_golden.FAMILIES['qwen2']),
    'qwen2, yarn, attention_factor': (
        'qwen2',
        dict(
            rope_parameters=BASE
            | dict(rope_type='yarn', factor=4.0, original_max_position_embeddings=16, attention_factor=0.7)
        ),
    ),
    'qwen3, yarn, mscale': (
        'qwen3',
        dict(
            head_dim=16,
            rope_parameters=BASE
            | dict(
                rope_type='yarn',
                factor=8.0,
                original_max_position_embeddings=16,
                mscale=0.8,
                mscale_all_dim=0.3,
                beta_fast=4.0,
                beta_slow=0.5,
                truncate=False,
            ),
        ),
    ),
    'qwen3, biases': ('qwen3', dict(attention_bias=True, tie_word_embeddings=False)),
    'qwen3': ('qwen3', make_golden.FAMILIES['qwen3']),
    **{
        family: (family, make_golden.FAMILIES[family])
        for family in make_golden.FAMILIES
        if family not in ('llama', 'qwen2', 'qwen3')
    },
    'qwen2, windows': ('qwen2', dict(use_sliding_window=True, sliding_window=6, max_window_layers=1)),
    'qwen3, windows': ('qwen3', dict(use_sliding_window=True, sliding_window=3, max_window_layers=0)),
    'mistral, no window': ('mistral', dict(sliding_window=None)),
    'gemma2, no caps': (
        'gemma2',
        make_golden.FAMILIES['gemma2'] | dict(attn_logit_softcapping=None, final_logit_softcapping=None),
    ),
    'phi3, plain': ('phi3', dict(pad_token_id=0, tie_word_embeddings=True)),
    'smollm3, every second': ('smollm3', dict(no_rope_layer_interval=2, pad_token_id=0)),
}


def load(folder):
    """(ModelConfig, params) of a folder, on one device."""
    c = families.load_config(folder)
    device = transformer.map_table(lambda *_: jax.devices()[0], transformer.param_table(c))
    return c, hf.load_params(folder, c, device)


def unpack(family, folder):
    """The golden model of a family as a Hugging Face folder; returns its npz."""
    stored = np.load(os.path.join(GOLDEN, f'{family}.npz'))
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, 'config.json'), 'w', encoding='utf8') as file:
        file.write(str(stored['config']))
    save_file(
        {name.removeprefix('weights/'): stored[name] for name in stored if name.startswith('weights/')},
        os.path.join(folder, 'model.safetensors'),
    )
    return stored


def change_config(folder, **changes):
    path = os.path.join(folder, 'config.json')
    with open(path, encoding='utf8') as file:
        config = json.load(file)
    with open(path, 'w', encoding='utf8') as file:
        json.dump(config | changes, file)


def change_weights(folder, change):
    """Rewrites the folder's weights after change(dict of arrays)."""
    path = os.path.join(folder, 'model.safetensors')
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def assert_same_logits(ours, theirs, mask):
    """Equal to 1e-5 wherever the mask is set, and not by being zero."""
    np.testing.assert_allclose(np.asarray(ours)[mask], theirs[mask], atol=1e-5)
    assert theirs[mask].std() > 0.3


@pytest.fixture
def folder(tmp_path):
    """A good llama folder to break: untied, all biases, no tokenizer."""
    unpack('llama', tmp_path)
    return str(tmp_path)


@pytest.fixture(scope='module')
def torch():
    return pytest.importorskip('torch')


# logits


@pytest.mark.parametrize('family', families.FAMILIES)
def test_stored_logits_of_transformers_are_reproduced(family, tmp_path):
    stored = unpack(family, tmp_path)
    c, params = load(str(tmp_path))
    mask = stored['mask']
    assert_same_logits(logits(params, stored['tokens'], mask, c), stored['logits'], mask)


@pytest.mark.parametrize('variant', VARIANTS)
def test_logits_equal_those_of_transformers(torch, variant, tmp_path):
    model = make_golden.make(*VARIANTS[variant])
    model.save_pretrained(tmp_path)
    c, params = load(str(tmp_path))
    tokens, mask = make_golden.batch(c.vocab_size)
    assert_same_logits(logits(params, tokens, mask, c), make_golden.logits(model, tokens, mask), mask)


def test_the_variants_differ_from_one_another(torch):
    # a setting that transformers ignores, say through a changed spelling, would test nothing
    tokens, mask = make_golden.batch(32)
    seen = {name: make_golden.logits(make_golden.make(*variant), tokens, mask) for name, variant in VARIANTS.items()}
    same = [
        (a, b) for a in seen for b in seen if a < b and np.abs(seen[a][..., :32] - seen[b][..., :32])[mask].max() < 1e-3
    ]
    assert not same


@pytest.mark.parametrize('spelling', ['rope_type', 'type'])
def test_the_older_spellings_of_rotary_scaling_are_read(folder, spelling):
    path = os.path.join(folder, 'config.json')
    tokens, mask = make_golden.batch()
    c, params = load(folder)
    with open(path, encoding='utf8') as file:
        config = json.load(file)
    rope = config.pop('rope_parameters')
    older = dict(rope_theta=rope.pop('rope_theta'), rope_scaling={spelling: rope.pop('rope_type')} | rope)
    with open(path, 'w', encoding='utf8') as file:
        json.dump(config | older, file)
    then = families.load_config(folder)
    assert dict(then.rope_scaling).items() >= dict(c.rope_scaling).items()
    np.testing.assert_array_equal(logits(params, tokens, mask, then), logits(params, tokens, mask, c))


# every field of ModelConfig

PERTURBED = dict(
    vocab_size=65,
    width=40,
    layers=3,
    heads=8,
    kv_heads=1,
    head_dim=16,
    mlp=41,
    norm_eps=0.1,
    rope_theta=100.0,
    rope_scaling=(('factor', 4.0), ('rope_type', 'linear')),
    qk_norm=True,
    qkv_bias=False,
    out_bias=False,
    mlp_bias=False,
    tie_embeddings=True,
    fused=True,
    activation='gelu_pytorch_tanh',
    norms='after',
    norm_offset=1.0,
    norm_in_float32=True,
    qk_norm_over_heads=True,
    embed_scale=3.0,
    residual_scale=0.7,
    attention_scale=0.5,
    attention_cap=1.5,
    logit_divisor=0.4,
    logit_cap=2.0,
    windows=(4, 0),
    rotary_dim=4,
    local_rope=(100.0, ()),
    unrotated=(0,),
)
# what shows only beside another field
BESIDE = dict(qk_norm_over_heads=dict(qk_norm=True), local_rope=dict(windows=(4, 0)))


@pytest.mark.parametrize('field', [field.name for field in dataclasses.fields(transformer.ModelConfig)])
def test_changing_a_field_changes_the_tensors_or_the_logits(folder, field):
    c, params = load(folder)
    c = dataclasses.replace(c, **BESIDE.get(field, {}))
    changed = dataclasses.replace(c, **{field: PERTURBED[field]})
    assert changed != c
    if tensors(changed) == tensors(c):
        # what rounds otherwise shows where numbers are rounded
        dtype, least = (jnp.bfloat16, 1e-4) if field == 'norm_in_float32' else (jnp.float32, 1e-2)
        params = jax.tree.map(lambda x: x.astype(dtype), params)
        tokens, mask = make_golden.batch()
        difference = np.abs(logits(params, tokens, mask, changed) - logits(params, tokens, mask, c))
        assert difference[mask].max() > least


def tensors(c):
    """What a folder of the model holds, by our names."""
    table = transformer.param_table(c)
    return table, tensor_names.find_tensors(table, c)


PLAIN = dict(rope_type='default', rope_theta=1e4)
GEMMA, GRANITE, TYPES = dict(model_type='gemma2'), dict(model_type='granite'), ['sliding_attention', 'full_attention']
LOCAL = dict(full_attention=PLAIN, sliding_attention=dict(rope_type='default', rope_theta=100.0))
CONFIG_KEYS = dict(
    vocab_size=dict(vocab_size=65),
    width=dict(hidden_size=40),
    layers=dict(num_hidden_layers=3),
    heads=dict(num_attention_heads=8),
    kv_heads=dict(num_key_value_heads=1),
    head_dim=dict(head_dim=16),
    mlp=dict(intermediate_size=41),
    norm_eps=dict(rms_norm_eps=0.1),
    rope_theta=dict(rope_parameters=dict(rope_type='default', rope_theta=100.0)),
    rope_scaling=dict(rope_parameters=dict(rope_type='linear', factor=4.0, rope_theta=1e4)),
    qk_norm=dict(model_type='qwen3'),
    qkv_bias=dict(attention_bias=False),
    out_bias=dict(attention_bias=False),
    mlp_bias=dict(mlp_bias=False),
    tie_embeddings=dict(tie_word_embeddings=True),
    fused=dict(model_type='phi3', rope_parameters=PLAIN),
    activation=GEMMA,
    norms=dict(model_type='olmo2'),
    norm_offset=GEMMA,
    norm_in_float32=GEMMA,
    qk_norm_over_heads=dict(model_type='olmo2'),
    embed_scale=GRANITE | dict(embedding_multiplier=3.0),
    residual_scale=GRANITE | dict(residual_multiplier=0.7),
    attention_scale=GRANITE | dict(attention_multiplier=0.5),
    attention_cap=GEMMA | dict(attn_logit_softcapping=1.5),
    logit_divisor=GRANITE | dict(logits_scaling=0.4),
    logit_cap=GEMMA | dict(final_logit_softcapping=2.0),
    windows=dict(model_type='olmo3', layer_types=TYPES, sliding_window=4, rope_parameters=LOCAL),
    rotary_dim=dict(model_type='phi3', head_dim=8, rope_parameters=PLAIN | dict(partial_rotary_factor=0.5)),
    local_rope=dict(model_type='gemma3_text', layer_types=TYPES, rope_parameters=LOCAL),
    unrotated=dict(model_type='smollm3', no_rope_layers=[0, 1], pad_token_id=0),
)


@pytest.mark.parametrize('field', [field.name for field in dataclasses.fields(transformer.ModelConfig)])
def test_every_field_is_read_from_config_json(folder, field):
    for weights in glob.glob(f'{folder}/*.safetensors'):  # with a head of its own, which no tie takes away
        os.unlink(weights)
    before = families.load_config(folder)
    change_config(folder, **CONFIG_KEYS[field])
    after = families.load_config(folder)
    assert getattr(after, field) != getattr(before, field)
    if field not in ('qk_norm', 'rope_theta'):  # which a changed family and a dropped scaling change as well
        assert getattr(after, field) == PERTURBED[field]


# out again


@pytest.mark.parametrize('family', families.FAMILIES)
def test_saved_weights_read_back_bit_for_bit(family, tmp_path):
    unpack(family, tmp_path / 'in')
    c, params = load(str(tmp_path / 'in'))
    hf.save(str(tmp_path / 'out'), str(tmp_path / 'in'), params, c, np.float32)
    again_c, again = load(str(tmp_path / 'out'))
    assert again_c == c
    jax.tree.map(np.testing.assert_array_equal, again, params)


@pytest.mark.parametrize('variant', ['llama, biases', 'qwen2', 'qwen3', *list(VARIANTS)[12:20]])
def test_transformers_reads_a_saved_folder(torch, variant, tmp_path):
    import transformers

    make_golden.make(*VARIANTS[variant]).save_pretrained(tmp_path / 'in')
    c, params = load(str(tmp_path / 'in'))
    params = jax.tree.map(lambda x: x + 0.1, params)  # what is saved is the params given, not the source's weights
    hf.save(str(tmp_path / 'out'), str(tmp_path / 'in'), params, c, np.float32)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'out')
    tokens, mask = make_golden.batch(c.vocab_size)
    assert model.dtype == torch.float32
    assert_same_logits(logits(params, tokens, mask, c), make_golden.logits(model, tokens, mask), mask)


def test_transformers_reads_a_folder_saved_as_bfloat16(torch, tmp_path):
    import transformers

    unpack('llama', tmp_path / 'in')
    c, params = load(str(tmp_path / 'in'))
    hf.save(str(tmp_path / 'out'), str(tmp_path / 'in'), params, c, np.dtype(ml_dtypes.bfloat16))
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'out').dtype == torch.bfloat16
    # computed in float32, the only loss is the rounding of the weights
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'out', dtype=torch.float32)
    rounded = jax.tree.map(lambda x: np.asarray(x).astype(ml_dtypes.bfloat16).astype(np.float32), params)
    tokens, mask = make_golden.batch()
    assert_same_logits(logits(rounded, tokens, mask, c), make_golden.logits(model, tokens, mask), mask)


def test_a_saved_folder_names_its_dtype_once(folder, tmp_path):
    change_config(folder, torch_dtype='float16')
    c, params = load(folder)
    hf.save(str(tmp_path / 'out'), folder, params, c, np.dtype(ml_dtypes.bfloat16))
    with open(tmp_path / 'out' / 'config.json', encoding='utf8') as file:
        config = json.load(file)
    assert config['dtype'] == 'bfloat16' and 'torch_dtype' not in config


def test_sharded_weights_equal_the_single_file(torch, tmp_path):
    model = make_golden.make(*VARIANTS['qwen3'])
    model.save_pretrained(tmp_path / 'one')
    model.save_pretrained(tmp_path / 'many', max_shard_size='20KB')
    assert len(list((tmp_path / 'many').glob('*.safetensors'))) > 2
    jax.tree.map(np.testing.assert_array_equal, load(str(tmp_path / 'many'))[1], load(str(tmp_path / 'one'))[1])


def test_a_head_that_is_stored_though_tied_is_left_alone(tmp_path):
    unpack('qwen3', tmp_path)
    params = load(str(tmp_path))[1]
    change_weights(tmp_path, lambda t: t.update({'lm_head.weight': t['model.embed_tokens.weight'].copy()}))
    jax.tree.map(np.testing.assert_array_equal, load(str(tmp_path))[1], params)


def test_a_tied_model_with_a_head_of_its_own_keeps_both_also_from_a_copy(tmp_path, caplog):
    unpack('qwen3', tmp_path / 'one')
    change_weights(tmp_path / 'one', lambda t: t.update({'lm_head.weight': -t['model.embed_tokens.weight']}))
    c, params = load(str(tmp_path / 'one'))
    np.testing.assert_array_equal(params['lm_head'], -params['embed'].T)
    assert caplog.text.count('config.json ties the head') == 1
    hf.check_weights(str(tmp_path / 'one'), c)
    hf.copy_files(tmp_path / 'one', tmp_path / 'copy')  # as a run's workdir has it
    assert families.load_config(tmp_path / 'copy') == c
    hf.save(tmp_path / 'saved', tmp_path / 'copy', jax.device_get(params), c, np.float32)
    jax.tree.map(np.testing.assert_array_equal, load(str(tmp_path / 'saved'))[1], params)


def test_copied_files_hold_no_weights(folder, tmp_path):
    for name in ('tokenizer.json', 'chat_template.jinja', 'model.safetensors.index.json', 'notes.txt'):
        with open(os.path.join(folder, name), 'w', encoding='utf8'):
            pass
    hf.copy_files(folder, str(tmp_path / 'out'))
    assert sorted(os.listdir(tmp_path / 'out')) == ['chat_template.jinja', 'config.json', 'tokenizer.json']


@pytest.mark.parametrize('stored', ['single', 'sharded'])
def test_a_tied_model_that_stores_only_its_head_loads(tmp_path, stored):
    unpack('qwen3', tmp_path)
    params = load(str(tmp_path))[1]
    change_weights(tmp_path, lambda t: t.update({'lm_head.weight': t.pop('model.embed_tokens.weight')}))
    if stored == 'sharded':
        shard(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, load(str(tmp_path))[1], params)


def test_an_untied_model_without_its_embedding_is_refused(folder):
    change_weights(folder, lambda tensors: tensors.pop('model.embed_tokens.weight'))
    with refused('model.path', folder, 'missing', 'model.embed_tokens.weight'):
        load(folder)


# refusals: each names the thing and the remedy


def refused(*words):
    """A context that expects BadInput whose message holds the words in this order."""
    return pytest.raises(BadInput, match='(?s)' + '.*'.join(words))


def test_a_path_that_is_no_folder_is_refused():
    with refused('model.path', 'no such folder', 'give a Hugging Face folder'):
        hf.find('not/a/folder')


def test_a_folder_without_config_json_is_refused(folder):
    os.remove(os.path.join(folder, 'config.json'))
    with refused('model.path', folder, 'has no config.json; '):
        families.load_config(folder)


def test_the_folder_of_a_run_is_refused_with_the_command_that_makes_a_model_of_it(tmp_path):
    (tmp_path / 'checkpoints').mkdir()
    (tmp_path / 'config.json').write_text('{"steps": 60}')
    with refused('model.path', str(tmp_path), 'is the folder of a run', 'grpo-jax export --workdir'):
        families.load_config(str(tmp_path))


def test_a_config_that_is_no_json_is_refused(folder):
    with open(os.path.join(folder, 'config.json'), 'w', encoding='utf8') as file:
        file.write('{"model_type": ')
    with refused('config.json', 'cannot be read', 'line 1'):
        families.load_config(folder)


@pytest.mark.parametrize(
    ('changes', 'words'),
    [
        (dict(model_type='gpt2'), ('model_type', 'gpt2', 'llama, mistral, qwen2, qwen3, .*gemma3_text')),
        (dict(model_type=None), ('model_type', 'None', 'llama, mistral, qwen2, qwen3, .*gemma3_text')),
        (dict(hidden_act='gelu'), ('hidden_act', 'gelu', 'silu')),
        (
            dict(model_type='qwen2', use_sliding_window=True, max_window_layers=0, sliding_window=0),
            ('sliding_window', '0'),
        ),
        (
            dict(model_type='mistral', layer_types=['full_attention'] * 2),
            ('layer_types', 'full_attention', 'another model'),
        ),
        (dict(layer_types=['sliding_attention'] * 2), ('layer_types', 'sliding', 'must be full_attention;')),
        (dict(model_type='gemma2', use_bidirectional_attention=True), ('use_bidirectional', 'True', 'causal')),
        (dict(model_type='gemma3_text', attn_logit_softcapping=5.0), ('attn_logit_softcapping', '5.0', 'null')),
        (dict(model_type='gemma2', hidden_activation='silu_'), ('hidden_activation', 'silu_', 'gelu_pytorch_tanh')),
        (dict(model_type='gemma2', final_logit_softcapping=0.0), ('final_logit_softcapping', '0', 'above 0')),
        (dict(model_type='granite', logits_scaling=-1.0), ('logits_scaling', '-1.0', 'above 0')),
        (dict(model_type='granite', residual_multiplier=None), ('residual_multiplier',)),
        (
            dict(
                model_type='olmo3', rope_parameters=dict(full_attention=PLAIN, sliding_attention=dict(rope_theta='x'))
            ),
            ('rope_theta', 'x', 'above 1'),
        ),
        (
            dict(rope_parameters=dict(rope_type='default', rope_theta=1e4, partial_rotary_factor=0.5)),
            ('partial_rotary',),
        ),
        (
            dict(model_type='phi3', head_dim=8, rope_parameters=PLAIN | dict(partial_rotary_factor=0.4)),
            ('partial_rotary_factor', '0.4', 'even'),
        ),
        (
            dict(rope_parameters=PLAIN | dict(rope_type='longrope', short_factor=[1.0], long_factor=[1.0])),
            ('short_factor', r'\[1.0\]', '4 numbers'),
        ),
        (
            dict(rope_parameters=dict(rope_type='dynamic', factor=2.0, rope_theta=1e4)),
            ('rope_type', 'dynamic', 'default, linear, llama3, yarn, longrope'),
        ),
        (dict(rope_parameters=dict(rope_type='linear', rope_theta=1e4)), ('config.json', 'linear', 'factor')),
        (dict(hidden_size='wide'), ('hidden_size', 'config.json')),
    ],
)
def test_a_config_that_the_decoder_cannot_compute_is_refused(folder, changes, words):
    change_config(folder, **changes)
    with refused(*words):
        families.load_config(folder)


def test_a_folder_without_weights_is_refused(folder):
    os.remove(os.path.join(folder, 'model.safetensors'))
    with refused('model.path', folder, 'no model.safetensors', 'random_init'):
        load(folder)


def test_a_missing_tensor_is_refused(folder):
    change_weights(folder, lambda tensors: tensors.pop('model.norm.weight'))
    with refused('model.path', folder, 'missing', 'model.norm.weight', 'left over', r'\[\]'):
        load(folder)


def test_a_tensor_left_over_is_refused(folder):
    change_weights(folder, lambda tensors: tensors.update({'model.layers.2.mlp.up_proj.weight': np.zeros((40, 32))}))
    with refused('model.path', folder, 'missing', r'\[\]', 'left over', 'model.layers.2.mlp.up_proj.weight'):
        load(folder)


@pytest.mark.parametrize(
    ('name', 'change'),
    [
        ('model.embed_tokens.weight', lambda x: x[:63]),
        ('model.layers.1.mlp.up_proj.weight', lambda x: x[:39]),
        ('model.norm.weight', lambda x: x[:31]),
        # as many numbers in another order: transposed
        ('model.embed_tokens.weight', lambda x: x.T.copy()),
        ('model.layers.0.mlp.down_proj.weight', lambda x: x.T.copy()),
        ('model.layers.0.self_attn.k_proj.weight', lambda x: x.T.copy()),
        ('lm_head.weight', lambda x: x.T.copy()),
    ],
)
def test_a_tensor_of_the_wrong_shape_is_refused(folder, name, change):
    change_weights(folder, lambda tensors: tensors.update({name: change(tensors[name])}))
    with refused(name, 'does not fit', 'config.json'):
        load(folder)


def test_weights_that_are_no_safetensors_are_refused(folder):
    with open(os.path.join(folder, 'model.safetensors'), 'wb') as file:
        file.write(b'version https://git-lfs.github.com/spec/v1')
    with refused('model.path', 'model.safetensors', 'not a safetensors file'):
        load(folder)


def test_weights_cut_short_are_refused(folder):
    path = os.path.join(folder, 'model.safetensors')
    os.truncate(path, os.path.getsize(path) // 2)
    with refused('model.path', 'model.safetensors', 'not a safetensors file'):
        load(folder)


def shard(folder, **more):
    """Puts the folder's weights into a shard with an index, which names also `more`; gives the shard's path."""
    path = os.path.join(folder, 'model-00001-of-00001.safetensors')
    shutil.move(os.path.join(folder, 'model.safetensors'), path)
    with open(os.path.join(folder, 'model.safetensors.index.json'), 'w', encoding='utf8') as file:
        json.dump({'weight_map': dict.fromkeys(load_file(path), os.path.basename(path)) | more}, file)
    return path


@pytest.mark.parametrize('harm', ['absent', 'garbage', 'cut short'])
def test_a_shard_that_cannot_be_read_is_refused(folder, harm):
    path = shard(folder)
    load(folder)  # the index itself is good
    if harm == 'absent':
        os.remove(path)
    elif harm == 'cut short':
        os.truncate(path, os.path.getsize(path) - 1)
    else:
        with open(path, 'wb') as file:
            file.write(b'<html>')
    with refused('model.path', 'model-00001-of-00001.safetensors', 'safetensors'):
        load(folder)


def test_a_shard_that_lacks_what_the_index_says_is_refused(folder):
    shard(folder, **{'model.layers.9.weight': 'model-00001-of-00001.safetensors'})
    with refused('model-00001-of-00001.safetensors', r'lacks model\.layers\.9\.weight', 'fetch'):
        load(folder)


@pytest.mark.parametrize('text', ['{"weight_map": ', '{}', '[]', '{"weight_map": {"a": 1}}', '{"weight_map": ["a"]}'])
def test_an_index_that_is_none_is_refused(folder, text):
    with open(os.path.join(folder, 'model.safetensors.index.json'), 'w', encoding='utf8') as file:
        file.write(text)
    with refused('model.safetensors.index.json', 'is no index of weights', 'fetch it again'):
        load(folder)


@pytest.mark.parametrize('dtype, spelling', [(np.int32, 'I32'), (np.uint8, 'U8')])
def test_weights_that_were_quantized_are_refused(folder, dtype, spelling):
    name = 'model.layers.1.mlp.up_proj.weight'
    change_weights(folder, lambda tensors: tensors.update({name: tensors[name].astype(dtype)}))
    with refused(name, spelling, 'F64, F32, F16, BF16, F8_E4M3, F8_E5M2', 'not quantized'):
        load(folder)


@pytest.mark.parametrize('dtype', [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_weights_of_every_float_are_read(folder, dtype):
    name = 'model.layers.1.mlp.up_proj.weight'
    change_weights(folder, lambda tensors: tensors.update({name: tensors[name].astype(dtype)}))
    expected = load_file(os.path.join(folder, 'model.safetensors'))[name].astype(np.float32)
    np.testing.assert_array_equal(load(folder)[1]['layers']['w_up'][1].T, expected)


def test_checking_reads_no_numbers(folder, monkeypatch):
    monkeypatch.setattr(tensor_files, 'read_parts', None)
    hf.check_weights(folder, families.load_config(folder))
    change_weights(folder, lambda tensors: tensors.update({'model.norm.weight': tensors['model.norm.weight'][:31]}))
    with refused('model.norm.weight', r'\(31,\)', r'\(32,\)'):
        hf.check_weights(folder, families.load_config(folder))


def test_a_folder_without_tokenizer_is_refused(folder):
    with refused('model.path', folder, 'has neither tokenizer.json', 'add them'):
        hf.load_tokenizer(folder)


def test_a_malformed_tokenizer_is_refused(folder):
    with open(os.path.join(folder, 'tokenizer.json'), 'w', encoding='utf8') as file:
        file.write('{}')
    with refused('model.path', folder, 'no readable tokenizer', 'add tokenizer.json'):
        hf.load_tokenizer(folder)


def test_added_tokens_beyond_the_model_are_taken_out_of_the_tokenizer(real, tmp_path):
    """As of Gemma 3's text models, whose tokenizer has the token of an image."""
    folder = str(tmp_path / 'model')
    shutil.copytree(os.path.join(real, 'models', 'stories260K'), folder, copy_function=shutil.copyfile)
    os.chmod(folder, 0o755)
    plain = hf.load_tokenizer(folder)
    extended = AutoTokenizer.from_pretrained(folder)
    extended.add_special_tokens({'additional_special_tokens': ['<image_soft_token>']})
    extended.save_pretrained(folder)
    loaded = hf.load_tokenizer(folder)
    assert len(extended) == len(plain) + 1 == len(loaded) + 1 == 513
    text = 'Once <image_soft_token> upon'
    assert loaded.encode(text) == plain.encode(text) and max(extended.encode(text)) == 512
