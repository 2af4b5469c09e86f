"""A setting that nothing reads is refused where a flag gave it, and named in a line where the config has it.

What a run reads is recorded while it runs, and what the fields say of their readers is compared with that.
"""

import itertools
import os

import pytest

from grpo_jax import PACKAGE, ranges, train
from grpo_jax.errors import BadInput
from grpo_jax.run import config_file
from grpo_jax.run.cli import read_steering
from grpo_jax.run.open import make_algorithm, open_run
from grpo_jax.run.settings import Keys, Settings
from grpo_jax.run.steering import Steering
from tests import reads, small_model, tiny_run
from tests.doc_examples import parsed

PRESETS = sorted(
    name[:-3]
    for name in os.listdir(os.path.join(PACKAGE, 'configs', 'algorithms'))
    if name.endswith('.py') and name[0] != '_'
)
SHORT = {'steps': 2, 'evaluation__prompts': 2, 'evaluation__samples': 1}
CORRECTED = {'algorithm__correction': 'truncated'}
# runs in which, together, nearly every key with a condition is read, and each is not read
RUNS = {
    'plain': {},
    'a reference that is mixed, shaping, prompts held out': dict(
        collection__reference='polyak',
        collection__reference_every=1,
        algorithm__kl='k3',
        algorithm__kl_coef=0.01,
        reward__length_shaping='kimi',
        data__held_out=0.2,
    ),
    'a reference that is replaced, replay, a probe': CORRECTED | dict(
        collection__reference='hard',
        collection__reference_every=1,
        log__kl_every=1,
        log__probe_every=1,
        collection__dead_groups='replay',
        collection__max_staleness=2,
    ),
    'groups drawn again, adapters, a cold start': CORRECTED | dict(
        preset='dapo',
        collection__max_staleness=1,
        model__lora__rank=2,
        supervised__updates=1,
        supervised__optimizer__warmup=0,
        supervised__optimizer__weight_decay=0.1,
        optimizer__weight_decay=0.1,
    ),
    'groups of unequal sizes, no verifier, padded rows': dict(
        collection__allocation='uncertainty', reward__verifier='', learner__pack_columns=0
    ),
    'a critic, no monitors': dict(preset='ppo', diagnose__on='off', critic_optimizer__warmup=0),
}  # fmt: skip
# keys that another one takes the place of, or that are read in each run, with or without an effect
ELSEWHERE = {
    'steps': 'data.epochs gives its value',
    'rollout.thinking_tokens': 'data.thinking=off sets it to 0',
    'rollout.thinking_start': 'Sampling has it in another form',
    'rollout.thinking_end': 'Sampling has it in another form',
    'rollout.cache_gib': 'Sampling has it in bytes',
    'rollout.accept_bias': 'says that a refusal is not meant',
    'reward.step_rewards': 'its function is made in each run, and called for an advantage that reads steps',
}
# keys that an event of a longer run reads, another command, or a tracker that is not installed
LATE = {
    *('reward.retries', 'reward.most_missing', 'reward.completions', 'log.project', 'log.run_name'),
    'collection.reference',  # where a renewal is due, of which there is none with frozen
    *(f'reward_model.{name}' for name in Keys().reward_model._fields),
    *(f'diagnose.{name}' for name in Keys().diagnose._fields),
}


def train_recorded(workdir, **changes):
    """(an opened Run, what it read while it trained)."""
    config = tiny_run.config(**SHORT | changes)
    with reads.recorded() as seen:
        train.run(config, str(workdir))
    return open_run(config, str(workdir)), dict(seen)


def offenders(run, seen):
    """A line for each key whose field says something else than `seen`, what a Run has read."""
    unread, named, lines = run.settings.find_unread(run.algorithm, run.rewards), reads.named_in_code(), []
    for key, marks in ranges.marks_of(Keys).items():
        is_read = key in seen or (key.rpartition('.')[2] in named and (key in LATE or not marks))
        if key in ELSEWHERE or key.startswith(('mesh.', 'algorithm.')):  # which algorithms.make judges
            continue
        if key in unread and key in seen:
            lines.append(f'{key} would be refused, and is read by {", ".join(seen[key])}')
        elif key not in unread and not is_read:
            lines.append(f'{key} would be accepted, and nothing reads it')
    return lines


