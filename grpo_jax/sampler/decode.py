"""Decoding a DecodeBatch: a segment of many steps, how a row's token is chosen, and what a token changes."""

from collections.abc import Mapping
import importlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int, Key

from grpo_jax.models import transformer
from grpo_jax.sampler import sampling, stops
from grpo_jax.sampler.sampling import Sampling
from grpo_jax.sampler.state import DecodeBatch, RolloutState, count_remaining
from grpo_jax.types import Array


class Report(NamedTuple):
    """Numbers that the host reads after a segment: what the segment did, and what remains of the rollout."""

    live: Int[Array, '']  # rows of the batch that still decode
    steps: Int[Array, '']  # decode steps of the segment
    unfinished: Int[Array, '']  # rows, in the batch or not
    longest: Int[Array, '']  # tokens of the longest one
    tokens: Int[Array, '']  # of all rows so far


def decode_segment(
    params, batch: DecodeBatch, state: RolloutState, tables, version, model_config, options: Sampling, steps: int
):
    """Decodes a batch for at most `steps` steps; returns (DecodeBatch, RolloutState, Report).

    The segment ends earlier when no row of the batch is live, or when the last chunk is full. tables are the automata
    (see stops); version i32[] is the step of the weights, which is written beside each token.
    """
    prompt_lengths = jnp.sum(state.prompts.mask, -1, dtype=jnp.int32)
    limit = state.limit[batch.rows]
    greedy = batch.rows % state.group >= state.group - options.greedy if options.greedy else None
    choice = _Choice(state.keys[batch.rows], state.given_tokens[batch.rows], greedy)
    first = batch.cache.length - batch.cache.start  # i32[B]: completion positions at which the segment begins
    prompt_lengths = prompt_lengths[batch.rows // state.group]

    def step(carry):
        batch, records, done, i = carry
        n = batch.cache.length - batch.cache.start  # i32[B]: completion positions
        with jax.named_scope('decode'):
            hidden, cache = transformer.decode(params, batch.last, prompt_lengths - 1 + n, batch.cache, model_config)
        with jax.named_scope('draw'):
            token, logprob, forced = _choose_token(params, hidden, batch, n, choice, model_config, options)
        record = (token, logprob, forced, batch.live)
        records = jax.tree.map(
            lambda whole, new: jax.lax.dynamic_update_index_in_dim(whole, new, i, 0), records, record
        )
        batch, stopped = _after_token(batch.replace(cache=cache), token, n, tables, options)
        live = batch.live & ~stopped & (n + 1 < limit)
        return batch.replace(live=live), records, done | stopped, i + 1

    rows = batch.rows.shape[0]
    records = tuple(jnp.zeros((steps, rows), dtype) for dtype in (jnp.int32, jnp.float32, bool, bool))
    columns = sum(chunk.columns for chunk in batch.cache.chunks)

    def is_running(carry):
        return (carry[3] < steps) & (carry[0].cache.length < columns) & jnp.any(carry[0].live)

    start = (batch, records, jnp.zeros(rows, bool), jnp.int32(0))
    batch, records, done, decoded = jax.lax.while_loop(is_running, step, start)
    state = _write_records(state, batch, first, records, done, version)
    return batch, state, Report(jnp.sum(batch.live, dtype=jnp.int32), decoded, *count_remaining(state))


class _Choice(NamedTuple):
    """What the choice of a row's tokens depends on besides the model: noise, given tokens, greedy or not."""

    keys: Key[Array, ' B']
    given_tokens: Int[Array, 'B C']
    greedy: Bool[Array, ' B'] | None  # rows that take the argmax; None: no row does


def _choose_token(params, hidden, batch, n, choice, model_config, options):
    """Chooses each row's token at completion position n i32[B]: (token i32[B], logprob f32[B], forced bool[B])."""
    written, forced = _written_tokens(batch, n, choice.given_tokens, options)
    keys = jax.vmap(jax.random.fold_in)(choice.keys, n)
    head = transformer.head_weights(params, model_config)
    if batch.cache.prompt.flat and can_use_draw_kernel(head, options, keys):
        draw_kernel = importlib.import_module('grpo_jax.models.kernels.draw_kernel')  # loads Pallas, where it is chosen
        return *draw_kernel.draw(hidden, head, keys, written, options.temperature), forced
    # a barrier, or XLA multiplies with the head once for the draw and once for the logprob
    logits = jax.lax.optimization_barrier(transformer.unembed(params, hidden, model_config))
    proposal = logits
    if batch.seen is not None:
        proposal = sampling.penalize(proposal, batch.seen, options.repetition_penalty)
    if options.min_tokens and options.stop_tokens:
        is_stop = jnp.isin(jnp.arange(logits.shape[-1]), jnp.asarray(options.stop_tokens))
        proposal = jnp.where(is_stop & (n + 1 < options.min_tokens)[:, None], sampling.NEVER_DRAWN, proposal)
    token = sampling.draw(
        proposal,
        keys,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        greedy=choice.greedy,
    )
    token = jnp.where(written >= 0, written, token)
    return token, sampling.logprob(logits, token, options.temperature), forced


def can_use_draw_kernel(head: Mapping[str, Any], options: Sampling, keys: Key[Array, ' B']) -> bool:
    """Returns whether draw_kernel.draw can draw the tokens.

    The kernel needs a temperature above 0, no greedy row, and no option that changes the distribution. The head must be
    an array, not quantized, and the current mesh's tensor axis must divide its vocabulary. The keys must be
    threefry2x32, with jax_threefry_partitionable on. head: transformer.head_weights, which has one entry.
    """
    ((name, weights),) = head.items()
    return (
        not options.truncates
        and options.temperature > 0
        and not options.greedy
        and isinstance(weights, jax.Array)
        and str(jax.random.key_impl(keys)) == 'threefry2x32'
        and jax.config.jax_threefry_partitionable  # pyright: ignore[reportAttributeAccessIssue] (made at run time)
        and weights.shape[name == 'lm_head'] % jax.sharding.get_abstract_mesh().shape.get('tensor', 1) == 0
    )


def _written_tokens(batch, n, given_tokens, options):
    """(tokens i32[B] that are given or forced at position n i32[B], -1: none; bool[B], whether one is forced)."""
    given = jnp.take_along_axis(given_tokens, n[:, None], 1, mode='clip')[:, 0]
    if not options.thinking_tokens:
        return given, jnp.zeros_like(batch.live)
    index = n - options.thinking_tokens  # of a token in thinking_end
    forced = batch.thinking & (index >= 0) & (index < len(options.thinking_end))
    ending = jnp.where(forced, jnp.asarray(options.thinking_end)[jnp.maximum(index, 0)], -1)
    return jnp.where(given >= 0, given, ending), forced


def _after_token(batch, token, n, tables, options):
    """Returns (DecodeBatch, bool[B] of live rows that stop) after each row's new token i32[B] at position n i32[B]."""
    states = stops.advance(tables, batch.states, token, batch.live)
    states = stops.forget_early(tables, states, n, options.min_tokens)
    stopped = jnp.isin(token, jnp.asarray(options.stop_tokens, jnp.int32))
    if 'stop' in tables:
        stopped |= stops.is_met(tables, states, 'stop')
    seen = batch.seen
    if seen is not None:
        seen = seen | (jnp.arange(seen.shape[1]) == token[:, None])
    states, thinking = stops.follow_thinking(tables, states, batch.thinking, n, options.thinking_tokens)
    batch = batch.replace(last=token, states=states, thinking=thinking, seen=seen)
    return batch, stopped & batch.live & (n + 1 >= options.min_tokens)


def _write_records(state, batch, first, records, done, version):
    """Returns the state with a segment's records, each [steps, B]; first i32[B]: position of a row's first record."""
    tokens, logprobs, forced, valid = (x.T for x in records)
    columns = first[:, None] + jnp.arange(tokens.shape[1])
    at = (batch.rows[:, None], jnp.where(valid, columns, state.tokens.shape[1]))  # beyond the end: dropped

    def put(array, values):
        return array.at[at].set(values, mode='drop', unique_indices=True)

    def put_rows(array, values):
        return array.at[batch.rows].set(values, unique_indices=True)

    return state.replace(
        tokens=put(state.tokens, tokens),
        logprobs=put(state.logprobs, logprobs),
        forced=put(state.forced, forced),
        version=put(state.version, version),
        count=put_rows(state.count, state.count[batch.rows] + jnp.sum(valid, -1, dtype=jnp.int32)),
        done=put_rows(state.done, state.done[batch.rows] | done),
        thinking=put_rows(state.thinking, batch.thinking),
        states={name: put_rows(states, batch.states[name]) for name, states in state.states.items()},
    )
