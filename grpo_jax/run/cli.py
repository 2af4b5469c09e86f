"""What all commands share: flags, --help, loading a config, exit messages and exit statuses."""

from collections.abc import Callable
import contextlib
import gc
import os
import re
import sys
import textwrap
import threading
import time
from typing import Any

from absl import app, flags
import jax
from ml_collections import config_flags

from grpo_jax import coming_from, ranges
from grpo_jax.errors import INTERRUPTED, NO_VALUE, BadInput, CannotWrite, Stopped
from grpo_jax.hosts import buckets, processes
from grpo_jax.run import config_file, console, signals
from grpo_jax.run.steering import Steering
from grpo_jax.sharding import compiled

FOLDERS = ('workdir', 'branch', 'out', 'folder', 'other', 'cache', 'to')  # flags whose value is a local folder
# jax caches programs that take at least so many seconds to compile; its default of 1 s leaves out dozens of programs
# that the first step needs. The environment variable, if set, wins
CACHE_FROM, CACHED_FROM = 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', 0.1
LEAVE_SECONDS = 30  # how long the command waits at its end for threads that still run
LONGEST = 1000  # characters of a library's error message about the command line
MISSING = re.compile(r'Flag (--\w+) must have a value other than None')  # absl's words for a flag that must be given


def define_flags(workdir=True, required=True):
    """Defines the flags --config=NAME[:PRESET], with overrides like --config.steps=10, --strict and --workdir.

    workdir: whether --workdir is defined too; required: whether --config and --workdir must be given.
    """
    config_flags.DEFINE_config_file(
        'config',
        None,
        'NAME[:PRESET], the name of an experiment in configs/, or a file; the preset chooses the algorithm. '
        '--config.KEY=VALUE changes a key.',
    )
    flags.FLAGS['config'].parser = config_file.Parser()
    if required:
        flags.mark_flag_as_required('config')
    flags.DEFINE_bool('strict', False, 'Stop at the first malformed row of the data: config.data.strict.')
    if workdir:
        flags.DEFINE_string('workdir', None, 'Folder of the run; an existing one is continued.', required=required)


def define_steering():
    """Defines --amend and --branch=DIR, which continue a run with another config."""
    flags.DEFINE_bool('amend', False, "Go on although amendable keys have changed, and record it in the run's events.")
    flags.DEFINE_string('branch', '', "New folder of a run that begins from WORKDIR's newest checkpoint, or goes on.")


def read_steering() -> Steering:
    """The Steering of the flags --amend, --branch and --config.KEY."""
    given = config_flags.get_override_values(flags.FLAGS['config'])
    return Steering(flags.FLAGS.amend, flags.FLAGS.branch, frozenset(given))


def define_trust():
    """Defines --trust, with which a command runs the Python files that the workdir's config names."""
    flags.DEFINE_bool(
        'trust', False, "Run the Python files that the workdir's own config.json names: its rewards and data sets."
    )


def define_step():
    """Defines --step=N, which chooses a checkpoint of --workdir."""
    flags.DEFINE_integer('step', None, 'Step of the checkpoint; the newest without it.', lower_bound=0)


def define_section(name: str, declared: Callable):
    """Defines a flag --config.NAME.KEY for each number of a section, if the command line has no --config.

    The flags change a recorded config for one command; with --config, its own parser defines them. name: the section;
    declared: the section's options type.
    """
    if any(re.match('--?config=|--?config$', text) for text in sys.argv):
        return
    for key, parameter in ranges.keys_of(declared).items():
        define = flags.DEFINE_integer if isinstance(parameter.default, int) else flags.DEFINE_float
        define(f'config.{name}.{key}', None, f"{key} of the run's config.{name}, for this command.")


def read_section(name: str) -> dict[str, Any]:
    """{key: value} of the section's flags, from define_section, that the command line gives. name: the section."""
    prefix = f'config.{name}.'
    values = {flag: flags.FLAGS[flag].value for flag in flags.FLAGS if flag.startswith(prefix)}
    return {flag.removeprefix(prefix): value for flag, value in values.items() if value is not None}


def parse_steps(text: str | None) -> tuple[int, int] | None:
    """(first step, last step) of --profile=FIRST:LAST; None without it. Raises BadInput unless FIRST <= LAST."""
    if text is None:
        return None
    first, _, last = text.partition(':')
    if not (first.isdigit() and last.isdigit() and int(first) <= int(last)):
        raise BadInput('--profile', text, 'is not FIRST:LAST; name two steps, the earlier one first, like 3:5')
    return int(first), int(last)


