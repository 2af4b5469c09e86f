"""Shows each failure of the issue on inputs of a few lines. From a clone of the project, with it installed or not:

    python PATH/TO/field/repro.py            # all, about six minutes on two cores
    python PATH/TO/field/repro.py tags tied  # some

Each case prints what was done, what a user expects, and what is seen. Works in a temporary folder, with the clone's own tiny models.
"""
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile

HERE, CLONE = os.path.dirname(os.path.abspath(__file__)), os.getcwd()
LAB = tempfile.mkdtemp(prefix='bugs_')
shutil.copytree(HERE, LAB, dirs_exist_ok=True)
os.environ['PYTHONPATH'] = CLONE if os.path.isdir('grpo_jax') else ''
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', os.path.join(LAB, 'cache'))
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.1')
if os.path.isdir('grpo_jax'):
    sys.path.insert(0, CLONE)
os.chdir(LAB)

from grpo_jax import data, rewards, train as trainer  # noqa: E402
from grpo_jax.configs import default  # noqa: E402
from grpo_jax.errors import BadInput  # noqa: E402
from grpo_jax.example import Example  # noqa: E402
from grpo_jax.models import hf  # noqa: E402
from grpo_jax.run import config_file  # noqa: E402
from grpo_jax.text import exact_text  # noqa: E402

sys.path.insert(0, HERE)
import tiny  # noqa: E402

CASES = {}
SMALL = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16)
CHATML = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}<e>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def case(function):
    CASES[function.__name__] = function
    return function


def model(name, added=(), special=False, **settings):
    """The demo's folder, smaller, with added tokens; settings go into tokenizer_config.json."""
    out = f'm/{name}'
    shutil.copytree(hf.find('configs/models/characters'), out, dirs_exist_ok=True)
    tok, c = json.load(open(f'{out}/tokenizer.json')), json.load(open(f'{out}/config.json'))
    n = 1 + max([*tok['model']['vocab'].values(), *(t['id'] for t in tok['added_tokens'])])
    for i, text in enumerate(added):
        tok['added_tokens'].append(dict(id=n + i, content=text, single_word=False, lstrip=False, rstrip=False, normalized=False, special=special))
    json.dump(tok, open(f'{out}/tokenizer.json', 'w'))
    write(out, vocab_size=n + len(added), **SMALL)
    t = json.load(open(f'{out}/tokenizer_config.json')) | settings
    json.dump({k: v for k, v in t.items() if v is not None}, open(f'{out}/tokenizer_config.json', 'w'))
    return out


def opened(folder, **changes):
    """(Run, splits) of the demo's config with a model and changes, as a run opens them; compiles nothing."""
    c = tiny.get_config()
    c.model.path = folder
    c.update_from_flattened_dict({key.replace('__', '.'): value for key, value in changes.items()})
    return trainer.check(c, 'no/where')


def write(folder, **changes):
    c = json.load(open(f'{folder}/config.json')) | changes
    json.dump(c, open(f'{folder}/config.json', 'w'))


def judge(folder, texts, example, parts, verifier=''):
    """[(text, {part: number})]: what a run pays for the tokens of these texts, by the run's own RewardStream."""
    c = default.get_config('dr_grpo')
    with c.unlocked():
        c.reward.parts, c.reward.verifier, c.reward.workers = parts, verifier, 1
    t = hf.load_tokenizer(folder)
    with rewards.build(rewards.RewardOptions.from_config(c.reward), 512) as functions:
        stream = rewards.RewardStream(functions, [example], len(texts), t)
        for i, text in enumerate(texts):
            stream.add(i, t.encode(text, add_special_tokens=False) + [t.eos_token_id], False)
        r = stream.results()
    return [(seen, {k: float(v[i]) for k, v in r.parts.items()}) for i, seen in enumerate(r.texts)]


def pays(gold, texts, part='math'):
    c = default.get_config('dr_grpo')
    with c.unlocked():
        c.reward.parts, c.reward.verifier, c.reward.workers = ((part, 1.0),), part, 1
    with rewards.build(rewards.RewardOptions.from_config(c.reward), 512) as functions:
        r = rewards.compute_rewards(functions, [Example('?', gold, 0, {})], texts, [False] * len(texts), [5] * len(texts))
    return {t: float(x) for t, x in zip(texts, r.parts[part])}


