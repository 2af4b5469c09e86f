"""Counts of operations and traffic, the plan of a run, verdict and advice; the whole command where libtpu is."""

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
import pytest

from benchmarks import method_memory
from grpo_jax.collect.draw import abstract_aux
from grpo_jax.configs import gsm8k
from grpo_jax.errors import BadInput
from grpo_jax.models import hf, linear, lora, transformer
from grpo_jax.models.hf import families
from grpo_jax.run.open import make_run_learner, make_run_sampler, open_run
from grpo_jax.run.settings import Settings
from grpo_jax.sampler import schedule, stops
from grpo_jax.sharding import chips, compiled
from grpo_jax.tools.preflight import __main__ as preflight
from grpo_jax.tools.preflight import advice, compiler, flops, plan, report, scale, topology, verdict
from grpo_jax.types import map_table
from tests import doc_examples, family_model, tiny_run

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
GIB = 2**30
PUBLISHED = {  # billions of parameters, from the models' cards and safetensors indices
    'Qwen2.5-0.5B': 0.494,
    'Qwen2.5-1.5B': 1.544,
    'Qwen2.5-3B': 3.086,
    'Qwen2.5-7B': 7.616,
    'Qwen2.5-14B': 14.770,
    'Qwen2.5-32B': 32.764,
    'Qwen3-0.6B': 0.596,
    'Qwen3-1.7B': 1.721,
    'Qwen3-4B': 4.022,
    'Qwen3-8B': 8.191,
    'Llama-3.2-1B': 1.236,
    'Llama-3.2-3B': 3.213,
    'Llama-3.1-8B': 8.030,
    'gemma-2-2b': 2.614,
}


@pytest.mark.parametrize('name', PUBLISHED)
def test_shapes_of_published_models_have_their_parameters(name):
    c = families.load_config(os.path.join(plan.MODELS, name))
    shapes = jax.eval_shape(lambda key: transformer.init(key, c), jax.random.key(0))
    assert round(sum(x.size for x in jax.tree.leaves(shapes)) / 1e9, 3) == PUBLISHED[name]


def test_hub_names_of_published_models_need_no_hub(monkeypatch):
    monkeypatch.setattr(hf, 'find', lambda path: pytest.fail(f'asked the hub for {path}'))
    assert plan.find_model('Qwen/Qwen2.5-7B') == plan.find_model('Qwen/Qwen2.5-7B-Instruct')
    assert plan.find_model('google/gemma-2-2b-it').endswith('gemma-2-2b')
    assert plan.find_model('configs/models/characters').endswith('characters')


def counted(function, *arguments, trip_counts=()):
    return flops.count(jax.jit(function).trace(*arguments).jaxpr, trip_counts)


W, X = jnp.zeros((8, 8)), jnp.zeros((4, 8))
PRODUCT = 2 * 4 * 8 * 8


def test_operations_of_loops_count_as_often_as_they_run():
    def scanned(x):
        return jax.lax.scan(lambda x, _: (x @ W, None), x, length=5)[0]

    def looped(x, n):
        return jax.lax.fori_loop(0, n, lambda _, x: jax.lax.fori_loop(n, 2 * n, lambda _, y: y @ W, x) @ W, x)

    assert counted(scanned, X) == (5 * PRODUCT, 0)
    assert counted(looped, X, 3, trip_counts=(7, 2)) == (7 * (1 + 2) * PRODUCT, 0)
    assert counted(looped, X, 3) == (2 * PRODUCT, 2)  # nothing tells, and it says so


def test_what_is_recomputed_counts_again():
    def loss(x, step):
        return jnp.sum(jnp.sin(step(x)))

    def step(x):
        return jnp.sin(x @ W) @ W

    kept, _ = counted(jax.grad(lambda x: loss(x, step)), X)
    again, _ = counted(jax.grad(lambda x: loss(x, jax.checkpoint(step))), X)
    assert kept == 4 * PRODUCT  # two products, and of each the one that leads back to x
    assert again == 5 * PRODUCT  # the input of the sine once more


def test_operations_in_shard_map_are_those_of_all_shards():
    mesh = jax.make_mesh((2, 4), ('a', 'b'), axis_types=(AxisType.Auto,) * 2)

    def shards(*axes):
        return jax.shard_map(
            lambda x: x @ W,
            mesh=mesh,
            in_specs=PartitionSpec('a'),
            out_specs=PartitionSpec('a'),
            axis_names=set(axes),
            check_vma=False,
        )

    assert counted(shards('a'), X) == (PRODUCT, 0)
    assert counted(shards('a', 'b'), X) == (4 * PRODUCT, 0)  # what b repeats is run four times


@pytest.mark.parametrize(
    'message, size',
    [
        (
            'Ran out of memory on HBM, the total memory required for HLO temporaries (17.00G) exceeds available',
            17 * GIB,
        ),
        ('Ran out of memory in memory space hbm. Used 512.5M of 15.75G hbm.', 512.5 * 2**20),
        ('no figure', float('inf')),
    ],
)
def test_what_the_compiler_says_is_needed(message, size):
    assert compiler.needed_bytes(message) == size


@pytest.fixture
def slices(monkeypatch):
    """Topologies v5e:2x2, 2x4 of CPU devices, with chips of one GiB."""

    def devices(name, slices=1):
        return jax.devices()[: {'1x2': 2, '2x2': 4, '2x4': 8}[name.partition(':')[2]] * slices]

    monkeypatch.setattr(topology, 'devices', devices)
    monkeypatch.setattr(advice, 'SLICES', {'v5e': ('2x2', '2x4')})
    monkeypatch.setattr(chips, 'lookup', lambda kind: chips.TPUS['v5e']._replace(memory=GIB))


