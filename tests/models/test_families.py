"""The families on the golden models: the sampler's cache, padding, packing, meshes and config.json.

Logits of transformers and folders that it reads back are in test_hf.py, for every family.
"""

import dataclasses
import functools
import json
import os

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from test_hf import change_config, change_weights, load, unpack
from test_transformer import decode, jit, logits, prompts_and_completions, whole_rows

from grpo_jax import sampler
from grpo_jax.errors import BadInput
from grpo_jax.learner import logprobs, packing
from grpo_jax.models import attention, hf, transformer
from grpo_jax.models.hf import families
from grpo_jax.models.hf import tensors as tensor_files
from grpo_jax.sampler.engine import make_sampler
from grpo_jax.sharding import batches, specs
from grpo_jax.sharding import mesh as meshes
from grpo_jax.types import Prompts
from tests.golden import make_golden
from tests.learner import test_sharding
from tests.learner.conftest import make_experience, make_rollout

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# all that a family may do otherwise than Llama, on the two layers of `tiny`
OWN = dict(windows=(3, 0), unrotated=(1,), local_rope=(100.0, ()), rotary_dim=4, attention_scale=0.5, attention_cap=1.0)
ONE_ROW = sampler.Sampling(temperature=0.8, max_tokens=14, stop_tokens=(), pad_token=0)


@pytest.fixture(scope='module')
def model(tmp_path_factory):
    """model(family): (ModelConfig, params) of its golden folder."""

    @functools.cache
    def read(family):
        folder = tmp_path_factory.mktemp(family)
        unpack(family, folder)
        return load(str(folder))

    return read


@pytest.fixture(scope='module')
def own(tiny):
    """(ModelConfig, params) of tiny with OWN."""
    return dataclasses.replace(tiny[0], **OWN), tiny[1]


def ragged_prompts(c):
    """Prompts of 9, 2 and 6 tokens, padded on the left."""
    mask = np.arange(9) >= 9 - np.array([9, 2, 6])[:, None]
    tokens = np.random.default_rng(1).integers(1, c.vocab_size, mask.shape)
    return Prompts(np.where(mask, tokens, 0).astype(np.int32), mask, np.arange(3, dtype=np.int32))


@functools.partial(jit, static_argnums=1)
def generate(params, c):
    prompts = jax.tree.map(jnp.asarray, ragged_prompts(c))
    keys = sampler.row_keys(jax.random.key(0), jnp.int32(0), prompts.ids, 2)
    return sampler.generate(params, prompts, keys, 0, c, ONE_ROW, {}, block=4)


@functools.partial(jit, static_argnums=2)
def learner_logprobs(params, rollout, c):
    return logprobs.completion_logprobs(params, rollout, c, temperature=0.8, chunk=32, remat='full')


# the sampler's cache


@pytest.mark.parametrize('family', families.FAMILIES)
def test_sampler_and_learner_give_a_token_the_same_logprob(model, family):
    # prompts of different lengths, two rows each, and windows that end within prompts and within completions
    c, params = model(family)
    rollout = generate(params, c)
    expected = learner_logprobs(params, rollout, c)
    np.testing.assert_allclose(rollout.logprobs, expected.logprobs, atol=2e-5)
    assert rollout.logprobs.std() > 0.3 and expected.entropy.min() > 0


@pytest.mark.parametrize(('chunks', 'block'), [([6], 1), ([6], 4), ([1, 2, 3], 1), ([2, 4], 2), ([3, 3], 3)])
def test_decoding_with_windows_equals_the_forward_of_whole_rows(own, chunks, block):
    c, params = own
    decoded = decode(params, c, *prompts_and_completions(), chunks, block=block)
    np.testing.assert_allclose(decoded, whole_rows(c, params), atol=1e-5)


def test_an_int8_cache_with_windows_is_close_to_the_float_one(own):
    c, params = own
    decoded = decode(params, c, *prompts_and_completions(), [2, 4], block=2, dtype=jnp.int8)
    error = jnp.abs(decoded - whole_rows(c, params))
    assert 0 < jnp.max(error) < 0.05 and jnp.std(whole_rows(c, params)) > 0.5


