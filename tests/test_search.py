"""The search for the least step: formulas beside what the compiler said, the order of what is compiled, the command."""

import itertools
import json
import os

from absl import flags
import jax
import pytest

from grpo_jax.configs import gsm8k
from grpo_jax.errors import BadInput
from grpo_jax.sharding import chips
from grpo_jax.tools.preflight import __main__ as preflight
from grpo_jax.tools.preflight import compiler, formulas, plan, search, topology, verdict
from tests import doc_examples, tiny_run

GIB = 2**30


@pytest.fixture
def slices(monkeypatch):
    """Topology v5e:2x2 of CPU devices, with chips of one GiB."""
    monkeypatch.setattr(topology, 'devices', lambda name, slices=1: jax.devices()[: 4 * slices])
    monkeypatch.setattr(chips, 'lookup', lambda kind: chips.TPUS['v5e']._replace(memory=GIB))


@pytest.fixture
def planned(slices, tmp_path):
    """The plan of a tiny run on four chips, of a vocabulary that tensor = 2 divides."""
    return plan.make(config(tmp_path), 'v5e:2x2')


def config(folder, **changes):
    with open(os.path.join(plan.MODELS, 'characters', 'config.json'), encoding='utf8') as file:
        shape = json.load(file) | {'vocab_size': 100}
    (folder / 'config.json').write_text(json.dumps(shape))
    mesh = {'mesh__fsdp': 4, 'learner__microbatches': 2}
    return tiny_run.config(**mesh | {'model__path': str(folder), 'algorithm__fixed_length': 12} | changes)


def pretend(monkeypatch, seconds, needs=lambda setting: 0):
    """An update takes seconds(setting) by HBM and needs(setting) bytes; returns the settings that are compiled."""
    tried = []

    def compile_and_check(made, compiling):
        setting = formulas.setting_of(made.config)
        tried.append(setting)
        jobs, sizes = plan.list_jobs(made)
        nothing = compiler.Measured(0, True, 0, 0, 0, 0, 0, {}, {}, 0, 0, 0, 0)
        update = nothing._replace(traffic=seconds(setting) * made.chip.bandwidth, temporaries=needs(setting))
        figures = [update if job.name == 'learner.update' else nothing for job in jobs]
        return verdict.Verdict(made, jobs, figures, sizes)

    monkeypatch.setattr(verdict, 'compile_and_check', compile_and_check)
    return tried


def found(planned, most=3):
    return search.search(planned, compiler.Compiling('', lambda *_: None, 1), most, lambda text: None)


def least(tried):
    return min((one for one in tried if one.fits), key=lambda one: one.verdict.largest_bound)


def test_formulas_are_near_what_the_compiler_said(slices, monkeypatch):
    """The update of Qwen2.5-0.5B on v5e:2x2, 64 rows of 256 + 1,024 tokens, compiled by libtpu 0.0.42."""
    monkeypatch.setattr(chips, 'lookup', lambda kind: chips.TPUS['v5e'])
    sizes = {'model.path': 'Qwen/Qwen2.5-0.5B', 'data.prompts_per_step': 8, 'rollout.max_tokens': 1024}
    asked = plan.change_config(gsm8k.get_config(), sizes | {'mesh.fsdp': 4, 'learner.microbatches': 8})
    made = plan.make(asked, 'v5e:2x2')
    guess = formulas.guess(made, formulas.setting_of(made.config))
    assert guess.seconds['update']['products'] == pytest.approx(0.404, rel=0.15)
    assert guess.seconds['update']['HBM'] == pytest.approx(0.228, rel=0.5)
    assert guess.seconds['update']['sent'] == pytest.approx(14.9e9 / 1e11, rel=0.5)
    assert guess.memory['update'] == pytest.approx(4.79 * GIB, rel=0.25)


def test_settings_divide_model_and_batch(planned):
    every = list(search.list_settings(planned))
    assert len(set(every)) == len(every) and formulas.setting_of(planned.config) in every
    # two heads of keys and values and 4 prompts of 4 completions
    assert {(one.data, one.fsdp, one.tensor) for one in every} >= {(1, 4, 1), (4, 1, 1), (1, 2, 2)}
    assert all(one.data * one.fsdp * one.tensor == 4 and one.tensor <= 2 for one in every)
    assert {one.microbatches for one in every if not one.pack_columns and one.tensor == 1} == {1, 2, 4}
    assert {one.pack_columns for one in every} == {0, 256}


