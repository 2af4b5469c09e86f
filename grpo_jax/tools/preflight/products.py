"""Counts the operations of a compiled program's matrix products on one device, from its text.

TPU programs write matrix products as convolutions, whose windows show the batch dimensions. Products that XLA turned
into elementwise multiplications and sums, such as products with a vector, are not counted.
"""

from collections.abc import Iterable
import math
import re

from grpo_jax.tools.preflight import hlo
from grpo_jax.tools.preflight.hlo import Instruction, Scope


def count(text: str, trip_counts: Iterable[int] = ()) -> float:
    """Returns the floating-point operations of all matrix products in one run of a compiled program.

    text: the compiled program; trip_counts: of the loops whose text has no count, in order of appearance.
    """
    program, by_computation = hlo.parse(text), {}

    def cost(i: Instruction, scope: Scope, _: int) -> float:
        """The operations of one run of an instruction, for Walk."""
        if i.op == 'fusion':
            name = i.called_name('calls')
            if name not in by_computation:
                inner = program.computations[name]
                by_computation[name] = sum(cost(x, inner, 1) for x in inner.values())
            return by_computation[name]
        if i.op == 'custom-call':  # a kernel's cost estimate
            estimate = re.search(r'"flops":"(\d+)"', i.attributes)
            return int(estimate[1]) if estimate else 0
        return {'dot': count_dot, 'convolution': count_convolution}.get(i.op, lambda *_: 0)(i, scope)

    return hlo.Walk(program, iter(trip_counts), cost).total(program.entry)


def count_dot(i: Instruction, scope: Scope) -> int:
    """Returns the operations of a dot: 2 x elements of the result x elements of the contracted dimensions."""
    dims = scope[i.operands[0]].arrays[0].dims
    contracted = re.findall(r'\d+', hlo.require_match(r'lhs_contracting_dims=\{([\d,]*)\}', i.attributes)[1])
    return 2 * math.prod(i.arrays[0].dims) * math.prod(dims[int(axis)] for axis in contracted)


def count_convolution(i: Instruction, scope: Scope) -> int:
    """Returns the operations of a convolution: 2 for each product of a kernel and an input element, without padding."""
    inputs, kernel = (scope[name].arrays[0].dims for name in i.operands)
    input_axes, kernel_axes, result_axes = hlo.require_match(r'dim_labels=(\w+)_(\w+)->(\w+)', i.attributes).groups()
    result, window = i.arrays[0].dims, re.search(r'window=\{([^}]*)\}', i.attributes)
    options = dict(re.findall(r'(\w+)=(\S+)', window[1])) if window else {}
    products = result[result_axes.index('b')] * result[result_axes.index('f')] * kernel[kernel_axes.index('i')]
    groups = re.search(r'batch_group_count=(\d+)', i.attributes)
    for axis in range(len(input_axes) - 2):
        side = {name: options[name].split('x')[axis] for name in options}
        size = int(side['size'])
        before = int(side.get('pad', '0_0').split('_')[0])
        stride = int(side.get('stride', 1))
        spread = int(side.get('lhs_dilate', 1))
        apart = int(side.get('rhs_dilate', 1))
        outputs = result[result_axes.index(str(axis))]
        length = (inputs[input_axes.index(str(axis))] - 1) * spread + 1
        places = [out * stride - before + at * apart for out in range(outputs) for at in range(size)]
        # products along this axis: places of the window, over all outputs, with an input element (not padding)
        products *= sum(0 <= place < length and place % spread == 0 for place in places)
    return 2 * products // (int(groups[1]) if groups else 1)