def build(c, shards=1, **options):
    shapes = batches.Shapes(prompts=4, group_size=2, queries=9, tokens=24)
    sampling = sampler.Sampling(1.0, 24, (1, 2, 3), 0)._replace(**options)
    return make_sampler(c, meshes.make({'data': shards}), shapes, sampling, {}, block=4, segment=3)


def test_rows_that_are_preempted_and_resumed_keep_their_windows(model):
    c, params = model('gemma2')
    column = 2 * c.layers * c.kv_heads * c.head_dim * 4
    engine = build(c, cache_bytes=110 * column)
    mask = np.arange(9) >= 9 - np.array([9, 2, 6, 4])[:, None]
    prompts = Prompts(np.where(mask, 5 + np.arange(9), 0).astype(np.int32), mask, np.arange(4, dtype=np.int32))
    rollout, stats = engine.sample(params, prompts, jax.random.key(3), 0)
    assert stats.preempted
    mask = np.concatenate([rollout.prompt_mask, rollout.completion_mask], 1)
    scores = jax.nn.log_softmax(logits(params, rollout.tokens, mask, c))[:, 8:-1]
    expected = jnp.take_along_axis(scores, rollout.tokens[:, 9:, None], -1)[..., 0]
    np.testing.assert_allclose(rollout.logprobs, jnp.where(rollout.completion_mask, expected, 0), atol=2e-5)
    again = engine.replay(params, rollout, prompts, jax.random.key(3))
    np.testing.assert_array_equal(again.logprobs, rollout.logprobs)


@pytest.mark.parametrize('family', ['mistral', 'granite', 'phi3', 'smollm3', 'gemma2'])
def test_kernels_are_refused_where_they_compute_something_else(model, family):
    with pytest.raises(BadInput, match=r"rollout.kernels = 'on': cannot work with windows, soft caps, or scales"):
        build(model(family)[0], kernels='on')
    build(model(family)[0], kernels='auto')


def test_a_field_that_nobody_has_told_the_kernels_of_keeps_models_from_them(tiny):
    new = [('sinks', bool, dataclasses.field(default=False))]
    wider = dataclasses.make_dataclass('Wider', new, bases=(transformer.ModelConfig,), frozen=True)
    values = {field.name: getattr(tiny[0], field.name) for field in dataclasses.fields(tiny[0])}
    assert wider(**values).is_plain and not wider(**values, sinks=True).is_plain
    with pytest.raises(BadInput, match=r'rollout\.kernels'):
        build(wider(**values, sinks=True), kernels='on')
    # one without a default may mean anything
    required = dataclasses.make_dataclass('Required', [('experts', int)], bases=(wider,), frozen=True, kw_only=True)
    assert not required(**values, experts=0).is_plain


@pytest.mark.parametrize('by', ['splash', 'cudnn'])
def test_attention_with_a_rule_that_a_kernel_does_not_know_does_not_reach_it(by):
    wider = tuple.__new__(attention.Rule, (*attention.Rule(by=by), 'a field more'))
    x = jnp.ones((1, 2, 2, 8))
    with pytest.raises(ValueError, match='unpack'):
        attention.attend(x, x, x, jnp.ones((1, 2), bool), wider)


# masks


def test_a_window_counts_valid_tokens_its_own_among_them():
    mask = jnp.array([[0, 1, 1, 0, 1, 1]], bool)
    allowed = attention.causal_mask(mask, window=jnp.int32(2))[0, 0]
    # the query in column 4 reads itself and column 2, the last valid one before the gap
    assert [np.flatnonzero(row).tolist() for row in np.asarray(allowed)[[1, 2, 4, 5]]] == [[1], [1, 2], [2, 4], [4, 5]]
    later = attention.causal_mask(mask, 4, 2, jnp.int32(2))[0, 0]
    np.testing.assert_array_equal(later, allowed[4:])


