"""Recipes of papers: every number has its source or is the recipe's own choice, and each can be opened."""

import os

import pytest

from grpo_jax import PACKAGE, data, diagnose
from grpo_jax.configs import default
from grpo_jax.configs.recipes import settings
from grpo_jax.learner.programs import check_sizes
from grpo_jax.models.hf import families
from grpo_jax.run.open import check_context, make_algorithm
from grpo_jax.run.settings import Settings
from grpo_jax.sharding import mesh
from grpo_jax.sharding.batches import Shapes

MODELS = os.path.join(PACKAGE, 'configs', 'models')
ROWS = dict(zip([f'{row.recipe} {row.stage}'.strip() for row in settings.ROWS], settings.ROWS, strict=True))
CONFIGS = dict(zip(ROWS, settings.configs(), strict=True))
# how a batch is cut, what is looked at and kept, and numbers that no paper could have
FREE = ('learner.microbatches', 'learner.chunk', 'evaluation.', 'log.', 'checkpoint.', 'seed', 'data.options.')


def numbers(tree, prefix=''):
    """Dotted key -> number, of all keys that have one."""
    for key, value in tree.items():
        if hasattr(value, 'items'):
            yield from numbers(value, f'{prefix}{key}.')
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield f'{prefix}{key}', value


DEFAULTS = dict(numbers(default.get_config('sft').to_dict()))


def test_a_recipe_of_another_folder_has_a_row():
    names = {name[:-3] for name in os.listdir(os.path.dirname(settings.__file__)) if name.endswith('.py')}
    assert names - {'__init__', 'settings', 'r1_small'} == {row.recipe for row in settings.ROWS}


@pytest.mark.parametrize('name', ROWS)
def test_a_recipe_has_what_its_sources_say(name):
    values = {key: settings.read(CONFIGS[name], key) for key in ROWS[name].values}
    assert values == ROWS[name].values
    assert not set(ROWS[name].chosen) & set(values), 'said, and called a choice'


@pytest.mark.parametrize('name', ROWS)
def test_every_number_of_a_recipe_that_is_no_default_has_a_source_or_is_called_a_choice(name):
    row = ROWS[name]
    section = 'supervised' if 'supervised.batch' in row.values else 'train'
    unread = {
        'train': ('supervised.',),
        'supervised': (
            *('steps', 'algorithm.', 'optimizer.', 'learner.', 'collection.', 'rollout.group_size'),
            *('rollout.temperature', 'data.prompts_per_step'),
        ),
    }[section]
    changed = {key for key, value in numbers(CONFIGS[name].to_dict()) if value != DEFAULTS.get(key)}
    changed = {key for key in changed if not key.startswith(FREE + unread)}
    assert changed <= {*row.values, *row.chosen}
    if section == 'train':
        clipped = CONFIGS[name].algorithm.surrogate == 'clip'
        columns = {key for key in settings.COLUMNS.values() if clipped or 'clip' not in key}
        assert columns <= {*row.values, *row.chosen}, 'the table has a gap'


@pytest.mark.parametrize('name', ROWS)
def test_a_recipe_can_be_opened_and_cut_as_it_says(name):
    config = CONFIGS[name]
    opened, algorithm = Settings.from_config(config), make_algorithm(config)
    shapes = Shapes(
        opened.data.prompts_per_step,
        config.rollout.group_size,
        opened.data.max_prompt_tokens,
        opened.sampling.max_tokens,
    )
    check_sizes(algorithm, mesh.make(opened.mesh), shapes, opened.learning)
    assert config.data.name in ('math', 'files', 'mixture') and data.options_of(config.data.name)


@pytest.mark.parametrize('name', ROWS)
def test_a_recipe_is_within_the_published_ranges_for_a_model_of_its_size(name):
    published = {'7': 'Qwen2.5-7B', '8': 'Llama-3.1-8B'}  # of a name without a shape in configs/models
    config = CONFIGS[name]
    path = os.path.basename(config.model.path).removesuffix('-Instruct')
    size = next((size for size in published if f'{size}b' in path.lower()), None)
    shape = path if os.path.isdir(os.path.join(MODELS, path)) else published.get(size, 'Qwen2.5-32B')
    assert diagnose.advise(config, families.load_config(os.path.join(MODELS, shape))) == []
    if shape == path:
        opened = Settings.from_config(config)
        check_context(opened.data.max_prompt_tokens + opened.sampling.max_tokens, os.path.join(MODELS, shape))
