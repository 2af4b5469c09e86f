"""The examples of the pages: blocks of Markdown with their marks, and commands, parsed or run in this process."""

import contextlib
import importlib
import os
import re
import runpy
import shlex
import sys
from typing import NamedTuple
from unittest import mock

from absl import flags

from grpo_jax import __main__ as commands
from grpo_jax import algorithms, rewards
from grpo_jax.run import cli
from grpo_jax.run.open import make_algorithm
from grpo_jax.run.settings import Settings
from tests import tiny_run

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# every page of Markdown that a reader meets, but the notes from which two of them are made
PAGES = [
    *(
        'README.md',
        'AGENTS.md',
        'CONTRIBUTING.md',
        'CHANGELOG.md',
        'launch/README.md',
        'launch/gke/README.md',
        'benchmarks/README.md',
    ),
    *sorted(
        f'docs/{name}'
        for name in os.listdir(os.path.join(ROOT, 'docs'))
        if name.endswith('.md') and not name.endswith('_notes.md')
    ),
]
FENCE = re.compile(
    r'(?:^<!-- (?P<mark>[^\n]*) -->\n)?^```(?P<language>[^\n]*)\n(?P<text>.*?)^```$', re.DOTALL | re.MULTILINE
)


class Block(NamedTuple):
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    mark: str  # 'needs: tpu', 'file: NAME', 'append: PATH', or '' for none
    text: str


def read(path):
    """The text of a file of the repository."""
    with open(os.path.join(ROOT, path), encoding='utf8') as file:
        return file.read()


def blocks(page, language):
    """The blocks of a page in a language, in order."""
    text = read(page)
    for match in FENCE.finditer(text):
        if match['language'] == language:
            line = text.count('\n', 0, match.start('text')) + 1
            yield Block(page, line, language, match['mark'] or '', match['text'])


def shell_lines(text):
    """The words of each line of a shell block: without comments, brackets and the dots of "and so on"."""
    for line in text.replace('\\\n', ' ').splitlines():
        words = [word for word in shlex.split(line.replace('[', '').replace(']', ''), comments=True) if word != '...']
        if words:
            yield words


def arguments(words):
    """(command, its flags) of a line that starts a command of grpo_jax, or hands its flags on to train; else None."""
    if words[:3] == ['python', '-m', 'grpo_jax']:
        return words[3], [word for word in words[4:] if word != '&']
    if words[:2] == ['python', '-m'] and words[2].startswith('grpo_jax.'):
        return words[2].removeprefix('grpo_jax.'), [word for word in words[3:] if word != '&']
    if '--' in words:
        return 'train', [*words[words.index('--') + 1 :], '--workdir=handed_on']
    return None


@contextlib.contextmanager
def parsed(command, own):
    """The names of a command's module, with its flags parsed and its config checked; afterwards there are no flags.

    SystemExit for a flag that the command does not have, BadInput for a config that cannot work.
    """
    before, path = set(flags.FLAGS), commands.path_of(command)
    argv = [path, *(word.replace('$i', '0') for word in own)]
    try:
        with mock.patch.object(sys, 'argv', argv), mock.patch.object(cli, 'run'):
            module = runpy.run_path(path, run_name='__main__')
            cli._define_processes()
            cli._parse(argv)
            if 'config' in flags.FLAGS and flags.FLAGS.config is not None:
                Settings.from_config(flags.FLAGS.config)
                algorithms.make(flags.FLAGS.config.algorithm, flags.FLAGS.config.collection)
            yield module
    finally:
        for name in set(flags.FLAGS) - before:
            delattr(flags.FLAGS, name)
        flags.FLAGS.unparse_flags()


def unread_flags():
    """The keys that the flags of a parsed training give, and that nothing in it reads."""
    config = flags.FLAGS.config
    settings = Settings.from_config(config)
    functions = rewards.build(settings.rewards, settings.sampling.max_tokens)
    return cli.read_steering().flags & settings.find_unread(make_algorithm(config), functions).keys()


def shrink(config, model, cold_start=0):
    """Makes a config of the demo tiny in place, but for its algorithm and rewards: a step of the model in a folder."""
    # as many samples as completions of a prompt: one sampler for both
    small = tiny_run.config(steps=1, supervised__updates=cold_start, evaluation__prompts=2, evaluation__samples=4)
    with config.unlocked():
        for name in ('steps', 'data', 'rollout', 'supervised', 'evaluation'):
            config[name] = small[name]
        config.model.path = model


def write_files(page, folder):
    """Writes the blocks of a page that are files, and returns the packages of grpo_jax that are to look there."""
    packages = []
    for block in (*blocks(page, 'python'), *blocks(page, 'jsonl')):
        if block.mark.startswith('file: '):
            path = os.path.join(folder, block.mark.removeprefix('file: '))
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, 'w', encoding='utf8') as file:
                file.write(block.text)
            packages.append(os.path.dirname(block.mark.removeprefix('file: ')))
    return sorted({package for package in packages if package})


@contextlib.contextmanager
def appended(block):
    """Puts a block at the end of the module that its mark names, in this process; afterwards it is gone."""
    path = block.mark.removeprefix('append: ')
    module = importlib.import_module(path.removesuffix('.py').replace('/', '.'))
    names = set(vars(module))
    tables = [(value, dict(value)) for name, value in vars(module).items() if name.isupper() and type(value) is dict]
    try:
        exec(compile(block.text, path, 'exec'), vars(module))
        yield
    finally:
        for name in set(vars(module)) - names:
            delattr(module, name)
        for table, content in tables:
            table.clear()
            table.update(content)
