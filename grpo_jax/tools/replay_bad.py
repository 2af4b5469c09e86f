"""Examines a skipped update: shows which tokens, advantages and loss terms are not finite, and runs the update again.

Examples:
    python -m grpo_jax replay_bad --workdir=runs/gsm8k --step=412
    python -m grpo_jax replay_bad --workdir=runs/gsm8k --step=412 --rows=50
"""

from collections.abc import Iterator, Mapping
import dataclasses
from typing import Any

from absl import flags
import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import algorithms, evaluate
from grpo_jax.algorithms.algorithm import piece_files
from grpo_jax.collect.select import make_collector
from grpo_jax.errors import BadInput
from grpo_jax.learner.experience import abstract_history
from grpo_jax.learner.logprobs import Head, padded_logprobs
from grpo_jax.learner.programs import choose_chunk, without_frozen
from grpo_jax.learner.update import anchor_logprobs
from grpo_jax.models.linear import in_dtype
from grpo_jax.run import checkpoint, cli
from grpo_jax.run.open import make_algorithm, make_run_learner, make_whole_policy, open_splits
from grpo_jax.sharding import batches, compiled
from grpo_jax.text import escape, exact_text
from grpo_jax.types import Experience

# fields of an Experience, one number a completion or a token, that must be finite at every token in the loss
FINITE = ('advantages', 'old_logprobs', 'forward_logprobs', 'ref_logprobs', 'old_entropy', 'values')


def run(
    workdir: str, step: int, rows: int = 10, algorithm=None, functions: Mapping | None = None, trust: bool = False
) -> Iterator[str]:
    """Yields lines on a step's skipped update: non-finite numbers in its batch and loss, and a second run.

    rows: the most tokens shown for each array; algorithm, functions: as given to train.run; trust: whether code files
    that the config names may run. Raises BadInput for such files without trust, and without a checkpoint.
    """
    experience = checkpoint.load_bad_batch(workdir, step)
    run = evaluate.open_recorded(workdir, trust, functions)
    files = [] if algorithm else [name for _, name in piece_files(run.settings.config.algorithm)]
    if files and not trust:
        names = ', '.join(files)
        remedy = f'its config.json names code that would run: {names}; read it, and add --trust if you trust it'
        raise BadInput('--workdir', workdir, remedy)
    run = dataclasses.replace(run, algorithm=make_algorithm(run.settings.config, algorithm))
    algorithm, learning, model_config = run.algorithm, run.settings.learning, run.model.config
    collector = make_collector(run, open_splits(run))
    learner = make_run_learner(run, collector.aux | abstract_history(algorithm, len(collector.examples)))
    with run.rewards:
        chosen, remark = choose_checkpoint(workdir, step)
        yield f'step {step} of {workdir}, with the parameters of checkpoint {chosen}{remark}'
        path = checkpoint.path_of(workdir, chosen)
        abstract = without_frozen(learner.abstract_state).replace(pending=checkpoint.recorded_pending(path))
        state = checkpoint.read_tree(path, abstract)
        state = state.replace(params=make_whole_policy(run, state.params, path))
    non_finite = _NonFiniteReport(run.model.tokenizer, experience, rows)
    yield from non_finite.describe({'rollout.logprobs': experience.rollout.logprobs}, 'of the batch')
    yield from non_finite.describe({name: getattr(experience, name) for name in FINITE}, 'of the batch')
    chunk = choose_chunk(learning.chunk, model_config.vocab_size, run.mesh)
    head = Head(learning.temperature, chunk, algorithm.needs_entropy_gradient)
    on_mesh = batches.put_rows(experience, run.mesh)
    options = compiled.repeatable_on(run.mesh.devices.flat[0])
    computed = jax.jit(_compute_terms, static_argnums=(3, 4, 5, 6), compiler_options=options)(
        state.params, on_mesh, state.aux['coefficients'], algorithm, model_config, head, learning
    )
    yield from non_finite.describe(jax.device_get(computed), 'with these parameters')
    state = state.replace(step=jnp.full_like(state.step, step))
    before = int(state.aux['bad_steps'])
    state, metrics = learner.update(state, on_mesh, learner.pack(on_mesh.rollout))
    skipped, updates = int(state.aux['bad_steps']) - before, learning.updates
    metrics = jax.device_get(metrics)
    yield f'the update again: loss {metrics["loss"]:g}, gradient norm {metrics["grad_norm"]:g}; ' + (
        f'{skipped} of {updates} updates skipped' if skipped else 'finite now: the cause was in the parameters'
    )


