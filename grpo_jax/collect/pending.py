"""What is under way when a step ends: groups that are still sampled, or that a later step learns from.

With collection.in_flight or collection.staleness a step leaves these groups in TrainState.pending. While a run goes on,
they are a Pending, whose rewards may still be computed. After a resume they are bytes by name, as the checkpoint holds
them: 'carried' for the groups that go on (carry.py), and '0', '1', ... for the draws of the next steps (schedule.py).
No program on the devices takes TrainState.pending.
"""

from collections.abc import Callable, Mapping, Sequence
import io
import json
from typing import Any, NamedTuple, TypeVar

import jax
from jaxtyping import Bool, UInt8
import numpy as np

from grpo_jax.collect.draw import rows_of, stack
from grpo_jax.data import Dataset
from grpo_jax.hosts import processes
from grpo_jax.rewards import Rewards
from grpo_jax.types import Rollout

T = TypeVar('T')


class PendingGroup(NamedTuple):
    """The completions of one prompt, on the host; some of them may be unfinished."""

    index: int  # of its example in the data set
    since: int  # the step that admitted it
    first: int  # number of its first sample in that step, see Prompts.first
    position: int  # in the data's order, from which its prompt would be drawn again
    rollout: Rollout  # of G rows
    judged: Bool[np.ndarray, ' G']  # rows that have rewards
    rewarded: Any  # Rewards of G rows, of unjudged ones NaN, '' and False

    @property
    def complete(self) -> bool:
        """Whether all rows have ended, see ended_rows."""
        return bool(ended_rows(self.rollout).all())


def ended_rows(rollout: Rollout) -> Bool[np.ndarray, ' B']:
    """Which rows of a host rollout have ended: a stop token has come, or the budget of tokens is used up."""
    return ~np.asarray(rollout.truncated) | np.asarray(rollout.completion_mask).all(1)


class Pending(NamedTuple):
    """What lies in TrainState.pending while a run goes on."""

    pack: Callable[[], dict[str, UInt8[np.ndarray, ' n']]]  # () -> bytes by name for a checkpoint; waits for rewards
    value: Any  # an UnderWay or a Waiting, for the next call of the collector that made it


def try_rewards(judge: Callable[[], T], unjudged: T) -> tuple[T, Exception | None]:
    """(judge(), None), or (unjudged, error) where judge() raises an error, so that a checkpoint can still be saved.

    With several processes the error is raised: others wait for these rewards, and nothing could be saved.
    """
    try:
        return judge(), None
    except Exception as error:
        if len(processes.members()) > 1:
            raise
        return unjudged, error


def pack_groups(groups: Sequence[PendingGroup], note: Any = None) -> UInt8[np.ndarray, ' n']:
    """The bytes of an npz file that holds the groups, without padding, and `note`, any value that JSON can hold."""
    rollout, rewarded = stack([group.rollout for group in groups]), stack([group.rewarded for group in groups])
    mask, prompt_mask = rollout.completion_mask, rollout.prompt_mask
    queries, size = prompt_mask.shape[1], len(groups[0].judged)
    note = [note, size, queries, mask.shape[1]]
    arrays = {
        'numbers': np.array([group[:4] for group in groups], np.int32),  # the first fields
        'prompts': rollout.tokens[::size, :queries][prompt_mask[::size]],
        'prompt_lengths': prompt_mask[::size].sum(1, dtype=np.int32),
        'lengths': mask.sum(1, dtype=np.int32),
        'tokens': rollout.tokens[:, queries:][mask],
        'truncated': rollout.truncated,
        'judged': np.concatenate([group.judged for group in groups]),
        **{name: getattr(rollout, name)[mask] for name in ('logprobs', 'forced', 'version')},
    }
    leaves, _ = jax.tree_util.tree_flatten_with_path(rewarded)
    names = [jax.tree_util.keystr(path) for path, _ in leaves]
    texts = {name: list(x) for name, (_, x) in zip(names, leaves, strict=True) if x.dtype.kind == 'O'}
    arrays |= {f'of {name}': x for name, (_, x) in zip(names, leaves, strict=True) if x.dtype.kind != 'O'}
    keys = [list(rewarded.parts), list(rewarded.failures)]
    return _pack(arrays | {'note': _to_bytes(note), 'texts': _to_bytes(texts), 'keys': _to_bytes(keys)})


def unpack_groups(data: UInt8[np.ndarray, ' n'], dataset: Dataset, pad_token: int) -> tuple[list[PendingGroup], Any]:
    """(groups, note) from the bytes of pack_groups; pad_token: the token that fills prompts and rows."""
    with np.load(io.BytesIO(np.asarray(data).tobytes()), allow_pickle=False) as file:
        arrays: dict[str, Any] = {name: file[name] for name in file.files}
    note, size, queries, columns = _from_bytes(arrays['note'])
    lengths, texts, keys = arrays['lengths'], _from_bytes(arrays['texts']), _from_bytes(arrays['keys'])
    mask = np.arange(columns) < lengths[:, None]
    prompt_mask = np.arange(queries) >= queries - arrays['prompt_lengths'][:, None]

    def spread(values, where, empty):
        """An array in the shape of the mask `where`, with the values in its cells and `empty` elsewhere."""
        spread_values = np.full(where.shape, empty, values.dtype)
        spread_values[where] = values
        return spread_values

    prompts = spread(arrays['prompts'], prompt_mask, pad_token)
    completions = spread(arrays['tokens'], mask, pad_token)
    rollout: Any = Rollout(
        tokens=np.concatenate([np.repeat(prompts, size, 0), completions], 1),
        prompt_mask=np.repeat(prompt_mask, size, 0),
        completion_mask=mask,
        truncated=arrays['truncated'],
        **{name: spread(arrays[name], mask, 0) for name in ('logprobs', 'forced', 'version')},
    )

    def column(name):
        return np.array(texts[name], object) if name in texts else arrays[f'of {name}']

    names = dict.fromkeys(keys[0], 0), dict.fromkeys(keys[1], 0)
    like: Any = Rewards(*[0] * 5, *names, 0, 0)  # pyright: ignore[reportCallIssue]  # a tree of their names
    rewarded = jax.tree_util.tree_map_with_path(lambda path, _: column(jax.tree_util.keystr(path)), like)
    groups = []
    for i, numbers in enumerate(arrays['numbers'].tolist()):
        index, since, first, position = numbers
        own = rows_of((rollout, arrays['judged'], rewarded), i, size)
        groups.append(PendingGroup(index, since, first, position, *own))
    return groups, note


def oldest_position(pending: Mapping[str, UInt8[np.ndarray, ' n']]) -> int:
    """The smallest position in the data's order of the prompts under way; pending: bytes as a checkpoint holds them."""
    places = []
    for data in pending.values():
        with np.load(io.BytesIO(data.tobytes()), allow_pickle=False) as file:
            places += file['numbers'][:, 3].tolist()
    return min(places)


def _pack(arrays: Mapping[str, np.ndarray]) -> UInt8[np.ndarray, ' n']:
    """The bytes of an npz file with these arrays."""
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    return np.frombuffer(file.getvalue(), np.uint8)


def _to_bytes(value):
    """The JSON text of a value, as bytes u8[n]."""
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def _from_bytes(data):
    """The value of a JSON text, from bytes u8[n]."""
    return json.loads(data.tobytes())
