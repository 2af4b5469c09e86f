"""Folders of runs as a report reads them, made by hand."""

import json
import os

from tests import tiny_run

STEPS = 4
# every way in which a completion of a stranger tries to become more than a text
HOSTILE = {
    'script': '</script><script>document.title = "owned"</script>',
    'image': '<img src=x onerror="document.title=\'owned\'"><svg onload=alert(1)>',
    'comment': '<!--<script>',
    'entity': '&lt;b&gt; &#x3c;',
    'separators': 'a\u2028b\u2029c',
    'ansi': '\x1b[31mred\x1b]0;title\x07\x9b2J',
    'nul': 'before\x00after',
    'surrogate': 'half \ud800 pair',
    'bidi': 'abc\u202egnp.exe\u2066',
    'template': '{{ 7 * 7 }}{% raw %} ${7*7} __proto__',
    'long': 'x' * (1 << 20),
}


def write(folder, *, name, rows):
    """Writes rows as lines of JSON, escaped, so that any text can be in them."""
    path = os.path.join(folder, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, 'w', encoding='utf8') as file:
        file.writelines(json.dumps(row) + '\n' for row in rows)


def make(folder, *, seed=0, steps=STEPS, evaluated=True, gain=0.1, **changes):
    """A run's folder with metrics, timings, evaluations, rollouts of two steps, programs and a diagnosis."""
    settings = dict(steps=STEPS, seed=seed, evaluation__prompts=6, evaluation__samples=4) | changes
    config = json.loads(json.dumps(tiny_run.config(**settings).to_dict()))
    os.makedirs(folder, exist_ok=True)
    for file, value in {'config': config, 'programs': {'sample': 'a', 'logprobs': 'b', 'update': 'c'}}.items():
        with open(os.path.join(folder, f'{file}.json'), 'w', encoding='utf8') as opened:
            json.dump(value, opened)
    outcomes = {'groups_all_wrong': 0.5, 'groups_mixed': 0.25, 'groups_all_right': 0.25}
    metrics = [
        {
            'step': step,
            'reward': gain * (step + seed),
            'reward/a': 0.5,
            'entropy': 1 / (step + 1),
            'own': step,
            **outcomes,
        }
        for step in range(steps)
    ]
    write(folder, name='metrics.jsonl', rows=metrics)
    write(folder, name='timings.jsonl', rows=[{'step': i, 'sample': 1.0, 'update': 0.5 + i} for i in range(steps)])
    if evaluated:
        rows = [{'step': step, 'greedy': right / 6, 'pass@1': right / 8} for step, right in ((0, 1), (STEPS, 5))]
        write(folder, name='evaluations.jsonl', rows=rows)
    texts = {'monitor': 'dead_all_right', 'seen': 'seen', 'evidence': 'e', 'cause': 'c', 'remedy': '--amend'}
    write(folder, name='events.jsonl', rows=[{'step': 2, 'event': 'diagnosis', **texts}])
    for step in (0, 2):
        write(folder, name=f'rollouts/{step:06d}.jsonl', rows=[row for group in range(3) for row in groups(group)])
    return str(folder)


def groups(number, size=4, tokens=3):
    """The rows of a group of completions, of which the first is right, with each token's numbers."""
    for i in range(size):
        right = i == 0
        words = [f'w{number}', f' {i}', '<end>'][:tokens] + [' and'] * (tokens - 3)
        yield {
            'id': number, 'prompt': f'prompt {number}', 'answer': str(number), 'completion': ''.join(words[:2]),
            'reward': float(right), 'correct': right, 'parts': {'numeric': float(right), 'format': 0.5},
            'advantage': 0.75 if right else -0.25, 'length': tokens, 'truncated': i == 3, 'tokens': words,
            'logprobs': [-0.5] * tokens, 'old_logprobs': [-0.4] * tokens, 'ref_logprobs': [-0.6] * tokens,
            'entropy': [1.0] * tokens,
        }  # fmt: skip


def hostile_row(text):
    """A rollout's row in which every text is this one."""
    return {
        'id': text[:50], 'prompt': text, 'answer': text[:1000], 'completion': text, 'reward': 1.0, 'correct': None,
        'parts': {text[:40]: 1.0, '__proto__': 2.0}, 'advantage': [0.5], 'tokens': [text], 'logprobs': [-1.0],
    }  # fmt: skip
