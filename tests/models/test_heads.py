"""The scalar head: scores of transformers' sequence classifications, folders that it reads back, and refusals."""

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_hf import change_config, refused, unpack

from grpo_jax.learner import critic
from grpo_jax.models import heads, hf, transformer
from grpo_jax.models.hf import families
from tests.golden import make_golden

FAMILIES = {
    'llama': 'LlamaForSequenceClassification',
    'qwen2': 'Qwen2ForSequenceClassification',
    'qwen3': 'Qwen3ForSequenceClassification',
}
PAD = 0


def load(folder):
    """(ModelConfig, params) of a folder with a scalar head, on one device."""
    c = families.load_config(str(folder))
    return c, hf.load_params(str(folder), c, transformer.map_table(lambda *_: jax.devices()[0], heads.param_table(c)))


def scores(params, tokens, mask, c):
    inputs = jnp.asarray(tokens), jnp.asarray(mask)
    return np.asarray(heads.values(params, *inputs, c, remat='none', dtype=np.float32))


def padded():
    """(tokens i32[2, 16], mask bool[2, 16]): a full row, and one with five columns of padding on the right."""
    tokens = np.random.default_rng(1).integers(1, 64, (2, 16)).astype(np.int32)
    mask = np.ones((2, 16), bool)
    mask[1, 11:] = False
    return np.where(mask, tokens, PAD), mask


def last(values, mask):
    return values[np.arange(len(mask)), mask.sum(1) - 1]


def theirs(torch, model, tokens, mask):
    """Their score of each row, found by the pad token."""
    with torch.no_grad():
        return model(torch.tensor(tokens).long(), attention_mask=torch.tensor(mask).long()).logits[:, 0].numpy()


@pytest.fixture(scope='module')
def torch():
    return pytest.importorskip('torch')


@pytest.fixture
def scored(tmp_path):
    """A policy's folder, and the same decoder with a random head saved as a sequence classification."""
    unpack('llama', tmp_path / 'policy')
    c = families.load_config(str(tmp_path / 'policy'))
    policy = hf.load_params(
        str(tmp_path / 'policy'), c, transformer.map_table(lambda *_: jax.devices()[0], transformer.param_table(c))
    )
    params = critic.new_params(policy) | {'value_head': jax.random.normal(jax.random.key(0), (c.width,))}
    hf.save(str(tmp_path / 'scored'), str(tmp_path / 'policy'), params, c, np.float32, pad_token_id=PAD)
    return tmp_path / 'scored', params, c


@pytest.mark.parametrize('family', FAMILIES)
def test_scores_equal_those_of_transformers(torch, family, tmp_path):
    import transformers

    config = transformers.AutoConfig.for_model(
        family, num_labels=1, pad_token_id=PAD, **make_golden.SIZES | make_golden.FAMILIES[family]
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    assert type(model).__name__ == FAMILIES[family]
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.3 * torch.randn(weight.shape) * weight.shape[-1] ** -0.5
    model.save_pretrained(tmp_path)
    c, params = load(tmp_path)
    tokens, mask = padded()
    expected = theirs(torch, model, tokens, mask)
    np.testing.assert_allclose(last(scores(params, tokens, mask, c), mask), expected, atol=1e-5)
    assert np.abs(expected).min() > 0.01 and abs(expected[0] - expected[1]) > 0.01


def test_transformers_reads_a_saved_folder(torch, scored):
    import transformers

    folder, params, c = scored
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    tokens, mask = padded()
    assert type(model).__name__ == FAMILIES['llama'] and model.config.num_labels == 1
    ours = last(scores(params, tokens, mask, c), mask)
    np.testing.assert_allclose(ours, theirs(torch, model, tokens, mask), atol=1e-5)


def test_saved_weights_read_back_bit_for_bit(scored):
    folder, params, c = scored
    again_c, again = load(folder)
    assert again_c == c and 'lm_head' not in again
    jax.tree.map(np.testing.assert_array_equal, again, params)
    with open(folder / 'config.json', encoding='utf8') as file:
        config = json.load(file)
    assert config['architectures'] == [FAMILIES['llama']]
    assert config['pad_token_id'] == PAD


def test_a_score_sees_what_came_before_and_not_the_padding(scored):
    _, params, c = scored
    tokens, mask = padded()
    whole = scores(params, tokens, mask, c)
    shifted = scores(params, np.roll(tokens, 5, 1), np.roll(mask, 5, 1), c)
    np.testing.assert_allclose(shifted[1, 5:], whole[1, :11], atol=1e-5)
    changed = tokens.copy()
    changed[0, 8] = 63
    difference = np.abs(scores(params, changed, mask, c) - whole)[0]
    assert difference[:8].max() == 0 and difference[8:].min() > 0


def test_a_folder_of_a_language_model_is_refused(scored, tmp_path):
    with refused('missing', 'score.weight', 'left over', 'lm_head.weight'):
        load(tmp_path / 'policy')


def test_a_head_of_two_labels_is_refused(scored):
    folder = scored[0]
    path = os.path.join(folder, 'model.safetensors')
    tensors = load_file(path)
    save_file(tensors | {'score.weight': np.repeat(tensors['score.weight'], 2, 0)}, path)
    change_config(folder, id2label={'0': 'a', '1': 'b'})
    with refused('score.weight', r'\(2, 32\)', 'does not fit', r'\(1, 32\)'):
        load(folder)
