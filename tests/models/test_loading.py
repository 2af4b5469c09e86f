"""Weights read where they lie: only what is held, at its own size, from every dtype, and refused in one line."""

import json
import os
import re
import shutil

import jax
from jax.sharding import SingleDeviceSharding
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_hf import change_config, load, refused, shard, unpack

from benchmarks import loading as benchmark
from grpo_jax.errors import BadInput
from grpo_jax.models import hf, transformer
from grpo_jax.models.hf import families
from grpo_jax.models.hf import tensors as tensor_files
from grpo_jax.models.hf import tensors as weights
from grpo_jax.sharding import mesh, specs

# 27 million parameters, 103 MiB as float32: the noise of a process is some MiB
SHAPES = {
    'hidden_size': 512,
    'intermediate_size': 2048,
    'num_hidden_layers': 6,
    'num_attention_heads': 8,
    'num_key_value_heads': 8,
    'vocab_size': 4096,
}
NAME = 'model.layers.1.mlp.up_proj.weight'  # [40, 32] of the golden models
E4M3 = ml_dtypes.float8_e4m3fn


@pytest.fixture
def folder(tmp_path):
    unpack('llama', tmp_path / 'llama')
    return str(tmp_path / 'llama')


@pytest.mark.parametrize('processes, devices', [(1, 8), (2, 4)])
def test_no_process_takes_a_third_more_memory_than_it_holds_or_reads_what_it_does_not_hold(
    tmp_path, processes, devices
):
    benchmark.write(tmp_path, SHAPES, shards=3)
    stored = sum(os.path.getsize(path) for path in tmp_path.glob('*.safetensors'))
    rows = benchmark.measure(tmp_path, processes, devices)
    for row in rows:
        assert row['peak'] <= 1.3 * row['held'], rows
        # the headers, and the norms, of which each device has all
        assert row['read'] <= 1.02 * stored / processes, rows
        assert abs(row['held'] * processes / (2 * stored) - 1) < 0.01, rows


@pytest.mark.parametrize('shape', [(1, 8, 1, 1), (2, 2, 1, 2), (1, 4, 1, 2), (1, 1, 1, 4), (8, 1, 1, 1)])
@pytest.mark.parametrize('family', ['llama', 'qwen2', 'qwen3', 'phi3', 'olmo2'])
def test_every_mesh_holds_the_numbers_of_one_device(tmp_path, family, shape):
    unpack(family, tmp_path)
    c, alone = load(str(tmp_path))
    devices = mesh.make(dict(zip(mesh.AXES, shape, strict=True)))
    try:
        shardings = specs.params(transformer.param_table(c), devices)
    except BadInput:
        pytest.skip('the mesh does not divide the heads')
    params = hf.load_params(str(tmp_path), c, shardings)
    jax.tree.map(np.testing.assert_array_equal, params, alone)
    assert jax.tree.leaves(jax.tree.map(lambda x, s: x.sharding == s, params, shardings)) == [True] * len(
        jax.tree.leaves(params)
    )


def test_what_was_loaded_may_be_overwritten_on_every_device(folder):
    c, expected = load(folder)
    expected = jax.device_get(expected['final_norm'])
    devices = mesh.make({'fsdp': 8})
    params = hf.load_params(folder, c, specs.params(transformer.param_table(c), devices))
    norm = params['final_norm']  # which each device has
    after = jax.jit(lambda x: x + 1, donate_argnums=0)(norm)
    assert norm.is_deleted() and len(after.addressable_shards) == 8
    for shard_after in after.addressable_shards:
        np.testing.assert_array_equal(shard_after.data, expected + 1)


def tensor(tmp_path, numbers, **more):
    """A StoredTensor of these numbers."""
    save_file({'x': numbers, **more}, tmp_path / 'x.safetensors')
    (stored,) = (t for t in tensor_files.read_header(str(tmp_path / 'x.safetensors')) if t.name == 'x')
    return stored


def read(stored, *rectangles):
    """The arrays of (rows, columns) rectangles."""
    arrays = [np.full((b - a, d - c), 7, np.float32) for (a, b), (c, d) in rectangles]
    parts = [
        tensor_files.Part(slice(*rows), slice(*columns), out)
        for (rows, columns), out in zip(rectangles, arrays, strict=True)
    ]
    tensor_files.read_parts(stored, parts)
    return arrays


@pytest.fixture
def counted(monkeypatch):
    """The sizes of all reads of files of weights."""
    sizes, original = [], tensor_files._read_bytes

    def counting(file, buffer, place):
        sizes.append(buffer.nbytes)
        original(file, buffer, place)

    monkeypatch.setattr(tensor_files, '_read_bytes', counting)
    return sizes


