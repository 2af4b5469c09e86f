"""Floating-point operations of matrix products, counted in a program before it is compiled.

cost_analysis() counts a loop's body once; here the body of a scan counts as often as it runs, what is recomputed
in a backward pass counts again, and what `shard_map` runs on every shard counts for each. Work that devices repeat
outside `shard_map`, by their shardings, is not seen. Names of primitives and of their parameters are those of jax
0.10 to 0.12, which jax does not promise to keep.
"""

from collections.abc import Iterable
import math
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr


def count(jaxpr: Jaxpr | ClosedJaxpr, trip_counts: Iterable[int] = ()) -> tuple[int, int]:
    """(operations of all devices together, loops whose trip count is not known and that count once).

    trip_counts are those of the while loops, in order of their appearance, an outer loop before those within.
    """
    left, unknown = iter(trip_counts), 0

    def count_all(jaxpr):
        return sum(map(count_equation, getattr(jaxpr, 'jaxpr', jaxpr).eqns))

    def count_equation(equation):
        nonlocal unknown
        name, params = equation.primitive.name, equation.params
        if name == 'dot_general':
            return product(equation)
        if name == 'conv_general_dilated':
            return convolution(equation)
        if name == 'while':
            times = next(left, None)
            unknown += times is None
            return (1 if times is None else times) * (count_all(params['cond_jaxpr']) + count_all(params['body_jaxpr']))
        inner = [x for x in params.values() if isinstance(x, Jaxpr | ClosedJaxpr)]
        if name == 'cond':
            return max(map(count_all, params['branches']))
        if name == 'scan':
            return params['length'] * sum(map(count_all, inner))
        if name == 'shard_map':
            axes = params.get('newly_manual_axes', params.get('manual_axes'))  # by the version of jax
            return math.prod(params['mesh'].shape[axis] for axis in axes) * sum(map(count_all, inner))
        if name == 'pallas_call':
            estimate = params['cost_estimate']
            return estimate.flops if estimate else math.prod(params['grid_mapping'].grid) * sum(map(count_all, inner))
        return sum(map(count_all, inner))

    return count_all(jaxpr), unknown


def product(equation: Any) -> int:
    """Operations of a dot_general: 2 for each element of the result and of the contracted dimensions."""
    (contracted, _), _ = equation.params['dimension_numbers']
    shape = equation.invars[0].aval.shape
    return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(shape[i] for i in contracted)


def convolution(equation: Any) -> int:
    """Operations of a convolution: 2 for each element of the result and of the kernel of one output feature."""
    kernel, numbers = equation.invars[1].aval.shape, equation.params['dimension_numbers']
    return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(kernel) // kernel[numbers.rhs_spec[0]]
