"""Tokens per CPU-second beside Tunix's sampler and TRL's `generate`: same model shape, float32, one pinned thread.

python -m benchmarks.peers --tunix=PYTHON --trl=PYTHON [--repeats=3] [--only=equal]

PYTHON is the interpreter of an environment with google-tunix, or with trl and torch, installed; each runs this
file as a worker. Runs are interleaved. Peers decode every row until the longest is done, with their stop token
switched off; only the tokens of the given lengths count, for all.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

# 4 layers of width 256: 4 heads and 2 key-value heads of 64, mlp 1024, 512 tokens, untied
CASES = {
    'equal': dict(prompts=8, group=8, queries=64, mean=128, most=128),
    'long-tailed': dict(prompts=8, group=8, queries=64, mean=100, most=512),
    'long prompts': dict(prompts=4, group=16, queries=512, mean=64, most=64),
}


def lengths_of(case):
    """Row lengths of a case; equal ones where mean and most agree."""
    import numpy as np

    from benchmarks.rollout import long_tailed

    rows = case['prompts'] * case['group']
    if case['mean'] == case['most']:
        return np.full(rows, case['most'])
    return long_tailed(rows, case['mean'], case['most'])


def ours(case):
    """A callable that samples once."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from benchmarks.rollout import MODEL
    from grpo_jax import sampler
    from grpo_jax.models import transformer
    from grpo_jax.sampler.engine import make_sampler
    from grpo_jax.sharding import batches, mesh
    from grpo_jax.types import Prompts

    prompts, queries, most = case['prompts'], case['queries'], case['most']
    params = jax.jit(transformer.init, static_argnums=1)(jax.random.key(0), MODEL)
    tokens = jnp.asarray(np.random.default_rng(1).integers(3, MODEL.vocab_size, (prompts, queries)), jnp.int32)
    batch = Prompts(tokens, jnp.ones_like(tokens, bool), jnp.arange(prompts, dtype=jnp.int32))
    engine = make_sampler(
        MODEL,
        mesh.make({}),
        batches.Shapes(prompts, case['group'], queries, most),
        sampler.Sampling(temperature=1.0, max_tokens=most, stop_tokens=(), pad_token=0),
        {},
    )
    lengths = np.asarray(case['lengths'], np.int32)
    return lambda: jax.block_until_ready(engine(params, batch, jax.random.key(7), 0, limit=lengths))


class Words:
    """Ids as words; no id ends a text."""

    def encode(self, text, **_):
        return [int(word) for word in text.split()]

    def decode(self, ids, **_):
        return ' '.join(str(int(i)) for i in ids)

    def bos_id(self):
        return 0

    def eos_id(self):
        return 512

    def pad_id(self):
        return 513


def tunix(case):
    """A callable that samples once with tunix.generate.sampler.Sampler."""
    import dataclasses

    from flax import nnx
    import jax
    import numpy as np
    from tunix.generate import sampler
    from tunix.models.qwen2 import model

    names = {field.name for field in dataclasses.fields(model.ModelConfig)}
    tied = {name: False for name in ('use_tied_embedding', 'weight_tying') if name in names}
    config = model.ModelConfig(
        num_layers=4,
        vocab_size=512,
        embed_dim=256,
        hidden_dim=1024,
        num_heads=4,
        head_dim=64,
        num_kv_heads=2,
        rope_theta=10_000,
        norm_eps=1e-6,
        **tied,
    )
    policy = model.Qwen2(config, rngs=nnx.Rngs(0))
    cache = sampler.CacheConfig(cache_size=case['queries'] + case['most'], num_layers=4, num_kv_heads=2, head_dim=64)
    engine = sampler.Sampler(policy, Words(), cache)
    ids = np.random.default_rng(1).integers(1, 512, (case['prompts'], case['queries']))
    texts = [' '.join(map(str, row)) for row in ids for _ in range(case['group'])]

    def run():
        result = engine(
            input_strings=texts,
            max_generation_steps=case['most'],
            max_prompt_length=case['queries'],
            echo=False,
            temperature=1.0,
            top_p=1.0,
            top_k=None,
            seed=1,
        )
        assert all(len(tokens) == case['most'] for tokens in result.tokens)
        jax.block_until_ready(result.tokens)

    return run


