"""Runs the commands by name: `grpo-jax COMMAND` and `python -m grpo_jax COMMAND`."""

import ast
import os
import runpy
import sys

from grpo_jax import PACKAGE

CORE = ('train', 'supervised', 'reward_model', 'evaluate', 'sample')  # also `python -m grpo_jax.COMMAND`
TOOLS = (
    *('sweep', 'iterate', 'pipeline', 'report', 'show', 'export', 'prepare', 'preflight'),
    *('replay_bad', 'provenance'),
)
COMMANDS = CORE + TOOLS


def main() -> None:
    """Runs the command named by the first argument; without an argument, lists the commands."""
    name = sys.argv[1] if len(sys.argv) > 1 else '--help'
    if name in ('-h', '--help', 'help'):
        print(overview())
    elif name in COMMANDS:
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())  # as with python -m; config files may import their neighbours
        del sys.argv[1]
        runpy.run_module(module_of(name), run_name='__main__', alter_sys=True)
    else:
        print(
            f'error: command = {name!r}: there is no such command; choose one of {", ".join(COMMANDS)}', file=sys.stderr
        )
        sys.exit(2)


def module_of(name: str) -> str:
    """Returns the module of a command."""
    return f'grpo_jax.{name}' if name in CORE else f'grpo_jax.tools.{name}'


def overview() -> str:
    """Returns the list of commands, each with the first paragraph of its module's docstring."""
    purposes = (read_docstring(name).partition('\n\n')[0].replace('\n', ' ') for name in COMMANDS)
    lines = [f'  {name:<13} {purpose}' for name, purpose in zip(COMMANDS, purposes, strict=True)]
    return '\n'.join(['grpo-jax COMMAND [FLAGS]; COMMAND --help has its flags and examples.', '', *lines])


def read_docstring(name: str) -> str:
    """Returns the docstring of a command's module without importing it."""
    with open(path_of(name), encoding='utf8') as file:
        return ast.get_docstring(ast.parse(file.read())) or ''


def path_of(name: str) -> str:
    """Returns the path of a command's file."""
    place = os.path.join(PACKAGE, *module_of(name).split('.')[1:])
    return os.path.join(place, '__main__.py') if os.path.isdir(place) else f'{place}.py'


if __name__ == '__main__':
    main()
