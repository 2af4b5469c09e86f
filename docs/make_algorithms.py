"""Writes docs/algorithms.md: tables read from the presets and the pieces, around the text of algorithms_notes.md.

python docs/make_algorithms.py
"""

import importlib
import inspect
import os
import re
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)  # for configs, which is not installed

from grpo_jax import algorithms as entry  # noqa: E402
from grpo_jax.algorithms import pieces  # noqa: E402
from grpo_jax.algorithms.algorithm import MODULES  # noqa: E402
from grpo_jax.tools import sweep  # noqa: E402

TARGET = os.path.join(ROOT, 'docs', 'algorithms.md')
NOTES = os.path.join(ROOT, 'docs', 'algorithms_notes.md')

# preset -> (evidence, when to use it); the grades are explained in algorithms_notes.md. A preset needs no entry.
ADVICE = {
    'cispo': ('P', 'several updates a rollout, where a clip would silence rare tokens'),
    'clip_cov': ('S', 'the entropy collapses early'),
    'dapo': ('P', 'long reasoning, many prompts all right or all wrong'),
    'deepseek_r1': ('P', 'to reproduce R1; many updates a rollout'),
    'deepseek_v32': ('P', 'a KL is wanted, and rollouts are stale'),
    'default_rlvr': ('R', 'rewards that verify, and no reason for another preset'),
    'dpo': ('R', 'preferences in pairs; nothing is sampled from the policy that learns'),
    'dppo': ('R', 'asynchronous rollouts'),
    'dr_grpo': ('P', 'wrong answers grow ever longer; the plainest baseline'),
    'entropy_8020': ('S', 'an ablation of dapo'),
    'gmpo': ('S', 'single tokens with extreme ratios upset grpo'),
    'gpg': ('S', 'one update a rollout, the least machinery'),
    'grpo': ('P', 'to compare with the literature'),
    'grpo_iterative': ('S', 'long runs with a KL'),
    'grpo_lambda': ('S', 'answers are right and too long'),
    'grpo_process': ('S', 'a reward for steps is at hand'),
    'gspo': ('P', 'mixtures of experts, several updates a rollout'),
    'gspo_token': ('S', 'gspo with advantages by token'),
    'gtpo': ('S', 'format tokens shared by good and bad answers get lost'),
    'kl_cov': ('S', 'the entropy collapses early, without a clip'),
    'lite_ppo': ('R', 'base models, rewards of few values'),
    'llds_grpo': ('S', 'the likelihood of right answers falls; several updates a rollout'),
    'm2po': ('S', 'very stale rollouts'),
    'maxrl': ('S', 'hard prompts matter most; rewards 0 or 1'),
    'olmo3_like': ('P', 'to compare with open-instruct'),
    'online_rft': ('S', 'a baseline without negative signal'),
    'opd': ('P', 'a stronger model with the same tokenizer is at hand'),
    'opd_reward': ('R', 'as opd, and rewards tell what the teacher does not know'),
    'opo': ('S', 'exactly one update a rollout'),
    'pkpo': ('S', 'pass@k is the aim, not pass@1'),
    'ppo': ('P', 'rewards by token, learned rewards; memory for a critic'),
    'reinforce': ('R', 'a baseline; rewards that are centred already'),
    'reinforce_moving': ('S', 'one completion a prompt; to compare history with groups'),
    'reinforce_pp': ('R', 'one completion a prompt'),
    'reinforce_pp_baseline': ('R', 'few prompts a step, uneven groups'),
    'rft': ('P', 'a first stage: imitate what was right'),
    'rloo': ('R', 'small groups, short completions'),
    'sapo': ('S', 'the clip wastes tokens; several updates a rollout'),
    'scalerl': ('R', 'large budgets, stale rollouts'),
    'sft': ('P', 'demonstrations, as a baseline through the same code'),
    'vapo': ('S', 'long reasoning with a critic'),
    'xrpo': ('S', 'rare right answers paid more; with `allocation=uncertainty` and `seeding` the whole method'),
}


def text():
    """The whole page."""
    with open(NOTES, encoding='utf8') as file:
        page = file.read()
    for name, tables in {'advice': advice(), 'composition': composition(), 'pieces': all_pieces()}.items():
        page = page.replace(f'<!-- {name} -->', tables)
    return f'<!-- Written by docs/make_algorithms.py, from presets, pieces and algorithms_notes.md. -->\n\n{page}'


def advice():
    """Table of what each preset is, where it comes from, how well it is supported and when to take it."""
    return table(
        'preset | what | paper | evidence | take it for',
        [
            (f'`{name}`', _headline(_preset(name).__doc__), _papers(_preset(name).__doc__), *ADVICE.get(name, ('', '')))
            for name in sweep.choose_presets('all')
        ],
    )


