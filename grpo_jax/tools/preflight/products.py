"""Operations of a compiled program's matrix products on one device, read off its text.

What TPUs multiply stands there as convolutions, whose windows say which dimensions are those of a batch. A product that
XLA has turned into multiplications and sums, of a vector for instance, is none any more.
"""

from collections.abc import Iterable
import math
import re

from grpo_jax.tools.preflight import hlo
from grpo_jax.tools.preflight.hlo import Instruction, Scope


def count(text: str, trip_counts: Iterable[int] = ()) -> float:
    """Operations of the products of a text; trip_counts are those of the loops whose text has none, in order."""
    program, within = hlo.parse(text), {}

    def cost(i: Instruction, scope: Scope, _: int) -> float:
        if i.op == 'fusion':
            name = i.called('calls')
            if name not in within:
                inner = program.computations[name]
                within[name] = sum(cost(x, inner, 1) for x in inner.values())
            return within[name]
        if i.op == 'custom-call':  # a kernel tells
            estimate = re.search(r'"flops":"(\d+)"', i.attributes)
            return int(estimate[1]) if estimate else 0
        return {'dot': dot, 'convolution': convolution}.get(i.op, lambda *_: 0)(i, scope)

    return hlo.Walk(program, iter(trip_counts), cost).total(program.entry)


def dot(i: Instruction, scope: Scope) -> int:
    """2 for each element of the result and of the contracted dimensions."""
    dims = scope[i.operands[0]].arrays[0].dims
    contracted = re.findall(r'\d+', hlo.match(r'lhs_contracting_dims=\{([\d,]*)\}', i.attributes)[1])
    return 2 * math.prod(i.arrays[0].dims) * math.prod(dims[int(axis)] for axis in contracted)


def convolution(i: Instruction, scope: Scope) -> int:
    """2 for each product of an element of the input, and not of its padding, with one of the kernel."""
    inputs, kernel = (scope[name].arrays[0].dims for name in i.operands)
    input_axes, kernel_axes, result_axes = hlo.match(r'dim_labels=(\w+)_(\w+)->(\w+)', i.attributes).groups()
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
        # how many elements of the input meet one of the window, over all outputs along the axis
        products *= sum(0 <= place < length and place % spread == 0 for place in places)
    return 2 * products // (int(groups[1]) if groups else 1)
