"""A sampler of other processes: real processes on loopback make the run of one process, bit for bit."""

import signal
import time

import pytest

from tests import tiny_run
from tests.test_multihost import STEPS, Run, assert_equal

# with the demo's model, whose steps are slower than a request to stop
SIDES = (
    '--config.mesh.data=1',
    '--config.mesh.fsdp=2',
    '--config.mesh.sampler=2',
    f'--config.model.path={tiny_run.DEMO}',
)
BY_DEVICES = '--config.mesh.transport=devices'
STALE = ('--config.collection.staleness=1', '--config.algorithm.correction=truncated')
CARRIED = ('--config.collection.in_flight=2', '--config.algorithm.correction=truncated')
ADAPTERS = ('--config.model.lora.rank=2', '--config.optimizer.learning_rate=3e-3')


@pytest.fixture(scope='module')
def alone(tmp_path_factory):
    """The workdir of one process with both sides."""
    run = Run(tmp_path_factory.mktemp('alone'), 1, *SIDES)
    run.succeeds()
    return run.workdir


def test_a_sampler_of_another_process_samples_what_one_process_does(long, alone, tmp_path):
    Run(tmp_path, 2, *SIDES).succeeds()
    assert_equal(tmp_path, alone)
    assert not list((tmp_path / 'transport').iterdir())


@pytest.mark.parametrize(
    'devices, flags',
    [((2, 2), (BY_DEVICES,)), ((1, 1, 2), ()), ((1, 1, 2), (BY_DEVICES,)), ((2, 1, 1), ())],
    ids=['devices', 'two learners', 'two learners and devices', 'two samplers'],
)
def test_as_do_two_and_three_processes_by_files_and_devices(long, alone, tmp_path, devices, flags):
    Run(tmp_path, devices, *SIDES, *flags).succeeds()
    assert_equal(tmp_path, alone)


@pytest.mark.parametrize(
    'flags',
    [STALE, CARRIED, (*CARRIED, '--config.collection.staleness=1'), ADAPTERS, (*ADAPTERS, BY_DEVICES)],
    ids=['stale', 'carried', 'both', 'adapters', 'adapters by devices'],
)
def test_and_with_steps_that_do_not_wait(long, tmp_path, flags):
    Run(tmp_path / 'one', 1, *SIDES, *flags).succeeds()
    Run(tmp_path / 'two', 2, *SIDES, *flags).succeeds()
    assert_equal(tmp_path / 'two', tmp_path / 'one')


@pytest.mark.parametrize('killed', [0, 1], ids=['learner', 'sampler'])
@pytest.mark.parametrize('flags', [(), STALE], ids=['in turn', 'stale'])
def test_a_side_that_is_killed_ends_the_other_and_then_both_go_on(long, tmp_path, killed, flags):
    Run(tmp_path / 'one', 1, *SIDES, *flags).succeeds()
    run = Run(tmp_path / 'two', 2, *SIDES, *flags)
    run.send(killed, signal.SIGKILL, rows=2)
    began = time.monotonic()
    status, errors = run.ends(timeout=90)[1 - killed]
    assert status not in (0, 42) and time.monotonic() - began < 60, (status, errors)
    assert 'another task died' in errors or 'error: process' in errors, errors
    Run(tmp_path / 'two', 2, *SIDES, *flags).succeeds()
    assert_equal(tmp_path / 'two', tmp_path / 'one')


@pytest.mark.parametrize('asked', [0, 1], ids=['learner', 'sampler'])
def test_a_signal_to_either_side_ends_both_saved(long, alone, tmp_path, asked):
    run = Run(tmp_path, 2, *SIDES)
    run.send(asked, signal.SIGTERM, rows=1)
    for status, errors in run.ends():
        assert status == 42 and 'the same command goes on' in errors, errors
    assert 0 < len(tiny_run.rows(tmp_path)) <= STEPS  # it may come in the last step
    Run(tmp_path, 2, *SIDES).succeeds()
    assert_equal(tmp_path, alone)
