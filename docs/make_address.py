"""Writes the address of this tree's repository into the notebooks and CITATION.cff, or takes it out of them.

It is the one of [project.urls] in pyproject.toml; without one, notebooks have no badge, and link to files of the clone.

python docs/make_address.py
"""

import glob
import json
import os
import re
import tomllib

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BADGE = re.compile(r'^\[!\[Open in Colab\].*\n\n', re.MULTILINE)
PAGE = re.compile(r'\]\((?:\.\.|https://\S+/blob/main)/(docs/\w+\.md\))')  # a link to a page
CONSTANT = re.compile(r"^REPOSITORY = '.*?'", re.MULTILINE)
CODE = re.compile(r'^repository-code: .*\n', re.MULTILINE)


def address():
    """https://github.com/OWNER/NAME, or '' where pyproject.toml has none; SystemExit for what is no such address."""
    with open(os.path.join(ROOT, 'pyproject.toml'), 'rb') as file:
        found = tomllib.load(file)['project']['urls'].get('Repository', '')
    if found and not re.fullmatch(r'https://github\.com/[\w.-]+/[\w.-]+', found):
        raise SystemExit(f'error: Repository in pyproject.toml is {found}; write https://github.com/OWNER/NAME')
    return found


def texts(repository):
    """{path: text} of the notebooks and CITATION.cff with the address of a repository, '' for none."""
    paths = sorted(glob.glob('notebooks/*.ipynb', root_dir=ROOT))
    citation = CODE.sub('', read('CITATION.cff'))
    if repository:
        citation += f'repository-code: {repository}\n'
    return {path: notebook(path, repository) for path in paths} | {'CITATION.cff': citation}


def notebook(path, repository):
    """The text of a notebook with the address."""
    content = json.loads(read(path))
    for number, cell in enumerate(content['cells']):
        source = ''.join(cell['source'])
        if cell['cell_type'] == 'code':
            source = CONSTANT.sub(f"REPOSITORY = '{repository}'", source)
        else:
            folder = f'{repository}/blob/main' if repository else '..'
            source = PAGE.sub(rf']({folder}/\1', BADGE.sub('', source))
        if number == 0 and repository:
            title, _, rest = source.partition('\n\n')
            colab = repository.replace('https://github.com', 'https://colab.research.google.com/github')
            image = 'https://colab.research.google.com/assets/colab-badge.svg'
            source = f'{title}\n\n[![Open in Colab]({image})]({colab}/blob/main/{path})\n\n{rest}'
        cell['source'] = source.splitlines(keepends=True)
    return json.dumps(content, indent=1, ensure_ascii=False) + '\n'


def read(path):
    """The text of a file of the repository."""
    with open(os.path.join(ROOT, path), encoding='utf8') as file:
        return file.read()


if __name__ == '__main__':
    for path, text in texts(address()).items():
        with open(os.path.join(ROOT, path), 'w', encoding='utf8') as target:
            target.write(text)
