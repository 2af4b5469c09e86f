"""Several data sets at once, each with a weight: its share of the prompts, whatever its size."""

import math

from grpo_jax import data
from grpo_jax.errors import BadInput


def examples(split, *, parts):
    """Examples of all parts, dicts of name, weight and options, and source where a name comes twice.

    meta['source'] is the part's source, or its name; the id of part k's example i is i * len(parts) + k, so that
    it does not change when other parts grow.
    """
    weights(parts=parts)  # checks them before anything is read
    found = []
    for k, part in enumerate(parts):
        for row in data.examples(part['name'], part['options'], split):
            found.append(
                row
                if isinstance(row, BadInput)
                else row._replace(id=row.id * len(parts) + k, meta=row.meta | {'source': _source(part)})
            )
    return found


def weights(*, parts):
    """Source -> weight; BadInput for parts that cannot be mixed."""
    for part in parts:
        if not {'name', 'weight', 'options'} <= set(part) <= {'name', 'weight', 'options', 'source'}:
            raise BadInput('data.options.parts', part, 'must have name, weight, options and, if need be, source')
        if not isinstance(part['weight'], (int, float)) or not 0 < part['weight'] < math.inf:
            raise BadInput('data.options.parts', part, 'its weight must be above 0; leave the part out for none')
        if part['name'] == 'mixture':
            raise BadInput('data.options.parts', part, 'is itself a mixture; name its parts here')
    found = {_source(part): part['weight'] for part in parts}
    if len(found) < len(parts) or not parts:
        raise BadInput(
            'data.options.parts',
            [_source(part) for part in parts],
            'must be one or more, and distinct; tell two parts of one name apart by source',
        )
    return found


def _source(part):
    return part.get('source', part['name'])
