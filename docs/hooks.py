"""What the site needs beyond mkdocs: pages may link to files outside of docs/, which come along; formulas; and more.

A hook of mkdocs.yml. A file of the repository that a page links to becomes the page repository/<path>: Markdown as it
is, anything else as a listing. Links are rewritten so that they lead there; on GitHub they work as they stand.
"""

import glob
import os
import re
import shutil

from latex2mathml.converter import convert
import make_address
from mkdocs.structure.files import File

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
OUTSIDE = 'repository/'  # where pages of other files lie on the site
LINK = re.compile(r'(\]\()([^)\s#]+)([^)\s]*\))')  # of Markdown: its target, and an anchor
FENCE = re.compile(r'^(```.*?^```$)', re.DOTALL | re.MULTILINE)
# of LaTeX, as GitHub reads it: in a fence or between dollars; what else is in fences or is code comes first
FORMULA = re.compile(
    r'^```math\n(?P<block>.*?)^```$|^(?P<fence>`{3,}).*?^(?P=fence)$|`[^`\n]+`'
    r'|(?<!\\)\$(?P<inline>[^\s$](?:[^$\n]*[^\s$])?)\$(?!\d)',
    re.DOTALL | re.MULTILINE,
)
PLACE = re.compile(r'MATHML(BLOCK|INLINE)([0-9a-f]+)END')  # where a formula stands while Markdown is read
CODE = re.compile('<code>.*?</code>', re.DOTALL)
FLAG = re.compile(r'(?<![\w-])--?[\w.]+')
LANGUAGES = {'.py': 'python', '.sh': 'bash', '.json': 'json', '.toml': 'toml', '.ipynb': 'json'}


def on_config(config):
    """The config with the address of the repository, where pyproject.toml has one."""
    if repository := make_address.address():
        config['repo_url'], config['repo_name'] = repository, 'Repository'
    return config


def on_files(files, config):
    """Adds the files outside of docs/ that a page links to, and those that these link to in turn."""
    waiting = [f'docs/{file.src_uri}' for file in files.documentation_pages()]
    while waiting:
        path = waiting.pop()
        for target in targets(path):
            if not target.startswith('docs/') and files.get_file_from_path(page_of(target)) is None:
                files.append(File.generated(config, page_of(target), content=content(target)))
                waiting.append(target)
    return files


def on_page_markdown(markdown, page, **_):
    """The page with links between pages of the site, and with places for its formulas."""
    path = path_of(page.file.src_uri)
    if not path.endswith('.md'):
        return markdown
    markdown = FORMULA.sub(place, markdown)

    def rewrite(link):
        target = resolve(path, link[2])
        if target is None:
            return link[0]
        return link[1] + os.path.relpath(page_of(target), os.path.dirname(page.file.src_uri)) + link[3]

    parts = FENCE.split(markdown)  # fences at the odd places
    return ''.join(part if i % 2 else LINK.sub(rewrite, part) for i, part in enumerate(parts))


def place(match):
    """What Markdown leaves as it is, in place of a formula; code as it stands."""
    kind = 'block' if match['block'] else 'inline'
    return f'MATHML{kind.upper()}{match[kind].encode().hex()}END' if match[kind] else match[0]


def on_page_content(html, **_):
    """The page with its formulas in MathML, which browsers draw without a script.

    site.css keeps marked flags in one line, and on a phone it stacks the cells of a marked table of keys.
    """
    html = CODE.sub(lambda code: FLAG.sub(r'<span class="flag">\g<0></span>', code[0]), html)
    html = re.sub(r'<table>(?=\s*<thead>\s*<tr>\s*<th>key</th>\s*<th>default</th>)', '<table data-keys>', html)
    return PLACE.sub(lambda match: convert(bytes.fromhex(match[2]).decode(), display=match[1].lower()), html)


def on_post_build(config):
    """Puts the Markdown of the pages beside them, to which llms.txt leads."""
    for path in glob.glob(os.path.join(ROOT, 'docs', '*.md')):
        if not path.endswith('_notes.md'):
            shutil.copy(path, config.site_dir)


def targets(path):
    """The files of the repository that a page of Markdown links to; none for another file."""
    if not path.endswith('.md'):
        return
    text = ''.join(FENCE.split(read(path))[::2])
    for _, link, _ in LINK.findall(text):
        if target := resolve(path, link):
            yield target


def resolve(path, link):
    """The file of the repository that a link in the file `path` leads to; None for an address, or for no file."""
    target = os.path.normpath(os.path.join(os.path.dirname(path), link))
    return target if os.path.isfile(os.path.join(ROOT, target)) else None


def page_of(target):
    """Where a file of the repository is on the site."""
    if target.startswith('docs/'):
        return target.removeprefix('docs/')
    return OUTSIDE + (target if target.endswith('.md') else f'{target}.md')


def path_of(uri):
    """The file of the repository that a page shows."""
    if not uri.startswith(OUTSIDE):
        return f'docs/{uri}'
    path = uri.removeprefix(OUTSIDE)
    return path if os.path.isfile(os.path.join(ROOT, path)) else path.removesuffix('.md')


def content(path):
    """The Markdown of a page that shows a file."""
    if path.endswith('.md'):
        return read(path)
    language = LANGUAGES.get(os.path.splitext(path)[1], '')
    return f'---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n````{language}\n{read(path)}\n````\n'


def read(path):
    """The text of a file of the repository."""
    with open(os.path.join(ROOT, path), encoding='utf8') as file:
        return file.read()
