"""Tells whether a run fits TPUs or GPUs that are not here; for TPUs also its least time there, with the extra [tpu].

Exit status 0: it fits, perhaps on another mesh than training chooses, which the output names; 1: it does not, and the
output names settings that fit, if any was found; 2: bad input.

Examples:
    python -m grpo_jax preflight --config=gsm8k --topology=gpu:a100-40
    python -m grpo_jax preflight --config=gsm8k --topology=v5p:2x2x1 --slices=2 --search=4 --json=runs/preflight.json
"""

import os
import sys

# before jax is imported; see grpo_jax.tools.preflight.topology
os.environ |= {'TPU_SKIP_MDS_QUERY': '1', 'ALLOW_MULTIPLE_LIBTPU_LOAD': '1'}
os.environ |= {'TPU_WORKER_HOSTNAMES': 'localhost', 'TPU_ACCELERATOR_TYPE': 'v5litepod-4'}
os.environ |= {
    'XLA_PYTHON_CLIENT_PREALLOCATE': 'false',
    # if the user asks for it, a GPU of this machine compiles for GPUs
    'JAX_PLATFORMS': 'cuda'
    if os.environ.get('JAX_PLATFORMS') == 'cuda' and any(word.startswith('--topology=gpu:') for word in sys.argv)
    else 'cpu',
}

from collections.abc import Sequence
import json
import subprocess

from absl import flags
import jax

from grpo_jax.errors import BadInput
from grpo_jax.hosts import json_file
from grpo_jax.run import cli
from grpo_jax.tools.preflight import advice, compiler, plan, report, scale, search, topology, verdict


def run(planned: plan.PlannedRun, compiling: compiler.Compiling, *, output: str, sizes: Sequence[int]) -> int:
    """Compiles a plan and prints the verdict, with changes that fit when the plan does not. Returns the exit status.

    output: '', a file for JSON, or '-' to print JSON instead of tables; sizes: numbers of chips for scale.predict.
    """
    shown = output != '-'
    if shown:
        report.print_guess(planned)
    checked = verdict.compile_and_check(planned, compiling)
    if shown:
        report.print_verdict(checked)
    remedy = better = None
    if not checked.fits:
        remedy, better = advice.advise(checked, tell=_tell, compiling=compiling)
    content = report.as_json(checked)
    if checked.fits:
        content['train'] = advice.train_flags(planned, sys.argv)
    if remedy and better:
        content['train'] = advice.train_flags(planned, sys.argv, remedy)
        content['advice'] = {'settings': advice.candidate_flags(planned, remedy), 'verdict': report.as_json(better)}
    if sizes:
        content['scale'] = scale.predict(checked, sizes)
        if shown:
            scale.print_predictions(content['scale'])
    if shown and remedy and better:
        print(f'\nWith {advice.candidate_flags(planned, remedy)} it fits (compiled):')
        report.print_verdict(better, legend=False)
    elif shown and not checked.fits:
        adapters = '' if planned.run.settings.model.lora.rank else ', or adapters (--config.model.lora.rank=16)'
        print(f'\nNo setting was found that fits; take a larger topology or chip, or a smaller model{adapters}')
    if shown and 'train' in content:
        place = f' on {remedy.topology}' if remedy and remedy.topology != planned.topology else ''
        print(f'\nFlags to train with{place}: {content["train"]}')
    _write_json(content, output)
    return 0 if checked.fits or (planned.chosen and remedy and remedy.is_mesh(planned)) else 1


def run_search(
    planned: plan.PlannedRun, compiling: compiler.Compiling, *, output: str, most: int, host_seconds: float
) -> int:
    """Searches for the fastest setting: compiles the config's own and at most `most` others; prints the best first.

    output: as in run; host_seconds: the host's part of a step, added to each printed time. Returns the exit status: 0
    if the best setting fits, else 1.
    """
    rows = search.read_or_search(planned, compiling, most, _tell)
    split = search.describe_split(planned) if planned.run.sides is None else ''
    if output != '-':
        search.print_rows(planned, rows, host_seconds)
        print(split)
    content = {'topology': planned.topology, 'host_seconds': host_seconds, 'search': rows, 'split': split}
    _write_json(content, output)
    return 0 if rows[0]['fits'] else 1


