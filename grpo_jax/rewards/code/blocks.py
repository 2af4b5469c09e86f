"""The program in a completion: its blocks of code, and which of them are the solution.

Nothing here parses Python: a completion can be such that Python's parser ends the process.
"""

from collections.abc import Collection
import keyword
import re
from typing import Any, NamedTuple

# opening or closing: at least three of one sign, then the language and whatever else
FENCE = re.compile(r'(?P<indent>[ \t]*)(?P<fence>`{3,}|~{3,})(?P<rest>[^\n]*)')
LANGUAGE = re.compile(r'[\s{.]*([\w+#-]*(?:\.\d+)?)')
PYTHON = re.compile(r'i?(?:c?python|py)[\d.]*', re.IGNORECASE)
DEFINITION = re.compile(r'^(?:async[ \t]+)?(?:def|class)[ \t]+(\w+)', re.MULTILINE)
IMPORT = re.compile(r'^(?:import|from)[ \t]+([^\n#]+)', re.MULTILINE)
ASSIGNMENT = re.compile(r'^([A-Za-z_]\w*)[ \t]*(?::[^=\n]*)?=(?!=)', re.MULTILINE)
START = re.compile(
    r'^(?:@\w|(?:async[ \t]+)?(?:def|class)[ \t]+\w|import[ \t]+\w|from[ \t]+[\w.]+[ \t]+import\b)', re.MULTILINE
)
# two names side by side are no Python, nor is a name with a stop and nothing behind it
NAMES = re.compile(r'\b([A-Za-z_]\w*)(?=[ \t]+([A-Za-z_]\w*))')
STOPPED = re.compile(r'\W*([A-Za-z]\w*)[.:!]\W*')
KEYWORDS = {*keyword.kwlist, *keyword.softkwlist}
MOST_BLOCKS, MOST_TEXT, LONGEST = 64, 2**17, 200  # blocks, characters of a text and of a line that are looked at
QUOTES = re.compile(r'"""|\'\'\'')


class Block(NamedTuple):
    """A block of code between fences."""

    source: str
    python: bool  # by its language; else it has none
    closed: bool
    before: str  # the text between the block before it and this one


def find_program(completion: str, names: Collection[str] = ()) -> str:
    """The program of a completion: the last fenced block of Python, or of no language, that defines one of the names.

    Names none: anything. Other blocks that define or import what this one uses, and does not define, go before it; a
    usage block behind it does not. Where no block defines a name, it is the last block of Python, else of no language;
    without blocks, the text, from where its code begins to where prose follows.
    """
    blocks = _blocks(completion)
    solutions = [index for index, block in enumerate(blocks) if _defines(block.source, names)]
    if solutions:
        return _join(blocks, solutions[-1])
    if blocks and not blocks[-1].closed and not blocks[-1].python:  # the fence of an answer that began inside a block
        before = blocks[-1].before
        if _defines(before, names) or (before.strip() and not blocks[-1].source.strip()):
            return _strip_prose(before)
    chosen = [block for block in blocks if block.python] or blocks
    return chosen[-1].source if chosen else _strip_prose(completion)


def _blocks(completion):
    """The last Blocks of Python or without a language, in order; the very last may be cut off by the end."""
    opening: Any = None  # the fence of the block at hand
    blocks, lines, before = [], [], []

    def close(source, closed=True, language=None):
        nonlocal opening, before
        language = next(LANGUAGE.finditer(opening['rest']))[1] if language is None else language
        if not language or PYTHON.fullmatch(language):
            blocks.append(Block(_dedent(source, opening['indent']), bool(language), closed, ''.join(before)))
        opening, before = None, []

    for line in completion.splitlines(keepends=True):
        match = FENCE.match(line)
        rest = match['rest'].strip() if match else ''
        if opening is None and (not match or (match['fence'][0] in rest and not _in_line(match))):
            before.append(line)
        elif opening is None and match:
            opening, lines = match, []
            if _in_line(match):
                language, _, code = rest.partition(' ')
                language, code = (language, code) if PYTHON.fullmatch(language) else ('', rest)
                close(code.removesuffix(match['fence']).strip() + '\n', True, language)
        elif match and PYTHON.fullmatch(rest):  # another block, before this one was closed
            close(''.join(lines), False)
            opening, lines = match, []
        elif match and not rest and _closes(match, opening):
            close(''.join(lines))
        elif opening and not match and line.rstrip().endswith(opening['fence']) and line.count(opening['fence']) == 1:
            close(''.join([*lines, line.rstrip().removesuffix(opening['fence']), '\n']))
        else:
            lines.append(line)
    if opening is not None:
        bare = next((index for index, line in enumerate(lines) if line.strip() == opening['fence']), None)
        close(''.join(lines[:bare]), bare is not None)
    return blocks[-MOST_BLOCKS:]


