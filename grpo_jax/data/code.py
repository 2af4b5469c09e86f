"""Programming problems with tests, in the forms of HumanEval (arXiv 2107.03374), MBPP (arXiv 2108.07732) and APPS.

meta has a demonstration, and what the reward `code` needs: 'before', the source that goes before the program; 'tests',
sources that raise when they fail; 'setup', the source that the tests need; 'names', a dict with the program's name of
each object that the tests name; 'stdin', whether the tests call run(text) for what the program writes on this input.
"""

import ast
import json
import os
import warnings

from grpo_jax.data import files
from grpo_jax.data.records import MissingSplit, convert_rows, get_field, parse_json, shorten, text_field
from grpo_jax.errors import BadInput
from grpo_jax.types import Example

FILES = '{name}'
SUBSETS = {'humaneval': 'openai_humaneval', 'mbpp': 'full', 'mbpp_sanitized': 'sanitized'}  # on the hub
SPLITS = {'prompt': (1, 10), 'test': (11, 510), 'validation': (511, 600), 'train': (601, 974)}  # task_id in MBPP
TASK = (
    'You are an expert Python programmer, and here is your task: {text} Your code should pass these tests:\n\n'
    '{tests}\n'
)  # of the paper
# what tests of HumanEval+ and MBPP+ use of numpy, which the sandbox does not have
NUMPY = """
class np:
    class ndarray:
        pass

    def allclose(a, b, rtol=1e-05, atol=1e-08):
        if isinstance(a, (list, tuple)):
            return len(a) == len(b) and all(np.allclose(x, y, rtol, atol) for x, y in zip(a, b))
        return abs(a - b) <= atol + rtol * abs(b) or a == b
"""
# what LeetCode imports before a class Solution
IMPORTS = 'import bisect, collections, functools, heapq, itertools, math, operator, random, re, string\n'
IMPORTS += 'from typing import *\nfrom collections import *\nfrom functools import *\nfrom heapq import *\n'
# the judge of APPS's form: outputs are equal word by word, numbers with decimals to a millionth
EQUAL = """
import math

def is_equal(word, gold):
    try:
        return word == gold or ('.' in gold and math.isclose(float(word), float(gold), rel_tol=1e-6, abs_tol=1e-9))
    except ValueError:
        return False

def writes(text, gold):
    words, golds = text.split(), gold.split()
    return len(words) == len(golds) and all(map(is_equal, words, golds))

def plain(value):
    return [*map(plain, value)] if isinstance(value, (list, tuple)) else value

def returns(value, gold):
    return plain(value) == gold or [plain(value)] == gold
"""


def examples(
    split: str,
    *,
    folder: str,
    name: str = '',
    subset: str = '',
    prompt_field: str = 'question',
    tests_field: str = 'input_output',
    solution_field: str = 'solutions.0',
) -> list[Example | BadInput]:
    """Reads a split of problems (see files.rows); with a name, from that set's folder as on the hub or <name>.jsonl.

    Without a name, a row with entry_point has HumanEval's form, a row with test_list MBPP's (also with more tests in
    `test`), and other rows have APPS's (see _cases), whose fields the last three arguments name; they are paths. With a
    name, humaneval (whose only split is test), mbpp or mbpp_sanitized, rows without entry_point have that set's form,
    and subset is not read. Ids are row numbers, and in MBPP's form the task_id. A malformed row stands as its BadInput.
    Raises BadInput for another name, and for a split that the data set does not have.
    """

    def example(row, i, where):
        if 'entry_point' in row or name == 'humaneval':
            return _humaneval_example(row, i, where)
        if 'test_list' in row or name:
            return _mbpp_example(row, i, where)
        return _cases_example(row, i, where, (prompt_field, tests_field, solution_field))

    if not name:
        return convert_rows(example, files.rows(folder, split, subset=subset))
    if name not in SUBSETS:
        raise BadInput('data.options.name', name, f'choose one of {", ".join(SUBSETS)}')
    splits = ['test'] if name == 'humaneval' else [*SPLITS]
    if split not in splits:
        remedy = f'has no split {split}; set data.train_split or data.test_split to one of {", ".join(splits)}'
        raise MissingSplit('data.options.name', name, remedy)
    parent = os.path.join(folder, SUBSETS[name])
    if os.path.isdir(parent):
        return convert_rows(example, files.rows(parent, split))
    rows = convert_rows(example, files.rows(folder, name))
    if name == 'humaneval':
        return rows
    first, last = SPLITS[split]
    return [row for row in rows if isinstance(row, BadInput) or first <= row.id <= last]


