"""What a step would take on a slice under other settings, by formulas alone: coarse, to choose what is compiled.

All figures are those of a chip. They leave out what no setting changes, so the ratio of two settings means more than
either; grpo_jax.tools.preflight.search corrects them by what was compiled.
"""

import math
from typing import Any, NamedTuple

from grpo_jax.diagnose.advice import count_parameters
from grpo_jax.learner import logprobs
from grpo_jax.tools.preflight import plan as plans

HALF, FLOAT = 2, 4  # bytes of a number in bfloat16 and in float32
FILLED = 0.92  # of the cells of packed rows
SCORES = 6  # times that XLA's attention writes or reads float32 scores in a forward pass
PASSES = {'none': 3.0, 'dots': 3.2, 'full': 4.0}  # products of an update, in those of a forward pass
TOUCHES = {'none': 5, 'dots': 5, 'full': 6}  # times that a microbatch reads or writes each matrix, gathering it twice
# numbers of each token and layer that wait for the backward pass, in widths of the model
KEPT = {'none': 34.0, 'dots': 14.0, 'full': 1.0}


class Setting(NamedTuple):
    """What the search chooses."""

    data: int
    fsdp: int
    tensor: int
    microbatches: int
    pack_columns: int
    chunk: int
    remat: str
    offload: tuple[str, ...]

    def overrides(self, config: Any) -> dict[str, Any]:
        """{dotted key: value} where the setting differs from the config."""
        sections = ['mesh'] * 3 + ['learner'] * 5
        fields = zip(sections, self._fields, self, setting_of(config), strict=True)
        changes = {f'{section}.{name}': value for section, name, value, now in fields if value != now}
        if 'learner.microbatches' in changes:  # which otherwise may decide whether rows are packed
            changes['learner.pack_columns'] = self.pack_columns
        return changes


def setting_of(config: Any) -> Setting:
    """The Setting of a config whose mesh is chosen."""
    mesh, learner = config.mesh, config.learner
    columns = 0 if learner.pack_columns < 0 and learner.microbatches > 1 else learner.pack_columns
    return Setting(
        *(mesh.data, mesh.fsdp, mesh.tensor, learner.microbatches, columns, learner.chunk, learner.remat),
        tuple(learner.offload),
    )


class Guess(NamedTuple):
    """What a setting takes."""

    seconds: dict[str, dict[str, float]]  # {phase: {bound: seconds of a step}}
    memory: dict[str, float]  # {phase: bytes in use}


class _Sizes(NamedTuple):
    """What the formulas share, of a chip."""

    rows: float  # completions of a step
    microbatches: int  # of a step
    tokens: float  # that a step's update works on, padding and all
    matrices: float  # bytes of the weights that a tensor shard computes with
    gradients: float  # bytes of their gradients in float32
    forward: dict[str, float]  # what a forward pass over these tokens multiplies, moves and sends
    along: float  # bytes that the tensor axis sends in a forward pass, for each token
    cached: float  # bytes of a token's keys and values


def guess(plan: plans.PlannedRun, setting: Setting) -> Guess:
    """Guess of a setting for the plan's model, batch and slice."""
    sizes, shapes, chip = _sizes(plan, setting), plan.shapes, plan.chip
    forward, matrices = sizes.forward, sizes.matrices
    prompts, sampled = sizes.rows / shapes.group_size, sizes.rows * shapes.tokens
    read = prompts * shapes.queries + sampled / 2  # of the cache at each step, in the mean
    passes, shard = PASSES[setting.remat], sizes.gradients / setting.fsdp
    updates = plan.config.learner.epochs * plan.config.learner.minibatches
    once = TOUCHES[setting.remat] * matrices + sizes.gradients + 3 * shard  # moved by a microbatch
    crossing = (2 * matrices + sizes.gradients / 2) * _ring(setting.fsdp) + 2 * _ring(setting.data) * shard
    amounts = {
        'rollout': {
            'products': matrices / HALF * 2 * (sampled + prompts * shapes.queries),
            'HBM': shapes.tokens * (matrices + read * sizes.cached),
            'sent': matrices * _ring(setting.fsdp) + sampled * sizes.along,
        },
        'logprobs': forward | {'sent': forward['sent'] + matrices * _ring(setting.fsdp)},
        'update': {
            'products': forward['products'] * passes,
            'HBM': forward['HBM'] * passes + sizes.microbatches * once + 7 * shard * updates,  # the optimizer's seven
            'sent': forward['sent'] * (2 + (setting.remat == 'full')) + sizes.microbatches * crossing,
        },
    }
    speeds = {'products': chip.flops, 'HBM': chip.bandwidth, 'sent': plan.links[1] or math.inf}
    seconds = {phase: {name: n / speeds[name] for name, n in kinds.items()} for phase, kinds in amounts.items()}
    return Guess(seconds, _memory(plan, setting, sizes))


