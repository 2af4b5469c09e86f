"""Language by script: the share of the completion's words that are written in the script of the target language."""

import functools
import re
from typing import Annotated

from grpo_jax.example import Example
from grpo_jax.ranges import OneOf

# letters and the marks written with them, as in a regular expression's [...]
SCRIPTS = {
    'latin': r'A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u1e00-\u1eff\ufb00-\ufb06\uff21-\uff3a\uff41-\uff5a',
    'greek': r'\u0370-\u0373\u0376-\u037d\u037f\u0386\u0388-\u03ff\u1f00-\u1fff',
    'cyrillic': r'\u0400-\u0481\u0483-\u052f\u1c80-\u1c8f\ua640-\ua69f',
    'hebrew': r'\u0591-\u05bd\u05bf\u05c1\u05c2\u05c4\u05c5\u05c7\u05d0-\u05f2\ufb1d-\ufb4f',
    'arabic': r'\u0610-\u061a\u0620-\u065f\u066e-\u06d3\u06d5-\u06dc\u06df-\u06e8\u06ea-\u06ef\u06fa-\u06ff'
    r'\u0750-\u077f\u08a0-\u08ff\ufb50-\ufdff\ufe70-\ufefc',
    'devanagari': r'\u0900-\u0963\u0971-\u097f\ua8e0-\ua8f7',
    'hangul': r'\u1100-\u11ff\u3131-\u318e\ua960-\ua97c\uac00-\ud7ff',
    'thai': r'\u0e01-\u0e3a\u0e40-\u0e4e',
    'kana': r'\u3041-\u3096\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff\uff66-\uff9f',
    'han': r'\u3005\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U000323af',
}
SPACELESS = ('thai', 'kana', 'han')  # written without spaces between words
LANGUAGES = {
    'ja': ('kana', 'han'),
    'zh': ('han',),
    'ko': ('hangul',),
    'th': ('thai',),
    'el': ('greek',),
    'he': ('hebrew',),
    **dict.fromkeys(('ar', 'fa', 'ur'), ('arabic',)),
    **dict.fromkeys(('hi', 'mr', 'ne'), ('devanagari',)),
    **dict.fromkeys(('ru', 'uk', 'bg', 'sr'), ('cyrillic',)),
    **dict.fromkeys(('en', 'de', 'fr', 'es', 'it', 'pt', 'nl', 'pl', 'cs', 'sv', 'tr', 'vi', 'id'), ('latin',)),
}
ACCENTS = r'\u0300-\u036f'
# superscripts, fractions, arrows, blackboard and italic letters of formulas: they belong to no language
SIGNS = r'\u00b2\u00b3\u00b9\u00bc-\u00be\u2000-\u2bff\U0001d400-\U0001d7ff'
# a formula between dollars follows pandoc's rule, so that "$5 and $10" is none
OUTSIDE = re.compile(
    r'\$\$[^$]*+\$\$|\$(?=\S)[^$\n]*+(?<=\S)\$(?!\d)|\\\((?:[^\\]|\\[^()])*+\\\)|'
    r'\\\[(?:[^\\]|\\[^][])*+\\\]|\\(?:begin|end)\{[^{}]*+\}|\\[A-Za-z]++|`[^`\n]*+`|</?[A-Za-z]++>'
)


def reward(completion: str, example: Example, *, target: Annotated[str, OneOf((*SCRIPTS, *LANGUAGES))]) -> float | None:
    """The share of words that are in the target's script: DeepSeek-R1's language consistency (arXiv 2501.12948).

    target: a script ('latin'), or a language ('en'), which stands for its script, so English and French are alike.
    Digits, punctuation, LaTeX, code and tags are no words; in Thai, kana and Han each character is a word. Without
    words the reward is None, which adds nothing to the total. R1 reports that the term costs some accuracy.
    """
    # text after an unclosed fence is code, as in Markdown
    prose = OUTSIDE.sub(' ', ' '.join(completion.split('```')[::2]))
    words = _word_pattern(target).findall(prose)
    return sum(map(bool, words)) / len(words) if words else None


@functools.cache
def _word_pattern(target):
    """A pattern that matches a word; its group 1 is empty for a word in another script than the target's."""
    targets = LANGUAGES.get(target, (target,))
    others = [script for script in SCRIPTS if script not in targets]
    single = ''.join(SCRIPTS[script] for script in others if script in SPACELESS)
    spaced = ''.join(SCRIPTS[script] for script in others if script not in SPACELESS)
    letters = ''.join(SCRIPTS.values())
    words = []
    for script in targets:
        characters = SCRIPTS[script]
        words.append(f'[{characters}]' if script in SPACELESS else f'[{characters}][{characters}{ACCENTS}]*+')
    return re.compile(
        f'({"|".join(words)})|[{single}]|'
        rf'(?:[{spaced}]|(?![{letters}{SIGNS}])[^\W\d_])[{spaced}{ACCENTS}]*+'
    )
