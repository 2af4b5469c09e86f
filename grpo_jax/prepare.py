"""Prepares GSM8K or MATH from files for tensorflow-datasets, without tensorflow.

    python -m grpo_jax.prepare --name=gsm8k --folder=FOLDER --out=DIR

FOLDER holds <name>_train.jsonl and <name>_test.jsonl, or what else data.files.rows finds. What it writes,
DIR/<name>/<version>, is a folder that the data sets gsm8k, math and files read.
"""

import os
import tempfile

from absl import flags
import tensorflow_datasets as tfds

from grpo_jax.data import files
from grpo_jax.data.records import convert_rows, drop_malformed, lookup, text_field
from grpo_jax.errors import BadInput
from grpo_jax.run import cli

# fields, and those that a row may lack, which are then ''
FIELDS = {'gsm8k': (('question', 'answer'), ()), 'math': (('problem', 'answer'), ('subject', 'level'))}


class FromFiles(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Writes the rows, dicts of text, of each split in their order."""

    VERSION = tfds.core.Version('1.0.0')
    url_infos = None  # of downloads; to find that there are none, tfds imports what it does not require

    def __init__(self, name, rows, folder):
        self.name, self._rows = name, rows
        super().__init__(data_dir=folder, file_format='array_record')

    def _info(self):
        fields, optional = FIELDS[self.name]
        # shuffled, a row's number would no more be its line's
        return tfds.core.DatasetInfo(
            builder=self,
            disable_shuffling=True,
            features=tfds.features.FeaturesDict({field: tfds.features.Text() for field in fields + optional}),
        )

    def _split_generators(self, dl_manager):
        return {split: self._generate_examples(rows) for split, rows in self._rows.items()}

    def _generate_examples(self, rows):
        yield from enumerate(rows)


def prepare(name, folder, out):
    """The folder that it wrote, of the splits train and test in `folder` as files.rows finds them.

    A malformed row is counted, and written without text: whoever reads it finds it malformed again.
    """
    fields, optional = FIELDS[name]

    def text(row, _, where):
        return {field: text_field(row, field, where) for field in fields} | {
            field: '' if lookup(row, field) is None else text_field(row, field, where) for field in optional
        }

    found = {split: convert_rows(text, files.rows(folder, split, f'{name}_')) for split in ('train', 'test')}
    empty = dict.fromkeys(fields + optional, '')
    for split, rows in found.items():
        drop_malformed(rows, strict=False, split=split)
        found[split] = [empty if isinstance(row, BadInput) else row for row in rows]
    builder = FromFiles(name, found, out)
    if os.path.exists(builder.data_dir):
        raise BadInput('--out', out, f'has {builder.data_dir} already, and nothing is overwritten; name another')
    with tempfile.TemporaryDirectory() as downloads:  # of which there are none
        builder.download_and_prepare(download_dir=downloads)
    return builder.data_dir


def main():
    """The command."""
    print(prepare(flags.FLAGS.name, flags.FLAGS.folder, flags.FLAGS.out))


if __name__ == '__main__':
    flags.DEFINE_enum('name', None, sorted(FIELDS), 'Data set.', required=True)
    flags.DEFINE_string('folder', None, 'Of the files, as data.options.folder.', required=True)
    flags.DEFINE_string('out', None, 'Folder of prepared data sets.', required=True)
    cli.run(main)