def test_of_a_tensor_the_bytes_of_its_rectangles_are_read_and_once_where_these_touch(tmp_path, counted):
    numbers = np.arange(40 * 1000, dtype=np.float32).reshape(40, 1000)
    stored = tensor(tmp_path, numbers)
    rectangles = [((0, 5), (0, 200)), ((5, 9), (0, 200)), ((0, 9), (200, 400)), ((30, 31), (700, 900))]
    for array, (rows, columns) in zip(read(stored, *rectangles), rectangles, strict=True):
        np.testing.assert_array_equal(array, numbers[slice(*rows), slice(*columns)])
    assert sum(counted) == (9 * 400 + 200) * 4
    counted.clear()
    read(stored, ((0, 40), (0, 100)), ((0, 40), (900, 1000)))  # 400 bytes a row: the disk reads no less than the row
    assert sum(counted) == numbers.nbytes


@pytest.mark.parametrize('block', [1, 7, 4000, 2**20])
def test_the_size_of_a_block_changes_nothing(tmp_path, monkeypatch, block):
    monkeypatch.setattr(tensor_files, 'BLOCK', block)
    numbers = np.random.default_rng(0).standard_normal((23, 300)).astype(ml_dtypes.bfloat16)
    stored = tensor(tmp_path, numbers)
    whole, corner = read(stored, ((0, 23), (0, 300)), ((20, 23), (1, 300)))
    np.testing.assert_array_equal(whole, numbers.astype(np.float32))
    np.testing.assert_array_equal(corner, numbers.astype(np.float32)[20:, 1:])


def test_axes_that_could_not_be_one_when_stored_are_refused(tmp_path):
    stored = tensor(tmp_path, np.zeros((8, 6), np.float32))
    here = SingleDeviceSharding(jax.devices()[0])
    with pytest.raises(ValueError, match='must be neighbours'):
        weights.load_parameter([stored], 'ndh->nh,d', (2, 6, 4), here)


# fp8


