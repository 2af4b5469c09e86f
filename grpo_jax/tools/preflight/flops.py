"""Counts the floating-point operations of matrix products in a program before it is compiled.

cost_analysis() counts a loop's body once. Here a scan's body counts as often as it runs, recomputation in a backward
pass counts again, and work in `shard_map` counts for every shard. Work that shardings repeat on several devices
outside `shard_map` is not seen. jax 0.10 to 0.12 have these names of primitives and parameters; jax does not promise
to keep them.
"""

from collections.abc import Iterable
import math
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr


def count(jaxpr: Jaxpr | ClosedJaxpr, trip_counts: Iterable[int] = ()) -> tuple[int, int]:
    """Returns (floating-point operations of all devices together, number of loops with unknown trip count).

    jaxpr: of the traced program; trip_counts: of the while loops in order of appearance, an outer loop before its inner
    loops. A while loop without one counts once.
    """
    counts_left, unknown = iter(trip_counts), 0

    def count_all(jaxpr):
        return sum(map(count_equation, getattr(jaxpr, 'jaxpr', jaxpr).eqns))

    def count_equation(equation):
        """The operations of one equation, with the equations inside a loop, branch or call."""
        nonlocal unknown
        name, params = equation.primitive.name, equation.params
        if name == 'dot_general':
            return count_dot(equation)
        if name == 'conv_general_dilated':
            return count_convolution(equation)
        if name == 'while':
            times = next(counts_left, None)
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


def count_dot(equation: Any) -> int:
    """Returns the operations of a dot_general: 2 x elements of the result x elements of the contracted dimensions."""
    (contracted, _), _ = equation.params['dimension_numbers']
    shape = equation.invars[0].aval.shape
    return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(shape[i] for i in contracted)


def count_convolution(equation: Any) -> int:
    """Returns the operations of a convolution: 2 x elements of the result x kernel elements of one output feature."""
    kernel, numbers = equation.invars[1].aval.shape, equation.params['dimension_numbers']
    return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(kernel) // kernel[numbers.rhs_spec[0]]
