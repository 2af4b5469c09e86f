"""The collectives of the learner's forward pass on a mesh, written out here and not left to the partitioner.

Rows are cut over data and fsdp; columns over context; heads, mlp and vocabulary over tensor. A layer's weights are
gathered along fsdp when the layer runs, and their gradients are scattered. Keys and values are gathered along context.
The matrices of embedding and head are larger than the activations of all tokens, so there the tokens are gathered along
fsdp, and not the matrix.
"""

import functools
import re

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from grpo_jax.errors import BadInput
from grpo_jax.learner.options import Learning
from grpo_jax.models import attention, linear, lora, transformer
from grpo_jax.models.mesh_ops import ALONE, MeshOps, VocabShards
from grpo_jax.sharding import specs, torus
from grpo_jax.sharding.mesh import AXES, BATCH_AXES

TOKENS = PartitionSpec(BATCH_AXES, 'context')


def make_mesh_ops(model_config: transformer.ModelConfig, mesh: Mesh, learning: Learning) -> MeshOps:
    """The MeshOps by which a model's forward pass runs on the mesh, with the adapters and attention in learning.

    Raises BadInput for learner.attention='splash' on devices without such a kernel.
    """
    by = _attend_by(learning.attention, mesh)

    def attend_alone(q, k, v, visible, rule):
        return attention.attend(q, k, v, visible, rule._replace(by=by))

    if mesh.size == 1:
        return ALONE._replace(attend=attend_alone)
    table = lora.policy_table(model_config, learning.lora)
    gathered, cut = specs.sampler_params(table, mesh)['layers'], specs.params(table, mesh)['layers']
    fsdp = torus.make_axis(mesh, 'fsdp')
    embed_spec, shards = _spec(model_config, 'embed'), _vocab_shards(model_config, mesh, fsdp)

    def weights(layer):
        return {name: cut_or_gathered(name, w) for name, w in layer.items()}

    def cut_or_gathered(name, w):
        if name in linear.SUMMED_AXES and not isinstance(w, linear.Adapted) and mesh.shape['fsdp'] > 1:
            return linear.FsdpMatrix(w, ops=_gather_scatter(over_mesh, fsdp, *cut[name].spec[1:]))
        return jax.tree.map(functools.partial(_gather, over_mesh, fsdp), w, gathered[name], cut[name])

    def hidden(x):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, TOKENS))

    def over_mesh(function, in_specs, out_specs):
        return jax.shard_map(
            function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=set(AXES), check_vma=False
        )

    def attend(q, k, v, visible, rule):
        def attend_own_columns(q, k, v, visible, window):  # over the keys of all devices; the window is an array
            own = rule._replace(window=window, by=by)
            return attention.attend(q, k, v, visible, own, jax.lax.axis_index('context') * q.shape[1])

        queries, keys = PartitionSpec(BATCH_AXES, 'context', 'tensor'), PartitionSpec(BATCH_AXES, None, 'tensor')
        in_specs = (queries, keys, keys, PartitionSpec(BATCH_AXES), PartitionSpec())
        return over_mesh(attend_own_columns, in_specs, queries)(q, k, v, visible, rule.window)

    def embed(table, tokens, dtype):
        embed_own_tokens = functools.partial(_embed_own_tokens, dtype=dtype)
        return over_mesh(embed_own_tokens, (embed_spec, TOKENS), TOKENS)(table, tokens)

    def head(function, weights, *arrays):
        weight_specs = {name: _spec(model_config, name) for name in weights}

        def head_of_own_vocabulary(weights, *arrays):
            by_vocabulary = {name: _by_vocabulary(w, weight_specs[name]) for name, w in weights.items()}
            return function(by_vocabulary, *arrays, shards)

        columns = arrays[0].shape[1]
        padding = -columns % mesh.shape['context']
        arrays = [jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2)) for x in arrays]
        in_specs = (weight_specs, *(TOKENS for _ in arrays))
        outputs = over_mesh(head_of_own_vocabulary, in_specs, TOKENS)(weights, *arrays)
        return jax.tree.map(lambda x: x[:, :columns], outputs)

    return MeshOps(embed=embed, weights=weights, hidden=hidden, attend=attend, head=head)


def _gather_scatter(over_mesh, fsdp, *axes):
    """The linear.GatherScatter of a matrix that is cut along fsdp: it gathers the matrix, and scatters its gradient.

    axes: the mesh axis along which each dimension of the matrix is cut, or None.
    """
    part, whole = PartitionSpec(*axes), PartitionSpec(*(axis if axis == 'tensor' else None for axis in axes))
    dimension = axes.index('fsdp')

    def weight_gradient(spec, x, dy):
        x_axes, w_axes, y_axes = linear.axes_of(spec)
        kept = {w_axes[i]: axis for i, axis in enumerate(axes) if axis != 'fsdp'}

        def scatter_own(x, dy):
            shard = fsdp.scatter(linear.weight_gradient(spec, x, dy), dimension)
            return jax.lax.psum(shard, ('data', 'context'))

        in_specs = tuple(PartitionSpec(*TOKENS, *map(kept.get, factor[2:])) for factor in (x_axes, y_axes))
        return over_mesh(scatter_own, in_specs, part)(x, dy)

    gather = functools.partial(fsdp.gather, dimension=dimension)
    return linear.GatherScatter(over_mesh(gather, part, whole), weight_gradient)


