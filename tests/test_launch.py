"""launch/tpu_vm.sh against a fake gcloud, launch/worker.sh on TPU VMs that are folders."""

import json
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
import time

import pytest

from tests.fake_cloud import ROOT, Cloud

WHERE = ['--name=tpu', '--zone=us-east5-a', '--project=lab']
IN = WHERE[1:]
AWKWARD = ['--config.n=it\'s 5 > 4 & "so"', '--config.a=two  spaces', '--config.b=$HOME `date` *', '--config.c=']
RUN = ['run', '--workdir=gs://bucket/runs/x', '--', '--config=configs/gsm8k.py:dapo']
KEEP = ['run', '--keep', '--accelerator-type=v6e-8', *RUN[1:]]
ACTIVE = {'queued-resources describe': [[0, 'ACTIVE']], 'tpu-vm describe': [[0, 'READY']]}


@pytest.fixture
def cloud(tmp_path):
    return Cloud(tmp_path)


def command_of(call):
    """The words that the remote shell reads in a recorded ssh."""
    return shlex.split(next(w for w in call['arguments'] if w.startswith('--command=')).removeprefix('--command='))


CREATED = {
    '--accelerator-type=v5litepod-16': ['--runtime-version=v2-alpha-tpuv5-lite', '--node-id=tpu'],
    '--accelerator-type=v5p-128 --spot': ['--runtime-version=v2-alpha-tpuv5', '--node-id=tpu', '--spot'],
    '--accelerator-type=v6e-16 --slices 4': [
        '--runtime-version=v2-alpha-tpuv6e',
        '--node-count=4',
        '--node-prefix=tpu',
    ],
    '--accelerator-type v4-32 --create-flag=--reserved --create-flag=--network=n': [
        '--runtime-version=tpu-ubuntu2204-base',
        '--node-id=tpu',
        '--reserved',
        '--network=n',
    ],
    '--accelerator-type=v4-8 --runtime-version=new': ['--runtime-version=new', '--node-id=tpu'],
}


@pytest.mark.parametrize('options', CREATED)
def test_create_asks_and_waits(cloud, options):
    states = ['WAITING_FOR_RESOURCES', 'PROVISIONING', 'ACTIVE']
    cloud.script('script.json', {'describe': [[0, state] for state in states]})
    done = cloud.call('create', *WHERE, *options.split())
    assert done.returncode == 0, done.stderr
    create, *describes = [call['arguments'] for call in cloud.calls()]
    kind = options.replace('type ', 'type=').split()[0]
    assert create == ['compute', 'tpus', 'queued-resources', 'create', 'tpu', *IN, kind, *CREATED[options]]
    assert describes == [[*create[:3], 'describe', 'tpu', *IN, '--format=value(state.state)']] * 3
    assert all(state in done.stderr for state in states)


def test_create_from_the_environment_and_without_waiting(cloud):
    done = cloud.call(
        'create', '--no-wait', TPU_NAME='mine', TPU_ZONE='us-east1-d', TPU_ACCELERATOR_TYPE='v6e-4', TPU_SPOT='1'
    )
    assert done.returncode == 0, done.stderr
    assert [call['arguments'] for call in cloud.calls()] == [
        [
            'compute',
            'tpus',
            'queued-resources',
            'create',
            'mine',
            '--zone=us-east1-d',
            '--accelerator-type=v6e-4',
            '--runtime-version=v2-alpha-tpuv6e',
            '--node-id=mine',
            '--spot',
        ]
    ]


def test_create_that_fails_says_so(cloud):
    cloud.script('script.json', {'describe': [[0, 'PROVISIONING'], [0, 'FAILED']]})
    done = cloud.call('create', *WHERE, '--accelerator-type=v6e-8')
    assert done.returncode == 1 and 'error: the request failed' in done.stderr
    assert cloud.verbs() == ['create']


