"""launch/gke/render.sh: the manifest of a JobSet, with a fake kubectl."""

import pytest
import yaml

from grpo_jax.errors import Diagnosed
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
