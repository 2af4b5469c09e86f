"""What papers say of their recipes, value by value, with the place. A number that no source has is not in here.

A row is a recipe of this folder, or a stage of one. Values stand under the keys of the config, in this project's words:
a step is a rollout with the updates on it, so prompts_per_step are those of a rollout, and what a paper counts in
updates is divided by the updates a rollout.
"""
from collections.abc import Mapping
import importlib
from typing import Any, NamedTuple


class Said(NamedTuple):
    """What one place says."""

    where: str
    values: Mapping[str, Any]  # by key of the config


class Row(NamedTuple):
    """A recipe, or a stage of it."""

    recipe: str  # file of this folder
    stage: str  # of those of its get_stages; '' where it has none
    method: str
    paper: str  # number of arXiv
    said: tuple[Said, ...]
    chosen: tuple[str, ...]  # keys whose numbers no source has: the recipe's own choice

    @property
    def values(self):
        """What all its places say, by key of the config."""
        return {key: value for said in self.said for key, value in said.values.items()}


# a rollout of 8,192 outputs in 16 minibatches, each 32 questions: 512 prompts; 400 updates are 25 rollouts
_R1 = {
    'rollout.group_size': 16, 'data.prompts_per_step': 512, 'rollout.max_tokens': 32768, 'rollout.temperature': 1.0,
    'optimizer.learning_rate': 3e-6, 'algorithm.kl_coef': 1e-3, 'learner.epochs': 1, 'learner.minibatches': 16,
    'collection.reference': 'hard', 'collection.reference_every': 25}
_R1_CLIP = {'algorithm.clip_low': 10.0, 'algorithm.clip_high': 10.0}
_R1_SUPERVISED = Said('appendix B.4.2, supervised fine-tuning', {
    'supervised.batch': 128, 'supervised.optimizer.learning_rate': 5e-5, 'supervised.optimizer.schedule': 'cosine',
    'rollout.max_tokens': 32768})
_R1_LAST = {**_R1, **_R1_CLIP, 'rollout.temperature': 0.7}

