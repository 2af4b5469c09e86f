"""Several data sets at once; a data set's weight is its share of the prompts, whatever its size."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from grpo_jax import ranges
from grpo_jax.data import dataset
from grpo_jax.data.records import Unanswered
from grpo_jax.errors import BadInput
from grpo_jax.types import Example


class Source(NamedTuple):
    """The keys that a data set's dict in `sources` may have."""

    name: ranges.Text
    weight: ranges.Positive
    options: Mapping[str, Any]
    source: str = ''
    path: str = ''
    revision: str = ''


def examples(split: str, *, sources: Sequence[Mapping[str, Any]]) -> list[Example | BadInput]:
    """The Examples of all sources; sources: dicts with the keys of Source, `source` needed where a name comes twice.

    meta['source'] is the dict's source, else its name. The example with id i of source k has the id
    i * len(sources) + k, which does not change when other sources grow. Raises BadInput as weights does.
    """
    weights(sources=sources)  # refuses what cannot be mixed before anything is read
    mixed = []
    for k, source in enumerate(sources):
        for row in dataset.examples(source['name'], source['options'], split):
            if isinstance(row, Unanswered):
                row.example = _mark_source(row.example, sources, k)
            mixed.append(row if isinstance(row, BadInput) else _mark_source(row, sources, k))
    return mixed


def _mark_source(example, sources, k):
    """The example with the id and meta['source'] of source k."""
    return example._replace(id=example.id * len(sources) + k, meta=example.meta | {'source': _label(sources[k])})


def weights(*, sources: Sequence[Mapping[str, Any]]) -> dict[str, int | float]:
    """The weight of each source by its meta['source']; raises BadInput for sources that cannot be mixed."""
    for source in sources:
        needed = {'name', 'weight', 'options'}
        if not needed <= set(source) <= needed | {'source', 'path', 'revision'}:
            raise BadInput(
                'data.options.sources', source, 'give it name, weight, options, and nothing but source, path, revision'
            )
        ranges.check(Source, source, 'data.options.sources')
        if source['name'] == 'mixture':
            raise BadInput('data.options.sources', source, 'is itself a mixture; name its sources here')
    by_label = {_label(source): source['weight'] for source in sources}
    if len(by_label) < len(sources) or not sources:
        remedy = 'must be one or more, and distinct; add one, or give two of one name a different source'
        raise BadInput('data.options.sources', [_label(source) for source in sources], remedy)
    return by_label


def _label(source):
    """The text that names a source in meta['source'] of its Examples: its key source, else its name."""
    return source.get('source', source['name'])
