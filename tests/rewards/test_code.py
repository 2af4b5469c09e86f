"""Programs as rewards: what is taken for the program, HumanEval's and MBPP's formats, and their own solutions."""

import concurrent.futures
import json
import time

import pytest

from grpo_jax.data import code as problems
from grpo_jax.errors import BadInput
from grpo_jax.rewards import code
from grpo_jax.rewards.code import find_program
from grpo_jax.types import Example
from grpo_jax.workers import Expired, Sandbox

META = {
    'before': '',
    'setup': '',
    'names': {'f': 'f'},
    'tests': ['assert f(1) == 1', 'assert f(2) == 4', 'assert f(3) == 9', 'assert f(4) == 16'],
}
SQUARES = Example('', '', 0, META)


SANDBOX = Sandbox()


@pytest.fixture(scope='module', autouse=True)
def close_sandbox():
    yield
    SANDBOX.close()


def reward(completion, example=SQUARES, all_pass=False, timeout=10.0):
    return code.reward(completion, example, sandbox=SANDBOX, all_pass=all_pass, timeout=timeout, memory_mib=512)


SOURCE = 'def f(x):\n    return x * x\n'
FORMS = {
    'nothing but code': SOURCE,
    'prose around the code': f'Here is the function:\n\nimport math\n\n{SOURCE}\nExplanation:\n- It squares `x`.',
    'prose behind the code': f'{SOURCE}\n`f` returns the square.',
    'no language': f'Here:\n```\n{SOURCE}```\nDone.',
    'python': f'```python\n{SOURCE}```\nThe function squares its argument.',
    'a space': f'``` python\n{SOURCE}```',
    'py': f'```py\n{SOURCE}```',
    'Python3': f'```Python3\n{SOURCE}```',
    'python3.11': f'```python3.11\n{SOURCE}```',
    'attributes': f'```{{.python .numberLines}}\n{SOURCE}```',
    'a title': f'```python title="solution.py"\n{SOURCE}```',
    'tildes': f'~~~\n{SOURCE}~~~',
    'tildes, python': f'~~~python\n{SOURCE}~~~\nIt squares.',
    'four signs': f'````python\n{SOURCE}````',
    'closed on the last line': f'```python\n{SOURCE.rstrip()}```\nThis squares x.',
    'closed inside of the code': f'```python\n{SOURCE}    ```\n',
    'never closed': f'Sure.\n```python\n{SOURCE}',
    'never closed, no language': f'Sure.\n```\n{SOURCE}',
    'closed alone': f'{SOURCE}```\nThis squares x.',
    'closed by another': f'```python\nx = 1\n```python\n{SOURCE}```',
    'one line': '```python def f(x): return x * x```',
    'one line, no language': '```def f(x): return x * x```',
    'in a list': '1. Code:\n   ```python\n   def f(x):\n       return x * x\n   ```\n2. Done',
    'line ends of Windows': f'```python\n{SOURCE}```\n'.replace('\n', '\r\n'),
    'a fence in the docstring': '```python\ndef f(x):\n    """Squares.\n\n    ```\n    f(2)\n    ```\n    """\n'
    '    return x * x\n```',
    'usage behind it': f'```python\n{SOURCE}```\nUsage:\n```python\nprint(f("2"))\n```',
    'a session behind it': f'```python\n{SOURCE}```\n```\n>>> f(2)\n4\n```',
    'output behind it': f'```\n{SOURCE}```\nOutput:\n```\n4\n```',
    'installation before it': f'```bash\npip install x\n```\n```python\n{SOURCE}```\n```js\nconst f = x => x\n```',
    'a draft before it': f'```python\ndef f(x):\n    return x\n```\nThat is wrong, so\n```python\n{SOURCE}```',
    'a helper before it': '```python\nimport math\ndef g(x):\n    return x * x\n```\nthen\n```python\n'
    'def f(x):\n    return g(x)\n```',
    'a helper behind it': '```python\ndef f(x):\n    return g(x)\n```\nwith\n```python\ndef g(x):\n    return x * x\n'
    '```\n```python\nassert f(3) == 8\n```',
    'imports before it': '```python\nimport operator as o\n```\n```python\ndef f(x):\n    return o.mul(x, x)\n```',
    'a constant before it': '```python\nN: int = 2\n```\n```python\nf = lambda x: x**N\n```\n```python\nN = 3\n```',
}