def test_a_planned_update_is_the_one_that_training_compiles(slices, tmp_path):
    config = tiny_run.config(mesh__fsdp=4)
    made = plan.make(config, 'v5e:2x2')
    jobs, held = plan.list_jobs(made)
    run = open_run(config, str(tmp_path / 'run'))
    shapes = run.settings.step_shapes(run.algorithm)
    learner = make_run_learner(run, abstract_aux(run.settings.collection, shapes, 40))
    planned = next(job for job in jobs if job.name == 'learner.update')
    assert planned.trace().lower().as_text() == learner.update.program.traced.lower().as_text()
    # and of the sampler's programs, those planned are among those that training compiles
    engine = make_run_sampler(run, shapes)
    compiled = {f'rollout: {key}' for key in schedule.reachable_programs(engine.schedule)}
    planned = {job.name for job in jobs if job.phase == 'rollout'}
    assert len(planned) >= 5 and planned <= compiled
    assert held['weights'] and held['cache'] and made.state_bytes()[0] > 3 * made.state_bytes()[1]


@pytest.mark.parametrize('preset', method_memory.PRESETS)
def test_what_a_method_holds_is_what_the_table_says(preset):
    """Policy, optimizer, reference and critic in GiB: of the model of the table, for which nothing is compiled here."""
    page = doc_examples.read('docs/results.md').split('## Memory by method')[1].split('\n## ')[0]
    (row,) = re.findall(rf'^\| `:{preset}` \|(.*)\|$', page, re.MULTILINE)
    held = method_memory.held(method_memory.make_plan(preset, 'Qwen/Qwen2.5-0.5B', 'gpu:24'))
    assert [f'{size / GIB:.2f}' for size in held] == [cell.strip() for cell in row.split('|')[:4]]
    assert f'| `:{preset}` |{row}|' in doc_examples.read('docs/choose.md')  # the same figures there


def test_a_reference_is_a_model_more_and_a_critic_one_with_its_moments(long, tmp_path):
    """The table compiled again, small: an update has in use what waits, and the methods differ by that."""
    tiny = {'model.path': 'configs/models/characters', 'evaluation.prompts': 6}
    found = {
        preset: method_memory.measure(
            plan.make(plan.change_config(tiny_run.config(preset=preset), tiny), 'gpu:4'), str(tmp_path)
        )
        for preset in ('dr_grpo', 'grpo', 'ppo')
    }
    plain, referred, critic = found['dr_grpo'], found['grpo'], found['ppo']
    assert plain.optimizer == pytest.approx(2 * plain.policy, rel=1e-3)  # the moments
    assert (plain.reference, plain.critic, referred.critic) == (0, 0, 0)
    assert referred.reference == critic.reference == plain.policy
    assert critic.critic == pytest.approx(3 * plain.policy, rel=0.1)  # with moments, and one column for the head
    assert all(sum(memory[:4]) < memory.update for memory in found.values())
    assert referred.update - plain.update == pytest.approx(plain.policy, rel=0.1)
    assert critic.update - referred.update > 0.9 * critic.critic


def test_stop_strings_and_thinking_need_no_tokenizer(slices):
    config = tiny_run.config(rollout__stop_strings=('ab', 'b'), rollout__thinking_tokens=4, rollout__thinking_end='#')
    spec = plan.make(config, 'v5e:2x2').engine.programs.spec
    automata = stops.abstract_automata(spec.sampling, spec.model_config.vocab_size)
    assert {name: x.shape for name, x in automata.items()} == {'stop': (3, 99), 'thinking': (2, 99), 'opening': (8, 99)}


def test_a_mesh_is_chosen_where_the_config_has_none(slices):
    config = gsm8k.get_config()
    c = families.load_config(os.path.join(plan.MODELS, 'Qwen2.5-0.5B'))

    def chosen(prompts, chips_, slices_=1):
        config.data.prompts_per_step = prompts
        sizes = plan.make_planned_mesh(Settings.from_config(config), c, 'v5e', chips_, slices_).mesh
        return sizes['data'], sizes['fsdp'], sizes['tensor']

    assert chosen(32, 16) == (1, 16, 1)
    assert chosen(32, 32, 2) == (2, 16, 1)
    assert chosen(256, 256) == (2, 128, 1)  # 256 does not divide a width of 896
    assert chosen(32, 64) == (1, 32, 2)  # 64 does not divide 32 prompts
    with pytest.raises(BadInput, match=r'^data.prompts_per_step = 6: must be a multiple of .* = 4; choose 8'):
        plan.make(tiny_run.config(data__prompts_per_step=6), 'v5e:2x2')
    assert plan.make(tiny_run.config(mesh__fsdp=2), 'v5e:2x2').mesh.shape['data'] == 2
    with pytest.raises(BadInput, match='the nearest that fits is data=2 fsdp=2 context=1 tensor=1'):
        plan.make(tiny_run.config(mesh__data=2, mesh__fsdp=4), 'v5e:2x2')
    with pytest.raises(BadInput, match=r'mesh\.data = 1: must be a multiple of the 2 slices'):
        plan.make(tiny_run.config(mesh__fsdp=8, data__prompts_per_step=8), 'v5e:2x2', slices=2)


def measured(**changes):
    fields = dict.fromkeys(compiler.Measured._fields, 0) | {'within': {}, 'across': {}}
    return compiler.Measured(**fields | changes)


def test_what_is_in_use_while_a_program_runs():
    job = plan.Job('a', 'rollout', None, alive=100)
    found = measured(arguments=10, outputs=2, temporaries=5, peak=14)
    assert verdict.bytes_in_use(job, found) == 117
    assert verdict.bytes_in_use(job._replace(arguments=False), found) == 107
    assert verdict.bytes_in_use(job, measured(refused=17.0)) == 117
    assert (found.in_use, found.fragmentation) == (17, 3)