def test_a_run_on_a_machine_from_setup_to_stop(cloud):
    machine = {'FAKE_VMS': '1'}
    cloud.script('trainings.json', {'all': ['wait']})
    stale = cloud.folder / 'tpu' / 'grpo_jax' / 'gone.py'
    stale.parent.mkdir(parents=True)
    stale.write_text('')
    done = cloud.call('setup', *WHERE, **machine)
    assert done.returncode == 0, done.stderr
    assert (stale.parent / 'configs/default.py').exists() and not stale.exists()

    options = ['--workdir=gs://bucket/runs/x', '--data=gs://other/data', '--libtpu-init-args=--xla_a=1 --xla_b']
    train = ['--config=configs/gsm8k.py:dapo', *AWKWARD, '--config.model.path=gs://other/models/q']
    assert cloud.call('run', *WHERE, *options, '--', *train, **machine).returncode == 0
    wait_for(lambda: cloud.calls('training'))
    [training] = cloud.calls('training')
    gcs = f'{cloud.folder}/tpu/gcs'
    assert training['arguments'] == [
        f'--workdir={gcs}/bucket/runs/x',
        *train[:-1],
        f'--config.model.path={gcs}/other/models/q',
    ]
    assert training['environment'] == {
        'JAX_COMPILATION_CACHE_DIR': f'{gcs}/bucket/runs/compiled',
        'LIBTPU_INIT_ARGS': '--xla_a=1 --xla_b',
        'GRPO_JAX_DATA': f'{gcs}/other/data',
        'GLIBC_TUNABLES': 'glibc.malloc.hugetlb=1',
    }
    assert ['other', f'{gcs}/other'] in [call['arguments'][-2:] for call in cloud.calls('gcsfuse')]
    assert all('--rename-dir-limit=0' in call['arguments'] for call in cloud.calls('gcsfuse'))

    for refused in ('run', 'setup'):
        again = cloud.call(*([*RUN[:2], *WHERE, *RUN[2:]] if refused == 'run' else ['setup', *WHERE]), **machine)
        assert again.returncode == 2 and 'a training is running' in again.stderr
    cloud.script('script.json', {'queued-resources describe': [[0, 'ACTIVE']], 'tpu-vm describe': [[0, 'tpu READY']]})
    assert ': running' in cloud.call('status', *WHERE, **machine).stdout
    assert ': stopped 42' in cloud.call('stop', *WHERE, **machine).stdout
    assert 'ended with status 42' in (cloud.folder / 'tpu/grpo_jax_run/log').read_text()


def wait_for(condition):
    for _ in range(600):  # on a busy machine, a process takes its time to begin
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError('waited 30 s')


@pytest.fixture
def worker(cloud):
    """Runs worker.sh on a TPU VM that is prepared."""
    shutil.copytree(os.path.join(ROOT, 'launch'), cloud.folder / 'grpo_jax' / 'launch')
    environment = os.path.join(cloud.folder, 'grpo_jax', '.venv', 'bin')
    os.makedirs(environment)
    shutil.copy(cloud.folder / 'bin' / 'python3', os.path.join(environment, 'python'))

    def call(*arguments):
        return subprocess.run(
            ['bash', 'launch/worker.sh', *arguments],
            cwd=cloud.folder / 'grpo_jax',
            text=True,
            capture_output=True,
            timeout=60,
            env=cloud.environment,
        )

    call.start = ('start', f'--workdir={cloud.folder}/run', f'--cache={cloud.folder}/cache', '--', '--config=c')
    call.cloud = cloud
    return call


@pytest.mark.parametrize('then, state', [(0, 'exited 0'), (2, 'exited 2'), ('deaf', 'stopped 137')])
def test_worker_tells_how_a_training_ended(worker, then, state):
    assert worker('state').stdout.endswith(': idle\n')
    worker.cloud.script('trainings.json', {'all': [then]})
    assert worker(*worker.start).returncode == 0
    wait_for(lambda: worker.cloud.calls('training'))
    if then == 'deaf':
        assert worker('stop', '1').stdout.endswith(f': {state}\n')
    wait_for(lambda: worker('state').stdout.endswith(f': {state}\n'))
    (worker.cloud.folder / 'grpo_jax_run' / 'status').unlink()
    (worker.cloud.folder / 'grpo_jax_run' / 'pid').write_text('999999999')  # of before a restart of the machine
    assert worker('state').stdout.endswith(': lost\n')