def test_a_context_axis_stays(slices, tmp_path):
    made = plan.make(config(tmp_path, mesh__fsdp=2, mesh__context=2), 'v5e:2x2')
    every = list(search.list_settings(made))
    assert {(one.data, one.fsdp, one.tensor) for one in every} == {(1, 1, 2), (1, 2, 1), (2, 1, 1)}
    assert not formulas.setting_of(made.config).overrides(made.config)
    assert not any('context' in key for one in every for key in one.overrides(made.config))


def test_what_formulas_know_of_each_choice(planned):
    own = formulas.setting_of(planned.config)

    def update(**changes):
        guess = formulas.guess(planned, own._replace(**changes))
        return guess.seconds['update'], guess.memory['update']

    (seconds, memory), (more, _) = update(), update(microbatches=4)
    assert more['sent'] > 1.9 * seconds['sent'] and more['products'] == seconds['products']
    assert update(remat='full')[0]['products'] > seconds['products'] and update(remat='full')[1] < memory
    assert update(fsdp=2, tensor=2)[0]['HBM'] < more['HBM'] and update(offload=('optimizer',))[1] < memory
    assert update(data=4, fsdp=1)[1] > memory


def test_the_formula_of_the_cache_knows_groups_under_way(planned, tmp_path):
    carried = plan.make(config(tmp_path, collection__in_flight=4, algorithm__correction='truncated'), 'v5e:2x2')
    plain, more = (formulas.guess(made, formulas.setting_of(made.config)).memory for made in (planned, carried))
    shape = planned.run.model.config
    column = 2 * shape.layers * shape.kv_heads * shape.head_dim * 2  # keys and values of a token in bfloat16
    # on a chip one group of 4 rows, 6 + 4 x 12 columns; and two groups, each with 6 + 4 x (12 + 12)
    assert more['rollout'] - plain['rollout'] == column * (2 * (6 + 4 * 24) - (6 + 4 * 12))


def test_what_was_compiled_corrects_the_formulas(planned, monkeypatch):
    own = formulas.setting_of(planned.config)

    def by_formula(setting):
        return max(formulas.guess(planned, setting).seconds['update'].values())

    def seconds(setting):  # tensor is far worse than the formulas say, which like it
        return by_formula(setting) * (10 if setting.tensor > 1 else 1)

    every = list(search.list_settings(planned))
    assert min(every, key=by_formula).tensor == 2
    room = [one for one in every if not one.offload]
    compiled = pretend(monkeypatch, seconds)
    tried = found(planned, most=4)
    assert compiled[0] == own and compiled[1].tensor == 2 and len(set(compiled)) == len(compiled)
    assert seconds(least(tried).setting) == min(map(seconds, room)) < seconds(own)


def test_no_more_is_compiled_than_asked_and_nothing_where_no_guess_is_better(planned, monkeypatch):
    compiled = pretend(monkeypatch, lambda setting: 1 / (1 + len(compiled)))
    assert len(found(planned, most=1)) == len(compiled) == 2
    compiled = pretend(monkeypatch, lambda setting: 1e-12)
    assert [one.setting for one in found(planned)] == compiled == [formulas.setting_of(planned.config)]


def test_what_does_not_leave_the_margin_is_not_found(planned, monkeypatch):
    own = formulas.setting_of(planned.config)
    pretend(monkeypatch, lambda setting: 1.0, lambda setting: GIB if setting == own else 0)
    every = found(planned)
    assert not every[0].fits and least(every).setting != own
    rows = search.make_rows(planned, every)
    assert rows[0]['fits'] and not rows[-1]['fits'] and rows[-1]['flags'] == 'as it is'


