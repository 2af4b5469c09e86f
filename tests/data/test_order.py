"""Which examples come when: the same after a resume, for any number of processes and devices, and in a mixture."""

import collections
import json
import os
import subprocess
import sys

import jax
from ml_collections import ConfigDict
import numpy as np
import pytest

from grpo_jax import data
from grpo_jax.configs import arithmetic as demo
from grpo_jax.data import mixture
from grpo_jax.errors import BadInput
from grpo_jax.grouping import Grouping
from grpo_jax.models import hf
from grpo_jax.sharding import batches
from grpo_jax.sharding import mesh as meshes

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SEED, STEPS, PROMPTS = 3, 20, 8
SIZES = {'small': 5, 'large': 40}
WEIGHTS = {'small': 3.0, 'large': 1.0}


@pytest.fixture(scope='module')
def tokenizer():
    return hf.load_tokenizer(os.path.join(ROOT, demo.get_config().model.path))


def write_sources(folder):
    for name, size in SIZES.items():
        (folder / f'{name}_train.jsonl').write_text(
            ''.join(json.dumps({'q': f'{"1" * len(name)}+{i}', 'a': i}) + '\n' for i in range(size))
        )
    return [
        {
            'name': 'files',
            'weight': weight,
            'source': name,
            'options': {'folder': str(folder / f'{name}_{{split}}.jsonl'), 'prompt_field': 'q', 'answer_field': 'a'},
        }
        for name, weight in WEIGHTS.items()
    ]


def options(sources, **changes):
    section = ConfigDict(
        demo.get_config().data.to_dict() | {'name': 'mixture', 'options': {'sources': sources}} | changes
    )
    return data.DataOptions.from_config(section)


@pytest.fixture(scope='module')
def mixed(tmp_path_factory, tokenizer):
    """The Dataset of a mixture of 5 and 40 examples with weights 3 and 1."""
    return data.load(options(write_sources(tmp_path_factory.mktemp('sources'))), 'train', tokenizer)


@pytest.fixture(scope='module', params=['single', 'mixture'])
def dataset(request, mixed):
    """The same examples as one data set, and as a mixture."""
    return mixed if request.param == 'mixture' else mixed._replace(sources=())


def steps(dataset, first=0, last=STEPS, retired=None):
    """i64[steps, PROMPTS]: the indices of the steps first..last, each from nothing but the step's number."""
    none = np.zeros(len(dataset.examples), bool)
    return np.array(
        [
            data.walk(SEED, step * PROMPTS, PROMPTS, none if retired is None else retired, dataset.sources)[0]
            for step in range(first, last + 1)
        ]
    )


def test_order_is_that_of_earlier_versions(dataset):
    # a resumed run must see the prompts that the first part would have seen; the small ones are 0 to 4
    expected = [4, 2, 1, 10, 3, 0, 3, 17] if dataset.sources else [44, 18, 21, 23, 4, 17, 41, 37]
    assert steps(dataset, last=0).tolist() == [expected]


def test_resumed_order_goes_on_where_it_stopped(dataset):
    whole = steps(dataset)
    np.testing.assert_array_equal(steps(dataset, first=11), whole[11:])
    position, none = 0, np.zeros(len(dataset.examples), bool)
    for row in whole:  # as the loop does, which keeps the position
        chosen, position = data.walk(SEED, position, PROMPTS, none, dataset.sources)
        np.testing.assert_array_equal(chosen, row)
    assert position == whole.size


def test_indices_are_the_walk_when_none_is_retired(dataset):
    for step, row in enumerate(steps(dataset)):
        np.testing.assert_array_equal(data.indices(SEED, step, PROMPTS, len(dataset.examples), dataset.sources), row)


PROCESS = """
import json, sys
import numpy as np
from grpo_jax import data
seed, steps, prompts, size, sources = json.loads(sys.argv[1])
mixed = [(weight, np.array(members)) for weight, members in sources]
print(json.dumps({
    kind: [data.indices(seed, step, prompts, size, sources).tolist() for step in range(steps + 1)]
    for kind, sources in [('single', ()), ('mixture', mixed)]
}))
"""


