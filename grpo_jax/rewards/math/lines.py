"""Finds the answer in a text's last lines: a line that is an answer, or the number or formula that a line states."""

import itertools
import re

from grpo_jax.rewards.math import words as wording
from grpo_jax.rewards.math.scripts import LONE_NUMERAL, is_foreign
from grpo_jax.rewards.math.spelling import LONGEST
from grpo_jax.rewards.math.units import COMPOUND, SCALES, UNITS, add_units

LINES = 40  # lines at the end of a text that are read
NUMBERS = 20  # numbers of a sentence that are read

# the sign that begins or ends a formula, or a number with the digits and signs that touch it
PIECE = re.compile(
    r'(?<!\\)(?:\$\$?|\\[()\[\]])|((?<![\w.,/^{\\)])(?:[a-z] ?(?:[<>≤≥]|\\[lg]eq?) ?)?[-+]?'
    r'(?:[0-9]+ (?:and )?[0-9]+/[0-9]+|[0-9]{1,2}:[0-9]{2}(?![0-9:])|\.?[0-9][0-9.,/]*)'
    r'(?:\\overline\{[0-9]+\}|_\{?[0-9]+\}?|'
    r'(?:[eE][-+]?[0-9]+|(?:\s?(?:[*\u00d7x·]|\\times|\\cdot)\s?10)?\^\{?-?[0-9]+\}?)(?![0-9A-Za-z^(]))?)'
)
BETWEEN = re.compile(r'\s*,?\s*(?:and|or)?\s*')
WORD = re.compile(
    r'(?<![A-Za-z])(?!and(?![a-z]))'
    r'(?:[A-Za-z][a-z]{2,}|(?i:is|of|to|in|at|on|by|so|we|he|it|as|if|an|be|my|no)(?![a-z])|a (?=[a-z]))'
)
CAPITALS = re.compile(r'(?<=[0-9] )\(?([A-Z]{3,})(?![A-Za-z])|^([A-Z]{3,})(?= )')
NO_WORD = re.compile(r'\\(?:text\w*|mbox|mathrm|begin|end)\s*\{[^{}]*\}(?:\{[lcr]*\})?|[\\\b\f][A-Za-z]+')

