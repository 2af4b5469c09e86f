"""Rows of Parquet and Arrow files, and of tensorflow-datasets folders, which are read without tensorflow."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from grpo_jax.data.records import shorten
from grpo_jax.errors import BadInput


def parquet(path: str) -> Iterator[tuple[str, Any]]:
    """Yields (where, row) of each row of a Parquet file, as grpo_jax.data.records says; BadInput when it is damaged."""
    import pyarrow.parquet  # a second, which few data sets need

    return _read(path, lambda: pyarrow.parquet.ParquetFile(path).iter_batches())


def arrow(path: str) -> Iterator[tuple[str, Any]]:
    """As parquet, of a file in Arrow's stream format, which `datasets` saves."""
    import pyarrow

    return _read(path, lambda: pyarrow.ipc.open_stream(pyarrow.memory_map(path)))


def prepared(folder: str, split: str) -> Iterator[tuple[str, Any]]:
    """As parquet, of a split of a tensorflow-datasets folder with array_record files."""
    import tensorflow_datasets as tfds  # seconds to import

    builder: Any = tfds.builder_from_directory(folder)
    info = builder.info
    if split not in info.splits:
        raise BadInput('data.options.folder', folder, f'has no split {split}, only {sorted(info.splits)}')
    if info.file_format != tfds.core.FileFormat.ARRAY_RECORD:
        raise BadInput(
            'data.options.folder',
            folder,
            f'holds {info.file_format.value} files, which need tensorflow; prepare it with file_format array_record',
        )
    for index, row in enumerate(builder.as_data_source(split)):
        where = f'{folder}, {split} row {index}'
        try:
            yield where, _plain(row)
        except UnicodeDecodeError as error:
            yield where, BadInput(where, shorten(error.object), f'{error}; mend or remove the row')


def _read(path, batches):
    import pyarrow

    index = 0
    try:
        for batch in batches():
            for row in _dicts(batch):
                where = f'{path}, row {index}'
                if isinstance(row, UnicodeDecodeError):
                    row = BadInput(where, shorten(row.object), f'{row}; mend or remove the row')
                yield where, row
                index += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise BadInput('data file', path, f'is damaged at row {index} ({shorten(error)}); fetch it again') from None


def _dicts(batch):
    """Yields each row of a pyarrow.RecordBatch as a dict, or the UnicodeDecodeError in its place."""
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError as error:
        if batch.num_rows == 1:
            yield error
            return
        for index in range(batch.num_rows):
            yield from _dicts(batch.slice(index, 1))


def _plain(value):
    """The value with str, int, float and list in place of the bytes and arrays of tensorflow-datasets."""
    if isinstance(value, dict):
        return {name: _plain(x) for name, x in value.items()}
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    if isinstance(value, list):
        return [_plain(x) for x in value]
    return value.decode('utf8') if isinstance(value, bytes) else value
