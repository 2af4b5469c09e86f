"""Model folders of strangers: damaged or hostile, they are refused in one line before anything compiles."""

import json
import os
import pickle
import random
import shutil
import struct

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from grpo_jax.data import chat_templates
from grpo_jax.errors import BadInput
from grpo_jax.hosts import files
from grpo_jax.models import hf, transformer
from grpo_jax.models.hf import families
from grpo_jax.models.hf import folder as folders
from grpo_jax.run.open import make_policy, open_config, open_split
from grpo_jax.sharding import compiled
from grpo_jax.types import Param
from tests import hub_cache, small_model, tiny_run

WEIGHTS = 'model.safetensors'
NORM = 'model.norm.weight'
SECRET = {'model_type': 'llama', 'secret': 'of somebody else'}


@pytest.fixture(scope='module')
def good(tmp_path_factory):
    """A whole folder of a tiny model, to be copied."""
    source, folder = tmp_path_factory.mktemp('source'), tmp_path_factory.mktemp('good')
    small_model.write(source)
    c = families.load_config(str(source))
    params = jax.device_get(jax.jit(transformer.init, static_argnums=1)(jax.random.key(0), c))
    hf.save(folder, source, params, c, np.float32)
    (folder / 'generation_config.json').write_text('{"eos_token_id": 1}')
    return folder


@pytest.fixture
def folder(good, tmp_path):
    """A copy of the folder, to damage."""
    return shutil.copytree(good, tmp_path / 'model')


@pytest.fixture(autouse=True)
def nothing_compiles(monkeypatch):
    monkeypatch.setattr(compiled.Executable, 'lower', lambda _: pytest.fail('has compiled'))


def use(folder, **changes):
    """(Run, parameters) of a run that begins with the folder's weights."""
    changes = {'model__path': str(folder), 'model__random_init': False, 'supervised__updates': 0} | changes
    opened = open_config(tiny_run.config(**changes), f'{folder}-run')
    open_split(opened, 'train')
    return opened, make_policy(opened)


def refuse(folder, *words, **changes):
    """The one line in which the folder is refused; it has the words."""
    with pytest.raises(BadInput) as error:
        use(folder, **changes)
    line = str(error.value)
    assert line.isprintable() and len(line) < 6000 and all(word in line for word in words), line
    assert not os.path.exists(f'{folder}-run')
    return line


def test_every_end_that_the_folder_names_ends_a_completion(folder):
    change(folder, 'config.json', eos_token_id=[1, 5])
    change(folder, 'generation_config.json', eos_token_id=7)
    opened, _ = use(folder)
    assert opened.settings.sampling.stop_tokens == (1, 5, 7)


def test_the_chat_templates_own_end_ends_a_completion_of_a_chat(folder):
    change(folder, 'tokenizer_config.json', chat_template="{% for m in messages %}{{ m['content'] }}<unk>{% endfor %}")
    unknown = hf.load_tokenizer(folder).unk_token_id
    stops = [use(folder, data__chat=chat)[0].settings.sampling.stop_tokens for chat in (True, False)]
    assert stops == [tuple(sorted((1, unknown))), (1,)]


def test_a_budget_of_thinking_is_none_where_thinking_is_off(folder):
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if enable_thinking %}+{% endif %}"
    change(folder, 'tokenizer_config.json', chat_template=template)
    options = {'data__chat': True, 'rollout__thinking_tokens': 4}
    for thinking, budget, words in (('off', 0, {}), ('on', 4, {'thinking': ('</think>',), 'opening': ('<think>',)})):
        sampling = use(folder, data__thinking=thinking, **options)[0].settings.sampling
        assert (sampling.thinking_tokens, sampling.read_strings) == (budget, words)


def test_the_undamaged_folder_loads(folder):
    opened, params = use(folder)
    assert opened.settings.sampling.stop_tokens == (1,) and params['final_norm'].shape == (32,)


def change(folder, name, **values):
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_weights(folder, change):
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def header(folder, change):
    """Rewrites the header of the weights after change(dict)."""
    content = (folder / WEIGHTS).read_bytes()
    (size,) = struct.unpack('<Q', content[:8])
    tensors = json.loads(content[8 : 8 + size])
    change(tensors)
    text = json.dumps(tensors).encode()
    (folder / WEIGHTS).write_bytes(struct.pack('<Q', len(text)) + text + content[8 + size :])