@pytest.mark.parametrize('form', FORMS.values(), ids=FORMS)
def test_the_solution_is_read_from_every_form(form):
    assert reward(form, all_pass=True) == 1


@pytest.mark.parametrize(
    'completion, program',
    [
        ('x = 1', 'x = 1'),
        ('', ''),
        ('Sure:\n```python\nx = 1\n```\nDone.', 'x = 1\n'),
        ('```python\nx = 1\n```\nor\n```python\nx = 2\n```', 'x = 2\n'),
        ('```python\nx = 1', 'x = 1'),
        ('```python\nx = 1\n```\n```python\nx = 2', 'x = 2'),  # cut off
        ('```python\nx = 1\n```\n```bash\nls\n```', 'x = 1\n'),
        ('  ```py\n  x\n  ```', '  x\n'),
        ('```\nx = 1\n```', 'x = 1\n'),
        ('```pythonic\nx\n```', '```pythonic\nx\n```'),
        ('```python\ns = "```"\n```', 's = "```"\n'),
        ('```python```', '```python```'),
        ('```python\n\n```', '\n'),
        ('```python\r\nx = 1\r\n```', 'x = 1\r\n'),
        ('    return x\n\nThis returns x.', '    return x\n\n'),  # the rest of a function
        ('```python\n    return x\n```\n```\n4\n```', '    return x\n'),
        ('I do not know the answer.', 'I do not know the answer.'),
        ('s = """\nnot prose here\n"""\nx if s else x\nnot s', 's = """\nnot prose here\n"""\nx if s else x\nnot s'),
    ],
)
def test_extracted_program(completion, program):
    assert code.extract(completion) == program


@pytest.mark.parametrize(
    'completion',
    [
        *('```python\n' * 30000, '```' * 10**6, '`' * 10**6, 'x\n' * 10**6, '```python\n```\n' * 30000, '*_' * 10**6),
        *('```' + 'a- ' * 10**6, '```python\nf = f0\n```\n' * 30000, '"""' * 10**6, 'a ' * 10**6, '    ```\n' * 30000),
    ],
    ids=range(11),
)
def test_extraction_takes_a_time_in_proportion_to_the_length(completion):
    began = time.process_time()
    code.extract(completion)
    find_program(completion, {'f'})
    assert time.process_time() - began < 4


@pytest.mark.parametrize(
    'program, share',
    [
        ('def f(x): return x * x', 1.0),
        ('def f(x): return x', 0.0),  # 1 of 4, as `return 1` would
        ('def f(x): return x * x if x < 3 else 0', 1 / 3),  # (2/4 - 1/4) / (1 - 1/4)
        ('def f(x): return x * x if x < 4 else 0', 2 / 3),
        ('def f(x): return 16', 0.0),
        ('def f(x): return -1', 0.0),
        ('no program', 0.0),
    ],
)
def test_share_of_the_tests_above_that_of_a_constant(program, share):
    completion = f'The squares:\n```python\n{program}\n```'
    assert reward(completion) == pytest.approx(share) and reward(completion, all_pass=True) == float(share == 1)


@pytest.mark.parametrize(
    'tests, constants',
    [
        (['assert f(1)', 'assert f(2)', 'assert not f(3)'], ['True', '1', '"x"', 'False', '[0]']),
        (['assert f(1) == [1]', 'assert [1] == f(2)', 'assert f(3) == []'], ['[1]', '[]']),
        (['assert abs(f(1) - 2.5) < 1e-6', 'assert f(2) == -7.5', 'assert f(3) == "x"'], ['2.5', '-7.5', '"x"']),
        (['assert set(f(1)) == set((4, 5))', 'assert f(2) is None', 'assert f(3) == 0'], ['(4, 5)', 'None', '0']),
        (['x = {"a": 1}\nassert f(1) == x', 'assert f(2) == 2', 'assert f(3) == 3'], ['{"a": 1}', '2']),
    ],
)
def test_no_constant_is_paid(tests, constants):
    example = Example('', '', 0, META | {'tests': tests})
    assert [reward(f'def f(x): return {constant}', example) for constant in constants] == [0] * len(constants)