class Slice(NamedTuple):
    """What bounds are computed from, of a plan."""

    chip: chips.Chip
    links: tuple[float, float]


def test_bounds_are_kept_apart():
    here = Slice(chips.Chip(flops=10.0, bandwidth=5.0, network=1.0), (1.5, 2.0))
    found = measured(flops=10, traffic=10, within={'all-gather': 6.0}, across={'all-reduce': 4.0})
    times = verdict.bounds(found, here)
    assert times == {'products': 1.0, 'HBM': 2.0, 'sent': 3.0, 'sent_slowly': 4.0, 'network': 4.0}
    assert verdict.find_largest(times) == ('network', 4.0) and verdict.find_largest(times | {'network': 0.0}) == (
        'sent',
        3.0,
    )
    repeated = found._replace(multiplied=11.0)  # a tenth is multiplied twice, and takes its time
    assert verdict.bounds(repeated, here)['products'] == 1.1 and repeated.repeated_share == pytest.approx(0.1)


@pytest.mark.parametrize(
    'kind, sides, corner, inner',
    [
        ('v5e', (1, 1), 0, 0),
        ('v5e', (2, 2), 2, 2),
        ('v5e', (4, 4), 2, 4),
        ('v5e', (16, 16), 4, 4),  # rings
        ('v5e', (8, 16), 3, 4),
        ('v5p', (2, 2, 1), 2, 2),
        ('v5p', (4, 4, 4), 6, 6),
        ('v5p', (2, 2, 4), 4, 4),
    ],
)
def test_a_chip_has_the_links_of_its_place_in_the_slice(kind, sides, corner, inner):
    chip = chips.TPUS[kind]
    assert chip.links(sides) == (corner * chip.link[0], inner * chip.link[1])
    assert chip.link == {'v5e': (45e9, 50e9), 'v5p': (90e9, 100e9)}[kind]


def test_packed_rows_count_as_often_as_there_are_any(slices):
    def loops(mean, **changes):
        sizes = dict(learner__pack_columns=24, mesh__fsdp=2, data__prompts_per_step=4) | changes
        made = plan.make(tiny_run.config(**sizes), 'v5e:1x2', mean_tokens=mean)
        return next(job.trip_counts for job in plan.list_jobs(made)[0] if job.name == 'learner.update')

    # 4 groups of 4 completions; 24 columns hold a prompt of 6 and one completion of 12, and of 4 tokens four;
    # a microbatch is two rows
    assert loops(0) == (8,) and loops(4)[0] <= 4 and loops(0, learner__pack_columns=0) == ()


def test_a_mean_beyond_the_longest_completion_is_refused(slices):
    with pytest.raises(BadInput, match='--mean_tokens = 13: is more than a completion may have, 12'):
        plan.make(tiny_run.config(mesh__fsdp=4), 'v5e:2x2', mean_tokens=13)


def test_lengths_have_the_mean_that_was_asked_for():
    lengths = plan.completion_lengths(64, 1024, 300)
    assert lengths.mean() == pytest.approx(300, abs=1) and lengths.max() == 1024 and (lengths == 1024).sum() <= 4
    assert (plan.completion_lengths(8, 10, 10) == 10).all()


NOT_COMPILING = compiler.Compiling('', lambda *_: None, 1)


def pretend(monkeypatch, needs):
    """Programs compile to needs(plan, job) bytes of temporaries; returns the plans that were compiled."""
    tried = []

    def compile_and_check(planned, compiling):
        tried.append(planned)
        jobs, sizes = plan.list_jobs(planned)
        figures = [measured(temporaries=needs(planned, job), flops=1e9) for job in jobs]
        return verdict.Verdict(planned, jobs, figures, sizes)

    monkeypatch.setattr(verdict, 'compile_and_check', compile_and_check)
    return tried