def run(main):
    """Parses the command line with absl, connects the processes that it names, and runs main().

    main: a function without arguments. With --help only the help text is printed. An error of errors.py ends the
    process with a line for each thing that is wrong and the error's status, a signal during a run ends it with status
    42, a second one with 128 + its number, Ctrl-C elsewhere with status 130.
    """
    console.install_for_command()
    gc.freeze()  # what imports made stays; Python's collector would look at it again and again, 6 % of a warm start
    if CACHE_FROM not in os.environ:
        jax.config.update(CACHE_FROM.lower(), CACHED_FROM)
    _define_processes()
    if {'-h', '--help'} & {*sys.argv[1:]}:
        print(help_text(sys.modules['__main__'].__doc__ or ''))
        return

    def guarded(_):
        """Runs main() between processes and signals, and exits with the status of an error."""
        status = 1
        try:
            for name in FOLDERS:
                if name in flags.FLAGS:
                    buckets.refuse(f'--{name}', flags.FLAGS[name].value)
            place = [flags.FLAGS[name].value for name in ('coordinator', 'processes', 'process')]
            with signals.listening(), processes.session(*place, end=signals.stop_now):
                main()
            status = 0
        except (BadInput, CannotWrite, processes.OtherFailed) as error:
            status = error.status
            text = _error_text(error)
            if processes.has_others():  # an ordinary exit waits for the other processes, and aborts
                signals.stop_now(text, error.status)
            _print_last(text)
            sys.exit(error.status)
        except Stopped as stop:
            status = stop.status
            text = console.one_line(str(stop))
            if compiled.is_compiling() and not processes.has_others():  # an ordinary exit waits for the compiler
                signals.stop_now(text, stop.status)
            _print_last(text)
            sys.exit(stop.status)
        finally:
            threading.Thread(target=_leave, args=[status], daemon=True).start()

    try:
        app.run(guarded, flags_parser=_parse)
    except KeyboardInterrupt:
        signals.stop_now('stopped by Ctrl-C', INTERRUPTED)


def _leave(status):
    """Ends the process with `status` if a thread, say of a reward, still runs LEAVE_SECONDS after the main thread."""
    threading.main_thread().join()
    time.sleep(LEAVE_SECONDS)
    signals.stop_now('a thread, of a reward or of a library, still runs; the command ends without it', status)


def _error_text(error):
    """The lines of an error: one for each thing that it refuses."""
    return '\n'.join(f'error: {console.one_line(str(one))}' for one in getattr(error, 'refusals', [error]))


def _print_last(text):
    with contextlib.suppress(OSError):  # the terminal is gone
        print(text, file=sys.stderr, flush=True)


def _define_processes():
    """Defines --coordinator, --processes and --process, which start several processes by hand; TPU pods need none."""
    flags.DEFINE_string(
        'coordinator',
        os.environ.get('JAX_COORDINATOR_ADDRESS'),
        'HOST:PORT of process 0, which listens there; or JAX_COORDINATOR_ADDRESS. Not needed on TPU pods.',
    )
    for name, variable, text in [
        ('processes', 'JAX_NUM_PROCESSES', 'How many processes train as one'),
        ('process', 'JAX_PROCESS_ID', 'Which of them this is, counted from 0'),
    ]:
        flags.DEFINE_integer(name, os.environ.get(variable), f'{text}; or {variable}.')


def help_text(purpose: str) -> str:
    """The text of --help: the command's purpose and examples, then its own flags with their defaults."""
    own_flags = [
        flag
        for module, defined in flags.FLAGS.flags_by_module_dict().items()
        if not module.startswith(('absl', 'jax', 'orbax', 'tensor', 'etils', 'chex'))
        for flag in defined
    ]
    lines = [textwrap.dedent(purpose).strip(), '', 'Flags:']
    for flag in own_flags:
        default = '' if flag.default in (None, '', False) else f' (default: {flag.default})'
        lines += textwrap.wrap(
            f'--{flag.name}: {flag.help}{default}', 100, initial_indent='  ', subsequent_indent='      '
        )
    return '\n'.join(lines)


def _name_flag(name, value=None):
    """Says what the user of an unknown flag, or a word that is no flag, may have meant; value: the text after '='."""
    if name.startswith('config.'):  # without --config: else ml_collections knows the flag
        return 'a recorded run keeps its settings, except for keys in --help; to change others, give --config too'
    return coming_from.explain(name, value) or 'write --config.KEY=VALUE; --help lists the flags'


def _unknown_lines(error, argv):
    """Yields an error line for each undefined flag in argv; error: absl's UnrecognizedFlagError about the first one."""
    given = [text.lstrip('-').partition('=') for text in argv[1:] if text[:1] == '-' and text.strip('-')[:1].isalpha()]
    unknown = [flag for flag in given if not {flag[0], flag[0].removeprefix('no')} & {*flags.FLAGS}]
    for name, _, value in unknown:
        text = str(error) if name == error.flagname else f"Unknown command line flag '{name}'"
        yield f'error: {console.one_line(text)}; {_name_flag(name, value)}'


def _parse(argv):
    """Parses the command line; returns its positional arguments, or exits with status 2 for a wrong flag."""
    try:
        arguments = flags.FLAGS(argv)
        if arguments[1:] and 'config' in flags.FLAGS:
            raise BadInput(arguments[1], NO_VALUE, f'is no flag; {_name_flag(*arguments[1].split("=", 1))}')
        config = flags.FLAGS.config if 'config' in flags.FLAGS else None
        if config is not None:
            config.lock()  # ml_collections reports a config file that failed to load only at its first use
            if flags.FLAGS.strict:
                config.data.strict = True
                overrides = config_flags.get_override_values(flags.FLAGS['config'])  # which a sweep reads
                overrides['data.strict'] = True
        return arguments
    except BadInput as error:
        text = _error_text(error)
    except flags.UnrecognizedFlagError as error:
        text = '\n'.join(_unknown_lines(error, argv))
    except Exception as error:  # absl and ml_collections raise many kinds of errors
        missing = MISSING.findall(str(error))
        message = f'{" and ".join(missing)} must be given' if missing else console.one_line(str(error))[:LONGEST]
        text = f'error: {message or type(error).__name__}'
    print(text, file=sys.stderr)
    sys.exit(2)
