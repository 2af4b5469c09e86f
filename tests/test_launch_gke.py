"""launch/gke/render.sh: the manifest of a JobSet, with a fake kubectl."""

import base64
import subprocess

import pytest
import yaml

from grpo_jax.errors import Diagnosed
from grpo_jax.rewards import RewardError
from tests.fake_cloud import Cloud

GKE = [
    '--name=run-1',
    '--image=docker.pkg.dev/lab/grpo:1',
    '--accelerator=v5e',
    '--topology=4x8',
    '--workdir=gs://bucket/runs/x',
    '--service-account=trainer',
]


@pytest.fixture
def cloud(tmp_path):
    return Cloud(tmp_path)


def test_the_rendered_jobset_has_what_was_asked_for(cloud):
    train = [
        '--config=configs/gsm8k.py',
        '--config.n=it\'s 5 > 4 & "so"',
        '--config.c=',
        '--config.d=a\\b\n@SLICES@',
        '--config.model.path=gs://bucket/m',
    ]
    options = ['--slices=2', '--spot', '--max-restarts=7', '--libtpu-init-args=--a=1 --b', '--dry-run']
    done = cloud.call(*GKE, *options, '--', *train, script='gke/render.sh')
    assert done.returncode == 0, done.stderr
    assert not cloud.calls('kubectl')
    jobset = yaml.safe_load(done.stdout)
    assert (jobset['kind'], jobset['metadata']['name']) == ('JobSet', 'run-1')
    assert jobset['spec']['failurePolicy']['maxRestarts'] == 7
    [slices] = jobset['spec']['replicatedJobs']
    job = slices['template']['spec']
    assert (slices['replicas'], job['parallelism'], job['completions'], job['backoffLimit']) == (2, 8, 8, 0)
    assert job['podFailurePolicy']['rules'][0]['onExitCodes']['values'] == [2, Diagnosed.status]
    assert RewardError.AGAIN not in (2, Diagnosed.status)  # a reward that failed in mid-run is started again
    pod = job['template']['spec']
    assert pod['serviceAccountName'] == 'trainer' and pod['restartPolicy'] == 'Never'
    assert pod['nodeSelector'] == {
        'cloud.google.com/gke-tpu-accelerator': 'tpu-v5-lite-podslice',
        'cloud.google.com/gke-tpu-topology': '4x8',
        'cloud.google.com/gke-spot': 'true',
    }
    [container] = pod['containers']
    assert container['image'] == 'docker.pkg.dev/lab/grpo:1'
    assert container['command'] == ['python', '-m', 'grpo_jax.train']
    assert container['args'] == ['--workdir=/gcs/bucket/runs/x', *train[:-1], '--config.model.path=/gcs/bucket/m']
    assert container['env'] == [
        {'name': 'JAX_COMPILATION_CACHE_DIR', 'value': '/gcs/bucket/runs/compiled'},
        {'name': 'LIBTPU_INIT_ARGS', 'value': '--a=1 --b'},
    ]
    assert container['resources']['limits'] == {'google.com/tpu': 4}
    assert container['volumeMounts'][0]['mountPath'] == '/gcs/bucket'
    volume = pod['volumes'][0]['csi']['volumeAttributes']
    assert volume['bucketName'] == 'bucket'
    assert volume['mountOptions'].split(',') == [
        'implicit-dirs',
        'metadata-cache:ttl-secs:0',
        'metadata-cache:negative-ttl-secs:0',
        'file-system:rename-dir-limit:0',
    ]


@pytest.mark.parametrize(
    'kind, topology, options, hosts, chips',
    [
        ('v5e', '2x2', [], 1, 4),
        ('v6e', '1x1', [], 1, 1),
        ('v6e', '2x4', ['--chips-per-host=8'], 1, 8),
        ('v5p', '2x2x4', [], 4, 4),
        ('v4', '4x4x4', [], 16, 4),
        ('tpu7x', '2x2x1', [], 1, 4),
    ],
)
def test_the_jobset_is_applied_with_a_pod_for_every_host(cloud, kind, topology, options, hosts, chips):
    done = cloud.call(
        *GKE, f'--accelerator={kind}', f'--topology={topology}', *options, '--', '--config=a', script='gke/render.sh'
    )
    assert done.returncode == 0, done.stderr
    [call] = cloud.calls('kubectl')
    assert call['arguments'] == ['apply', '-f', '-']
    [slices] = yaml.safe_load(call['stdin'])['spec']['replicatedJobs']
    job = slices['template']['spec']
    container = job['template']['spec']['containers'][0]
    assert (job['completions'], container['resources']['requests']['google.com/tpu']) == (hosts, chips)
    assert 'cloud.google.com/gke-spot' not in job['template']['spec']['nodeSelector']


