"""What a step took of the machine: what timings.jsonl has beside the seconds of the stages."""

from collections.abc import Mapping
import math
import os
import resource
import sys
from typing import Any

import jax
from jaxtyping import Int
import numpy as np

from grpo_jax.algorithms import Algorithm
from grpo_jax.hosts import processes
from grpo_jax.models import lora, transformer
from grpo_jax.run.collect import Collector, step_shapes
from grpo_jax.sharding import chips
from grpo_jax.types import Rollout, map_table


def step_speed(
    experiment: Any, algorithm: Algorithm, collector: Collector, rollout: Rollout, seconds: Mapping[str, float]
) -> dict[str, float]:
    """Speed of sampling, seconds of judging, memory of the host, and learner/mfu where the chip is known, by name.

    seconds are those of the step's stages. All processes must call it.
    """
    speed = {'host_mib': host_mib()}
    if collector.sample is not None:
        judging = sum(stream.seconds for stream in collector.streams)
        speed |= sampler_speed(collector.sample) | {'reward/seconds': judging}
    learning, mesh = experiment.settings.learning, experiment.mesh
    chip = chips.lookup(mesh.devices.flat[0].device_kind)
    if chip is None or not chip.flops:
        return speed
    group_size = step_shapes(experiment, algorithm).group_size
    prompts, completions = (mask.sum(1) for mask in processes.fetch((rollout.prompt_mask, rollout.completion_mask)))
    operations = learning.epochs * update_operations(
        experiment.model_config,
        prompts[::group_size],
        completions.reshape(-1, group_size),
        shared=learning.packs,
        critic=algorithm.needs_values,
        adapters=learning.lora,
    )
    return speed | {'learner/mfu': operations / (seconds['update'] * chip.flops * mesh.size)}


def sampler_speed(engine: Any) -> dict[str, float]:
    """Tokens a second of the last rollout, and the share of the memory bandwidth that it used where that is known."""
    if engine is None:
        return {}
    stats = engine.stats
    speed = {'sampler/tokens_per_second': stats.tokens / stats.seconds}
    chip = chips.lookup(engine.device_kind)
    if chip:
        speed['sampler/roofline'] = stats.bytes_read / chip.bandwidth / stats.seconds
    return speed


def update_operations(
    model_config: transformer.ModelConfig,
    prompts: Int[np.ndarray, ' P'],
    completions: Int[np.ndarray, 'P G'],
    *,
    shared: bool = False,
    critic: bool = False,
    adapters: lora.LoraOptions = lora.OFF,
) -> float:
    """Floating-point operations of one pass of updates over rows of so many tokens, forward and backward.

    6 for each weight of a product and token (of the head, tokens of completions only) and 12 for each layer, head
    dimension and pair of tokens of which one sees the other (PaLM, arXiv 2204.02311, appendix B, which counts all
    pairs); nothing that is computed again, and no padding. shared: a group's prompt is computed once. A critic is a
    second model, without the head. Of adapters, 6 for each of their weights and 4 for each frozen one, which has no
    gradient.
    """
    table, group_size = transformer.param_table(model_config), completions.shape[1]
    products = ('attention', 'mlp')
    layers = sum(math.prod(p.shape) for name, p in table['layers'].items() if transformer.part_of(name) in products)
    each, more = 6, 0
    if adapters.rank:
        trained, _ = lora.split(lora.policy_table(model_config, adapters))
        each, more = 4, 6 * sum(jax.tree.leaves(map_table(lambda _, param: math.prod(param.shape), trained)))
    again = group_size - 1 if not shared else 0  # how often a prompt comes once more
    tokens = np.sum(prompts) * (1 + again) + np.sum(completions)
    pairs = (np.sum((prompts[:, None] + completions) ** 2.0) - np.sum(prompts**2.0) * (group_size - 1 - again)) / 2
    heads = model_config.layers * model_config.heads * model_config.head_dim
    head = model_config.width * model_config.vocab_size
    body = (each * layers + more) * tokens + 12 * heads * pairs
    return float(body * (2 if critic else 1) + each * head * np.sum(completions))


def host_mib() -> float:
    """Resident memory of this process in MiB; the most that it has been, where the system does not say what it is."""
    try:
        with open('/proc/self/statm', encoding='ascii') as file:
            return int(file.read().split()[1]) * os.sysconf('SC_PAGE_SIZE') / 2**20
    except OSError:
        unit = 1 if sys.platform == 'darwin' else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
