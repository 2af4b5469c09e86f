"""CPU-seconds of a whole GRPO iteration beside Tunix's and TRL's trainers: rollout, rewards, update.

python -m benchmarks.iteration --tunix=PYTHON --trl=PYTHON [--repeats=3] [--only=equal] [--smollm2=FOLDER]

As benchmarks.peers: the same model shape, float32, one pinned thread, interleaved iterations, and no completion that
ends early at a peer, since theirs end when the longest does. No reference policy, AdamW, one update of all rows, a
reward in Python. The time of an iteration is that between two calls of the reward. With --smollm2, here and at TRL the
model is SmolLM2-135M-Instruct, and batches are smaller.
"""

import os
import sys
import tempfile
import time

CASES = {
    'equal': dict(prompts=8, group=8, queries=64, mean=128, most=128),
    'long-tailed': dict(prompts=8, group=8, queries=64, mean=100, most=512),
}
SMOLLM2 = {
    'equal': dict(prompts=4, group=8, queries=64, mean=32, most=32),
    'long-tailed': dict(prompts=4, group=8, queries=64, mean=24, most=128),
}


class Gate:
    """A reward that reports the CPU-seconds since its last call, and waits for a line before it returns."""

    WARM = 3  # iterations that compile

    def __init__(self):
        self._calls, self._started = 0, 0.0

    def __call__(self, completions):
        spent = time.process_time() - self._started
        self._calls += 1
        if self._calls >= self.WARM:
            print('ready' if self._calls == self.WARM else f'seconds {spent}', file=sys.__stdout__, flush=True)
            if not sys.stdin.readline():
                os._exit(0)  # the trainers have no other way to end in the middle
        self._started = time.process_time()
        return [sum(token % 2 for token in tokens) / len(tokens) for tokens in completions]


def ours(case):
    """Iterates for ever."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    from grpo_jax import algorithms, sampler
    from grpo_jax.configs import default
    from grpo_jax.learner import Learning, Optimizers
    from grpo_jax.learner.experience import make_experience
    from grpo_jax.learner.programs import make_learner
    from grpo_jax.sampler.engine import make_sampler
    from grpo_jax.sharding import batches, compiled, mesh
    from grpo_jax.types import Prompts

    model_config, params = our_model(case)
    prompts, group, queries, most = case['prompts'], case['group'], case['queries'], case['most']
    shapes, one = batches.Shapes(prompts, group, queries, most), mesh.make({})
    method = algorithms.make(default.get_config('dr_grpo').algorithm)
    learning = Learning(chunk=2048, pack_columns=case['columns'], pack_rows=case['rows'])
    sampling = sampler.Sampling(temperature=1.0, max_tokens=most, stop_tokens=(), pad_token=0)
    engine = make_sampler(model_config, one, shapes, sampling, {})
    learner = make_learner(model_config, method, Optimizers(optax.adamw(1e-5)), one, shapes, learning)
    compiled.compile_all([*learner.programs.values()], 'the learner')
    state = learner.initial(params)
    rng, lengths, reward = np.random.default_rng(1), np.asarray(case['lengths'], np.int32), Gate()
    while True:
        tokens = jnp.asarray(rng.integers(3, 512, (prompts, queries)), jnp.int32)
        batch = Prompts(tokens, jnp.ones_like(tokens, bool), jnp.arange(prompts, dtype=jnp.int32))
        rollout = engine(state.params, batch, jax.random.key(7), int(state.step), limit=lengths)
        completions = np.asarray(rollout.tokens[:, queries:])
        rewards = np.array(reward([row[:n].tolist() for row, n in zip(completions, lengths, strict=True)]))
        rewards = rewards.reshape(prompts, group)
        logprobs = learner.logprobs(state, rollout, learner.pack(rollout))
        dead = algorithms.dead_groups(rewards)
        experience, _ = make_experience(method, state, rollout, logprobs, rewards, {'dead': dead}, one)
        state, _ = jax.block_until_ready(learner.update(state, experience, learner.pack(experience.rollout)))


def our_model(case):
    """(ModelConfig, parameters) of a case: those of its folder, or random ones."""
    import jax

    from benchmarks.rollout import MODEL
    from grpo_jax.models import hf, transformer
    from grpo_jax.models.hf import families
    from grpo_jax.sharding import mesh, specs

    if not case['folder']:
        return MODEL, jax.jit(transformer.init, static_argnums=1)(jax.random.key(0), MODEL)
    c = families.load_config(case['folder'])
    return c, hf.load_params(case['folder'], c, specs.params(transformer.param_table(c), mesh.make({})))


def tunix_learner(case, reward, *, beta=0.0, tied=False):
    """(cluster, learner, mesh) of Tunix with a model of the benchmarks' shape."""
    import dataclasses

    from flax import nnx
    import jax
    import optax
    from tunix.models.qwen2 import model
    from tunix.rl import rl_cluster
    from tunix.rl.grpo import grpo_learner
    from tunix.rl.rollout import base_rollout

    from benchmarks.peers import Words

    names = {field.name for field in dataclasses.fields(model.ModelConfig)}
    tying = {name: tied for name in ('use_tied_embedding', 'weight_tying') if name in names}
    config = model.ModelConfig(
        num_layers=4,
        vocab_size=case.get('vocabulary', 512),
        embed_dim=256,
        hidden_dim=1024,
        num_heads=4,
        head_dim=64,
        num_kv_heads=2,
        rope_theta=10_000,
        norm_eps=1e-6,
        **tying,
    )
    one = jax.make_mesh((1, 1), ('fsdp', 'tp'), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    roles = rl_cluster.Role
    cluster = rl_cluster.RLCluster(
        actor=model.Qwen2(config, rngs=nnx.Rngs(0)),
        reference=model.Qwen2(config, rngs=nnx.Rngs(0)),
        tokenizer=Words(),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys((roles.ACTOR, roles.REFERENCE, roles.ROLLOUT), one),
            rollout_engine='vanilla',
            offload_to_cpu=False,
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.adamw(1e-5), max_steps=10**6, eval_every_n_steps=10**9
            ),
            rollout_config=base_rollout.RolloutConfig(
                max_tokens_to_generate=case['most'],
                max_prompt_length=case['queries'],
                kv_cache_size=case['queries'] + case['most'],
                temperature=1.0,
                top_p=1.0,
                top_k=None,
            ),
        ),
    )
    learner = grpo_learner.GRPOLearner(
        cluster,
        reward_fns=reward,
        algo_config=grpo_learner.GRPOConfig(num_generations=case['group'], num_iterations=1, beta=beta, epsilon=0.2),
    )
    return cluster, learner, one


