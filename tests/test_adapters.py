"""Runs with adapters: what their checkpoints hold, that they go on exactly, and that nobody samples without them."""

import json
import os
import shutil

import jax
import numpy as np
import pytest

from grpo_jax import evaluate, reward_model, train
from grpo_jax.errors import BadInput
from grpo_jax.models import hf, lora, transformer
from grpo_jax.models.hf import families, peft
from grpo_jax.run import checkpoint
from grpo_jax.run.open import make_policy, open_config, open_run
from grpo_jax.run.steering import Steering
from grpo_jax.tools import export
from tests import small_model, tiny_run

CHANGES = dict(
    preset='grpo',  # with a reference
    model__lora__rank=2,
    optimizer__learning_rate=1e-2,
    reward__length_shaping='overlong',  # a random model is paid for short completions, so that every step learns
    reward__options__overlong__margin=11,
    collection__gate='none',
    log__rollouts=0,
    diagnose__on='off',
)


def config(**changes):
    return tiny_run.config(**CHANGES | changes)


@pytest.fixture(scope='module', autouse=True)
def models(tmp_path_factory):
    """Folders of two models that differ in their weights alone; runs begin from the first."""
    # seed 3 gives a model that learns in its first step
    folders = [small_model.write_drawn(tmp_path_factory.mktemp('model') / 'of', seed) for seed in (3, 2)]
    CHANGES.update(model__path=folders[0], model__random_init=False)
    return folders


@pytest.fixture(scope='module')
def finished(models, tmp_path_factory):
    """The workdir of a run of four steps."""
    workdir = tmp_path_factory.mktemp('run')
    train.run(config(steps=4, collection__reference='hard', collection__reference_every=2), str(workdir))
    return workdir


def policy_of(workdir):
    return jax.device_get(evaluate.open_policy(evaluate.open_recorded(str(workdir)))[0])


def assert_equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(one), jax.device_get(other))


def test_a_checkpoint_has_adapters_and_of_frozen_weights_a_digest(finished):
    path = checkpoint.path_of(finished, 4)
    kinds = checkpoint.kinds(path)
    trees = {name.split('/')[0] for name in kinds}
    assert trees >= {'params', 'opt_state', 'ref_params', 'aux', 'step'}
    of_weights = {name for name in kinds if '/layers/' in name or 'embed' in name or 'norm' in name}
    assert len(of_weights) == (1 + 2 + 1) * 7 * 2  # parameters, moments and reference, of 7 matrices of two factors
    assert all(name.endswith(('/a', '/b')) for name in of_weights)
    assert checkpoint.recorded_frozen(path) == checkpoint.recorded_frozen(checkpoint.path_of(finished, 2)) != ''


def test_the_sampler_s_weights_change_with_every_update(finished):
    rows = tiny_run.rows(finished)
    assert [row['sampler/merged_share'] > 0.9 for row in rows] == [False, True, True, True]
    assert rows[0]['sampler/merged_share'] == 0  # new adapters change nothing
    assert len({row['sampler/checksum'] for row in rows}) == 4
    assert max(row['sampler_gap_max'] for row in rows) < 1e-4


def test_a_run_that_was_cut_off_goes_on_as_if_it_had_not(finished, tmp_path):
    renewed = dict(collection__reference='hard', collection__reference_every=2)
    train.run(config(steps=2, **renewed), str(tmp_path))
    train.run(config(steps=4, **renewed), str(tmp_path))
    assert (tmp_path / 'metrics.jsonl').read_bytes() == (finished / 'metrics.jsonl').read_bytes()
    assert_equal(policy_of(tmp_path), policy_of(finished))


def test_a_run_with_its_base_in_int8_goes_on_and_is_exported_as_it_is(long, tmp_path):
    in_int8 = dict(model__lora__base_dtype='int8')
    train.run(config(steps=4, **in_int8), str(tmp_path / 'straight'))
    for steps in (2, 4):
        train.run(config(steps=steps, **in_int8), str(tmp_path / 'run'))
    rows = tiny_run.rows(tmp_path / 'run')
    assert rows == tiny_run.rows(tmp_path / 'straight') and max(row['sampler_gap_max'] for row in rows) < 1e-4
    policy = policy_of(tmp_path / 'run')
    assert_equal(policy, policy_of(tmp_path / 'straight'))
    assert policy['layers']['wq'].base.values.dtype == np.int8
    export.export(str(tmp_path / 'run'), str(tmp_path / 'out'), 'float32')
    c = families.load_config(tmp_path / 'out')
    exported = hf.load_params(
        tmp_path / 'out', c, transformer.map_table(lambda *_: jax.devices()[0], transformer.param_table(c))
    )
    assert_equal(exported, {**policy, 'layers': lora.merge(policy['layers'])})
    with pytest.raises(BadInput, match=r'model\.lora\.base_dtype'):
        train.run(config(steps=5), str(tmp_path / 'run'))


