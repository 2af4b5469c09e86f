"""Remedies of diagnoses: which of them act, since a run would take their flags and read the new values; as commands."""

import ast
from collections.abc import Callable, Mapping, Sequence
import copy
import functools
import itertools
import os
import re
import shlex
from typing import Any, NamedTuple

import jax

from grpo_jax import algorithms
from grpo_jax.algorithms import Algorithm, pieces
from grpo_jax.collect.options import READ_FROM_DATA, CollectOptions
from grpo_jax.errors import BadInput
from grpo_jax.rewards import RewardOptions

FLAG = re.compile(r'--config\.([\w.]+)=(.*)', re.DOTALL)


class Limits(NamedTuple):
    """What a run's model and tokenizer allow, which its config does not say."""

    columns: int = 0  # tokens of prompt and completion for which the model was made; 0: unknown
    chat_template: bool = True  # the tokenizer has one

    @classmethod
    def of(cls, columns: int, tokenizer: Any) -> 'Limits':
        """Returns the Limits of a run with this tokenizer; columns: its model's context, 0 for unknown."""
        return cls(columns, bool(getattr(tokenizer, 'chat_template', None)))


UNKNOWN = Limits()


def overrides(flags: str) -> dict[str, str]:
    """Returns {dotted key: text of its value} of the --config flags in a text."""
    return {match[1]: match[2] for word in shlex.split(flags) if (match := FLAG.fullmatch(word))}


def make_acts(config: Any, limits: Limits = UNKNOWN) -> Callable[[str], bool]:
    """Makes acts(flags) -> bool: whether a run of the config can start with the flags, and reads what they change.

    config: a ConfigDict, or the content of config.json. READ has the keys that some settings make inert; numbers of
    config.algorithm that no piece reads are refused by algorithms.make, as at the start of a run.
    """
    plain = config.to_dict() if hasattr(config, 'to_dict') else config

    @functools.cache  # a monitor that sees something asks at each step
    def acts(flags: str) -> bool:
        changed, values = copy.deepcopy(plain), overrides(flags)
        if not any([_set(changed, key, text) for key, text in values.items()]):  # a list: all of them are set
            return False
        try:
            algorithm = algorithms.make(plain['algorithm'], plain['collection'])
        except BadInput:  # train.run was given an algorithm, and this config makes none
            return True
        try:
            algorithm = algorithms.make(changed['algorithm'], changed['collection'])
            CollectOptions.from_config(
                changed['collection'],
                group_size=changed['rollout']['group_size'],
                corrected=algorithms.is_corrected(changed['algorithm']),
                reward_options=RewardOptions.from_config(changed['reward']),
            )
        except BadInput:
            return False
        return all(READ[key](changed, algorithm, limits) for key in values if key in READ)

    return acts


def command_with(remedy: str, workdir: str, words: Sequence[str]) -> str:
    """Returns the command that trains in workdir with a remedy's flags, to be pasted into a shell, or into a cell.

    words: the running command, like sys.orig_argv. Where they begin no command of this package, as in a notebook, the
    result is Python: assignments to `config` and a call of train.run. Where they do not name workdir, as in a sweep, it
    is ''. NEW and DIR become a name beside workdir that no folder has.
    """
    if remedy and not is_command(words):
        return _as_python(remedy, os.path.normpath(workdir))
    named = {word.partition('=')[2] or value for word, value in zip(words, [*words[1:], ''], strict=True)
             if _flag_name(word) in ('workdir', 'branch')}  # fmt: skip
    if not remedy or workdir not in named:
        return ''
    folder = os.path.normpath(workdir)
    new = _new_folder(folder)
    added = [word.replace('=NEW', f'={new}').replace('=DIR', f'={new}') for word in shlex.split(remedy)]
    if not any(word.startswith('--workdir=') for word in added):
        added.insert(0, f'--workdir={folder}')
    replaced = {_flag_name(word) for word in added} | {'workdir', 'branch', 'amend', 'profile'}
    kept, rest = [], iter(words)
    for word in rest:
        if _flag_name(word) not in replaced:
            kept.append(word)
        elif '=' not in word and _flag_name(word) != 'amend':
            next(rest)  # the flag's value
    return shlex.join([*kept, *added])