def test_worker_refuses_a_bucket_whose_folders_cannot_be_renamed(worker):
    broken = worker.cloud.folder / 'bin' / 'mv'
    broken.write_text('#!/bin/sh\nexit 1\n')
    broken.chmod(0o755)
    done = worker(*worker.start)
    assert done.returncode == 2 and '--enable-hierarchical-namespace' in done.stderr
    assert not worker.cloud.calls('training')


def test_every_worker_of_every_slice_gets_the_same_command(cloud):
    done = cloud.call(
        'run',
        *WHERE,
        '--slices=3',
        '--workdir=gs://bucket/runs/x',
        '--cache=gs://bucket/c',
        '--',
        '--config=configs/gsm8k.py',
        *AWKWARD,
    )
    assert done.returncode == 0, done.stderr
    calls = sorted(cloud.calls(), key=lambda call: call['arguments'])
    assert [call['arguments'][:-1] for call in calls] == [
        ['compute', 'tpus', 'tpu-vm', 'ssh', f'tpu-{i}', *IN, '--quiet', '--worker=all'] for i in range(3)
    ]
    assert [command_of(call) for call in calls] == [
        [
            'bash',
            'grpo_jax/launch/worker.sh',
            'start',
            '--workdir=gs://bucket/runs/x',
            '--cache=gs://bucket/c',
            '--',
            '--config=configs/gsm8k.py',
            *AWKWARD,
        ]
    ] * 3


def test_a_slice_that_fails_fails_the_command(cloud):
    cloud.script('script.json', {'ssh tpu-1': [[7, '']]})
    assert cloud.call('stop', *WHERE, '--slices=2').returncode == 7


def keep(cloud, *options, environment=(), **script):
    cloud.sent()
    first = {'worker.sh setup': [[0, '']]}  # its command asks for the state too
    cloud.script('script.json', first | ACTIVE | script)
    return cloud.call(*KEEP[:4], *WHERE, *options, *KEEP[4:], **dict(environment))


def states(*words):
    return {'worker.sh state': [[0, f'host-0: {word}\nhost-1: {word}'] for word in words]}


def test_a_preempted_run_is_recreated_set_up_and_run_again(cloud):
    script = states('idle', 'running', 'running', 'exited 0')
    script['queued-resources describe'] = [
        [0, state] for state in ('ACTIVE', 'ACTIVE', 'SUSPENDING', 'SUSPENDED', 'WAITING_FOR_RESOURCES', 'ACTIVE')
    ]
    done = keep(cloud, '--spot', **script)
    assert done.returncode == 0, done.stderr
    assert cloud.verbs() == [
        'state',
        'stop',
        'start',
        'state',
        'delete',
        'create',
        'scp',
        'setup',
        'stop',
        'start',
        'state',
        'state',
    ]
    starts = [command_of(call) for call in cloud.calls() if 'worker.sh start' in call['arguments'][-1]]
    assert starts[0] == starts[1] and starts[0][-1] == KEEP[-1]
    created = next(call['arguments'] for call in cloud.calls() if 'create' in call['arguments'])
    assert '--spot' in created and '--accelerator-type=v6e-8' in created
    assert ['--force', '--quiet'] == next(c['arguments'] for c in cloud.calls() if 'delete' in c['arguments'])[-2:]


def test_a_preempted_node_counts_too_and_failing_steps_are_taken_again(cloud):
    script = states('running', 'exited 0')
    script['tpu-vm describe'] = [[0, 'PREEMPTED'], [0, 'READY']]
    script['queued-resources create'] = [[1, ''], [0, '']]
    script['worker.sh setup'] = [[255, ''], [0, '']]
    done = keep(cloud, **script)
    assert done.returncode == 0, done.stderr
    assert cloud.verbs() == [
        'state',
        'delete',
        'create',
        'create',
        'scp',
        'setup',
        'scp',
        'setup',
        'stop',
        'start',
        'state',
    ]


def test_crashes_are_restarted_a_bounded_number_of_times(cloud):
    done = keep(cloud, '--max-restarts=2', **states('running', 'exited 139'))
    assert done.returncode == 139 and 'restart 2 of 2' in done.stderr
    assert cloud.verbs().count('start') == 2
    assert cloud.verbs().count('delete') == cloud.verbs().count('create') == 0


