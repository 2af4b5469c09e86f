"""Shardings of parameters, state and batches, all derived from the parameter table."""
import jax
from jax.sharding import NamedSharding, PartitionSpec
import optax

from grpo_jax.distributed.mesh import ROW_AXES
from grpo_jax.errors import BadInput
from grpo_jax.models import heads, transformer

HOST = 'pinned_host'  # a memory kind: the part of a host's memory that its devices read by themselves


def params(c, mesh):
    """NamedSharding of each parameter for training; BadInput when an axis does not divide a dimension."""
    def leaf(path, param):
        for size, axis in zip(param.shape, param.axes, strict=True):
            if axis and size % mesh.shape[axis]:
                fits = [n for n in range(1, mesh.shape[axis]) if size % n == 0]
                raise BadInput(f'mesh.{axis}', mesh.shape[axis], f'does not divide {path}, shape {param.shape}; '
                               f'the nearest size that does is {fits[-1]}')
        return NamedSharding(mesh, PartitionSpec(*param.axes))
    return transformer.map_table(leaf, transformer.param_table(c))


def scalar_params(c, mesh):
    """NamedSharding of each parameter of a model with a scalar head, for training."""
    of_params = params(c, mesh)
    return {name: of_params.get(name, replicated(mesh)) for name in heads.param_table(c)}


def sampler_params(c, mesh):
    """The training layout with fsdp dropped: decoding must not gather weights at every step."""
    def leaf(path, param):
        return NamedSharding(mesh, PartitionSpec(*(a if a == 'tensor' else None for a in param.axes)))
    return transformer.map_table(leaf, transformer.param_table(c))


def rows(mesh):
    """Sharding of arrays whose first axis is rows (or prompts): split over data, fsdp and context."""
    return NamedSharding(mesh, PartitionSpec(ROW_AXES))


def replicated(mesh):
    """Sharding of small values that every device holds."""
    return NamedSharding(mesh, PartitionSpec())


def state(abstract, optimizer, critic_optimizer, c, mesh, offload=()):
    """Shardings of an abstract TrainState: moments, reference and critic lie like the parameters.

    What offload names, of 'optimizer' (and the critic's) and 'reference', lies in the hosts' memory.
    """
    def waiting(name, shardings):
        return jax.tree.map(lambda s: s.with_memory_kind(HOST), shardings) if name in offload else shardings

    of_params, everywhere = params(c, mesh), replicated(mesh)
    aux = jax.tree.map(lambda _: everywhere, abstract.aux)
    if 'critic' in aux:
        of_critic = scalar_params(c, mesh)
        aux['critic'] = {'params': of_critic, 'opt_state': waiting('optimizer', moments(
            critic_optimizer, abstract.aux['critic']['opt_state'], of_critic, mesh))}
    return abstract.replace(
        step=everywhere, params=of_params, aux=aux,
        opt_state=waiting('optimizer', moments(optimizer, abstract.opt_state, of_params, mesh)),
        ref_params=None if abstract.ref_params is None else waiting('reference', of_params))


def moments(optimizer, opt_state, of_params, mesh):
    """Shardings of an optimizer's abstract state: what it keeps of each parameter lies like the parameter."""
    return optax.tree_utils.tree_map_params(optimizer, lambda _, sharding: sharding, opt_state, of_params,
                                            transform_non_params=lambda _: replicated(mesh))


def lay_out(tree, like):
    """The arrays of a tree where those of another one lie, of hosts' and devices' memories."""
    wanted = jax.tree.map(lambda x: x.sharding, like)
    if jax.tree.all(jax.tree.map(lambda x, lies: x.sharding == lies, tree, wanted)):
        return tree
    return jax.jit(lambda tree: tree, out_shardings=wanted)(tree)
