"""Converts files of GSM8K or MATH to a data set of tensorflow-datasets, without tensorflow.

FOLDER holds <name>_train.jsonl and <name>_test.jsonl, or other files that data.files.rows finds. The command writes the
folder OUT/<name>/<version>, which the data sets gsm8k, math and files read.

Examples:
    python -m grpo_jax prepare --name=gsm8k --folder=data/math --out=data/prepared
    python -m grpo_jax prepare --name=math --folder=data/math --out=data/prepared
"""

import os
import tempfile

from absl import flags
import tensorflow_datasets as tfds

from grpo_jax.data import files
from grpo_jax.data.records import convert_rows, drop_malformed, get_field, text_field
from grpo_jax.errors import BadInput
from grpo_jax.run import cli

# name -> (required fields, optional fields; '' when a row lacks one)
FIELDS = {'gsm8k': (('question', 'answer'), ()), 'math': (('problem', 'answer'), ('subject', 'level'))}


class FromFiles(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """A builder of tensorflow-datasets. It writes rows, {split: list of dicts of texts}, in their order."""

    VERSION = tfds.core.Version('1.0.0')
    url_infos = None  # no downloads; without this, tfds imports a package that it does not require

    def __init__(self, name, rows, folder):
        self.name = name  # pyright: ignore[reportAttributeAccessIssue]  # tfds derives it from the class's name
        self._rows = rows
        super().__init__(data_dir=folder, file_format='array_record')

    def _info(self):
        """The DatasetInfo: text fields, and rows that are not shuffled."""
        fields, optional = FIELDS[self.name]
        # shuffling would break the match of row numbers and line numbers
        return tfds.core.DatasetInfo(
            builder=self,
            disable_shuffling=True,
            features=tfds.features.FeaturesDict({field: tfds.features.Text() for field in fields + optional}),
        )

    def _split_generators(self, dl_manager):
        """{split: its (number, row) pairs}; nothing is downloaded."""
        return {split: self._generate_examples(rows) for split, rows in self._rows.items()}

    def _generate_examples(self, rows):
        """Yields (number from 0, row) of each row."""
        yield from enumerate(rows)


def prepare(name: str, folder: str, out: str) -> str:
    """Writes the splits train and test of data set `name`, and returns the written folder.

    name: 'gsm8k' or 'math'; folder: of the files, which data.files.rows finds; out: folder of prepared data sets. A
    malformed row is counted and written with empty texts, so that readers count it as malformed too. Raises BadInput
    where the data set is written already.
    """
    fields, optional = FIELDS[name]

    def text(row, _, where):
        return {field: text_field(row, field, where) for field in fields} | {
            field: '' if get_field(row, field) is None else text_field(row, field, where) for field in optional
        }

    splits = {split: convert_rows(text, files.rows(folder, split, f'{name}_')) for split in ('train', 'test')}
    empty = dict.fromkeys(fields + optional, '')
    for split, rows in splits.items():
        drop_malformed(rows, strict=False, split=split)
        splits[split] = [empty if isinstance(row, BadInput) else row for row in rows]
    builder = FromFiles(name, splits, out)
    if os.path.exists(builder.data_dir):
        raise BadInput('--out', out, f'has {builder.data_dir} already, and nothing is overwritten; name another')
    with tempfile.TemporaryDirectory() as downloads:  # it stays empty
        builder.download_and_prepare(download_dir=downloads)
    return builder.data_dir


def main() -> None:
    """Runs the command."""
    print(prepare(flags.FLAGS.name, flags.FLAGS.folder, flags.FLAGS.out))


if __name__ == '__main__':
    flags.DEFINE_enum('name', None, sorted(FIELDS), 'Data set.', required=True)
    flags.DEFINE_string('folder', None, 'Of the files, as data.options.folder.', required=True)
    flags.DEFINE_string('out', None, 'Folder of prepared data sets.', required=True)
    cli.run(main)
