"""A lab: the cosine reward of arXiv 2502.03373 punishes wrong answers less the longer they are, so they get longer.

    python -m grpo_jax.train --config=configs/labs/wrong_answers_growing.py --workdir=runs/growing
    python -m grpo_jax.train --config=configs/labs/wrong_answers_growing.py --workdir=runs/mended \
        --config.reward.length_shaping=overlong --config.reward.options.overlong.margin=22
"""
from grpo_jax.configs.labs import habits

REMEDY = {'reward.length_shaping': 'overlong', 'reward.options.overlong.margin': 22}


def get_config(preset='dr_grpo'):
    """The config of the sums of labs/length_hacking.py, with the reward shaped by length."""
    config = habits.get_config(preset, blurts=0.4, habit='repeat', share=0.33, max_tokens=48)
    config.model.path = 'configs/models/letters'
    config.supervised.updates = 500
    config.reward.length_shaping = 'cosine'
    return config