@pytest.mark.parametrize(
    'rows, settings',
    [
        (GIB // 3, '--config.learner.microbatches=2'),
        (GIB * 0.7, '--config.learner.microbatches=4'),
        (1.5 * GIB, '--config.mesh.fsdp=2 --config.mesh.tensor=2 --config.learner.microbatches=8'),
    ],
)
def test_advice_is_the_least_change_that_fits(slices, monkeypatch, tmp_path, rows, settings):
    with open(os.path.join(plan.MODELS, 'characters', 'config.json'), encoding='utf8') as file:
        model = json.load(file) | {'vocab_size': 100}  # which tensor = 2 divides
    (tmp_path / 'config.json').write_text(json.dumps(model))
    padded = dict(learner__pack_columns=0)
    config = tiny_run.config(learner__remat='full', mesh__fsdp=4, model__path=str(tmp_path), **padded)

    def needs(made, job):
        return made.microbatch()[0] * rows / made.mesh.shape['tensor'] if job.name == 'learner.update' else 0

    tried = pretend(monkeypatch, needs)
    base = verdict.compile_and_check(plan.make(config, 'v5e:2x2'), NOT_COMPILING)
    assert not base.fits
    found, better = advice.advise(base, tell=lambda text: None, compiling=NOT_COMPILING)
    assert advice.candidate_flags(base.plan, found) == settings
    assert better.fits and better.plan is tried[-1] and len(tried) <= 1 + advice.TRIES
    prompts, _ = verdict.largest_batch(better)
    assert prompts > 4  # next to nothing of a GiB is in use then


def test_advice_knows_what_offloading_leaves(slices):
    made = plan.make(tiny_run.config(preset='grpo', mesh__fsdp=4), 'v5e:2x2')
    base = verdict.Verdict(made, [], [], dict.fromkeys(('weights', 'rollout', 'cache'), 0))
    candidate = next(x for x in advice.list_candidates(made) if 'learner.offload' in x.overrides)
    assert advice.candidate_flags(made, candidate) == "--config.learner.offload=\"('optimizer', 'reference')\""
    _, smaller = advice.plan_candidate(made, candidate, base)
    (state, of_params), (left, _) = made.state_bytes(), smaller.state_bytes()
    assert state - left == pytest.approx(3 * of_params, rel=1e-2)  # two moments and the reference
    lends = plan.make(
        tiny_run.config(preset='grpo', mesh__fsdp=4, collection__source='reference', learner__offload=('reference',)),
        'v5e:2x2',
    )
    assert (made.fetched_reference_bytes(), lends.fetched_reference_bytes()) == (0, of_params)


@pytest.mark.parametrize('mesh', [dict(data=2, fsdp=2), dict(fsdp=2, context=2)])
def test_changes_are_tried_on_the_users_own_mesh(slices, mesh):
    own = {f'mesh__{axis}': size for axis, size in mesh.items()}
    made = plan.make(tiny_run.config(preset='grpo', learner__remat='none', **own), 'v5e:2x2')
    kept = [candidate for candidate in advice.list_candidates(made) if candidate.topology == made.topology]
    kept = [candidate for candidate in kept if not any(key.startswith('mesh') for key in candidate.overrides)]
    for key in ('learner.offload', 'learner.remat', 'learner.microbatches'):
        first = next(candidate for candidate in kept if key in candidate.overrides)
        assert advice.plan_changes(made, first).mesh.shape == made.mesh.shape


def test_of_adapters_a_plan_counts_moments_and_a_frozen_model_once(slices, monkeypatch):
    def planned(**changes):
        demo = dict(preset='grpo', model__path=tiny_run.DEMO, mesh__fsdp=4, model__dtype='bfloat16')
        return plan.make(tiny_run.config(**demo, **changes), 'v5e:2x2')

    whole, adapted = planned(), planned(model__lora__rank=4)
    trained, frozen = lora.split(adapted.learner.abstract_state.params)
    assert {x.dtype.name for x in jax.tree.leaves(frozen)} == {'bfloat16'}
    (state, params), (_, of_all) = adapted.state_bytes(), whole.state_bytes()
    assert adapted.trained_bytes() == compiled.device_bytes(trained) < of_all / 5 == whole.trained_bytes() / 5
    assert params == adapted.trained_bytes() + of_all / 2
    # adapters, two moments of each, and those of the reference; then the model
    assert state == pytest.approx(4 * adapted.trained_bytes() + of_all / 2, rel=0.02)
    assert advice.weight_bytes(adapted) == advice.weight_bytes(whole)
    in_int8 = planned(model__lora__rank=4, model__lora__base_dtype='int8')
    base = [w.base for w in adapted.learner.abstract_state.params['layers'].values() if isinstance(w, linear.Adapted)]
    halved = params - in_int8.state_bytes()[1]
    assert halved == pytest.approx(compiled.device_bytes(base) / 2, rel=0.1)  # less four bytes of each output's scale
    pretend(monkeypatch, lambda *_: 0)
    names = [job.name for job in verdict.compile_and_check(adapted, NOT_COMPILING).jobs]
    assert 'rollout: inspect' in names and 'rollout: inspect' not in [job.name for job in plan.list_jobs(whole)[0]]


def test_a_teacher_is_counted_all_the_time_or_when_it_is_asked(slices):
    def planned(**changes):
        made = plan.make(tiny_run.config(**dict(teacher__path=tiny_run.MODEL, mesh__fsdp=4) | changes), 'v5e:2x2')
        return made, {job.name: job.alive for job in plan.list_jobs(made)[0]}

    _, alone = planned(preset='dr_grpo', teacher__path='')
    (rests, resting), (_, parked) = planned(preset='opd'), planned(preset='opd', teacher__park=True)
    of_teacher = rests.teacher_bytes
    assert of_teacher == rests.state_bytes()[1]  # as large as the policy here
    assert {resting[name] - parked[name] for name in resting if name != 'teacher'} == {of_teacher}
    assert resting['teacher'] == parked['teacher'] and parked['learner.update'] == alone['learner.update']


def test_more_weights_than_int32_counts_are_inspected(slices):
    config = gsm8k.get_config()
    config.model.path, config.model.lora.rank, config.mesh.tensor = 'Qwen/Qwen3-8B', 16, 4
    made = plan.make(config, 'v5e:2x2')
    checksum, share, _ = made.engine.programs.trace(schedule.INSPECT).out_info
    assert (checksum.dtype, share.dtype, share.shape) == (jnp.uint32, jnp.float32, ())


def test_predictions_keep_the_work_of_a_chip(slices, monkeypatch):
    pretend(monkeypatch, lambda *_: 0)
    base = verdict.compile_and_check(plan.make(tiny_run.config(mesh__fsdp=4), 'v5e:2x2'), NOT_COMPILING)
    rows = scale.predict(base, [4, 8, 512])
    assert rows[0]['largest_bound'] == pytest.approx(base.largest_bound) and rows[0]['prompts_per_step'] == 4
    assert (rows[1]['fsdp'], rows[1]['prompts_per_step'], rows[1]['slices']) == (8, 8, 1)
    assert rows[2]['slices'] == 2 and rows[2]['communication'] > rows[1]['communication'] == 0


FEW = '--config.data.prompts_per_step=4', '--config.rollout.group_size=4'  # rows, for which few programs are enough


def command(*arguments, topology='v5e:2x2', config='arithmetic.py'):
    return subprocess.run(
        [
            sys.executable,
            '-m',
            'grpo_jax',
            'preflight',
            f'--config=configs/{config}',
            f'--topology={topology}',
            *('--config.supervised.updates=0', '--config.evaluation.samples=4', '--config.evaluation.prompts=4'),
            *arguments,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=550,
        env=os.environ | {'XLA_FLAGS': '', 'JAX_DISABLE_MOST_OPTIMIZATIONS': '0'},
    )


@pytest.fixture(scope='module')
def libtpu():
    """Skips where the TPU compiler is not installed; conftest says so at the end."""
    if importlib.util.find_spec('libtpu') is None:
        pytest.skip('no libtpu')


def test_the_table_of_programs_has_every_figure(slices, monkeypatch, capsys):
    pretend(monkeypatch, lambda *_: GIB // 8)
    base = verdict.compile_and_check(plan.make(tiny_run.config(mesh__fsdp=4), 'v5e:2x2'), NOT_COMPILING)
    kinds = {'all-gather': 182.71e9, 'all-reduce': 49.34e9, 'collective-permute': 117.46e9, 'reduce-scatter': 8e9}
    update = base.measured[0]._replace(within=kinds, traffic=2497.3e9, multiplied=1274e12)
    report.print_verdict(base._replace(measured=[update, *base.measured[1:]]))
    shown = capsys.readouterr().out
    words = ' '.join(shown.split())
    assert '…' not in shown and '\\n' not in shown and max(map(len, shown.splitlines())) <= report.WIDTH
    assert all(f'{kind} {size / 1e9:.2f}' in words for kind, size in kinds.items())
    assert all(text in words for text in ('learner.update', '1274.00', '2497.3', '6467.0', 'rollout: decode'))
    columns = ('arg GiB', 'out GiB', 'temp GiB', 'peak GiB', 'gaps GiB', 'in use GiB', 'TFLOP', 'products ms')
    assert all(f'{column}: ' in words for column in columns), 'each is explained below'


@pytest.fixture
def shape_of_100_tokens(tmp_path):
    """A folder with the shape of the tiny model, whose vocabulary tensor = 2 divides."""
    with open(os.path.join(plan.MODELS, 'characters', 'config.json'), encoding='utf8') as file:
        (tmp_path / 'config.json').write_text(json.dumps(json.load(file) | {'vocab_size': 100}))
    return str(tmp_path)


@pytest.mark.parametrize('given', [{}, {'mesh__fsdp': 4}])
def test_a_run_that_fits_on_another_mesh_than_the_chosen_one_fits(
    slices, monkeypatch, capsys, shape_of_100_tokens, given
):
    pretend(monkeypatch, lambda made, job: 1.5 * GIB / made.mesh.shape['tensor'] * (job.phase == 'rollout'))
    made = plan.make(tiny_run.config(model__path=shape_of_100_tokens, **given), 'v5e:2x2')
    words = ['preflight', '--config=x', '--config.mesh.fsdp=4', '--config.steps=3', '--topology=v5e:2x2']
    monkeypatch.setattr(sys, 'argv', words)
    # where preflight chose the mesh itself, nothing that was asked for has to change
    assert preflight.run(made, NOT_COMPILING, output='', sizes=[]) == bool(given)
    shown = capsys.readouterr().out
    assert 'DOES NOT FIT' in shown
    flags = '--config=x --config.steps=3 --config.mesh.fsdp=2 --config.mesh.tensor=2'
    assert shown.rstrip().endswith(f'Flags to train with: {flags}')


def test_a_run_that_fits_is_shown_its_flags_and_first_an_estimate(slices, monkeypatch, tmp_path, capsys):
    pretend(monkeypatch, lambda *_: 0)
    compile_and_check, before = verdict.compile_and_check, []

    def watched(*arguments):
        before.append(capsys.readouterr().out)
        return compile_and_check(*arguments)

    monkeypatch.setattr(verdict, 'compile_and_check', watched)
    monkeypatch.setattr(sys, 'argv', ['preflight', '--config=x', '--topology=v5e:2x2'])
    output = tmp_path / 'out.json'
    assert preflight.run(plan.make(tiny_run.config(), 'v5e:2x2'), NOT_COMPILING, output=str(output), sizes=[]) == 0
    assert before == [line for line in before if line.startswith('Estimate by formula: likely to fit, 0.0 of 1.0 GiB')]
    assert capsys.readouterr().out.rstrip().endswith('Flags to train with: --config=x --config.mesh.fsdp=4')
    assert json.loads(output.read_text())['train'] == '--config=x --config.mesh.fsdp=4'


@pytest.mark.parametrize(
    ('name', 'full'),
    [
        ('v5litepod-8', 'v5e:2x4'),
        ('v5e-16', 'v5e:4x4'),
        ('v6e-1', 'v6e:1x1'),
        ('v6e-256', 'v6e:16x16'),
        ('v5p-8', 'v5p:2x2x1'),  # 8 cores of 4 chips
        ('v4-32', 'v4:2x2x4'),
        ('V5p-128', 'v5p:4x4x4'),
        ('v5e:2x4', 'v5e:2x4'),
        ('gpu:a100-40', 'gpu:a100-40'),
    ],
)
def test_names_of_clouds_are_slices(name, full):
    assert topology.full_name(name) == full


@pytest.mark.parametrize(
    ('name', 'near'),
    [('v5litepod-12', 'v5litepod-8 and v5litepod-16'), ('v5p-4', 'v5p-8 and v5p-16'), ('v6e-2', 'v6e-1 and v6e-4')],
)
def test_a_number_without_a_slice_is_refused_with_the_nearest(name, near):
    with pytest.raises(BadInput, match=f'--topology = {name!r}: is no slice; the nearest are {near}'):
        plan.make(tiny_run.config(), name)


def test_a_slice_is_not_called_unknown_while_another_process_has_the_compiler(monkeypatch):
    def fail(**options):
        raise jax.errors.JaxRuntimeError('ABORTED: Internal error when accessing libtpu multi-process lockfile.')

    monkeypatch.setattr(topology.importlib.util, 'find_spec', lambda name: True)
    monkeypatch.setattr(topology.topologies, 'get_topology_desc', fail)
    with pytest.raises(BadInput, match=r'v5e:2x2.: waits for libtpu, which another process'):
        topology.devices('v5e:2x2')


# GPUs


def test_of_a_gpu_jax_takes_three_quarters(monkeypatch):
    monkeypatch.delenv(topology.FRACTION, raising=False)
    assert topology.find_gpu('gpu:24').memory == 18 * GIB and topology.find_gpu('v5e:2x2') is None
    assert topology.find_gpu('gpu:h100x8') == topology.find_gpu('gpu:h100')
    assert topology.find_gpu('gpu:h100').memory / GIB == pytest.approx(0.75 * 79.1)
    monkeypatch.setenv(topology.FRACTION, '0.9')
    assert topology.find_gpu('gpu:40').memory == 36 * GIB
    assert [topology.count_gpus(name) for name in ('gpu:a100-80x8', 'gpu:24', 'gpu:24x2', 'v5e:2x2')] == [8, 1, 2, 0]


@pytest.mark.parametrize('name', ['gpu:b7', 'gpu:', 'gpu:a100', 'gpu:x8', 'gpu:-4'])
def test_an_unknown_gpu_is_refused_with_those_that_are_known(name):
    with pytest.raises(BadInput, match='is no GPU; choose gpu:t4, gpu:l4, gpu:a100-40'):
        plan.make(tiny_run.config(), name)


@pytest.mark.parametrize(
    ('kind', 'count', 'name'),
    [
        ('Tesla T4', 1, 'gpu:t4'),
        ('NVIDIA L4', 1, 'gpu:l4'),
        ('NVIDIA L40S', 1, 'gpu:44.0'),
        ('NVIDIA A100-SXM4-40GB', 8, 'gpu:a100-40x8'),
        ('NVIDIA A100 80GB PCIe', 1, 'gpu:a100-80'),
        ('NVIDIA H100 80GB HBM3', 2, 'gpu:h100x2'),
        ('NVIDIA H200', 1, 'gpu:h200'),
    ],
)
def test_gpus_that_are_here_have_a_name(kind, count, name):
    assert topology.name_gpus(kind, count, 44 * GIB) == name
    assert topology.find_gpu(name)


def test_what_is_planned_for_gpus_has_their_memory_and_the_margin_of_a_cpus_count(monkeypatch, capsys):
    pretend(monkeypatch, lambda *_: 0)
    monkeypatch.setattr(sys, 'argv', ['preflight', '--config=x', '--topology=gpu:4x2'])
    assert preflight.run(plan.make(tiny_run.config(), 'gpu:4x2'), NOT_COMPILING, output='', sizes=[]) == 0
    shown = capsys.readouterr().out
    assert 'FITS' in shown and f'with {topology.MARGIN:.0%} more temporaries' in ' '.join(shown.split())
    assert shown.rstrip().endswith('--config.mesh.fsdp=2') and 'HBM' not in shown


def test_a_run_on_a_gpu_is_planned_from_programs_for_the_cpu(tmp_path, long):
    """The whole command, which needs no TPU compiler: two GPUs, on which the batch is shared."""
    done = command(f'--cache={tmp_path}', topology='gpu:4x2')
    assert done.returncode == 0, done.stderr
    assert 'FITS' in done.stdout and 'of 3.00 GiB in use at most' in done.stdout
    assert f'with {topology.MARGIN:.0%} more temporaries' in ' '.join(done.stdout.split())
    assert done.stdout.rstrip().endswith('--config.mesh.fsdp=2')
    assert 'HBM' not in done.stdout and 'sent' not in done.stdout.partition('FITS')[0]


def test_searches_and_predictions_are_for_tpus(tmp_path):
    done = command('--search=2', '--at_once=1', topology='gpu:t4')
    assert done.returncode == 2 and 'are for TPUs; leave them out' in done.stderr


def test_without_the_compiler_it_says_what_to_install(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, 'find_spec', lambda name, *rest: None if name == 'libtpu' else find(name, *rest)
    )
    with pytest.raises(BadInput, match=r'install the extra \[tpu\]'):
        plan.make(tiny_run.config(), 'v5e:2x2')


def test_a_budget_of_cache_is_planned_with_preempted_rows(slices):
    made = plan.make(
        tiny_run.config(rollout__cache_gib=0.00017, rollout__max_tokens=200, mesh__fsdp=4, algorithm__fixed_length=200),
        'v5e:2x2',
    )
    jobs, held = plan.list_jobs(made)
    kinds = [job.name.split()[1] for job in jobs if job.phase == 'rollout']
    assert {'weights', 'open', 'decode', 'add', 'choose', 'gather', 'resume'} <= set(kinds)
    assert 0 < held['cache'] <= 0.00017 * GIB
    whole = plan.make(tiny_run.config(rollout__max_tokens=200, mesh__fsdp=4), 'v5e:2x2')
    assert plan.list_jobs(whole)[1]['cache'] > held['cache']


@pytest.fixture(scope='module')
def planned_for_v5e(libtpu, tmp_path_factory):
    """(what the command gave, the content of its file, the flag of its cache)."""
    folder = tmp_path_factory.mktemp('v5e')
    out, cache = folder / 'out.json', f'--cache={folder / "cache"}'
    done = command(f'--json={out}', cache, *FEW)  # in a child of the command's process
    assert done.returncode == 0, done.stderr
    return done, json.loads(out.read_text()), cache


def test_every_program_compiles_for_v5e(planned_for_v5e):
    done, found, _ = planned_for_v5e
    assert 'FITS' in done.stdout and 'mesh data 1 x fsdp 4 x' in done.stdout
    assert done.stdout.startswith('Estimate by formula: likely to fit')
    assert done.stdout.splitlines()[-1].startswith('Flags to train with: --config=configs/arithmetic.py')
    assert done.stdout.rstrip().endswith('--config.mesh.fsdp=4')
    noise = [line for line in done.stderr.splitlines() if not line.startswith(('preflight: ', 'compil'))]
    assert not noise, noise  # libtpu logs to stderr
    names = [x['name'] for x in found['programs']]
    assert 'learner.update' in names and sum(name.startswith('rollout: decode') for name in names) >= 1
    assert all(x['arguments'] + x['outputs'] > 0 and x['traffic'] > 0 for x in found['programs'])
    products = check_products(found)
    assert products['learner.update'][1] > 1e9
    assert found['fits'] and 0 < found['peak'] < found['memory'] and found['step_largest_bound'] > 0


def check_products(found):
    """{program: operations in the text and in the trace}, which must agree."""
    products = {x['name']: (x['multiplied'], x['flops']) for x in found['programs']}
    assert all(text == pytest.approx(traced, rel=0.01) for text, traced in products.values()), products
    return products


@pytest.mark.parametrize('config', ['arithmetic.py:ppo', 'gsm8k.py'])
def test_operations_of_texts_are_those_of_traces(libtpu, long, tmp_path, config):
    done = command('--json', f'--cache={tmp_path}', '--config.mesh.fsdp=4', '--at_once=1', config=config)
    assert done.returncode in (0, 1), done.stderr  # 1: it does not fit
    assert len(check_products(json.loads(done.stdout))) > 5


def test_what_was_compiled_is_read_the_second_time(long, planned_for_v5e):
    _, found, cache = planned_for_v5e
    again = command('--json', cache, '--at_once=2', *FEW)
    assert again.returncode == 0 and ' from the cache' in again.stderr
    assert all(x['cached'] for x in json.loads(again.stdout)['programs'])
    assert json.loads(again.stdout)['peak'] == found['peak']


@pytest.mark.parametrize('topology', ['v5e:1x1', 'v5p:2x2x1', 'v6e:2x2', 'v4:2x2x1'])
def test_every_program_compiles_for_other_chips(libtpu, long, tmp_path, topology):
    done = command(f'--cache={tmp_path}', topology=topology)
    assert done.returncode == 0 and 'FITS' in done.stdout, done.stderr


@pytest.mark.parametrize('family', families.FAMILIES)
def test_every_family_is_planned_with_loops_of_known_length(slices, tmp_path, request, family):
    if family != 'gemma2':
        request.getfixturevalue('long')
    config = tiny_run.config(model__path=family_model.write(family, tmp_path), mesh__fsdp=4, rollout__max_tokens=40)
    jobs, held = plan.list_jobs(plan.make(config, 'v5e:2x2'))
    decode = next(job for job in jobs if job.name.startswith('rollout: decode'))
    operations, unknown = flops.count(decode.trace().jaxpr, decode.trip_counts)
    assert operations > 0 and not unknown and held['cache'] > 0


@pytest.mark.parametrize('family', families.FAMILIES)
def test_every_family_compiles_for_v5e(libtpu, long, tmp_path, family):
    model = family_model.write(family, tmp_path / 'model')
    done = command(f'--cache={tmp_path / "cache"}', f'--config.model.path={model}')
    assert done.returncode == 0 and 'FITS' in done.stdout, done.stderr


@pytest.mark.parametrize('topology', ['v5e:2x2', 'v5p:2x2x1', 'v6e:2x2', 'tpu7x:2x2x1'])
def test_kernels_compile(libtpu, long, topology):
    """Those of prefills, of decoding, where they are wanted, and of the learner's attention, whatever the chip."""
    models = ['Qwen2.5-0.5B', 'Qwen2.5-7B']
    done = subprocess.run(
        [sys.executable, os.path.join(ROOT, 'tests', 'compile_kernels.py'), topology, *models],
        text=True,
        capture_output=True,
        timeout=550,
        env=os.environ | {'JAX_DISABLE_MOST_OPTIMIZATIONS': '0'},
    )
    assert done.returncode == 0, done.stderr
    forward, gradients = ['splash_forward'], ['splash_key_gradients', 'splash_query_gradient']
    expected = {
        'open': (1, forward),
        'decode': (2, ['decode_attention', 'draw']),
        'attention': (1, forward + gradients),
    }
    for kind, (count, kernels) in expected.items():
        programs = [line for line in done.stdout.splitlines() if f' {kind} ' in line]
        assert len(programs) == count * len(models), done.stdout
        assert all(line.endswith(str(kernels)) for line in programs), done.stdout


@pytest.mark.parametrize(
    'model, topology, chips',
    [
        ('Qwen/Qwen2.5-0.5B', 'v5e:2x2', 4),
        ('Qwen/Qwen2.5-0.5B', 'v5p:2x2x1', 4),
        ('Qwen/Qwen2.5-0.5B', 'v6e:2x2', 4),
        ('Qwen/Qwen2.5-7B', 'v5e:4x4', 16),
        ('Qwen/Qwen2.5-7B', 'v5p:2x2x2', 8),
        ('Qwen/Qwen2.5-7B', 'v6e:2x4', 8),
        ('Qwen/Qwen2.5-32B', 'v5e:8x8', 64),
        ('Qwen/Qwen2.5-32B', 'v5p:4x4x4', 64),
        ('Qwen/Qwen2.5-32B', 'v6e:8x8', 64),
    ],
)
def test_gradients_are_scattered_as_they_are_summed(libtpu, long, model, topology, chips):
    """No matrix's gradient is summed whole: what all-reduces send is next to nothing of what scatters do.

    Over 8x8 XLA gathers the head's tokens, which are no weights, as a sum of the whole.
    """
    done = subprocess.run(
        [sys.executable, os.path.join(ROOT, 'tests', 'compile_update.py'), model, topology, str(chips)],
        text=True,
        capture_output=True,
        env=os.environ | {'XLA_FLAGS': '', 'JAX_DISABLE_MOST_OPTIMIZATIONS': '0'},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    gradients = found['trained'] * found['microbatches']
    sent = {'all-reduce': 0.0, 'reduce-scatter': 0.0, 'collective-permute': 0.0} | found['sent']
    assert sent['all-reduce'] < (0.05 if topology.endswith('8x8') else 0.001) * gradients, found
    # in bfloat16, as sums that travel; half, that is, except for what is summed over microbatches first
    assert sent['reduce-scatter'] + sent['collective-permute'] > gradients / 3 * (chips - 1) / chips, found
    assert found['multiplied'] == pytest.approx(1, rel=0.01), found


def test_a_compiler_that_dies_is_tried_again_with_one_program_at_a_time(monkeypatch, capsys):
    ends, calls = [-11, 1], []
    monkeypatch.setattr(subprocess, 'call', lambda words, env: calls.append(words) or ends[len(calls) - 1])
    assert preflight._run_in_child('v5e:1x1') == 1
    assert [words[-1] for words in calls] == [f'--at_once={os.cpu_count()}', '--at_once=1']
    assert 'died of signal 11' in capsys.readouterr().err
    ends[:], calls[:] = [-11, -9], []
    assert preflight._run_in_child('v5e:1x1') == 137


def test_a_cpu_in_place_of_a_gpu_is_told_to_make_no_copies_of_weights(monkeypatch):
    given = {}
    monkeypatch.setattr(subprocess, 'call', lambda words, env: given.update(env) or 0)
    monkeypatch.setenv('XLA_FLAGS', '--mine')
    for name, platform, told in (('gpu:t4', 'cpu', True), ('gpu:t4', 'cuda', False), ('v5e:1x1', 'cpu', False)):
        monkeypatch.setenv('JAX_PLATFORMS', platform)
        assert preflight._run_in_child(name) == 0
        assert given['XLA_FLAGS'].startswith('--mine') and (topology.AS_ON_GPUS in given['XLA_FLAGS']) == told


@pytest.mark.filterwarnings('ignore:Error reading persistent compilation cache')  # what an earlier run of tests left
@pytest.mark.parametrize('name', ['v5e:1x1', 'v6e:1x1', 'v5p:1x1x1', 'v4:1x1x1'])
def test_one_chip_is_a_slice_for_which_programs_compile(libtpu, name):
    (chip,) = topology.devices(name)
    argument = jax.ShapeDtypeStruct((8, 128), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(chip))
    memory = jax.jit(jnp.sin).lower(argument).compile().memory_analysis()
    assert memory.argument_size_in_bytes == 8 * 128 * 4


def test_bad_topologies_and_meshes_end_with_status_2(libtpu):
    with pytest.raises(BadInput, match='--topology'):
        plan.make(tiny_run.config(), 'v5e:3x2')
    with pytest.raises(BadInput, match='nearest that fits'):
        plan.make(tiny_run.config(mesh__fsdp=3), 'v5e:2x2')
    done = command('--config.mesh.fsdp=3', '--at_once=1')  # in one process
    assert done.returncode == 2 and 'nearest that fits' in done.stderr and 'Traceback' not in done.stderr, done.stderr


@pytest.mark.parametrize('rank', [0, 2])
def test_a_side_of_its_own_keeps_no_state_and_is_sent_weights(slices, rank):
    options = dict(mesh__data=1, mesh__fsdp=4, model__lora__rank=rank)
    one = plan.make(tiny_run.config(**options), 'v5e:2x2')
    two = plan.make(tiny_run.config(**options, mesh__sampler=4), 'v5e:2x4')
    assert two.mesh.size == two.engine.mesh.size == 4 and not {*two.mesh.devices.flat} & {*two.engine.mesh.devices.flat}
    jobs, held = plan.list_jobs(two)
    own = {job.name: job for job in jobs if job.phase in ('rollout', 'evaluation')}
    learner = own.pop('rollout: adapters' if rank else 'rollout: weights')
    frozen = compiled.device_bytes(lora.split(two.engine.programs.spec.abstract_params)[1] or ())
    assert all('state' not in job.holds and job.alive <= frozen + sum(held.values()) for job in own.values())
    assert learner.alive == one.state_bytes()[0] - one.state_bytes()[1]
    # weights whole on each chip; of adapters the float32 factors alone: 7 matrices, 2 layers
    assert two.crossing_bytes() == (held['weights'] if not rank else sum_of_factors(two)) > one.crossing_bytes() == 0
    same = {job.name for job in plan.list_jobs(one)[0]}
    assert {job.name for job in jobs} == same | ({'rollout: adapters'} if rank else set())


def sum_of_factors(planned):
    table = lora.policy_table(planned.run.model.config, planned.run.settings.model.lora)
    return 4 * sum(jax.tree.leaves(map_table(lambda _, param: math.prod(param.shape), lora.split(table)[0])))


@pytest.mark.parametrize('topology', ['v5e:2x4', 'v5e:4x4', 'v6e:4x4'])
def test_both_sides_compile_on_halves_of_a_slice(libtpu, long, tmp_path, topology):
    half = 4 if topology == 'v5e:2x4' else 8
    flags = [f'--cache={tmp_path}', '--json=-', f'--config.mesh.fsdp={half}', f'--config.mesh.sampler={half}']
    done = command(*flags, topology=topology)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    names = [program['name'] for program in found['programs']]
    assert {'learner.update', 'rollout: weights', 'rollout: finish'} <= {*names} and found['sampler_devices'] == half
    assert any(name.startswith('rollout: decode') for name in names) and found['fits'] and found['crossing_bytes'] > 1e5
