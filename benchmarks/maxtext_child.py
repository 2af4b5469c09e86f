"""An update of MaxText, compiled for a TPU that is not here; benchmarks.tpu_peers runs this by MaxText's Python.

PYTHON benchmarks/maxtext_child.py CASE FOLDER

CASE is JSON: the fields of `tpu_peers.Case`. MaxText's own command for absent TPUs, train_compile, builds and compiles
the program: cross entropy of whole rows, as it is trained on text, with AdamW; there is no policy gradient in it.
FOLDER gets compiled.txt, and child.json with the compiler's figures or its refusal.
"""

import json
import os
import sys
import tempfile

os.environ |= {'TPU_SKIP_MDS_QUERY': '1', 'ALLOW_MULTIPLE_LIBTPU_LOAD': '1', 'JAX_PLATFORMS': 'cpu'}

import jax
from jax.experimental import xla_metadata

from benchmarks import peer_program

TOPOLOGIES = {'v5e:2x2': ('v5e-4', 4), 'v5e:4x4': ('v5e-16', 16), 'v5p:2x2x2': ('v5p-16', 8)}  # name there, chips
MODELS = {
    '0.5B': {  # MaxText has no such model: its own of 1.5B, which has the same layers, in these widths
        'model_name': 'qwen2.5-1.5b',
        'override_model_config': True,
        'base_emb_dim': 896,
        'base_num_query_heads': 14,
        'base_num_kv_heads': 2,
        'head_dim': 64,
        'base_mlp_dim': 4864,
        'base_num_decoder_layers': 24,
        'vocab_size': 151936,
    },
    '7B': {'model_name': 'qwen2.5-7b'},
}
BLOCKS = ('q', 'kv', 'kv_compute', 'q_dkv', 'kv_dkv', 'kv_dkv_compute', 'q_dq', 'kv_dq')  # of splash attention


def settings(case, folder):
    """MaxText's settings of a case."""
    topology, chips = TOPOLOGIES[case['topology']]
    return MODELS[case['model']] | {
        'run_name': 'update',
        'base_output_directory': folder,
        'dataset_type': 'synthetic',
        'enable_checkpointing': False,
        'skip_jax_distributed_system': True,
        'compile_topology': topology,
        'compile_topology_num_slices': 1,
        'ici_fsdp_parallelism': chips,
        'attention': 'flash',
        'weight_dtype': case['weights'],
        'dtype': 'bfloat16',
        'opt_type': 'adamw',
        'mu_dtype': 'float32',
        'per_device_batch_size': case['rows'] // case['microbatches'] // chips,
        'gradient_accumulation_steps': case['microbatches'],
        'max_target_length': case['queries'] + case['tokens'],
        'remat_policy': case['remat'].lower(),
        'num_vocab_tiling': case['tiling'],
        **{f'sa_block_{name}': peer_program.attention_block(case) for name in BLOCKS},
    }


def main(case, folder):
    """Compiles a case, and writes what is known of it."""
    # jax 0.10 has none; an attention that is not asked for here calls it, and MaxText imports it in any case
    xla_metadata.must_fuse_call = getattr(xla_metadata, 'must_fuse_call', None)
    import maxtext
    from maxtext.trainers.pre_train import train_compile
    from maxtext.utils import max_utils

    def write(function, inputs, options, mesh, in_shardings, out_shardings, static, donated, config, rules):
        """In the place of train_compile.jit_and_compile, which keeps the lowered program to itself."""
        with jax.set_mesh(mesh), rules:
            lowered = jax.jit(
                function,
                in_shardings=in_shardings,
                out_shardings=out_shardings,
                static_argnums=static,
                donate_argnums=donated,
            ).lower(*inputs, **options)
        compiler_options = max_utils.parse_libtpu_flags_to_dict(config.compile_xla_flags)
        peer_program.compile_and_write(lowered, ['maxtext'], folder, compiler_options)
        sys.exit()

    train_compile.jit_and_compile = write
    base = os.path.join(os.path.dirname(maxtext.__file__), 'configs', 'base.yml')
    with tempfile.TemporaryDirectory() as scratch:
        train_compile.main(['', base, *(f'{name}={value}' for name, value in settings(case, scratch).items())])


if __name__ == '__main__':
    main(json.loads(sys.argv[1]), sys.argv[2])