def tunix(case):
    """Trains for ever with tunix.rl.grpo.grpo_learner.GRPOLearner."""
    import numpy as np

    gate = Gate()

    def reward(prompts, completions, **_):
        return gate([[int(word) for word in text.split()] for text in completions])

    _, learner, one = tunix_learner(case, reward)
    rng = np.random.default_rng(1)

    def batches():
        while True:
            ids = rng.integers(1, 512, (case['prompts'], case['queries']))
            yield {'prompts': np.array([' '.join(map(str, row)) for row in ids])}

    with one:
        learner.train(batches())


def trl(case):
    """Trains for ever with trl.GRPOTrainer."""
    from datasets import Dataset
    import torch
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer, gate = words_tokenizer(), Gate()
    texts = [' '.join(f'w{int(i)}' for i in torch.randint(0, 508, (case['queries'],))) for _ in range(64)]

    def reward(completion_ids, **_):
        return gate(completion_ids)

    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=case['prompts'] * case['group'],
            num_generations=case['group'],
            max_completion_length=case['most'],
            gradient_accumulation_steps=1,
            max_steps=10**6,
            learning_rate=1e-5,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to='none',
            save_strategy='no',
            beta=0.0,
            temperature=1.0,
            generation_kwargs={'suppress_tokens': [2]},
            disable_tqdm=True,
        )
        GRPOTrainer(
            model=trl_model(case['folder']),
            reward_funcs=reward,
            args=arguments,
            train_dataset=Dataset.from_dict({'prompt': texts}),
            processing_class=tokenizer,
        ).train()


def trl_model(folder):
    """The float32 model of a folder, or a random one of the benchmarks' shape."""
    import torch
    from transformers import AutoModelForCausalLM

    from benchmarks import peers

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) if folder else peers.random_qwen2()


def words_tokenizer():
    """A tokenizer of transformers with one token a word, w0 to w507."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ['<pad>', '<s>', '</s>', '<unk>', *(f'w{i}' for i in range(508))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token='<unk>'))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token='<pad>',
        bos_token='<s>',
        eos_token='</s>',
        unk_token='<unk>',
        padding_side='left',
    )


def main():
    """The command, and the worker that it starts."""
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    from benchmarks import peers

    arguments = peers.parse(__doc__, 'tunix', 'trl', folders=['smollm2'])
    if arguments.worker:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        sys.stdout = sys.stderr  # what the trainers print is not an answer
        {'ours': ours, 'tunix': tunix, 'trl': trl}[arguments.worker](arguments.case)
        return
    from benchmarks import environment

    print(environment.describe())
    for name, case in (SMOLLM2 if arguments.smollm2 else CASES).items():
        if arguments.only not in name:
            continue
        lengths = peers.lengths_of(case).tolist()
        case = case | {'lengths': lengths, 'folder': arguments.smollm2}
        # equal: a group is a packed row; long-tailed: rows of four prompts with their completions
        full = case['queries'] + case['group'] * case['most']
        case |= dict(columns=full, rows=1) if name == 'equal' else dict(columns=1024, rows=1)
        timed = peers.medians(case, arguments, __file__)
        seconds = {peer: median for peer, (median, _) in timed.items()}
        print(
            f'{name}: {case["prompts"]} x {case["group"]} rows, prompts {case["queries"]}, lengths mean '
            f'{sum(lengths) / len(lengths):.0f} max {case["most"]}: '
            + ', '.join(f'{peer} {value:.2f}' for peer, value in seconds.items())
            + ' CPU-s an iteration; '
            + ', '.join(f'{value / seconds["ours"]:.2f} x {peer}' for peer, value in seconds.items() if peer != 'ours'),
            flush=True,
        )


if __name__ == '__main__':
    main()
