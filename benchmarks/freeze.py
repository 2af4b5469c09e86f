"""Whether moving code changed a bit: two commits make the same small runs, and everything that they wrote is compared.

Tokens, metrics rows, evaluations, events, digests of all arrays of the last checkpoint, and the texts of all programs,
without the names of their modules and functions. Each run is also killed once (kill -9) and resumed; what comes of
that must be what the unbroken run of the base has. Results of the base are kept for later calls.

    python -m benchmarks.freeze --base=1575ff0            # all runs, killed too; about 25 minutes on two cores
    python -m benchmarks.freeze --base=1575ff0 --fast     # the fast half, without kills; about 4 minutes
    python -m benchmarks.freeze --base=1575ff0 --states   # where rounding may differ: each commit takes a step from the
                                                          # base's own checkpoints of three steps; about 8 minutes

With --states, tokens must be equal, and each number of the metrics row, of the parameters and of the optimizer's
moments within 1e-6 of the base's, or of its size where that is above 1. The largest difference is printed.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import hashlib
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

from etils import epath
import jax
import numpy as np
import orbax.checkpoint as ocp

from benchmarks import environment
from grpo_jax.configs import default

ROOT = pathlib.Path(__file__).resolve().parent.parent
STEPS = 6
SMALL = (
    *('--config.data.options.digits=1', '--config.data.options.count=40', '--config.data.prompts_per_step=4'),
    *('--config.data.max_prompt_tokens=6', '--config.rollout.group_size=4', '--config.rollout.max_tokens=12'),
    *('--config.supervised.updates=4', '--config.supervised.batch=8', '--config.optimizer.learning_rate=1e-2'),
    *('--config.evaluation.prompts=6', '--config.evaluation.samples=2', '--config.evaluation.every=3'),
    *('--config.checkpoint.every=2', '--config.log.rollouts=1', f'--config.steps={STEPS}'),
    '--config.collection.gate=outcome',  # the default of commits that had `auto`
    '--config.diagnose.on=off',  # what monitors say may change
)
STATES = 1, 2, 3  # --states goes on from the checkpoints of these steps
EACH_STEP = ('--config.checkpoint.every=1', '--config.checkpoint.keep=100', f'--config.steps={STATES[-1] + 1}')
CLOSE = 1e-6
RENAMED = {'kl_every': 'kl_observe'}  # keys of config.log, and their names in commits before they were renamed
# metrics that earlier commits lack, which are not compared
ADDED = ('advantage_all_wrong', 'reward_missing', 'reward_retried')
# compared as they are; paths of this machine are taken out before
COMPARED = ('metrics.jsonl', 'evaluations.jsonl', 'events.jsonl', 'config.json', 'completions.jsonl')


@dataclasses.dataclass
class Case:
    """A run: its preset, what it changes, and what must have run before it."""

    preset: str
    flags: tuple[str, ...] = ()
    devices: int = 1
    processes: int = 1
    fast: bool = False
    before: tuple[tuple[str, ...], ...] = ()  # commands, with {folder} for the case's folder


POLICY = (
    ('supervised', '--config=arithmetic', *SMALL, '--workdir={folder}/sft'),
    ('export', '--workdir={folder}/sft', '--out={folder}/policy'),
)
CASES = {
    'grpo': Case(
        'arithmetic:grpo',
        ('--config.learner.minibatches=2', '--config.log.probe_every=1', '--config.evaluation.every=2'),
        fast=True,
    ),
    'gspo': Case(
        'arithmetic:gspo',
        ('--config.learner.old_logprobs=decode', '--config.learner.epochs=2', '--config.log.kl_every=2'),
        fast=True,
    ),
    'ppo': Case('arithmetic:ppo', ('--config.learner.microbatches=2',), fast=True),
    'dapo': Case(
        'arithmetic:dapo',
        (
            *('--config.collection.max_draws=3', '--config.collection.max_staleness=2'),
            *('--config.algorithm.correction=truncated', '--config.rollout.cache_gib=0.0002'),
        ),
        fast=True,
    ),
    'dpo': Case('arithmetic:dpo', ('--config.rollout.temperature=0.9',)),
    'opd': Case(
        'arithmetic:opd',
        (
            *('--config.teacher.path={folder}/policy', '--config.algorithm.teacher_top_k=0'),
            *('--config.teacher.park=True', '--config.collection.gate=none'),
        ),
        before=POLICY,
    ),
    'unequal': Case(
        'arithmetic:grpo',
        ('--config.collection.allocation=pass_rate', '--config.collection.retire_above=0.6'),
        fast=True,
    ),
    'rounds': Case(
        'arithmetic:xrpo',
        (
            '--config.collection.allocation=uncertainty',
            '--config.collection.seeding=2',
            '--config.data.max_prompt_tokens=40',
        ),
    ),
    'reward_model': Case(
        'arithmetic:grpo_process',
        (
            *(
                '--config.reward.step_rewards=process',
                '--config.reward.options.process.folder={folder}/rm/reward_model',
            ),
            '--config.collection.dead_groups=drop',
        ),
        before=(
            ('supervised', '--config=arithmetic', *SMALL, '--workdir={folder}/sft'),
            ('export', '--workdir={folder}/sft', '--out={folder}/policy'),
            (
                *('reward_model', '--config=arithmetic_reward', *SMALL, '--workdir={folder}/rm'),
                '--config.model.path={folder}/policy',
            ),
        ),
    ),
    'lora': Case(
        'arithmetic:grpo',
        (
            *(
                '--config.model.lora.rank=2',
                '--config.collection.reference=hard',
                '--config.collection.reference_every=2',
            ),
            '--config.algorithm.advantage=prompt_moving_mean',
        ),
        fast=True,
    ),
    'padded': Case(
        'arithmetic:dr_grpo',
        (
            *('--config.learner.pack_columns=0', '--config.learner.microbatches=2', '--config.algorithm.kl=k3'),
            *('--config.algorithm.kl_coef=0.01', '--config.collection.reference=polyak'),
            *('--config.collection.reference_every=2', '--config.collection.dead_groups=replay'),
            *('--config.collection.max_staleness=3', '--config.algorithm.correction=truncated'),
        ),
    ),
    'devices': Case(
        'arithmetic:grpo',
        ('--config.mesh.data=2', '--config.mesh.fsdp=2', '--config.mesh.context=2', '--config.data.prompts_per_step=8'),
        devices=8,
    ),
    'processes': Case(
        'arithmetic:grpo', ('--config.mesh.data=2', '--config.mesh.fsdp=2', '--config.log.probe_every=2'), 4, 2
    ),
}


class Checkout:
    """A commit's files, and where its runs write."""

    def __init__(self, source: pathlib.Path, folder: pathlib.Path):
        self.source, self.folder = source, folder
        keys = (source / 'docs' / 'config.md').read_text(encoding='utf8')
        self.older_names = {new: old for new, old in RENAMED.items() if f'`log.{old}`' in keys}
        folder.mkdir(parents=True, exist_ok=True)

    def start(self, words, case, dump=None):
        """Processes of a command, which is one per process of the case."""
        env = os.environ | {
            'PYTHONPATH': str(self.source),
            'JAX_PLATFORMS': 'cpu',
            'JAX_COMPILATION_CACHE_DIR': str(self.folder.parent / 'cache'),
            'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0.1',
            'JAX_NUM_CPU_DEVICES': str(case.devices // case.processes),
            'NPROC': str(case.devices),
        }
        if dump:
            env['JAX_DUMP_IR_TO'] = str(dump)
        for new, old in self.older_names.items():
            words = [word.replace(f'--config.log.{new}=', f'--config.log.{old}=') for word in words]
        command = [sys.executable, '-m', 'grpo_jax', *words]
        if case.processes > 1:
            with socket.socket() as free:
                free.bind(('127.0.0.1', 0))
                port = free.getsockname()[1]
            command += [f'--coordinator=127.0.0.1:{port}', f'--processes={case.processes}']
        several = [[*command, f'--process={i}'] if case.processes > 1 else command for i in range(case.processes)]
        options = dict(cwd=self.source, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        return [subprocess.Popen(words, **options) for words in several]

    def finish(self, words, case, dump=None):
        """Runs a command to its end; RuntimeError with what it said when it fails."""
        started = self.start(words, case, dump)
        errors = [process.communicate(timeout=900)[1] for process in started]
        if any(process.returncode for process in started):
            raise RuntimeError(f'{" ".join(words)}\n{errors[0][-3000:]}')

    def run(self, name, kill):
        """Runs a case; kill: with a kill -9 after its third step, and resumed."""
        case, folder = CASES[name], self.folder / (f'{name}.killed' if kill else name)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        self.prepare(name)
        words = words_of(name, self.folder, folder / 'run')
        if kill:
            self.kill(words, case, folder / 'run' / 'metrics.jsonl')
        self.finish(words, case, None if kill else folder / 'programs')

    def prepare(self, name):
        """Runs what a case needs before it, unless that is done."""
        prepared = self.folder / f'{name}.before'
        if CASES[name].before and not (prepared / 'done').exists():
            shutil.rmtree(prepared, ignore_errors=True)
            for words in CASES[name].before:
                self.finish([word.format(folder=prepared) for word in words], Case(''))
            (prepared / 'done').touch()

    def kill(self, words, case, path):
        """Kills a run after its third step."""
        started = self.start(words, case)
        while not path.exists() or path.read_text(encoding='utf8').count('\n') < 3:
            if started[0].poll() is not None:
                raise RuntimeError(started[0].communicate()[1][-3000:])
            time.sleep(0.005)
        for process in started:
            process.send_signal(signal.SIGKILL)
            process.communicate()
        if started[0].returncode != -signal.SIGKILL:
            raise RuntimeError(f'{path} was complete before the run could be killed')

    def results(self, name, kill):
        """What a case came to: name of a thing -> its text, or digest."""
        folder, found = self.folder / (f'{name}.killed' if kill else name), {}
        for path in sorted((folder / 'run').rglob('*.json*')):
            where = path.relative_to(folder / 'run')
            if where.name in COMPARED or where.parts[0] == 'rollouts':
                text = path.read_text(encoding='utf8').replace(str(self.folder), '.').replace(str(self.source), '.')
                for new, old in self.older_names.items():
                    text = text.replace(f'"{old}"', f'"{new}"')
                for name_of_metric in ADDED:
                    text = re.sub(f'"{name_of_metric}": [^,]*, ', '', text)
                found[str(where).replace('.killed', '')] = text.replace(f'{name}.killed', name)
        newest = max((folder / 'run' / 'checkpoints').iterdir(), key=lambda path: int(path.name))
        metadata = json.loads((newest / '_CHECKPOINT_METADATA').read_text(encoding='utf8'))['custom_metadata']
        found |= {f'array {name}': digest for name, digest in metadata['digests'].items()}
        if not kill:
            texts = [plain_text(path.read_text(encoding='utf8')) for path in (folder / 'programs').glob('*.mlir')]
            counts = collections.Counter(hashlib.sha256(text.encode()).hexdigest() for text in texts if big(text))
            found['programs'] = sorted(counts)
        return found

    def run_through(self, name):
        """A run with a checkpoint of each step, whose states others go on from; returns its folder."""
        case, folder = CASES[name], self.folder / f'{name}.states'
        self.prepare(name)
        if not (folder / 'done').exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            self.finish([*words_of(name, self.folder, folder / 'run'), *EACH_STEP], case)
            (folder / 'done').touch()
        return folder

    def step_from(self, name, step, base):
        """({name: numbers}, tokens) of a step, taken from the base's checkpoint of it."""
        workdir = self.folder / f'{name}.from{step}'
        shutil.rmtree(workdir, ignore_errors=True)
        shutil.copytree(base.folder / f'{name}.states' / 'run', workdir)
        for path in (workdir / 'checkpoints').iterdir():
            if path.name.isdigit() and int(path.name) > step:
                shutil.rmtree(path)
        if self is not base:  # keys that the base did not have, at their defaults
            recorded = json.loads((workdir / 'config.json').read_text(encoding='utf8'))
            add_missing(recorded, json.loads(default.get_config().to_json()))
            (workdir / 'config.json').write_text(json.dumps(recorded), encoding='utf8')
        self.finish([*words_of(name, base.folder, workdir), *EACH_STEP], CASES[name])
        lines = (workdir / 'metrics.jsonl').read_text(encoding='utf8').splitlines()
        row = next(row for row in map(json.loads, lines) if row['step'] == step)
        tree = read_arrays(epath.Path(workdir / 'checkpoints' / str(step + 1) / 'default'))
        leaves = jax.tree_util.tree_leaves_with_path({key: tree[key] for key in ('params', 'opt_state')})
        lines = (workdir / 'rollouts' / f'{step:06}.jsonl').read_text(encoding='utf8').splitlines()
        row = {metric: value for metric, value in row.items() if metric not in ADDED}
        numbers = row | {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
        return numbers, [(row['completion'], row['tokens']) for row in map(json.loads, lines)]


def add_missing(section, defaults):
    """Adds to a nested dict the keys of `defaults` that it lacks."""
    for key, value in defaults.items():
        if isinstance(value, dict) and isinstance(section.get(key), dict):
            add_missing(section[key], value)
        section.setdefault(key, value)


def read_arrays(folder):
    """The checkpoint in a folder as numpy arrays, whatever devices have saved it."""
    handler = ocp.PyTreeCheckpointHandler()
    plain = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), handler.metadata(folder).tree)
    return handler.restore(folder, args=ocp.args.PyTreeRestore(restore_args=plain))


def words_of(name, base, workdir):
    """The command of a case, without what comes before; base is the folder of that."""
    case = CASES[name]
    flags = [flag.format(folder=base / f'{name}.before') for flag in case.flags]
    return ['train', f'--config={case.preset}', f'--workdir={workdir}', *SMALL, *flags]


def compare_states(name, base, head):
    """Lines that say in what steps from the base's own states differ, and the largest difference of all numbers."""
    base.run_through(name)
    largest, lines = (0.0, ''), []
    for step in STATES:
        (expected, tokens), (numbers, others) = (side.step_from(name, step, base) for side in (base, head))
        if tokens != others:
            lines.append(f'step {step}: other tokens')
        if expected.keys() != numbers.keys():
            lines.append(f'step {step}: other metrics: {sorted(expected.keys() ^ numbers.keys())}')
        for key in sorted(expected.keys() & numbers.keys()):
            one, other = (np.asarray(side[key], np.float64) for side in (expected, numbers))
            differs = np.abs(one - other) / np.maximum(np.abs(one), 1)
            differs = float(np.max(np.where(np.isnan(one) & np.isnan(other), 0, differs), initial=0))
            largest = max(largest, (differs, f'{key} of step {step}'))
            if not differs <= CLOSE:
                lines.append(f'step {step}: {key} differs by {differs:.2g}')
    return lines, f'{largest[0]:.1e} ({largest[1]})'


def check_out(commit, folder):
    """A worktree of a commit in a folder."""
    if not folder.exists():
        add = ['git', '-C', ROOT, 'worktree', 'add', '--quiet', '--force', '--detach', folder, commit]
        subprocess.run(add, check=True)
    name = subprocess.run(['git', '-C', ROOT, 'rev-parse', commit], check=True, capture_output=True, text=True)
    subprocess.run(['git', '-C', folder, 'checkout', '--quiet', name.stdout.strip()], check=True)
    return folder


def big(text):
    """Whether a program is of the loop; the others are single operations on the host's behalf."""
    return text.count('\n') > 40


def plain_text(text):
    """A program's text without places in the source, its functions numbered in the order in which they come."""
    text = re.sub(r'^#loc.*\n', '', text, flags=re.MULTILINE)
    text = re.sub(r' loc\((?:[^()"]|"[^"]*"|\((?:[^()"]|"[^"]*")*\))*\)', '', text)
    text = re.sub(r'^module @\S+', 'module', text, flags=re.MULTILINE)
    numbers: dict[str, str] = {}
    return re.sub(r'@[\w.$"-]+', lambda match: numbers.setdefault(match[0], f'@{len(numbers)}'), text)


def differences(base, head):
    """Lines that say in what two results differ."""
    for name in sorted(base.keys() | head.keys()):
        one, other = base.get(name), head.get(name)
        if one == other:
            continue
        if name == 'programs' and one is not None and other is not None:
            lost, new = len(set(one) - set(other)), len(set(other) - set(one))
            yield f'programs: {lost} of the base are missing, {new} are new'
        elif one is None or other is None:
            yield f'{name}: only in the {"head" if one is None else "base"}'
        else:
            yield f'{name}: {str(one)[:60]!r}... is not {str(other)[:60]!r}...'


def main():
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--base', required=True, help='a commit')
    parser.add_argument('--head', default='HEAD', help='the commit to compare; what is not committed is not looked at')
    parser.add_argument('--fast', action='store_true', help='the fast half, without kills')
    parser.add_argument('--only', nargs='*', choices=list(CASES), help='these cases alone')
    parser.add_argument('--folder', default=os.path.join(tempfile.gettempdir(), 'grpo_jax_freeze'))
    parser.add_argument('--states', action='store_true', help="steps from the base's own states, compared by rounding")
    given = parser.parse_args()
    os.environ['JAX_PLATFORMS'] = 'cpu'
    jax.config.update('jax_platforms', 'cpu')  # the environment was read at import
    print(environment.describe())
    folder = pathlib.Path(given.folder)
    shutil.rmtree(folder / 'head', ignore_errors=True)
    base = Checkout(check_out(given.base, folder / 'base_source'), folder / f'base-{given.base}')
    head = Checkout(check_out(given.head, folder / 'head_source'), folder / 'head')
    names = given.only or [name for name, case in CASES.items() if case.fast or not given.fast]
    kinds = (False,) if given.fast else (False, True)

    def compare(name):
        if given.states:
            lines, largest = compare_states(name, base, head)
            print(f'{name}: largest difference {largest}')
            return lines
        lines = []
        for kill in kinds:
            done = base.folder / f'{name}{".killed" * kill}.done'
            if not done.exists():
                base.run(name, kill)
                done.touch()
            head.run(name, kill)
            straight = base.results(name, False)
            expected = {k: v for k, v in straight.items() if k != 'programs'} if kill else straight
            lines += [f'{"killed: " * kill}{line}' for line in differences(expected, head.results(name, kill))]
        return lines

    failed = False
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = {name: pool.submit(compare, name) for name in names}
        for name, future in futures.items():
            try:
                lines = future.result()
            except RuntimeError as error:
                lines = str(error).splitlines()
            failed |= bool(lines)
            print(f'{name}: {"equal" if not lines else ""}', *lines, sep='\n    ' if lines else '', flush=True)
    sys.exit(failed)


if __name__ == '__main__':
    main()