def poison(value):
    def change(tensors):
        tensors['model.layers.0.mlp.up_proj.weight'][3, 5] = value

    return lambda folder: change_weights(folder, change)


def index(weight_map):
    return lambda folder: (folder / folders.INDEX).write_text(json.dumps({'weight_map': weight_map}))


def link(name, target):
    """Puts a link to a file beside the folder into it."""

    def damage(folder):
        (folder.parent / target).write_text(json.dumps(SECRET))
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(os.path.join('..', target))

    return damage


def huge(name):
    def damage(folder):
        (folder / name).touch()
        os.truncate(folder / name, folders.LARGEST + 1)  # of which the disk keeps nothing

    return damage


def added(**settings):
    """A token of tokenizer.json with other settings."""

    def damage(folder):
        path = folder / 'tokenizer.json'
        value = json.loads(path.read_text())
        value['added_tokens'][0] |= settings
        path.write_text(json.dumps(value))

    return damage


def around(token):
    """A tokenizer that puts a token before each text."""
    pieces = [{'SpecialToken': {'id': '<x>', 'type_id': 0}}, {'Sequence': {'id': 'A', 'type_id': 0}}]
    processor = {
        'type': 'TemplateProcessing',
        'single': pieces,
        'pair': [*pieces, {'Sequence': {'id': 'B', 'type_id': 1}}],
        'special_tokens': {'<x>': {'id': '<x>', 'ids': [token], 'tokens': ['<x>']}},
    }
    return lambda folder: change(folder, 'tokenizer.json', post_processor=processor)


