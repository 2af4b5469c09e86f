"""Programs judged by tests: runs an example's tests on the completion's program, in a sandbox."""

import ast
import collections
import contextlib
import json
from typing import Annotated

from grpo_jax.example import Example
from grpo_jax.ranges import Free, Range, Seconds
from grpo_jax.rewards.code.blocks import find_program
from grpo_jax.workers import Died, Expired, Sandbox

COLUMNS = ('before', 'names', 'setup', 'tests')  # of the data, which the reward reads
CONSTANTS = ('True', 'False', 'None', '0', '1', '-1', '1.0', "''", '[]', '()', '{}', 'set()')
MOST_CONSTANTS = 48  # constants that are tried for an example
REMEMBERED = 100_000  # examples
READS_ANSWERS = False  # the gold answer, a program, is used in the self-test alone
# source of run(text), which executes a program with `text` as standard input, a file, and returns what it writes
RUN = """
import atexit, os, sys, threading

def run(text):
    with open('input', 'w', newline='') as file:
        file.write(text)
    place = os.open('input', os.O_RDONLY)  # 0 where standard input was closed
    if place:
        os.dup2(place, 0)
        os.close(place)
    sys.argv, sys.stdin, written = ['program.py'], open(0, closefd=False), open('output', 'wb')
    os.dup2(written.fileno(), 1)  # os.write(1, ...) is output too
    output = sys.stdout = sys.__stdout__ = open(1, 'w', encoding='utf8', closefd=False)
    try:
        exec(compile({program!r}, 'program.py', 'exec'), {{'__name__': '__main__', 'exit': sys.exit, 'quit': sys.exit}})
    except SystemExit:
        pass
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join()
    atexit._run_exitfuncs()  # exit functions may write too
    for stream in (sys.stdout, output):
        getattr(stream, 'closed', False) or stream.flush()
    return open('output', encoding='utf8').read()
"""

_constant_shares = {}  # an example's sources and tests as JSON -> the result of _constant_share


def reward(
    completion: str,
    example: Example,
    *,
    sandbox: Sandbox,
    all_pass: bool,
    timeout: Free[Seconds],
    memory_mib: Free[Annotated[int, Range(least=1, most=2**30)]],
) -> float | None:
    """1.0 if the completion's program passes all tests; else 0.0 with all_pass, or partial credit; None without tests.

    Partial credit is max(0, (s - b) / (1 - b)): s is the share of tests that the program passes, b the greatest share
    that a program with a constant result passes, so `return True` earns nothing. The constants that are tried are
    CONSTANTS and the constants in the tests.

    example.meta: as data/code.py makes it; timeout: seconds for the program with all its tests; memory_mib: MiB of
    memory. Raises workers.Expired at the timeout, when no test counts, and workers.Died when the sandbox fails. A
    program that ends itself or runs out of memory fails its tests.
    """
    meta = example.meta
    if not meta.get('tests'):
        return None

    def share(program):
        source = meta['before'] + program
        passed = sandbox.run(
            RUN.format(program=source) if meta.get('stdin') else source,
            meta['tests'],
            names=meta['names'],
            setup=meta['setup'],
            timeout=timeout,
            memory_mib=memory_mib,
        )
        return sum(passed) / len(passed)

    value = share(find_program(completion, () if meta.get('stdin') else set(meta['names'].values())))
    if all_pass or value in (0.0, 1.0):
        return float(value == 1)
    constant = _constant_share(meta, share)
    return max(0.0, (value - constant) / (1 - constant)) if constant < 1 else 0.0


def _constant_share(meta, share):
    """The greatest share of an example's tests that a program with a constant result passes; cached.

    share(program): the share of the example's tests that a program passes.
    """
    key = json.dumps([meta[name] for name in ('before', 'setup', 'names', 'tests')])
    if key not in _constant_shares:
        best, names = 0.0, sorted(set(meta['names'].values()))
        for constant in _constants(meta['tests']):
            program = ''.join(f'\ndef {name}(*_, **__): return {constant}\n' for name in names)
            program = f'print({constant})' if meta.get('stdin') else program
            with contextlib.suppress(Expired, Died):
                best = max(best, share(program))
        if len(_constant_shares) >= REMEMBERED:
            _constant_shares.clear()
        _constant_shares[key] = best
    return _constant_shares[key]


def _constants(tests):
    """The constants to try, as sources: CONSTANTS, then the constants in the tests, the most frequent first."""
    counts = collections.Counter()
    for test in tests:
        pending = [ast.parse(test)]
        while pending:
            node = pending.pop()
            with contextlib.suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                ast.literal_eval(node)
                counts[ast.unparse(node)] += 1
                continue
            pending += ast.iter_child_nodes(node)
    return list(dict.fromkeys([*CONSTANTS, *(source for source, _ in counts.most_common())]))[:MOST_CONSTANTS]


def extract(completion: str) -> str:
    """The completion's program, whatever names it defines; see blocks.find_program."""
    return find_program(completion)


def gold(example: Example) -> tuple[str, str]:
    """(a program that passes, a program that fails), for the self-test before a run."""
    return example.answer, 'pass'
