"""What compiles behind what: the order at a run's start, and how an error there comes out."""

import os
import threading
import types

import jax
import jax.numpy as jnp
import pytest

from grpo_jax import supervised, train
from grpo_jax.run.loop import Loop
from grpo_jax.sharding import compiled
from tests import shared_programs, tiny_run

WAIT = 60  # seconds, at most


@pytest.fixture(autouse=True)
def none_is_there():
    """Programs are traced and compiled as in a new process."""
    shared_programs.forget()


class Fake:
    """An Executable whose compiler is ours: it waits for `go`, and raises `error`."""

    def __init__(self, name, error=None, waits=False):
        self.threads, self.compiled, self.go, self.started = [], 0, threading.Event(), threading.Event()
        if not waits:
            self.go.set()

        def compile_():
            self.threads.append(threading.current_thread())
            self.started.set()
            assert self.go.wait(WAIT)
            self.compiled += 1
            if error:
                raise error
            return lambda x: (name, x)

        def trace():
            self.threads.append(threading.current_thread())
            return types.SimpleNamespace(lower=lambda: types.SimpleNamespace(as_text=lambda: name, compile=compile_))

        self.executable = compiled.Executable(trace, name=name)


def wait_until_idle(later):
    for future in later._futures.values():
        future.exception(WAIT)


def test_what_is_added_is_traced_here_and_compiled_elsewhere():
    one = Fake('one')
    with compiled.BackgroundCompiler() as later:
        later.add([one.executable])
        assert not one.threads  # nothing is done yet
        later.wait('one')
    traced, compiled_on = one.threads
    assert traced is threading.current_thread() and compiled_on.name.startswith(compiled.THREADS)
    assert one.executable(2) == ('one', 2) and one.compiled == 1


def test_a_step_begins_one_more_when_it_leaves_a_core_free(monkeypatch):
    monkeypatch.setattr(os, 'cpu_count', lambda: 2)
    fakes = [Fake(f'program {i}', waits=True) for i in range(3)]
    with compiled.BackgroundCompiler() as later:
        later.add([fake.executable for fake in fakes])
        later.step(0, {})
        later.step(1, {})  # the first is still being compiled
        assert [len(fake.threads) > 0 for fake in fakes] == [True, False, False]
        fakes[0].go.set()
        wait_until_idle(later)
        later.step(2, {})
        assert [len(fake.threads) > 0 for fake in fakes] == [True, True, False]
        for fake in fakes:
            fake.go.set()
        later.wait('all')
    assert [fake.compiled for fake in fakes] == [1, 1, 1]


def test_an_error_of_the_compiler_comes_out_at_the_next_step_and_at_the_end():
    for call in (lambda later: later.step(), lambda later: later.wait('it')):
        fake = Fake('it', error=MemoryError('of the compiler'))
        with compiled.BackgroundCompiler() as later:
            later.add([fake.executable])
            later.start()
            wait_until_idle(later)
            with pytest.raises(MemoryError, match='of the compiler'):
                call(later)


def test_who_calls_an_executable_that_is_being_compiled_waits_for_it():
    fake, results = Fake('it', waits=True), []
    with compiled.BackgroundCompiler() as later:
        later.add([fake.executable])
        later.start()
        caller = threading.Thread(target=lambda: results.append(fake.executable(3)))
        caller.start()
        assert fake.started.wait(WAIT) and not results
        fake.go.set()
        caller.join(WAIT)
    assert results == [('it', 3)] and fake.compiled == 1


def test_who_calls_an_executable_whose_turn_has_not_come_does_not_wait_for_the_others(monkeypatch):
    monkeypatch.setattr(os, 'cpu_count', lambda: 1)
    long, short = Fake('long', waits=True), Fake('short')
    with compiled.BackgroundCompiler() as later:
        later.add([long.executable, short.executable])
        later.start()
        assert long.started.wait(WAIT)
        assert short.executable(1) == ('short', 1) and not long.compiled
        long.go.set()


def test_what_ends_the_context_leaves_what_has_not_begun(monkeypatch):
    monkeypatch.setattr(os, 'cpu_count', lambda: 1)
    first, second = Fake('first', waits=True), Fake('second')
    with pytest.raises(KeyboardInterrupt), compiled.BackgroundCompiler() as later:
        later.add([first.executable, second.executable])
        later.start()
        assert first.started.wait(WAIT)
        raise KeyboardInterrupt
    assert compiled.is_compiling()  # an exit would wait
    first.go.set()
    wait_until = threading.Event()
    while compiled.is_compiling():
        wait_until.wait(0.01)
    assert first.compiled == 1 and not second.compiled