@pytest.mark.parametrize('name', RUNS)
def test_what_the_fields_say_is_what_a_run_reads(name, tmp_path):
    if lines := offenders(*train_recorded(tmp_path, **RUNS[name])):
        pytest.fail('\n'.join(lines), pytrace=False)


def test_a_share_that_may_be_missing_is_read_where_a_service_judges(tmp_path):
    run = open_run(tiny_run.config(), str(tmp_path))
    (part,) = run.rewards.parts.values()

    def unread(**changes):
        functions = run.rewards._replace(parts={'judge': part._replace(**changes)})
        return {'reward.most_missing', 'reward.retries'} & {*run.settings.find_unread(run.algorithm, functions)}

    assert unread() == {'reward.most_missing', 'reward.retries'}
    assert unread(remote=True) == {'reward.retries'}  # a service has retries of its own
    assert unread(own=True) == set()


@pytest.mark.parametrize('preset', PRESETS)
def test_what_the_fields_say_is_what_each_preset_reads(long, preset, tmp_path):
    config = tiny_run.config(preset=preset)
    if config.collection.source in ('reference', 'pairs'):
        pytest.skip('learns from pairs')
    taught = preset.startswith('opd')
    changes = {'teacher__path': small_model.write_drawn(tmp_path / 'teacher', seed=5)} if taught else {}
    if lines := offenders(*train_recorded(tmp_path / 'run', preset=preset, **changes)):
        pytest.fail('\n'.join(lines), pytrace=False)


def test_a_key_whose_reader_is_deleted_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(train, 'make_renewal', lambda *arguments: lambda state: (state, {'reference_renewed': False}))
    name = 'a reference that is mixed, shaping, prompts held out'
    lines = offenders(*train_recorded(tmp_path, **RUNS[name]))
    keys = ('reference_every', 'reference_mix')
    assert lines == [f'collection.{key} would be accepted, and nothing reads it' for key in keys]


def opened(workdir, flags=(), amend=False, **changes):
    """The Run of a training whose flags give these keys."""
    return open_run(tiny_run.config(**changes), str(workdir), steered=Steering(amend, flags=frozenset(flags)))


HARD = {'collection.reference': 'hard', 'collection.reference_every': 2}
KL = {'preset': 'grpo', 'algorithm.kl': 'k3', 'algorithm.kl_coef': 0.1}