# tags, fences, begin and end of environments, pictures and smileys
NOISE = re.compile(
    r'</?(?:[A-Za-z]{3,20}|[bipu]|br|em|li|td|tr|h[1-6])\s?/?>|</s>|<\|[^<>|\n]{0,40}\|>(?:user|assistant|system)?|'
    r'\[/?[A-Z]{3,12}\]|```\w*|\\(?:begin|end)\{(?:align|aligned|equation|gather|gathered|split|center|proof|document)\*?\}|'
    r'\\(?:qed|blacksquare|square|Box|checkmark)(?![A-Za-z])|(?<![\w:])[:;]-?[)DP](?!\w)|'
    '[\u2500-\u2793\u2795-\u2797\u27bf\u2b00-\u2bff\ufe0f\u200d\u220e\u2026\u00a7\u00b6\u2020\u2021\u203b\U0001f000-\U0001faff]'
)
EMPHASIS = re.compile(r'\\(?:text\w*|math\w+|boldsymbol|emph|underline)\{\s*([-+]?[0-9][0-9.,]*)\s*\}')
ARROW = re.compile(
    r'-+>|=+>|[\u2190-\u21ff\u27f0-\u27ff\u2794\u2798-\u27be\u2234]|'
    r'\\(?:Right|right|Longright|longright)arrow|\\implies|\\therefore'
)
ROLE = re.compile(r'\n[ \t]*(?:Q|Question|Human|User|Problem|Instruction)(?: [0-9]+)?\s*:')
BULLET = re.compile(r'(?:[-\u2013\u2014]\s+(?!\\[A-Za-z])|[+*•·]\s+|[0-9]{1,2}[.)]\s+|\(?[A-Ha-h][.)]\s+)(?=\S)')
LABEL = re.compile(
    r'[^\W\d_][^:=\n]{0,60}(?<![0-9]):\s*(?=\S)|[A-Za-z][a-z ]{2,60}=\s*|[A-Z]{4,20}\s*=\s*|'
    r'\\text\w*\s*\{[^{}]*[:=]\s*\}:?\s*|(?:[A-Z]{2,4}|[A-Z][a-z])\.?\s+(?=[-+$]?[0-9])'
)
# lines after an answer that are no answer: without a number (CLOSING), and with one (REMARK)
CLOSING = re.compile(
    r'\W*(?i:(?:the )?end|fin|finish\w*|done|qed|thanks?|cheers|perfect|correct|solved|verified|checked|great|nice|'
    r'okay|bye|yay|voil\w+|enjoy|amen|stop|eos|user|human|assistant|system|bingo|boom|hooray|success|complete\w*)\W*'
)
REMARK = re.compile(
    r'\W*(?i:note|n\.?b|p\.?s|check\w*|verif\w+|confidence|sources?|ref\w*|explanation|reason\w*|hint|assum\w+|credits?|'
    r'time|tokens?|page|difficulty|score|steps?)\b\.?\W*[:\u2013\u2014-]'
)
# text before a number that marks it as the answer (STATED); text between a number and a later one that makes the later
# one a side remark (ASIDE), or shows that the later one is the result (RESULT)
STATED = re.compile(
    r'(?:^|[:=]|\b(?:is|are|was|equals?|be|makes?|earns?|costs?|needs?|has|have|gets?|pays?|takes?|saves?|spends?|made|'
    r'earned|needed|had|got|paid|took|saved|spent|about|exactly|only))[\s*_$(\\]*$'
)
ASIDE = re.compile(
    r'(?:[^0-9.,:=]{0,60}?[(\[;]|[^0-9.,:=]{0,60}?,?\s\b(?:for|in|per|out of|of|after|over|from|with|on|at|each|every|'
    r'because|since|as|when|if|by|during|within|not|instead|rather|versus|vs|across|among|between|using|'
    r'[a-z]+ to [a-z]+)\b)'
    r'[^.,:=]{0,40}$'
)
CONSEQUENCE = re.compile(r'=|\b(?:so|thus|hence|then|therefore|gives|leaves|altogether|in all|in total)\b')
RESULT = re.compile(
    r'=|\b(?:so|thus|hence|then|therefore|is|are|was|equals|makes|gives|leaves|gets?|totals?|altogether|in all|'
    r'in total)\b'
)
# between the answer and a sentence that has other numbers
REASON = re.compile(r'[^0-9.,:=]{0,30},?\s(?:because|since|as)\s')
# words and signs that make a number no answer: before the number, after it, and between two numbers that are one range
HEDGED_BEFORE = re.compile(
    r"(?:(?i:\b(?:not|never|isn't|cannot be|at (?:least|most)|between|twice|half|up (?:to|from)|down from|none of the|"
    r'nearly|almost|just (?:over|under)|(?:is|are|was|were) (?:over|under|above|below)|'
    r'(?:more|less|fewer|greater|larger|smaller|bigger|higher|lower|other) than|'
    r'(?:half|third|quarter|root|square|cube|multiple|power|factor|percent|%) of)|^\W*(?:over|under|above|below))\s+|'
    r'\b(?:sqrt|log|ln|sin|cos|tan|exp)\s?\(|(?:(?<![A-Za-z0-9])[a-z]|\)|(?<=[0-9])(?! ?-)) ?[-+*/\u00d7÷·^√] ?|√|'
    r'[0-9],\s+-?[0-9./]+,\s+(?:and |or )?)\$?$'
)
HEDGED = re.compile(
    r'\^|(?: ?[*+] ?)?[(√π]| ?[*+]? ?(?:pi\b|sqrt|\\(?:pi|sqrt|cdot|times|frac))|'
    r'(?:| ?[*+/] ?|-)[abcinpqrtuvwxyz](?![\w\'])(?!\.[a-z])|'
    r"\s*(?:(?:(?:is|are|was|were|would be)\s*)?(?:not|never|cannot|wrong|incorrect|false)|isn't|"
    r"(?:does|do)(?:n't| not) (?:work|fit|hold|count|satisfy)|(?:[a-z]+ )?(?:is|are|was|were|would be|seems) "
    r'(?:wrong|incorrect|false|invalid|impossible|too|less|smaller|larger|bigger|greater|higher|lower)|'
    r'or (?:more|less|fewer|greater|higher|lower)|and (?:above|below|up)|at (?:least|most)|squared|cubed|factorial|'
    r'fails?|remainder|R(?= ?[0-9])|(?:times|divided by|plus|minus|mod) \$?[0-9]+|'
    r'over [0-9]+\W*$|(?:raised )?to the (?:[0-9a-z]+ )?power|(?:st|nd|rd|th) root)\b'
)
RANGE = re.compile(r'\s*,?\s*(?:to|or|and|through|until|remainder|R)\s+\$?')
BROKEN = re.compile(  # a text that breaks off in a sentence without a number
    r'[.!?\n]\s{1,4}(?:[A-Z][^.!?\n0-9]* (?:by|the|and|to|of|we|from|or|if|s?he|they)|(?i:then|next|so|now|let))\s*$'
)
CITATION = re.compile(r'(?<=[^\s\[]) \[[0-9]{1,2}\]$|^\[\s*([-+]?[0-9][0-9.]*)\s*\]$')
SIGN = re.compile(r'(?<!\\)\$')
TOGETHER = re.compile(r'^(?: \w+)? (?:in all|in total|altogether)\b')
# dots before a line; after it, slashes and a remark in brackets on how the number came about
EDGES = re.compile(r'^\.{2,}\s*|\s*(?:/-?|\\)\s*$|\s\((?:=|~|\u2248|\\approx)[^()]*\)$')
ASIDE_LINE = re.compile(r'[\s*_]*\(.*\)[\s*_.]*|\W*(?:P\.? ?S|N\.? ?B)\.\s.*')
OPENERS, CLOSERS = re.compile(r'[(\[{]'), re.compile(r'[)\]}]')
FULL_STOP = re.compile(r'(?<=[.!?])\s+')
BREAK = re.compile(r'\\\\(?=\s|&|\[|$)')  # between rows of a formula
FOLLOWING = re.compile(r'[ ~]([A-Za-z]{3,}|(?!in\b)[A-Za-z]{2}|[ap]\.m)\b')