def trl(case):
    """A callable that samples once with the `generate` that TRL's trainer calls."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    policy = random_qwen2().eval()
    ids = torch.randint(3, 512, (case['prompts'], case['queries'])).repeat_interleave(case['group'], 0)

    def run():
        with torch.no_grad():
            out = policy.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=case['most'],
                min_new_tokens=case['most'],
                eos_token_id=None,
                pad_token_id=0,
            )
        assert out.shape[1] == case['queries'] + case['most']

    return run


def random_qwen2():
    """A float32 model of transformers with random weights, of the benchmarks' shape."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return Qwen2ForCausalLM(config).float()


def work(make, case):
    """Warms make(case) up, then runs it once for each line on standard input, and answers with the CPU-seconds."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    run = make(case)
    for _ in range(2):  # some compile twice
        run()
    print('ready', flush=True)
    for _ in sys.stdin:
        begun = time.process_time()
        run()
        print(f'seconds {time.process_time() - begun}', flush=True)


class Worker:
    """One of the three in a process of its own, pinned to one core, that runs a benchmark's file as its worker."""

    def __init__(self, python, name, case, file=__file__):
        environment = os.environ | {'JAX_PLATFORMS': 'cpu', 'OMP_NUM_THREADS': '1'}
        self._process = subprocess.Popen(
            [python, os.path.abspath(file), f'--worker={name}', f'--case={json.dumps(case)}'],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._answer('ready')

    def run(self):
        """CPU-seconds of one run."""
        self._process.stdin.write('\n')
        self._process.stdin.flush()
        return float(self._answer('seconds').split()[1])

    def close(self):
        """Ends the process; the GiB of memory that it held at most."""
        self._process.stdin.close()
        _, status, usage = os.wait4(self._process.pid, 0)
        self._process.returncode = os.waitstatus_to_exitcode(status)
        return usage.ru_maxrss / 2**20

    def _answer(self, word):
        for line in self._process.stdout:
            if line.startswith(word):
                return line
        raise RuntimeError(f'the worker ended with status {self._process.wait()}; run its command by hand to see why')


def parse(description, *peers, folders=()):
    """The arguments of a command that is its own worker.

    --PEER=PYTHON says by which program a peer is run; folders are the names of arguments that name models.
    """
    parser = argparse.ArgumentParser(description=description)
    for name in (*peers, *folders):
        parser.add_argument(f'--{name}')
    parser.add_argument('--repeats', type=int, default=3)
    parser.add_argument('--only', default='')
    parser.add_argument('--worker')
    parser.add_argument('--case', type=json.loads)
    arguments = parser.parse_args()
    arguments.pythons = {'ours': sys.executable} | {peer: getattr(arguments, peer) for peer in peers}
    return arguments


def medians(case, arguments, file=__file__):
    """{worker: (median CPU-seconds, GiB at most)} of a file's workers, which run arguments.repeats times in turn.

    Those of arguments.pythons run; one without a program is left out.
    """
    workers = {peer: Worker(python, peer, case, file) for peer, python in arguments.pythons.items() if python}
    seconds = {peer: [] for peer in workers}
    for _ in range(arguments.repeats):
        for peer, worker in workers.items():
            seconds[peer].append(worker.run())
    return {peer: (statistics.median(seconds[peer]), worker.close()) for peer, worker in workers.items()}


def main():
    """The command, and the worker that it starts."""
    arguments = parse(__doc__, 'tunix', 'trl')
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if arguments.worker:
        work({'ours': ours, 'tunix': tunix, 'trl': trl}[arguments.worker], arguments.case)
        return
    from benchmarks import environment

    print(environment.describe())
    rate = environment.matrix_rate()
    for name, case in CASES.items():
        if arguments.only not in name:
            continue
        case = case | {'lengths': lengths_of(case).tolist()}
        seconds = medians(case, arguments)
        tokens = sum(case['lengths'])
        speeds = {peer: tokens / value for peer, (value, _) in seconds.items()}
        # products with the weights alone, of the completion's tokens
        flops = 2 * (4 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 1024) + 256 * 512)
        best = max((speed for peer, speed in speeds.items() if peer != 'ours'), default=float('nan'))
        print(
            f'{name}: {case["prompts"]} x {case["group"]} rows, prompts {case["queries"]}, lengths mean '
            f'{tokens / len(case["lengths"]):.0f} max {case["most"]}: '
            + ', '.join(f'{peer} {speed:.0f}' for peer, speed in speeds.items())
            + f' tokens/CPU-s; ours {speeds["ours"] / best:.2f} x the better peer, '
            f'{speeds["ours"] * flops / rate:.0%} of the matrix rate'
        )


if __name__ == '__main__':
    main()
