"""A lab: most of the working is in another language than the answer, and nothing but the answer is paid.

    python -m grpo_jax.train --config=configs/labs/language_mixing.py --workdir=runs/mixing
    python -m grpo_jax.train --config=configs/labs/language_mixing.py --workdir=runs/mended \
        --config.reward.parts="(('numeric', 1.0), ('language', 1.0))"

What DeepSeek-R1-Zero did (arXiv 2501.12948) in small: to work it out pays, and it was learned in two languages.
"""
from grpo_jax.configs.labs import habits

REMEDY = {'reward.parts': (('numeric', 1.0), ('language', 1.0))}


def get_config(preset='dr_grpo'):
    """Sums whose columns are joined by a word, of Cyrillic letters in most demonstrations."""
    config = habits.get_config(preset, blurts=0.75, habit='mixed', share=0.7, max_tokens=32)
    config.model.path = 'configs/models/letters'
    config.supervised.updates = 500
    config.optimizer.learning_rate = 3e-4
    return config