def read_last(text: str, words: bool = True) -> str:
    """The answer in the last line of a text that states one, else the last formula or number; '' without any.

    A formula or number with a digit is preferred. words: whether a line that is only a word may be the answer.
    """
    text = clean(text)
    number = max(map(text.rfind, '0123456789'))
    behind = text[max(number, len(text) - LONGEST) :]
    if BROKEN.search(behind) or (number >= 0 and not words and wording.CORRECTION.search(behind)):
        return ''
    role = ROLE.search(text)
    if role and re.search(r'[0-9A-Za-z]', text[: role.start()]):
        text = text[: role.start()]
    lines = [line for line in text.split('\n')[-LINES:] if re.search(r'\w|\$|\\[()\[\]]', line)]
    while len(lines) > 1 and _is_afterword(lines[-1], lines[-2]):
        lines.pop()
    for line in reversed(lines):
        if _is_formula_part(line):
            break
        if re.search(r'[0-9$\\]', line):
            answer = read_line(line)
            if answer:
                return answer
            break
        if line is lines[-1] and (number := wording.read_statement(line)) and (words or number != r'\emptyset'):
            return number
        worded = LONE_NUMERAL.fullmatch(line) or (words and (is_bare(line) or is_foreign(line)))
        if worded and line is lines[-1] and not CLOSING.fullmatch(line):
            return line.strip(' *#>')
    pieces = pick_values('\n'.join(lines))
    return next((value for value in reversed(pieces) if re.search('[0-9]', value)), pieces[-1] if pieces else '')