@pytest.mark.parametrize(
    'wrong',
    [
        '--name=Run',
        '--image=',
        '--accelerator=h100',
        '--topology=4',
        '--topology=2x2x2',
        '--slices=0',
        '--workdir=/tmp',
        '--workdir=gs://bucket',
        '--service-account=',
        '--chips-per-host=3',
        '--chips-per-host=8 --topology=2x2',
        '--slices=2 --topology=2x2',
        '--data=gs://other/data',
        '--cache=gs://bucket/runs/x',
        '--max-restarts=x',
        '--pods=2',
        'stray',
        '-- --config=a --config.model.path=gs://other/m',
        '-- --config=a --workdir=x',
        '-- --steps=1',
    ],
)
def test_wrong_arguments_of_gke_are_refused(cloud, wrong):
    done = cloud.call(
        *GKE, *wrong.split(), *([] if wrong.startswith('-- ') else ['--', '--config=a']), script='gke/render.sh'
    )
    assert done.returncode == 2
    assert done.stderr.startswith('usage: ') and '\nerror: ' in done.stderr
    assert not cloud.calls('kubectl')


# what the training gets of the caller's

TOKEN = "hf_it's 5 $HOME"


def test_variables_come_by_a_secret(cloud):
    done = cloud.call(
        *GKE, '--env=HF_TOKEN', '--namespace=team', '--', '--config=a', script='gke/render.sh', HF_TOKEN=TOKEN
    )
    assert done.returncode == 0, done.stderr
    first, second = cloud.calls('kubectl')
    assert first['arguments'] == ['apply', '--server-side', '--force-conflicts', '-f', '-']
    secret = yaml.safe_load(first['stdin'])
    assert (secret['kind'], secret['metadata']) == ('Secret', {'name': 'run-1-env', 'namespace': 'team'})
    assert {name: base64.b64decode(value).decode() for name, value in secret['data'].items()} == {'HF_TOKEN': TOKEN}
    assert second['arguments'] == ['apply', '-f', '-']
    [slices] = yaml.safe_load(second['stdin'])['spec']['replicatedJobs']
    [container] = slices['template']['spec']['template']['spec']['containers']
    reference = {'secretKeyRef': {'name': 'run-1-env', 'key': 'HF_TOKEN'}}
    assert container['env'][-1] == {'name': 'HF_TOKEN', 'valueFrom': reference}
    assert TOKEN not in second['stdin'] + done.stdout + done.stderr


def test_a_dry_run_shows_no_value(cloud):
    done = cloud.call(*GKE, '--env=HF_TOKEN', '--dry-run', '--', '--config=a', script='gke/render.sh', HF_TOKEN=TOKEN)
    assert done.returncode == 0 and yaml.safe_load(done.stdout)['kind'] == 'JobSet'
    encoded = base64.b64encode(TOKEN.encode()).decode()
    assert not any(text in done.stdout + done.stderr for text in (TOKEN, encoded))
    assert done.stdout.startswith('# besides, the Secret run-1-env with HF_TOKEN') and not cloud.calls('kubectl')


def test_extras_are_installed_before_the_training_which_gets_its_arguments_and_its_signals(cloud, tmp_path):
    done = cloud.call(*GKE, '--extra=wandb', '--dry-run', '--', '--config=a b', script='gke/render.sh')
    [slices] = yaml.safe_load(done.stdout)['spec']['replicatedJobs']
    [container] = slices['template']['spec']['template']['spec']['containers']
    for name in ('pip', 'python'):
        program = tmp_path / 'bin' / name
        program.write_text(f'#!/bin/sh\necho {name} $$ $# "$@"\n')
        program.chmod(0o755)
    shell = subprocess.Popen([*container['command'], *container['args']], env=cloud.environment, stdout=-1, text=True)
    pip, python = shell.communicate(timeout=60)[0].splitlines()
    assert pip.endswith('install --quiet --no-cache-dir --editable .[tpu,wandb]')
    # in the shell's place, so that SIGTERM reaches it
    assert python == f'python {shell.pid} 4 -m grpo_jax.train --workdir=/gcs/bucket/runs/x --config=a b'


@pytest.mark.parametrize(
    'words, message',
    [
        (['--env=HF_TOKEN', '--', '--config=a'], '--env'),
        (['--extra=wandbs', '--', '--config=a'], '--extra'),
        (['--workdir=gs://b/runs/x', '--', '--config=a'], "the bucket's name 'b' is too short"),
        (['--', '--config=my.py'], 'my.py is not in the image; put it into configs/'),
        (['--', "--config.reward.parts=(('my.py:judge', 1.0),)", '--config=a'], 'my.py is not in the image'),
        (['--', '--config=none.py'], 'there is no none.py here'),
        (
            ['--', '--config=a', '--config.model.path=./model'],
            './model is on this machine alone; put it into the bucket',
        ),
    ],
)
@pytest.mark.parametrize('dry', [[], ['--dry-run']])
def test_what_the_pods_would_not_have_is_refused_before_anything_is_applied(cloud, tmp_path, words, message, dry):
    (tmp_path / 'mine' / 'model').mkdir(parents=True)
    (tmp_path / 'mine' / 'my.py').write_text('')
    done = cloud.call(*GKE, *dry, *words, script='gke/render.sh', folder=tmp_path / 'mine')
    assert done.returncode == 2 and message in done.stderr.splitlines()[-1], done.stderr
    assert not cloud.calls('kubectl')