def is_command(words: Sequence[str]) -> bool:
    """Whether words, like sys.orig_argv, begin a command of this package; in a notebook or a script they do not."""
    module = words[2] if len(words) > 2 and words[1] == '-m' else ''
    return module.split('.')[0] == 'grpo_jax' or any(os.path.basename(word) == 'grpo-jax' for word in words[:2])


def _as_python(remedy, folder):
    """A remedy in Python: assignments to `config`, then the train.run that goes on in `folder` or begins beside it."""
    lines, new = [], _new_folder(folder)
    for key, text in overrides(remedy).items():
        try:
            lines.append(f'config.{key} = {ast.literal_eval(text)!r}')
        except (SyntaxError, ValueError):
            lines.append(f'config.{key} = {text!r}')
    where, steering = repr(new if '--workdir=NEW' in remedy else folder), ''
    if '--amend' in remedy:
        steering = ', steering=Steering(amend=True)'
    elif '--branch=DIR' in remedy:
        steering = f', steering=Steering(branch={new!r})'
    begin = ['from grpo_jax.run.steering import Steering'] * bool(steering)
    return '; '.join([*begin, *lines, f'train.run(config, {where}{steering})'])


def _new_folder(folder):
    """A path beside `folder`, its path and a number, at which nothing lies yet."""
    return next(name for count in itertools.count(2) if not os.path.lexists(name := f'{folder}_{count}'))


def _flag_name(word):
    """The flag's name in a word like --name or --name=value; '' for a word that is no flag."""
    return word.partition('=')[0].lstrip('-') if word.startswith('-') else ''


def find_amended(events: Sequence[Mapping[str, Any]]) -> dict[int, list[str]]:
    """Returns {step: monitors whose remedies --amend applied at this step}. events: rows of events.jsonl."""
    named, amended = {}, {}
    for row in events:
        if row['event'] == 'diagnosis':
            named |= dict.fromkeys(overrides(row['remedy']), row['monitor'])
        elif row['event'] == 'amended' and row['key'] in named:
            monitors = amended.setdefault(row['step'], [])
            monitors += [named[row['key']]] * (named[row['key']] not in monitors)
    return amended


def _set(config, key, text):
    """Sets a config's dotted key to the value of a flag's text; returns whether that changes the value."""
    *path, name = key.split('.')
    for part in path:
        config = config[part]
    old = config[name]
    new = text if isinstance(old, str) else type(old)(ast.literal_eval(text))
    config[name] = new
    return new != old


def _is_sampled(config, algorithm, limits):
    """Whether completions are sampled, and not read from the data."""
    return config['collection']['source'] not in READ_FROM_DATA


def _reads_total(config, algorithm, limits):
    """Whether the run learns from the total reward, and not from parts or verdicts alone."""
    total = {'rewards', 'token_rewards'} & algorithm.advantage_reads or config['reward']['steps_with_outcome']
    learns = bool(total) and pieces.name_of(algorithm.advantage) != 'zeros'  # which leaves all to a teacher
    return learns and _is_sampled(config, algorithm, limits)


# keys of remedies that some settings make inert -> whether a run reads them: (changed config, its Algorithm, Limits)
READ: Mapping[str, Callable[[Any, Algorithm, Limits], bool]] = {
    # the weight of a single part cancels out where advantages are divided by a spread
    'reward.parts': lambda config, algorithm, limits: (
        len(config['reward']['parts']) > 1
        and (_reads_total(config, algorithm, limits) or 'parts' in algorithm.advantage_reads)
    ),
    # by outcome, groups that are all wrong are dead whatever their truncation costs
    'reward.truncated_reward': lambda config, algorithm, limits: (
        _reads_total(config, algorithm, limits) and config['collection']['gate'] != 'outcome'
    ),
    'reward.length_shaping': _reads_total,
    'collection.dead_groups': _is_sampled,
    'collection.max_age': lambda config, algorithm, limits: config['collection']['in_flight'] > 0,
    'rollout.group_size': _is_sampled,
    'rollout.max_tokens': lambda config, algorithm, limits: (
        not limits.columns or config['data']['max_prompt_tokens'] + config['rollout']['max_tokens'] <= limits.columns
    ),
    'rollout.kernels': lambda config, algorithm, limits: jax.default_backend() == 'tpu',
    'data.chat': lambda config, algorithm, limits: limits.chat_template or not config['data']['chat'],
    'algorithm.regularizers': lambda config, algorithm, limits: (
        'correct' not in algorithm.reads or bool(config['reward']['verifier'])
    ),
}
