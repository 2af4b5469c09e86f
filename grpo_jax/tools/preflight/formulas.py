"""Estimates a step's time and memory under other settings by formulas, so that a search knows what to compile.

All figures are for one chip. They leave out costs that no setting changes, so a figure has a meaning only beside those
for other settings. grpo_jax.tools.preflight.search corrects them with compiled programs.
"""

import math
from typing import Any, NamedTuple

from grpo_jax.diagnose.advice import count_parameters
from grpo_jax.learner import logprobs
from grpo_jax.tools.preflight import plan as plans

HALF, FLOAT = 2, 4  # bytes of a number in bfloat16 and in float32
FILLED = 0.92  # share of packed cells that hold tokens
SCORES = 6  # how often XLA's attention writes or reads float32 scores in a forward pass
PASSES = {'none': 3.0, 'dots': 3.2, 'full': 4.0}  # by remat: matrix products of an update / of a forward pass
TOUCHES = {'none': 5, 'dots': 5, 'full': 6}  # reads and writes of each matrix in a microbatch, two gathers included
# activations kept for the backward pass, in widths of the model for each token and layer
KEPT = {'none': 34.0, 'dots': 14.0, 'full': 1.0}


class Setting(NamedTuple):
    """Values of the config's settings that the search chooses."""

    data: int
    fsdp: int
    tensor: int
    microbatches: int
    pack_columns: int
    chunk: int
    remat: str
    offload: tuple[str, ...]

    def overrides(self, config: Any) -> dict[str, Any]:
        """Returns {dotted key: value} for fields that differ from the config; with microbatches also pack_columns."""
        sections = ['mesh'] * 3 + ['learner'] * 5
        fields = zip(sections, self._fields, self, setting_of(config), strict=True)
        changes = {f'{section}.{name}': value for section, name, value, now in fields if value != now}
        if 'learner.microbatches' in changes:  # with -1, microbatches would decide whether rows are packed
            changes['learner.pack_columns'] = self.pack_columns
        return changes


def setting_of(config: Any) -> Setting:
    """Returns the Setting of a config whose mesh is complete; pack_columns is 0 where -1 would mean padded rows."""
    mesh, learner = config.mesh, config.learner
    columns = 0 if learner.pack_columns < 0 and learner.microbatches > 1 else learner.pack_columns
    return Setting(
        *(mesh.data, mesh.fsdp, mesh.tensor, learner.microbatches, columns, learner.chunk, learner.remat),
        tuple(learner.offload),
    )


class Guess(NamedTuple):
    """The estimated time and memory of a setting, on one chip."""

    seconds: dict[str, dict[str, float]]  # {phase: {bound: seconds of a step}}
    memory: dict[str, float]  # {phase: bytes in use}


class _Sizes(NamedTuple):
    """Amounts of one chip's work, which several formulas use."""

    rows: float  # completions of a step
    microbatches: int  # of a step
    tokens: float  # of a step's updates, padding included
    matrices: float  # bytes of a tensor shard's weights in bfloat16
    gradients: float  # bytes of the gradients of these weights in float32
    forward: dict[str, float]  # operations, bytes moved and bytes sent of a forward pass over `tokens`
    tensor_sent: float  # bytes a token that a forward pass sends over the tensor axis
    cached: float  # bytes of a token's keys and values


def guess(plan: plans.PlannedRun, setting: Setting) -> Guess:
    """Returns the Guess of a setting for the plan's model, batch and slice."""
    sizes, shapes, chip = _make_sizes(plan, setting), plan.shapes, plan.chip
    forward, matrices = sizes.forward, sizes.matrices
    prompts, sampled = sizes.rows / shapes.group_size, sizes.rows * shapes.tokens
    read = prompts * shapes.queries + sampled / 2  # cached tokens read in a decode step, on average
    passes, shard = PASSES[setting.remat], sizes.gradients / setting.fsdp
    updates = plan.config.learner.epochs * plan.config.learner.minibatches
    once = TOUCHES[setting.remat] * matrices + sizes.gradients + 3 * shard  # bytes moved in a microbatch
    crossing = (2 * matrices + sizes.gradients / 2) * ring_share(setting.fsdp) + 2 * ring_share(setting.data) * shard
    amounts = {
        'rollout': {
            'products': matrices / HALF * 2 * (sampled + prompts * shapes.queries),
            'HBM': shapes.tokens * (matrices + read * sizes.cached),
            'sent': matrices * ring_share(setting.fsdp) + sampled * sizes.tensor_sent,
        },
        'logprobs': forward | {'sent': forward['sent'] + matrices * ring_share(setting.fsdp)},
        'update': {
            'products': forward['products'] * passes,
            'HBM': forward['HBM'] * passes
            + sizes.microbatches * once
            + 7 * shard * updates,  # 7: the optimizer's reads and writes
            'sent': forward['sent'] * (2 + (setting.remat == 'full')) + sizes.microbatches * crossing,
        },
    }
    speeds = {'products': chip.flops or math.inf, 'HBM': chip.bandwidth or math.inf, 'sent': plan.links[1] or math.inf}
    seconds = {phase: {name: n / speeds[name] for name, n in kinds.items()} for phase, kinds in amounts.items()}
    return Guess(seconds, _memory_by_phase(plan, setting, sizes))