def test_an_executable_of_a_traced_text_has_its_hash_before_it_is_compiled():
    traced = compiled.Executable(lambda: jax.jit(lambda x: x + 1).trace(jnp.ones(3)))
    before = traced.hash
    assert len(before) == 16 and traced.compile().hash == before


# a whole run


@pytest.fixture
def events(monkeypatch):
    """(what, name) of what happens in a run, in order: 'lower' of an executable, 'row' of a training."""
    happened, lower, log = [], compiled.Executable.lower, Loop.log

    def lower_and_tell(self):
        if not self._hash:
            happened.append(('lower', self.name))
        lower(self)

    def log_and_tell(self, step, *rest):
        log(self, step, *rest)
        happened.append(('row', f'{self.title} {step}'))

    monkeypatch.setattr(compiled.Executable, 'lower', lower_and_tell)
    monkeypatch.setattr(Loop, 'log', log_and_tell)
    return happened


def test_nothing_but_the_cold_start_is_traced_before_its_first_row(tmp_path, events):
    config = tiny_run.config(steps=1, supervised__updates=2)
    train.run(config, str(tmp_path / 'run'))
    first = events.index(('row', 'cold start 0'))
    assert {name for _, name in events[:first]} == {'the update'}
    later = events[first + 1 : events.index(('row', 'train 0'))]
    names = [name for what, name in later if what == 'lower']
    assert "the sampler's program weights" in names and 'the update' in names  # of the run itself
    assert ('row', 'cold start 1') in later and later[0][0] == 'lower'  # behind the cold start's first step


def test_without_a_cold_start_all_is_compiled_before_the_first_step(tmp_path, events, monkeypatch):
    ready, steps = [], Loop.steps

    def told(self):
        ready.append(compiled.is_compiling())
        return steps(self)

    monkeypatch.setattr(Loop, 'steps', told)
    train.run(tiny_run.config(steps=2), str(tmp_path / 'run'))
    first = events.index(('row', 'train 0'))
    assert 'the update' in {name for _, name in events[:first]}
    assert [what for what, _ in events[first:]] == ['row'] * 2  # and nothing later


def test_an_error_in_what_compiles_behind_the_cold_start_ends_the_run(tmp_path, monkeypatch):
    compile_lowered = compiled.Executable.compile_lowered

    def fail(self, lowered):
        if self.name.startswith("the sampler's"):
            raise MemoryError('of the compiler')
        compile_lowered(self, lowered)

    monkeypatch.setattr(compiled.Executable, 'compile_lowered', fail)
    with pytest.raises(MemoryError, match='of the compiler'):
        train.run(tiny_run.config(steps=1, supervised__updates=2), str(tmp_path / 'run'))
    assert not (tmp_path / 'run' / 'config.json').exists()  # as before any device work


def test_a_second_start_takes_every_program_from_the_cache(tmp_path, monkeypatch):
    before, seen = jax.config.jax_persistent_cache_min_compile_time_secs, []
    add = compiled.BackgroundCompiler.add
    monkeypatch.setattr(compiled.BackgroundCompiler, 'add', lambda self, some: seen.extend(some) or add(self, some))
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
    try:
        for name in ('first', 'second'):
            seen.clear()
            shared_programs.forget()
            jax.clear_caches()  # as in a new process
            train.run(tiny_run.config(steps=1, supervised__updates=2), str(tmp_path / name))
    finally:
        jax.config.update('jax_persistent_cache_min_compile_time_secs', before)
    assert len(seen) > 10 and not [executable.name for executable in seen if not executable.cached]


def test_the_cold_start_reads_the_data_of_its_run_no_second_time(tmp_path, monkeypatch):
    splits, load = [], supervised.data.load
    monkeypatch.setattr(
        supervised.data, 'load', lambda options, split, *rest: splits.append(split) or load(options, split, *rest)
    )
    train.run(tiny_run.config(steps=1, supervised__updates=2), str(tmp_path / 'run'))
    assert splits == ['train', 'test']
