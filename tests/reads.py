"""Records which keys of a config code reads, so that a test need not believe what the fields say of themselves."""

import ast
from collections import defaultdict
import contextlib
import inspect
import pathlib
import sys
from typing import Any

import grpo_jax
from grpo_jax import ranges
from grpo_jax.learner.options import Optimization
from grpo_jax.run.settings import Keys

# beginnings of names of functions that look at settings to refuse them, or to put them together
ASIDE = (
    *('check', '_check', 'open_algorithm', 'from_config', 'to_section', 'sources'),
    *('find_unread', '_allows', 'read_options'),
)
ACTING = ('_check_source',)  # the gold self-test
CODE = pathlib.Path(grpo_jax.__file__).parent


def is_aside(name):
    """Whether a function of this name looks at settings and does not act on them."""
    return name.startswith(ASIDE) and name not in ACTING


def fields(declared=Keys, prefix=''):
    """{(options type, field): its dotted keys}; a field that is no key has none."""
    keys = defaultdict(list)
    for name, parameter in inspect.signature(declared).parameters.items():
        path = f'{prefix}{name}'
        if options := ranges.type_of(parameter.annotation):
            flat = name not in ranges.keys_of(declared)
            for field, own in fields(options, prefix if flat else f'{path}.').items():
                keys[field] += own
        else:
            keys[declared, name] += [path] if path in ranges.marks_of(Keys) else []
    return keys


@contextlib.contextmanager
def recorded():
    """Yields {dotted key: {the functions that have read it}}, which fills while code runs."""
    seen = defaultdict(set)

    def reader(key, read):
        def record(self):
            frame: Any = sys._getframe(1)
            while frame.f_code.co_name.startswith('<'):  # a comprehension, a lambda
                frame = frame.f_back
            if not is_aside(frame.f_code.co_name):
                seen[key].add(f'{pathlib.Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}')
            return read(self)

        return property(record)

    with contextlib.ExitStack() as undo:
        for (declared, field), keys in fields().items():
            own = vars(declared).get(field)
            if len(keys) == 1 and own is not None:
                setattr(declared, field, reader(keys[0], own.__get__))
                undo.callback(setattr, declared, field, own)
        make = vars(Optimization)['from_config']

        def named(cls, section, name='optimizer'):
            """One type has the keys of three sections: each has a type of its own here."""
            readers = {field: reader(f'{name}.{field}', vars(cls)[field].__get__) for field in cls._fields}
            return type(name, (cls,), readers)(*make.__get__(None, cls)(section, name))

        Optimization.from_config = classmethod(named)
        undo.callback(setattr, Optimization, 'from_config', make)
        yield seen


def named_in_code():
    """Names of attributes that the package reads, or hands on as texts; the functions of ASIDE do not count."""
    names = set()
    for path in CODE.rglob('*.py'):
        for function in ast.walk(ast.parse(path.read_text(encoding='utf8'))):
            if isinstance(function, ast.FunctionDef) and not is_aside(function.name):
                for node in ast.walk(function):
                    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                        names.add(node.attr)
                    elif isinstance(node, ast.Call):  # as in getattr(options, name)
                        names |= {part.value for part in node.args if isinstance(part, ast.Constant)}
    return names
