r"""DeepSeek-R1's stages as in its paper (arXiv 2501.12948, section 3): supervised tuning and reinforcement, twice.

    python -m grpo_jax pipeline --config=recipes/r1 --workdir=runs/r1 --config.mesh.fsdp=64

1. cold_start (section 3, appendix B.4.2): supervised, on demonstrations of yours: batch 128, cosine from 5e-5.
2. reasoning (section 3.2.1): GRPO from there with accuracy, format and language rewards. As r1_zero, with clip 10.
3. samples (section 3): completions of that policy, of which the right ones are kept (rejection sampling).
4. fine_tuning (appendix B.4.2): supervised, from the base model again, on the right completions and, a quarter, on
   general demonstrations of yours: two epochs of the paper's 804,745 samples.
5. rules (section 3.2.2): GRPO at temperature 0.7 with rule rewards, the first 1,300 updates of the last stage.
6. preferences (section 3.2.2): its final 400 updates, half of whose prompts are general and judged by a reward model of
   yours, with format and language.

grpo_jax.train with this file alone is stage 2 from the base model.

Yours are DATA/r1/cold_start and DATA/r1/general, with train.jsonl and test.jsonl of rows {"prompt", "answer",
"demonstration"}, and DATA/r1/reward_model, which grpo_jax.reward_model makes (DATA is GRPO_JAX_DATA): the paper's are
not public. Differs: its model is a mixture of experts,
DeepSeek-V3-Base; its cosine ends at 5e-6, and here at zero; its prompts are of mathematics, code, science and logic,
and here MATH's; right completions that mix languages or are chaotic are left out there. Not stated, and this file's own
choice: updates of the cold start, steps of stage 2, samples a prompt, shares of sources, the
longest prompt.
"""
import copy
import os

from grpo_jax.configs import default
from grpo_jax.configs.recipes import r1_zero
from grpo_jax.sample import Request
from grpo_jax.tools.pipeline import Stage, begin_with, run_folder

FOLDER = os.path.join(default.DATA, 'r1')


def get_config(preset='deepseek_r1'):
    """The config of stage 2: 8,192 completions a step of up to 32,768 tokens."""
    config = r1_zero.get_config(preset)
    config.steps = 250
    config.reward.parts = (('math', 1.0), ('format', 1.0), ('language', 1.0))
    config.supervised.batch = 128
    config.supervised.optimizer.learning_rate = 5e-5
    config.supervised.optimizer.schedule = 'cosine'
    return config


def get_stages(config, workdir):
    """The stages that make a policy in workdir, of this file's config or a changed one."""
    cold_start, fine_tuning = copy.deepcopy(config), copy.deepcopy(config)
    reasoning, rules = copy.deepcopy(config), copy.deepcopy(config)

    cold_start.data.name, cold_start.data.path = 'files', ''
    cold_start.data.options = {'folder': os.path.join(FOLDER, 'cold_start')}
    cold_start.supervised.updates = 100

    begin_with(reasoning, workdir, 'cold_start')

    fine_tuning.data.name, fine_tuning.data.path = 'mixture', ''
    fine_tuning.data.options = {'sources': [
        {'name': 'rollouts', 'weight': 0.75, 'options': {
            'folder': run_folder(workdir, 'samples')}},
        {'name': 'files', 'weight': 0.25, 'options': {'folder': os.path.join(FOLDER, 'general')}}]}
    fine_tuning.supervised.updates = 2 * 804745 // 128

    begin_with(rules, workdir, 'fine_tuning')
    rules.rollout.temperature = 0.7
    rules.steps = 1300 // 16

    preferences = copy.deepcopy(rules)
    begin_with(preferences, workdir, 'rules')
    preferences.data.name, preferences.data.path = 'mixture', ''
    preferences.data.options = {'sources': [
        {'name': config.data.name, 'weight': 0.5, 'options': config.data.options.to_dict(), 'path': config.data.path},
        {'name': 'files', 'source': 'general', 'weight': 0.5, 'options': {
            'folder': os.path.join(FOLDER, 'general'), 'answer_field': ''}}]}
    preferences.reward.by_source = {'general': {'parts': (('model', 1.0), ('format', 1.0), ('language', 1.0))}}
    preferences.reward.options.model.folder = os.path.join(FOLDER, 'reward_model')
    preferences.steps = 400 // 16

    return [
        Stage('cold_start', 'supervised', cold_start), Stage('reasoning', 'train', reasoning),
        Stage('samples', 'sample', of='reasoning', request=Request(samples=16)),
        Stage('fine_tuning', 'supervised', fine_tuning), Stage('rules', 'train', rules),
        Stage('preferences', 'train', preferences)]