def _gather_tokens(fsdp):
    """Makes VocabShards.gather_tokens, which gathers arrays over tokens along fsdp, and scatters their gradients."""

    @jax.custom_vjp
    def gather(x):
        return fsdp.gather(x, 0)

    gather.defvjp(lambda x: (gather(x), None), lambda _, gradient: (fsdp.scatter(gradient, 0),))
    return lambda x: gather(x) if jnp.issubdtype(x.dtype, jnp.inexact) else fsdp.gather(x, 0)


def _gather(over_mesh, fsdp, w, stacked, cut):
    """Gathers a layer's weight w along fsdp for the layer's products; the gradient of w is scattered along fsdp.

    stacked and cut: the shardings of all layers' weights, gathered and cut. The gradient is written by hand, because
    the transpose of a sharding constraint would gather the gradient as well.
    """
    whole, part = (specs.layer_sharding(x) for x in (stacked, cut))

    @jax.custom_vjp
    def gather(w):
        if 'fsdp' in part.spec:
            w = _gather_scatter(over_mesh, fsdp, *part.spec).gather(w)
        return jax.lax.with_sharding_constraint(w, whole)

    def scatter(_, gradient):
        return (jax.lax.with_sharding_constraint(gradient, part),)

    gather.defvjp(lambda w: (gather(w), None), scatter)
    return gather(w)


def _attend_by(choice, mesh):
    """The kernel of attention (Rule.by) on the mesh's devices: splash, cudnn or xla; BadInput for 'splash' on GPUs."""
    device = mesh.devices.flat[0]
    platform = device.platform
    if choice == 'splash' and platform not in ('tpu', 'cpu'):
        raise BadInput(
            'learner.attention', choice, f'is written for TPUs, and these devices are {platform}s; choose auto'
        )
    if choice != 'auto':
        return choice
    if platform == 'gpu' and re.fullmatch(r'([89]|\d\d)\.\d', device.compute_capability):
        return 'cudnn'  # an NVIDIA chip from Ampere on; AMD's capabilities are names
    return 'splash' if platform == 'tpu' else 'xla'


def _embed_own_tokens(table, tokens, dtype):
    """Embeddings of a device's tokens, though each device has only a part of the table.

    The tokens travel, and the table does not: each device looks up all tokens in its part of vocabulary and width, and
    sends the results back.
    """
    all_tokens = jax.lax.all_gather(tokens, 'fsdp', axis=0, tiled=True)
    places = all_tokens - jax.lax.axis_index('tensor') * table.shape[0]
    inside = (places >= 0) & (places < table.shape[0])
    rows = jnp.where(inside[..., None], linear.lookup(table, jnp.where(inside, places, 0), table.dtype), 0)
    rows = jax.lax.psum(rows, 'tensor')
    return jax.lax.all_to_all(rows, 'fsdp', split_axis=0, concat_axis=2, tiled=True).astype(dtype)


def _by_vocabulary(w, spec):
    """Exchanges the parts of a matrix w, so that each device gets the whole width for its part of the vocabulary.

    Before, the vocabulary is cut over tensor and the width over fsdp; afterwards the vocabulary is cut over both, and
    padded with zeros where fsdp does not divide its part.
    """
    vocabulary, width = spec.index('tensor'), spec.index('fsdp')
    padding = [(0, 0), (0, 0)]
    padding[vocabulary] = (0, -w.shape[vocabulary] % jax.lax.axis_size('fsdp'))
    return jax.lax.all_to_all(jnp.pad(w, padding), 'fsdp', split_axis=vocabulary, concat_axis=width, tiled=True)


def _vocab_shards(model_config, mesh, fsdp):
    """The VocabShards of a vocabulary that is cut over tensor, then over fsdp; tokens are gathered along fsdp."""
    axes = 'tensor', 'fsdp'
    tensor_size = model_config.vocab_size // mesh.shape['tensor']  # ids in one part of the cut over tensor

    def own_tokens(x):
        size = x.shape[0] // mesh.shape['fsdp']
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index('fsdp') * size, size)

    def vocab_range(size):
        start = jax.lax.axis_index('fsdp') * size  # the last shard may be shorter
        return jax.lax.axis_index('tensor') * tensor_size + start, jnp.clip(tensor_size - start, 0, size)

    return VocabShards(
        gather_tokens=_gather_tokens(fsdp),
        own_tokens=own_tokens,
        sum_vocab=lambda x: jax.lax.psum(x, axes),
        max_vocab=lambda x: jax.lax.pmax(x, axes),
        gather_vocab=lambda x: jax.lax.all_gather(x, axes, axis=1, tiled=True),
        max_tokens=lambda x: jax.lax.pmax(x, 'fsdp'),
        vocab_range=vocab_range,
    )


def _spec(model_config, name):
    """The PartitionSpec of the model's parameter `name`, outside the layers."""
    return PartitionSpec(*transformer.param_table(model_config)[name].axes)
