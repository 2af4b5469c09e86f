"""Steps without a reward: nothing can be learned from completions of which none has a finite one."""

import logging
import os

import numpy as np

from grpo_jax.errors import BadInput
from grpo_jax.rewards import Rewards
from grpo_jax.run.rows import append_event, recorded_events

logger = logging.getLogger('grpo_jax')
EVENT = 'rewards'
MOST = 3  # such steps in a row: one may be chance, where few completions can be judged; three are a broken reward


def check(workdir: str | os.PathLike, step: int, rewarded: Rewards) -> None:
    """Records and reports a step of which no completion has a finite reward; BadInput at the last of MOST in a row.

    Those before count by their events, also when a run was stopped between.
    """
    if np.isfinite(rewarded.rewards).any():
        return
    lacking = {name: int(np.sum(~np.isfinite(values))) for name, values in rewarded.parts.items()}
    parts = ', '.join(f'{name} gives {count} times None or NaN' for name, count in lacking.items())
    count = len(rewarded.rewards)
    append_event(workdir, step, EVENT, completions=count, without_reward=lacking)
    before = {row['step'] for row in recorded_events(workdir) if row['event'] == EVENT}
    if all(step - k in before for k in range(1, MOST)):
        raise BadInput(
            'reward.parts',
            sorted(lacking),
            f'none of {count} completions has a finite reward, {MOST} steps in a row (steps {step - MOST + 1} to '
            f'{step}): {parts}; mend the reward, or take data that it can judge',
        )
    logger.warning('step %d: none of %d completions has a finite reward: %s', step, count, parts)