ROWS = (
    Row('r1_zero', '', 'DeepSeek-R1-Zero', '2501.12948', (
        Said('section 2.1', {**_R1, 'steps': 650}),
        Said('section 2.2', {'reward.parts': (('math', 1.0), ('format', 1.0))}),
    ), ('algorithm.clip_low', 'algorithm.clip_high', 'data.max_prompt_tokens')),
    Row('r1', 'cold_start', 'DeepSeek-R1', '2501.12948', (_R1_SUPERVISED,),
        ('supervised.updates', 'data.max_prompt_tokens')),
    Row('r1', 'reasoning', 'DeepSeek-R1', '2501.12948', (Said('section 3.2.1', {**_R1, **_R1_CLIP}),),
        ('steps', 'data.max_prompt_tokens')),
    Row('r1', 'fine_tuning', 'DeepSeek-R1', '2501.12948', (
        _R1_SUPERVISED, Said('two epochs of the 804,745 samples of appendix B', {'supervised.updates': 12574}),
    ), ('data.max_prompt_tokens',)),
    Row('r1', 'rules', 'DeepSeek-R1', '2501.12948', (
        Said('section 3.2.2, the first 1,300 of 1,700 updates', {**_R1_LAST, 'steps': 81}),
    ), ('data.max_prompt_tokens',)),
    Row('r1', 'preferences', 'DeepSeek-R1', '2501.12948', (
        Said('section 3.2.2, the final 400 updates', {**_R1_LAST, 'steps': 25}),
    ), ('data.max_prompt_tokens',)),
    Row('dapo', '', 'DAPO', '2503.14476', (
        Said('section 4.1', {
            'model.path': 'Qwen/Qwen2.5-32B', 'rollout.group_size': 16, 'data.prompts_per_step': 512,
            'rollout.max_tokens': 20480, 'optimizer.learning_rate': 1e-6, 'optimizer.schedule': 'constant',
            'optimizer.warmup': 320, 'learner.minibatches': 16, 'algorithm.clip_low': 0.2, 'algorithm.clip_high': 0.28,
            'reward.length_shaping': 'overlong', 'reward.options.overlong.margin': 4096}),
        Said('section 2.3', {'algorithm.kl_coef': 0.0}),
        Said('eq. 7, 1 and -1: a difference of 2', {'reward.parts': (('math', 2.0),)}),
        Said("the authors' script, recipe/dapo/run_dapo_qwen2.5_32b.sh in verl", {
            'rollout.temperature': 1.0, 'rollout.top_p': 1.0, 'optimizer.weight_decay': 0.1,
            'optimizer.max_grad_norm': 1.0, 'data.max_prompt_tokens': 2048, 'collection.max_draws': 10,
            'learner.epochs': 1}),
    ), ('steps',)),
    Row('dr_grpo', '', 'Dr. GRPO', '2503.20783', (
        Said("the authors' script, examples/qwen2.5-math-7b.sh in understand-r1-zero", {
            'model.path': 'Qwen/Qwen2.5-Math-7B', 'rollout.group_size': 8, 'data.prompts_per_step': 128,
            'data.max_prompt_tokens': 1024, 'rollout.max_tokens': 3000, 'algorithm.fixed_length': 3000,
            'rollout.temperature': 1.0, 'rollout.top_p': 1.0, 'optimizer.learning_rate': 1e-6,
            'optimizer.schedule': 'constant', 'learner.epochs': 1, 'algorithm.kl_coef': 0.0}),
    ), ('steps', 'learner.minibatches', 'algorithm.clip_low', 'algorithm.clip_high')),
    Row('deepseekmath', '', 'DeepSeekMath', '2402.03300', (
        Said('section 4.2', {
            'model.path': 'deepseek-ai/deepseek-math-7b-instruct', 'rollout.group_size': 64,
            'data.prompts_per_step': 16, 'rollout.max_tokens': 1024, 'optimizer.learning_rate': 1e-6,
            'algorithm.kl_coef': 0.04, 'learner.epochs': 1, 'learner.minibatches': 1}),
    ), ('steps', 'rollout.temperature', 'algorithm.clip_low', 'algorithm.clip_high', 'data.max_prompt_tokens')),
    Row('gspo', '', 'GSPO', '2507.18071', (
        Said('section 5.1', {
            'learner.minibatches': 4, 'algorithm.clip_low': 3e-4, 'algorithm.clip_high': 4e-4}),
    ), ('steps', 'rollout.group_size', 'data.prompts_per_step', 'rollout.max_tokens', 'rollout.temperature',
        'optimizer.learning_rate', 'algorithm.kl_coef', 'data.max_prompt_tokens')),
    Row('scalerl', '', 'ScaleRL', '2510.13786', (
        Said('section 2', {'algorithm.kl_coef': 0.0, 'data.max_prompt_tokens': 2048, 'rollout.thinking_tokens': 12288}),
        Said('appendix A.3', {
            'rollout.group_size': 16, 'data.prompts_per_step': 48, 'rollout.max_tokens': 14336,
            'optimizer.learning_rate': 5e-7, 'optimizer.schedule': 'constant', 'optimizer.warmup': 100,
            'optimizer.eps': 1e-15, 'optimizer.weight_decay': 0.01, 'learner.minibatches': 1,
            'reward.parts': (('math', 2.0),)}),
        Said('section 4', {'collection.retire_above': 0.9, 'collection.dead_groups': 'drop'}),
        Said('appendix A.17.2, where 4, 5 and 8 differ little', {'algorithm.cispo_cap': 5.0}),
    ), ('steps', 'rollout.temperature')),
)  # fmt: skip

# columns of the table in docs/config.md: heading -> key
COLUMNS = {
    'G': 'rollout.group_size', 'prompts a step': 'data.prompts_per_step', 'tokens': 'rollout.max_tokens',
    'T': 'rollout.temperature', 'learning rate': 'optimizer.learning_rate', 'updates a rollout': 'learner.minibatches',
    'clip low': 'algorithm.clip_low', 'clip high': 'algorithm.clip_high', 'kl_coef': 'algorithm.kl_coef'}


def configs():
    """The config of each row, in their order."""
    made = []
    for row in ROWS:
        module = importlib.import_module(f'grpo_jax.configs.recipes.{row.recipe}')
        config = module.get_config()
        stages = {stage.name: stage.config for stage in module.get_stages(config, 'runs')} if row.stage else {}
        made.append(stages.get(row.stage, config))
    return made


def read(config, key):
    """The value of a dotted key."""
    for name in key.split('.'):
        config = config[name]
    return config