def _humaneval_example(row, i, where):
    """The Example of a row of HumanEval, whose id is i; raises BadInput for a malformed row."""
    prompt, test, name, solution = (
        text_field(row, field, where) for field in ('prompt', 'test', 'entry_point', 'canonical_solution')
    )
    tree = _parse(test, where)
    checks = [part for part in tree.body if isinstance(part, ast.FunctionDef) and part.name == 'check']
    if len(checks) != 1 or len(checks[0].args.args) != 1:
        raise BadInput(where, shorten(test), 'field test must define check(candidate); mend or remove the row')
    # tests may call the helpers in the prompt, but not its unfinished function
    setup = [part for part in _parse(prompt, where).body if getattr(part, 'name', '') != name]
    helpers = [part for part in tree.body if part is not checks[0]]
    called = checks[0].args.args[0].arg
    asserting = {part.name for part in helpers if isinstance(part, ast.FunctionDef) and _asserts(part)}
    # a test is an assertion with the statements before it
    tests, pending = [], []
    for statement in checks[0].body:
        pending.append(ast.unparse(statement))
        if _asserts(statement, asserting):
            tests.append('\n'.join(pending))
            pending = []
    if called not in _names('\n'.join(tests), where):
        raise BadInput(where, shorten(test), f'has no assert that calls {called}; mend or remove the row')
    meta = {
        'before': prompt,
        'setup': _unparse(setup + helpers),
        'tests': tests,
        'names': {name: name, called: name},
        'demonstration': solution,
    }
    return Example(prompt, solution, i, meta)


def _mbpp_example(row, _, where):
    """The Example of a row of MBPP; raises BadInput for a malformed row."""
    text = text_field(row, 'text' if 'text' in row else 'prompt', where)
    code = text_field(row, 'code', where).replace('\r', '')
    tests, needed, task_id = _sources(row, 'test_list', where), _sources(row, 'test_imports', where), row.get('task_id')
    if not tests:
        raise BadInput(where, tests, 'field test_list must have a test; mend or remove the row')
    if not _asserts(_parse('\n'.join(tests), where)):
        raise BadInput(where, shorten(tests), 'field test_list has no assert; mend or remove the row')
    prompt = TASK.format(text=text, tests='\n'.join(tests))
    if row.get('test'):  # with more inputs than those of test_list, which the prompt shows
        body = _parse(text_field(row, 'test', where), where).body
        helpers = [part for part in body if isinstance(part, (ast.FunctionDef, ast.Import, ast.ImportFrom))]
        needed.append(_unparse(helpers))
        tests.append(_unparse([part for part in body if part not in helpers]))
    if type(task_id) is not int:
        raise BadInput(where, shorten(task_id), 'field task_id must be a whole number; mend or remove the row')
    if row.get('test_setup_code'):
        needed.append(text_field(row, 'test_setup_code', where).replace('\r', ''))
    used = _names('\n'.join(needed + tests), where)
    names, imports = {}, []
    for part in _parse(code, where).body:
        if isinstance(part, (ast.Import, ast.ImportFrom)):
            imports += [ast.unparse(part)] if used & {alias.asname or alias.name for alias in part.names} else []
        elif getattr(part, 'name', '') in used:
            names[part.name] = part.name
    meta = {'before': '', 'setup': '\n'.join(imports + needed), 'tests': tests, 'names': names, 'demonstration': code}
    return Example(prompt, code, task_id, meta)


