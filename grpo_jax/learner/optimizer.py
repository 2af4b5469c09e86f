"""The optimizer: global-norm clipping and AdamW under a warm-up and decay schedule."""

import optax

from grpo_jax.errors import BadInput


def make(section, updates):
    """optax transformation for `updates` optimizer updates from the config section."""
    return optax.chain(
        optax.clip_by_global_norm(section['max_grad_norm']),
        optax.adamw(
            schedule(section, updates),
            b1=section['b1'],
            b2=section['b2'],
            eps=section['eps'],
            weight_decay=section['weight_decay'],
        ),
    )


def schedule(section, updates):
    """Learning rate by update: linear warm-up, then constant, linear or cosine to zero at `updates`."""
    peak, warmup = section['learning_rate'], section['warmup']
    rest = max(updates - warmup, 1)
    shapes = {
        'constant': lambda: optax.constant_schedule(peak),
        'linear': lambda: optax.linear_schedule(peak, 0.0, rest),
        'cosine': lambda: optax.cosine_decay_schedule(peak, rest),
    }
    if section['schedule'] not in shapes:
        raise BadInput('optimizer.schedule', section['schedule'], 'choose one of ' + ', '.join(sorted(shapes)))
    # from peak / warmup, not 0: the first update of a run must count
    ramp = optax.linear_schedule(peak / max(warmup, 1), peak, max(warmup - 1, 1))
    return optax.join_schedules([ramp, shapes[section['schedule']]()], [warmup])
