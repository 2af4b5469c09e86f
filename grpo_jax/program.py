"""What the programs share: flags, loading a config, and exit status 2 for bad input."""
import logging
import os
import sys

from absl import app, flags
from ml_collections import config_flags

from grpo_jax.errors import BadInput

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def define_flags():
    """Defines --config=FILE[:PRESET], with overrides like --config.steps=10, and --workdir."""
    config_flags.DEFINE_config_file('config', None, 'Config file, with :PRESET to choose the algorithm.')
    flags.DEFINE_string('workdir', None, 'Folder of the run; an existing one is continued.')
    flags.mark_flags_as_required(['config', 'workdir'])


def run(main):
    """Runs main() after absl has read the command line; BadInput ends with its message and status 2."""
    logging.basicConfig(format='%(message)s', level=logging.WARNING)
    sys.path.insert(0, ROOT)  # config files import each other as configs.<name>

    def guarded(_):
        try:
            main()
        except BadInput as error:
            print(f'error: {error}', file=sys.stderr)
            sys.exit(2)

    app.run(guarded, flags_parser=_parse)


def _parse(argv):
    """Command-line flags, with status 2 and one line for whatever is wrong with them."""
    try:
        return flags.FLAGS(argv)
    except BadInput as error:
        message = str(error)
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError, IOError) as error:
        message = str(error).splitlines()[0] if str(error) else type(error).__name__
    print(f'error: {message}', file=sys.stderr)
    sys.exit(2)
