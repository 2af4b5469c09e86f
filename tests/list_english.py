"""Lists docstrings whose English a reader stumbles over, by four patterns; it fails nothing, since a list is no judge.

    python -m tests.list_english              # all of grpo_jax
    python -m tests.list_english learner run  # these folders

1  two "of" in one noun phrase             "the logprobs of the tokens of completions"
2  that of, those of, of which, of whose    "that of the difference"
3  a pronoun as the first clause's object   "Makes it whole"
4  a function that returns nothing, and whose first sentence has no verb
"""

import ast
import os
import re
import sys

PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), 'grpo_jax')
TWO_OF = re.compile(r"\bof (?:(?:the|a|an|its|their|all|each|one|such|this|that)\b ?)?[\w'-]+ (?:[\w'-]+ )?of\b")
RELATIVES = re.compile(
    r'\b(?:(?:that|those|these|all|some|any|none|one|ones) of|of (?:which|whose|whom|those|that|it|them))\b'
)
PRONOUN = re.compile(r"^[\w'-]+(?: [\w'-]+){0,2} (?:it|them|these|those|this|that)\b(?! \w+s\b)")
VERB = re.compile(r'^(?:Not |Also )?[A-Z][a-z]+s\b')


def returns_nothing(function):
    """Whether no return statement of a function gives a value."""
    inner = [node for node in ast.walk(function) if isinstance(node, ast.Return | ast.Yield | ast.YieldFrom)]
    return not any(getattr(node, 'value', None) is not None for node in inner)


def patterns(node, docstring):
    """The numbers of the patterns that a docstring shows."""
    first, text = docstring.split('\n\n')[0], ' '.join(docstring.split())
    shown = [number for number, pattern in ((1, TWO_OF), (2, RELATIVES)) if pattern.search(text)]
    if PRONOUN.search(first):
        shown.append(3)
    if isinstance(node, ast.FunctionDef) and returns_nothing(node) and not VERB.search(first):
        shown.append(4)
    return shown


def main(folders):
    """Prints a line a docstring, and how many there are by pattern."""
    counts, all_docstrings = dict.fromkeys((1, 2, 3, 4), 0), 0
    for folder, _, files in sorted(os.walk(PACKAGE)):
        for name in sorted(files):
            path = os.path.relpath(os.path.join(folder, name), PACKAGE).replace(os.sep, '/')
            if not name.endswith('.py') or (folders and not path.startswith(tuple(folders))):
                continue
            with open(os.path.join(folder, name), encoding='utf8') as file:
                tree = ast.parse(file.read())
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) and ast.get_docstring(node):
                    all_docstrings += 1
                    docstring = str(ast.get_docstring(node))
                    shown = patterns(node, docstring)
                    for number in shown:
                        counts[number] += 1
                    if shown:
                        line = getattr(node, 'lineno', 1)
                        print(f'{path}:{line}: {" ".join(map(str, shown))}: {docstring.splitlines()[0]}')
    print(f'{all_docstrings} docstrings; ' + ', '.join(f'pattern {n}: {count}' for n, count in counts.items()))


if __name__ == '__main__':
    main(sys.argv[1:])
