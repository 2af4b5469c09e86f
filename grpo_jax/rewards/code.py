"""Programs that pass tests: the share of an example's tests that the completion's program passes, in a sandbox."""

from grpo_jax.example import Example
from grpo_jax.workers.sandbox import Sandbox

FENCES = ('```python', '```py', '```python3', '```Python')


def reward(
    completion: str, example: Example, *, sandbox: Sandbox, all_pass: bool, timeout: float, memory_mib: int
) -> float | None:
    """Share of the tests passed, or with all_pass 1.0 for all of them and 0.0 else; None without tests.

    example.meta is as data/code.py makes it. Raises pool.Expired when program and tests take more than `timeout`
    seconds, pool.Died when the sandbox fails; a program that ends itself or runs out of memory just fails its tests.
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


def extract(completion: str) -> str:
    """The program: the last block fenced with ```python, closed or not, else the whole text."""
    program, block = completion, None
    for line in completion.splitlines(keepends=True):
        fence = line.strip()
        if fence in FENCES:
            block = []
        elif block is not None and fence == '```':
            program, block = ''.join(block), None
        elif block is not None:
            block.append(line)
    return program if block is None else ''.join(block)


def gold(example: Example) -> tuple[str, str]:
    """(a program that passes, one that does not): for the self-test before a run."""
    return example.answer, 'pass'