def test_a_reward_that_failed_in_mid_run_is_started_again(cloud):
    done = keep(cloud, '--max-restarts=1', **states('running', 'exited 47', 'exited 47', 'exited 0'))
    assert done.returncode == 0 and 'failed with status 47: restart 1 of 1' in done.stderr
    assert cloud.verbs().count('start') == 1


@pytest.mark.parametrize(
    'last, status, message',
    [
        ('exited 2', 2, 'refused its input'),
        ('exited 46', 46, 'a diagnosis has stopped'),
        ('stopped 42', 143, 'was stopped'),
        ('exited 0', 0, 'has ended'),
    ],
)
def test_what_is_not_restarted(cloud, last, status, message):
    done = keep(cloud, **states('running', 'running', last))
    assert done.returncode == status and message in done.stderr
    assert 'start' not in cloud.verbs() and 'create' not in cloud.verbs()


def test_a_start_that_is_refused_is_not_tried_again(cloud):
    done = keep(cloud, **states('idle') | {'worker.sh start': [[2, '']]})
    assert done.returncode == 2 and 'refused to start' in done.stderr
    assert cloud.verbs() == ['state', 'stop', 'start']


def test_a_worker_that_crashed_outweighs_those_that_run_or_ended(cloud):
    mixed = [[0, 'a: exited 0\nb: exited 1\nc: running'], [0, 'a: exited 0\nb: exited 0\nc: running']]
    done = keep(cloud, '--max-restarts=0', **{'worker.sh state': [mixed[1], mixed[1], mixed[0]]})
    assert done.returncode == 1 and 'failed with status 1' in done.stderr


@pytest.mark.parametrize('script', [{'queued-resources describe': [[1, '']]}, {'worker.sh state': [[255, '']]}])
def test_without_answers_it_gives_up(cloud, script):
    done = keep(cloud, environment={'TPU_PATIENCE': '3'}, **script)
    assert done.returncode == 1 and '3 of 3' in done.stderr and 'gave up' in done.stderr
    assert 'delete' not in cloud.verbs()


def test_keep_wants_what_setup_sent(cloud):
    done = cloud.call(*KEEP[:4], *WHERE, *KEEP[4:])
    assert done.returncode == 2 and 'run setup first' in done.stderr and not cloud.calls()


def test_status_shows_the_request_the_nodes_and_the_workers(cloud):
    cloud.script('script.json', ACTIVE | {'tpu-vm describe': [[0, 'tpu READY HEALTHY']]} | states('running'))
    shown = cloud.call('status', *WHERE).stdout.splitlines()
    assert shown == ['tpu ACTIVE', 'tpu READY HEALTHY', 'host-0: running', 'host-1: running']
    cloud.script('script.json', {'describe': [[0, 'WAITING_FOR_RESOURCES']]})
    assert cloud.call('status', *WHERE).stdout == 'tpu WAITING_FOR_RESOURCES\n'


def test_logs_follow_one_worker(cloud):
    cloud.call('logs', *WHERE, '--slices=2', '--slice=1', '--worker=3')
    [call] = cloud.calls()
    assert call['arguments'][3:] == [
        'ssh',
        'tpu-1',
        *IN,
        '--quiet',
        '--worker=3',
        '--command=tail -n 100 -F grpo_jax_run/log',
    ]


def test_delete_asks_unless_told(cloud):
    assert cloud.call('delete', *WHERE, stdin='n\n').returncode == 1
    assert cloud.call('delete', *WHERE).returncode == 1
    assert not cloud.calls()
    for how in ({'stdin': 'y\n'}, {}):
        assert cloud.call('delete', *WHERE, *([] if how else ['--yes']), **how).returncode == 0
    assert [call['arguments'] for call in cloud.calls()] == [
        ['compute', 'tpus', 'queued-resources', 'delete', 'tpu', *IN, '--force', '--quiet']
    ] * 2


COMMANDS = {
    'create': ['create', '--accelerator-type=v4-8'],
    'setup': ['setup'],
    'run': RUN,
    'keep': KEEP,
    'status': ['status'],
    'logs': ['logs'],
    'stop': ['stop'],
    'delete': ['delete'],
}


