"""How a token is drawn: the options, and the distribution with its penalties, truncation and noise."""

from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, Key

from grpo_jax import ranges
from grpo_jax.errors import NO_VALUE, BadInput
from grpo_jax.models.lora import OFF, LoraOptions
from grpo_jax.ranges import Count, Flat, Free, Natural, NoKey, OneOf, PositiveShare, Range, ReadWith, Share, Text
from grpo_jax.types import Array

OPEN = ReadWith('data.prompt_format.thinking', ('auto', 'on'), 'data.thinking=auto or on')
FORCED = ReadWith('.thinking_tokens', words='rollout.thinking_tokens')
NEVER_DRAWN = -jnp.inf  # logit of a token that must not be drawn


class Sampling(NamedTuple):
    """The options of config.rollout as plain values, which a program can be compiled for.

    A temperature of 0, which no config can have, is exact argmax.
    """

    # logits are divided by it before softmax, also for logprobs
    temperature: Annotated[float, Range(least=0.01, most=100)] = 1.0
    max_tokens: Count = 64  # C, the completion budget
    stop_tokens: NoKey[tuple[int, ...]] = ()  # a completion ends with the first of them
    pad_token: NoKey[int] = 0  # fills a completion after its end
    # probability of the tokens that may be drawn, the likeliest first; below 1 samples are biased: needs accept_bias
    top_p: PositiveShare = 1.0
    top_k: Natural = 0  # likeliest tokens that may be drawn; 0: all
    min_p: Share = 0.0  # least probability of a token that may be drawn, as a share of the likeliest token's
    # divides positive logits of tokens in prompt or completion, multiplies negative ones (arXiv 1909.05858); 1.0: none
    repetition_penalty: Annotated[float, Range(least=0.01, most=100)] = 1.0
    min_tokens: Natural = 0  # the fewest tokens that a completion may have
    # tokens of a completion after which open thinking is ended by force; 0: never
    thinking_tokens: Annotated[Natural, OPEN] = 0
    thinking_end: NoKey[tuple[int, ...]] = ()  # the tokens that are forced
    stop_strings: tuple[Text, ...] = ()  # a completion ends with the token that completes one of them
    thinking_text: NoKey[str] = ''  # the text of thinking_end
    thinking_start: NoKey[str] = ''  # the text that opens thinking; '': a completion begins inside it
    dtype: NoKey[str] = 'float32'  # of computation
    cache_dtype: Annotated[str, OneOf(('int8', ''))] = ''  # of keys and values: int8, or '' for model.dtype
    weights_dtype: Annotated[str, OneOf(('int8', ''))] = ''  # of the sampler's matrices: int8, or '' for model.dtype
    cache_bytes: NoKey[int] = 0  # of keys and values on a device; 0: unlimited
    # Pallas kernels prefill and decode: on, off, or auto: prefills on TPUs, decoding on those with two cores a chip
    kernels: Free[Annotated[str, OneOf(('auto', 'on', 'off'))]] = 'auto'
    lora: NoKey[LoraOptions] = OFF  # adapters of the parameters, which are merged into the weights
    greedy: NoKey[int] = 0  # rows, the last of each group, that take the argmax of their logits at any temperature

    @classmethod
    def from_config(cls, section: Any, *, dtype: str, corrected: bool, lora: LoraOptions = OFF) -> 'Sampling':
        """Reads config.rollout as a Sampling without ids of tokens, which `for_tokenizer` adds.

        dtype: in which the model computes. corrected: whether the algorithm corrects for logprobs of the sampler that
        differ from the learner's. lora: which adapters the parameters have. Raises BadInput for a missing key, a value
        out of its range, options that cannot work together, and a biased distribution that is not accepted.
        """
        values: dict[str, Any] = ranges.read_section(cls, section, 'rollout')
        values['stop_strings'] = tuple(values['stop_strings'])
        ranges.read_section(RolloutOptions, section, 'rollout')
        _check_bias(section, corrected)
        if section.thinking_tokens and not section.thinking_end:
            raise BadInput('rollout.thinking_end', NO_VALUE, 'is empty; name the text that ends thinking')
        if section.min_tokens > section.max_tokens or section.thinking_tokens >= section.max_tokens:
            raise BadInput(
                'rollout.min_tokens, thinking_tokens',
                (section.min_tokens, section.thinking_tokens),
                'min_tokens may be at most, and thinking_tokens must be below, '
                f'rollout.max_tokens = {section.max_tokens}; lower them, or raise that',
            )
        return cls(
            **values,
            thinking_text=section.thinking_end if section.thinking_tokens else '',
            thinking_start=section.thinking_start if section.thinking_tokens else '',
            dtype=dtype,
            cache_bytes=int(section.cache_gib * 2**30),
            lora=lora,
        )

    def for_tokenizer(self, tokenizer: Any, stop_tokens: tuple[int, ...], pad_token: int) -> 'Sampling':
        """The Sampling with stop_tokens, pad_token and the tokenizer's ids of thinking_text.

        tokenizer None: the bytes of the text stand for its ids, since no shape depends on them.
        """
        end = ()
        if self.thinking_tokens and tokenizer is None:
            end = self.thinking_text.encode()
        elif self.thinking_tokens:
            end = tokenizer.encode(self.thinking_text, add_special_tokens=False)
        return self._replace(stop_tokens=stop_tokens, pad_token=pad_token, thinking_end=tuple(end))

    @property
    def truncates(self) -> bool:
        """Whether top_p, top_k, min_p, repetition_penalty or min_tokens change softmax(logits / temperature)."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0 or self.repetition_penalty != 1 or self.min_tokens > 0

    @property
    def read_strings(self) -> dict[str, tuple[str, ...]]:
        """Strings by automaton: 'stop' strings end a completion, 'thinking' ends thinking, 'opening' opens thinking."""
        strings = {'stop': self.stop_strings, 'thinking': (self.thinking_text,), 'opening': (self.thinking_start,)}
        return {name: texts for name, texts in strings.items() if any(texts)}


class RolloutOptions(NamedTuple):
    """The keys of config.rollout; Sampling has some of them in another form, and some not at all."""

    group_size: Count = 8  # G, completions of a prompt
    sampling: Flat[Sampling] = Sampling()
    accept_bias: bool = False  # train all the same on samples of another distribution than the policy's
    # the text that opens thinking, in the prompt or in the completion; '': a completion begins inside thinking
    thinking_start: Annotated[str, FORCED] = '<think>'
    # the text that ends thinking
    thinking_end: Annotated[str, FORCED] = '</think>'
    # GiB for keys and values on a device; rows beyond them wait; 0: no limit
    cache_gib: Free[Annotated[float, Range(least=0, most=2**20)]] = 0.0


def _check_bias(section, corrected):
    """Raises BadInput if options bias what is sampled, unless accept_bias or, for dtypes, a correction permits it."""
    neutral_values = {'top_p': 1.0, 'top_k': 0, 'min_p': 0.0, 'repetition_penalty': 1.0, 'min_tokens': 0}
    for name, neutral in (neutral_values | {'cache_dtype': '', 'weights_dtype': ''}).items():
        # the logprobs of a quantized sampler are its own, so a correction knows the difference
        accepted = section.accept_bias or (corrected and name.endswith('_dtype'))
        if section[name] != neutral and not accepted:
            raise BadInput(
                f'rollout.{name}',
                section[name],
                'samples from another distribution than the one that is '
                f'trained, which biases the gradient; use {neutral!r} or set rollout.accept_bias=True',
            )


def draw(
    logits: Float[Array, 'B V'],
    keys: Key[Array, ' B'],
    *,
    temperature: float,
    top_p: float,
    top_k: int,
    min_p: float,
    greedy: Bool[Array, ' B'] | None = None,
) -> Int[Array, ' B']:
    """Draws tokens i32[B] from the truncated softmax(logits / temperature), with one key for each row.

    At temperature 0, and in greedy rows, the token is the exact argmax. The noise is Gumbel, so a row's token depends
    on its own key and not on other rows.
    """
    if temperature == 0:
        return jnp.argmax(logits, -1).astype(jnp.int32)
    scaled = logits / temperature
    if top_p < 1 or top_k or min_p:
        scaled = truncate(jax.nn.log_softmax(scaled, -1), top_p=top_p, top_k=top_k, min_p=min_p)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[-1:]))(keys)
    noisy = scaled + noise if greedy is None else jnp.where(greedy[:, None], logits, scaled + noise)
    best = jax.lax.platform_dependent(noisy, cpu=_argmax_on_cpu, default=lambda x: jnp.argmax(x, -1))
    return best.astype(jnp.int32)


def _argmax_on_cpu(x):
    """argmax over the last axis, in a form that XLA vectorizes on CPUs: there jnp.argmax runs one number at a time."""
    best = jnp.max(x, -1, keepdims=True)
    return jnp.min(jnp.where(x == best, jnp.arange(x.shape[-1]), x.shape[-1] - 1), -1)


def logprob(logits: Float[Array, 'B V'], tokens: Int[Array, ' B'], temperature: float) -> Float[Array, ' B']:
    """f32[B]: log softmax(logits / temperature) at each row's token, without truncation; temperature 0 counts as 1."""
    scaled = logits / (temperature or 1.0)
    # a masked sum and not an index: indexing logits that are sharded over the vocabulary gathers them
    chosen = jnp.arange(logits.shape[-1]) == tokens[:, None]
    return jnp.sum(jnp.where(chosen, scaled, 0.0), -1) - jax.nn.logsumexp(scaled, -1)