def _is_afterword(line, before):
    """Whether a line is no answer: a closing word like 'Done', or a remark on the number in the line `before`."""
    if CLOSING.fullmatch(line):
        return True
    if ASIDE_LINE.fullmatch(line) and first_word(line) and re.search('[0-9]', before):
        return True
    return bool(REMARK.match(line) and re.search('[0-9]', before) and (is_bare(before) or LABEL.match(before)))


def _is_formula_part(line):
    """Whether a line is part of a formula that spans several lines."""
    line = line.strip()
    return (
        line in ('$$', '$')
        or line.count('\\(') != line.count('\\)')
        or line.count('\\[') != line.count('\\]')
        or line.count('\\begin') != line.count('\\end')
        or bool(line.count('$$') % 2)
    )


def clean(text: str) -> str:
    """The text without NOISE (tags, fences, pictures) and emphasis, and with `3/2 hour` for `1 hour 30 minutes`."""
    return COMPOUND.sub(add_units, EMPHASIS.sub(r'\1', NOISE.sub(' ', text)))


def read_line(line: str) -> str:
    """The answer in a line: the line without marks and labels, or the number that its last sentence states.

    '' for a line without an answer. A line in another script than Latin is returned without marks.
    """
    line = _strip_marks(line)
    if not line or is_foreign(line):
        return line
    lone = len(SIGN.findall(line)) % 2 and line[0] != '$' != line[-1]  # $ stands after a number, as a sign of money
    if is_bare(line) and not lone:
        return line.rstrip(' !?')
    for sentence in reversed(FULL_STOP.split(line)):
        pieces = [piece for piece in _pieces(sentence) if re.search('[0-9]', piece[2])][-NUMBERS:]
        if pieces:
            return _stated_number(sentence, pieces)
    pieces = _pieces(line)
    return pieces[-1][2] if pieces else ''


def _strip_marks(line):
    """The line without bullets, labels and emphasis; of a table's row the last cell; of arrows the last part."""
    line = line.strip(' \t*#>"`_~&“”')
    line = EDGES.sub('', EDGES.sub('', line))
    if line.startswith('|') and line.endswith('|') and line.count('|') > 2:
        cells = [cell for cell in line.split('|') if re.search(r'\w', cell)]
        line = next((cell for cell in reversed(cells) if re.search('[0-9]', cell)), cells[-1] if cells else '').strip()
    line = BULLET.sub('', line, count=1) if BULLET.match(line) else line
    parts = [part for part in ARROW.split(line) if re.search(r'\w', part)]
    if parts:
        line = next((part for part in reversed(parts) if re.search('[0-9]', part)), parts[-1])
    for _ in range(3):
        line = line.strip(' \t*_`"~&“”')
        label = LABEL.match(line)
        if not label or not re.search(r'\w', line[label.end() :]):
            break
        line = line[label.end() :]
    line = CITATION.sub(r'\1', line)
    while line.endswith((')', ']', '}')) and len(CLOSERS.findall(line)) > len(OPENERS.findall(line)):
        line = line[:-1].rstrip()
    return line


def _stated_number(sentence, pieces):
    """The number that a sentence states, with its unit: the last number before side remarks.

    pieces: the sentence's numbers, from _pieces. A sentence that denies or hedges the number is returned whole.
    """
    for index, (start, end, _, _) in enumerate(pieces[:-1]):
        gaps = [
            sentence[piece[1] : after[0]] for piece, after in zip(pieces[index:], pieces[index + 1 :], strict=False)
        ]
        if STATED.search(sentence[max(start - 20, 0) : start]) and (
            (all(map(ASIDE.fullmatch, gaps)) and not RESULT.search(TOGETHER.sub('', sentence[end:])))
            or (REASON.match(sentence, end) and not CONSEQUENCE.search(sentence, end))
        ):
            break
    else:
        index = len(pieces) - 1
    start, end, value, formula = pieces[index]
    if is_hedged(sentence, start, end) or any(
        RANGE.fullmatch(sentence, one[1], other[0])
        for one, other in itertools.pairwise(pieces[max(index - 1, 0) : index + 2])
    ):
        return sentence  # it is no number, and so equals no gold answer
    return value if formula and _word_after(sentence, end) not in SCALES else value + _unit_after(sentence, end)


