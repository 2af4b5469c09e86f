"""Records which keys of a config a run reads: fields of options that code takes, where it checks nothing."""

from collections import defaultdict
import contextlib
import inspect
import sys

from grpo_jax import ranges
from grpo_jax.learner.options import Optimization
from grpo_jax.run.settings import Keys

# functions that look at settings to refuse or to describe them, and do not act on them
ASIDE = ('check', '_check', 'from_config', 'refuse', '_refuse', 'warn', 'advise', 'recorded', 'to_section')


def fields(declared=Keys, prefix='', keys=None):
    """{(options type, field): dotted keys} of all options types that Keys holds."""
    keys = defaultdict(list) if keys is None else keys
    for name, parameter in inspect.signature(declared).parameters.items():
        place, options = ranges._mark(parameter.annotation, ranges.Place), ranges.type_of(parameter.annotation)
        if options:
            fields(options, prefix if place is ranges.Place.HERE else f'{prefix}{name}.', keys)
        elif place is None:
            keys[declared, name].append(f'{prefix}{name}')
    return keys


@contextlib.contextmanager
def recorded():
    """Yields {dotted key: {reader}}, which fills while code runs."""
    seen, undo = defaultdict(set), []

    def watch(declared, field, keys):
        own = vars(declared)[field]

        def read(self):
            frame = sys._getframe(1)
            name = frame.f_code.co_name
            if not name.startswith(ASIDE):
                for key in keys:
                    seen[key].add(f'{frame.f_code.co_filename.rpartition("grpo_jax/")[2]}:{name}')
            return own.__get__(self)

        setattr(declared, field, property(read))
        undo.append((declared, field, own))

    for (declared, field), keys in fields().items():
        if declared is not Optimization and field in getattr(declared, '_fields', ()):
            watch(declared, field, keys)
    make = vars(Optimization)['from_config']

    def named(cls, section, name='optimizer'):
        options = make.__get__(None, Optimization)(section, name)

        def reader(field):
            def read(self):
                seen[f'{name}.{field}'].add(sys._getframe(1).f_code.co_name)
                return tuple.__getitem__(self, Optimization._fields.index(field))

            return property(read)

        kind = type('Optimization', (Optimization,), {f: reader(f) for f in Optimization._fields})
        return kind(*options)

    Optimization.from_config = classmethod(named)
    try:
        yield seen
    finally:
        for declared, field, own in undo:
            setattr(declared, field, own)
        Optimization.from_config = make
