"""What a step learns from: completions of its prompts, drawn again or exchanged until the groups differ.

A loop around sampling and scoring. What it keeps between steps lies in TrainState.aux, so that a resumed run
draws the same: position, how many prompts were visited; tries and hits of each example, for the curriculum; and
kept, groups of earlier steps, left over by resample or for replay.
"""

from collections.abc import Callable
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import algorithms, data, rewards
from grpo_jax.errors import BadInput
from grpo_jax.hosts import processes
from grpo_jax.run import demonstrations, metrics
from grpo_jax.sharding import batches
from grpo_jax.types import Example, Rollout

# sources that sample nothing: the fields of an example's meta that are a group's completions, the best first
READ_FROM_DATA = {'demonstrations': ('demonstration',), 'pairs': ('demonstration', 'rejected')}


class Draw(NamedTuple):
    """Completions of P prompts."""

    examples: list[Example]
    rollout: Rollout
    results: Callable  # () -> rewards.Scored
    counts: dict  # what it took, by name


class Group(NamedTuple):
    """Completions of one prompt, on the host."""

    example: Example
    rollout: Rollout  # of G rows
    since: int  # step that sampled them
    rewarded: rewards.Rewards

    @property
    def priority(self):
        """How much replay wants it, sum |A| std(r) of centred advantages; 0 when its rewards do not differ."""
        scores = self.rewarded.rewards[None]
        if algorithms.dead_groups(scores)[0]:
            return 0.0
        return float(np.nansum(np.abs(scores - np.nanmean(scores))) * np.nanstd(scores))


class Collector:
    """Draws for a run; `section` is config.collection. Without a dead-group policy or curriculum, once a step."""

    def __init__(self, experiment, section, shapes):
        self._ex, self._section, self._shapes = experiment, section, shapes
        self._again = section['dead_groups'] in ('resample', 'replay')
        self._keeps = _keeps(section)
        _check(section, experiment.config.algorithm, experiment.reward_functions)
        fields = READ_FROM_DATA.get(section['source'])
        self._imitates = fields is not None
        self._dataset, self._completions = (
            demonstrations.find(experiment, fields) if fields else (experiment.load('train'), None)
        )
        self.sample = None if self._imitates else experiment.sampler(shapes.group_size)

    @property
    def programs(self):
        """The compiled programs by name."""
        return {} if self.sample is None else {'sample': self.sample}

    @property
    def examples(self):
        """The examples of the train split that it draws from."""
        return self._dataset.examples

    def aux(self):
        """ShapeDtypeStructs of what lies in TrainState.aux, zeros at the start."""
        return aux_of(self._section, self._shapes, len(self._dataset.examples))

    def __call__(self, state, progress):
        """(Draw, TrainState) of a step; progress is called as the sampler says."""
        aux, step = dict(state.aux), int(state.step)
        if not self._again:
            draw = self._draw(state, aux, 0, progress)
            return draw, state.replace(aux=aux)
        replay, prompts = self._section['dead_groups'] == 'replay', self._shapes.prompts
        kept = self._load(aux['kept'], step - self._section['max_staleness']) if self._keeps else []
        alive, dead, tokens = [] if replay else kept, [], 0
        for index in range(1 if replay else self._section['max_draws']):
            draw = self._draw(state, aux, index, progress)
            tokens += int(draw.results().lengths.sum())
            for group in _groups(draw, step):
                (alive if group.priority else dead).append(group)
            if len(alive) >= prompts:
                break
        if replay:
            left = sorted(alive + kept, key=lambda group: -group.priority)[:prompts]
            alive = alive + self._again_of(kept, prompts - len(alive), step)
        else:
            left = alive[prompts : 2 * prompts]
        if self._keeps:
            aux['kept'] = self._store(left)
        batch = (alive + dead)[:prompts]
        useful = sum(int(group.rewarded.lengths.sum()) for group in alive[:prompts] if group.since == step)
        counts = {
            'draws': index + 1,
            'groups_of_earlier_steps': sum(group.since < step for group in batch),
            'wasted_tokens': tokens - useful,
        }
        rollout, rewarded = jax.tree.map(
            lambda *rows: np.concatenate(rows), *((group.rollout, group.rewarded) for group in batch)
        )
        return Draw(
            [group.example for group in batch], batches.put_rows(rollout, self._ex.mesh), lambda: rewarded, counts
        ), state.replace(aux=aux)

    def _draw(self, state, aux, index, progress):
        """Draw of the next prompts, scored while others still decode; moves aux on."""
        experiment, shapes = self._ex, self._shapes
        chosen, position = data.walk(
            experiment.config.seed, int(aux['position']), shapes.prompts, self._retired(aux), self._dataset.sources
        )
        aux['position'] = jnp.int32(position)
        examples, prompts = data.prompts(self._dataset, chosen, shapes.queries, experiment.pad_token)
        if self._imitates:
            rollout = demonstrations.as_rollout(experiment, self._dataset, self._completions, chosen, shapes)
            draw = Draw(
                examples, batches.put_rows(rollout, experiment.mesh), lambda: self._score(examples, rollout), {}
            )
        else:
            stream = rewards.RewardStream(
                experiment.reward_functions, examples, shapes.group_size, experiment.tokenizer
            )
            params = state.params
            if self._section['source'] == 'reference':  # which may wait in the hosts' memory
                params = jax.device_put(state.ref_params, jax.tree.map(lambda x: x.sharding, params))
            # a prompt may come twice in a step; its noise must not
            key = jax.random.fold_in(experiment.key, index) if index else experiment.key
            rollout = self.sample(
                params,
                batches.put_rows(prompts, experiment.mesh),
                key,
                int(state.step),
                finished=stream.add,
                progress=progress,
            )
            results = functools.cache(lambda: processes.gather_rows(stream.rows, stream.results()))
            draw = Draw(examples, rollout, results, {})
        if self._section['retire_above']:
            correct = draw.results().parts[experiment.reward_functions.verifier].reshape(shapes.prompts, -1) >= 1
            aux['tries'] = aux['tries'].at[chosen].add(correct.shape[1])
            aux['hits'] = aux['hits'].at[chosen].add(correct.sum(1))
            draw.counts['retired'] = float(np.mean(self._retired(aux)))
        return draw

    def _retired(self, aux):
        """bool[N]: the examples whose pass rate over all visits is too high."""
        if not self._section['retire_above']:
            return np.zeros(len(self._dataset.examples), bool)
        tries, hits = np.asarray(aux['tries']), np.asarray(aux['hits'])
        return (tries > 0) & (hits >= self._section['retire_above'] * tries)

    def _score(self, examples, rollout):
        texts, truncated, lengths = metrics.completions_of(self._ex.tokenizer, rollout)
        score = functools.partial(rewards.compute_rewards, self._ex.reward_functions)
        rewarded = processes.by_group(score, examples, texts, truncated, lengths)
        if self._section['source'] == 'pairs':
            rewarded = rewarded._replace(rewards=np.tile([1.0, 0.0], len(examples)))  # the data says which is better
        return rewarded

    def _again_of(self, kept, count, step):
        """Up to `count` of the kept groups, drawn without replacement in proportion to their scores."""
        if count <= 0 or not kept:
            return []
        scores = np.array([group.priority for group in kept])
        noise = np.random.default_rng((self._ex.config.seed, step))
        return [kept[i] for i in noise.choice(len(kept), min(count, len(kept)), replace=False, p=scores / scores.sum())]

    def _load(self, kept, oldest):
        """The kept groups that are not older than step `oldest`, scored again."""
        host, found = jax.device_get(kept), []
        for slot in np.flatnonzero((host['filled'] == 1) & (host['since'] >= oldest)):
            rows = slice(slot * self._shapes.group_size, (slot + 1) * self._shapes.group_size)
            rollout = jax.tree.map(lambda x, rows=rows: x[rows], host['rollout'])
            example = self._dataset.examples[host['index'][slot]]
            found.append(Group(example, rollout, int(host['since'][slot]), self._score([example], rollout)))
        return found

    def _store(self, groups):
        """aux['kept'] of at most P groups."""
        places = {example.id: index for index, example in enumerate(self._dataset.examples)}
        zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), self.aux()['kept'])
        for slot, group in enumerate(groups):
            rows = slice(slot * self._shapes.group_size, (slot + 1) * self._shapes.group_size)
            jax.tree.map(lambda full, x, rows=rows: full.__setitem__(rows, x), zeros['rollout'], group.rollout)
            zeros['index'][slot], zeros['since'][slot], zeros['filled'][slot] = places[group.example.id], group.since, 1
        return jax.tree.map(jnp.asarray, zeros)