def _in_line(match):
    """Whether the line of a fence is a whole block: code, more than a word, and a fence that closes it."""
    rest = match['rest'].strip()
    return rest.endswith(match['fence']) and not rest.strip('`~').isalnum()


def _closes(match, opening):
    """Whether a fence closes a block: its sign as often, and not deep inside of the code, as in a docstring."""
    deep = len(match['indent']) > len(opening['indent']) + 3
    return match['fence'].startswith(opening['fence']) and not deep


def _dedent(source, indent):
    """The source of a block in a list, without the indentation of its fence; other sources as they are."""
    lines = source.splitlines(keepends=True)
    if not indent or not all(line.startswith(indent) or not line.strip() for line in lines):
        return source
    dedented = ''.join(line.removeprefix(indent) for line in lines)
    return dedented if START.search(dedented) else source


def _defines(source, names):
    """Whether a source defines one of the names, or with none, anything; what is inside of others does not count."""
    defined = {*DEFINITION.findall(source), *ASSIGNMENT.findall(source)}
    return bool(defined & set(names)) if names else bool(defined)


def _join(blocks, solution):
    """The source of the block at an index, after those that define what it uses."""
    joined, sources = {solution}, [block.source for block in blocks]
    defined = [
        {*DEFINITION.findall(source), *(word for names in IMPORT.findall(source) for word in re.findall(r'\w+', names))}
        for source in sources
    ]
    for index in range(solution + 1):  # what is assigned behind the solution is an example
        defined[index].update(ASSIGNMENT.findall(sources[index]))
    while True:
        words = {word for index in joined for word in re.findall(r'\w+', sources[index])}
        needed = words - {word for index in joined for word in defined[index]}
        more = {index for index in range(len(blocks)) if index not in joined and defined[index] & needed}
        if not more:
            return '\n'.join(sources[index] for index in [*sorted(joined - {solution}), solution])
        joined |= more


def _strip_prose(text):
    """The code of a text without fences: from its first definition or import to the prose behind it; else the text."""
    if len(text) > MOST_TEXT:
        return text
    lines = text.splitlines(keepends=True)
    first = next((index for index, line in enumerate(lines) if line.strip()), 0)
    if lines and _is_prose(lines[first]):
        start = next((index for index, line in enumerate(lines) if START.match(line)), None)
        if start is None:
            return text
        lines = lines[start:]
    quoted = ''
    for index, line in enumerate(lines):
        if not quoted and _is_prose(line):
            return ''.join(lines[:index])
        for quotes in QUOTES.findall(line):
            quoted = quotes if not quoted else '' if quotes == quoted else quoted
    return ''.join(lines)


def _is_prose(line):
    if line[0].isspace() or line[0] in '#"\'@':  # inside of a statement, or surely code
        return False
    code = re.split('["\'#]', line[:LONGEST], maxsplit=1)[0]
    if not any(sign in code for sign in ' .:!`'):
        return False
    stopped = STOPPED.fullmatch(code)
    pairs = [match.groups() for match in NAMES.finditer(code)] + ([(stopped[1],)] if stopped else [])
    return '`' in code or any(not KEYWORDS & {*pair} for pair in pairs)