def test_a_renewed_reference_is_a_copy_of_the_adapters(finished):
    assert [row['reference_renewed'] for row in tiny_run.rows(finished)] == [0, 0, 1, 0]

    def read(step, tree):
        path = checkpoint.path_of(finished, step)
        everything = checkpoint.abstract_tree(path, jax.sharding.SingleDeviceSharding(jax.devices()[0]))
        return checkpoint.read_tree(path, {tree: everything[tree]}, partial=True)[tree]

    assert_equal(read(4, 'ref_params'), read(2, 'params'))
    assert not read(2, 'ref_params')['layers']['wq']['b'].any()


def test_a_frozen_sampler_shares_the_frozen_weights(long, tmp_path):
    train.run(config(steps=3, collection__source='reference'), str(tmp_path))
    rows = tiny_run.rows(tmp_path)
    assert [row['sampler/merged_share'] for row in rows] == [0, 0, 0]  # adapters learn, and nobody samples with them
    assert len({row['sampler/checksum'] for row in rows}) == 1
    assert np.abs(policy_of(tmp_path)['layers']['wq'].b).max() > 1e-3


def test_other_frozen_weights_are_refused(finished, models, tmp_path):
    shutil.copytree(finished, tmp_path / 'copy')
    with pytest.raises(BadInput, match=r'model\.path = .*has other weights.*bring them back'):
        renewed = dict(collection__reference='hard', collection__reference_every=2)
        train.run(config(steps=5, model__path=models[1], **renewed), str(tmp_path / 'copy'))
    assert len(tiny_run.rows(tmp_path / 'copy')) == 4


def test_the_export_is_the_merged_policy(finished, tmp_path):
    policy = policy_of(finished)
    export.export(str(finished), str(tmp_path / 'out'), 'float32')
    c = families.load_config(tmp_path / 'out')
    device = transformer.map_table(lambda *_: jax.devices()[0], transformer.param_table(c))
    exported = hf.load_params(tmp_path / 'out', c, device)
    assert_equal(exported, {**policy, 'layers': lora.merge(policy['layers'])})
    assert np.abs(exported['layers']['wq'] - policy['layers']['wq'].base).max() > 1e-3


def test_exported_adapters_begin_another_run(finished, models, tmp_path, monkeypatch):
    export.export(str(finished), str(tmp_path / 'out'), 'float32', adapter=True)
    assert sorted(os.listdir(tmp_path / 'out')) == ['README.md', peft.CONFIG, peft.WEIGHTS]
    with open(tmp_path / 'out' / peft.CONFIG, encoding='utf8') as file:
        assert json.load(file)['base_model_name_or_path'] == models[0]
    with_path = config(model__lora__path=str(tmp_path / 'out'))
    assert_equal(make_policy(open_config(with_path, str(tmp_path / 'new'))), policy_of(finished))
    content, _ = evaluate.open_report(evaluate.open_subject(with_path, None), 1, 'test')
    assert content['model'] == {'path': models[0], 'adapters': str(tmp_path / 'out')}
    of_run, _ = evaluate.open_report(evaluate.open_subject(None, str(finished)), 1, 'test')
    assert content['figures'] == of_run['figures']
    monkeypatch.setattr(export.hub, 'check_upload', lambda *_: None)
    with pytest.raises(BadInput, match=r'--push.*push without --adapter'):
        export.export(str(finished), str(tmp_path / 'pushed'), 'float32', adapter=True, push='me/mine')
    assert not (tmp_path / 'pushed').exists()


def test_a_run_that_is_begun_and_its_branch_do_not_read_the_folder_of_their_first_adapters_again(finished, tmp_path):
    export.export(str(finished), str(tmp_path / 'out'), 'float32', adapter=True)
    begun = dict(model__lora__path=str(tmp_path / 'out'))
    train.run(config(steps=1, **begun), str(tmp_path / 'run'))
    (tmp_path / 'out').rename(tmp_path / 'moved')
    state = train.run(config(steps=2, **begun), str(tmp_path / 'run'))
    assert_equal(policy_of(tmp_path / 'run'), state.params)
    train.run(
        config(steps=3, seed=1, **begun), str(tmp_path / 'run'), steering=Steering(branch=str(tmp_path / 'branch'))
    )
    assert [row['step'] for row in tiny_run.rows(tmp_path / 'branch')] == [2]
    with pytest.raises(BadInput, match=r'adapter_config\.json'):
        train.run(config(steps=1, **begun), str(tmp_path / 'new'))