def test_where_a_constant_is_right_it_is_paid():
    example = Example('', '', 0, META | {'tests': ['assert f(1) == 7', 'assert f(2) == 7']})
    assert reward('def f(x): return 7', example) == 1 and reward('def f(x): return 7 if x < 2 else 0', example) == 0


def test_without_tests_there_is_no_score():
    assert reward('x', Example('', '', 0, {})) is None
    assert reward('x', Example('', '', 0, META | {'tests': []})) is None


def test_a_time_out_is_raised_to_be_counted():
    with pytest.raises(Expired):
        reward('def f(x):\n    while True: pass', timeout=0.3)


# formats

HUMANEVAL = {
    'prompt': 'import math\n\ndef half(x):\n    return x // 2\n\ndef f(x):\n    """Twice."""\n',
    'entry_point': 'f',
    'canonical_solution': '    return 2 * x\n',
    'test': 'BIG = 7\n\ndef check(candidate):\n    assert candidate(1) == 2\n    n = math.floor(2.5)\n'
    '    for i in range(n):\n        assert half(candidate(i)) == i\n    assert f(BIG) == 14\n    n = 0\n',
}
MBPP = {
    'task_id': 601,
    'text': 'Write a square.',
    'code': 'import sys\r\ndef sum(x):\r\n  return x * x',
    'test_setup_code': '',
    'test_list': ['assert sum(2) == 4', 'assert sum(3) == 9 < sys.maxsize'],
}
SANITIZED = {
    'task_id': 602,
    'prompt': 'Write a root.',
    'code': 'import math\ndef g(x): return math.sqrt(x)',
    'test_imports': ['import math'],
    'test_list': ['assert math.isclose(g(4), 2)'],
}


