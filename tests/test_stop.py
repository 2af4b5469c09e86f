"""SIGTERM and Ctrl-C: the step at hand is finished and saved, and the same command goes on."""

import contextlib
import os
import signal

import pytest

from grpo_jax import train
from grpo_jax.errors import Stopped
from tests import tiny_run


def test_a_stopped_run_goes_on_as_if_it_had_not_been(tmp_path):
    config = tiny_run.config(
        steps=3, supervised__updates=0, reward__parts=(('mine', 1.0),), reward__verifier='', checkpoint__every=3
    )

    def impatient(completion, example):
        # once, though several threads score: a second signal ends the process
        with contextlib.suppress(FileExistsError):
            (tmp_path / 'told').touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGTERM)
        return float(len(completion))

    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped, match=r'after step 0 .*the same command goes on'):
        train.run(config, str(tmp_path / 'run'), functions={'mine': impatient})
    assert signal.getsignal(signal.SIGTERM) == handler
    assert len(tiny_run.rows(tmp_path / 'run')) == 1
    train.run(config, str(tmp_path / 'run'), functions={'mine': impatient})
    train.run(config, str(tmp_path / 'straight'), functions={'mine': impatient})
    for name in ('metrics.jsonl', 'evaluations.jsonl'):
        assert (tmp_path / 'run' / name).read_bytes() == (tmp_path / 'straight' / name).read_bytes()