def test_long_rows_are_cut_into_chunks_with_the_same_windows(own, monkeypatch):
    c, params = own
    tokens = jax.random.randint(jax.random.key(1), (2, 8), 0, 64)
    mask = jnp.ones((2, 8), bool).at[1, :3].set(False)
    whole = logits(params, tokens, mask, c)
    monkeypatch.setattr(attention, 'QUERY_CHUNK', 2)
    monkeypatch.setattr(attention, 'CHUNK_ABOVE_PAIRS', 1)
    hidden = transformer.forward(params, tokens, transformer.positions_of(mask), mask, c)
    np.testing.assert_allclose(transformer.unembed(params, hidden, c)[mask], whole[mask], atol=1e-5)


@pytest.mark.parametrize('family', families.FAMILIES)
def test_padding_on_the_left_changes_nothing(model, family):
    c, params = model(family)
    tokens, mask = make_golden.batch(c.vocab_size)  # the second row has five columns of padding
    alone = logits(params, tokens[1:, 5:], mask[1:, 5:], c)
    np.testing.assert_allclose(logits(params, tokens, mask, c)[1:, 5:], alone, atol=1e-5)


@pytest.mark.parametrize('name', ['own', 'gemma3_text'])
def test_packed_rows_have_the_logprobs_of_padded_ones(model, own, name):
    c, params = own if name == 'own' else model(name)
    rollout = make_rollout(c, 4, 2, 5, 6)
    sizes = packing.PackSizes(1, 24, 4, 2, 5, 6, whole_groups=False)
    packed = packing.pack(np.asarray(rollout.prompt_mask), np.asarray(rollout.completion_mask), sizes, 1)
    spec = packing.ForwardSpec(c, logprobs.Head(0.8, 16), sizes)
    computed = jit(packing.rollout_output, static_argnums=3)(params, rollout, packed, spec)
    expected = learner_logprobs(params, rollout, c)
    np.testing.assert_allclose(computed.logprobs, expected.logprobs, atol=1e-5)
    assert packed.count.sum() > 1


# meshes


@pytest.mark.parametrize('family', ['gemma2', *(name for name in families.FAMILIES if name != 'gemma2')])
def test_a_step_of_8_devices_is_that_of_one(request, model, family):
    if family != 'gemma2':
        request.getfixturevalue('long')
    experience = make_experience(make_rollout(model(family)[0], 8, 2, 6, 10), 2)
    state, metrics = test_sharding.learn(model(family), experience, (1, 2, 2, 2))
    alone, metrics_alone = test_sharding.learn(model(family), experience, (1, 1, 1, 1))
    assert_close(metrics, metrics_alone, atol=1e-5)
    gradient, gradient_alone = (optax.tree_utils.tree_get(x.opt_state, 'trace') for x in (state, alone))
    assert float(optax.tree.norm(gradient_alone)) > 1e-3
    assert_close(gradient, gradient_alone, atol=1e-6, rtol=1e-4)


def assert_close(actual, expected, **tolerances):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, **tolerances)


@pytest.mark.parametrize('family', families.FAMILIES)
def test_8_devices_sample_what_one_does(long, model, family):
    sampled, alone = (test_sharding.sample(model(family), shape) for shape in ((1, 2, 2, 2), (1, 1, 1, 1)))
    np.testing.assert_array_equal(sampled.tokens, alone.tokens)
    np.testing.assert_allclose(sampled.logprobs, alone.logprobs, atol=1e-5)


# config.json

