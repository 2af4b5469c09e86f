"""Finds the program in a completion: splits it into blocks of code, and joins the blocks of the solution.

Nothing here parses Python, since some texts make Python's parser end the process.
"""

from collections.abc import Collection
import keyword
import re
from typing import Any, NamedTuple

# an opening or closing fence: at least three of one sign, then the language and any other text
FENCE = re.compile(r'(?P<indent>[ \t]*)(?P<fence>`{3,}|~{3,})(?P<rest>[^\n]*)')
LANGUAGE = re.compile(r'[\s{.]*([\w+#-]*(?:\.\d+)?)')
PYTHON = re.compile(r'i?(?:c?python|py)[\d.]*', re.IGNORECASE)
DEFINITION = re.compile(r'^(?:async[ \t]+)?(?:def|class)[ \t]+(\w+)', re.MULTILINE)
IMPORT = re.compile(r'^(?:import|from)[ \t]+([^\n#]+)', re.MULTILINE)
ASSIGNMENT = re.compile(r'^([A-Za-z_]\w*)[ \t]*(?::[^=\n]*)?=(?!=)', re.MULTILINE)
START = re.compile(
    r'^(?:@\w|(?:async[ \t]+)?(?:def|class)[ \t]+\w|import[ \t]+\w|from[ \t]+[\w.]+[ \t]+import\b)', re.MULTILINE
)
# two names side by side (NAMES) are prose and no Python, and so is a single name with a stop after it (STOPPED)
NAMES = re.compile(r'\b([A-Za-z_]\w*)(?=[ \t]+([A-Za-z_]\w*))')
STOPPED = re.compile(r'\W*([A-Za-z]\w*)[.:!]\W*')
KEYWORDS = {*keyword.kwlist, *keyword.softkwlist}
MOST_BLOCKS, MOST_TEXT, LONGEST = 64, 2**17, 200  # blocks, characters of a text, and characters of a line that are read
QUOTES = re.compile(r'"""|\'\'\'')


class Block(NamedTuple):
    """A block of code between fences."""

    source: str
    python: bool  # the fence says Python; otherwise it names no language
    closed: bool
    before: str  # the text between the previous block and this one


def find_program(completion: str, names: Collection[str] = ()) -> str:
    """The completion's program: the last fenced block of Python, or without a language, that defines one of `names`.

    Without `names`, any definition counts. Other blocks that define or import what this block uses are put before it;
    blocks that only use it are left out. Where no block defines a name, the program is the last block of Python, else
    the last block without a language. Without blocks, the program is the text from its first code up to the next prose.
    """
    blocks = _blocks(completion)
    solutions = [index for index, block in enumerate(blocks) if _defines(block.source, names)]
    if solutions:
        return _join(blocks, solutions[-1])
    if blocks and not blocks[-1].closed and not blocks[-1].python:  # the fence of an answer that began inside a block
        before = blocks[-1].before
        if _defines(before, names) or (before.strip() and not blocks[-1].source.strip()):
            return _strip_prose(before)
    candidates = [block for block in blocks if block.python] or blocks
    return candidates[-1].source if candidates else _strip_prose(completion)


def _blocks(completion):
    """The last MOST_BLOCKS Blocks of Python or without a language, in order; the text may end inside the last one."""
    opening: Any = None  # the fence that opened the current block
    blocks, lines, before = [], [], []

    def close(source, closed=True, language=None):
        """Ends the current block, and keeps it if it is Python or without a language."""
        nonlocal opening, before
        language = next(LANGUAGE.finditer(opening['rest']))[1] if language is None else language
        if not language or PYTHON.fullmatch(language):
            blocks.append(Block(_dedent(source, opening['indent']), bool(language), closed, ''.join(before)))
        opening, before = None, []

    for line in completion.splitlines(keepends=True):
        match = FENCE.match(line)
        rest = match['rest'].strip() if match else ''
        if opening is None and (not match or (match['fence'][0] in rest and not _is_whole_block(match))):
            before.append(line)
        elif opening is None and match:
            opening, lines = match, []
            if _is_whole_block(match):
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


def _is_whole_block(match):
    """Whether a fence's line is a whole block: it ends in the same fence, and between them is not just one word."""
    rest = match['rest'].strip()
    return rest.endswith(match['fence']) and not rest.strip('`~').isalnum()


def _closes(match, opening):
    """Whether a fence closes a block: at least as long as the opening one, and not indented deep, as in a docstring."""
    deep = len(match['indent']) > len(opening['indent']) + 3
    return match['fence'].startswith(opening['fence']) and not deep


def _dedent(source, indent):
    """A block's source without the indentation of its fence, which a block in a list has.

    Unchanged where a line lacks the indentation, and where no definition or import would then begin a line.
    """
    lines = source.splitlines(keepends=True)
    if not indent or not all(line.startswith(indent) or not line.strip() for line in lines):
        return source
    dedented = ''.join(line.removeprefix(indent) for line in lines)
    return dedented if START.search(dedented) else source


def _defines(source, names):
    """Whether a source defines one of the names at top level; without names, whether it defines anything."""
    defined = {*DEFINITION.findall(source), *ASSIGNMENT.findall(source)}
    return bool(defined & set(names)) if names else bool(defined)


def _join(blocks, solution):
    """The source of the block with index `solution`, after the sources of blocks that define names it uses."""
    joined, sources = {solution}, [block.source for block in blocks]
    defined = [
        {*DEFINITION.findall(source), *(word for names in IMPORT.findall(source) for word in re.findall(r'\w+', names))}
        for source in sources
    ]
    for index in range(solution + 1):  # an assignment after the solution is part of an example
        defined[index].update(ASSIGNMENT.findall(sources[index]))
    while True:
        words = {word for index in joined for word in re.findall(r'\w+', sources[index])}
        needed = words - {word for index in joined for word in defined[index]}
        more = {index for index in range(len(blocks)) if index not in joined and defined[index] & needed}
        if not more:
            return '\n'.join(sources[index] for index in [*sorted(joined - {solution}), solution])
        joined |= more


def _strip_prose(text):
    """The code in a text without fences: from its beginning, or if that is prose from the first definition or import.

    It ends before the next prose. A text that begins with prose and has neither, and one of more than MOST_TEXT
    characters, is returned whole.
    """
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
    """Whether a line looks like prose, and neither like Python nor like the inside of a statement."""
    if line[0].isspace() or line[0] in '#"\'@':  # inside a statement, or surely code
        return False
    code = re.split('["\'#]', line[:LONGEST], maxsplit=1)[0]
    if not any(sign in code for sign in ' .:!`'):
        return False
    stopped = STOPPED.fullmatch(code)
    pairs = [match.groups() for match in NAMES.finditer(code)] + ([(stopped[1],)] if stopped else [])
    return '`' in code or any(not KEYWORDS & {*pair} for pair in pairs)
