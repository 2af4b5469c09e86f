"""The mesh that a run has where its config leaves that open: all devices that the batch and the model allow."""

import json

import jax
import pytest

from grpo_jax import evaluate, supervised, train
from grpo_jax.configs import arithmetic_reward
from grpo_jax.errors import BadInput
from grpo_jax.run import steering
from grpo_jax.run.open import open_config, open_run
from grpo_jax.run.steering import Steering
from grpo_jax.sharding import chips
from grpo_jax.sharding import mesh as meshes
from grpo_jax.tools.preflight import plan, topology
from tests import tiny_run

OPEN = {'data': 0, 'fsdp': 1, 'context': 1, 'tensor': 1}


APART = {'sampler': 0, 'transport': 'files'}  # what a mesh's section says besides its axes


@pytest.fixture
def here(monkeypatch):
    """here(n): as if there were n devices, 8 at first."""

    def set_devices(count):
        monkeypatch.setattr(meshes, 'devices_here', lambda: jax.devices()[:count])

    set_devices(8)
    return set_devices


def opened(tmp_path, **changes):
    """{axis: size above 1} of the mesh with which a run of the tiny demo opens."""
    run = open_run(tiny_run.config(**changes), str(tmp_path / 'run'))
    assert dict(run.mesh.shape) | APART == run.settings.recorded['mesh']
    return {axis: size for axis, size in run.mesh.shape.items() if size > 1}


@pytest.mark.parametrize(
    ('changes', 'sizes'),
    [
        (dict(data__prompts_per_step=8), {'fsdp': 8}),
        (dict(data__prompts_per_step=8, mesh__fsdp=4), {'data': 2, 'fsdp': 4}),
        (dict(data__prompts_per_step=8, mesh__context=2), {'data': 4, 'context': 2}),
        (dict(data__prompts_per_step=8, mesh__fsdp=8), {'fsdp': 8}),
        # 99 tokens do not divide over tensor = 2, so fewer devices are taken: 4 prompts over 4, 6 over 6
        (dict(data__prompts_per_step=4), {'fsdp': 4}),
        (dict(data__prompts_per_step=6), {'data': 3, 'fsdp': 2}),
        (dict(data__prompts_per_step=4, mesh__fsdp=4), {'fsdp': 4}),
        # 2 rows in a microbatch
        (dict(data__prompts_per_step=8, learner__microbatches=16), {'fsdp': 2}),
        # the cold start has 12 demonstrations in an update
        (dict(data__prompts_per_step=8, supervised__updates=1, supervised__batch=12), {'fsdp': 4}),
        (dict(mesh__data=1), {}),
        (dict(mesh__data=2, mesh__fsdp=2), {'data': 2, 'fsdp': 2}),
    ],
)
def test_a_run_takes_the_devices_that_its_batch_allows(here, tmp_path, changes, sizes):
    assert opened(tmp_path, **changes) == sizes


def test_one_device_is_never_refused_for_its_batch(here, tmp_path):
    assert opened(tmp_path, data__prompts_per_step=1, rollout__group_size=3) == {}


def test_training_takes_the_mesh_that_preflight_names(here, tmp_path, monkeypatch):
    monkeypatch.setattr(topology, 'devices', lambda name, slices=1: jax.devices())
    monkeypatch.setattr(chips, 'lookup', lambda kind: chips.TPUS['v5e'])
    for prompts in (8, 16, 24):
        config = tiny_run.config(data__prompts_per_step=prompts)
        named = plan.make(config, 'v5e:2x4').mesh
        assert named.shape == open_run(config, str(tmp_path)).mesh.shape and named.size == 8


def test_an_axis_more_is_taken_where_there_are_fewer_prompts_than_devices():
    c = type('Shape', (), {'kv_heads': 2, 'width': 896})
    every = [(m['data'], m['fsdp'], m['tensor']) for m in meshes.list_meshes(OPEN, c, 64)]
    assert every == [(1, 64, 1), (1, 32, 2)]
    assert meshes.list_meshes(OPEN, c, 256)[0] == {'data': 2, 'fsdp': 128, 'context': 1, 'tensor': 1}  # 896 = 7 * 128
    assert meshes.list_meshes(OPEN, c, 32, 2)[0] == {'data': 2, 'fsdp': 16, 'context': 1, 'tensor': 1}