def composition():
    """Table of the pieces and numbers of each preset, from its config section."""
    rows = []
    for name in sweep.choose_presets('all'):
        config = importlib.import_module('grpo_jax.configs.default').get_config(name)
        section, collection = config.algorithm, config.collection
        method = entry.make(section, collection)
        ratio = _piece('ratio', section) if 'ratio' in method.reads else '(unused)'
        if section.ratio_base != 'old' and 'ratio' in method.reads:
            ratio += f' to {section.ratio_base}'
        others = [
            _piece(key, section) for key in ('correction', 'selection') if section[key] not in ('none', 'all_tokens')
        ]
        others += [_code('regularizers', regularizer, section) for regularizer in section.regularizers]
        placement = section.kl_placement.replace('_', ' by ')
        divergence = 'none' if section.kl == 'none' else f'`{section.kl}` in {placement}, {section.kl_coef:g}'
        reference = 'none' if not method.keeps_reference else collection.reference
        if reference == 'hard':
            reference = f'renewed every {collection.reference_every}'
        rows.append(
            (
                f'`{name}`',
                collection.source,
                _piece('advantage', section),
                ratio,
                _piece('surrogate', section),
                divergence,
                ', '.join(others),
                _piece('weights', section),
                collection.dead_groups,
                reference,
            )
        )
    return table(
        'preset | samples of | advantage | ratio | surrogate | KL | correction, selection, regularizers '
        '| weights | dead groups | reference',
        rows,
    )


def all_pieces():
    """A table for each module: name, formula, source and numbers of its pieces."""
    tables = []
    for key, module in MODULES.items():
        rows = []
        for name, piece in sorted(pieces.list_pieces(module).items()):
            numbers = ', '.join(f'`{n}` {_number(value)}'.strip() for n, value in _numbers(piece).items())
            rows.append((f'`{name}`', *_split(piece.__doc__), numbers))
        tables.append(
            f'**`algorithm.{key}`**, in grpo_jax/algorithms/{os.path.basename(module.__file__)}: '
            f'{_plain(_paragraph(module.__doc__))}\n\n'
            + table('name | formula | source | its keys, with defaults', rows)
        )
    return '\n\n'.join(tables)


def table(headings, rows):
    """A Markdown table; headings are separated by bars."""
    lines = [[heading.strip() for heading in headings.split('|')]]
    lines.append(['---'] * len(lines[0]))
    lines += [[cell.replace('|', '\\|') for cell in row] for row in rows]
    return '\n'.join(f'| {" | ".join(line)} |' for line in lines)


def _preset(name):
    return importlib.import_module(f'grpo_jax.configs.algorithms.{name}')


def _paragraph(docstring):
    """The first paragraph on one line; '' without a docstring."""
    return ' '.join(inspect.cleandoc(docstring or '').split('\n\n')[0].split())


def _headline(docstring):
    """What stands after the name and the source in a preset's first paragraph."""
    head, _, rest = _without_parentheses(_paragraph(docstring)).partition(':')
    return _plain((rest or head).strip().rstrip('.'))


def _without_parentheses(line):
    return re.sub(r' *\([^()]*\)', '', line)


def _papers(docstring):
    """Links to the papers that a preset's first paragraph names first, or the words in its parentheses."""
    source = re.search(r'\(([^()]*)\)', _paragraph(docstring))
    if not source:
        return ''
    ids = re.search(r'arXiv ((?:\d{4}\.\d{5}(?:, )?)+)', source[1])
    return ', '.join(_link(number) for number in ids[1].strip(', ').split(', ')) if ids else source[1]


def _split(docstring):
    """(formula, source) of a piece: its first paragraph, and what names arXiv, an address or an equation."""
    line = _paragraph(docstring)
    source = re.search(r' *\(((?:arXiv|https?://|eq\.)[^()]*)\)', line)
    formula = line[: source.start()] + line[source.end() :] if source else line
    # a source that does not fit on the first line stands further down
    source = source or re.search(r'((arXiv [^()]*))\)', ' '.join((docstring or '').split()))
    if not source:
        return _plain(formula.rstrip('.')), ''
    linked = re.sub(r'https?://\S+', lambda address: f'[{address[0].split("/")[2]}]({address[0]})', source[1])
    linked = re.sub(r'(?:arXiv )?(\d{4}\.\d{5})', lambda number: _link(number[1]), linked)
    return _plain(formula.rstrip('.')), linked


def _link(number):
    return f'[{number}](https://arxiv.org/abs/{number})'


def _plain(line):
    """The line with what Markdown would read as emphasis or a tag taken literally."""
    return re.sub(r'([*<])', r'\\\1', line)


def _piece(key, section):
    return _code(key, section[key], section)


def _code(key, name, section):
    """A piece's name and its numbers in the order of its keys."""
    numbers = [
        _number(section[n]) for n in _numbers(pieces.list_pieces(MODULES[key])[name]) if not n.startswith('std_')
    ]
    return ' '.join([f'`{name}`', ' / '.join(numbers)]).strip()


def _numbers(piece):
    """{config key: default} of a piece: the numbers of the algorithm that it reads, then its own."""
    fields = entry.Algorithm._field_defaults
    read = {name: fields[name] for name in pieces.reads(piece) if name in fields.keys() - MODULES.keys()}
    return read | {n: '' if value is inspect.Parameter.empty else value for n, value in pieces.numbers(piece).items()}


def _number(value):
    return f'{value:g}' if isinstance(value, float) else str(value)


if __name__ == '__main__':
    with open(TARGET, 'w', encoding='utf8') as target:
        target.write(text())