@pytest.mark.parametrize('name', COMMANDS)
def test_dry_run_prints_what_would_be_called_and_calls_nothing(cloud, name):
    command = COMMANDS[name]
    real = cloud.call(command[0], *WHERE, '--slices=2', '--dry-run', *command[1:])
    assert real.returncode == 0, real.stderr
    assert not cloud.calls() and not (cloud.folder / 'cache').exists()
    printed = real.stdout.replace('\ngcloud ', '\0gcloud ').split('\0')
    assert all(shlex.split(line)[:3] == ['gcloud', 'compute', 'tpus'] for line in printed)
    if name in ('run', 'create', 'stop', 'delete'):  # the others ask, and depend on the answers
        script = ACTIVE if name == 'create' else {}
        cloud.script('script.json', script)
        cloud.call(command[0], *WHERE, '--slices=2', '--yes', *command[1:])
        called = [['gcloud', *call['arguments']] for call in cloud.calls()]
        assert sorted(map(shlex.split, printed)) == sorted(called)


WRONG = {
    'no command': [],
    'unknown command': ['launch'],
    'unknown option': ['stop', *WHERE, '--nodes=2'],
    'stray word': ['run', *WHERE, 'python'],
    'no value': ['stop', '--name=a', '--zone'],
    'no name': ['stop', '--zone=us-east5-a'],
    'bad name': ['stop', '--name=My_tpu', '--zone=us-east5-a'],
    'no zone': ['stop', '--name=tpu'],
    'a region': ['stop', '--name=tpu', '--zone=us-east5'],
    'no type': ['create', *WHERE],
    'bad type': ['create', *WHERE, '--accelerator-type=v6e'],
    'gpu': ['create', *WHERE, '--accelerator-type=h100-8'],
    'slices': ['stop', *WHERE, '--slices=0'],
    'no slice': ['logs', *WHERE, '--slice=1'],
    'worker': ['logs', *WHERE, '--worker=all'],
    'grace': ['stop', *WHERE, '--grace=1m'],
    'no workdir': ['run', *WHERE, '--', '--config=a'],
    'workdir': ['run', *WHERE, '--workdir=runs/x', '--', '--config=a'],
    'bucket alone': ['run', *WHERE, '--workdir=gs://bucket', '--', '--config=a'],
    'cache': [*RUN[:2], *WHERE, '--cache=/tmp', *RUN[2:]],
    'data': [*RUN[:2], *WHERE, '--data=/tmp', *RUN[2:]],
    'cache in the workdir': [*RUN[:2], *WHERE, '--cache=gs://bucket/runs/x', *RUN[2:]],
    'no config': [*RUN[:2], *WHERE],
    'two workdirs': [*RUN[:2], *WHERE, *RUN[2:], '--workdir=gs://bucket/y'],
    'keep without type': [*RUN[:2], '--keep', *WHERE, *RUN[2:]],
    'keep elsewhere': ['stop', '--keep', *WHERE],
    'restarts': [*KEEP[:4], *WHERE, '--max-restarts=-1', *KEEP[4:]],
    'arguments elsewhere': ['stop', *WHERE, '--', 'x'],
}


@pytest.mark.parametrize('name', WRONG)
def test_wrong_arguments_are_refused_before_anything_is_called(cloud, name):
    done = cloud.call(*WRONG[name])
    assert done.returncode == 2
    assert done.stderr.startswith('usage: ') and '\nerror: ' in done.stderr
    assert not cloud.calls()


# what the training gets of the caller's: variables, files, extras

TOKEN = "hf_it's 5 $HOME"


@pytest.fixture
def machine(cloud):
    """The cloud, with a TPU VM that is prepared."""
    home = cloud.folder / 'tpu' / 'grpo_jax'
    shutil.copytree(os.path.join(ROOT, 'launch'), home / 'launch')
    os.makedirs(home / '.venv' / 'bin')
    shutil.copy(cloud.folder / 'bin' / 'python3', home / '.venv' / 'bin' / 'python')
    cloud.environment |= {'FAKE_VMS': '1', 'HF_TOKEN': TOKEN}
    return cloud