def test_the_mesh_is_said_and_idle_devices_with_what_would_use_them(here, tmp_path, capsys, caplog):
    opened(tmp_path, data__prompts_per_step=8)
    assert 'mesh: fsdp 8 of 8 devices, chosen\n' in capsys.readouterr().err
    opened(tmp_path, data__prompts_per_step=6)
    said = capsys.readouterr().err
    assert 'mesh: data 3 x fsdp 2 of 8 devices, chosen; 2 are idle: ' in said
    assert 'make data.prompts_per_step = 6 a multiple of 8 to use them' in said
    opened(tmp_path, mesh__data=2)
    assert 'mesh: 2 of 8 devices; with mesh.data=0 the others are not idle' in caplog.text
    here(1)
    capsys.readouterr()
    opened(tmp_path)
    assert 'mesh' not in capsys.readouterr().err


def test_several_processes_take_all_devices_or_are_told_what_divides(here, tmp_path, monkeypatch):
    monkeypatch.setattr(jax, 'process_count', lambda: 2)
    assert opened(tmp_path, data__prompts_per_step=8) == {'fsdp': 8}
    with pytest.raises(BadInput, match=r'^data.prompts_per_step = 6: must be a multiple of .* = 8; choose 8'):
        opened(tmp_path, data__prompts_per_step=6)


def begin(config, workdir):
    """The mesh in the config.json of a run that begins in a workdir, or goes on there."""
    tiny_run.record(open_run(config, str(workdir)))
    return json.loads((workdir / 'config.json').read_text())['mesh']


def test_a_resumed_run_keeps_its_mesh_while_it_has_as_many_devices(here, tmp_path, capsys):
    config = tiny_run.config(data__prompts_per_step=8)
    first = begin(tiny_run.config(data__prompts_per_step=8, mesh__fsdp=2), tmp_path)
    assert first == {'data': 4, 'fsdp': 2, 'context': 1, 'tensor': 1, **APART}
    assert begin(config, tmp_path) == first
    assert f'mesh: data 4 x fsdp 2 of 8 devices, as recorded in {tmp_path}' in capsys.readouterr().err
    assert not steering.changes(str(tmp_path), open_run(config, str(tmp_path)).settings.recorded)
    here(2)
    assert begin(config, tmp_path) == {'data': 1, 'fsdp': 2, 'context': 1, 'tensor': 1, **APART}
    here(8)
    assert begin(config, tmp_path)['fsdp'] == 8
    # a mesh that no longer divides is not kept
    assert begin(tiny_run.config(data__prompts_per_step=8, learner__microbatches=8), tmp_path)['fsdp'] == 4
    branched = open_config(config, str(tmp_path / 'branch'))
    assert branched.mesh.size == 8  # of its own


def test_a_finished_run_stays_finished_on_any_mesh(here, tmp_path):
    config = tiny_run.config(steps=1, supervised__updates=1)
    begin(config, tmp_path)
    (tmp_path / 'metrics.jsonl').write_text('{"step": 0}\n')
    (tmp_path / 'evaluations.jsonl').write_text('{"step": 1}\n')
    assert train.is_finished(config, str(tmp_path))
    assert not train.is_finished(tiny_run.config(steps=1, seed=1, supervised__updates=1), str(tmp_path))
    assert not train.is_finished(tiny_run.config(steps=1, mesh__data=1), str(tmp_path))
    assert not supervised.is_finished(config, str(tmp_path))  # it has no checkpoint


def test_a_run_of_many_devices_is_evaluated_on_few(here, tmp_path):
    begin(tiny_run.config(data__prompts_per_step=8), tmp_path)
    assert evaluate.open_recorded(str(tmp_path)).mesh.size == 8
    here(1)
    assert evaluate.open_recorded(str(tmp_path)).mesh.size == 1
    assert open_run(tiny_run.config(data__prompts_per_step=8), str(tmp_path), steered=Steering()).mesh.size == 1


def test_a_reward_model_is_trained_on_the_devices_that_its_labels_allow(here, tmp_path):
    config = arithmetic_reward.get_config()
    config.supervised.batch, config.data.prompts_per_step = 12, 16
    config.model.path, config.model.random_init = 'configs/models/characters', True
    assert open_config(config, str(tmp_path), head=True).mesh.size == 6
    assert open_config(config, str(tmp_path)).mesh.size == 4
