r"""Where a completion states its answer: in a box, after ####, in tags, after 'the answer is', or at its end.

Boxes, marks and numbers in thinking, <think>...</think>, do not count where an answer stands outside of it. All
functions are linear in the length of a completion, and read a bounded number of its characters.
"""

import functools
import re

from grpo_jax.rewards.math import lines
from grpo_jax.rewards.math.spelling import canonical

TAIL = 20_000  # characters at the end of a completion that are looked at

BRACES = re.compile(r'(\\{1,4}(?:boxed|fbox)\s*)?\{|\\.|\}', re.DOTALL)
DECORATION = re.compile(r'\\(?:q?quad|text)(?![A-Za-z])|\\[()\[\],;: ]|[${}]')
# what may stand between boxes that are one list
JOINED = re.compile(r'(?:[^.\n]*(?:,|;|\band\b|\bor\b)\s*)? *(?:[A-Za-z]\w* *=)? *|[^A-Za-z0-9\n]{0,9}')
THINKING = re.compile(r'</?(?:think|thinking|thought|reasoning)>')
MARK = re.compile(
    r'\b(?i:answers?|ans)\b[\s*_`"\')]*'
    r'(?:\b(?i:is|are|would be|should be|equals)\b|:|=+>?|-+>|→|⇒|⟹|⟶|➜|\u2013|—|-(?=\s))[\s*_:`}]*'
)
SENTENCE = re.compile(r'\n|[.!?](?=\s|$)|<\|')


def strict(completion: str) -> str | None:
    """The canonical text of the last boxed answer, else of the answer after the last ####; None without one."""
    return canonical(answer(completion, boxed=True))


def lenient(completion: str, *, words: bool = True) -> str | None:
    """strict, else of what is in <answer> tags, follows 'the answer is', or is the last number or formula.

    Without words, a name or another word at the end is no answer.
    """
    return canonical(answer(completion, words=words))


def gold(text: str) -> str | None:
    """The canonical text of a data set's answer, which may be a whole solution; None without."""
    return canonical(_first(text, (_boxed, _after_hashes, _tagged, _marked))) or canonical(text) or lenient(text)


def answer(completion: str, *, boxed: bool = False, words: bool = True) -> str:
    """The answer as it is written; '' without one. boxed: only a box or #### counts; words: as of lenient."""
    tail = completion[-TAIL:]
    places = (_boxed, _after_hashes)
    if not boxed:
        places += tuple(functools.partial(place, words=words) for place in (_tagged, _marked, lines.last))
    if '</think' in tail or '</thought>' in tail or '</reasoning>' in tail:
        outside = _without_thinking(tail)
        # strict reading too: who answers outside without a box has no box
        if any(canonical(place(outside)) for place in (_boxed, _after_hashes, _tagged, _marked, lines.last)):
            tail = outside
    return _first(tail, places)


def _first(text, places):
    return next((value for place in places if canonical(value := place(text[-TAIL:]))), '')


def _without_thinking(text):
    """The text outside of <think>...</think>; thinking may have begun before the text, and need not have ended."""
    pieces, start, inside = [], 0, False
    for match in THINKING.finditer(text):
        closes = match[0][1] == '/'
        if closes and not inside:
            pieces = []  # the text began in thinking
        elif not closes and not inside:
            pieces.append(text[start : match.start()])
        start, inside = match.end(), not closes
    return '\n'.join([*pieces, text[start:]])


def _boxed(text):
    """What the last box holds, or the last boxes that are one list; ''."""
    opened, boxes = [], []
    for match in BRACES.finditer(text):
        if match[0].endswith('{') and match[0] != r'\{':
            opened.append(match)
        elif match[0] == '}' and opened:
            start = opened.pop()
            if start[1]:
                while boxes and boxes[-1][0] > start.start():
                    boxes.pop()  # inside of this one
                boxes.append((start.start(), match.end(), text[start.end() : match.start()].strip()))
    joined = boxes[-1:]
    for box in reversed(boxes[:-1]):
        between = text[box[1] : joined[0][0]]
        if len(between) > 40 or not JOINED.fullmatch(DECORATION.sub('', between)):
            break
        joined.insert(0, box)
    values = [value for _, _, value in joined]
    # the boxes may be one answer in two spellings
    return ', '.join(dict.fromkeys(canonical(value) or '' for value in values) if len(values) > 1 else values)


def _after_hashes(text):
    """The line after the last ####, or the number it begins with; '' for a heading, which other lines follow."""
    _, mark, rest = text.rpartition('####')
    line, _, more = lines.cleaned(rest).strip().partition('\n') if mark else ('', '', '')
    line = line.strip()
    if not line or (more.strip() and lines.word(line)):
        return ''
    stated = lines.word(line) and not lines.bare(line)
    return lines.first_number(line) if stated else lines.read_line(line)


def _tagged(text, words=True):
    """The answer in the last <answer> tags; ''."""
    head, close, _ = text.rpartition('</answer>')
    _, opening, inner = head.rpartition('<answer>')
    return lines.last(inner, words) if opening and close else ''


def _marked(text, words=True):
    """The answer in the sentence, or the formula, after the last 'answer is' or 'answer:'; ''."""
    marks = list(MARK.finditer(text))
    if not marks:
        return ''
    text = text[marks[-1].end() :]
    if text.startswith(('$', r'\(', r'\[')):
        return next(iter(lines.pick_values(text)), '')
    return lines.last(SENTENCE.split(text, maxsplit=1)[0], words)