def test_offloading_is_tried_only_where_nothing_else_has_room(planned, monkeypatch):
    compiled = pretend(monkeypatch, lambda setting: 1 / (1 + len(compiled)))
    found(planned, most=3)
    assert not any(setting.offload for setting in compiled)
    plain = formulas.guess

    def large(made, setting):
        guess = plain(made, setting)
        return guess._replace(memory=dict.fromkeys(guess.memory, GIB / 2 if setting.offload else 2 * GIB))

    monkeypatch.setattr(formulas, 'guess', large)
    compiled = pretend(monkeypatch, lambda setting: 1 / (1 + len(compiled)), lambda s: GIB // (4 if s.offload else 1))
    every = found(planned)
    assert len(every) > 1 and all(one.setting.offload for one in every[1:]) and least(every).setting.offload


def test_the_command_shows_the_flags_and_reads_them_the_second_time(planned, monkeypatch, tmp_path, capsys):
    compiled = pretend(monkeypatch, lambda setting: 1.0 / setting.tensor)
    compiling = compiler.Compiling(str(tmp_path), lambda *_: None, 1)

    def run():
        output = str(tmp_path / 'out.json')
        assert preflight.run_search(planned, compiling, output=output, most=2, host_seconds=0.25) == 0
        with open(output, encoding='utf8') as file:
            return json.load(file)

    first, many, shown = run(), len(compiled), capsys.readouterr().out
    assert first['search'][0]['flags'].startswith('--config.mesh.fsdp=2 --config.mesh.tensor=2')
    assert first['search'][0]['phases']['update'] == ['HBM', pytest.approx(0.5)] and '0.75' in shown
    assert 'the least of these that fit with 5% free: --config.mesh.fsdp=2' in ' '.join(shown.split())
    assert run() == first and len(compiled) == many
    again = plan.make(config(tmp_path, learner__microbatches=1), 'v5e:2x2')
    preflight.run_search(again, compiling, output='', most=2, host_seconds=0.0)
    assert len(compiled) > many


def test_every_setting_gives_a_plan_or_says_why_not(planned):
    """Of the smallest and the largest of each choice: plans are made of them, as the search does."""
    made = 0
    for setting in itertools.islice(search.list_settings(planned), 0, None, 37):
        try:
            other = plan.change_config(planned.config, setting.overrides(planned.config))
            assert formulas.setting_of(plan.make(other, planned.topology).config) == setting
            made += 1
        except BadInput as error:
            assert 'must' in str(error) or 'holds' in str(error)
    assert made > 2


def pretend_sides(monkeypatch, sampling, learning, memory=0):
    """Formulas by which sampling takes seconds on any number of chips, and learning takes chip-seconds."""

    def guess(made, setting):
        chips_used = setting.data * setting.fsdp * setting.tensor
        seconds = {'rollout': sampling, 'logprobs': 0.0, 'update': learning / chips_used}
        return formulas.Guess({phase: {'HBM': time} for phase, time in seconds.items()}, dict.fromkeys(seconds, memory))

    monkeypatch.setattr(formulas, 'guess', guess)


def test_a_split_is_named_where_both_sides_at_once_take_less_than_turns(planned, monkeypatch):
    # four chips in turns: 1 + 1.6 / 4 = 1.4 s; two and two: the longer of 1 and 0.8; three do not divide 4 prompts
    pretend_sides(monkeypatch, 1.0, 1.6)
    line = search.describe_split(planned)
    assert line.startswith(
        'by the formulas 2 chips of the learner and 2 of the sampler take 1 s a step, and all in turns 1.4 s, with the '
        "learner's idle for 20%: --config.mesh.data="
    )
    words = line.partition(': ')[2].split()
    assert words[-3:] == [
        '--config.mesh.sampler=2', '--config.collection.staleness=1', '--config.algorithm.correction=truncated'
    ]  # fmt: skip
    with doc_examples.parsed('train', ['--config=arithmetic', '--workdir=NEW', *words]):
        assert flags.FLAGS.config.mesh.sampler == 2


def test_no_split_is_named_where_none_pays_or_fits(planned, monkeypatch, tmp_path):
    pretend_sides(monkeypatch, 1.0, 6.0)  # 1 + 1.5 in turns, and 3 on two chips
    assert search.describe_split(planned) == (
        'no split of the chips pays: by the formulas 2 chips of the learner and 2 of the sampler take 3 s a step, '
        'and all in turns 2.5 s'
    )
    pretend_sides(monkeypatch, 1.0, 1.6, memory=2 * GIB)
    none = 'no split of the chips between learner and sampler divides model and batch, and fits'
    assert search.describe_split(planned) == none
    odd = plan.make(
        config(tmp_path, collection__source='reference', algorithm__kl='k3', algorithm__kl_coef=0.1), 'v5e:2x2'
    )
    assert search.describe_split(odd) == none
