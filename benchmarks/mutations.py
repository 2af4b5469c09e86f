"""Makes thirty mistakes in the core, one line each, and shows whether the tests catch every one.

A mistake is a text of the package, whatever its file, and what stands in its place. The tests beside it run in a copy
of a commit in which it was made. A mistake that no test catches is printed, and the exit status is 1.

    python -m benchmarks.mutations                     # of HEAD; about twenty minutes on two cores
    python -m benchmarks.mutations --commit=1575ff0 --only history retired
"""

import argparse
import concurrent.futures
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from typing import NamedTuple

from benchmarks import environment

ROOT = pathlib.Path(__file__).resolve().parent.parent


class Mistake(NamedTuple):
    """A text of the package, another in its place, and the words behind pytest that must fail then."""

    right: str
    wrong: str
    tests: str


MISTAKES = {
    'dead groups': Mistake(
        'advantages = np.where(dead[:, None, None], 0.0, advantages)',
        'advantages = advantages + 0.0',
        'tests/algorithms',
    ),
    'kl in the reward': Mistake(
        'return earned - kl_coef * pieces.call(_token_kl',
        'return earned + kl_coef * pieces.call(_token_kl',
        'tests/algorithms',
    ),
    'ratio base': Mistake(
        "algorithm.ratio_base == 'sampler' else old", "algorithm.ratio_base != 'sampler' else old", 'tests/algorithms'
    ),
    'denominator': Mistake("counted = mask & (prepared['selected'] > 0) & ", 'counted = mask & ', 'tests/algorithms'),
    'clamped kl': Mistake(
        '(reductions.clamped_exp(d) - d - 1 > most)', '(reductions.clamped_exp(d) - d - 1 < most)', 'tests/algorithms'
    ),
    'returns': Mistake(
        'np.where(np.isfinite(rewards)[..., None], advantages + values, np.nan)',
        'np.where(np.isfinite(rewards)[..., None], advantages, np.nan)',
        'tests/algorithms tests/learner',
    ),
    'value clip': Mistake(
        'error = jnp.maximum(error, jnp.square(clipped',
        'error = jnp.minimum(error, jnp.square(clipped',
        'tests/learner/test_critic.py',
    ),
    'empty minibatch': Mistake(
        'apply = learns & finite & jnp.any(minibatch.loss_mask)',
        'apply = learns & finite',
        'tests/learner/test_update.py',
    ),
    'skipped updates': Mistake('skipped + ~finite', 'skipped + 0', 'tests/learner/test_update.py'),
    'anchored logprobs': Mistake('return old + (logprobs - start)', 'return old', 'tests/test_decoded.py'),
    'entropy': Mistake(
        'entropy = jnp.log(total) - shards', 'entropy = jnp.log(total) + shards', 'tests/learner/test_logprobs.py'
    ),
    'dropped groups': Mistake(
        'alive = put_rows(~dead[grouping.owner], mesh)',
        'alive = put_rows(dead[grouping.owner], mesh)',
        'tests/learner tests/test_train.py tests/test_collect.py',
    ),
    'first sample': Mistake(
        'samples = first + jnp.arange',
        'samples = 0 * first + jnp.arange',
        'tests/sampler/test_generate.py tests/test_allocation.py tests/test_collect.py',
    ),
    'handed on': Mistake(
        'self.reported = self.reported | ended', 'self.reported = self.reported & ended', 'tests/sampler/test_engine.py'
    ),
    'ended rows': Mistake(
        'done | (count >= limit), ~done', 'done, ~done', 'tests/sampler/test_engine.py tests/test_train.py'
    ),
    'draws': Mistake('or draws == max_draws:', 'or draws > max_draws:', 'tests/test_collect.py'),
    'replay': Mistake('key=lambda group: -group.priority', 'key=lambda group: group.priority', 'tests/test_collect.py'),
    'retired': Mistake('(tries > 0) & (hits >= ', '(tries > 0) & (hits > ', 'tests/test_collect.py'),
    'history': Mistake(
        "decay * averages['weight'][place] + 1", "decay * (averages['weight'][place] + 1)", 'tests/test_history.py'
    ),
    'pass rates': Mistake(
        'return contrast_chance(hits, tries, sizes + unit) - contrast',
        'return -contrast_chance(hits, tries, sizes + unit) + contrast',
        'tests/test_allocation.py',
    ),
    'digests': Mistake('if one.sums != digests[name][1]:', 'if one.sums == "":', 'tests/test_damage.py'),
    'not finite': Mistake(
        'if name.startswith(FINITE) and not one.finite]',
        'if name.startswith(FINITE) and one.sums == ""]',
        'tests/test_damage.py tests/test_train.py tests/test_faults.py',
    ),
    'events': Mistake("if row['step'] < first_step or", "if row['step'] <= first_step or", 'tests/test_events.py'),
    'kinds of keys': Mistake(
        'kind, declared, names = Kind.FIXED, ', 'kind, declared, names = Kind.FREE, ', 'tests/test_steering.py'
    ),
    'polyak': Mistake('old + share * (new - old)', 'old + share * new', 'tests/test_reference.py'),
    'right of the probe': Mistake(
        '(rewards == best) & (best > worst)', '(rewards == best) & (best >= worst)', 'tests/test_probe.py'
    ),
    'unknown reward': Mistake(
        'total = np.where(np.isfinite(stacked).any(0), total, np.nan)',
        'total = total + 0.0',
        'tests/rewards/test_scoring.py tests/rewards/test_rewards.py',
    ),
    'mixed groups': Mistake(
        'np.mean(some_right & some_wrong)', 'np.mean(some_right | some_wrong)', 'tests/learner tests/test_train.py'
    ),
    'frozen weights': Mistake(
        'if digest.hash_tree(frozen) != ', 'if digest.hash_tree(frozen) == ""  != ', 'tests/test_adapters.py'
    ),
    'steps without a reward': Mistake(
        'all(step - k in steps for k in range(1, ',
        'all(step - k in steps for k in range(2, ',
        'tests/test_unrewarded.py',
    ),
}


