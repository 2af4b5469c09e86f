"""Writes docs/llms.txt (llmstxt.org): the pages with a sentence each, for language models, from docs/README.md.

python docs/make_llms.py
"""

import os
import re

DOCS = os.path.dirname(os.path.abspath(__file__))
TARGET = os.path.join(DOCS, 'llms.txt')
SECTION = re.compile(r'^\| ([\w ]+) \| \|$', re.MULTILINE)
ROW = re.compile(r'^\| \[(.*?)\]\((\w+\.md)\) \| (.*) \|$', re.MULTILINE)


def text():
    """The whole file."""
    with open(os.path.join(DOCS, 'README.md'), encoding='utf8') as file:
        title, *sections = SECTION.split(file.read())
    summary = title.split('\n\n')[1].partition('. ')[0]
    parts = [f'# grpo_jax\n\n> {summary}.\n\n- [Overview](README.md): what it is, and the list of the pages\n']
    for name, rows in zip(sections[::2], sections[1::2], strict=True):
        parts.append(f'## {name[0].upper()}{name[1:]}\n\n')
        parts[-1] += ''.join(f'- [{page}]({path}): {says}\n' for page, path, says in ROW.findall(rows))
    return '\n'.join(parts)


if __name__ == '__main__':
    with open(TARGET, 'w', encoding='utf8') as target:
        target.write(text())