@pytest.fixture(scope='module')
def orders(mixed):
    """The orders that two other processes compute."""
    sources = [(weight, members.tolist()) for weight, members in mixed.sources]
    arguments = json.dumps([SEED, STEPS, PROMPTS, len(mixed.examples), sources])
    running = [
        subprocess.Popen([sys.executable, '-c', PROCESS, arguments], cwd=ROOT, text=True, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    return [json.loads(process.communicate(timeout=300)[0]) for process in running]


def test_every_process_computes_the_same_order(dataset, orders):
    for order in orders:
        np.testing.assert_array_equal(order['mixture' if dataset.sources else 'single'], steps(dataset))


@pytest.mark.parametrize('devices', [1, 2, 8])
def test_rows_lie_on_any_number_of_devices_in_the_same_order(dataset, devices):
    mesh = meshes.make({'data': devices, 'fsdp': 1, 'tensor': 1})
    for chosen in steps(dataset):
        examples, prompts = data.prompts(dataset, chosen, 16, 0)
        placed = batches.put_rows(prompts, mesh)
        shards = sorted(placed.ids.addressable_shards, key=lambda shard: shard.index[0].start or 0)
        assert len(shards) == devices
        ids = np.concatenate([jax.device_get(shard.data) for shard in shards]).tolist()
        assert ids == [e.id for e in examples] == [dataset.examples[i].id for i in chosen]
        np.testing.assert_array_equal(placed.tokens, prompts.tokens)


# mixtures


def labels(dataset, chosen):
    return [dataset.examples[i].meta['source'] for i in np.ravel(chosen)]


def test_sources_come_in_proportion_to_their_weights_whatever_their_sizes(mixed):
    assert collections.Counter(e.meta['source'] for e in mixed.examples) == SIZES
    for last, count in [(STEPS, 168), (4, 40)]:
        counts = collections.Counter(labels(mixed, steps(mixed, last=last)))
        assert counts['small'] == count * 3 // 4 and counts['large'] == count // 4


def test_every_epoch_of_a_source_is_a_permutation_and_they_differ(mixed):
    whole = steps(mixed, last=2 * STEPS).ravel()
    epochs = np.array([i for i in whole if i < SIZES['small']])[:200].reshape(40, 5)
    assert (np.sort(epochs) == np.arange(5)).all() and len({tuple(epoch) for epoch in epochs}) > 20
    large = [i for i in whole if i >= SIZES['small']]
    assert sorted(large[:40]) == list(range(5, 45)) and large[:40] != large[40:80]


def test_seeds_have_orders_of_their_own_also_an_epoch_later(mixed):
    none = np.zeros(len(mixed.examples), bool)
    small = [[i for i in data.walk(seed, 0, 400, none, mixed.sources)[0] if i < 5] for seed in (0, 1)]
    assert small[0] != small[1] and small[0][5:255] != small[1][:250]


def test_ids_are_distinct_and_stay_when_another_source_grows(tmp_path, mixed, tokenizer):
    sources = write_sources(tmp_path)
    before = {(e.meta['source'], e.answer): e.id for e in mixed.examples}
    assert len(set(before.values())) == sum(SIZES.values())
    with open(tmp_path / 'small_train.jsonl', 'a', encoding='utf8') as file:
        file.write('{"q": "new", "a": "-1"}\n' * 3)
    grown = data.load(options(sources, max_prompt_tokens=64), 'train', tokenizer)
    after = {(e.meta['source'], e.answer): e.id for e in grown.examples}
    assert {name: after[name] for name in before} == before and len(grown.examples) == 48


def test_retired_examples_are_passed_over_and_a_retired_source_leaves_its_share_to_the_others(mixed):
    retired = np.isin(np.arange(45), [0, 3, 10, 44])
    whole = steps(mixed, last=100).ravel()
    chosen, _ = data.walk(SEED, 0, 300, retired, mixed.sources)
    np.testing.assert_array_equal(chosen, whole[~retired[whole]][:300])
    retired = np.arange(45) < 5
    chosen, end = data.walk(SEED, 0, 8, retired, mixed.sources)
    assert set(labels(mixed, chosen)) == {'large'} and 29 <= end <= 32
    with pytest.raises(BadInput, match='has retired all 45 prompts'):
        data.walk(SEED, 0, 1, np.ones(45, bool), mixed.sources)


def test_pick_keeps_the_sources_of_what_is_left(mixed):
    picked = data.pick(mixed, [44, 2, 7, 0])
    assert [(weight, members.tolist()) for weight, members in picked.sources] == [(3.0, [1, 3]), (1.0, [0, 2])]
    assert labels(picked, picked.sources[0][1]) == ['small', 'small']
    alone = data.pick(mixed, [7, 8])
    assert [(weight, members.tolist()) for weight, members in alone.sources] == [(1.0, [0, 1])]
    assert set(labels(alone, steps(alone))) == {'large'}


def test_malformed_rows_of_sources_are_counted_together_and_named(tmp_path, tokenizer, caplog):
    sources = write_sources(tmp_path)
    (tmp_path / 'small_train.jsonl').write_text('{"q": "1+1", "a": 2}\n{\n')
    dataset = data.load(options(sources), 'train', tokenizer)
    assert [e.id for e in dataset.examples[:2]] == [0, 1] and '1 of 42 rows' in caplog.text
    with pytest.raises(BadInput, match=r'small_train\.jsonl, line 2'):
        data.load(options(sources, strict=True), 'train', tokenizer)


def test_sources_of_other_data_sets_need_no_source(tokenizer):
    sums = demo.get_config().data.options.to_dict() | {'count': 10}
    sources = [
        {'name': 'arithmetic', 'weight': 1, 'options': sums},
        {'name': 'tinystories', 'weight': 1, 'options': {}},
    ]
    found = mixture.examples('test', sources=sources)
    assert collections.Counter(e.meta['source'] for e in found) == {'arithmetic': 10, 'tinystories': 24}
    assert found[0].meta.keys() == {'demonstration', 'source'} and len({e.id for e in found}) == 34


FILES = {'name': 'files', 'weight': 1.0, 'options': {}}


@pytest.mark.parametrize(
    'sources, message',
    [
        ([], r'= \[\]: must be one or more'),
        ([FILES, FILES], r"= \['files', 'files'\]: .*distinct"),
        ([FILES | {'weight': 0.0}], 'weight = .*: must be a number above 0'),
        ([FILES | {'weight': 'all'}], 'weight = .*: must be a number above 0'),
        ([FILES | {'weight': float('inf')}], 'weight = .*: must be a number above 0'),
        ([FILES | {'wheight': 1.0}], 'give it name, weight, options, and nothing but source'),
        ([{'name': 'files', 'weight': 1.0}], 'give it name, weight, options, and nothing but source'),
        ([FILES | {'name': 'mixture'}], 'is itself a mixture'),
        ([FILES | {'name': 'nonsense'}], 'nonsense'),
        ([FILES], 'data.options lacks folder'),
    ],
    ids=str,
)
def test_sources_that_cannot_be_mixed_are_refused(sources, message, tokenizer):
    with pytest.raises(BadInput, match=message):
        data.load(options(sources), 'train', tokenizer)


def test_source_of_which_nothing_is_left_is_refused(tmp_path, tokenizer):
    sources = write_sources(tmp_path)
    (tmp_path / 'small_train.jsonl').write_text('{"q": "1111111111", "a": 2}\n')
    with pytest.raises(BadInput, match=r"data.options.sources = 'small': has no example that fits data.max_prompt"):
        data.load(options(sources, max_prompt_tokens=8), 'train', tokenizer)


def test_mixture_far_into_a_run_is_found_without_walking_there(mixed):
    far = data.indices(SEED, 10**6, 256, len(mixed.examples), mixed.sources)
    assert len(far) == 256 and set(labels(mixed, far)) == set(SIZES)


def test_earlier_places_of_an_example_are_counted():
    assert Grouping.by_ids(np.array([3, 1, 3, 3, 1, 0])).place.tolist() == [0, 0, 1, 2, 1, 0]
    assert not Grouping.by_ids(np.arange(5)).place.any()
