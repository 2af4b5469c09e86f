"""What a run does when something goes wrong, as a table: case, seconds, and bit-equal or the line that it ends with.

    python -m benchmarks.faults            # kills over eight presets, damage, full disks, locks, signals
    python -m benchmarks.faults --short    # one of most kinds
    python -m benchmarks.faults --kills=20 --of=carried,ahead    # kills alone, so many of each of these runs
    python -m benchmarks.faults --kills=200 --of=both --steps=600    # of runs that are so long

A case fails when the run hangs, prints a traceback, ends otherwise than it should, or goes on to other bits than a run
that nothing has happened to. Exit status 1 if one fails.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

from absl import app, flags

from benchmarks import environment

AHEAD = ('--config.collection.staleness=1', '--config.algorithm.correction=truncated')
# completions of some 80 tokens, so that they go on in the next step
LONG = ('--config.rollout.max_tokens=80', '--config.algorithm.correction=truncated', '--config.collection.in_flight=4')
RUNS = {  # name -> preset and overrides
    'grpo': ('grpo',),
    'dapo': ('dapo', '--config.collection.max_staleness=1', '--config.algorithm.correction=truncated'),
    'gspo': ('gspo', '--config.learner.minibatches=2'),
    'ppo': ('ppo',),
    'rloo': (
        'rloo',
        '--config.collection.reference=hard',
        '--config.collection.reference_every=3',
        '--config.algorithm.kl_coef=0.01',
    ),
    'reinforce_pp': ('reinforce_pp',),
    'grpo_lambda': ('grpo_lambda',),
    'rft': ('rft',),
    'carried': ('grpo', *LONG),
    'ahead': ('grpo', *AHEAD),
    'both': ('grpo', *LONG, *AHEAD),
    'sides': ('grpo', *AHEAD, '--config.mesh.data=2', '--config.mesh.sampler=2'),  # of four devices
}
SMALL = (
    *('--config.data.options.digits=1', '--config.data.options.count=40', '--config.data.prompts_per_step=4'),
    *('--config.data.max_prompt_tokens=6', '--config.rollout.group_size=4', '--config.rollout.max_tokens=12'),
    *('--config.supervised.updates=4', '--config.supervised.batch=8', '--config.evaluation.prompts=6'),
    '--config.evaluation.samples=4',  # as many as completions of a group: one sampler for both
    '--config.log.probe_every=2',
    *('--config.checkpoint.every=2', '--config.log.rollouts=1', '--config.steps=8'),
)
MOST_SECONDS = 240  # after which a process hangs
SAME = ('metrics.jsonl', 'evaluations.jsonl')
KILLED_FORMS = {'step': 'd', 'mib': '.0f', 'files': 'd', 'orphans': 'd', 'kib': '.0f'}


class Outcome(NamedTuple):
    """How a case has ended."""

    case: str
    text: str
    seconds: float
    good: bool


class Ended(NamedTuple):
    """A process that has ended."""

    status: int
    errors: str
    seconds: float

    @property
    def last(self) -> str:
        """The last line that it has printed to stderr."""
        lines = [line for line in self.errors.splitlines() if line.strip()]
        return lines[-1] if lines else ''


class Bench:
    """Runs commands in a folder of its own, and holds what they lead to against runs that nothing happens to."""

    def __init__(self, folder: str, seed: int):
        self.folder, self.random = folder, random.Random(seed)
        self._straight: dict[tuple[str, ...], tuple[str, float]] = {}
        self._count = 0

    def new(self, name: str) -> str:
        """A workdir that is not there yet."""
        self._count += 1
        return os.path.join(self.folder, f'{self._count:03d}_{name}')

    def start(self, workdir: str, name: str = 'grpo', *more: str) -> subprocess.Popen:
        """The process of one of RUNS."""
        preset, *own = RUNS[name]
        command = [sys.executable, '-m', 'grpo_jax.train', f'--config=arithmetic:{preset}', f'--workdir={workdir}']
        variables = os.environ | {'JAX_COMPILATION_CACHE_DIR': os.path.join(self.folder, 'compiled')}
        variables |= {'JAX_NUM_CPU_DEVICES': '4' if name == 'sides' else '1'}
        return subprocess.Popen(
            [*command, *SMALL, *own, *more],
            env=variables | {'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0.1', 'JAX_PLATFORMS': 'cpu'},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, workdir: str, name: str = 'grpo', *more: str) -> Ended:
        """Trains to the end."""
        return end(self.start(workdir, name, *more))

    def straight(self, name: str = 'grpo', *more: str) -> tuple[str, float]:
        """(workdir, seconds) of a run that nothing has happened to."""
        if (name, *more) not in self._straight:
            if not more:
                self.run(self.new('compile'), name)  # what follows reads the programs from the cache
            workdir = self.new('straight')
            ended = self.run(workdir, name, *more)
            if ended.status:
                raise RuntimeError(f'{name} does not train: {ended.errors[-2000:]}')
            self._straight[name, *more] = workdir, ended.seconds
        return self._straight[name, *more]

    def begun(self, steps: int = 8) -> str:
        """A copy of a run that has taken so many steps, with its checkpoints."""
        workdir = self.new('begun')
        shutil.copytree(self.straight()[0], workdir)
        return workdir

    def judge(self, case: str, workdir: str, ended: Ended, name: str = 'grpo', *more: str) -> Outcome:
        """The Outcome of a run that should have ended as if nothing had happened."""
        straight = self.straight(name, *more)[0]
        differs = [file for file in SAME if _content(straight, file) != _content(workdir, file)]
        if _arrays(straight) != _arrays(workdir):
            differs.append('checkpoint')
        good = ended.status == 0 and not differs and clean(ended)
        text = 'bit-equal' if good else f'status {ended.status}, differs in {", ".join(differs)}: {ended.last}'
        return Outcome(case, text, ended.seconds, good)


def end(process: subprocess.Popen, most: float = MOST_SECONDS) -> Ended:
    """Waits for a process; one that takes longer than `most` seconds is killed, and has status None."""
    began = time.monotonic()
    try:
        _, errors = process.communicate(timeout=most)
    except subprocess.TimeoutExpired:
        process.kill()
        _, errors = process.communicate()
        return Ended(-999, errors + f'\nHANGS after {most} s', most)
    return Ended(process.returncode, errors, time.monotonic() - began)


def clean(ended: Ended) -> bool:
    """Whether a process has neither hung nor printed a traceback."""
    return 'Traceback (most recent call last)' not in ended.errors and ended.status != -999


def refused(case: str, ended: Ended, status: int, *words: str, most: float = MOST_SECONDS) -> Outcome:
    """The Outcome of a process that should have ended with a status, and a last line with certain words."""
    good = (
        ended.status == status and clean(ended) and all(word in ended.last for word in words) and ended.seconds <= most
    )
    return Outcome(case, f'status {ended.status}: {ended.last}', ended.seconds, good)


def _content(workdir, name):
    path = os.path.join(workdir, name)
    if not os.path.exists(path):
        return None
    with open(path, 'rb') as file:
        return file.read()


def _arrays(workdir):
    """The digests of the newest checkpoint."""
    from grpo_jax.run import checkpoint

    steps = checkpoint.steps(workdir)
    return checkpoint.recorded_digests(checkpoint.path_of(workdir, steps[0])) if steps else None


class Killed(NamedTuple):
    """What a kill -9 has met, and what it has left."""

    step: int  # steps of the run that are on record
    mib: float  # of the process
    files: int  # that it had open
    orphans: int  # its processes that live a second later
    kib: float  # in the workdir


def kill(process: subprocess.Popen, rows: int, pause: float, workdir: str) -> Killed | Ended:
    """Kills a process so many seconds after it has written so many rows of metrics, unless it has ended before."""
    path = pathlib.Path(workdir, 'metrics.jsonl')

    def written():
        return path.read_bytes().count(b'\n') if path.exists() else 0

    last, began = written() + rows, time.monotonic()
    while process.poll() is None and written() < last and time.monotonic() < began + MOST_SECONDS:
        time.sleep(0.01)
    with contextlib.suppress(subprocess.TimeoutExpired):
        _, errors = process.communicate(timeout=pause)
        return Ended(process.returncode, errors, time.monotonic() - began)
    place = pathlib.Path('/proc', str(process.pid))
    status = dict(line.split(':', 1) for line in (place / 'status').read_text(encoding='ascii').splitlines())
    files = len(list((place / 'fd').iterdir()))
    children = ' '.join(path.read_text(encoding='ascii') for path in place.glob('task/*/children')).split()
    process.kill()
    process.communicate()
    time.sleep(1)
    orphans = sum(os.path.exists(f'/proc/{child}') for child in children)
    sizes = [path.stat().st_size for path in pathlib.Path(workdir).rglob('*') if path.is_file()]
    return Killed(written(), int(status['VmRSS'].split()[0]) / 1024, files, orphans, sum(sizes) / 1024)


def kills(bench: Bench, names: list[str], count: int, *more: str) -> Iterator[Outcome]:
    """kill -9 at random moments of runs that go on after it, until `count` of them have met a process at work.

    A run that has come to its end is judged, and the next kills meet a new one.
    """
    for name in names:
        _, seconds = bench.straight(name)
        met, workdir, own = 0, bench.new(f'kills_{name}'), []
        while met < count or own:
            process = bench.start(workdir, name, *more)
            rows = bench.random.randrange(4)  # 0: while it starts, which takes most of a run's time
            pause = bench.random.uniform(0, seconds / 32 if rows else seconds / 2)
            rows, pause = (rows, pause) if met < count else (0, MOST_SECONDS)
            ended = kill(process, rows, pause, workdir)
            if isinstance(ended, Killed):
                met, own = met + 1, [*own, ended]
                facts = ', '.join(f'{key} {getattr(ended, key):{form}}' for key, form in KILLED_FORMS.items())
                print(f'{name}: {met} of {count} kills; {facts}', file=sys.stderr, flush=True)
                continue
            outcome = bench.judge(f'{name}: {len(own)} x kill -9', workdir, ended, name, *more)
            columns = {
                key: ', '.join(f'{getattr(each, key):{form}}' for each in own) for key, form in KILLED_FORMS.items()
            }
            facts = '; '.join(f'{key} {values}' for key, values in columns.items())
            yield outcome._replace(text=f'{outcome.text}; {facts}')
            workdir, own = bench.new(f'kills_{name}'), []


def _largest(folder):
    files = [os.path.join(place, name) for place, _, names in os.walk(folder) for name in names]
    return max(files, key=os.path.getsize)


def _flip(path, bit):
    with open(path, 'r+b') as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def _empty(folder):
    shutil.rmtree(folder)
    os.makedirs(folder)


def _half_written(folder):
    names = sorted(os.listdir(folder))
    for name in names[: len(names) // 2]:
        path = os.path.join(folder, name)
        shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)


DAMAGE: dict[str, Callable[[str], object]] = {
    'a flipped bit': lambda folder: _flip(_largest(folder), os.path.getsize(_largest(folder)) // 2 * 8 + 4),
    'a truncated file': lambda folder: os.truncate(_largest(folder), os.path.getsize(_largest(folder)) // 2),
    'an empty folder': _empty,
    'half of its files': _half_written,
    'an empty folder of a later step': lambda folder: os.makedirs(os.path.join(os.path.dirname(folder), '99')),
    'no metadata': lambda folder: os.remove(os.path.join(folder, '_CHECKPOINT_METADATA')),
    'no arrays': lambda folder: shutil.rmtree(os.path.join(folder, 'default')),
}


def damage(bench: Bench, names: list[str]) -> Iterator[Outcome]:
    """The newest checkpoint is damaged; the same command goes on from the one before."""
    for name in names:
        workdir = bench.begun()
        DAMAGE[name](os.path.join(workdir, 'checkpoints', '8'))
        yield bench.judge(f'newest checkpoint: {name}', workdir, bench.run(workdir))


def flips(bench: Bench, count: int) -> Iterator[Outcome]:
    """Single bits of all files of a checkpoint are flipped, one at a time, and the checkpoint is read."""
    import jax

    from grpo_jax.errors import BadInput
    from grpo_jax.run import checkpoint, digest

    path = checkpoint.path_of(bench.straight()[0], 8)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = checkpoint.abstract_tree(path, device)
    right = digest.digests(checkpoint.read_tree(path, abstract))
    files = sorted(os.path.join(place, name) for place, _, names in os.walk(path) for name in names)
    noticed = harmless = wrong = 0
    began = time.monotonic()
    for number in range(count):
        copy = os.path.join(bench.folder, 'flips', str(number), '8')
        shutil.copytree(path, copy)
        source = bench.random.choice([file for file in files if os.path.getsize(file)])
        bit = bench.random.randrange(8 * os.path.getsize(source))
        _flip(os.path.join(copy, os.path.relpath(source, path)), bit)
        try:
            same = digest.digests(checkpoint.read_tree(copy, abstract)) == right
            harmless, wrong = harmless + same, wrong + (not same)
        except BadInput:
            noticed += 1
        shutil.rmtree(copy)
    text = f'{noticed} noticed, {harmless} harmless, {wrong} read as something else'
    yield Outcome(f'{count} flipped bits', text, time.monotonic() - began, not wrong)


def signals(bench: Bench, names: list[str]) -> Iterator[Outcome]:
    """A signal comes at a random moment; the same command goes on."""
    seconds = bench.straight()[1]
    for name in names:
        workdir, moment = bench.new(name.lower()), bench.random.uniform(0.4, 0.95) * seconds
        process = bench.start(workdir)
        time.sleep(moment)
        process.send_signal(getattr(signal, name))
        ended = end(process, 60)
        over = all(_content(bench.straight()[0], file) == _content(workdir, file) for file in SAME)
        if ended.status == 0 or (over and ended.status == -getattr(signal, name)):  # Python was ending by then
            yield bench.judge(f'{name} after {moment:.1f} s, as it ended', workdir, ended._replace(status=0))
            continue
        yield refused(f'{name} after {moment:.1f} s', ended, 42, 'the same command goes on')
        yield bench.judge(f'{name}, and the same command again', workdir, bench.run(workdir))


def twice(bench: Bench) -> Iterator[Outcome]:
    """The second signal stops at once."""
    workdir = bench.new('twice')
    process = bench.start(workdir, 'grpo', '--config.steps=2000')
    _wait_for_rows(process, workdir)
    process.send_signal(signal.SIGINT)
    time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    ended = end(process, 30)
    good = clean(ended) and ended.status in (42, 130)
    yield Outcome('SIGINT twice', f'status {ended.status}: {ended.last}', ended.seconds, good)


def _wait_for_rows(process, workdir, count=1):
    path = os.path.join(workdir, 'metrics.jsonl')
    while process.poll() is None and (_content(workdir, 'metrics.jsonl') or b'').count(b'\n') < count:
        time.sleep(0.05)
    return path


def locks(bench: Bench) -> Iterator[Outcome]:
    """A second run in the same workdir; and one after the owner was killed."""
    workdir = bench.new('lock')
    process = bench.start(workdir, 'grpo', '--config.steps=2000')
    _wait_for_rows(process, workdir)
    yield refused(
        'a second run in the same workdir', bench.run(workdir, 'grpo', '--config.steps=2000'), 45, str(process.pid)
    )
    process.kill()
    process.communicate()
    again = bench.start(workdir, 'grpo', '--config.steps=2000')
    rows = (_content(workdir, 'metrics.jsonl') or b'').count(b'\n')
    _wait_for_rows(again, workdir, rows + 1)
    taken = again.poll() is None
    again.kill()
    _, errors = again.communicate()
    yield Outcome('a run whose owner was killed', 'goes on' if taken else errors[-200:], 0.0, taken)


@contextlib.contextmanager
def small_disk(path: str, kib: int) -> Iterator[None]:
    """A tmpfs at path, of so many KiB; RuntimeError where this process may not mount one."""
    os.makedirs(path, exist_ok=True)
    done = subprocess.run(['mount', '-t', 'tmpfs', '-o', f'size={kib}k', 'tmpfs', path], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip())
    try:
        yield
    finally:
        subprocess.run(['umount', '--lazy', path], check=True)


def disks(bench: Bench) -> Iterator[Outcome]:
    """A full disk as the workdir or a folder of it; the same command goes on once there is space."""
    for place, kib in [('', 300), ('', 1000), ('', 2000), ('tensorboard', 4), ('rollouts', 8), ('checkpoints', 300)]:
        workdir, name = bench.new('disk'), f'{kib} KiB for {place or "the workdir"}'
        folder = os.path.join(workdir, place)
        try:
            with small_disk(folder, kib):
                ended = bench.run(workdir)
                if ended.status == 0:
                    yield bench.judge(name, workdir, ended)
                    continue
                yield Outcome(name, f'status {ended.status}: {ended.last}', ended.seconds, clean(ended))
                subprocess.run(['mount', '-o', 'remount,size=200m', folder], check=True)
                yield bench.judge(f'{name}, then space', workdir, bench.run(workdir))
        except RuntimeError as error:
            yield Outcome(name, f'not tried: no mount here ({error})', 0.0, True)


def nonsense(bench: Bench) -> Iterator[Outcome]:
    """Settings without sense."""
    for override in (
        'optimizer.learning_rate=nan',
        'rollout.temperature=1e-9',
        'seed=-1',
        'checkpoint.keep=0',
        'reward.parts=numeric',
    ):
        workdir = bench.new('nonsense')
        outcome = refused(override, bench.run(workdir, 'grpo', f'--config.{override}'), 2, override.partition('=')[0])
        yield outcome._replace(good=outcome.good and not os.path.exists(workdir))


def cases(bench: Bench, short: bool) -> Iterator[Outcome]:
    """The Outcomes of all cases, or of one of most kinds."""
    yield from kills(bench, ['grpo'] if short else list(RUNS), 1 if short else 5)
    yield from damage(bench, ['a flipped bit'] if short else list(DAMAGE))
    yield from flips(bench, 20 if short else 200)
    yield from signals(bench, ['SIGINT'] if short else ['SIGTERM', 'SIGINT', 'SIGHUP'] * 3)
    if not short:
        yield from locks(bench)
        yield from disks(bench)
        yield from twice(bench)
        yield from nonsense(bench)


def run(short: bool, seed: int, count: int = 0, of: Sequence[str] = (), steps: int = 0) -> list[Outcome]:
    """Prints the table, and gives its rows.

    count: of kills of the runs `of` alone, in place of all cases; steps: of these runs, 0: 8.
    """
    print(environment.describe(), flush=True)
    outcomes, more = [], [f'--config.steps={steps}'] if steps else []
    with tempfile.TemporaryDirectory(prefix='faults') as folder:
        bench = Bench(folder, seed)
        for outcome in kills(bench, [*of] or list(RUNS), count, *more) if count else cases(bench, short):
            outcomes.append(outcome)
            mark = ' ' if outcome.good else 'X'
            print(f'{mark} {outcome.case:58s} {outcome.seconds:6.1f} s  {outcome.text}', flush=True)
    bad = sum(not outcome.good for outcome in outcomes)
    print(f'{len(outcomes)} cases, {bad} not as they should be')
    return outcomes


def main(_) -> None:
    """The command."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a background job ignores, and so do its children
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and this one under nohup
    values = flags.FLAGS
    outcomes = run(values.short, values.seed, values.kills, values.of, values.steps)
    sys.exit(any(not outcome.good for outcome in outcomes))


if __name__ == '__main__':
    flags.DEFINE_bool('short', False, 'One case of most kinds.')
    flags.DEFINE_integer('seed', 0, 'Of the moments and bits.')
    flags.DEFINE_integer('kills', 0, 'Kills of each run, and nothing else.')
    flags.DEFINE_integer('steps', 0, 'Of the runs that --kills kills; 0: 8.')
    flags.DEFINE_list('of', [], 'Names of RUNS that are killed; empty: all.')
    app.run(main)
