"""The update: minibatches (one optimizer update each) of microbatches (one gradient each)."""
import jax
import jax.numpy as jnp
import optax

from grpo_jax import algorithms
from grpo_jax.learner.logprobs import completion_logprobs


def update(state, experience, c, algorithm, optimizer, *, group_size, epochs, minibatches, microbatches,
           temperature, chunk, remat, dtype):
    """(TrainState, metrics f32[] by name) after epochs * minibatches optimizer updates.

    A minibatch holds whole groups. Its weights are computed before it is cut into microbatches, so
    the cut changes nothing. An update whose loss or gradient is not finite is skipped and counted in
    state.aux['bad_steps']. Metrics are means over the minibatches; those named *_max are maxima.
    """
    parts = jax.tree.map(lambda x: _interleave(x, minibatches, group_size), experience)

    def one_update(carry, minibatch):
        params, opt_state, bad = carry
        loss, grads, found = _gradient(params, minibatch, c, algorithm, microbatches=microbatches,
                                       temperature=temperature, chunk=chunk, remat=remat, dtype=dtype)
        norm = optax.global_norm(grads)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        # without tokens (all groups dropped) there is nothing to learn, and momentum must not act alone
        apply = finite & jnp.any(minibatch.rollout.loss_mask)
        changes, new_opt_state = optimizer.update(grads, opt_state, params)
        new_params = optax.apply_updates(params, changes)
        params, opt_state = jax.tree.map(lambda new, old: jnp.where(apply, new, old),
                                         (new_params, new_opt_state), (params, opt_state))
        found |= {'loss': loss, 'grad_norm': norm, 'finite': finite.astype(jnp.float32)}
        return (params, opt_state, bad + ~finite), found

    def one_epoch(carry, _):
        return jax.lax.scan(one_update, carry, parts)

    carry = (state.params, state.opt_state, state.aux['bad_steps'])
    (params, opt_state, bad), found = jax.lax.scan(one_epoch, carry, length=epochs)
    found = {name: jnp.max(x) if name.endswith('_max') else jnp.mean(x) for name, x in found.items()}
    return state.replace(step=state.step + 1, params=params, opt_state=opt_state,
                         aux=state.aux | {'bad_steps': bad}), found


def _gradient(params, minibatch, c, algorithm, *, microbatches, temperature, chunk, remat, dtype):
    """(loss, gradient, metrics) of one minibatch, accumulated in float32 over its microbatches."""
    mask = minibatch.rollout.loss_mask
    weights = algorithm.weights(mask, minibatch.group_ids)
    cut = jax.tree.map(lambda x: _interleave(x, microbatches, 1), (minibatch, weights))

    def loss_of(params, microbatch, weights):
        compute = jax.tree.map(lambda p: p.astype(dtype), params)
        logprobs, entropy = completion_logprobs(
            compute, microbatch.rollout, c, temperature=temperature, chunk=chunk, remat=remat,
            entropy_gradient=algorithm.needs_entropy_gradient)
        losses = algorithms.token_losses(algorithm, logprobs, entropy, microbatch)
        return jnp.sum(weights * losses), (logprobs, entropy)

    def accumulate(carry, part):
        (loss, seen), grads = jax.value_and_grad(loss_of, has_aux=True)(params, *part)
        return (carry[0] + loss, jax.tree.map(jnp.add, carry[1], grads)), seen

    zero = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    (loss, grads), seen = jax.lax.scan(accumulate, (jnp.float32(0), zero), cut)
    logprobs, entropy = (x.swapaxes(0, 1).reshape(mask.shape) for x in seen)
    return loss, grads, algorithms.metrics(algorithm, logprobs, entropy, minibatch)


def _interleave(x, parts, block):
    """[rows, ...] -> [parts, rows / parts, ...], dealing out blocks of rows in turn.

    Dealing keeps rows on the device that holds them when rows are sharded in contiguous runs.
    """
    dealt = x.reshape(x.shape[0] // (parts * block), parts, block, *x.shape[1:]).swapaxes(0, 1)
    return dealt.reshape(parts, x.shape[0] // parts, *x.shape[1:])
