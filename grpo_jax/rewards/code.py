"""Programs that pass tests: the share of an example's tests that the completion's program passes, in a sandbox."""

from grpo_jax.workers import sandbox

FENCES = ('```python', '```py', '```python3', '```Python')


def reward(completion, example, *, all_pass, timeout, memory_mib):
    """Share of the tests passed, or with all_pass 1.0 for all of them and 0.0 else; None without tests.

    example.meta is one of data/code.py. Raises pool.Expired when program and tests take more than `timeout` seconds,
    pool.Died when the sandbox fails; a program that ends itself or runs out of memory just fails its tests.
    """
    meta = example.meta
    if not meta.get('tests'):
        return None
    passed = sandbox.run(
        meta['before'] + extract(completion),
        meta['tests'],
        names=meta['names'],
        setup=meta['setup'],
        timeout=timeout,
        memory_mib=memory_mib,
    )
    return float(all(passed)) if all_pass else sum(passed) / len(passed)


def extract(completion):
    """The program: the last block fenced with ```python, closed or not, else the whole text."""
    found, block = completion, None
    for line in completion.splitlines(keepends=True):
        fence = line.strip()
        if fence in FENCES:
            block = []
        elif block is not None and fence == '```':
            found, block = ''.join(block), None
        elif block is not None:
            block.append(line)
    return found if block is None else ''.join(block)


def gold(example):
    """(a program that passes, one that does not): for the self-test before a run."""
    return example.answer, 'pass'
