r"""Reads multiple choice: a letter with or without the content of its option, as `(B)`, `B. 12` or `Option B`.

The canonical form is `B` without content, and `(B) 12` with it.
"""

import re

from grpo_jax.rewards.math import words

LETTER = re.compile('[A-J]')
WITH_CONTENT = re.compile(r'\(([A-J])\) (.+)', re.DOTALL)
TEXT = re.compile(r'\\(?:text\w*|mathrm|mathbf|mbox)\s*\{([^{}]*)\}')
SPACE = re.compile(r'(?<!\\)\\[ ,;:!]|\\q?quad(?![A-Za-z])|[\s~]+')
OPTION = re.compile(
    r'(?P<named>(?i:(?:so|it|must|should|be|the|correct|right|best|final|is|options?|choices?|answer|alternative|letter)\b'
    r'[ :,]*)*)[*$ ]*'
    r'(?:\((?P<bracketed>[A-Ja-h])\)|\[(?P<squared>[A-J])\]|(?P<bare>[A-J])(?![\w\'^])|(?P<small>[a-h])(?=\)))'
    r'(?P<mark>\*{0,2}[).:,]?\*{0,2}\$?[).:,]?)(?P<space> ?)(?P<content>.*)'
)
OTHER = re.compile(r'(?:\b(?:and|or)|[,&/]) *\(?[A-J](?![\w\'])|\([A-Ja-h]\)')  # another option's letter
REASON = re.compile(r'\(|because\b|since\b|as\b|for\b|is\b|not [A-J]\b|[\u2013\u2014]')
DENIED = re.compile(
    r"(?:is|was|can|must|does|has|be) (?:\w+ )?(?:not|wrong|false|incorrect|ruled|out)\b|cannot|\w+n't|fails"
)
PROSE = re.compile(
    r'\b(?:is|are|was|were|has|have|will|can|this|that|it|we|because|since|so|hence|therefore|which|thus|match\w*)\b',
    re.I,
)
# words that state the right option: STATED before its letter (`answer: B`), VERDICT after it (`B is correct`)
STATED = re.compile(
    r'(?:\b(?i:answers?|options?|choices?|alternatives?|antwort|réponse|respuesta|risposta|ответ|odpowiedź)\b'
    r'(?: correcta)?[\s*_`"\')]*(?:\b(?i:is|ist|est|es|è)\b|[:=\u2014])|\bI (?:choose|pick|select))[\s*_:`]*(?=\S)'
)
VERDICT = re.compile(
    r'(?<![A-Za-z])(\(?[A-J]\)?)\*{0,2} (?:is|must be|would be) (?:the |indeed )?(?:correct|right|best|answer)'
)


def read_option(text: str, canonicalize) -> str | None:
    """The one option that a text names, in canonical form; None for a text that names none or several.

    canonicalize: the function that brings the content into canonical form. A sentence after the letter is no content.
    """
    plain = SPACE.sub(' ', TEXT.sub(r'\1 ', text)).strip(' *$"\'`_')
    match = OPTION.fullmatch(plain)
    if not match:
        return None
    letter = (match['bracketed'] or match['squared'] or match['bare'] or match['small']).upper()
    mark, content = match['mark'].replace('*', '').strip('$'), match['content'].strip(' *$').removesuffix('.')
    if DENIED.match(content):
        return None
    if not content or (REASON.match(content) and match['space']):
        return letter
    marked = mark or match['bracketed'] or match['squared']
    if OTHER.search(f'{mark} {content}') or not marked or (mark == ',' and not match['named']):
        return None
    if content[0] in '+*/^=_!' or content.startswith('- ') or (mark in ('.', ':') and not match['space']):
        return None
    if PROSE.search(content):
        return letter
    content = canonicalize(content)
    return f'({letter}) {content}' if content else letter


def stated(text: str) -> str:
    """Where a text may name its option: the line after the last STATED, else VERDICT's letter, else the last line."""
    marks = list(STATED.finditer(text))
    if marks:
        return words.CORRECTION.split(text[marks[-1].end() :])[-1].strip().split('\n', 1)[0]
    verdicts = VERDICT.findall(text)
    return verdicts[-1] if verdicts else text.rstrip().rpartition('\n')[2]


def split_option(text: str) -> tuple[str, str]:
    """(letter, content) of an option in canonical form; each is '' where the text lacks it."""
    match = WITH_CONTENT.fullmatch(text) if text[:1] == '(' else None
    if match:
        return match[1], match[2]
    text = text[1:-1] if len(text) == 3 and text[0] + text[2] == '()' else text
    return (text, '') if LETTER.fullmatch(text) else ('', text)