def place(source, right):
    """The one file of the package that has a text; ValueError where none, or several have it."""
    paths = [path for path in (source / 'grpo_jax').rglob('*.py') if right in path.read_text(encoding='utf8')]
    if len(paths) != 1:
        raise ValueError(f'{right!r} is in {len(paths)} files')
    return paths[0]


def caught(commit, folder, name):
    """Whether the tests of a mistake fail in a copy of a commit that has it; and the last line that they print."""
    mistake, copy = MISTAKES[name], folder / name.replace(' ', '_')
    subprocess.run(['git', '-C', ROOT, 'worktree', 'add', '--quiet', '--force', '--detach', copy, commit], check=True)
    try:
        path = place(copy, mistake.right)
        text = path.read_text(encoding='utf8')
        path.write_text(text.replace(mistake.right, mistake.wrong), encoding='utf8')
        command = [sys.executable, '-m', 'pytest', '-x', '-q', '-p', 'no:cacheprovider', *mistake.tests.split()]
        env = os.environ | {'PYTHONPATH': str(copy)}
        done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith(('FAILED', 'ERROR'))] or ['-']
        return done.returncode == 1, lines[0][:110]
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def main():
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--commit', default='HEAD')
    parser.add_argument('--only', nargs='*', choices=list(MISTAKES), default=list(MISTAKES))
    given = parser.parse_args()
    os.environ['JAX_PLATFORMS'] = 'cpu'
    print(environment.describe())
    missed = []
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = {name: pool.submit(caught, given.commit, pathlib.Path(folder), name) for name in given.only}
        for name, future in futures.items():
            was_caught, line = future.result()
            missed += [] if was_caught else [name]
            print(f'{"caught" if was_caught else "MISSED"}  {name:24} {line}', flush=True)
    subprocess.run(['git', '-C', ROOT, 'worktree', 'prune'], check=True)
    print(f'{len(given.only) - len(missed)} of {len(given.only)} caught')
    sys.exit(bool(missed))


if __name__ == '__main__':
    main()