# what is done to the folder, and words of the line
DAMAGE = {
    'weights: NaN': (poison(np.nan), ['up_proj.weight', '1 of 1536 numbers', 'NaN or infinite']),
    'weights: infinite': (poison(-np.inf), ['up_proj.weight', 'NaN or infinite']),
    'weights: beyond float32': (
        lambda f: change_weights(f, lambda t: t.update({NORM: np.full(32, 1e200)})),
        [NORM, '32 of 32 numbers', 'as float32'],
    ),
    'weights: overlapping': (
        lambda f: header(f, lambda t: t[NORM].update(data_offsets=t['model.embed_tokens.weight']['data_offsets'])),
        [WEIGHTS, 'not a safetensors file'],
    ),
    'weights: header too long': (
        lambda f: (f / WEIGHTS).write_bytes(struct.pack('<Q', 2**63) + b'{}'),
        [WEIGHTS, 'not a safetensors file'],
    ),
    'weights: of another dtype': (
        lambda f: header(f, lambda t: t[NORM].update(dtype='I32')),
        [NORM, 'I32', 'not quantized'],
    ),
    'weights: a name for the terminal': (
        lambda f: change_weights(f, lambda t: t.update({'\x1b]0;x\x07\u202e': np.zeros(1)})),
        ['left over', r'\x1b]0;x\x07\u202e'],
    ),
    'weights: pickled': (
        lambda f: [(f / WEIGHTS).unlink(), (f / 'pytorch_model.bin').write_bytes(pickle.dumps(os.getcwd))],
        ['pytorch_model.bin is pickled', 'is not read'],
    ),
    'weights: a pipe': (lambda f: [(f / WEIGHTS).unlink(), os.mkfifo(f / WEIGHTS)], [WEIGHTS, 'no plain file']),
    'index: a file that is not there': (index({NORM: 'model-2.safetensors'}), ['model-2.safetensors', 'is not there']),
    'index: outside': (index({NORM: '../../../etc/passwd'}), ['etc/passwd', 'lies outside']),
    'index: absolute': (index({NORM: '/etc/passwd'}), ['/etc/passwd', 'lies outside']),
    'index: no name of a file': (index({NORM: 'a\0b'}), ['cannot be the name of a file']),
    'index: half a character': (index({NORM: '\ud800'}), [r'\ud800', 'cannot be the name of a file']),
    'index: a list': (index(['a']), ['is no index of weights']),
    'index: huge': (huge(folders.INDEX), ['134217729 bytes', 'at most 134217728']),
    'config: huge': (huge('config.json'), ['134217729 bytes']),
    'config: labels that fill the memory': (
        lambda f: [change(f, 'config.json', num_labels=10**9, model_type='gpt2')],
        ['model_type', 'gpt2'],
    ),
    'config: code of its own': (
        lambda f: change(f, 'config.json', model_type='mine', auto_map={'AutoConfig': 'mine.Config'}),
        ['model_type', 'mine'],
    ),
    'config: sliding layers': (
        lambda f: change(f, 'config.json', layer_types=['sliding_attention'] * 2),
        ['sliding_window'],
    ),
    'config: part of a rotation': (
        lambda f: change(f, 'config.json', rope_scaling={'rope_type': 'default', 'partial_rotary_factor': 0.5}),
        ['partial_rotary_factor', '0.5'],
    ),
    'config: a link out': (link('config.json', 'theirs'), ['theirs', 'lies outside']),
    'weights: a link out': (link(WEIGHTS, 'theirs'), ['theirs', 'lies outside']),
    'tokenizer: a link out': (link('tokenizer.json', 'theirs'), ['theirs', 'lies outside']),
    'merges: a link out': (link('merges.txt', 'theirs'), ['theirs', 'lies outside']),
    'template: a link out': (link('chat_template.jinja', 'theirs'), ['theirs', 'lies outside']),
    'templates: a link out': (
        lambda f: [(f / folders.TEMPLATES).mkdir(), (f / folders.TEMPLATES / 'x.jinja').symlink_to('/etc/passwd')],
        ['/etc/passwd', 'lies outside'],
    ),
    'tokenizer: cut short': (lambda f: os.truncate(f / 'tokenizer.json', 900), ['tokenizer']),
    'tokenizer: more tokens than the model': (lambda f: change(f, 'config.json', vocab_size=50), ['99 tokens', '50']),
    'tokenizer: a token that is none': (
        lambda f: change(f, 'tokenizer_config.json', eos_token='<none>'),
        ['100 tokens and the model 99'],
    ),
    'tokenizer: a token around texts that is none': (around(77777), ['gives token 77777', '99 tokens']),
    'tokenizer: files elsewhere': (
        lambda f: change(f, 'tokenizer_config.json', fast_tokenizer_files=['../../tokenizer.4.0.0.json']),
        ['tokenizer.4.0.0.json', 'lies outside'],
    ),
    'tokenizer: names of files of a wrong type': (
        lambda f: change(f, 'tokenizer_config.json', fast_tokenizer_files=[1]),
        ['fast_tokenizer_files', 'list of names'],
    ),
    'tokenizer: a setting for the terminal': (added(**{'\x1b[31m': 1}), [r'\x1b[31m', 'no setting has this name']),
    'tokenizer: code of its own': (
        lambda f: change(
            f, 'tokenizer_config.json', tokenizer_class='Mine', auto_map={'AutoTokenizer': ['mine.A', 'mine.B']}
        ),
        [],
    ),
    'generation: a token that is none': (
        lambda f: change(f, 'generation_config.json', eos_token_id=99),
        ['eos_token_id', '99', '0 to 98'],
    ),
    'generation: a text': (lambda f: change(f, 'generation_config.json', eos_token_id='1'), ['eos_token_id', "'1'"]),
}


@pytest.mark.parametrize('kind', DAMAGE)
def test_a_damaged_folder_is_refused_in_one_line(folder, kind):
    damage, words = DAMAGE[kind]
    damage(folder)
    if kind == 'tokenizer: code of its own':  # the family has a tokenizer of its own, which is taken instead
        (folder / 'mine.py').write_text('raise SystemExit("has run")')
        use(folder)
    else:
        refuse(folder, *words)


def test_a_config_that_makes_others_allocate_is_harmless(folder):
    change(folder, 'config.json', num_labels=10**12, auto_map={'AutoConfig': 'mine.Config'}, quantization_config=5)
    (folder / 'mine.py').write_text('raise SystemExit("has run")')
    use(folder)


def test_a_pickle_beside_the_weights_is_left_alone(folder):
    (folder / 'pytorch_model.bin').write_bytes(b'not even a pickle')
    use(folder)


