"""Rewards of a text's form: format, language, repetition, reflection; and hostile texts for all that read texts."""

import re
import time

from hypothesis import given, settings
from hypothesis import strategies as st
from ml_collections import ConfigDict
import pytest

from grpo_jax import rewards
from grpo_jax.configs import default
from grpo_jax.errors import BadInput
from grpo_jax.rewards import (
    calculator,
    contains,
    countdown,
    expression,
    format,
    language,
    numeric,
    reflection,
    repetition,
)
from grpo_jax.types import Example

EXAMPLE = Example('question', '42', 0, {'numbers': [1, 2], 'target': 3})


def configure(name, **options):
    """The RewardOptions of the default config with a reward's options changed."""
    section = default.get_config().reward
    section.options[name].update(options)
    return rewards.RewardOptions.from_config(section)


# format

GOOD = '<think>a</think><answer>4</answer>'


def well_formed(completion, tags=('think', 'answer')):
    return format.reward(completion, EXAMPLE, tags=tags)


@pytest.mark.parametrize(
    'completion, expected',
    [
        (GOOD, 1),
        (f'\n {GOOD}\n', 1),
        ('<think>a\nb</think>\n\n<answer>\n4\n</answer>', 1),
        ('<think></think><answer></answer>', 1),
        ('<think>1 < 2 <b></think><answer></answer>', 1),
        ('', 0),
        ('4', 0),
        ('<answer>4</answer>', 0),
        ('<think>a</think>', 0),
        ('<answer>4</answer><think>a</think>', 0),
        ('<think>a</think>4', 0),
        ('<think>a</think> so <answer>4</answer>', 0),
        (f'Sure: {GOOD}', 0),
        (f'{GOOD} done', 0),
        ('<think>a<answer>4</answer></think>', 0),
        ('<think>a<answer></think>4</answer>', 0),
        (GOOD + GOOD, 0),
        ('<think><think>a</think><answer>4</answer>', 0),
        ('<think>a</think><answer>4', 0),
        ('</think><think>a<answer>4</answer>', 0),
        ('<think></answer></think><answer>4', 0),
        ('<THINK>a</THINK><answer>4</answer>', 0),
    ],
)
def test_format(completion, expected):
    assert well_formed(completion) == expected


@pytest.mark.parametrize(
    ('completion', 'begun', 'expected'),
    [
        ('a</think><answer>4</answer>', '<think>\n', 1),
        ('a</think><answer>4</answer>', '<think>\nSo, ', 1),
        (GOOD, '<think>\n', 0),  # it opens again
        ('a</think><answer>4</answer>', '', 0),
        (GOOD, '<s>', 1),  # no tag of the reward
    ],
)
def test_format_counts_the_tag_that_the_prompt_has_opened(completion, begun, expected):
    example = EXAMPLE._replace(begun=begun)
    assert format.reward(completion, example, tags=('think', 'answer')) == expected


def test_format_of_other_tags():
    assert well_formed('<plan>a</plan> <act>b</act> <answer>4</answer>', ('plan', 'act', 'answer')) == 1
    assert well_formed('<act>b</act> <plan>a</plan> <answer>4</answer>', ('plan', 'act', 'answer')) == 0
    assert well_formed('<reasoning>a</reasoning>', ('reasoning',)) == 1
    assert well_formed(GOOD, ('reasoning', 'answer')) == 0


PIECES = st.lists(st.sampled_from(['<think>', '</think>', '<answer>', '</answer>', 'a', ' ', '\n', '<']), max_size=10)


@settings(max_examples=300)
@given(PIECES.map(''.join) | st.permutations(['<think>', '</think>', '<answer>', '</answer>', 'a']).map(''.join))
def test_format_is_what_a_regular_expression_says(text):
    shape = re.fullmatch(r'\s*<think>(.*)</think>\s*<answer>(.*)</answer>\s*', text, re.DOTALL)
    once = all(text.count(tag) == 1 for tag in ('<think>', '</think>', '<answer>', '</answer>'))
    assert well_formed(text) == float(bool(shape) and once)


# language


def share(text, target='en'):
    return language.reward(text, EXAMPLE, target=target)


# one sentence in each script, and its number of words
SENTENCES = {
    'latin': ('Das Mädchen sagt: «Schön, naïve cafe\u0301!»', 6),
    'greek': ('ήλιος ανατέλλει ὁ λόγος', 4),
    'cyrillic': ('Съешь ещё этих мягких булок, українська ї', 7),
    'hebrew': ('שָׁלוֹם עולם', 2),
    'arabic': ('السلام عليكم، كِتَاب گچپژ؟', 4),
    'devanagari': ('नमस्ते दुनिया।', 2),
    'hangul': ('안녕 세계 한국어', 3),
    'thai': ('สวัสดี', 6),
    'kana': ('ひらがなカタカナー', 9),
    'han': ('我们学习数学。', 6),
}


