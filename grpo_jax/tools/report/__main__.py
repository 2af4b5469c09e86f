"""Writes the report of a run, or of several side by side: one page, which opens in a browser without any network.

Curves, evaluations with intervals, diagnoses, and a browser of the rollouts. WORKDIR is the folder of a run or of a
sweep; runs that differ by their seeds alone are drawn as one curve with a band.

Examples:
    python -m grpo_jax report --workdir=runs/arithmetic
    python -m grpo_jax report --workdir=runs/dapo --against=runs/grpo --watch
"""

from absl import flags

from grpo_jax.run import cli
from grpo_jax.tools.report.write import watch, write_report


def main() -> None:
    """The command."""
    values = flags.FLAGS
    folders = [values.workdir, *values.against]
    print(watch(folders) if values.watch else write_report(folders))


if __name__ == '__main__':
    flags.DEFINE_string(
        'workdir', None, 'Folder of the run, or of a sweep; the report is written into it.', required=True
    )
    flags.DEFINE_multi_string('against', [], 'Folder of another run to compare with; can be given several times.')
    flags.DEFINE_bool('watch', False, 'Write it again whenever the run writes, until it is finished; the page follows.')
    cli.run(main)