@pytest.fixture
def project(tmp_path):
    """A folder of the user's, with a config that imports another file there."""
    folder = tmp_path / 'mine'
    (folder / 'parts').mkdir(parents=True)
    for name in ('my.py', 'helper.py', 'parts/judge.py', '.token'):
        (folder / name).write_text('import helper\n')
    return folder


def sent(cloud, name):
    """How often a file was sent under a name."""
    return sum(f'tpu:{name}' in call['arguments'] for call in cloud.calls())


def test_a_variable_reaches_the_training_and_nothing_else_that_can_be_read(machine):
    done = machine.call('run', *WHERE, '--env=HF_TOKEN', *RUN[1:])
    assert done.returncode == 0, done.stderr
    wait_for(lambda: machine.calls('training'))
    assert machine.calls('training')[0]['environment']['HF_TOKEN'] == TOKEN
    log = (machine.folder / 'tpu/grpo_jax_run/log').read_text()
    assert TOKEN not in log + done.stdout + done.stderr + json.dumps(machine.calls())
    left = [*machine.folder.glob('tpu/*env*'), *machine.folder.glob('cache/grpo_jax/*.env')]
    assert sent(machine, 'grpo_jax_env') == 1 and not left


def test_the_file_of_the_variables_is_for_its_owner_alone(cloud):
    script = cloud.folder / 'bin' / 'gcloud'
    script.write_text(f'#!/bin/sh\ncase $* in *scp*) ls -l "$5" | cut -c1-10 >> {cloud.folder}/modes ;; esac\n')
    assert cloud.call('run', *WHERE, '--env=HF_TOKEN', *RUN[1:], HF_TOKEN=TOKEN).returncode == 0
    assert (cloud.folder / 'modes').read_text() == '-rw-------\n'


def test_variables_files_and_extras_come_again_after_a_preemption(cloud, project):
    script = states('idle', 'running', 'running', 'exited 0')
    script['queued-resources describe'] = [[0, state] for state in ('ACTIVE', 'ACTIVE', 'SUSPENDED', 'ACTIVE')]
    cloud.sent()
    (cloud.folder / 'cache/grpo_jax/tpu.extras').write_text('wandb\n')
    cloud.script('script.json', {'worker.sh setup': [[0, '']]} | ACTIVE | script)
    options = ['--env=HF_TOKEN', '--workdir=gs://bucket/runs/x', '--', '--config=my.py']
    done = cloud.call(*KEEP[:3], *WHERE, *options, folder=project, HF_TOKEN=TOKEN)
    assert done.returncode == 0, done.stderr
    assert [sent(cloud, f'grpo_jax{name}') for name in ('_env', '_sources.tar.gz', '.tar.gz')] == [2, 2, 1]
    assert cloud.verbs().count('start') == 2 and TOKEN not in json.dumps(cloud.calls()) + done.stderr
    [installed] = [call['arguments'][-1] for call in cloud.calls() if 'worker.sh setup' in call['arguments'][-1]]
    assert installed.endswith('worker.sh setup wandb')


def test_extras_are_installed(machine):
    assert machine.call('setup', *WHERE, '--extra=wandb', '--extra=trackio').returncode == 0
    [pip] = machine.calls('pip')
    assert pip['arguments'][-1] == '.[tpu,wandb,trackio]'
    assert (machine.folder / 'cache/grpo_jax/tpu.extras').read_text() == 'wandb,trackio\n'


@pytest.mark.parametrize('place', ['mine', 'mine/parts', '.'])
def test_files_of_the_users_are_sent_and_the_training_runs_among_them(machine, project, place):
    config = os.path.relpath(project / 'my.py', machine.folder / place)
    parts = f"--config.reward.parts=(('{project}/parts/judge.py:judge', 1.0),)"
    words = ['--workdir=gs://bucket/runs/x', '--', f'--config={config}:dapo', parts, '--config.n=configs/gsm8k.py']
    done = machine.call('run', *WHERE, *words, folder=machine.folder / place)
    assert done.returncode == 0, done.stderr
    wait_for(lambda: machine.calls('training'))
    [training] = machine.calls('training')
    folder = machine.folder / 'tpu' / 'grpo_jax_sources'
    assert training['folder'] == str(folder)
    assert training['arguments'][1:] == [
        '--config=my.py:dapo',
        "--config.reward.parts=(('parts/judge.py:judge', 1.0),)",
        '--config.n=../grpo_jax/configs/gsm8k.py',
    ]
    assert sorted(os.listdir(folder)) == ['helper.py', 'my.py', 'parts']  # nothing that is hidden


