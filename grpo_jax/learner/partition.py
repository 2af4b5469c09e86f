"""The learner's forward pass on a mesh: which collectives it makes is written down here, not left to the partitioner.

Rows are cut over data and fsdp, columns over context, heads, mlp and vocabulary over tensor. Each layer's weights are
gathered along fsdp when it comes to them, and their gradients scattered; keys and values are gathered along context.
To the embedding and the head, which are larger than their tokens' vectors, it is the tokens that travel along fsdp.
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from grpo_jax.models import attention, transformer
from grpo_jax.models.collectives import ALONE, Collectives, VocabShards
from grpo_jax.sharding import specs
from grpo_jax.sharding.mesh import AXES, BATCH_AXES

TOKENS = PartitionSpec(BATCH_AXES, 'context')


def make_collectives(c, mesh):
    """Collectives of a model on the mesh."""
    if mesh.size == 1:
        return ALONE
    whole = specs.sampler_params(transformer.param_table(c), mesh)['layers']

    def weights(of_layer):
        return {
            name: jax.lax.with_sharding_constraint(w, NamedSharding(mesh, PartitionSpec(*whole[name].spec[1:])))
            for name, w in of_layer.items()
        }

    def hidden(x):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, TOKENS))

    def on_devices(function, in_specs, out_specs):
        return jax.shard_map(
            function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=set(AXES), check_vma=False
        )

    def attend(q, k, v, visible):
        def own(q, k, v, visible):
            return attention.attend(q, k, v, visible, jax.lax.axis_index('context') * q.shape[1])

        queries, keys = PartitionSpec(BATCH_AXES, 'context', 'tensor'), PartitionSpec(BATCH_AXES, None, 'tensor')
        return on_devices(own, (queries, keys, keys, PartitionSpec(BATCH_AXES)), queries)(q, k, v, visible)

    def embed(table, tokens, dtype):
        def look_up(table, tokens):
            # the tokens travel, not the table: every device looks all of them up in its part of the width
            everyone = jax.lax.all_gather(tokens, 'fsdp', axis=0, tiled=True)
            places = everyone - jax.lax.axis_index('tensor') * table.shape[0]
            inside = (places >= 0) & (places < table.shape[0])
            rows = jnp.where(inside[..., None], table[jnp.where(inside, places, 0)], 0)
            rows = jax.lax.psum(rows, 'tensor')
            return jax.lax.all_to_all(rows, 'fsdp', split_axis=0, concat_axis=2, tiled=True).astype(dtype)

        return on_devices(look_up, (_spec(c, 'embed'), TOKENS), TOKENS)(table, tokens)

    shards = _vocab_shards(c, mesh)

    def head(function, weights, *arrays):
        def own(weights, *arrays):
            return function({name: _by_vocabulary(w, _spec(c, name)) for name, w in weights.items()}, *arrays, shards)

        columns = arrays[0].shape[1]
        padding = -columns % mesh.shape['context']
        arrays = [jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2)) for x in arrays]
        specs = {name: _spec(c, name) for name in weights}
        found = on_devices(own, (specs, *(TOKENS for _ in arrays)), TOKENS)(weights, *arrays)
        return jax.tree.map(lambda x: x[:, :columns], found)

    return Collectives(embed=embed, weights=weights, hidden=hidden, attend=attend, head=head)


def _by_vocabulary(w, spec):
    """A device's part of a matrix cut over tensor and fsdp, with its vocabulary cut over both, and its width whole."""
    vocabulary, width = spec.index('tensor'), spec.index('fsdp')
    parts = jax.lax.axis_size('fsdp')
    padding = [(0, 0), (0, 0)]
    padding[vocabulary] = (0, -w.shape[vocabulary] % parts)
    return jax.lax.all_to_all(jnp.pad(w, padding), 'fsdp', split_axis=vocabulary, concat_axis=width, tiled=True)


def _vocab_shards(c, mesh):
    """VocabShards of heads whose vocabulary is cut over tensor and fsdp; tokens are gathered along fsdp."""
    axes = 'tensor', 'fsdp'
    of_tensor = c.vocab_size // mesh.shape['tensor']

    def own(x):
        size = x.shape[0] // mesh.shape['fsdp']
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index('fsdp') * size, size)

    def span(size):
        start = jax.lax.axis_index('fsdp') * size  # the last part may be shorter
        return jax.lax.axis_index('tensor') * of_tensor + start, jnp.clip(of_tensor - start, 0, size)

    return VocabShards(
        gather_tokens=lambda x: jax.lax.all_gather(x, 'fsdp', tiled=True),
        own_tokens=own,
        sum_vocab=lambda x: jax.lax.psum(x, axes),
        max_vocab=lambda x: jax.lax.pmax(x, axes),
        max_tokens=lambda x: jax.lax.pmax(x, 'fsdp'),
        vocab_range=span,
    )


def _spec(c, name):
    return PartitionSpec(*transformer.param_table(c)[name].axes)