def _make_sizes(plan, setting):
    """The _Sizes of a setting for the plan's model and batch."""
    model_config, shapes, tensor = plan.run.model.config, plan.shapes, setting.tensor
    learner = plan.config.learner
    rows = shapes.prompts * shapes.group_size / setting.data / setting.fsdp / plan.mesh.shape['context']
    updates = learner.epochs * learner.minibatches
    columns = learner.pack_rows * (setting.pack_columns if setting.pack_columns >= 0 else packed_columns(plan))
    if columns:
        real = rows * ((plan.mean_tokens or shapes.tokens) + shapes.queries / shapes.group_size)
        microbatches = updates * math.ceil(real / FILLED / columns / learner.minibatches)
        tokens = microbatches * columns
    else:
        microbatches = updates * setting.microbatches
        tokens = learner.epochs * rows * (shapes.queries + shapes.tokens)
    weights, logits = count_parameters(model_config), model_config.vocab_size
    embedding = logits * model_config.width * (not model_config.tie_embeddings)  # rows are looked up, not multiplied
    heads = model_config.heads * model_config.head_dim
    scores = (
        tokens * (shapes.queries + shapes.tokens) * model_config.layers
    )  # half of all pairs, since attention is causal, times two products: with keys and with values
    numbers = 4 * model_config.width + (3 * model_config.mlp + 4 * heads) / tensor
    moved = tokens * HALF * (model_config.layers * numbers + logits / tensor)
    if learner.attention == 'xla':
        moved += scores * model_config.heads / tensor * FLOAT * SCORES
    tensor_sent = model_config.layers * 2 * model_config.width * HALF * 2 * ring_share(tensor)
    return _Sizes(
        rows,
        microbatches,
        tokens,
        matrices=weights * HALF / tensor,
        gradients=plan.trained_bytes() * plan.mesh.shape['fsdp'] * plan.mesh.shape['tensor'] / tensor,
        forward={
            'products': 2 * (tokens * (weights - embedding) + scores * heads) / tensor,
            'HBM': moved,
            'sent': tokens * tensor_sent,
        },
        tensor_sent=tensor_sent,
        cached=2 * model_config.layers * model_config.kv_heads * model_config.head_dim * HALF / tensor,
    )


def packed_columns(plan: plans.PlannedRun) -> int:
    """Returns the columns of the plan's packed rows; 0 when rows are padded."""
    return plan.learner.sizes.columns if plan.learner.sizes else 0


def ring_share(devices: int) -> float:
    """Returns the share of an array that each device sends when devices gather or scatter it over a ring."""
    return (devices - 1) / devices


def _memory_by_phase(plan, setting, sizes):
    """{phase: estimated bytes in use on a chip}, for update, logprobs and rollout."""
    model_config, shapes, memory = plan.run.model.config, plan.shapes, plan.chip.memory
    state = plan.state_bytes()[0] * plan.mesh.shape['fsdp'] * plan.mesh.shape['tensor'] / setting.fsdp / setting.tensor
    shard = sizes.gradients / setting.fsdp
    state -= 2 * shard * ('optimizer' in setting.offload) + shard * ('reference' in setting.offload)
    microbatch = sizes.tokens / sizes.microbatches
    head = min(setting.chunk or logprobs.CHUNKS[1], microbatch) * model_config.vocab_size / setting.tensor * FLOAT
    if not setting.chunk:
        head = min(head, memory * logprobs.SHARE)
    kept = KEPT[setting.remat] / (setting.tensor if setting.remat != 'full' else 1)
    in_flight = plan.config.collection.in_flight  # if above 0, further rows begin after the carried ones
    rows = sizes.rows * (1 + in_flight / plan.config.data.prompts_per_step)
    cache = sizes.cached * rows * (shapes.queries / shapes.group_size + shapes.tokens * (1 + (in_flight > 0)))
    budget = plan.config.rollout.cache_gib * 2**30
    return {
        'update': state + 2 * shard + 3 * head + microbatch * model_config.layers * model_config.width * HALF * kept,
        'logprobs': state + 3 * head + sizes.matrices / model_config.layers,
        'rollout': state + sizes.matrices + (min(cache, budget) if budget else cache),
    }