def _write_json(content, output):
    """Writes JSON where --json says: to standard output for '-', to a file, or nowhere."""
    if output == '-':
        print(json.dumps(content, indent=1))
    elif output:
        json_file.write(output, content)


def _tell(text):
    """Prints a line of progress on standard error."""
    print(f'preflight: {text}', file=sys.stderr, flush=True)


def _run_in_child(name):
    """Runs the same command in a child process, and once more when a signal kills the child. Returns the exit status.

    name: of the topology; for GPUs that a CPU stands in for, the child has the flags topology.AS_ON_GPUS. libtpu 0.0.42
    sometimes dies when it compiles two programs at once. The second child compiles one at a time, and finds in the
    cache what the first has compiled.
    """
    environment = dict(os.environ)
    if topology.count_gpus(name) and environment['JAX_PLATFORMS'] == 'cpu':
        environment['XLA_FLAGS'] = f'{environment.get("XLA_FLAGS", "")} {topology.AS_ON_GPUS}'
    for at_once in (os.cpu_count(), 1):
        command = [sys.executable, '-m', 'grpo_jax', 'preflight', *sys.argv[1:], f'--at_once={at_once}']
        status = subprocess.call(command, env=environment)
        if status >= 0:
            return status
        _tell(f'the compiler died of signal {-status} with {at_once} programs at once')
    return 128 - status


def main() -> None:
    """Runs the command."""
    values = flags.FLAGS
    if not values.at_once:
        sys.exit(_run_in_child(values.topology))
    try:
        sizes = [int(n) for n in values.scale.split(',') if n]
    except ValueError:
        raise BadInput('--scale', values.scale, 'must be numbers of chips; write them like 8,16,64') from None
    # jax cannot read programs for absent devices back from its cache; this command keeps its own cache
    jax.config.update('jax_enable_compilation_cache', False)
    if (gpus := topology.count_gpus(values.topology)) and os.environ['JAX_PLATFORMS'] == 'cpu':
        jax.config.update('jax_num_cpu_devices', gpus)
        topology.stand_in()
    if gpus and (values.search or sizes or values.slices > 1):
        raise BadInput('--search, --scale, --slices', values.topology, 'are for TPUs; leave them out')
    planned = plan.make(values.config, values.topology, values.slices, values.mean_tokens)
    compiling = compiler.Compiling(os.path.expanduser(values.cache), compiler.print_progress, values.at_once)
    if values.search:
        status = run_search(
            planned, compiling, output=values.json, most=values.search, host_seconds=values.host_seconds
        )
    else:
        status = run(planned, compiling, output=values.json, sizes=sizes)
    sys.exit(status)


if __name__ == '__main__':
    cli.define_flags(workdir=False)
    flags.DEFINE_string(
        'topology', None, 'Devices to compile for, like v5e:4x4, v5litepod-16, gpu:a100-40 or gpu:24.', required=True
    )
    flags.DEFINE_integer('slices', 1, 'Slices of that topology.', lower_bound=1)
    flags.DEFINE_string('json', '', 'File for the figures; without one they are printed instead of the tables.')
    flags.DEFINE_string('cache', '~/.cache/grpo_jax/preflight', 'Folder of what was compiled before.')
    flags.DEFINE_string('scale', '', 'Numbers of chips to predict the step for, like 8,16,64,256,1024.')
    flags.DEFINE_integer('mean_tokens', 0, 'Mean length of completions in packed rows; 0: all at full length.', 0)
    flags.DEFINE_integer(
        'search', 0, "Settings to compile beside the config's own, for the least step; 0: no search.", 0
    )
    flags.DEFINE_float('host_seconds', 0.0, "The host's part of a step as a run measured it; --search adds it.", 0.0)
    flags.DEFINE_integer('at_once', 0, 'Programs to compile at a time; 0: one a core, and one by one when that fails.')
    sys.argv = ['--json=-' if argument == '--json' else argument for argument in sys.argv]
    cli.run(main)
