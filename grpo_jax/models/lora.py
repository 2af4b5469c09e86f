"""Low-rank adapters (LoRA, arXiv 2106.09685): W + scale A B for matrices of attention and mlp, of which W is frozen.

The parameters of a policy with adapters are one tree, in which an adapted matrix is a linear.Adapted. The learner
computes with it as it is; the sampler decodes with the sum (`merge`). What is trained and what is frozen are two trees
(`split`), of which the first alone has gradients, moments and a place in checkpoints. A tree without adapters is
trained as a whole, and every function here leaves it as it is.
"""

from collections.abc import Callable, Mapping
import math
import re
from typing import Annotated, Any, Literal, NamedTuple
import zlib

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from grpo_jax import ranges
from grpo_jax.errors import BadInput
from grpo_jax.models import transformer
from grpo_jax.models.linear import SUMMED_AXES, Adapted, Int8, in_dtype, int8_sharding, to_float, to_int8
from grpo_jax.ranges import Range
from grpo_jax.sharding import compiled
from grpo_jax.types import Param, map_table

MATRICES = tuple(name for name in SUMMED_AXES if name not in ('embed', 'lm_head'))  # that can have an adapter
NEED_RANK = ('path', 'base_dtype')  # options that nothing reads where the rank is 0


class Inspection(NamedTuple):
    """What became of adapters in the weights that a sampler decodes with."""

    checksum: Any  # u32[]: the sum of the bits of the adapted matrices, modulo 2^32
    share: Any  # f32[]: of their elements, those that are other numbers than the frozen ones
    due: Any  # f32[]: those that are, with adapters merged; rounding takes small changes away


class LoraOptions(NamedTuple):
    """Which matrices have adapters, and of what size: config.model.lora."""

    rank: Annotated[int, Range(least=0, most=4096)] = 0  # of the adapters; 0: none, all weights are trained
    alpha: Annotated[float, Range(above=0, most=1e6)] = 32.0  # an adapter's product is multiplied by alpha / rank
    targets: ranges.Text = '.*'  # regular expression of matrices: wq, wk, wv, wo, w_gate, w_up, w_down
    rslora: bool = False  # multiplied by alpha / sqrt(rank) instead (arXiv 2312.03732)
    path: str = ''  # PEFT folder of adapters to begin with; '': new ones, which change nothing
    base_dtype: Literal['', 'int8'] = ''  # of the frozen matrices beside adapters: int8, or '' for model.dtype

    @classmethod
    def from_config(cls, section: Any) -> 'LoraOptions':
        """LoraOptions of config.model.lora; BadInput for targets that name no matrix, and for adapters without rank."""
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
                raise BadInput(f'model.lora.{name}', value, 'is not read with model.lora.rank = 0; set its rank')
        return options

    @property
    def scale(self) -> float:
        """What the product of the two factors is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


OFF = LoraOptions()


def turn_off(section: Any) -> None:
    """Changes config.model.lora so that it asks for no adapters."""
    section.rank = 0
    for name in NEED_RANK:
        section[name] = ''


def policy_table(c: transformer.ModelConfig, options: LoraOptions = OFF) -> dict[str, Any]:
    """transformer.param_table with an Adapted of three Params in the place of each matrix that the options name.

    A row's scale is the standard deviation of its values at init. BadInput where the model has none of the matrices.
    """
    table = transformer.param_table(c)
    if not options.rank:
        return table
    layers = {
        name: _adapted(param, SUMMED_AXES[name], options) if _is_target(name, options) else param
        for name, param in table['layers'].items()
    }
    if not any(map(_is_adapted, layers.values())):
        matrices = ', '.join(name for name in MATRICES if name in layers)
        raise BadInput('model.lora.targets', options.targets, f'matches no matrix of this model: {matrices}')
    return table | {'layers': layers}


def _is_target(name, options):
    return name in MATRICES and re.fullmatch(options.targets, name) is not None


def _adapted(param, summed, options):
    """The Adapted of a matrix's Params: A lies like the axes that are summed, B like the others."""
    free = [axis for axis in range(1, len(param.shape)) if axis not in summed]
    inputs, outputs = ([(param.shape[i], param.axes[i]) for i in axes] for axes in (summed, free))
    layers, rank = (param.shape[0], param.axes[0]), (options.rank, None)
    # uniform in +-1 / sqrt(inputs), which is what PEFT draws (Kaiming's, with a slope of sqrt(5))
    spread = math.prod(size for size, _ in inputs) ** -0.5 / math.sqrt(3)

    def factor(rows, spread):
        shape, axes = zip(*rows, strict=True)
        return Param(shape, axes, spread)

    a, b = factor([layers, *inputs, rank], spread), factor([layers, rank, *outputs], 0.0)
    base = param
    if options.base_dtype:  # the Params of linear.to_int8 of the array
        rows = zip(param.shape, param.axes, strict=True)
        scale_rows = [(1, None) if i in summed else row for i, row in enumerate(rows)]
        base = Int8(param, factor(scale_rows, 0.0))
    return Adapted(base, a, b, options.scale)


def abstract_params(c: transformer.ModelConfig, options: LoraOptions, dtype: Any, mesh: Mesh) -> Any:
    """ShapeDtypeStruct of each parameter, with its training sharding: float32, and `dtype` for what is frozen.

    Of frozen matrices in int8, values and scales have their own dtypes.
    """
    trained, frozen = split(compiled.abstract_params(policy_table(c, options), mesh))

    def leaf(x):
        if isinstance(x, Int8):
            return x._replace(values=compiled.abstract(x.values.shape, jnp.int8, x.values.sharding))
        return compiled.abstract(x.shape, dtype, x.sharding)

    return join(trained, jax.tree.map(leaf, frozen, is_leaf=lambda x: isinstance(x, Int8)))