def aux_of(section, shapes, count):
    """ShapeDtypeStructs of what a Collector of `count` examples has in TrainState.aux."""
    found = {'position': jax.ShapeDtypeStruct((), jnp.int32)}
    if section['retire_above']:
        found |= {name: jax.ShapeDtypeStruct((count,), jnp.int32) for name in ('tries', 'hits')}
    if _keeps(section):
        numbers = jax.ShapeDtypeStruct((shapes.prompts,), jnp.int32)
        found['kept'] = {
            'rollout': batches.abstract_rollout(shapes, None),
            'index': numbers,
            'since': numbers,
            'filled': numbers,
        }
    return found


def _keeps(section):
    """Whether groups are kept from step to step."""
    return section['dead_groups'] in ('resample', 'replay') and section['max_staleness'] > 0


def _check(section, algorithm, reward_functions):
    """BadInput for settings that cannot work."""
    if section['retire_above'] and not reward_functions.verifier:
        raise BadInput(
            'collection.retire_above',
            section['retire_above'],
            'needs a reward.verifier to know pass rates; name one, or use 0',
        )
    if section['max_draws'] < 1:
        raise BadInput('collection.max_draws', section['max_draws'], 'must be at least 1')
    if section['dead_groups'] == 'replay' and section['max_staleness'] < 1:
        raise BadInput(
            'collection.max_staleness',
            section['max_staleness'],
            'must be at least 1 for replay: groups of the same step are none',
        )
    if _keeps(section) and algorithm['ratio_base'] == 'old' and algorithm['correction'] == 'none':
        raise BadInput(
            'collection.max_staleness',
            section['max_staleness'],
            'lets in completions of older policies, '
            "and nothing accounts for them; set a correction, like truncated, or ratio_base='sampler'",
        )


def _groups(draw, step):
    """The draw's Groups."""
    whole = processes.fetch(draw.rollout), draw.results()
    size = len(whole[1].rewards) // len(draw.examples)
    found = []
    for i, example in enumerate(draw.examples):
        rollout, rewarded = jax.tree.map(lambda x, rows=slice(i * size, (i + 1) * size): x[rows], whole)
        found.append(Group(example, rollout, step, rewarded))
    return found
