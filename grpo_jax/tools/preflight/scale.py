"""Predicts a step's time on other numbers of chips, by arithmetic from one compiled plan."""

from collections.abc import Iterable, Sequence
import math
from typing import Any

from grpo_jax.run import console
from grpo_jax.tools.preflight import plan as plans
from grpo_jax.tools.preflight import verdict as verdicts
from grpo_jax.tools.preflight.formulas import ring_share
from grpo_jax.tools.preflight.report import WIDTH
from grpo_jax.tools.preflight.verdict import Verdict

LARGEST = {'v5e': 256, 'v6e': 256, 'v4': 4096, 'v5p': 8960}  # chips of a slice


def predict(verdict: Verdict, sizes: Iterable[int]) -> list[dict[str, Any]]:
    """Returns a dict of mesh, bounds and speed for each number of chips in sizes; the batch grows with that number.

    A chip's products and traffic then stay the same. A ring over n chips sends (n - 1) / n of an array. Over s slices,
    each microbatch's float32 gradient crosses the network 2 (s - 1) / s times. On larger slices a chip has all its
    links. A program takes as long as its largest bound, which hides the others.
    """
    plan, chip = verdict.plan, verdict.plan.chip
    shapes, learner = plan.shapes, plan.config.learner
    tensor, before = plan.mesh.shape['tensor'], plan.row_shards()
    all_links = chip.links([3] * (plan.topology.count('x') + 1))[1]
    whole = plan.trained_bytes() * plan.mesh.shape['fsdp']  # bytes of a tensor shard's trained parameters
    microbatches, *_ = plans.packed_trip_counts(plan) or (learner.microbatches,)
    gradients = learner.epochs * learner.minibatches * microbatches
    predictions = []
    for count in sizes:
        slices = math.ceil(count / LARGEST[plan.topology.partition(':')[0]])
        shards = count // tensor
        fsdp = max(
            n
            for n in range(1, shards // slices + 1)
            if shards // slices % n == 0 and plan.run.model.config.width % n == 0
        )
        factor = ring_share(shards) / ring_share(before) if before > 1 else 1.0
        factor *= plan.links[1] / all_links if count > plan.mesh.size else 1.0
        largest = communicating = multiplying = 0.0
        for job, measured in verdict.runs:
            bounds = verdicts.bounds(measured, plan)
            network = 0.0
            if job.name == 'learner.update':
                network = gradients * 2 * ring_share(slices) * whole / fsdp / chip.network
            sent = bounds['sent'] * factor
            largest += job.runs * max(bounds['products'], bounds['HBM'], sent, network)
            communicating += job.runs * max(sent, network)
            multiplying += job.runs * bounds['products']
        tokens = shapes.prompts * shapes.group_size * shapes.tokens / plan.mesh.size
        predictions.append(
            {
                'chips': count,
                'slices': slices,
                'data': shards // fsdp,
                'fsdp': fsdp,
                'tensor': tensor,
                'prompts_per_step': shapes.prompts * shards / before,
                'largest_bound': largest,
                'tokens_a_second_and_chip': tokens / largest,
                'share_of_peak': multiplying / largest,
                'communication': communicating / largest,
            }
        )
    return predictions


def print_predictions(predictions: Sequence[dict[str, Any]]) -> None:
    """Prints the dicts of `predict` as a table."""
    headings = [
        'chips',
        'slices',
        'mesh\ndata x fsdp x tensor',
        'prompts\na step',
        'largest bounds\nof a step, s',
        'tokens / s / chip\nat most',
        'products / peak\nat most',
        'communication\n/ step',
    ]
    rows = [
        [
            str(row['chips']),
            str(row['slices']),
            f'{row["data"]} x {row["fsdp"]} x {row["tensor"]}',
            f'{row["prompts_per_step"]:g}',
            f'{row["largest_bound"]:.2f}',
            f'{row["tokens_a_second_and_chip"]:.0f}',
            f'{row["share_of_peak"]:.0%}',
            f'{row["communication"]:.0%}',
        ]
        for row in predictions
    ]
    title = 'PREDICTION for other numbers of chips, by arithmetic from the plan above: not compiled, not measured'
    console.show_tables(console.make_table(headings, rows, title=title, dense=True), width=WIDTH)
