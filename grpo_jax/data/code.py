"""Programming problems with tests: HumanEval (arXiv 2107.03374) and MBPP (arXiv 2108.07732), whole or sanitized.

meta has a demonstration, and what the reward `code` needs: 'before', the source that goes before the program; 'tests',
sources that raise when they fail; 'setup', the source that the tests need; 'names', a dict with the program's name of
each object that the tests name.
"""

import ast
import os
import warnings

from grpo_jax.data import files
from grpo_jax.data.records import convert_rows, shorten, text_field
from grpo_jax.errors import BadInput
from grpo_jax.types import Example

FILES = '{name}'
SUBSETS = {'humaneval': 'openai_humaneval', 'mbpp': 'full', 'mbpp_sanitized': 'sanitized'}  # on the hub
SPLITS = {'prompt': (1, 10), 'test': (11, 510), 'validation': (511, 600), 'train': (601, 974)}  # task_id in MBPP
TASK = (
    'You are an expert Python programmer, and here is your task: {text} Your code should pass these tests:\n\n'
    '{tests}\n'
)  # of the paper


def examples(split: str, *, folder: str, name: str) -> list[Example | BadInput]:
    """Reads folder/<name>.jsonl; name is humaneval, mbpp or mbpp_sanitized.

    humaneval has the split test alone, the others have MBPP's splits. On the hub: openai/openai_humaneval and
    google-research-datasets/mbpp, with a file for each split. Ids are row numbers in humaneval, task_id in the others.
    Raises BadInput for another name, and for a split that the data set does not have.
    """
    converters = {'humaneval': _humaneval_example, 'mbpp': _mbpp_example, 'mbpp_sanitized': _mbpp_example}
    if name not in converters:
        raise BadInput('data.options.name', name, f'choose one of {", ".join(converters)}')
    splits = ['test'] if name == 'humaneval' else [*SPLITS]
    if split not in splits:
        raise BadInput('data.options.name', name, f'has no split {split}, only {", ".join(splits)}; choose another')
    subset = os.path.join(folder, SUBSETS[name])
    if os.path.isdir(subset):
        return convert_rows(converters[name], files.rows(subset, split))
    rows = convert_rows(converters[name], files.rows(folder, name))
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
    # the prompt's helpers are the tests' too; its unfinished function is not
    setup = [part for part in _parse(prompt, where).body if getattr(part, 'name', '') != name]
    setup += [part for part in tree.body if part is not checks[0]]
    called = checks[0].args.args[0].arg
    # a test is an assertion with the statements before it
    tests, pending = [], []
    for statement in checks[0].body:
        pending.append(ast.unparse(statement))
        if any(isinstance(node, ast.Assert) for node in ast.walk(statement)):
            tests.append('\n'.join(pending))
            pending = []
    if called not in _names('\n'.join(tests), where):
        raise BadInput(where, shorten(test), f'has no assert that calls {called}; mend or remove the row')
    meta = {
        'before': prompt,
        'setup': ast.unparse(setup),  # pyright: ignore[reportArgumentType]  # a list of statements will do
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
    if not any(isinstance(node, ast.Assert) for node in ast.walk(_parse('\n'.join(tests), where))):
        raise BadInput(where, shorten(tests), 'field test_list has no assert; mend or remove the row')
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
    return Example(TASK.format(text=text, tests='\n'.join(tests)), code, task_id, meta)


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
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last two of brackets in brackets
        raise BadInput(where, shorten(source), f'is no Python ({error}); mend or remove the row') from None
