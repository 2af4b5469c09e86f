"""Low-rank adapters (LoRA, arXiv 2106.09685): W + scale A B for matrices in attention and mlp, where W is frozen.

The parameters of a policy with adapters are one tree, in which an adapted matrix is a linear.Adapted. The learner
computes with the three arrays; the sampler decodes with the sum (`merge`), made for each rollout, and a rollout whose
weights lack the adapters ends the run (`inspect`; run.measure.sampler_metrics). `split` makes two trees, the trained
and the frozen parameters; only the trained ones have gradients and moments, and are in checkpoints, beside a digest of
the frozen ones. A resumed run reads these again, from the model's folder or from its cold start, or draws them again. A
tree without adapters is trained as a whole, and every function here returns it unchanged.
"""

from collections.abc import Callable, Mapping
import math
import re
from typing import Annotated, Any, Literal, NamedTuple
import zlib

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from grpo_jax import coming_from, ranges
from grpo_jax.errors import BadInput
from grpo_jax.models import transformer
from grpo_jax.models.linear import SUMMED_AXES, Adapted, Int8, in_dtype, int8_sharding, to_float, to_int8
from grpo_jax.ranges import Range, ReadWith
from grpo_jax.types import Param, map_table

MATRICES = tuple(name for name in SUMMED_AXES if name not in ('embed', 'lm_head'))  # that can have an adapter
PATTERN = "a regular expression of names, like 'w[qv]'"
ADAPTED = ReadWith('.rank', words='model.lora.rank')
NEED_RANK = ('path', 'base_dtype')  # options that nothing reads where the rank is 0


class Inspection(NamedTuple):
    """Numbers that show whether the weights that a sampler decodes with contain the adapters."""

    checksum: Any  # u32[]: the adapted matrices' bits, summed modulo 2^32
    share: Any  # f32[]: share of their elements that differ from the frozen matrices
    due: Any  # f32[]: the share that should differ, found by merging again; small changes vanish in rounding


