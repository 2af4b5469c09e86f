"""Iterations of reward model and policy: what each begins with and learns from, going on, and what is refused."""

import json
import os

import jax
import numpy as np
import pytest

from grpo_jax import reward_model, supervised, train
from grpo_jax.data import rollouts
from grpo_jax.errors import BadInput
from grpo_jax.models import lora
from grpo_jax.rewards import numeric
from grpo_jax.run.open import open_config
from grpo_jax.tools import export, iterate
from tests import small_model, tiny_run

ITERATIONS = 2
SETTINGS = dict(
    steps=3,
    data__prompts_per_step=10,
    reward__parts=(('model', 1.0), ('numeric', 0.0)),
    reward__self_test=1.0,
    log__rollouts=1,
    evaluation__prompts=4,
    supervised__updates=4,
    supervised__optimizer__warmup=0,
    rollout__max_tokens=40,
)


def config(**changes):
    return tiny_run.config(**SETTINGS | changes)


@pytest.fixture(scope='module')
def iterated(tmp_path_factory):
    """(config, workdir, labelled, what run returned) of two iterations; the verifier likes odd lengths."""
    root = tmp_path_factory.mktemp('iterate')
    paths = {name: str(root / name) for name in ('start', 'policy', 'labelled', 'work')}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(numeric, 'reward', lambda completion, example: float(len(completion) % 2))
        supervised.run(config(model__path=small_model.write(root / 'small')), paths['start'])
        export.export(paths['start'], paths['policy'], 'float32')
        made = config(model__path=paths['policy'], model__random_init=False)
        train.run(
            config(
                model__path=paths['policy'],
                model__random_init=False,
                supervised__updates=0,
                reward__parts=(('numeric', 1.0),),
            ),
            paths['labelled'],
        )
        labelled = os.path.join(paths['labelled'], 'rollouts')
        yield made, paths['work'], labelled, iterate.run(made, paths['work'], ITERATIONS, labelled)


def configs(workdir, name):
    """The config.json of each iteration's reward model or policy."""
    recorded = []
    for i in range(ITERATIONS):
        with open(os.path.join(workdir, str(i), name, 'config.json'), encoding='utf8') as file:
            recorded.append(json.load(file))
    return recorded


def test_an_iteration_begins_with_what_the_last_one_made(iterated):
    made, workdir, _, _ = iterated
    judges, policies = configs(workdir, 'reward_model'), configs(workdir, 'policy')
    folders = [os.path.join(workdir, str(i), 'reward_model', 'reward_model') for i in range(ITERATIONS)]
    exported = [os.path.join(workdir, str(i), 'exported') for i in range(ITERATIONS)]
    assert [judge['model']['path'] for judge in judges] == [made.model.path, *folders[:-1]]
    assert [policy['model']['path'] for policy in policies] == [made.model.path, *exported[:-1]]
    assert [policy['reward']['options']['model']['folder'] for policy in policies] == folders
    assert [policy['seed'] for policy in policies] == list(range(ITERATIONS))


def test_a_tenth_of_what_a_reward_model_learns_from_is_older(iterated):
    made, workdir, labelled, _ = iterated
    folders = [labelled, *(os.path.join(workdir, str(i), 'policy', 'rollouts') for i in range(2))]
    judges = configs(workdir, 'reward_model')
    judges.append(iterate.reward_model_config(made, 2, '', folders).to_dict())  # of a third iteration
    for i, judge in enumerate(judges):
        sources = judge['data']['options']['sources']
        assert [source['options']['folder'] for source in sources] == folders[: i + 1]
        np.testing.assert_allclose([source['weight'] for source in sources], [0.1 / i] * i + [0.9] if i else [1.0])
    assert made.reward_model.replay == 0.1


def test_a_reward_model_learns_on_with_its_head(iterated, tmp_path):
    made, workdir, _, _ = iterated
    folder = os.path.join(workdir, '0', 'reward_model', 'reward_model')
    changed = iterate.reward_model_config(made, 1, folder, [iterated[2]])
    begun = reward_model.make_initial_params(open_config(changed, str(tmp_path / 'fresh'), head=True))
    assert np.any(np.asarray(begun['value_head']))
    changed.supervised.updates, changed.supervised.optimizer.learning_rate = 1, 0.0
    ended = reward_model.run(changed, str(tmp_path / 'run')).params
    jax.tree.map(np.testing.assert_array_equal, begun, ended)


def test_adapters_are_the_policys_and_begin_anew_on_what_was_merged():
    adapters = dict(model__lora__rank=2, model__lora__path='runs/adapter', model__lora__base_dtype='int8')
    made = config(model__random_init=False, **adapters)
    judge = iterate.reward_model_config(made, 0, 'base', ['labelled'])
    assert not lora.LoraOptions.from_config(judge.model.lora).rank
    iterate.check(made, 1)
    with pytest.raises(BadInput, match=r'model\.lora\.base_dtype'):
        iterate.check(made, 2)
    policies = [iterate.policy_config(made, i, 'base', 'judge').model.lora for i in range(2)]
    assert [(lora.rank, lora.path) for lora in policies] == [(2, 'runs/adapter'), (2, '')]
    assert (made.model.lora.rank, made.model.lora.path) == (2, 'runs/adapter')


def test_what_is_done_is_not_done_again(iterated, monkeypatch):
    made, workdir, labelled, results = iterated
    for module in (train, reward_model, export):
        monkeypatch.setattr(module, 'export' if module is export else 'run', lambda *_: pytest.fail('done again'))
    assert iterate.run(made, workdir, ITERATIONS, labelled) == results
    assert [set(row) >= {'accuracy', 'auc', 'policy'} for row in results] == [True] * ITERATIONS


@pytest.mark.parametrize(
    'changes, what',
    [
        ({'reward__parts': (('numeric', 1.0),)}, 'reward.parts'),
        ({'reward__verifier': ''}, 'verifier'),
        ({'reward_model__objective': 'steps'}, 'reward_model.objective'),
        ({'reward_model__replay': 1.0}, 'replay'),
        ({'model__random_init': True}, 'model.random_init'),
    ],
)
def test_what_cannot_be_iterated_is_refused(changes, what, tmp_path):
    made = config(**{'model__random_init': False} | changes)
    with pytest.raises(BadInput, match=what):
        iterate.run(made, str(tmp_path / 'work'), 2, 'nowhere')
    assert not os.path.exists(tmp_path / 'work')


def test_rollouts_are_labelled_by_a_part_of_the_reward(iterated):
    made = rollouts.examples('train', folder=iterated[2], least=1.0, by='numeric')
    assert made and all(len(example.meta['demonstration']) % 2 for example in made)
    assert all(len(example.meta['rejected']) % 2 == 0 for example in made if 'rejected' in example.meta)
    with pytest.raises(BadInput, match='none of its parts'):
        rollouts.examples('train', folder=iterated[2], least=1.0, by='other')