@pytest.mark.parametrize('script', SENTENCES)
def test_words_of_each_script(script):
    text, words = SENTENCES[script]
    assert share(text, script) == 1
    for other in SENTENCES:
        if other != script:
            assert share(text, other) == 0
            # 2 words of another script beside them
            more = {'thai': 'กข', 'kana': 'かな', 'han': '数学'}.get(other, f'{SENTENCES[other][0].split()[-1]} ' * 2)
            assert share(f'{text} {more}', script) == words / (words + 2)


@pytest.mark.parametrize(
    'text, target, expected',
    [
        ('so 我们 think', 'en', 2 / 4),
        ('so 我们 think', 'zh', 2 / 4),
        ('so 我们 think', 'ru', 0),  # a character a word
        ('日本語です', 'ja', 1),
        ('日本語です ok', 'ja', 5 / 6),
        ('日本語です', 'zh', 3 / 5),
        ('тokeнs', 'en', 2 / 4),
        ("don't well-known", 'en', 1),
        ('Hello, мир', 'latin', 1 / 2),
        ('le chat', 'en', 1),
        ('বাংলা abc', 'en', 1 / 3),
        ('2 + 2 = 4 ok', 'ru', 0),
        ('\u211d \U0001d465 x\u00b2 \u00bd ok мир', 'ru', 1 / 3),
    ],
)
def test_share_of_words(text, target, expected):
    assert share(text, target) == pytest.approx(expected)


@pytest.mark.parametrize(
    'hidden',
    [
        '12345',
        '3.5 + 4 = 7.5?!',
        '$x + y$',
        '$$\n x \n$$',
        r'\(a + b\)',
        r'\[ \text{if} \\ x \]',
        r'\frac{1}{2}',
        r'\begin{align*} 1 \end{align*}',
        '`name`',
        '```python\nprint(x)\n```',
        '<think>',
        '</answer>',
        '```\nunclosed',
    ],
)
def test_what_is_no_prose_does_not_count(hidden):
    assert share(f'два {hidden}', 'ru') == 1
    assert share(hidden, 'ru') is None


def test_prices_are_no_formulas():
    assert share('$5 за one and $10', 'ru') == 1 / 3


@pytest.mark.parametrize('text', ['', ' \n', '42', '...', '$x$'])
def test_a_text_without_words_is_unscorable(text):
    assert share(text) is None


def test_unknown_language_is_refused():
    with pytest.raises(BadInput, match=r"^reward.options.language.target = 'klingon': must be latin, .*en"):
        configure('language', target='klingon')


@given(st.lists(st.sampled_from(list(SENTENCES)), min_size=1, max_size=6))
def test_shares_of_all_scripts_add_up_to_one(scripts):
    text = ' '.join(SENTENCES[script][0] for script in scripts)
    assert sum(share(text, script) for script in SENTENCES) == pytest.approx(1)


# repetition


@pytest.mark.parametrize(
    'text, n, expected',
    [
        ('a b c d e', 3, 0),
        ('a a a a a', 3, -2 / 3),
        ('a b a b a b', 2, -3 / 5),
        ('A a\ta\na', 1, -3 / 4),
        ('one two', 3, 0),
        ('', 3, 0),
        ('a b c', 3, 0),
    ],
)
def test_repetition_by_hand(text, n, expected):
    # 5 words have 3 3-grams, here 1 distinct: 1/3 - 1; a b, b a of 5 2-grams; a of 4
    assert repetition.reward(text, EXAMPLE, n=n) == pytest.approx(expected)


@given(st.lists(st.sampled_from('abc'), max_size=12), st.integers(1, 4))
def test_saying_it_all_again_is_never_better(words, n):
    once, twice = (repetition.reward(' '.join(words * times), EXAMPLE, n=n) for times in (1, 2))
    assert -1 < twice <= once <= 0


def test_ngrams_of_no_words_are_refused():
    with pytest.raises(BadInput, match=r'^reward.options.repetition.n = 0'):
        configure('repetition', n=0)


# reflection


def reflections(text, correct=True, phrases=('wait', 'let me check'), cap=3):
    return reflection.reward(text, EXAMPLE, correct=correct, phrases=phrases, cap=cap)


@pytest.mark.parametrize(
    'text, expected',
    [('Wait, let me check. waiting', 2), ('wait wait wait wait', 3), ('await', 0), ('', 0), ('so 4', 0)],
)
def test_reflection_counts_phrases_up_to_its_cap(text, expected):
    assert reflections(text) == expected


def test_reflection_pays_only_when_the_answer_is_right():
    assert reflections('wait', correct=False) == 0
    assert reflections('wait', correct=None) is None


