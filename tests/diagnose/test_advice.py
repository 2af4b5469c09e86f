"""Settings outside of what was published are named with the source, and nothing else is."""

import dataclasses
import logging
import os

import pytest

from grpo_jax import diagnose
from grpo_jax.configs import arithmetic, gsm8k
from grpo_jax.diagnose import advice
from grpo_jax.models import transformer
from grpo_jax.run.open import open_algorithm, open_run
from tests import tiny_run
from tests.doc_examples import ROOT

HALF_BILLION = transformer.ModelConfig(
    vocab_size=151936, width=896, layers=24, heads=14, kv_heads=2, head_dim=64, mlp=4864, norm_eps=1e-6, rope_theta=1e6,
    rope_scaling=(), qk_norm=False, qkv_bias=True, out_bias=False, mlp_bias=False, tie_embeddings=True,
)  # fmt: skip
EIGHT_BILLION = dataclasses.replace(HALF_BILLION, width=4096, heads=32, kv_heads=8, head_dim=128, mlp=14336, layers=36)
PRESETS = sorted(name[:-3] for name in os.listdir(os.path.join(ROOT, 'configs', 'algorithms')) if name[0] != '_')


def config(preset='default_rlvr', **changes):
    """The experiment on GSM8K; changes are dotted keys with __ for the dots."""
    changed = gsm8k.get_config(preset)
    for key, value in changes.items():
        *path, name = key.split('__')
        section = changed
        for part in path:
            section = section[part]
        section[name] = value
    return changed


def test_a_model_has_as_many_parameters_as_its_name_says():
    # Qwen2.5-0.5B: 151936 * 896 of the embedding, 24 layers of 14 912 384, and 896 of the last norm
    assert advice.count_parameters(HALF_BILLION) == 136_134_656 + 24 * 14_912_384 + 896 == 494_032_768


@pytest.mark.parametrize('preset', [preset for preset in PRESETS if preset not in ('sft', '__pycache__')])
def test_presets_on_gsm8k_are_within_what_was_published(preset):
    assert diagnose.advise(config(preset), HALF_BILLION) == []


@pytest.mark.parametrize(
    ('preset', 'changes', 'named'),
    [
        ('default_rlvr', {'optimizer__learning_rate': 1e-3}, 'optimizer.learning_rate = 0.001'),
        ('default_rlvr', {'optimizer__learning_rate': 1e-9}, 'optimizer.learning_rate = 1e-09'),
        ('default_rlvr', {'rollout__group_size': 256}, 'rollout.group_size = 256'),
        ('default_rlvr', {'rollout__temperature': 0.2}, 'rollout.temperature = 0.2'),
        ('default_rlvr', {'rollout__max_tokens': 16}, 'rollout.max_tokens = 16'),
        ('default_rlvr', {'algorithm__clip_high': 0.9}, 'algorithm.clip_high = 0.9'),
        ('gspo', {'algorithm__clip_low': 0.2, 'algorithm__clip_high': 4e-4}, 'algorithm.clip_low = 0.2'),
        ('grpo', {'algorithm__kl_coef': 1.0}, 'algorithm.kl_coef = 1'),
        ('grpo', {'learner__epochs': 8, 'learner__minibatches': 8}, 'learner.epochs x learner.minibatches = 64'),
        ('dpo', {'optimizer__learning_rate': 5e-6}, 'optimizer.learning_rate = 5e-06'),
        ('sft', {'optimizer__learning_rate': 1e-6}, 'optimizer.learning_rate = 1e-06'),
        ('default_rlvr', {'model__lora__rank': 8, 'optimizer__learning_rate': 5e-7}, 'optimizer.learning_rate = 5e-07'),
        (
            'default_rlvr',
            {'model__lora__rank': 8, 'optimizer__learning_rate': 1e-4},
            'optimizer.learning_rate = 0.0001',
        ),
    ],
)
def test_a_setting_outside_is_named_with_the_range_and_its_source(preset, changes, named):
    (line,) = diagnose.advise(config(preset, **changes), HALF_BILLION)
    assert line.startswith(f'{named} was not published for such a run')
    published = next(p for p in diagnose.PUBLISHED if p.sources in line)
    assert f': {published.values}; ' in line and '\n' not in line


def test_adapters_want_ten_times_the_rate():
    (line,) = diagnose.advise(config('default_rlvr', optimizer__learning_rate=3e-5), HALF_BILLION)
    assert '1e-07 to 5e-06' in line
    assert (
        diagnose.advise(config('default_rlvr', optimizer__learning_rate=3e-5, model__lora__rank=1), HALF_BILLION) == []
    )


def test_ranges_are_those_of_the_models_size():
    assert advice.count_parameters(EIGHT_BILLION) > 7e9
    assert diagnose.advise(config(optimizer__learning_rate=4e-6), HALF_BILLION) == []
    (line,) = diagnose.advise(config(optimizer__learning_rate=4e-6), EIGHT_BILLION)
    assert '7 billion parameters and more' in line and '1e-07 to 3e-06' in line


@pytest.mark.parametrize('value', [0.0, 10.0, 0.2])
def test_what_was_published_apart_from_the_range_is_within(value):
    changes = {'optimizer__learning_rate': 0.0, 'algorithm__clip_low': value or 0.2, 'rollout__group_size': 1}
    assert diagnose.advise(config('reinforce_pp', **changes), HALF_BILLION) == []


def test_nothing_is_said_of_small_models_and_of_random_ones():
    small = dataclasses.replace(HALF_BILLION, vocab_size=64)  # 0.36 billion less the embedding: still large enough
    assert diagnose.advise(config(optimizer__learning_rate=1.0), small) != []
    smaller = dataclasses.replace(HALF_BILLION, layers=2)
    assert diagnose.advise(config(optimizer__learning_rate=1.0), smaller) == []
    assert diagnose.advise(config(optimizer__learning_rate=1.0, model__random_init=True), HALF_BILLION) == []
    assert diagnose.advise(arithmetic.get_config(), smaller) == []


def test_it_is_named_when_a_run_is_opened_and_blocks_nothing(tmp_path, monkeypatch, caplog):
    short = advice.Published('rollout.max_tokens', 256, 32768, 'any', 'a paper', parameters=(0, 1e12))
    monkeypatch.setattr(advice, 'SMALLEST', 0)
    monkeypatch.setattr(advice, 'PUBLISHED', [short])
    run = open_run(tiny_run.config(), str(tmp_path))
    settings = run.settings._replace(config=tiny_run.config(model__random_init=False))
    trained = dataclasses.replace(run, settings=settings)
    with caplog.at_level(logging.WARNING, 'grpo_jax'):
        open_algorithm(trained, run.algorithm)
    assert 'rollout.max_tokens = 12 was not published for such a run (any, 0 billion to 1000 billion' in caplog.text
    assert not os.listdir(tmp_path)