def is_hedged(text: str, start: int, end: int) -> bool:
    """Whether what stands around the number from `start` to `end` makes it no answer.

    That is words, as in `at least 9`, or the rest of a formula, as in `9x` and `sqrt(9`.
    """
    return bool(HEDGED_BEFORE.search(text[max(start - 30, 0) : start]) or HEDGED.match(text, end))


def _word_after(text, end):
    """The word after a number that ends at `end`, in lower case and without plural s; '' without one."""
    following = FOLLOWING.match(text, end)
    word = following[1].lower().replace('.', '') if following else ''
    return word.removesuffix('s') if len(word) > 2 else word


def _unit_after(text, end):
    """The text of up to three words of scale or unit after a number that ends at `end`; '' without one."""
    start = end
    for _ in range(3):
        word_after = _word_after(text, end)
        if not (word_after in SCALES or UNITS.get(word_after)):
            break
        following = FOLLOWING.match(text, end)
        end = following.end() if following else end
    return text[start:end]


def first_number(line: str) -> str:
    """The number at the beginning of a line, with its unit; the whole line for a hedged number or a range; else ''."""
    line = line.lstrip('$* ')
    number = PIECE.match(line)
    if not number or not number[1]:
        return ''
    end = number.end()
    behind = RANGE.match(line, end)
    if is_hedged(line, 0, end) or (behind and line[behind.end() : behind.end() + 1].isdigit()):
        return line
    return number[1].rstrip('.,/') + _unit_after(line, end)


def is_bare(line: str) -> bool:
    """Whether a line is an answer without prose: it has no word, or only one at its end (a unit, or the whole line)."""
    if len(line) > LONGEST or not re.search('[0-9A-Za-z]', line):
        return False
    first = first_word(line)
    if first and re.search('[0-9]', line):
        if first.isupper() and first.lower() not in UNITS:
            return False
        return re.search(rf'[0-9)\]}}$]\**\s*{re.escape(first)}[\s.*$!]*$', line) is not None
    return not first or line.rstrip(' .*$!').endswith(first)


def first_word(text: str) -> str | None:
    """The first word of prose in a text; if there is none beside a number, a word in capitals; else None."""
    plain = NO_WORD.sub(' ', text)
    match = WORD.search(plain)
    if match:
        return match[0]
    capitals = CAPITALS.search(plain) if re.search('[0-9]', text) else None
    return capitals and (capitals[1] or capitals[2])


def pick_values(text: str) -> list[str]:
    """A text's formulas, and its numbers outside formulas, in order; neighbouring formulas become one, with commas."""
    return [value for _, _, value, _ in _pieces(text)]


def _pieces(text):
    """The values of pick_values as [(start, end, value, whether it is a formula), ...]."""
    pieces, opened = [], None
    for match in PIECE.finditer(text):
        if match[1]:
            number = match[1].rstrip('.,/')
            pieces.append((match.start(), match.start() + len(number), number, False))
            continue
        value = text[opened.end() : match.start()] if opened else ''
        money = opened and match[0] == '$' and value[:1].isdigit() and text[match.end() : match.end() + 1].isdigit()
        if opened is None or money or not 0 < len(value.strip()) <= LONGEST or first_word(value):
            opened = match  # the sign before was no formula's beginning; it may be a sign of money
            continue
        start, opened = opened.start(), None
        while pieces and pieces[-1][0] >= start:
            pieces.pop()  # it lies inside this formula
        if r'\begin' not in value:
            value = [row for row in BREAK.split(value) if re.search(r'\w', row)][-1:] or [value]
            value = value[0].strip(' &\n')
        if pieces and pieces[-1][3] and start - pieces[-1][1] < 10 and BETWEEN.fullmatch(text, pieces[-1][1], start):
            start, _, before, _ = pieces.pop()
            value = f'{before}, {value}'
        pieces.append((start, match.end(), value, True))
    return pieces
