r"""DPO on preference pairs: UltraFeedback, in which GPT-4 chose between the answers of two models.

    python -m grpo_jax.train --config=configs/preferences.py --workdir=runs/preferences \
        --config.model.path=Qwen/Qwen2.5-0.5B-Instruct

Other pairs: --config.data.path=trl-lib/ultrafeedback_binarized, or a folder in --config.data.options.folder, and the
names of its fields (docs/data.md). :sft learns the chosen answers alone. A reward model of the same pairs:

    python -m grpo_jax.reward_model --config=configs/preferences.py --workdir=runs/preferred \
        --config.supervised.updates=500

The data are read from GRPO_JAX_DATA/preferences or from the hub. There is no verifier: held-out prompts only show how
long answers become and how much they repeat themselves. Sizes suit one TPU host of 8 chips with mesh.fsdp=8.
"""
import os

from grpo_jax.configs import default


def get_config(preset='dpo'):
    """The config: 128 pairs a step, twice through the data."""
    config = default.get_config(preset)
    config.steps = 950
    config.model.path = 'Qwen/Qwen3-0.6B'
    config.model.dtype = 'bfloat16'
    config.data.name = 'preferences'
    config.data.options = {'folder': os.path.join(default.DATA, 'preferences')}
    config.data.path = 'HuggingFaceH4/ultrafeedback_binarized'
    config.data.max_prompt_tokens = 512
    config.data.chat = True
    config.rollout.max_tokens = 1024
    if config.collection.source == 'reference':  # the pairs are the data's, not samples
        config.collection.source = 'pairs'
    config.reward.parts = (('repetition', 1.0),)
    config.reward.verifier = ''
    config.learner.microbatches = 8
    config.learner.remat = 'full'
    config.optimizer.learning_rate = 5e-7
    config.optimizer.warmup = 50
    config.optimizer.schedule = 'linear'
    config.supervised.batch = 32
    config.supervised.optimizer.learning_rate = 1e-5
    config.evaluation.prompts = 64
    config.evaluation.samples = 1
    return config