@pytest.mark.parametrize('weight, counts', [(0.0, [1, 1]), (0.1, [1, 0])])
def test_reflection_of_weight_0_is_a_measure_and_counts_on_wrong_answers_too(weight, counts):
    section = ConfigDict(default.get_config().reward.to_dict() | {'parts': (('numeric', 1.0), ('reflection', weight))})
    with rewards.build(rewards.RewardOptions.from_config(section), 16) as functions:
        example = Example('2+2=', '4', 0, {})
        scored = rewards.compute_rewards(functions, [example], ['wait, 4', 'wait, 5'], [False] * 2, [3] * 2)
    assert scored.parts['reflection'].tolist() == counts


@pytest.mark.parametrize('phrases', [(), ('wait', '')])
def test_phrases_that_are_everywhere_are_refused(phrases):
    with pytest.raises(BadInput, match=r'^reward.options.reflection.phrases'):
        configure('reflection', phrases=phrases)


def test_phrases_are_no_patterns():
    assert reflections('h.m', phrases=('h.m',)) == 1 and reflections('hum', phrases=('h.m',)) == 0


# steps


@given(st.text('12+-*(.)= x', max_size=20))
def test_equations_are_what_a_regular_expression_of_both_sides_finds(text):
    pattern = re.compile(r'([-+*/().\d]*\d[-+*/().\d]*)=([-+]?\d+(?:\.\d+)?|[-+]?\.\d+)')
    assert [end for end, _ in calculator.steps(text, EXAMPLE)] == [match.end() for match in pattern.finditer(text)]


def test_only_the_first_equations_of_a_completion_are_looked_at():
    assert len(calculator.steps('1=1 ' * 5000, EXAMPLE)) == calculator.MOST


# hostile texts

HOSTILE = {  # what comes first, and what is repeated up to so many characters; 'nested' also closes
    'digits': ('', '1'),
    'NUL': ('', '\0'),
    'no text': ('', '\ud800\ufeff'),
    'nested': ('', '('),
    'minuses': ('', '-'),
    'dots': ('', '1.'),
    'powers': ('', '10**10**10'),
    'fractions': ('', '1/'),
    'commas': ('', ',111'),
    'marks': ('', '####1'),
    'equations': ('', '1+1=2'),
    'great value': ('1=', '9'),
    'thoughts': ('', '<think>'),
    'whole thoughts': ('', '<think>a</think>'),
    'tags': ('', '<a'),
    'answers': ('', '<answer>1</answer>'),
    'open answers': ('', '<answer>'),
    'great answer': ('<answer>1</answer>', '+1'),
    'wide': ('<think></think>', ' '),
    'dollars': ('', '$a '),
    'formulas': ('', r'\(\['),
    'backslashes': ('', '\\'),
    'fences': ('', '``` a '),
    'ticks': ('', '`a\n'),
    'phrases': ('', 'wait let me '),
    'short words': ('', 'a b '),
    'accents': ('a', '\u0301'),
    'scripts': ('', 'aж\u03b3中かह한ไא '),
}
READERS = {
    'format': well_formed,
    'language': lambda text: share(text, 'ja'),
    'repetition': lambda text: repetition.reward(text, EXAMPLE, n=3),
    'reflection': lambda text: reflections(text, cap=10**6),
    'countdown': lambda text: countdown.reward(text, EXAMPLE, partial=0.1),
    'countdown.extract': countdown.extract,
    'expression': lambda text: expression.reward(text, EXAMPLE),
    'numeric': lambda text: numeric.reward(text, EXAMPLE),
    'contains': lambda text: contains.reward(text, EXAMPLE),
    'calculator': lambda text: calculator.reward(text, EXAMPLE),
}


def hostile(name, size):
    first, again = HOSTILE[name]
    text = first + again * (size // len(again))
    return f'{text}1{")" * size}' if name == 'nested' else text


def read_all(text, seconds):
    for name, read in READERS.items():
        began = time.process_time()
        read(text)
        assert time.process_time() - began < seconds, name


@pytest.mark.parametrize('name', HOSTILE)
def test_hostile_texts_are_read_in_time(name):
    read_all(hostile(name, 200_000), 0.5)  # as the square of 1 MB it would take minutes


@pytest.mark.parametrize('name', HOSTILE)
def test_hostile_megabytes_are_read_in_time(name, long):
    read_all(hostile(name, 1_000_000), 2)


def test_great_answers_and_equations_are_wrong_and_raise_nothing():
    # int() refuses numerals of more than 4300 digits
    digits = '9' * 5000
    assert calculator.steps(f'1={digits} {digits}=1', EXAMPLE) == [(5002, 0.0), (10005, 0.0)]
    assert countdown.reward(digits, EXAMPLE, partial=0.1) == numeric.reward(digits, EXAMPLE) == 0