def command(*args, lines=2, keep=('error', 'Error', 'text', 'model', 'train: ', 'gold self')):
    """Runs a command of the project and prints its last lines of those kinds."""
    done = subprocess.run([sys.executable, '-m', 'grpo_jax', *args], capture_output=True, text=True)
    out = [line for line in (done.stdout + done.stderr).replace('\r', '\n').split('\n') if any(k in line for k in keep)]
    print('  $', args[0], *args[1:])
    print(f'    status {done.returncode}', *(f'\n    {line[:400]}' for line in out[len(out) - lines :] if lines))
    return done.stdout + done.stderr


def seen(*args):
    """(status, output) of a command of the project."""
    done = subprocess.run([sys.executable, '-m', 'grpo_jax', *args], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def train(*flags, **more):
    shutil.rmtree('w', ignore_errors=True)
    return command('train', '--config=tiny.py', '--workdir=w', *flags, **more)


@case
def spaces():
    """clean_up_tokenization_spaces=true (every Llama 3 folder on the hub): the reward judges the text that was written, and `show` prints it."""
    meta = {'before': '', 'setup': '', 'tests': ["assert glue(['a', 'b']) == 'a , b'"], 'names': {'glue': 'glue'}}
    program = "```python\ndef glue(x):\n    return ' , '.join(x)\n```"
    for folder in (model('plain'), model('cleaned', clean_up_tokenization_spaces=True)):
        assert judge(folder, [program], Example('Join.', '', 0, meta), (('code', 1.0),)) == [(program, {'code': 1.0})]
    run, splits = opened('m/cleaned', data__template='{prompt} !')
    assert exact_text(run.model.tokenizer, splits.train.tokens[0]).endswith('= !')


@case
def tags():
    """<think>, <answer> as special tokens of the tokenizer: rewards see them, whatever the flag `special`."""
    names = ('<think>', '</think>', '<answer>', '</answer>')
    texts = ['<think>\\boxed{4}? no, 5</think><answer>5</answer>', '<think>\\boxed{5}? no</think><answer>4</answer>']
    for special in (False, True):
        folder = model(f'tags_{special}', names, special)
        seen = judge(folder, texts, Example('2+3?', '5', 0, {}), (('math', 1.0), ('format', 0.2)), 'math')
        assert seen == [(texts[0], {'math': 1.0, 'format': 1.0}), (texts[1], {'math': 0.0, 'format': 1.0})]


@case
def prefilled():
    """A chat template that opens <think> itself (DeepSeek-R1 distills, Qwen3-Thinking-2507): format counts the opening there."""
    folder = model('r1', ('<think>', '</think>', '<s>', '<e>'), chat_template=CHATML.replace('assistant\n{% endif', 'assistant\n<think>\n{% endif'))
    example = opened(folder, data__chat=True)[1].train.examples[0]
    texts = ['2 and 3\n</think>\n<answer>5</answer>', '<think>2 and 3</think>\n<answer>5</answer>']
    assert [paid['format'] for _, paid in judge(folder, texts, example, (('format', 1.0),))] == [1.0, 0.0]


@case
def splits():
    """Data sets that have a train split alone (DAPO, Countdown, OpenR1-Math, DeepScaleR, RLVR-GSM, ...), and sets with test alone, are
    trained on, with or without a held-out share, and shown."""
    subprocess.run([sys.executable, 'field.py', 'field'], check=True)
    files = ('--config.data.name=files', '--config.reward.verifier=numeric')
    dapo = '--config.data.options.folder=field/dapo_processed.jsonl', '--config.data.options.answer_field=solution'
    raw = '--config.data.options.folder=field/dapo_raw_name.parquet', '--config.data.options.answer_field=reward_model.ground_truth'
    assert 'no test split: evaluations are of prompts of the train split' in train(*files, *dapo)
    assert 'no test split' not in train(*files, *raw, '--config.data.held_out=0.3')
    shown = '--config.data.options.folder=field/math500.jsonl', '--config.data.options.prompt_field=problem'
    assert "text 'Compute $" in command('show', '--config=tiny.py', '--split=test', *files, *shown)


@case
def files():
    """A user's own files are imported as Python imports them. Expected: they run as they do under `python FILE.py`; what is wrong is a line."""
    from grpo_jax import data

    for name in ('future_dataclass', 'pickled', 'procs', 'sibling', 'pack/rel', 'acall'):
        c = default.get_config('dr_grpo')
        with c.unlocked():
            c.reward.parts, c.reward.verifier, c.reward.workers = ((f'rewards/{name}.py:score', 1.0),), '', 1
        with rewards.build(rewards.RewardOptions.from_config(c.reward), 512) as functions:
            r = rewards.compute_rewards(functions, [Example('?', '30', 0, {})], ['30'], [False], [5])
        assert list(r.parts['score']) == [{'future_dataclass': 1, 'pickled': 1, 'acall': 0.5}.get(name, 0.02)], name
    for name, words in {'key_error': 'key_error.py, line 4: KeyError', 'meta_none': 'not Examples', 'int_answer': 'not Examples'}.items():
        try:
            data.load(data.DataOptions(name=f'datasets/{name}.py'), 'train', None)
            raise AssertionError(name)
        except BadInput as error:
            assert words in str(error), error
    for name in ('future_dataclass', 'sibling'):
        assert data.examples(f'datasets/{name}.py', {}, 'train')
        assert config_file.read_config(f'experiments/{name}.py').steps == 1


@case
def ends():
    """What ends a turn: eos_token_id of config.json, the chat template's own end; demonstrations of a chat end as its template ends, and of a
    tokenizer without eos_token with what generation_config.json names."""
    folder = model('turns', ('<s>', '<e>'), chat_template=CHATML)
    eos, end = (hf.load_tokenizer(folder).convert_tokens_to_ids(token) for token in ('<eos>', '<e>'))
    for listed in (eos, [end, eos]):
        write(folder, eos_token_id=listed)
        run, splits = opened(folder, data__chat=True, supervised__updates=1)
        assert run.settings.sampling.stop_tokens == tuple(sorted((eos, end)))
        assert data.find_end(run.model.tokenizer, run.settings.data.prompt_format, (eos,)) == ('', end)
    without = model('no_eos', eos_token=None)
    write(without, eos_token_id=None)
    try:
        opened(without, supervised__updates=1)
        raise AssertionError('was not refused')
    except BadInput as error:
        assert 'names no end-of-sequence token' in str(error)
    json.dump({'eos_token_id': 1}, open(f'{without}/generation_config.json', 'w'))
    assert opened(without, supervised__updates=1)[0].settings.sampling.stop_tokens == (1,)


@case
def budget():
    """rollout.thinking_tokens where the prompt has closed thinking (data.thinking=off), or a model that does not think: no </think> is forced
    into an answer."""
    template = CHATML.replace('assistant\n{% endif', "assistant\n{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n{% endif %}{% endif")
    folder = model('budget', ('<think>', '</think>', '<s>', '<e>'), chat_template=template)
    for thinking in ('off', 'auto'):
        train(f'--config.model.path={folder}', '--config.data.chat=True', f'--config.data.thinking={thinking}', '--config.rollout.thinking_tokens=4', lines=0)
        rows = [json.loads(line) for line in open('w/rollouts/000000.jsonl')]
        # random weights may write the tags themselves
        assert rows and not any(row['tokens'][4:5] == ['</think>'] and '<think>' not in row['tokens'][:4] for row in rows)


@case
def tied():
    """config.json ties head and embedding, and the file holds two different tensors (fine-tuned head): both are kept, as in transformers 5."""
    import jax
    import numpy as np
    from safetensors.numpy import load_file, save_file

    from grpo_jax.models import transformer
    from grpo_jax.models.hf import families

    folder = model('tied')
    c = families.load_config(folder)
    hf.save(folder, folder, jax.jit(transformer.init, static_argnums=1)(jax.random.key(0), c), c, np.float32)
    weights = load_file(f'{folder}/model.safetensors')
    weights['lm_head.weight'] = -weights['model.embed_tokens.weight']
    save_file(weights, f'{folder}/model.safetensors', metadata={'format': 'pt'})
    c = families.load_config(folder)
    hf.check_weights(folder, c)
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    table = jax.tree.map(lambda _: place, transformer.param_table(c), is_leaf=lambda x: isinstance(x, transformer.Param))
    params = hf.load_params(folder, c, table)
    assert np.array_equal(params['lm_head'], -params['embed'].T)


@case
def resumed():
    """Train rows, gold answers, test rows and the reward's file change between two starts of a run, under the same paths.
    Expected: refused in one line with what changed; --amend goes on; `provenance --verify` says it."""
    def rows(split, count, add=0):
        with open(f'd/{split}.jsonl', 'w') as f:
            f.writelines(json.dumps({'prompt': f'{i}+{3 + (split == "test")}=', 'answer': i + 3 + (split == 'test') + add}) + '\n' for i in range(count))

    os.makedirs('d', exist_ok=True)
    rows('train', 40), rows('test', 8)
    open('mine.py', 'w').write('def mine(completion, example):\n    return 0.0\n')
    flags = ('--config=tiny.py', '--workdir=w2', '--config.data.name=files', '--config.data.options.folder=d')
    flags += ("--config.reward.parts=(('numeric', 1.0), ('mine.py:mine', 1.0))",)
    command('train', *flags, '--config.steps=1', lines=1)
    rows('train', 41, add=7), rows('test', 7)
    open('mine.py', 'w').write('def mine(completion, example):\n    return 5.0\n')
    status, out = seen('train', *flags, '--config.steps=2')
    assert status == 2 and all(f'content of {what} is' in out for what in ('the train split', 'the test split', 'mine.py')), out
    assert '1 appended and other answers' in out and '1 fewer' in out and '--amend' in out, out
    status, out = seen('provenance', '--verify', '--workdir=w2')
    assert status == 1 and 'changed: content of mine.py' in out and 'changed: content of the train split' in out, out
    assert seen('train', *flags, '--config.steps=2', '--amend')[0] == 0
    status, out = seen('provenance', '--verify', '--workdir=w2')
    assert status == 0 and 'verified' in out and 'amended' in out, out


@case
def language():
    """Answers in other languages than English, gold 30. Expected: 1.0 each ('numeric' gives 1.0 for all but м^2)."""
    texts = ['答案：30', '答案：30。', '答案是30。', '答案是 30 个。', '所以一共有30个。', '综上所述，答案为 $30$。', '\\boxed{30\\text{个}}', '\\boxed{30元}', '答えは30です。']
    texts += ['정답은 30입니다.', 'Ответ: 30 груш.', '\\boxed{30\\text{ руб.}}', '\\boxed{30 \\, \\text{м}^2}', 'उत्तर 30 है।', 'الجواب هو 30']
    for part in ('math', 'numeric'):
        assert {text for text, paid in pays('30', texts, part).items() if paid != 1} <= {'\\boxed{30 \\, \\text{м}^2}'}, part
    assert pays('30个', ['\\boxed{30}']) == {'\\boxed{30}': 1}


@case
def choice():
    """Multiple choice as AMC, NuminaMath and instruction models write it. Expected: 1.0 each."""
    assert set(pays('B', ['\\boxed{B}', '\\boxed{B. 30}', '\\boxed{B) 30}', '\\boxed{\\textbf{(B) } 30}', 'B) 30', 'Option B', 'Therefore, B is correct.']).values()) == {1}
    assert set(pays('She picks $\\boxed{\\textbf{(B) } 30}$.', ['\\boxed{\\textbf{(B) } 30}', '\\boxed{B}', '\\boxed{30}']).values()) == {1}


@case
def golds():
    """Gold answers that the self-test passes, since it asks them about themselves, and that no usual answer meets.
    Expected: misjudged before the run, as '{"ground_truth": "30"}', '30 (thirty)' and 'A: 30' are, or understood."""
    for gold, answers in {'30个': ['\\boxed{30}'], '答案是30': ['\\boxed{30}'], '["A", "C"]': ['\\boxed{A, C}', '\\boxed{AC}'], 'B. 30': ['\\boxed{B}', '\\boxed{30}'], 'proof': ['\\boxed{proof}']}.items():
        if gold == 'proof':
            assert all(math.isnan(paid) for paid in pays(gold, [gold, *answers]).values())
        elif gold != '["A", "C"]':  # of which the column should be named as answer.0
            assert set(pays(gold, answers).values()) == {1}, gold


@case
def needs():
    """A built-in reward on data without what it reads is refused before the run, as a user's own reward is."""
    for part in ('countdown', 'code'):
        c = default.get_config('dr_grpo')
        with c.unlocked():
            c.reward.parts, c.reward.verifier, c.reward.workers = ((part, 1.0),), part, 1
        with rewards.build(rewards.RewardOptions.from_config(c.reward), 512) as functions:
            try:
                rewards.check_parameters(functions, [Example('?', '8', 0, {'nums': [3, 5], 'target': 8})])
                raise AssertionError('was not refused')
            except BadInput as error:
                assert 'reads the column' in str(error)


@case
def unknown():
    """None of one of two parts: such a completion has no reward, and is left out of the group's statistics (docs/rewards.md)."""
    verdict = {'right': 1.0, 'wrong': 0.0, 'no idea': None}
    functions = {'judged': lambda completion, example: verdict[completion], 'polite': lambda completion, example: 1.0}
    for missing, expected in (('unscorable', None), ('zero', 0.2)):
        c = default.get_config('grpo')
        with c.unlocked():
            c.reward.parts, c.reward.workers, c.reward.verifier = (('judged', 1.0), ('polite', 0.2)), 1, ''
            c.reward.missing = missing
        with rewards.build(rewards.RewardOptions.from_config(c.reward), 64, functions=functions) as built:
            r = rewards.compute_rewards(built, [Example('?', '1', 0, {})], list(verdict), [False] * 3, [1] * 3)
        assert [None if x != x else float(x) for x in r.rewards] == [1.2, 0.2, expected]


@case
def solved():
    """Prompt columns that are no prompts: gold answers within prompts, one prompt for all rows, and a template without a generation prompt
    are told, and a chat in a text is a chat."""
    subprocess.run([sys.executable, 'field.py', 'field'], check=True)
    folder = model('chat', ('<s>', '<e>'), chat_template=CHATML)
    chat = ('--config=tiny.py', '--prompts=1', '--config.data.name=files', f'--config.model.path={folder}', '--config.data.chat=True')
    numina = '--config.data.options.folder=field/numina_cot.parquet', '--config.data.options.prompt_field=messages'
    said = command('show', *chat, *numina, '--config.data.options.answer_field=solution', '--config.reward.verifier=', lines=1)
    assert "prompts of the train split end with the assistant's words" in said
    alpaca = '--config.data.options.folder=field/alpaca.jsonl', '--config.data.options.prompt_field=instruction'
    said = command('show', *chat[:1], '--prompts=2', *chat[2:], *alpaca, '--config.data.options.answer_field=output')
    assert '11 of 12 prompts of the train split repeat another one' in said
    os.makedirs('j', exist_ok=True)
    open('j/train.jsonl', 'w').write(json.dumps({'prompt': json.dumps([{'role': 'user', 'content': '1+3='}]), 'answer': 4}) + '\n')
    one = '--config.data.prompts_per_step=1', '--config.data.options.folder=j'
    assert "text '<s>user\\n1+3=<e>\\n<s>assistant\\n'" in command('show', *chat, *one, lines=1)
    model('no_turn', ('<s>', '<e>'), chat_template=CHATML.partition('{% if add')[0])
    said = command('show', *chat[:3], '--config.model.path=m/no_turn', '--config.data.chat=True', *one, lines=1)
    assert 'does not open the answer' in said


@case
def plus():
    """HumanEval+ and MBPP+ in evalplus's form are judged by all their tests."""
    from grpo_jax.data import code, records

    subprocess.run([sys.executable, 'field.py', 'field'], check=True)
    os.makedirs('c', exist_ok=True)
    shutil.copy('field/humanevalplus.jsonl/test.jsonl', 'c/humaneval.jsonl'), shutil.copy('field/mbppplus.jsonl/test.jsonl', 'c/mbpp.jsonl')
    for name in ('humaneval', 'mbpp'):
        sound, bad = records.split_malformed(code.examples('test', folder='c', name=name))
        assert (len(sound), bad) == (6, [])
        c = default.get_config('dr_grpo')
        with c.unlocked():
            c.reward.parts, c.reward.verifier, c.reward.workers = (('code', 1.0),), 'code', 1
        right = sound[0].answer if name == 'mbpp' else f'def add0(x):\n{sound[0].answer}'
        programs = [f'```python\n{program}\n```' for program in (right, 'def add0(x):\n    return 1 if x == 1 else 9')]
        with rewards.build(rewards.RewardOptions.from_config(c.reward), 512) as functions:
            r = rewards.compute_rewards(functions, sound[:1], programs, [False] * 2, [5] * 2)
        assert list(r.parts['code']) == [1.0, 0.0], 'a program that fails the added tests is paid'


@case
def pipe():
    """python -m grpo_jax show ... | head -1 prints one line, and no traceback."""
    done = subprocess.run(f'{sys.executable} -m grpo_jax show --config=tiny.py --prompts=40 | head -1', shell=True, capture_output=True, text=True)
    assert done.stdout.count('\n') == 1 and 'Traceback' not in done.stderr, done.stderr


if __name__ == '__main__':
    try:
        for name in sys.argv[1:] or CASES:
            print(f'\n== {name}: {CASES[name].__doc__}', flush=True)
            CASES[name]()
    finally:
        shutil.rmtree(LAB, ignore_errors=True)