@pytest.mark.parametrize(
    'key, value, beside, reader',
    [
        ('collection.reference_mix', 0.5, {}, 'collection.reference=polyak with a reference (algorithm.kl,'),
        ('collection.reference', 'hard', HARD, 'a reference (algorithm.kl,'),
        ('collection.max_draws', 3, {}, 'collection.dead_groups=resample'),
        ('collection.max_staleness', 3, {}, 'collection.dead_groups=resample or replay'),
        ('collection.exploration', 3.0, {}, 'collection.allocation=uncertainty'),
        ('reward.length_shaping_weight', 0.5, {}, 'reward.length_shaping'),
        ('reward.retries', 5, {}, 'a reward of yours'),
        ('reward.options.code.timeout', 3.0, {}, 'the reward code'),
        ('critic_optimizer.b1', 0.8, {}, 'an advantage with a critic (gae)'),
        ('model.lora.alpha', 8.0, {}, 'model.lora.rank'),
        ('learner.pack_rows', 2, {'learner.pack_columns': 0}, 'packed rows (learner.pack_columns above 0,'),
        ('optimizer.decays', 'matrices', {}, 'optimizer.weight_decay'),
        ('supervised.optimizer.b1', 0.8, {}, 'supervised.updates'),
        ('reward_model.objective', 'steps', {}, 'the command grpo_jax.reward_model'),
        ('diagnose.patience', 5, {'diagnose.on': 'off'}, 'diagnose.on=say or save or stop'),
        ('log.probe_prompts', 5, {}, 'log.probe_every'),
        ('log.kl_every', 5, KL, 'an algorithm without a KL term'),
        ('rollout.thinking_end', '</t>', {}, 'rollout.thinking_tokens'),
        ('data.test_split', 'x', {'data.held_out': 0.1}, 'data.held_out=0'),
        ('steps', 7, {'data.epochs': 2.0}, 'data.epochs=0'),
    ],
)
def test_what_nothing_reads_is_refused_from_a_flag_and_said_of_a_config(key, value, beside, reader, tmp_path, caplog):
    changes = {name.replace('.', '__'): x for name, x in (beside | {key: value}).items()}
    opened(tmp_path / 'run', **changes)
    (line,) = [line for line in caplog.messages if 'has no effect: ' in line]
    assert f'{key} = {value!r}' in line and f'which only {reader}' in line
    with pytest.raises(BadInput) as refused:
        opened(tmp_path / 'run', flags=[key], **changes)
    assert str(refused.value).startswith(f'{key} = {value!r}: nothing but {reader}')
    assert str(refused.value).endswith('reads it; choose that, or leave it out')


def test_a_flag_that_repeats_the_default_is_told_and_not_refused(tmp_path, caplog):
    opened(tmp_path / 'run', flags=['collection.reference_mix', 'learner.pack_rows', 'steps'])
    assert 'has no effect: collection.reference_mix = 0.6, which only collection.reference=polyak' in caplog.text
    assert 'pack_rows' not in caplog.text and 'steps' not in caplog.text  # which are read


def test_what_is_read_is_neither_refused_nor_said(tmp_path, caplog):
    changes = {'collection__dead_groups': 'resample', 'collection__max_draws': 3}
    supervised = {'supervised__updates': 1}  # the demo's numbers of a cold start have an effect then
    opened(tmp_path / 'run', flags=['collection.max_draws'], **changes, **supervised)
    assert 'has no effect' not in caplog.text


def test_a_run_goes_on_with_the_flags_it_was_begun_with_and_takes_no_new_one_that_nothing_reads(tmp_path, caplog):
    flags, begun = ['collection.reference_mix'], {'collection__reference_mix': 0.5}
    tiny_run.record(opened(tmp_path / 'run', **begun))
    opened(tmp_path / 'run', flags=flags, **begun)
    assert 'has no effect: collection.reference_mix = 0.5' in caplog.text
    with pytest.raises(BadInput, match=r'collection.reference_mix = 0.4: nothing but'):
        opened(tmp_path / 'run', flags=flags, amend=True, collection__reference_mix=0.4)
    opened(tmp_path / 'run', amend=True, collection__reference_mix=0.4)  # a config that was edited


def test_every_experiment_starts_with_every_preset(long):
    refused = set()
    for name in [
        name for name in config_file.experiments() if not name.startswith('labs/')
    ]:  # made for one preset each
        for preset in PRESETS:
            config = config_file.read_config(config_file.locate(name), preset)
            try:
                assert make_algorithm(config) and Settings.from_config(config)
            except BadInput as error:
                refused.add((name, preset, str(error).partition(':')[0]))
    filters = itertools.product(
        ('preferences', 'tinystories'), ('dapo', 'entropy_8020')
    )  # by correctness, of no verifier
    assert refused == {(*pair, "collection.gate = 'outcome'") for pair in filters}


def test_the_command_hands_on_which_keys_are_flags():
    own = ['--config=arithmetic', '--workdir=w', '--config.rollout.group_size=4', '--config.seed', '1', '--amend']
    with parsed('train', own):
        assert read_steering() == Steering(amend=True, flags=frozenset({'rollout.group_size', 'seed'}))
