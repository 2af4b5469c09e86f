"""What a run says that its steps wait for, with flags that can be given, and when it says nothing."""

import asyncio
import shlex

from absl import flags
import numpy as np
import pytest

from grpo_jax import train
from grpo_jax.configs import arithmetic
from grpo_jax.diagnose import Context
from grpo_jax.diagnose.advice import describe_waits
from grpo_jax.run.loop import MEASURED
from grpo_jax.run.measure import choose_in_flight, count_carried_steps
from grpo_jax.tools.preflight.plan import change_config
from grpo_jax.tools.report.content import make_header
from grpo_jax.tools.report.read import read_variants
from tests import doc_examples, tiny_run

# a step of three seconds waits one for rewards; it has 512 decode steps, and 256 where rows go on
BUSY = {
    'sample': 1.0, 'reward': 1.25, 'observe': 0.25, 'update': 0.5, 'reward/wait_seconds': 1.0,
    'sampler/steps': 512, 'sampler/steps_carried': 256.0, 'sampler/decode_batches': 1,
}  # fmt: skip
QUIET = BUSY | {'reward/wait_seconds': 0.2, 'sampler/steps_carried': 450.0}
SIDES = {'sampler': (9.0, 1.0), 'learner': (4.0, 6.0)}  # (busy, idle) seconds


def described(row, in_flight=16, preset='dr_grpo', **changes):
    """The sentences of ten such steps of the demo; __ in a name stands for a dot."""
    changes = {key.replace('__', '.'): value for key, value in changes.items()}
    config = change_config(arithmetic.get_config(preset), changes)
    return describe_waits([row] * MEASURED, config, Context.from_config(config).acts, in_flight)


def of_sides(times):
    """A row with the times of both sides."""
    return {
        f'{side}/{name}_seconds': x
        for side, pair in times.items()
        for name, x in zip(('busy', 'gap'), pair, strict=True)
    }


def test_decode_steps_are_those_of_steps_that_are_cut_at_equal_tokens():
    # P = 2 and two more. Rows under way, by step, with the tokens that are left: 100 300 100 300, cut at 128; 172 172
    # 100 300, at 192; -92 108 100 300, at 128; -28 172 100 300; 44 172 100 300, again and again
    assert count_carried_steps(np.array([100, 300]), 2, 64, rounds=8) == pytest.approx((192 + 6 * 128) / 7)
    assert count_carried_steps(np.array([12, 9]), 2, 64) == 12  # a step ends with its longest row


def test_as_many_go_on_as_devices_can_share():
    assert [choose_in_flight(*sizes) for sizes in ((32, 1), (32, 4), (24, 8), (8, 8), (1, 1))] == [16, 16, 24, 8, 1]


def test_what_would_pay_is_said_with_what_it_saves():
    go_on, hide = described(BUSY)
    assert go_on == (
        'the longest completions make a step take 512 decode steps: --branch=DIR --config.collection.in_flight=16 '
        '--config.algorithm.correction=truncated would take 2.0 times fewer'
    )
    assert hide == (
        'a step waits 1 of its 3 s for rewards: --branch=DIR --config.collection.staleness=1 '
        '--config.algorithm.correction=truncated would hide 100% of that'
    )
    (half,) = described(BUSY | {'reward/wait_seconds': 2.0}, in_flight=0)  # the second left is all that can hide them
    assert half.endswith('would hide 50% of that')


@pytest.mark.parametrize(
    'row, changes',
    [
        (QUIET, {}),
        (BUSY, dict(collection__staleness=1, algorithm__correction='truncated')),
        (BUSY, dict(collection__in_flight=16, algorithm__correction='truncated')),
        (BUSY, dict(learner__old_logprobs='decode')),
        (BUSY, dict(collection__revisit=0.1, collection__retire_above=0.9)),  # which do not go together
        ({'sample': 1.0, 'update': 1.0}, {}),  # nothing was sampled
    ],
)
def test_a_run_that_need_not_or_cannot_is_told_nothing(row, changes):
    assert described(row, **changes) == []


def test_rows_that_do_not_fit_the_cache_at_once_cannot_go_on_and_on_cpus_none_should():
    for silent in (described(BUSY | {'sampler/decode_batches': 2}), described(BUSY, in_flight=0)):
        (line,) = silent
        assert 'staleness=1' in line and 'in_flight' not in line


def test_the_flags_can_be_given():
    for line in described(BUSY):
        words = [word for word in shlex.split(line) if word.startswith('--')]
        with doc_examples.parsed('train', ['--config=arithmetic', '--workdir=runs/x', *words]):
            config = flags.FLAGS.config
        assert config.algorithm.correction == 'truncated'
        assert config.collection.in_flight == 16 or config.collection.staleness == 1
    ahead = described(BUSY, algorithm__ratio_base='sampler')
    assert len(ahead) == 2 and not any('correction' in line for line in ahead)  # which has one already


def test_a_side_that_idles_is_named_with_what_gives_it_work():
    (waits,) = described(QUIET | of_sides(SIDES))
    assert waits.startswith("the learner's devices are idle 60% of the time, and the sampler's 10%: ")
    assert '--config.collection.staleness=1 --config.algorithm.correction=truncated would let both' in waits
    ahead = dict(collection__staleness=1, algorithm__correction='truncated', mesh__sampler=4)
    (split,) = described(QUIET | of_sides(SIDES), **ahead)
    assert split.endswith('a mesh.sampler above 4 would leave less idle')
    (split,) = described(QUIET | of_sides({'sampler': (4.0, 6.0), 'learner': (9.0, 1.0)}), **ahead)
    assert split.endswith('a mesh.sampler below 4 would leave less idle')
    (both,) = described(QUIET | of_sides({'sampler': (6.0, 4.0), 'learner': (5.0, 5.0)}), **ahead)
    assert '--config.collection.staleness=2 would let both work' in both
    assert described(QUIET | of_sides({'sampler': (8.0, 2.0), 'learner': (9.0, 1.0)}), **ahead) == []


def test_a_run_says_it_once_after_ten_steps_and_keeps_it_out_of_its_metrics(tmp_path, capsys):
    # twice what the rest of a step takes here; the note comes where a tenth of the step can be hidden in that rest
    seconds = 0.04

    async def slow(completion, example):
        await asyncio.sleep(seconds)
        return 0.0

    config = tiny_run.config(steps=MEASURED + 2, checkpoint__every=100)
    config.reward.parts = (*config.reward.parts, ('slow', 0.0))
    train.run(config, str(tmp_path), functions={'slow': slow})
    lines = capsys.readouterr().err.splitlines()
    (place,) = [place for place, line in enumerate(lines) if line.startswith('note: a step waits ')]
    assert '--config.collection.staleness=1 --config.algorithm.correction=truncated would hide' in lines[place]
    timings = tiny_run.rows(tmp_path, 'timings.jsonl')
    assert all(row['reward/wait_seconds'] > seconds / 2 for row in timings)
    # 12 tokens at most: no row is so long that another step should have it
    assert all(row['sampler/steps_carried'] <= 12 for row in timings)
    assert not {'reward/wait_seconds', 'sampler/steps_carried'} & set(tiny_run.rows(tmp_path)[0])
    assert not [line for line in lines if 'in_flight' in line]  # on a CPU
    (note,) = make_header(read_variants([str(tmp_path)]), [])['notes']
    assert note.startswith('a step waits ')
