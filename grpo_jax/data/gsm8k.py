"""GSM8K (arXiv 2110.14168): grade-school word problems; the gold number follows ####."""
import os

from grpo_jax.data import jsonl
from grpo_jax.errors import BadInput
from grpo_jax.types import Example


def examples(split, *, folder):
    """Examples of folder/gsm8k_<split>.jsonl, folder/<split>.jsonl, or a tensorflow-datasets folder.

    A tensorflow-datasets folder (with dataset_info.json) must hold array_record files, which are read
    without tensorflow.
    """
    return [Example(row['question'], gold(row['answer'], f'{folder}, {split} row {i}'), i,
                    {'demonstration': row['answer']})
            for i, row in enumerate(rows(split, folder))]


def rows(split, folder):
    """The split's rows as dicts of text with keys question and answer."""
    if os.path.exists(os.path.join(folder, 'dataset_info.json')):
        import tensorflow_datasets as tfds  # seconds to import, needed here alone
        source = tfds.builder_from_directory(folder).as_data_source(split)
        return [{key: row[key].decode('utf8') for key in ('question', 'answer')} for row in source]
    paths = [os.path.join(folder, name) for name in (f'gsm8k_{split}.jsonl', f'{split}.jsonl')]
    path = next((p for p in paths if os.path.isfile(p)), None)
    if path is None:
        raise BadInput('data.options.folder', folder, f'holds neither {" nor ".join(map(os.path.basename, paths))} '
                       'nor dataset_info.json; set GRPO_JAX_DATA or data.options.folder')
    return [{key: jsonl.text_field(row, key, f'{path}, line {i + 1}') for key in ('question', 'answer')}
            for i, row in enumerate(jsonl.read(path))]


def gold(solution, where):
    """The number after ####, without thousands separators."""
    if '####' not in solution:
        raise BadInput(where, solution[-60:], 'has no #### line with the gold answer')
    return solution.rsplit('####', 1)[1].strip().replace(',', '')
