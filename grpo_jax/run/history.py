"""Moving averages of the rewards of earlier steps, for advantages whose baseline is the past and not the group.

They lie in TrainState.aux['history']: of the run, a reward a step, and where an advantage reads it of each prompt, a
reward a visit. A step reads what earlier steps came to, and then adds its own rewards, so that a baseline hangs on none
of the completions that it is taken from.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float
import numpy as np

from grpo_jax.algorithms import Algorithm
from grpo_jax.example import Example
from grpo_jax.types import TrainState

NAME = 'history'  # in TrainState.aux


def abstract_history(algorithm: Algorithm, count: int) -> dict[str, Any]:
    """ShapeDtypeStructs of the averages over `count` examples in TrainState.aux, zeros at the start.

    {} for an algorithm that reads none.
    """
    shapes = {name: (count,) if name == 'prompt_baselines' else () for name in algorithm.baselines}
    numbers = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    return {NAME: {name: {'mean': x, 'weight': x} for name, x in numbers.items()}} if numbers else {}


class History:
    """The averages of a run that learns from `examples`."""

    def __init__(self, algorithm: Algorithm, examples: Sequence[Example]):
        self._algorithm = algorithm
        self._places = {example.id: place for place, example in enumerate(examples)}

    def aux(self) -> dict[str, Any]:
        """ShapeDtypeStructs of what lies in TrainState.aux, zeros at the start."""
        return abstract_history(self._algorithm, len(self._places))

    def __call__(
        self, state: TrainState, examples: Sequence[Example], rewards: Float[np.ndarray, 'P G']
    ) -> tuple[TrainState, dict[str, Any]]:
        """(TrainState with a step's rewards in its averages, the averages before it by the names of what is read).

        run_baseline is 0 before any reward is known; prompt_baselines f64[P, G] are it where a prompt is new.
        """
        if not self._algorithm.baselines:
            return state, {}
        averages = jax.tree.map(lambda x: np.array(x, np.float64), state.aux[NAME])
        run, means, decay = averages['run_baseline'], visit_means(rewards), self._algorithm.baseline_decay
        read: dict[str, Any] = {'run_baseline': float(run['mean'])}
        if 'prompt_baselines' in averages:
            prompts = averages['prompt_baselines']
            places = np.array([self._places[example.id] for example in examples])
            seen = prompts['weight'][places] > 0
            baselines = np.where(seen, prompts['mean'][places], read['run_baseline'])
            read['prompt_baselines'] = np.repeat(baselines[:, None], rewards.shape[1], 1)
            for place, mean in zip(places, means, strict=True):
                add(prompts, place, mean, decay)
        add(run, (), visit_means(rewards.reshape(1, -1))[0], decay)
        stored = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), averages)
        return state.replace(aux=state.aux | {NAME: stored}), read


def visit_means(rewards: Float[np.ndarray, 'P G']) -> Float[np.ndarray, ' P']:
    """The mean of each group's known rewards; NaN where none is known."""
    known = np.isfinite(rewards)
    sums, counts = np.where(known, rewards, 0.0).sum(1), known.sum(1)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def add(averages: dict[str, np.ndarray], place: Any, value: float, decay: float) -> None:
    """Takes a value into averages['mean'][place], in which it is to weigh 1, and each before it `decay` times as much.

    averages['weight'] is the sum of these weights. The first value is the mean as it is; with decay 1 it is that of all
    values. NaN changes nothing.
    """
    if np.isfinite(value):
        averages['weight'][place] = decay * averages['weight'][place] + 1
        averages['mean'][place] += (value - averages['mean'][place]) / averages['weight'][place]
