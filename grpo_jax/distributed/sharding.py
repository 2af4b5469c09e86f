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
    of_params, everywhere, waits = params(c, mesh), replicated(mesh), 'optimizer' in offload
    aux = jax.tree.map(lambda _: everywhere, abstract.aux)
    if 'critic' in aux:
        of_critic, of_moments = scalar_params(c, mesh), abstract.aux['critic']['opt_state']
        aux['critic'] = {'params': of_critic,
                         'opt_state': moments(critic_optimizer, of_moments, of_critic, mesh, waits)}
    reference = in_host(of_params) if 'reference' in offload else of_params
    return abstract.replace(
        step=everywhere, params=of_params, aux=aux, ref_params=None if abstract.ref_params is None else reference,
        opt_state=moments(optimizer, abstract.opt_state, of_params, mesh, waits))


def moments(optimizer, opt_state, of_params, mesh, waits=False):
    """Shardings of an optimizer's abstract state: what it keeps of each parameter lies like the parameter.

    If it waits, all of it does so in the hosts' memory.
    """
    found = optax.tree_utils.tree_map_params(optimizer, lambda _, sharding: sharding, opt_state, of_params,
                                             transform_non_params=lambda _: replicated(mesh))
    return in_host(found) if waits else found


def in_host(shardings):
    """The same shardings in the hosts' memory."""
    return jax.tree.map(lambda one: one.with_memory_kind(HOST), shardings)