@pytest.fixture
def written(tmp_path):
    """A function that writes rows as folder/<name>.jsonl and reads their examples."""

    def examples(name, *rows, split='train'):
        (tmp_path / f'{name}.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
        return problems.examples(split, folder=str(tmp_path), name=name)

    return examples


def test_humaneval(written):
    (example,) = written('humaneval', HUMANEVAL, split='test')
    assert example.prompt == HUMANEVAL['prompt'] and example.id == 0 and len(example.meta['tests']) == 3
    assert example.answer == example.meta['demonstration'] == HUMANEVAL['canonical_solution']
    assert reward(example.answer, example) == 1
    assert reward('    return 2 * x if x < 7 else 0', example) == pytest.approx(0.5)  # (2/3 - 1/3) / (1 - 1/3)
    assert reward('    return 2', example) == 0
    # a whole function, as chat models write it
    assert reward('```python\ndef f(x):\n    return x + x\n```', example) == 1
    # the helpers of the tests are the prompt's, not the program's
    assert reward('    return x\nclass Any:\n    __eq__ = lambda *_: True\ndef half(x): return Any()', example) == 0


def test_mbpp(written):
    (example,) = written('mbpp', MBPP)
    assert example.prompt == (
        'You are an expert Python programmer, and here is your task: Write a square. Your code '
        'should pass these tests:\n\nassert sum(2) == 4\nassert sum(3) == 9 < sys.maxsize\n'
    )
    assert example.id == 601 and '\r' not in example.answer and example.meta['names'] == {'sum': 'sum'}
    assert reward(example.answer, example) == 1
    assert reward('def sum(x): return 4', example) == 0


def test_mbpp_sanitized(written):
    (example,) = written('mbpp_sanitized', SANITIZED)
    assert 'Write a root.' in example.prompt and reward(example.answer, example) == 1
    assert reward('class math:\n    isclose = lambda *_: True\ndef g(x): return 0', example) == 0


@pytest.mark.parametrize(
    'split, tasks', [('prompt', [1, 10]), ('test', [11, 510]), ('validation', [511, 600]), ('train', [601, 974])]
)
def test_splits_of_mbpp(written, split, tasks):
    rows = [MBPP | {'task_id': task} for task in (1, 10, 11, 510, 511, 600, 601, 974)]
    assert [example.id for example in written('mbpp', *rows, split=split)] == tasks


@pytest.mark.parametrize(
    'name, row, message',
    [
        ('humaneval', HUMANEVAL | {'test': 'x = 1'}, "'x = 1': field test must define check"),
        ('humaneval', HUMANEVAL | {'test': 'def check('}, 'is no Python'),
        ('humaneval', HUMANEVAL | {'prompt': '(' * 10**4}, 'is no Python'),
        ('humaneval', HUMANEVAL | {'entry_point': None}, "has nothing in field 'entry_point'"),
        ('mbpp', MBPP | {'test_list': []}, 'field test_list must have a test'),
        ('mbpp', MBPP | {'test_list': [1]}, '[1]: field test_list must be a list'),
        ('mbpp', MBPP | {'test_list': ['assert']}, 'is no Python'),
        ('mbpp', MBPP | {'test_imports': 'import math'}, 'field test_imports must be a list'),
        ('mbpp', MBPP | {'test_setup_code': [1]}, "field 'test_setup_code' must be text"),
        ('mbpp', MBPP | {'task_id': '7'}, "'7': field task_id"),
        ('mbpp', {'task_id': 601}, "has nothing in field 'prompt'"),
    ],
)
def test_malformed_rows_are_named(written, name, row, message):
    good = {'humaneval': HUMANEVAL, 'mbpp': MBPP}[name]
    found = written(name, good, row, split='test' if name == 'humaneval' else 'train')
    assert len(found) == 2 and isinstance(found[0], Example) and isinstance(found[1], BadInput)
    assert f'{name}.jsonl, line 2 ' in str(found[1]) and message in str(found[1])


@pytest.mark.parametrize(
    'options, message',
    [
        ({'split': 'train', 'name': 'humaneval'}, 'has no split train; set .* to one of test'),
        ({'split': 'dev', 'name': 'mbpp'}, 'has no split dev; set .* to one of prompt'),
        ({'split': 'test', 'name': 'apps'}, r"data\.options\.name = 'apps': choose one of humaneval"),
        ({'split': 'test', 'name': 'mbpp'}, r'data\.options\.folder'),
    ],
)
def test_unknown_names_are_refused(tmp_path, options, message):
    with pytest.raises(BadInput, match=message):
        problems.examples(folder=str(tmp_path), **options)


# the data sets

SETS = [
    ('humaneval', 'test', 164),
    ('mbpp', 'prompt', 10),
    ('mbpp', 'test', 500),
    ('mbpp', 'validation', 90),
    ('mbpp', 'train', 374),
    ('mbpp_sanitized', 'prompt', 7),
    ('mbpp_sanitized', 'test', 257),
    ('mbpp_sanitized', 'validation', 43),
    ('mbpp_sanitized', 'train', 120),
]
ODD = {'humaneval': [32, 38, 50, 129, 151], 'mbpp': [126, 367, 533, 596, 601, 927], 'mbpp_sanitized': [82, 126, 596]}


def load(real, name, split):
    return problems.examples(split, folder=f'{real}/code', name=name)


@pytest.mark.parametrize('name, split, count', SETS)
def test_solutions_of_a_sample_pass_and_others_do_not(real, name, split, count):
    examples = load(real, name, split)
    assert len(examples) == len({example.id for example in examples}) == count
    for example in examples[:: count // 6 + 1] + [example for example in examples if example.id in ODD[name]]:
        assert reward(example.answer, example, timeout=60.0) == 1, example.id
    assert reward('    pass', examples[0], all_pass=True) == 0


@pytest.mark.parametrize('name, split', [('humaneval', 'test'), ('mbpp', 'test')])
def test_constants_earn_nothing_on_a_sample(real, name, split):
    for example in load(real, name, split)[3::40]:
        for constant in ('True', 'None', '[]', '0'):
            names = {*example.meta['names'].values()}
            program = '\n'.join(f'def {name}(*_, **__): return {constant}' for name in names)
            assert reward(f'```python\n{program}\n```', example) == 0, (example.id, constant)


@pytest.mark.parametrize('name, split, count', SETS)
def test_all_solutions_pass_and_no_solution_of_another_problem_does(long, real, name, split, count):
    examples = load(real, name, split)
    for example, other in zip(examples, examples[1:] + examples[:1], strict=True):
        assert reward(example.answer, example, all_pass=True, timeout=120.0) == 1, example.id
        assert reward(other.answer, example, all_pass=True) == 0, example.id


def test_fifty_trivial_programs_a_second(long):
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        for count in (20, 400):  # the first start the sandboxes
            began = time.monotonic()
            assert set(threads.map(reward, ['def f(x): return x * x'] * count)) == {1}
            a_second = count / (time.monotonic() - began)
    assert a_second >= 50