class LoraOptions(NamedTuple):
    """config.model.lora: which matrices have adapters, and how large these are."""

    rank: Annotated[int, Range(least=0, most=4096)] = 0  # rank of adapters; 0: none, all weights are trained
    # an adapter's product is multiplied by alpha / rank
    alpha: Annotated[float, Range(above=0, most=1e6), ADAPTED] = 32.0
    # regular expression of the matrices that have adapters: wq, wk, wv, wo, w_gate, w_up, w_down
    targets: Annotated[str, ranges.Length(1), PATTERN, ADAPTED] = '.*'
    # whether an adapter's product is multiplied by alpha / sqrt(rank) instead (arXiv 2312.03732)
    rslora: Annotated[bool, ADAPTED] = False
    path: str = ''  # PEFT folder of adapters to begin with; '': new ones, which change nothing
    base_dtype: Literal['', 'int8'] = ''  # dtype of frozen matrices with adapters: int8; '': model.dtype

    @classmethod
    def from_config(cls, section: Any) -> 'LoraOptions':
        """Reads config.model.lora as LoraOptions.

        Raises BadInput for a missing key, a value out of its range, targets that are no regular expression or match no
        matrix, and an option of NEED_RANK where the rank is 0.
        """
        if theirs := coming_from.explain_targets(str(section.get('targets'))):
            raise BadInput('model.lora.targets', section['targets'], theirs)
        options = cls(**ranges.read_section(cls, section, 'model.lora'))
        try:
            named = [name for name in MATRICES if re.fullmatch(options.targets, name)]
        except re.error as error:
            raise BadInput('model.lora.targets', options.targets, f'is no regular expression: {error}') from None
        if not named:
            raise BadInput('model.lora.targets', options.targets, f'must match one of {", ".join(MATRICES)}')
        for name in NEED_RANK:
            value = getattr(options, name)
            if value and not options.rank:
                raise BadInput(f'model.lora.{name}', value, 'is not read with model.lora.rank = 0; set a rank')
        return options

    @property
    def scale(self) -> float:
        """The number that the product A B is multiplied by; the rank must be above 0."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


OFF = LoraOptions()


def turn_off(section: Any) -> None:
    """Changes config.model.lora, so that the model has no adapters."""
    section.rank = 0
    for name in NEED_RANK:
        section[name] = ''


def policy_table(c: transformer.ModelConfig, options: LoraOptions = OFF) -> dict[str, Any]:
    """transformer.param_table, with an Adapted of Params for each matrix that the options name.

    Param.scale is the standard deviation at init. Raises BadInput when the rank is above 0 and no matrix is named.
    """
    table = transformer.param_table(c)
    if not options.rank:
        return table
    layers = {
        name: _make_adapted(param, SUMMED_AXES[name], options) if _is_target(name, options) else param
        for name, param in table['layers'].items()
    }
    if not any(map(_is_adapted, layers.values())):
        matrices = ', '.join(name for name in MATRICES if name in layers)
        raise BadInput('model.lora.targets', options.targets, f'matches no matrix; choose from {matrices}')
    return table | {'layers': layers}


def _is_target(name, options):
    return name in MATRICES and re.fullmatch(options.targets, name) is not None


def _make_adapted(param, summed, options):
    """The Adapted of Params for a matrix: A is sharded like the matrix's summed axes, B like its other axes."""
    free = [axis for axis in range(1, len(param.shape)) if axis not in summed]
    inputs, outputs = ([(param.shape[i], param.axes[i]) for i in axes] for axes in (summed, free))
    layers, rank = (param.shape[0], param.axes[0]), (options.rank, None)
    # uniform in +-1 / sqrt(inputs), which is what PEFT draws (Kaiming's, with a slope of sqrt(5))
    std = math.prod(size for size, _ in inputs) ** -0.5 / math.sqrt(3)

    def make_param(dimensions, std):
        shape, axes = zip(*dimensions, strict=True)
        return Param(shape, axes, std)

    a, b = make_param([layers, *inputs, rank], std), make_param([layers, rank, *outputs], 0.0)
    base = param
    if options.base_dtype:  # the Params for linear.to_int8 of the matrix
        dimensions = zip(param.shape, param.axes, strict=True)
        scale_dimensions = [(1, None) if i in summed else dimension for i, dimension in enumerate(dimensions)]
        base = Int8(param, make_param(scale_dimensions, 0.0))
    return Adapted(base, a, b, options.scale)


def init(key: Any, c: transformer.ModelConfig, options: LoraOptions) -> Any:
    """New adapters, the trained tree of `split`, float32: A is drawn as PEFT draws it, B is 0. The rank is above 0."""
    trained, _ = split(policy_table(c, options))

    def leaf(path, param):
        noise_key = jax.random.fold_in(key, zlib.crc32(path.encode()))
        return math.sqrt(3) * param.scale * jax.random.uniform(noise_key, param.shape, minval=-1)

    return map_table(leaf, trained)


def freeze(params: Any, options: LoraOptions, dtype: Any) -> Any:
    """A model's plain params as the frozen tree of `split`: in dtype, but adapted matrices in options.base_dtype."""
    outside_layers = in_dtype({name: w for name, w in params.items() if name != 'layers'}, dtype)
    layers = {}
    for name, w in params['layers'].items():
        if not _is_target(name, options):
            layers[name] = w.astype(dtype)
            continue
        if options.base_dtype:  # the Int8 is sharded as the matrix is
            summed = SUMMED_AXES[name]
            shardings = int8_sharding(w.sharding, w.ndim, summed) if isinstance(w.sharding, NamedSharding) else None
            base = jax.jit(to_int8, static_argnums=1, out_shardings=shardings)(w, summed)
        else:
            base = w.astype(dtype)
        layers[name] = Adapted(base, None, None, options.scale)
    return outside_layers | {'layers': layers}