ALL_READ = dict(
    vocab_size=31,
    hidden_size=24,
    num_hidden_layers=1,
    num_attention_heads=8,
    num_key_value_heads=1,
    intermediate_size=21,
    rms_norm_eps=0.1,
    head_dim=6,
    tie_word_embeddings=None,  # the other one
)
BIASES = dict(attention_bias=None)
SLIDING = dict(sliding_window=2, layer_types=['full_attention', 'sliding_attention'])
GEMMA = dict(
    BIASES,
    **SLIDING,
    hidden_activation='silu',
    query_pre_attn_scalar=7,
    attn_logit_softcapping=3.0,
    final_logit_softcapping=3.0,
    use_bidirectional_attention=True,
)
NESTED = dict(full_attention=dict(rope_type='default', rope_theta=10.0), sliding_attention=dict(rope_theta=100.0))
# what the family reads besides, with another value than its golden model has
READ = {
    'llama': dict(BIASES, mlp_bias=None, hidden_act='gelu_pytorch_tanh'),
    'mistral': dict(sliding_window=None, hidden_act='gelu_pytorch_tanh'),
    'qwen2': dict(hidden_act='gelu_pytorch_tanh', layer_types=['sliding_attention'] * 2),
    'qwen3': dict(BIASES, hidden_act='gelu_pytorch_tanh', layer_types=['sliding_attention'] * 2),
    'phi3': dict(sliding_window=3, hidden_act='gelu_pytorch_tanh', original_max_position_embeddings=16),
    'smollm3': dict(BIASES, mlp_bias=None, no_rope_layers=[1, 0], **SLIDING),
    'granite': dict(
        BIASES,
        mlp_bias=None,
        embedding_multiplier=2.0,
        residual_multiplier=2.0,
        attention_multiplier=2.0,
        logits_scaling=2.0,
    ),
    'olmo2': dict(BIASES, hidden_act='gelu_pytorch_tanh'),
    'olmo3': dict(BIASES, **SLIDING, rope_parameters=NESTED),
    'gemma2': GEMMA,
    'gemma3_text': dict(GEMMA, rope_parameters=NESTED),
}


@pytest.mark.parametrize('family', families.FAMILIES)
def test_each_field_that_a_family_reads_changes_the_model_or_is_refused(family, tmp_path):
    # test_hf.py has it that each field of the ModelConfig changes tensors or logits
    unpack(family, tmp_path)
    for weights in tmp_path.glob('*.safetensors'):  # with a head of its own, which no tie takes away
        weights.unlink()
    with open(tmp_path / 'config.json', encoding='utf8') as file:
        stored = json.load(file)
    before, unread = families.load_config(tmp_path), []
    for key, value in (ALL_READ | READ[family]).items():
        changed = value if value is not None or key == 'sliding_window' else not stored[key]
        # a size of layers goes with the lists that have an entry for each
        lists = {
            name: None for name in ('layer_types', 'no_rope_layers') if key == 'num_hidden_layers' and name in stored
        }
        change_config(tmp_path, **{key: changed} | lists)
        try:
            same = families.load_config(tmp_path) == before
        except BadInput:
            same = False
        unread += [key] if same else []
        with open(tmp_path / 'config.json', 'w', encoding='utf8') as file:
            json.dump(stored, file)
    assert not unread and families.load_config(tmp_path) == before


@pytest.mark.parametrize(
    'family, changes',
    [
        ('llama', dict(sliding_window=4, logits_scaling=3.0, no_rope_layers=[0, 0], final_logit_softcapping=2.0)),
        ('qwen3', dict(mlp_bias=True, embedding_multiplier=3.0)),
        ('gemma2', dict(mlp_bias=True, hidden_act='relu')),
        ('granite', dict(sliding_window=4)),
    ],
)
def test_what_transformers_reads_for_other_families_alone_changes_nothing(family, changes, tmp_path):
    unpack(family, tmp_path)
    before = families.load_config(tmp_path)
    change_config(tmp_path, **changes)
    assert families.load_config(tmp_path) == before


def test_a_config_of_another_family_is_refused_in_one_line_that_lists_those_there_are(tmp_path):
    unpack('llama', tmp_path)
    change_config(tmp_path, model_type='mamba2')
    with pytest.raises(BadInput) as refusal:
        families.load_config(tmp_path)
    assert str(refusal.value).endswith(f"'mamba2': is not supported; choose a model of {', '.join(families.FAMILIES)}")
    assert '\n' not in str(refusal.value)


def test_longrope_reads_no_more_than_the_texts_that_its_short_factors_are_for(tmp_path):
    unpack('phi3', tmp_path)
    assert families.context_length(tmp_path) == 32  # and not max_position_embeddings, 64