# chat templates

TEMPLATES = {
    'no jinja': ('{% for m in messages %}', 'TemplateSyntaxError'),
    'of a wrong type': (5, 'fails'),
    "python's insides": ("{{ ''.__class__.__mro__[1].__subclasses__() }}{{ messages[0].content }}", 'SecurityError'),
    'a function of python': ("{{ messages.__init__.__globals__['os'].system('true') }}", 'SecurityError'),
    'an import': ("{% import 'os' as os %}", 'no loader for this environment'),
    'a raised message': ("{{ raise_exception('\x1b[31mno\u202e') }}", r'\x1b[31mno'),
    'more text than memory': ("{{ 'x' * 10**11 }}{{ messages[0].content }}", 'had to be ended'),
    'far too much text': ("{% for i in range(2000) %}{{ 'x' * 10000 }}{% endfor %}", '20000000 characters'),
}


@pytest.mark.parametrize('kind', TEMPLATES)
def test_a_chat_template_that_fails_is_refused_in_one_line(folder, kind):
    template, word = TEMPLATES[kind]
    change(folder, 'tokenizer_config.json', chat_template=template)
    refuse(folder, 'chat template', word, data__chat=True, data__max_prompt_tokens=100)


@pytest.mark.parametrize('condition', ['true', "'number' not in messages[0].content"])
def test_a_chat_template_that_never_ends_is_ended(folder, condition, monkeypatch):
    monkeypatch.setattr(chat_templates, 'SECONDS', 1.0)
    chat_templates._workers.cache_clear()
    loops = '{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}'
    template = f'{{% if {condition} %}}{loops}{{% endif %}}{{{{ messages[0].content }}}}'
    change(folder, 'tokenizer_config.json', chat_template=template)
    try:
        refuse(folder, 'had to be ended', 'after 1.0 s', data__chat=True, data__max_prompt_tokens=100)
    finally:
        chat_templates._workers.cache_clear()


# links


def test_the_hubs_own_cache_is_a_folder_with_links_that_loads(good, tmp_path):
    contents = {name: (good / name).read_bytes() for name in os.listdir(good)}
    snapshot = hub_cache.write(tmp_path, 'an/owner', hub_cache.NEW, contents, kind='model')
    assert (snapshot / 'config.json').is_symlink()
    assert use(snapshot)[0].model.config.width == 32
    hf.copy_files(snapshot, tmp_path / 'copy')
    assert not (tmp_path / 'copy' / 'config.json').is_symlink()


def test_blobs_that_repositories_share_are_part_of_the_hubs_cache(good, tmp_path):
    contents = {name: (good / name).read_bytes() for name in os.listdir(good)}
    snapshot = hub_cache.write(tmp_path, 'an/owner', hub_cache.NEW, contents, kind='model')
    blob = (snapshot / WEIGHTS).resolve()
    shared = tmp_path / 'blobs' / 'ab' / ('ab' * 32)
    shared.parent.mkdir(parents=True)
    blob.rename(shared)
    blob.symlink_to(os.path.relpath(shared, blob.parent))
    use(snapshot)


@pytest.mark.parametrize('target', ['../../../models--another--owner/blobs/x', '../../../secret', '../../refs/main'])
def test_a_link_of_a_snapshot_leads_nowhere_but_to_its_blobs(good, tmp_path, target):
    contents = {name: (good / name).read_bytes() for name in os.listdir(good)}
    snapshot = hub_cache.write(tmp_path, 'an/owner', hub_cache.NEW, contents, kind='model')
    aim = snapshot / target
    aim.resolve().parent.mkdir(parents=True, exist_ok=True)
    aim.resolve().write_text(json.dumps(SECRET))
    (snapshot / 'config.json').unlink()
    (snapshot / 'config.json').symlink_to(target)
    refuse(snapshot, 'lies outside')


def test_blobs_that_are_a_link_themselves_are_not_followed(good, tmp_path):
    snapshot = hub_cache.write(tmp_path, 'an/owner', hub_cache.NEW, {'x': b''}, kind='model')
    shutil.rmtree(snapshot.parent.parent / 'blobs')
    (snapshot.parent.parent / 'blobs').symlink_to(good)
    (snapshot / 'config.json').symlink_to('../../blobs/config.json')
    with pytest.raises(BadInput, match='lies outside'):
        files.path_inside(snapshot, 'config.json')