def split(params: Any) -> tuple[Any, Any]:
    """Splits a tree of parameters, Params, shardings or abstract arrays into (trained, frozen).

    With adapters: ({'layers': {name: {'a', 'b'}}}, the whole tree with a and b None in each Adapted). Without adapters:
    (the whole tree, None).
    """
    layers = params.get('layers', {})
    if not any(map(_is_adapted, layers.values())):
        return params, None
    factors = {name: {'a': w.a, 'b': w.b} for name, w in layers.items() if _is_adapted(w)}
    bare = {name: w.replace(a=None, b=None) if _is_adapted(w) else w for name, w in layers.items()}
    return {'layers': factors}, {**params, 'layers': bare}


def join(trained: Any, frozen: Any) -> Any:
    """The inverse of `split`: one tree of all parameters."""
    if frozen is None:
        return trained
    layers = {
        name: w.replace(**trained['layers'][name]) if _is_adapted(w) else w for name, w in frozen['layers'].items()
    }
    return {**frozen, 'layers': layers}


def _is_adapted(w):
    return isinstance(w, Adapted)


def merge(layers: Mapping[str, Any]) -> dict[str, Any]:
    """The weights of stacked layers, by name, with W + scale A B in float32 in place of each Adapted."""
    return {name: _merge_matrix(w) if _is_adapted(w) else w for name, w in layers.items()}


def _merge_matrix(w):
    """W + scale A B of an Adapted of stacked layers, in float32."""
    inputs, outputs = 'xyz'[: w.a.ndim - 2], 'uvw'[: w.b.ndim - 2]
    change = jnp.einsum(f'l{inputs}r,lr{outputs}->l{inputs}{outputs}', w.a, w.b, preferred_element_type=jnp.float32)
    return to_float(w.base) + w.scale * change


def inspect(
    weights: Mapping[str, Any] | tuple, layers: Mapping[str, Any], as_sampled: Callable[[Any], Any]
) -> Inspection:
    """The Inspection of the weights that a sampler decodes with.

    weights: the sampler's layers, stacked or a tuple with one layer each. layers: the learner's stacked layers, from
    which they were made. as_sampled: casts one layer's plain weights, stacked [1, ...], as the sampler does.
    """
    adapted = {name: w for name, w in layers.items() if _is_adapted(w)}

    def one_layer(inputs):
        """(bits u32[], changed and due elements f32[]) of inputs: one layer's sampled weights, and its Adapteds."""
        sampled, layer = jax.tree.map(lambda x: x[None], inputs)
        bases = {name: to_float(w.base) if isinstance(w.base, Int8) else w.base for name, w in layer.items()}
        frozen = as_sampled(bases)
        merged = as_sampled({name: _merge_matrix(w) for name, w in layer.items()})
        triples = [tuple(map(_values, (sampled[name], frozen[name], merged[name]))) for name in layer]
        bits = jnp.uint32(0)
        for x, _, _ in triples:
            kind = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
            bits += jnp.sum(jax.lax.bitcast_convert_type(x, kind), dtype=jnp.uint32)
        changed, due = (sum(jnp.sum(t[i] != t[1], dtype=jnp.float32) for t in triples) for i in (0, 2))
        return bits, changed, due

    if isinstance(weights, tuple):
        sums = jnp.uint32(0), jnp.float32(0), jnp.float32(0)
        for i in range(len(weights)):

            def with_layer(sums, i=i):
                layer = jax.tree.map(lambda x: x[i], adapted)
                return jax.tree.map(jnp.add, sums, one_layer((weights[i], layer)))

            # always true: a layer waits for the sums of the layers before, or a compiler keeps float copies of all
            sums = jax.lax.cond(sums[1] >= 0, with_layer, lambda sums: sums, sums)
        bits, changed, due = sums
    else:
        bits, changed, due = jax.lax.map(one_layer, ({name: weights[name] for name in adapted}, adapted))
    size = float(sum(_values(w.base).size for w in adapted.values()))
    return Inspection(jnp.sum(bits, dtype=jnp.uint32), jnp.sum(changed) / size, jnp.sum(due) / size)


def _values(w):
    """The array whose elements are compared: an Int8's values, or w itself."""
    return w.values if isinstance(w, Int8) else w