@pytest.mark.parametrize('option', [dict(alpha=64.0), dict(rank=4), dict(path='mine'), dict(base_dtype='int8')])
def test_neither_a_run_nor_its_branch_takes_other_adapters(finished, tmp_path, option):
    (name, value), *_ = option.items()
    same = dict(steps=4, collection__reference='hard', collection__reference_every=2)
    changed = config(**same, **{f'model__lora__{name}': value})
    for steered in (None, Steering(amend=True), Steering(branch=str(tmp_path / 'branch'))):
        with pytest.raises(
            BadInput, match=rf'model\.lora\.{name} is .* and not {value!r}; a run and its branches keep their adapters'
        ):
            train.run(changed, str(finished), steering=steered)
    assert not (tmp_path / 'branch').exists()


@pytest.mark.parametrize('base_dtype', ['', 'int8'])
def test_random_weights_are_first_trained_as_a_whole_and_then_frozen(base_dtype, long, tmp_path):
    made = dict(model__random_init=True, supervised__updates=2, model__lora__base_dtype=base_dtype)
    state = train.run(config(steps=1, **made), str(tmp_path / 'run'))
    # the cold start has trained all weights, which stay frozen from then on
    cold, step = checkpoint.steps(tmp_path / 'run' / 'cold_start'), int(state.step)
    assert (cold, step) == ([2], 1)
    assert 'params/embed' in checkpoint.kinds(checkpoint.path_of(tmp_path / 'run' / 'cold_start', 2))
    assert_equal(policy_of(tmp_path / 'run'), state.params)
    with pytest.raises(BadInput, match=r'--adapter = True: .*is in no folder; leave it out'):
        export.export(str(tmp_path / 'run'), str(tmp_path / 'out'), 'float32', adapter=True)
    steered = Steering(branch=str(tmp_path / 'branch'))
    branched = train.run(config(steps=2, seed=1, **made), str(tmp_path / 'run'), steering=steered)
    assert_equal(lora.split(branched.params)[1], lora.split(state.params)[1])
    assert_equal(policy_of(tmp_path / 'branch'), branched.params)


def test_sampled_lengths_follow_a_reward_of_length(tmp_path):
    """What fails where the sampler decodes with other weights than those that learn."""
    probe = config(steps=10, preset='dr_grpo', optimizer__learning_rate=0.03, checkpoint__every=100)
    train.run(probe, str(tmp_path))
    lengths = [row['length'] for row in tiny_run.rows(tmp_path)]
    assert np.mean(lengths[-2:]) < 0.5 * np.mean(lengths[:2])


def test_a_run_whose_sampler_does_not_merge_ends(long, tmp_path, monkeypatch):
    monkeypatch.setattr(lora, 'merge', small_model.without_adapters)
    with pytest.raises(RuntimeError, match='they were not merged'):
        # programs that no other test has traced
        train.run(config(steps=3, preset='dr_grpo', model__lora__alpha=9.0), str(tmp_path))
    assert [row['step'] for row in tiny_run.rows(tmp_path)] == [0]  # when new adapters change nothing


@pytest.mark.parametrize(
    'changes, message',
    [
        (dict(preset='ppo'), 'model.lora.rank = 2: a critic would be a second model'),
        (
            dict(collection__reference='polyak', collection__reference_every=2),
            "collection.reference = 'polyak': the mean of two adapters",
        ),
        (dict(reference__path='configs/models/characters'), 'reference.path = .*cannot be another model'),
        (dict(model__lora__path='nowhere'), 'adapter_config.json'),
        (dict(model__path='configs/models/characters'), 'has no model.safetensors'),
    ],
)
def test_what_cannot_be_beside_adapters_is_refused(tmp_path, changes, message):
    with pytest.raises(BadInput, match=message):
        open_run(config(**changes), str(tmp_path / 'run'))
    assert not (tmp_path / 'run').exists()


def test_a_reward_model_has_none(tmp_path):
    with pytest.raises(BadInput, match='a reward model is trained as a whole'):
        reward_model.run(config(supervised__updates=1), str(tmp_path / 'run'))
