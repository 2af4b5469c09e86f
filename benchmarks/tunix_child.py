"""A program of google-tunix, compiled for a TPU that is not here; benchmarks.tpu_peers runs this by Tunix's Python.

PYTHON benchmarks/tunix_child.py CASE FOLDER

CASE is JSON: `program`, update or decode, and the fields of `tpu_peers.Case`. Weights and batch are shapes with
shardings; nothing runs. Tunix's own classes and functions are compiled: Qwen2, the GRPO loss, Trainer's step with
AdamW behind optax.MultiSteps, and the Sampler's prefill and decode. FOLDER gets compiled.txt, and child.json with
the compiler's figures or its refusal.
"""

import functools
import json
import os
import sys
import types

os.environ |= {'TPU_SKIP_MDS_QUERY': '1', 'ALLOW_MULTIPLE_LIBTPU_LOAD': '1', 'JAX_PLATFORMS': 'cpu'}

from flax import nnx
import jax
from jax.experimental import topologies
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import optax
from tunix.generate import sampler
from tunix.models.qwen2 import model as qwen2
from tunix.rl import algo_core, trainer
from tunix.rl.grpo import grpo_learner

from benchmarks import peer_program

PAD, END = 151643, 151645
# what the sampler asks of a tokenizer; there are no texts
TOKENIZER = types.SimpleNamespace(encode=None, decode=None, bos_id=lambda: 0, eos_id=lambda: END, pad_id=lambda: PAD)


def model_config(case):
    """Tunix's config of the model, computing in bfloat16; the case's own settings on top."""
    config = getattr(qwen2.ModelConfig, {'0.5B': 'qwen2p5_0p5b', '7B': 'qwen2p5_7b'}[case['model']])()
    config.dtype = jnp.bfloat16
    config.param_dtype = jnp.dtype(case['weights'])
    config.use_flash_attention = case['flash']
    config.flash_attention_block_size = peer_program.attention_block(case)
    config.remat_config = qwen2.RematConfig[case['remat']]
    if case['replicated']:
        config.shd_config = qwen2.ShardingConfig.get_default_sharding(is_sampling=True)
    return config


def placed(arrays, shardings):
    """Shapes with shardings."""
    return jax.tree.map(lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), arrays, shardings)


def abstract(make, mesh):
    """What `make` makes, of shapes with the shardings that its variables name, as Tunix loads them."""
    graph, state = nnx.split(nnx.eval_shape(make))
    return nnx.merge(graph, placed(state, nnx.get_named_sharding(state, mesh)))


def update(case, mesh):
    """The Lowered step of Trainer for one microbatch, after GRPOLearner's way of binding the loss."""
    algorithm = grpo_learner.GRPOConfig(num_generations=case['group'])
    algorithm.temperature = 1.0
    made = []

    def build():
        policy = qwen2.Qwen2(model_config(case), rngs=nnx.Rngs(0))
        accumulate = case['microbatches'] if case['microbatches'] > 1 else None
        settings = trainer.peft_trainer.TrainingConfig(eval_every_n_steps=10**9, gradient_accumulation_steps=accumulate)
        one = trainer.Trainer(policy, optax.adamw(1e-6, b1=0.9, b2=0.95, weight_decay=0.01), settings, dict)
        one.with_loss_fn(
            lambda model, train_example, algo_config: algo_core.grpo_loss_fn(
                model, train_example, algo_config=algorithm, pad_id=PAD, eos_id=END
            ),
            has_aux=True,
        )
        one.with_gen_model_input_fn(lambda x: {'train_example': x, 'algo_config': algorithm})
        made.append(one)
        return policy, one.optimizer

    policy, optimizer = abstract(build, mesh)
    rows = case['rows'] // case['microbatches']

    def array(kind, *columns):
        return jax.ShapeDtypeStruct((rows, *columns), kind, sharding=NamedSharding(mesh, PartitionSpec('fsdp')))

    queries, tokens = case['queries'], case['tokens']
    example = grpo_learner.TrainExample(
        *(array(jnp.int32, queries), array(jnp.bool_, queries)),  # the prompt and its mask
        *(array(jnp.int32, tokens), array(jnp.int32, tokens)),  # the completion and its mask
        *(array(jnp.float32), array(jnp.float32, tokens), None),  # advantages, logprobs of the reference and the old
    )
    # as in jit_train_and_eval_step, which besides places an optimizer whose arrays exist
    return nnx.jit(made[0].create_train_step_fn(), donate_argnames=('optimizer',)).lower(policy, optimizer, example)


def decode(case, mesh):
    """The Lowered loop of the sampler over tokens, with a cache as its compiled prefill leaves it."""
    config = model_config(case)
    policy = abstract(lambda: qwen2.Qwen2(config, rngs=nnx.Rngs(0)), mesh)
    whole = case['queries'] + case['tokens']
    cache = sampler.CacheConfig(whole, config.num_layers, config.num_kv_heads, config.head_dim)
    engine = sampler.Sampler(policy, TOKENIZER, cache)
    engine.eos_ids = jnp.array([END])
    begin = functools.partial(engine.init_sample_state, include_logits=False, forbidden_token_ids=None, beam_size=None)
    sampling = dict(total_sampling_steps=whole, temperature=1.0, top_p=1.0, top_k=None, include_logprobs=True)
    ids = jax.ShapeDtypeStruct((case['rows'], case['queries']), jnp.int32)
    begun = jax.eval_shape(lambda ids: begin(ids, seed=jax.random.PRNGKey(0), **sampling), ids)
    begun = begun.replace(num_input_tokens=case['queries'])
    weights, prefill = engine._flattened_transformer_state, engine._compiled_prefill_fn
    after = jax.eval_shape(engine._prefill_fn, weights, begun, None, False)
    after = placed(after, prefill.lower(weights, begun, None, echo=False).compile().output_shardings)
    return engine._compiled_decode_fn.lower(weights, after)


def main(case, folder):
    """Compiles a case, and writes what is known of it."""
    devices = topologies.get_topology_desc(platform='tpu', topology_name=case['topology']).devices
    mesh = jax.make_mesh((len(devices), 1), ('fsdp', 'tp'), devices=devices, axis_types=(AxisType.Auto,) * 2)
    # Qwen2 leaves its sharding constraints out where the first device is a CPU
    jax.devices = lambda *_: list(devices)
    with mesh:
        lowered = {'update': update, 'decode': decode}[case['program']](case, mesh)
        peer_program.compile_and_write(lowered, ['google-tunix'], folder)


if __name__ == '__main__':
    main(json.loads(sys.argv[1]), sys.argv[2])