def test_of_a_git_project_what_git_knows_or_would_add_is_sent(machine, project):
    (project / '.gitignore').write_text('runs\n')
    (project / 'runs').mkdir()
    (project / 'runs' / 'big').write_text('')
    subprocess.run(['git', 'init', '-q'], cwd=project, check=True)
    words = ['--workdir=gs://bucket/runs/x', '--', '--config=my.py']
    done = machine.call('run', *WHERE, *words, folder=project)
    assert done.returncode == 0, done.stderr
    assert sorted(os.listdir(machine.folder / 'tpu' / 'grpo_jax_sources')) == ['helper.py', 'my.py', 'parts']


REFUSED = {
    'no such file': (['--config=none.py'], 'there is no none.py here'),
    'two folders': (['--config=my.py', '--config.data.name=../other/rows.py'], 'put all into one folder'),
    'a home': (['--config=../home.py'], 'put them into a folder of their own'),
    'a model': (['--config=my.py', '--config.model.path=../model'], '../model is on this machine alone'),
    'a model of another machine': (['--config=gsm8k', '--config.model.path=../model'], 'into a bucket, and name gs://'),
    'named by the config': (['--config=names.py'], 'names.py: ../model is on this machine alone'),
    'absolute in the config': (['--config=absolute.py'], 'the machines have other folders'),
    'hidden': (['--config=my.py', '--config.data.name=.hidden.py'], '.hidden.py'),
    'ignored by git': (['--config=my.py', '--config.data.options.folder=parts/rows'], 'parts/rows is on this machine'),
    'too much': (['--config=my.py'], 'has more than 100 MiB'),
}