def choose_checkpoint(workdir: str, step: int) -> tuple[int, str]:
    """Returns (step of the checkpoint with which a skipped update is run again, a remark on its parameters as text).

    The best one is of step + 1: a skipped update leaves the parameters unchanged, and the run saves them at the end of
    the step. With several updates a step, later updates may have changed them. Else it is the nearest checkpoint.
    Raises BadInput for a workdir without checkpoints.
    """
    steps = checkpoint.steps(workdir)
    if not steps:
        raise BadInput(
            '--workdir', workdir, 'has no checkpoint, and the update needs its parameters; name a run that has one'
        )
    if step + 1 in steps:
        return step + 1, ', which are those of the update'
    nearest = min(steps, key=lambda other: abs(other - step - 1))
    return nearest, f': those of step {step} are gone (checkpoint.keep), these are the nearest'


def _compute_terms(params, experience: Experience, coefficients, algorithm, model_config, head, learning):
    """{name: f32[B, C]}: logprobs, entropy, each term of the loss, algorithms.prepare's arrays, the loss's gradient."""
    compute = in_dtype(params, learning.dtype)
    output = padded_logprobs(compute, experience.rollout, model_config, head, 'none', experience.teacher_ids)
    output = output._replace(logprobs=anchor_logprobs(output.logprobs, experience, learning))
    prepared = algorithms.prepare(algorithm, experience)

    def loss(logprobs):
        live = output._replace(logprobs=logprobs)
        return jnp.sum(algorithms.token_losses(algorithm, live, experience, prepared, coefficients))

    terms = algorithms.loss_terms(algorithm, output, experience, prepared, coefficients)
    return {
        'logprobs': output.logprobs,
        'entropy': output.entropy,
        **{f'term {name}': values for name, values in terms.items()},
        **{name: values for name, values in prepared.items() if values.ndim == 2},
        'gradient of the loss by logprobs': jax.grad(loss)(output.logprobs),
    }


class _NonFiniteReport:
    """Describes non-finite numbers in arrays of a batch by row and token. rows: the most tokens shown of an array."""

    def __init__(self, tokenizer, experience, rows):
        self._tokenizer, self._rows = tokenizer, rows
        self._mask, self._groups = np.asarray(experience.loss_mask), experience.group_ids
        self._tokens = experience.rollout.tokens[:, -self._mask.shape[1] :]

    def describe(self, arrays, where):
        """Yields a line for each array, and one for each of its first non-finite tokens.

        arrays: {name: array that broadcasts to [B, C], or None to skip it}; where: words after the name.
        """
        for name, values in arrays.items():
            if values is None:
                continue
            bad = np.argwhere(~np.isfinite(np.broadcast_to(values, self._mask.shape)) & self._mask)
            count = f'{len(bad)} of {self._mask.sum()} tokens are not finite' if len(bad) else 'all finite'
            yield f'{name} {where}: {count}'
            for row, column in bad[: self._rows]:
                value = np.broadcast_to(values, self._mask.shape)[row, column]
                text = exact_text(self._tokenizer, [self._tokens[row, column]])
                yield f'  row {row} (group {self._groups[row]}), token {column} {text!r}: {value}'
            if len(bad) > self._rows:
                yield f'  and {len(bad) - self._rows} more in {len(np.unique(bad[:, 0]))} rows; --rows shows more'


def main() -> None:
    """Runs the command."""
    values: Any = flags.FLAGS
    for line in run(values.workdir, values.step, values.rows, trust=values.trust):
        print(escape(line), flush=True)


if __name__ == '__main__':
    flags.DEFINE_string('workdir', None, 'Folder of the run.', required=True)
    flags.DEFINE_integer('step', None, 'The step whose update was skipped.', required=True, lower_bound=0)
    flags.DEFINE_integer('rows', 10, 'Tokens to name of each kind.', lower_bound=1)
    cli.define_trust()
    cli.run(main)