def _cases_example(row, i, where, fields):
    """The Example of a row of APPS's form, whose id is i; fields: paths of prompt, tests and solution.

    Where a column starter_code has the head of a function, it stands after the prompt.
    """
    prompt, solution = text_field(row, fields[0], where), get_field(row, fields[2])
    cases, function = _cases(row, fields[1], where)
    head = str(row.get('starter_code') or '').strip()
    method = f'Solution().{function}' if 'class Solution' in head else function
    if function:
        name = method.partition('(')[0]
        tests = [f'assert returns({method}(*{given!r}), {gold!r})' for given, gold in cases]
    else:
        name = 'run'
        lines = [['\n'.join(map(str, x)) if isinstance(x, list) else str(x) for x in case] for case in cases]
        tests = [f'assert writes(run({given!r}), {gold!r})' for given, gold in lines]
    names = {name: name}
    meta = {'before': IMPORTS * ('class Solution' in head), 'setup': EQUAL, 'tests': tests, 'names': names}
    meta['stdin'] = not function
    meta |= {name: row[name] for name in ('difficulty', 'source') if row.get(name)}
    if isinstance(solution, str) and solution.strip():
        meta['demonstration'] = solution
    return Example(f'{prompt}\n\n{head}' if head else prompt, meta.get('demonstration', ''), i, meta)


def _cases(row, field, where):
    """([(input, output), ...], the function's name or '') of the tests in a field, which may be JSON text.

    '' stands for a program that reads the input and writes the output. The tests have one of two forms: a struct with
    the lists inputs and outputs, and fn_name for a function; or a list of structs with input and output. In a list with
    testtype functional, each line of an input is an argument in JSON, and metadata.func_name is the function's name.
    Raises BadInput for another form.
    """
    value = get_field(row, field)
    value = parse_json(value) if isinstance(value, str) else value
    function = ''
    if isinstance(value, dict) and isinstance(value.get('inputs'), list) and isinstance(value.get('outputs'), list):
        function, cases = value.get('fn_name') or '', list(zip(value['inputs'], value['outputs'], strict=False))
    elif isinstance(value, list) and all(isinstance(case, dict) and {'input', 'output'} <= {*case} for case in value):
        cases = [(case['input'], case['output']) for case in value]
        if value and value[0].get('testtype') == 'functional':
            function = get_field(row, 'metadata.func_name') or ''
            try:
                cases = [([json.loads(x) for x in text.splitlines()], json.loads(gold)) for text, gold in cases]
            except (ValueError, TypeError, AttributeError):  # no JSON, or no texts
                cases = []
    else:
        cases = []
    if not cases:
        remedy = 'must have tests, with inputs and outputs; mend the row, or name data.options.tests_field'
        raise BadInput(where, shorten(get_field(row, field)), f'field {field!r} {remedy}')
    return cases, function


def _asserts(tree, functions=()):
    """Whether a syntax tree has an assert, or calls one of `functions`."""
    nodes = [*ast.walk(tree)]
    calls = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    return bool(calls & {*functions}) or any(isinstance(node, ast.Assert) for node in nodes)


def _unparse(statements):
    """The source of statements, in which NUMPY takes the place of `import numpy as np`."""
    sources = [ast.unparse(statement) for statement in statements]
    return '\n'.join(NUMPY if source == 'import numpy as np' else source for source in sources)


def _names(source, where):
    """The set of all names that a source uses or assigns; raises BadInput for a source that is no Python."""
    return {node.id for node in ast.walk(_parse(source, where)) if isinstance(node, ast.Name)}


def _sources(row, field, where):
    """The list of sources in a field, [] where the field is missing; raises BadInput for anything else."""
    sources = row.get(field, [])
    if not isinstance(sources, list) or not all(isinstance(source, str) for source in sources):
        raise BadInput(where, shorten(sources), f'field {field} must be a list of texts; mend or remove the row')
    return list(sources)


def _parse(source, where):
    """The syntax tree of a source; raises BadInput for a source that is no Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')  # of an odd escape in a sound program
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last two for deeply nested brackets
        raise BadInput(where, shorten(source), f'is no Python ({error}); mend or remove the row') from None