def penalize(logits: Float[Array, 'B V'], seen: Bool[Array, 'B V'], penalty: float) -> Float[Array, 'B V']:
    """The logits f32[B, V], where a seen token's logit is divided by the penalty if above 0, else multiplied by it."""
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def truncate(logprobs: Float[Array, 'B V'], *, top_p: float, top_k: int, min_p: float) -> Float[Array, 'B V']:
    """The logprobs, with -inf for tokens that are not kept; every row keeps its best token.

    top_k keeps the k best tokens. min_p keeps tokens with at least min_p times the probability of the best. top_p
    then keeps the smallest set of best tokens whose mass, renormalized after the other two, reaches top_p.
    """
    if top_k:
        kth = jax.lax.top_k(logprobs, min(top_k, logprobs.shape[-1]))[0][:, -1:]
        logprobs = jnp.where(logprobs >= kth, logprobs, NEVER_DRAWN)
    if min_p:
        best = jnp.max(logprobs, -1, keepdims=True)
        logprobs = jnp.where(logprobs >= best + jnp.log(min_p), logprobs, NEVER_DRAWN)
    if top_p < 1:
        ordered = -jnp.sort(-logprobs, -1)
        mass = jax.nn.softmax(ordered, -1)
        inside = jnp.cumsum(mass, -1) - mass < top_p
        last = jnp.min(jnp.where(inside, ordered, jnp.inf), -1, keepdims=True)
        logprobs = jnp.where(logprobs >= last, logprobs, NEVER_DRAWN)
    return logprobs
