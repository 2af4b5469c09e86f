"""Writes the report of a run, or of several runs side by side: one page, which opens without a network.

The page has curves, evaluations with intervals, diagnoses, and a browser of the rollouts. WORKDIR is the folder of a
run or of a sweep. Runs that differ only by their seeds are drawn as one curve with a band.

Examples:
    python -m grpo_jax report --workdir=runs/arithmetic
    python -m grpo_jax report --workdir=runs/dapo --against=runs/grpo --follow
"""

from absl import flags

from grpo_jax.run import cli
from grpo_jax.tools.report.write import follow, write_report


def main() -> None:
    """Runs the command."""
    values = flags.FLAGS
    folders = [values.workdir, *values.against]
    print(follow(folders) if values.follow else write_report(folders))


if __name__ == '__main__':
    flags.DEFINE_string(
        'workdir', None, 'Folder of a run or of a sweep, into which the report is written.', required=True
    )
    flags.DEFINE_multi_string('against', [], 'Folder of another run, to compare with; may be given several times.')
    flags.DEFINE_bool('follow', False, 'Keep the report up to date while the run goes on; an open page reloads itself.')
    cli.run(main)
