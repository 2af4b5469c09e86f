"""An engine whose devices belong to another process: real processes, and what the engine of one process samples."""

import os
import pickle
import subprocess
import sys

import jax
import numpy as np
import pytest

from grpo_jax.sharding import mesh as meshes
from grpo_jax.sharding.sides import Sides, make_sampler_mesh
from tests import quick_compile
from tests.sharding.test_sides import SHAPES, make_engine, make_policy, sample
from tests.test_multihost import ROOT, free_port

# a learner of two devices that asks a sampler of two: twice, so that what crossed before is gone
PROCESS = """
import pickle, sys
import jax
import numpy as np
from grpo_jax.hosts import processes, transport
from grpo_jax.sampler import serve
from grpo_jax.sharding import mesh, sides
from tests.sharding import test_sides as own

address, process, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
by = None if sys.argv[4] == 'devices' else folder + '/transport'
with processes.session(address, 2, process), processes.group([process]), transport.Link([1 - process], by):
    if process:
        serve.serve_rollouts()
        sys.exit()
    with open(folder + '/tiny', 'rb') as file:
        tiny = pickle.load(file)
    section = {'fsdp': 2, 'sampler': 2, 'transport': sys.argv[4]}
    learner = mesh.make(section)
    both = sides.make_sides(section, learner, jax.devices())
    policy, engine, ended, parts = own.make_policy(tiny, learner), own.make_engine(tiny[0], both), [], []
    prompts, key = engine.put(own.make_prompts()), jax.random.key(3)
    first = engine(policy, prompts, key, 0)
    rollout, stats = engine.sample(
        policy, prompts, key, 0, finished=lambda *row: ended.append(row), progress=lambda *counts: parts.append(counts)
    )
    jax.tree.map(np.testing.assert_array_equal, first, rollout)
    np.savez(folder + '/rollout', **vars(rollout))
    with open(folder + '/rest', 'wb') as file:
        pickle.dump((engine.hash, stats.tokens, ended, parts), file)
"""


@pytest.mark.parametrize('by', ['files', 'devices'])
def test_another_process_samples_what_this_one_does_and_tells_which_rows_have_ended(request, tmp_path, tiny, by):
    if by == 'devices':
        request.getfixturevalue('long')
    (tmp_path / 'tiny').write_bytes(pickle.dumps(jax.device_get(tiny)))
    address = f'127.0.0.1:{free_port()}'
    options = {'XLA_FLAGS': quick_compile.FLAGS, 'JAX_NUM_CPU_DEVICES': '2', 'JAX_PLATFORMS': 'cpu'}
    options |= {'JAX_CROSS_HOST_TRANSPORT_ADDRESSES': '127.0.0.1:0'} if by == 'devices' else {}
    running = []
    for process in range(2):
        if by == 'devices':
            options['JAX_CROSS_HOST_TRANSFER_SOCKET_ADDRESS'] = f'127.0.0.1:{free_port()}'
        command = [sys.executable, '-c', PROCESS, address, str(process), str(tmp_path), by]
        running.append(subprocess.Popen(command, cwd=ROOT, env=os.environ | options, stderr=subprocess.PIPE, text=True))
    for process in running:
        _, errors = process.communicate(timeout=200)
        assert process.returncode == 0, errors
    learner = meshes.arrange(jax.devices()[:2], (1, 2, 1, 1))
    engine = make_engine(tiny[0], Sides(learner, make_sampler_mesh(learner, jax.devices()[-2:])))
    expected, stats = jax.device_get(sample(engine, make_policy(tiny, learner)))
    rollout = np.load(tmp_path / 'rollout.npz')
    for name, array in vars(expected).items():
        np.testing.assert_array_equal(rollout[name], array, name)
    program_hash, tokens, ended, parts = pickle.loads((tmp_path / 'rest').read_bytes())
    assert program_hash == engine.hash and tokens == stats.tokens == parts[-1][0] and len(parts) > 1
    assert sorted(row for row, *_ in ended) == list(range(SHAPES.prompts * SHAPES.group_size))
    for row, own, truncated in ended:
        completion = expected.tokens[row, SHAPES.queries :][expected.completion_mask[row]]
        assert own.tolist() == completion.tolist() and truncated == expected.truncated[row]
    if by == 'files':
        assert os.listdir(tmp_path / 'transport') == []