@pytest.mark.parametrize('dtype', [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_every_finite_number_of_fp8_is_read_as_it_is(tmp_path, dtype):
    numbers = np.arange(256, dtype=np.uint8).view(dtype)
    numbers = numbers[np.isfinite(numbers.astype(np.float32))].reshape(2, -1)
    np.testing.assert_array_equal(tensor_files.read_tensor(tensor(tmp_path, numbers)), numbers.astype(np.float32))


def quantize(folder, scale, method='fp8', end='_scale_inv', numbers=None, **settings):
    """Makes the tensor NAME of a folder fp8, and these numbers, with this scale; gives the numbers."""
    tensors = load_file(os.path.join(folder, 'model.safetensors'))
    tensors[NAME] = (tensors[NAME] if numbers is None else numbers).astype(E4M3)
    tensors[NAME.removesuffix('.weight') + '.input_scale'] = np.ones(1, np.float32)
    if scale is not None:
        tensors[NAME + end] = scale
    save_file(tensors, os.path.join(folder, 'model.safetensors'))
    change_config(folder, quantization_config={'quant_method': method, **settings})
    return tensors[NAME].astype(np.float32)


def loaded(folder):
    return load(folder)[1]['layers']['w_up'][1].T


# [40, 32] in blocks of 16 x 24 is 3 x 2 scales: the last row of blocks has 8 rows, the last column of blocks 8 columns
def test_each_block_of_an_fp8_weight_is_multiplied_with_its_scale(folder):
    scale = np.array([[1, 2], [3, 4], [5, 6]], np.float32)
    numbers = quantize(folder, scale, weight_block_size=[16, 24])
    for rows, columns, factor in [
        (slice(0, 16), slice(0, 24), 1), (slice(0, 16), slice(24, 32), 2), (slice(16, 32), slice(0, 24), 3),
        (slice(16, 32), slice(24, 32), 4), (slice(32, 40), slice(0, 24), 5), (slice(32, 40), slice(24, 32), 6),
    ]:  # fmt: skip
        np.testing.assert_array_equal(loaded(folder)[rows, columns], numbers[rows, columns] * factor)


@pytest.mark.parametrize(
    'scale, method, end, settings',
    [
        (np.full((), 0.5), 'fp8', '_scale_inv', {}),
        (np.full(1, 0.5, ml_dtypes.bfloat16), 'fp8', '_scale_inv', {'weight_block_size': None}),
        (np.linspace(0.5, 1, 40)[:, None], 'fbgemm_fp8', '_scale', {}),
        (np.linspace(0.5, 1, 40)[:, None], 'compressed-tensors', '_scale', {'format': 'float-quantized'}),
    ],
)  # fmt: skip
def test_an_fp8_weight_is_multiplied_with_its_scale_or_that_of_its_row(folder, scale, method, end, settings):
    numbers = quantize(folder, scale, method, end, **settings)
    np.testing.assert_array_equal(loaded(folder), numbers * scale.astype(np.float32))


def test_a_part_of_an_fp8_weight_takes_its_part_of_the_scales(folder):
    quantize(folder, np.arange(1, 7, dtype=np.float32).reshape(3, 2), weight_block_size=[16, 24])
    c, alone = load(folder)
    devices = mesh.make({'fsdp': 4, 'tensor': 2})
    params = hf.load_params(folder, c, specs.params(transformer.param_table(c), devices))
    jax.tree.map(np.testing.assert_array_equal, params, alone)


def test_an_exported_model_is_not_described_as_quantized(folder, tmp_path):
    quantize(folder, np.asarray(np.float32(0.5)))
    c, params = load(folder)
    hf.save(str(tmp_path / 'out'), folder, params, c, np.float32)
    with open(tmp_path / 'out' / 'config.json', encoding='utf8') as file:
        assert 'quantization_config' not in json.load(file)
    jax.tree.map(np.testing.assert_array_equal, load(str(tmp_path / 'out'))[1], params)


def test_an_fp8_weight_without_the_scale_that_config_json_promises_is_refused(folder):
    quantize(folder, None, weight_block_size=[16, 24])
    with refused(NAME, 'lacks', 'weight_scale_inv', 'take it again'):
        load(folder)


FITTING = 'is no scale of weights of shape (40, 32), which has one of (1,), (40,), (40, 1)'


@pytest.mark.parametrize(
    'scale, block, says',
    [
        (np.ones((3, 2), np.float32), None, f'{FITTING};'),  # of no block
        (np.ones((2, 2), np.float32), [16, 24], f'{FITTING}, (3, 2);'),
        (np.ones((2, 3), np.float32), [16, 24], f'{FITTING}, (3, 2);'),
        (np.ones(32, np.float32), [16, 24], f'{FITTING}, (3, 2);'),
        (np.ones((3, 2), np.int32), [16, 24], "'I32': is no dtype of a scale, which has one of F64, F32, F16, BF16;"),
    ],
)
def test_a_scale_that_does_not_fit_its_weight_is_refused(folder, scale, block, says):
    quantize(folder, scale, weight_block_size=block)
    with refused('weight_scale_inv', re.escape(says)):
        hf.check_weights(folder, families.load_config(folder))


@pytest.mark.parametrize('block', [[128], [0, 128], [True, 128], '128', [1.5, 2], {}])
def test_a_block_size_that_is_none_is_refused(folder, block):
    quantize(folder, np.ones((3, 2), np.float32), weight_block_size=block)
    with refused('weight_block_size', 'two whole numbers above 0'):
        load(folder)


@pytest.mark.parametrize(
    'quantization',
    [
        {'quant_method': 'gptq', 'bits': 4},
        {'quant_method': 'awq'},
        {'quant_method': 'bitsandbytes', 'load_in_4bit': True},
        {'quant_method': 'mxfp4'},
        {'quant_method': 'compressed-tensors', 'format': 'pack-quantized'},
        {'quant_method': 'compressed-tensors'},
        {'quant_method': ['fp8']},
        {'bits': 4},
    ],
)
def test_other_quantizations_are_refused_with_the_ones_that_are_read(folder, quantization):
    change_config(folder, quantization_config=quantization)
    with refused('quantization_config', 'is not read, only fp8, fbgemm_fp8, compressed-tensors', 'not quantized'):
        hf.check_weights(folder, families.load_config(folder))


def test_a_number_that_its_scale_makes_infinite_is_refused(folder):
    quantize(folder, np.asarray(np.float32(3e38)), numbers=np.full((40, 32), 2))
    with refused('1280 of 1280 numbers', NAME, 'NaN or infinite'):
        load(folder)


# folders that are not whole


def test_shards_without_their_index_are_refused_with_its_name(folder):
    shutil.move(os.path.join(folder, 'model.safetensors'), os.path.join(folder, 'model-00001-of-00002.safetensors'))
    with refused('no model.safetensors', 'model-00001-of-00002.safetensors needs model.safetensors.index.json'):
        load(folder)


def test_an_index_that_points_to_nothing_is_refused_with_the_files_name(folder):
    os.remove(shard(folder, absent='model-00007-of-00007.safetensors'))
    with refused('model-00001-of-00001.safetensors', 'is not there: 2 of the 2 safetensors files', 'fetch'):
        load(folder)


def test_a_tensor_in_two_shards_is_read_from_the_one_that_the_index_names(folder):
    params = load(folder)[1]
    path = shard(folder)
    other = os.path.join(folder, 'model-00009-of-00001.safetensors')
    save_file({'model.norm.weight': load_file(path)['model.norm.weight'] + 1, 'extra': np.ones(1)}, other)
    with open(os.path.join(folder, 'model.safetensors.index.json'), encoding='utf8') as file:
        index = json.load(file)
    index['weight_map']['extra'] = os.path.basename(other)
    with open(os.path.join(folder, 'model.safetensors.index.json'), 'w', encoding='utf8') as file:
        json.dump(index, file)
    stored = tensor_files.list_tensors(folder)
    assert stored['model.norm.weight'].file == path
    np.testing.assert_array_equal(tensor_files.read_tensor(stored['model.norm.weight']), params['final_norm'])


def test_a_file_that_is_cut_while_it_is_read_is_refused(folder):
    stored = tensor_files.list_tensors(folder)
    last = max(stored.values(), key=lambda tensor: tensor.begin)
    os.truncate(last.file, os.path.getsize(last.file) - 1)
    with refused('model.path', 'model.safetensors', f'ends too early where {last.name}', 'fetch'):
        tensor_files.read_tensor(last)
    os.remove(last.file)
    with refused('model.path', 'model.safetensors', 'No such file', 'fetch'):
        tensor_files.read_tensor(last)
