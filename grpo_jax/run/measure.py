"""Metrics of a step's completions, and speeds and memory of the step: numbers by name, computed on the host."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
import functools
import math
import os
import re
import resource
import sys
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, Num
import numpy as np

from grpo_jax.algorithms import Grouping, group_math, pieces
from grpo_jax.collect.draw import Draw
from grpo_jax.hosts import processes
from grpo_jax.models import lora, transformer
from grpo_jax.rewards import RewardFunctions, Rewards, language, reflection, service_counts
from grpo_jax.sampler.engine import CUT, Stats
from grpo_jax.sharding import chips
from grpo_jax.types import Experience, Rollout, map_table

NGRAM, LEAST = 4, 8  # tokens of a phrase that is counted; fewest tokens of a repetitive completion
QUARTERS = ('quarter', 'half', 'three_quarters', 'all')  # upper ends of the pass rates between 0 and 1
MIXED = 0.1  # a completion mixes languages when a larger share of its letters is not in its most frequent script
LEARNING = ('reward', 'observe', 'update')  # stages in which the learner's devices have work
ALIKE = {'kana': 'han'}  # {script: a script that the same language uses with it}


def make_measure(run: Any) -> Callable[[int, Draw, Rewards, Experience], dict[str, Any]]:
    """Makes measure(step, draw, rewarded, experience) -> {metric: value} of a step; all processes must call it."""

    def measure(step, draw, rewarded, experience):
        sampled_at = None if draw.stats is None else step
        row = assess(run.rewards, draw.rollout, rewarded, experience, sampled_at, run.algorithm.weights)
        if run.rewards.shaping and np.isfinite(rewarded.learned).any():
            row['reward/length_shaping'] = np.nanmean(rewarded.learned - rewarded.rewards)
        return row | completion_metrics(rewarded) | draw.counts | sampler_metrics(draw.stats)

    return measure


def make_speeds(run: Any) -> Callable[[Draw, Mapping[str, float]], dict[str, float]]:
    """Makes speeds(draw, {stage: seconds}) -> {name: number} of a Run's step; all processes must call it.

    The numbers are the sampler's speed, seconds of computing rewards, counts of requests to services, MiB of host
    memory, and learner/mfu (FLOPs of the update per second / the chips' peak) where the chip is known. Where steps wait
    for all completions, also the decode steps of a step with collection.in_flight, estimated; with mesh.sampler also
    the seconds in which each side was busy, and idle, since the last step.
    """
    learning, algorithm, waits = run.settings.learning, run.algorithm, not run.settings.collection.is_asynchronous
    group_size = run.settings.step_shapes(algorithm).group_size
    chip = chips.lookup(run.mesh.devices.flat[0].device_kind)
    asks_services = any(part.remote for part in run.rewards.every_part.values())

    def speeds(draw, seconds):
        speed = {'host_mib': host_mib()}
        if asks_services:
            each = processes.gather(service_counts(run.rewards))
            speed |= {name: sum(counts.get(name, 0) for counts in each) for name in set().union(*each)}
        if draw.stats is not None:
            speed |= sampler_speed(draw.stats, chip)
            speed['reward/seconds'] = sum(stream.seconds for stream in draw.streams)
            speed['reward/wait_seconds'] = sum(stream.waited for stream in draw.streams)
            if waits and draw.sizes is None:
                longest = draw.finish_rewards().lengths.reshape(-1, group_size).max(1)
                in_flight = choose_in_flight(len(longest), jax.device_count())
                speed['sampler/steps_carried'] = count_carried_steps(longest, in_flight, CUT)
        if run.sides is not None:
            passed, sampling = run.sides.read_clock()
            speed |= sides_speed(passed, sampling, sum(seconds.get(stage, 0.0) for stage in LEARNING))
        if chip is None or not chip.flops:
            return speed
        masks = processes.fetch((draw.rollout.prompt_mask, draw.rollout.completion_mask))
        prompts, completions = (mask.sum(1) for mask in masks)
        operations = learning.epochs * update_operations(
            run.model.config,
            prompts[::group_size],
            completions.reshape(-1, group_size),
            shared=learning.packs,
            critic=algorithm.needs_values,
            adapters=learning.lora,
        )
        return speed | {'learner/mfu': operations / (seconds['update'] * chip.flops * run.mesh.size)}

    return speeds


def assess(
    reward_functions: RewardFunctions,
    rollout: Rollout,
    rewarded: Rewards,
    experience: Experience,
    sampled_at: int | None,
    weights: Callable,
) -> dict[str, Any]:
    """{metric: value} of a step's completions: emptiness, repetition, correctness, languages and advantages.

    reward_functions: the run's; rollout, rewarded: all the step's completions and their rewards, also completions that
    the experience leaves out; experience: what the step learns from; sampled_at: the step, None where the completions
    were read from the data; weights: the algorithm's piece of that name. All processes must call it.
    """
    fields = rollout.completion_mask, rollout.forced, experience.rewards, experience.advantages, experience.group_ids
    mask, forced, rewards, advantages, group_ids = processes.fetch(fields)
    tokens = processes.fetch(rollout.tokens)[:, -mask.shape[1] :]
    grouping, is_rewarded = Grouping.by_ids(group_ids), np.isfinite(rewards)
    correct_PG = grouping.spread(rewarded.correct, np.nan)
    rewards_PG = grouping.spread(rewards.astype(np.float64), np.nan)
    lengths, texts = rewarded.lengths, list(rewarded.texts)
    # sources may have verifiers of their own
    extract = None if reward_functions.by_source else reward_functions.extract
    phrases = reward_functions.options.options.get('reflection', {}).get('phrases', ())
    tokens_PGC, mask_PGC, forced_PGC = (grouping.spread(x) for x in (tokens, mask, forced))
    row = reflection_metrics(texts, rewarded.correct, tuple(phrases)) | {
        'empty': np.mean([not text.strip() for text in texts]),
        'repetitive': np.mean(are_repetitive(tokens, lengths)),
        'distinct_completions': distinct_share(texts, grouping),
        'length_reward_correlation': correlation_in_groups(grouping.spread(lengths), rewards_PG),
        'conflicting_tokens': conflicting_share(
            tokens_PGC, mask_PGC, forced_PGC, outcome_signs(correct_PG, rewards_PG)
        ),
        'advantage_variance': advantage_variance(advantages, mask & ~forced, is_rewarded),
    }
    row |= script_metrics(texts)
    if sampled_at is not None:
        row['staleness'] = staleness(processes.fetch(rollout.version), mask & ~forced, sampled_at)
    if extract:
        row['unparsed'] = np.mean([extract(text) is None for text in texts])
    if np.isfinite(correct_PG).any():
        row |= pass_rates(correct_PG) | lengths_by_outcome(lengths, rewarded.correct)
        for name, sizes in advantage_sizes(advantages, mask & ~forced, group_ids, weights).items():
            row |= shares_by_pass_rate(name, grouping.spread(sizes), correct_PG)
    return row


def advantage_sizes(
    advantages: Num[np.ndarray, 'B _'],
    mask: Bool[np.ndarray, 'B C'],
    group_ids: Int[np.ndarray, ' B'],
    weights: Callable,
) -> dict[str, Float[np.ndarray, ' B']]:
    """Two sizes of each completion: 'advantage', abs(A), and 'gradient', the sum of weights * abs(A) over its tokens.

    Where A differs by token, 'advantage' is a sum over the tokens too. 'gradient' is the size of the loss's gradient by
    the logprobs at ratio 1; it is left out for weights that read more than mask, group_ids and advantages.
    """
    by_token = advantages.shape[1] > 1
    sizes = {'advantage': np.abs(advantages).sum(1, where=mask) if by_token else np.abs(advantages[:, 0])}
    inputs = {'mask': jnp.asarray(mask), 'group_ids': jnp.asarray(group_ids), 'advantages': jnp.asarray(advantages)}
    if {*pieces.reads(weights)} <= {*inputs}:
        sizes['gradient'] = np.sum(np.abs(advantages) * np.asarray(pieces.call(weights, inputs)), 1)
    return sizes


def distinct_share(texts: Sequence[str], grouping: Grouping) -> float:
    """The number of distinct texts in a group / the group's size, mean over groups; 1 / G if all G texts are equal."""
    different = Counter(owner for owner, _ in {*zip(grouping.owner.tolist(), texts, strict=True)})
    return float(np.mean([different[i] / size for i, size in enumerate(grouping.sizes)]))


def reflection_metrics(
    texts: Sequence[str], correct: Float[np.ndarray, ' B'], phrases: tuple[str, ...]
) -> dict[str, float]:
    """Three metrics of reflection: how often the phrases occur in a completion, on average, and self-corrections.

    self_correction is the share of completions with a phrase of reflection.CORRECTIONS, and self_correction_right the
    share of right ones among these, NaN where none is judged.
    """
    corrects = np.array([count_phrases(text, reflection.CORRECTIONS) > 0 for text in texts])
    judged = correct[corrects & np.isfinite(correct)]
    return {
        'reflection': float(np.mean([count_phrases(text, phrases) for text in texts])),
        'self_correction': float(np.mean(corrects)),
        'self_correction_right': float(np.mean(judged == 1)) if judged.size else np.nan,
    }


def staleness(version: Int[np.ndarray, 'B C'], mask: Bool[np.ndarray, 'B C'], step: int) -> float:
    """Mean over tokens of `step` minus the step whose weights sampled the token (version); NaN without tokens."""
    return float(np.mean(step - version[mask])) if mask.any() else np.nan


def lengths_by_outcome(lengths: Int[np.ndarray, ' B'], correct: Float[np.ndarray, ' B']) -> dict[str, float]:
    """length_right and length_wrong: mean tokens of right and of wrong completions; NaN where there are none."""
    rows = {'right': correct == 1, 'wrong': correct == 0}
    return {f'length_{name}': float(lengths[where].mean()) if where.any() else np.nan for name, where in rows.items()}


def pass_rates(correct: Float[np.ndarray, 'P G']) -> dict[str, float]:
    """Shares of groups with a pass rate in (0, 1/4), [1/4, 1/2), [1/2, 3/4), [3/4, 1); NaN in correct: not judged."""
    quarters = quarters_of(correct)
    return {f'groups_below_{name}': float(np.mean(quarters == i)) for i, name in enumerate(QUARTERS)}


def shares_by_pass_rate(
    of: str, sizes: Float[np.ndarray, 'P G'], correct: Float[np.ndarray, 'P G']
) -> dict[str, float]:
    """{<of>_below_<quarter>: the share that groups with a pass rate in this quarter have of the sum of all sizes}."""
    sizes_P, quarters = sizes.sum(1, dtype=np.float64), quarters_of(correct)
    total = sizes_P.sum()
    shares = [sizes_P[quarters == i].sum() / total if total else np.nan for i in range(len(QUARTERS))]
    return {f'{of}_below_{name}': float(share) for name, share in zip(QUARTERS, shares, strict=True)}


def quarters_of(correct: Float[np.ndarray, 'P G']) -> Int[np.ndarray, ' P']:
    """The index in QUARTERS of each group's pass rate; -1 where the rate is 0 or 1, or no completion is judged."""
    hits, judged = (correct == 1).sum(1), np.isfinite(correct).sum(1)
    return np.where((hits > 0) & (hits < judged), 4 * hits // np.maximum(judged, 1), -1)


def correlation_in_groups(x: Num[np.ndarray, 'P G'], y: Float[np.ndarray, 'P G']) -> float:
    """Correlation of x and y after subtracting group means, where y is finite; NaN where x or y does not vary."""
    x = np.where(np.isfinite(y), x, np.nan)
    x, y = (np.nan_to_num(group_math.centre(values, group_math.group_means(values))) for values in (x, y))
    scale = np.sqrt(np.sum(x * x) * np.sum(y * y))
    return float(np.sum(x * y) / scale) if scale > 0 else np.nan


def outcome_signs(correct: Float[np.ndarray, 'P G'], rewards: Float[np.ndarray, 'P G']) -> Float[np.ndarray, 'P G']:
    """For each completion 1 if right, -1 if wrong, else 0; without any verdict, the sign of reward - group mean."""
    if np.isfinite(correct).any():
        return np.nan_to_num(2 * correct - 1)
    return np.sign(np.nan_to_num(group_math.centre(rewards, group_math.group_means(rewards))))


def conflicting_share(
    tokens: Int[np.ndarray, 'P G C'],
    mask: Bool[np.ndarray, 'P G C'],
    forced: Bool[np.ndarray, 'P G C'],
    signs: Float[np.ndarray, 'P G'],
) -> float:
    """The share of sampled tokens that conflict, see group_math.conflict_weights; NaN without tokens.

    mask: tokens of completions; forced: tokens that were not sampled; signs: 1 right, -1 wrong, 0 neither.
    """
    conflicting, total = 0, np.sum(mask & ~forced)
    for i in np.flatnonzero((signs > 0).any(1) & (signs < 0).any(1)):
        most = max(int(mask[i].sum(1).max()), 1)
        tokens_GC, mask_GC, forced_GC = (x[i, :, :most] for x in (tokens, mask, forced))
        conflicting += np.sum(group_math.conflict_weights(tokens_GC, mask_GC, signs[i], forced_GC) != 1)
    return float(conflicting / total) if total else np.nan


def advantage_variance(
    advantages: Num[np.ndarray, 'B _'], mask: Bool[np.ndarray, 'B C'], is_rewarded: Bool[np.ndarray, ' B']
) -> float:
    """Variance of the advantages of rewarded completions, over their tokens if they are [B, C]; NaN without any."""
    values = advantages[is_rewarded, 0] if advantages.shape[1] == 1 else advantages[mask & is_rewarded[:, None]]
    return float(np.var(values, dtype=np.float64)) if values.size else np.nan


def are_repetitive(tokens: Int[np.ndarray, 'B C'], lengths: Int[np.ndarray, ' B']) -> Bool[np.ndarray, ' B']:
    """Which completions are repetitive: at least LEAST tokens long, with under half of their NGRAM-grams distinct."""
    if tokens.shape[1] < LEAST:
        return np.zeros(len(tokens), bool)
    count = tokens.shape[1] - NGRAM + 1
    runs, factor = np.zeros((len(tokens), count), np.uint64), np.uint64(0x9E3779B97F4A7C15)  # odd, of mixed bits
    for i in range(NGRAM):  # a hash of 64 bits, so that collisions in a completion do not matter
        runs = (runs ^ tokens[:, i : i + count].astype(np.uint64)) * factor
        runs ^= runs >> np.uint64(29)
    is_run = np.arange(count) < (lengths - NGRAM + 1)[:, None]
    runs = np.sort(np.where(is_run, runs, np.uint64(2**64 - 1)), 1)
    distinct = 1 + np.sum((runs[:, 1:] != runs[:, :-1]) & is_run[:, 1:], 1)
    return (lengths >= LEAST) & (2 * distinct < lengths - NGRAM + 1)


def count_phrases(text: str, phrases: tuple[str, ...]) -> int:
    """How often phrases occur in a text as whole words, in upper or lower case."""
    folded = text.casefold()  # few texts have any, and looking for letters alone is fast
    if not any(phrase.casefold() in folded for phrase in phrases):
        return 0
    return len(reflection.pattern(phrases).findall(text))


def script_metrics(texts: Sequence[str]) -> dict[str, float]:
    """script/<name>: a script's share of all letters; language_mixed: share of completions that mix scripts (MIXED)."""
    counts = np.array([count_scripts(text) for text in texts]).reshape(len(texts), -1)
    names, totals = script_names(), counts.sum(0)
    row = {f'script/{names[i]}': float(totals[i] / totals.sum()) for i in np.flatnonzero(totals)}
    together = counts.copy()
    for script, partner in ALIKE.items():
        together[:, names.index(partner)] += together[:, names.index(script)]
        together[:, names.index(script)] = 0
    letters = together.sum(1)
    others = letters - together.max(1, initial=0)
    return row | {'language_mixed': float(np.mean(others > MIXED * letters))}


def count_scripts(text: str) -> Int[np.ndarray, ' scripts']:
    """The number of a text's letters in each script of script_names(); digits and signs are not counted."""
    codes = np.frombuffer(text.encode('utf-32-le', 'surrogatepass'), np.uint32)
    return np.bincount(_script_table()[codes], minlength=len(script_names()) + 1)[1:]


def script_names() -> tuple[str, ...]:
    """The scripts of the language reward, and 'other'."""
    return (*language.SCRIPTS, 'other')


@functools.cache
def _script_table():
    """u8[0x110000] by code point: 0 for no letter, else 1 + the index of its script in script_names()."""
    table, characters = np.zeros(0x110000, np.uint8), ''.join(map(chr, range(0x110000)))
    for run in re.finditer(rf'[^\W\d_{language.SIGNS}]+', characters):
        table[run.start() : run.end()] = len(script_names())
    for number, letters in enumerate(language.SCRIPTS.values(), 1):
        for first, last in re.findall('(.)(?:-(.))?', letters.encode().decode('unicode_escape')):
            table[ord(first) : ord(last or first) + 1] = number
    return table


def sampler_speed(stats: Stats, chip: chips.Chip | None) -> dict[str, float]:
    """Tokens per second of a rollout; where the chip is known, also the share of memory bandwidth that it used."""
    speed = {'sampler/tokens_per_second': stats.tokens / stats.seconds}
    if chip:
        speed['sampler/roofline'] = stats.bytes_read / chip.bandwidth / stats.seconds
    return speed


def choose_in_flight(prompts: int, devices: int) -> int:
    """A good collection.in_flight for a step of `prompts`: half of them, or all if `devices` do not divide half."""
    return prompts if prompts // 2 % devices or prompts == 1 else prompts // 2


def count_carried_steps(longest: Int[np.ndarray, ' P'], in_flight: int, cut: int, rounds: int = 8) -> float:
    """An estimate of a step's decode steps with collection.in_flight, if each step brought groups of these lengths.

    longest: tokens of each group's longest completion; in_flight: groups under way besides the P of a step; cut: tokens
    between the moments at which a step may end, as in collect/carry.py; rounds: steps that are played through. It is
    the mean over steps after the first, which begins with nothing under way.
    """
    prompts, coming, steps = len(longest), np.resize(longest, len(longest) * rounds + in_flight), []
    left, coming = coming[:in_flight], coming[in_flight:]
    for begun in range(rounds):
        left = np.concatenate([left, coming[begun * prompts : (begun + 1) * prompts]])
        spent = cut
        while np.sum(left <= spent) < prompts:
            spent += cut
        steps.append(min(spent, left.max()))
        left = np.delete(left - spent, np.flatnonzero(left <= spent)[:prompts])
    return float(np.mean(steps[1:]))


def sides_speed(passed: float, sampling: float, learning: float) -> dict[str, float]:
    """Busy and idle seconds of sampler and learner, of `passed` seconds; sampling, learning: seconds at work."""
    busy = {'sampler': sampling, 'learner': min(learning, passed)}
    gaps = {f'{side}/gap_seconds': passed - seconds for side, seconds in busy.items()}
    return {f'{side}/busy_seconds': seconds for side, seconds in busy.items()} | gaps


def update_operations(
    model_config: transformer.ModelConfig,
    prompts: Int[np.ndarray, ' P'],
    completions: Int[np.ndarray, 'P G'],
    *,
    shared: bool = False,
    critic: bool = False,
    adapters: lora.LoraOptions = lora.OFF,
) -> float:
    """FLOPs of one epoch of updates, forward and backward, without padding and rematerialization.

    prompts, completions: tokens of each; shared: a group's prompt is computed once; critic: a second model of the same
    size without a head; adapters: the LoRA options.

    Counted are 6 operations a token for each weight in a matrix product (for the head only completion tokens), and 12
    for each layer, head dimension and causal pair of tokens (PaLM, arXiv 2204.02311, appendix B, which counts all
    pairs). With adapters a frozen weight counts 4, since it has no gradient.
    """
    table, group_size = transformer.param_table(model_config), completions.shape[1]
    products = ('attention', 'mlp')
    layers = sum(math.prod(p.shape) for name, p in table['layers'].items() if transformer.part_of(name) in products)
    each, more = 6, 0
    if adapters.rank:
        trained, _ = lora.split(lora.policy_table(model_config, adapters))
        each, more = 4, 6 * sum(jax.tree.leaves(map_table(lambda _, param: math.prod(param.shape), trained)))
    again = group_size - 1 if not shared else 0  # how often a prompt is computed again
    tokens = np.sum(prompts) * (1 + again) + np.sum(completions)
    pairs = (np.sum((prompts[:, None] + completions) ** 2.0) - np.sum(prompts**2.0) * (group_size - 1 - again)) / 2
    heads = model_config.layers * model_config.heads * model_config.head_dim
    head = model_config.width * model_config.vocab_size
    body = (each * layers + more) * tokens + 12 * heads * pairs
    return float(body * (2 if critic else 1) + each * head * np.sum(completions))


def host_mib() -> float:
    """Resident memory of this process in MiB; the peak where the system has no /proc."""
    try:
        with open('/proc/self/statm', encoding='ascii') as file:
            return int(file.read().split()[1]) * os.sysconf('SC_PAGE_SIZE') / 2**20
    except OSError:
        unit = 1 if sys.platform == 'darwin' else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def completion_metrics(rewarded: Rewards) -> dict[str, Any]:
    """{metric: value} of rewarded completions: means of reward parts and failures, lengths, truncated share, tokens."""
    lengths, row = rewarded.lengths, {}
    for name, values in rewarded.parts.items():
        row[f'reward/{name}'] = np.nanmean(values) if np.isfinite(values).any() else np.nan
    row |= {f'reward_{name}': failed.mean() for name, failed in rewarded.failures.items()}
    row['reward_retried'] = np.sum(rewarded.retried) / len(lengths)
    return row | {
        'length': lengths.mean(),
        'length_p95': np.quantile(lengths, 0.95),
        'length_longest': lengths.max(),
        'truncated': rewarded.truncated.mean(),
        'tokens': lengths.sum(),
    }


def sampler_metrics(stats: Stats | None) -> dict[str, Any]:
    """Metrics of a rollout's schedule, which depend only on the completions' lengths; {} when nothing was sampled.

    With adapters also a checksum of the adapted matrices, and the share of their elements that the adapters changed.
    Raises RuntimeError when this share shows that the adapters were not merged.
    """
    if stats is None:
        return {}
    row = {
        'sampler/steps': stats.steps,
        'sampler/utilisation': stats.utilisation,
        'sampler/decode_batches': stats.decode_batches,
        'sampler/preempted': stats.preempted,
        'sampler/cache_mib': stats.peak_bytes / 2**20,
    }
    if stats.inspection is None:
        return row
    checksum, share, due = processes.fetch(stats.inspection)
    if share < 0.5 * due:
        raise RuntimeError(
            f"{share:.1%} of the sampler's adapted weights differ from the frozen ones, and {due:.1%} would with its "
            'adapters: they were not merged'
        )
    return row | {'sampler/checksum': int(checksum), 'sampler/merged_share': float(share)}
