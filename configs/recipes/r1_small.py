"""The stages of r1 on sums of two digits, from random weights, on a laptop's CPU.

    python -m grpo_jax pipeline --config=recipes/r1_small --workdir=runs/r1_small

The cold start's demonstrations mostly blurt a wrong answer out. Reinforcement finds that working a sum out pays, the
base model then learns from the policy's right completions, and from sums of one digit in place of general data, and is
reinforced once more. No number is from a paper. Figures: docs/recipes.md.

Measured: 2 CPU cores | some 200 CPU-seconds | pass@1 0.20 after the cold start, 0.93 at the end
"""
import copy

from grpo_jax.configs.labs import sums
from grpo_jax.sample import Request
from grpo_jax.tools.pipeline import Stage, begin_with, run_folder


def get_config(preset='dr_grpo'):
    """The config of stages 2 and 5, with 20 and 10 steps, which pay for right sums alone: no format, no language."""
    config = sums.get_config(preset)
    config.data.options.blurts = 0.65
    config.evaluation.prompts = 128
    return config


def get_stages(config, workdir):
    """The stages that make a policy in workdir, of this file's config or a changed one."""
    cold_start, reasoning, fine_tuning, rules = (copy.deepcopy(config) for _ in range(4))
    reasoning.supervised.updates = rules.supervised.updates = 0
    begin_with(reasoning, workdir, 'cold_start')
    fine_tuning.data.name = 'mixture'
    fine_tuning.data.options = {'sources': [
        {'name': 'rollouts', 'weight': 0.75, 'options': {'folder': run_folder(workdir, 'samples')}},
        {'name': 'arithmetic', 'weight': 0.25, 'options': dict(config.data.options, digits=1)}]}
    begin_with(rules, workdir, 'fine_tuning')
    rules.steps = max(config.steps // 2, 1)
    rules.optimizer.learning_rate = config.optimizer.learning_rate / 3
    return [
        Stage('cold_start', 'supervised', cold_start), Stage('reasoning', 'train', reasoning),
        Stage('samples', 'sample', of='reasoning', request=Request(prompts=1000)),
        Stage('fine_tuning', 'supervised', fine_tuning), Stage('rules', 'train', rules)]
