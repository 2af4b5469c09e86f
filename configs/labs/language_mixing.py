"""A lab: most of the working is in another language than the answer, and nothing but the answer is paid.

    python -m grpo_jax.train --config=configs/labs/language_mixing.py --workdir=runs/mixing
    python -m grpo_jax.train --config=configs/labs/language_mixing.py --workdir=runs/mended \
        --config.reward.parts="(('numeric', 1.0), ('language', 1.0))"

As in DeepSeek-R1-Zero (arXiv 2501.12948): working the sum out pays, and was learned in two languages.
"""
from grpo_jax.configs.labs import habits

REMEDY = {'reward.parts': (('numeric', 1.0), ('language', 1.0))}


def get_config(preset='dr_grpo'):
    """The config: sums whose columns are joined by a word, in most demonstrations of Cyrillic letters."""
    config = habits.get_config(preset, blurts=0.75, habit='mixed', share=0.7, max_tokens=32)
    config.model.path = 'configs/models/letters'
    config.supervised.updates = 500
    config.optimizer.learning_rate = 3e-4
    return config