def test_a_link_within_the_folder_is_followed(folder):
    (folder / WEIGHTS).rename(folder / 'renamed.safetensors')
    (folder / WEIGHTS).symlink_to('renamed.safetensors')
    use(folder)


@pytest.mark.parametrize('name', ['config.json', 'tokenizer.json', 'vocab.txt', 'chat_template.jinja'])
def test_no_link_is_copied_out_of_a_folder(folder, tmp_path, name):
    link(name, 'theirs')(folder)
    with pytest.raises(BadInput, match='lies outside'):
        hf.copy_files(folder, tmp_path / 'copy')
    assert not (tmp_path / 'copy').exists()


def test_nothing_is_copied_through_a_link(folder, tmp_path):
    (tmp_path / 'mine').write_text('mine')
    (tmp_path / 'copy').mkdir()
    (tmp_path / 'copy' / 'config.json').symlink_to('../mine')
    with pytest.raises(BadInput, match='lies outside'):
        hf.copy_files(folder, tmp_path / 'copy')
    assert (tmp_path / 'mine').read_text() == 'mine'


# chance


def damaged(content, rng):
    """The bytes with a bit flipped, a byte changed, something put in between, or the end cut off."""
    content, place = bytearray(content), rng.randrange(min(len(content), 3000))  # of weights mostly the header
    kind = rng.randrange(4)
    if kind == 0:
        content[place] ^= 1 << rng.randrange(8)
    elif kind == 1:
        content[place] = rng.randrange(256)
    elif kind == 2:
        content[place:place] = rng.choice(
            [b'null', b'"', b'-', b'9' * 30, b'[', b'{}', b'\x1b[31m', b'true,', b'1e999']
        )
    else:
        del content[rng.randrange(len(content)) :]
    return bytes(content)


def check_loaded(folder):
    """What a folder that loads must be, whatever was damaged."""
    c, tokenizer = families.load_config(folder), hf.load_tokenizer(folder)
    hf.check_weights(folder, c)
    assert all(0 <= token < c.vocab_size for token in hf.stop_tokens(folder, tokenizer, c.vocab_size))
    assert all(0 <= token < c.vocab_size for token in tokenizer.encode('12+34=46'))
    devices = transformer.map_table(lambda *_: jax.devices()[0], transformer.param_table(c))
    params = hf.load_params(folder, c, devices)
    shapes = jax.tree.map(
        lambda param: param.shape, transformer.param_table(c), is_leaf=lambda node: isinstance(node, Param)
    )
    assert jax.tree.map(np.shape, params) == shapes
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(params))


def fuzz(good, folder, seed, count):
    """How many of `count` damaged folders load and how many are refused."""
    rng, outcomes, names = random.Random(seed), {'loads': 0, 'refused': 0}, sorted(os.listdir(good))
    for k in range(count):
        name = names[k % len(names)]
        intact = (good / name).read_bytes()
        (folder / name).write_bytes(damaged(intact, rng))
        try:
            check_loaded(folder)
            outcomes['loads'] += 1
        except BadInput as error:
            assert str(error).isprintable()
            outcomes['refused'] += 1
        except BaseException as error:
            content = (folder / name).read_bytes()
            pytest.fail(f'{type(error).__name__}: {error} of {name}: {content[:3000]!r}')
        (folder / name).write_bytes(intact)
    return outcomes


def test_whatever_chance_does_to_a_folder_it_is_refused_or_loads_right(good, folder):
    outcomes = fuzz(good, folder, 0, 400)
    assert outcomes['refused'] > 150 and outcomes['loads'] > 50


def test_more_of_chance(long, good, folder):
    assert sum(fuzz(good, folder, 1, 20_000).values()) == 20_000


def test_a_template_that_writes_the_day_writes_the_same_one_always():
    template = "{{ strftime_now('%d %b %Y') }}: {{ messages[0]['content'] }}"
    assert chat_templates.render(template, [[{'role': 'user', 'content': 'x'}]], {}) == [('26 Jul 2024: x', '')]