@pytest.mark.parametrize('dry', [[], ['--dry-run']])
@pytest.mark.parametrize('case', REFUSED)
def test_what_the_machines_would_not_have_is_refused_before_anything_is_called(cloud, project, case, dry):
    for name in ('home.py', 'other/rows.py', 'model/config.json', 'mine/.hidden.py', 'mine/parts/rows/a.jsonl'):
        (cloud.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (cloud.folder / name).write_text('')
    (project / 'names.py').write_text("folder = '../model'\n")
    (project / 'absolute.py').write_text(f'parts = (("{project}/parts/judge.py:judge", 1.0),)\n')
    if case == 'ignored by git':
        (project / '.gitignore').write_text('rows\n')
        subprocess.run(['git', 'init', '-q'], cwd=project, check=True)
    if case == 'too much':
        with open(project / 'weights', 'wb') as file:
            file.truncate(101 * 2**20)
    words, message = REFUSED[case]
    done = cloud.call('run', *dry, *WHERE, '--workdir=gs://bucket/runs/x', '--', *words, folder=project)
    assert done.returncode == 2 and message in done.stderr.splitlines()[-1], done.stderr
    assert not cloud.calls() and not (cloud.folder / 'cache').exists()


@pytest.mark.parametrize('name, wrong', [('b', 'too short'), ('bu', 'too short'), ('b' * 64, 'too long')])
def test_a_bucket_that_cannot_be_is_called_that(cloud, name, wrong):
    for words in (['--workdir', '--'], ['--data', '--'], ['--', '--config.model.path']):
        words = [f'{word}=gs://{name}/runs/x' if word != '--' else word for word in words]
        first = [] if '--workdir' in words[0] else RUN[1:2]
        done = cloud.call('run', *WHERE, *first, *words, '--config=gsm8k')
        assert done.returncode == 2 and f"the bucket's name '{name}' is {wrong}" in done.stderr
    assert not cloud.calls()


ENVIRONMENT = {
    'no value': ([*RUN[:2], '--env=HF_TOKEN', *RUN[2:]], {}),
    'an empty value': ([*RUN[:2], '--env=HF_TOKEN', *RUN[2:]], {'HF_TOKEN': ''}),
    'a value given': ([*RUN[:2], f'--env=HF_TOKEN={TOKEN}', *RUN[2:]], {'HF_TOKEN': TOKEN}),
    'a name that is none': ([*RUN[:2], '--env=hf-token', *RUN[2:]], {}),
    "an option's": ([*RUN[:2], '--env=GRPO_JAX_DATA', *RUN[2:]], {'GRPO_JAX_DATA': '/data'}),
    'elsewhere': (['stop', '--env=HF_TOKEN'], {'HF_TOKEN': TOKEN}),
}


@pytest.mark.parametrize('case', ENVIRONMENT)
def test_a_variable_that_cannot_be_handed_on_is_refused_without_its_value(cloud, case):
    words, environment = ENVIRONMENT[case]
    for dry in ([], ['--dry-run']):
        done = cloud.call(words[0], *WHERE, *dry, *words[1:], **environment)
        assert done.returncode == 2 and '\nerror: --env' in done.stderr and TOKEN not in done.stderr
    assert not cloud.calls()


def test_a_dry_run_shows_no_value_and_keeps_no_file(cloud, project):
    words = ['--env=HF_TOKEN', '--workdir=gs://bucket/runs/x', '--', '--config=my.py']
    done = cloud.call('run', '--dry-run', *WHERE, *words, folder=project, HF_TOKEN=TOKEN)
    assert done.returncode == 0 and 'tpu:grpo_jax_env' in done.stdout and 'tpu:grpo_jax_sources.tar.gz' in done.stdout
    assert TOKEN not in done.stdout + done.stderr and not (cloud.folder / 'cache').exists()


@pytest.mark.parametrize('words', [['setup', '--extra=wandbs'], ['run', '--extra=wandb', *RUN[1:]]])
def test_an_extra_that_cannot_be_installed_is_refused(cloud, words):
    done = cloud.call(words[0], *WHERE, *words[1:])
    assert done.returncode == 2 and '\nerror: --extra' in done.stderr and not cloud.calls()


@pytest.mark.parametrize('terminal', [False, True])
def test_an_installation_says_that_it_goes_on_a_line_a_minute_or_in_one_line_of_a_terminal(tmp_path, terminal):
    bin_ = tmp_path / '.venv' / 'bin'
    bin_.mkdir(parents=True)
    (bin_ / 'python').write_text('#!/bin/bash\n/bin/sleep 1\n')  # which is asked to run pip
    (bin_ / 'sleep').write_text(f'#!/bin/bash\necho "$@" >> {tmp_path}/asked\n/bin/sleep 0.1\n')
    for program in bin_.iterdir():
        program.chmod(0o755)
    shown, stderr = pty.openpty() if terminal else os.pipe()
    environment = os.environ | {'PYTHON': sys.executable, 'PATH': f'{bin_}:{os.environ["PATH"]}'}
    script = f'source {ROOT}/launch/venv.sh && install .'
    began = time.monotonic()
    done = subprocess.run(['bash', '-c', script], cwd=tmp_path, stderr=stderr, env=environment, timeout=60)
    os.close(stderr)
    text = os.read(shown, 10_000).decode()
    os.close(shown)
    assert done.returncode == 0 and time.monotonic() - began < 30
    assert set((tmp_path / 'asked').read_text().split()) == {'1' if terminal else '60'}
    first, _, rest = text.replace('\r\n', '\n').partition('\n')
    counted = r'(\rinstalling, \d+ s so far){2,}\r\x1b\[K' if terminal else r'(installing, \d+ s so far\n){2,}'
    assert first == 'installing . into .venv' and re.fullmatch(counted, rest), text


def test_shellcheck_finds_nothing():
    scripts = ['local.sh', 'test.sh', 'tpu_vm.sh', 'worker.sh', 'gke/render.sh']  # -x: and what they source
    beside = os.path.join(os.path.dirname(sys.executable), 'shellcheck')
    shellcheck = beside if os.path.exists(beside) else shutil.which('shellcheck')
    assert shellcheck, 'no shellcheck: install .[test]'
    done = subprocess.run(
        [shellcheck, '-x', *(f'launch/{name}' for name in scripts)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