def abstract_trained(c: transformer.ModelConfig, options: LoraOptions, dtype: Any, mesh: Mesh) -> Any:
    """Of abstract_params those that are trained, which a checkpoint has."""
    return split(abstract_params(c, options, dtype, mesh))[0]


def init(key: Any, c: transformer.ModelConfig, options: LoraOptions) -> Any:
    """New trained parameters, float32: A is drawn as PEFT draws it, B is 0."""
    trained, _ = split(policy_table(c, options))

    def leaf(path, param):
        noise_key = jax.random.fold_in(key, zlib.crc32(path.encode()))
        return math.sqrt(3) * param.scale * jax.random.uniform(noise_key, param.shape, minval=-1)

    return map_table(leaf, trained)


def freeze(params: Any, options: LoraOptions, dtype: Any) -> Any:
    """The frozen tree of a model's plain parameters, in dtype, and in options.base_dtype where that is another."""
    rest = in_dtype({name: w for name, w in params.items() if name != 'layers'}, dtype)
    layers = {}
    for name, w in params['layers'].items():
        if not _is_target(name, options):
            layers[name] = w.astype(dtype)
            continue
        if options.base_dtype:  # the Int8 lies where the matrix lies
            summed = SUMMED_AXES[name]
            shardings = int8_sharding(w.sharding, w.ndim, summed) if isinstance(w.sharding, NamedSharding) else None
            base = jax.jit(to_int8, static_argnums=1, out_shardings=shardings)(w, summed)
        else:
            base = w.astype(dtype)
        layers[name] = Adapted(base, None, None, options.scale)
    return rest | {'layers': layers}


def split(params: Any) -> tuple[Any, Any]:
    """(what is trained, what is frozen) of parameters, Params, shardings or abstract arrays.

    With adapters: ({'layers': {name: {'a', 'b'}}}, the rest as a tree in which each Adapted lacks its factors).
    Without: (all of it, None).
    """
    layers = params.get('layers', {})
    if not any(map(_is_adapted, layers.values())):
        return params, None
    factors = {name: {'a': w.a, 'b': w.b} for name, w in layers.items() if _is_adapted(w)}
    bare = {name: w.replace(a=None, b=None) if _is_adapted(w) else w for name, w in layers.items()}
    return {'layers': factors}, {**params, 'layers': bare}


def join(trained: Any, frozen: Any) -> Any:
    """The parameters of which `split` makes these two."""
    if frozen is None:
        return trained
    layers = {
        name: w.replace(**trained['layers'][name]) if _is_adapted(w) else w for name, w in frozen['layers'].items()
    }
    return {**frozen, 'layers': layers}


def _is_adapted(w):
    return isinstance(w, Adapted)


def merge(layers: Mapping[str, Any]) -> dict[str, Any]:
    """The weights of stacked layers as plain arrays: the sum of each Adapted, in float32."""
    return {name: _merged(w) if _is_adapted(w) else w for name, w in layers.items()}


def without_adapters(layers: Mapping[str, Any]) -> dict[str, Any]:
    """The weights of stacked layers as plain arrays, those of each Adapted without its adapter."""
    return {name: w.base if _is_adapted(w) else w for name, w in layers.items()}


def _merged(w):
    inputs, outputs = 'xyz'[: w.a.ndim - 2], 'uvw'[: w.b.ndim - 2]
    change = jnp.einsum(f'l{inputs}r,lr{outputs}->l{inputs}{outputs}', w.a, w.b, preferred_element_type=jnp.float32)
    return to_float(w.base) + w.scale * change


def inspect(
    weights: Mapping[str, Any] | tuple, layers: Mapping[str, Any], as_sampled: Callable[[Any], Any]
) -> Inspection:
    """The Inspection of layers' weights, given the stacked layers that they were made of, some of them Adapted.

    The weights are stacked too, or a tuple of each layer's. as_sampled(plain weights of a layer, as stacked of one) are
    in the dtype of the sampler's.
    """
    adapted = {name: w for name, w in layers.items() if _is_adapted(w)}

    def one_layer(inputs):
        sampled, layer = jax.tree.map(lambda x: x[None], inputs)
        bases = {name: to_float(w.base) if isinstance(w.base, Int8) else w.base for name, w in layer.items()}
        frozen = as_sampled(bases)
        merged = as_sampled({name: _merged(w) for name, w in layer.items()})
        triples = [tuple(map(_values, (sampled[name], frozen[name], merged[name]))) for name in layer]
        bits = jnp.uint32(0)
        for x, _, _ in triples:
            kind = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
            bits += jnp.sum(jax.lax.bitcast_convert_type(x, kind), dtype=jnp.uint32)
        changed, due = (sum(jnp.sum(t[i] != t[1], dtype=jnp.float32) for t in triples) for i in (0, 2))
        return bits, changed, due

    if isinstance(weights, tuple):
        parts = [one_layer((w, jax.tree.map(lambda x, i=i: x[i], adapted))) for i, w in enumerate(weights)]
        bits, changed, due = map(jnp.stack, zip(*parts, strict=True))
    else:
        bits, changed, due = jax.lax.map(one_layer, ({name: weights[name] for name in adapted}, adapted))
    size = sum(_values(w.base).size for w in adapted.values())
    return Inspection(jnp.sum(bits, dtype=jnp.uint32), jnp.sum(changed) / float(size), jnp.sum(due) / float(size))


def _values(w):
    return w.values if isinstance(w, Int8) else w