def _sizes(plan, setting):
    model_config, shapes, tensor = plan.run.model.config, plan.shapes, setting.tensor
    learner = plan.config.learner
    rows = shapes.prompts * shapes.group_size / setting.data / setting.fsdp / plan.mesh.shape['context']
    updates = learner.epochs * learner.minibatches
    columns = learner.pack_rows * (setting.pack_columns if setting.pack_columns >= 0 else own_columns(plan))
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
    scores = tokens * (shapes.queries + shapes.tokens) * model_config.layers  # half of all pairs, queries and values
    numbers = 4 * model_config.width + (3 * model_config.mlp + 4 * heads) / tensor
    moved = tokens * HALF * (model_config.layers * numbers + logits / tensor)
    if learner.attention == 'xla':
        moved += scores * model_config.heads / tensor * FLOAT * SCORES
    along = model_config.layers * 2 * model_config.width * HALF * 2 * _ring(tensor)
    return _Sizes(
        rows,
        microbatches,
        tokens,
        matrices=weights * HALF / tensor,
        gradients=plan.trained_bytes() * plan.mesh.shape['fsdp'] * plan.mesh.shape['tensor'] / tensor,
        forward={
            'products': 2 * (tokens * (weights - embedding) + scores * heads) / tensor,
            'HBM': moved,
            'sent': tokens * along,
        },
        along=along,
        cached=2 * model_config.layers * model_config.kv_heads * model_config.head_dim * HALF / tensor,
    )


def own_columns(plan: plans.PlannedRun) -> int:
    """Columns of the packed rows of the plan's own setting; 0 where rows are padded."""
    return plan.learner.sizes.columns if plan.learner.sizes else 0


def _ring(devices):
    """The share of an array that a device sends to gather or scatter it."""
    return (devices - 1) / devices


def _memory(plan, setting, sizes):
    model_config, shapes, memory = plan.run.model.config, plan.shapes, plan.chip.memory
    state = plan.state_bytes()[0] * plan.mesh.shape['fsdp'] * plan.mesh.shape['tensor'] / setting.fsdp / setting.tensor
    shard = sizes.gradients / setting.fsdp
    state -= 2 * shard * ('optimizer' in setting.offload) + shard * ('reference' in setting.offload)
    microbatch = sizes.tokens / sizes.microbatches
    head = min(setting.chunk or logprobs.CHUNKS[1], microbatch) * model_config.vocab_size / setting.tensor * FLOAT
    if not setting.chunk:
        head = min(head, memory * logprobs.SHARE)
    kept = KEPT[setting.remat] / (setting.tensor if setting.remat != 'full' else 1)
    cache = sizes.cached * sizes.rows * (shapes.queries / shapes.group_size + shapes.tokens)
    budget = plan.config.rollout.cache_gib * 2**30
    return {
        'update': state + 2 * shard + 3 * head + microbatch * model_config.layers * model_config.width * HALF * kept,
        'logprobs': state + 3 * head + sizes.matrices / model_config.layers,
        'rollout': state + sizes.matrices + (min(cache, budget) if budget else cache),
    }
