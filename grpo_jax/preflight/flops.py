"""Floating-point operations of matrix products, counted in a program before it is compiled.

cost_analysis() counts a loop's body once; here the body of a scan counts as often as it runs, what is recomputed
in a backward pass counts again, and what `shard_map` runs on every shard counts for each. Where a layout makes
devices repeat each other's work outside `shard_map`, that is not seen.
"""

import math

from jax.extend.core import ClosedJaxpr, Jaxpr


def count(jaxpr, turns=()):
    """(operations of all devices together, loops whose trip count is not known and that count once).

    turns has the trip counts of the while loops, in order of their appearance, an outer one before those within.
    """
    left, unknown = iter(turns), 0

    def of(jaxpr):
        return sum(map(of_equation, getattr(jaxpr, 'jaxpr', jaxpr).eqns))

    def of_equation(equation):
        nonlocal unknown
        name, params = equation.primitive.name, equation.params
        if name == 'dot_general':
            return product(equation)
        if name == 'conv_general_dilated':
            return convolution(equation)
        if name == 'while':
            times = next(left, None)
            unknown += times is None
            return (1 if times is None else times) * (of(params['cond_jaxpr']) + of(params['body_jaxpr']))
        inner = [x for x in params.values() if isinstance(x, Jaxpr | ClosedJaxpr)]
        if name == 'cond':
            return max(map(of, params['branches']))
        if name == 'scan':
            return params['length'] * sum(map(of, inner))
        if name == 'shard_map':
            axes = params.get('newly_manual_axes', params.get('manual_axes'))  # by the version of jax
            return math.prod(params['mesh'].shape[axis] for axis in axes) * sum(map(of, inner))
        if name == 'pallas_call':
            told = params['cost_estimate']
            return told.flops if told else math.prod(params['grid_mapping'].grid) * sum(map(of, inner))
        return sum(map(of, inner))

    return of(jaxpr), unknown


def product(equation):
    """Operations of a dot_general: 2 for each element of the result and of the contracted dimensions."""
    (contracted, _), _ = equation.params['dimension_numbers']
    shape = equation.invars[0].aval.shape
    return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(shape[i] for i in contracted)


def convolution(equation):
    """Operations of a convolution: 2 for each element of the result and of the kernel of one output feature."""
    kernel, numbers = equation.invars[1].aval.shape, equation.params['dimension_numbers']
    return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(kernel) // kernel[numbers.rhs_spec[0]]
