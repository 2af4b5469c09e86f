"""Work in killable processes: results, deadlines, deaths, memory, and what is left behind."""

import concurrent.futures
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from grpo_jax.workers import Died, Expired, Pool


def spin(forever):
    while forever:
        pass


def stop_self():
    os.kill(os.getpid(), signal.SIGKILL)


def eat():
    return len(bytearray(10 * 2**30))


def own_pid_after(seconds):
    time.sleep(seconds)
    return os.getpid()


def start_child():
    return subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)']).pid


class Unpicklable(Exception):
    def __init__(self, a, b):
        super().__init__(f'{a} {b}')


def fail(how):
    raise {'value': ValueError('no such answer'), 'odd': Unpicklable('one', 'two')}[how]


@pytest.fixture(scope='module')
def pool():
    pool = Pool(2, deadline=1.0, memory_gib=2.0)
    yield pool
    pool.close()


def test_a_result_comes_from_another_process(pool):
    assert pool.call(divmod, 7, 2) == (3, 1)
    assert pool.call(os.getpid) != os.getpid()


def test_what_the_function_raises_is_raised(pool):
    with pytest.raises(ValueError, match='no such answer'):
        pool.call(fail, 'value')
    with pytest.raises(RuntimeError, match='Unpicklable: one two'):
        pool.call(fail, 'odd')


def test_a_call_ends_at_its_deadline_and_others_go_on(pool):
    pool.call(spin, False)  # so that starting is not in the time below
    began = time.monotonic()
    with pytest.raises(Expired, match=r'spin was still running after 1\.0 s'):
        pool.call(spin, True)
    assert time.monotonic() - began < 3
    assert pool.call(divmod, 7, 2) == (3, 1)


@pytest.mark.parametrize('function', [stop_self, eat])
def test_death_and_memory_are_told_apart_from_results(pool, function):
    with pytest.raises(Died, match=function.__name__):
        pool.call(function)
    assert pool.call(divmod, 7, 2) == (3, 1)


def test_nothing_is_left_running(pool):
    alone = Pool(1, deadline=5.0, memory_gib=2.0)
    worker, child = alone.call(os.getpid), alone.call(start_child)
    alone.close()
    for pid in (worker, child):
        with pytest.raises(ProcessLookupError):
            os.kill(_reaped(pid), 0)
    assert alone.call(os.getpid) != worker
    alone.close()


def test_all_workers_end_with_the_pool():
    several = Pool(3, deadline=20.0, memory_gib=2.0)
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda _: several.call(time.sleep, 1.0), range(3)))
        pids = set(threads.map(lambda _: several.call(_pid_after, 0.5), range(3)))
    several.close()
    assert len(pids) == 3
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(_reaped(pid), 0)


def _pid_after(seconds):
    """This process's id, after a while in which other workers must take the other calls."""
    time.sleep(seconds)
    return os.getpid()


def _reaped(pid):
    """pid, once its zombie is gone: an orphan's is init's to reap."""
    for _ in range(50):
        try:
            with open(f'/proc/{pid}/stat', encoding='utf8') as file:
                if file.read().rsplit(')', 1)[1].split()[0] == 'Z':
                    return 2**22 + 1  # above any pid
        except OSError:
            break
        time.sleep(0.1)
    return pid


def test_results_are_remembered_and_what_a_function_raises_is_not(pool):
    first = pool.call_cached(time.time_ns)
    assert pool.call_cached(time.time_ns) == first
    for _ in range(2):
        with pytest.raises(ValueError, match='no such answer'):
            pool.call_cached(fail, 'value')


def test_a_call_that_hangs_or_dies_costs_its_deadline_once():
    alone = Pool(2, deadline=0.5, memory_gib=2.0)
    alone.call(spin, False)
    began, failures = time.monotonic(), []

    def ask(function, *args):
        with pytest.raises((Expired, Died)) as failure:
            alone.call_cached(function, *args)
        failures.append(str(failure.value))

    with concurrent.futures.ThreadPoolExecutor(4) as threads:  # at once, and one after the other
        list(threads.map(lambda _: ask(spin, True), range(8)))
    took = time.monotonic() - began
    for _ in range(2):
        ask(stop_self)
    alone.close()
    assert took < 1.5 and failures[:8] == ['spin was still running after 0.5 s'] * 8
    assert failures[8] == failures[9] and 'stop_self' in failures[8]


def test_workers_run_side_by_side(pool):
    found = []
    threads = [threading.Thread(target=lambda: found.append(pool.call(own_pid_after, 0.5))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 2


def test_a_worker_whose_parent_is_killed_in_a_call_ends_silently():
    program = (
        f'import sys, time; sys.path[:0] = {sys.path!r}\nfrom grpo_jax.workers import Pool\n'
        'pool = Pool(1, deadline=20.0, memory_gib=2.0)\npool.call(time.sleep, 0)\n'
        'print(flush=True)\npool.call(time.sleep, 1)'
    )
    with subprocess.Popen([sys.executable, '-c', program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as parent:
        parent.stdout.readline()
        time.sleep(0.3)
        parent.kill()
        assert parent.stderr.read() == b''  # until the worker has ended