def test_published_spellings_of_windows_and_rotary_positions_are_read(tmp_path):
    # as in the config.json of gemma-3-1b-it and Olmo-3-7B-Instruct, from before rope_parameters
    sizes = dict(make_golden.SIZES, num_hidden_layers=6, head_dim=8)
    os.makedirs(tmp_path, exist_ok=True)

    def read(**config):
        (tmp_path / 'config.json').write_text(json.dumps(sizes | config))
        return families.load_config(tmp_path)

    gemma = read(
        model_type='gemma3_text',
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        rope_scaling=dict(rope_type='linear', factor=8.0),
        sliding_window=512,
        sliding_window_pattern=3,
    )
    assert gemma.windows == (512, 512, 0, 512, 512, 0) and gemma.local_rope == (1e4, ())
    assert (gemma.rope_theta, dict(gemma.rope_scaling)['factor']) == (1e6, 8.0)
    yarn = dict(rope_type='yarn', factor=8.0, original_max_position_embeddings=16, attention_factor=1.2, beta_fast=32)
    olmo = read(model_type='olmo3', rope_theta=5e5, rope_scaling=yarn, sliding_window=4096)
    assert olmo.windows == (4096, 4096, 4096, 0, 4096, 4096) and olmo.local_rope == (5e5, ())
    assert dict(olmo.rope_scaling)['attention_factor'] == 1.2


def test_weights_of_a_folder_that_has_other_norms_are_refused(tmp_path):
    # a Gemma has four norms a layer, of which Llama's names are two
    unpack('gemma2', tmp_path)
    change_config(tmp_path, model_type='llama', hidden_act='silu', layer_types=None)
    with pytest.raises(BadInput, match=r'left over.*feedforward_layernorm'):
        load(str(tmp_path))


def test_fused_tensors_are_read_and_written_row_by_row(model, tmp_path):
    unpack('phi3', tmp_path / 'in')
    c, params = model('phi3')
    hf.save(str(tmp_path / 'out'), str(tmp_path / 'in'), params, c, np.float32)
    stored = {
        name: tensor_files.read_tensor(tensor) for name, tensor in tensor_files.list_tensors(tmp_path / 'out').items()
    }
    fused = stored['model.layers.1.self_attn.qkv_proj.weight']
    # 2 heads of 8 queries, then as many keys and values; theirs are [out, in]
    assert fused.shape == (48, 16)
    np.testing.assert_array_equal(fused[16:32], params['layers']['wk'][1].reshape(16, 16).T)
    gate_up = stored['model.layers.0.mlp.gate_up_proj.weight']
    np.testing.assert_array_equal(gate_up[20:], params['layers']['w_up'][0].T)


def test_specs_cut_every_parameter_of_a_family(model):
    mesh = meshes.make({'fsdp': 2, 'tensor': 2})
    for family in families.FAMILIES:
        table = transformer.param_table(model(family)[0])
        assert jax.tree.structure(specs.params(table, mesh)) == jax.tree.structure(model(family)[1]), family


@pytest.mark.parametrize('family', families.FAMILIES)
def test_a_folder_in_bfloat16_is_read_as_the_nearest_float32(model, family, tmp_path):
    c, params = model(family)
    unpack(family, tmp_path)
    change_weights(
        tmp_path, lambda tensors: tensors.update({k: x.astype(ml_dtypes.bfloat16) for k, x in tensors.items()})
    )
    rounded = load(str(tmp_path))[1]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2**-8), rounded, params)
    tokens, mask = make_golden.batch(c.vocab_size)
    exact, near = (np.asarray(logits(x, tokens, mask, c))[mask] for x in (params, rounded))
    assert 0 < np.abs(near - exact).max() < 0.2 < exact.std()


@pytest.mark.parametrize('family', families.FAMILIES)
def test_each_family_has_a_row_in_the_docs(family):
    with open(os.path.join(ROOT, 'docs', 'models.md'), encoding='utf8') as file:
        assert f'| `{family}` |' in file.read()
