r"""Finds the answer in a completion: in a box, after ####, in tags, after 'the answer is', or at its end.

An answer inside <think>...</think> counts only where none stands outside. All functions are linear in the completion's
length, and read a bounded number of characters.
"""

import functools
import re

from grpo_jax.rewards.math import choice, lines, scripts
from grpo_jax.rewards.math import words as wording
from grpo_jax.rewards.math.spelling import canonicalize

TAIL = 20_000  # characters at the end of a completion that are read

BRACES = re.compile(r'(\\{1,4}(?:boxed|fbox)\s*)?\{|\\.|\}', re.DOTALL)
DECORATION = re.compile(r'\\(?:q?quad|text)(?![A-Za-z])|\\[()\[\],;: ]|[${}]')
# text that may stand between boxes that are one list
JOINED = re.compile(r'(?:[^.\n]*(?:,|;|\band\b|\bor\b)\s*)? *(?:[A-Za-z]\w* *=)? *|[^A-Za-z0-9\n]{0,9}')
THINKING = re.compile(r'</?(?:think|thinking|thought|reasoning)>')
MARK = re.compile(
    r'\b(?i:answers?|ans)\b[\s*_`"\')]*'
    r'(?:\b(?i:is|are|would be|should be|equals)\b|:|=+>?|-+>|→|⇒|⟹|⟶|➜|\u2013|—|-(?=\s))[\s*_:`}]*'
)
SENTENCE = re.compile(r'\n|[.!?](?=\s|$)|<\|')


def extract(completion: str) -> str | None:
    """The completion's answer in canonical form, in which equal numbers have one spelling; None without an answer.

    The answer of extract_strict, else in <answer> tags or after 'the answer is', else the last number or formula.
    """
    return canonicalize(answer(completion))


def extract_strict(completion: str) -> str | None:
    """The last boxed answer, else the answer after the last ####, in canonical form; None without one."""
    return canonicalize(answer(completion, boxed=True))


def gold_answer(text: str) -> str | None:
    """The gold answer in canonical form; None without one. text: the answer alone, or a whole solution."""
    text = wording.write_signs(scripts.translate(text))
    stated = _read_first(text, (_read_box, _read_hashes, _read_tags, _read_mark))
    return canonicalize(stated) or canonicalize(text) or extract(text)


def answer(completion: str, *, boxed: bool = False, words: bool = True, options: bool = False) -> str:
    """A completion's answer as it is written, but with the signs of ASCII; '' without one.

    boxed: whether only a box or #### counts; words: whether a name or another word at the end may be the answer;
    options: whether the letter of an option may be it.
    """
    tail = wording.write_signs(scripts.translate(completion[-TAIL:]))
    strict, lenient = (_read_box, _read_hashes), (_read_tags, _read_mark, lines.read_last)
    readers = strict if boxed else strict + tuple(functools.partial(reader, words=words) for reader in lenient)
    if '</think' in tail or '</thought>' in tail or '</reasoning>' in tail:
        outside = _strip_thinking(tail)
        # an answer outside of thinking, even without a box, makes boxes inside void, also for the strict reading
        if any(canonicalize(reader(outside)) for reader in strict + lenient):
            tail = outside
    return (options and _read_option(tail, boxed)) or _read_first(tail, readers)


def _read_first(text, readers):
    """The answer of the first reader that finds one with a canonical form; '' without one. readers: text -> answer."""
    return next((value for reader in readers if canonicalize(value := reader(text[-TAIL:]))), '')


def _read_option(text, boxed):
    """The option, in canonical form, that the answer of a text names; '' without one. boxed: as in `answer`."""
    statement = _read_box(text) or _after_hashes(text)[0]
    if not boxed:
        statement = statement or _inside_tags(text) or choice.stated(text)
    return choice.read_option(statement, canonicalize) or ''


def _strip_thinking(text):
    """The text outside <think>...</think>; the text may begin inside thinking, and may end there."""
    pieces, start, inside = [], 0, False
    for match in THINKING.finditer(text):
        closes = match[0][1] == '/'
        if closes and not inside:
            pieces = []  # the text began inside thinking
        elif not closes and not inside:
            pieces.append(text[start : match.start()])
        start, inside = match.end(), not closes
    return '\n'.join([*pieces, text[start:]])


def _read_box(text):
    """The content of the last box, or of the last boxes that form one list; '' without a box."""
    if 'boxed' not in text and 'fbox' not in text:
        return ''
    opened, boxes = [], []
    for match in BRACES.finditer(text):
        if match[0].endswith('{') and match[0] != r'\{':
            opened.append(match)
        elif match[0] == '}' and opened:
            start = opened.pop()
            if start[1]:
                while boxes and boxes[-1][0] > start.start():
                    boxes.pop()  # it lies inside this one
                boxes.append((start.start(), match.end(), text[start.end() : match.start()].strip()))
    joined = boxes[-1:]
    for box in reversed(boxes[:-1]):
        between = text[box[1] : joined[0][0]]
        if len(between) > 40 or not JOINED.fullmatch(DECORATION.sub('', between)):
            break
        joined.insert(0, box)
    values = [value for _, _, value in joined]
    # the boxes may be one answer in two spellings
    return ', '.join(dict.fromkeys(canonicalize(value) or '' for value in values) if len(values) > 1 else values)


def _read_hashes(text):
    """The answer in the line after the last ####: the whole line, or the number at its beginning before words.

    '' without ####, and where the line is a heading: words that other lines follow.
    """
    line, more = _after_hashes(text)
    if not line or (more.strip() and lines.first_word(line)):
        return ''
    stated = lines.first_word(line) and not lines.is_bare(line)
    return lines.first_number(line) if stated else lines.read_line(line)


def _after_hashes(text):
    """(the line after the last ####, the text below it); both '' without ####."""
    _, mark, tail = text.rpartition('####')
    line, _, more = lines.clean(tail).strip().partition('\n') if mark else ('', '', '')
    return line.strip(), more


def _read_tags(text, words=True):
    """The answer in the last <answer> tags; '' without one."""
    inner = _inside_tags(text)
    return lines.read_last(inner, words) if inner else ''


def _inside_tags(text):
    """The text in the last <answer> tags; '' without them."""
    head, close, _ = text.rpartition('</answer>')
    _, opening, inner = head.rpartition('<answer>')
    return inner.strip() if opening and close else ''


def _read_mark(text, words=True):
    """The answer in the sentence, or the formula, after the last 'answer is' or 'answer:'; '' without one."""
    marks = list(MARK.finditer(text)) if 'ans' in text.lower() else []
    if not text.isascii():
        marks += scripts.MARK.finditer(text)
    if not marks:
        return ''
    text = text[max(mark.end() for mark in marks) :]
    sentence = SENTENCE.split(text, maxsplit=1)[0]
    _, *corrected = wording.CORRECTION.split(text[len(sentence) :])
    if corrected:
        return lines.read_last(corrected[-1], words) or text[: lines.LONGEST]
    if scripts.is_foreign(sentence):
        return sentence
    if text.startswith(('$', r'\(', r'\[')):
        return next(iter(lines.pick_values(text)), '')
    return lines.read_last(sentence, words)
