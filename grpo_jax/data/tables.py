"""Reads Parquet, Arrow and CSV files, and tensorflow-datasets folders without tensorflow."""

from collections.abc import Callable, Iterator
import csv
import os
from typing import Any

import numpy as np

from grpo_jax.data.records import shorten
from grpo_jax.errors import BadInput
from grpo_jax.hosts import json_file

LONGEST = 2**24  # characters of a cell in CSV


def read_parquet(path: str) -> Iterator[tuple[str, Any]]:
    """Yields (where, row) for each row of a Parquet file: its place in words, and a dict or, if malformed, a BadInput.

    Raises BadInput for a damaged file.
    """
    import pyarrow.parquet  # a second, which few data sets need

    return _read_rows(path, lambda: pyarrow.parquet.ParquetFile(path, page_checksum_verification=True).iter_batches())


def read_arrow(path: str) -> Iterator[tuple[str, Any]]:
    """Yields (where, row) as read_parquet does, for a file in Arrow's stream format, which `datasets` saves."""
    import pyarrow

    def batches():
        for batch in pyarrow.ipc.open_stream(pyarrow.memory_map(path)):
            batch.validate(full=True)  # its offsets are read as they are, and wrong ones would end the process
            yield batch

    return _read_rows(path, batches)


def read_csv(path: str) -> Iterator[tuple[str, Any]]:
    """Yields (where, row) as read_parquet does, for a .csv or .tsv with column names on line 1; values are texts."""
    csv.field_size_limit(LONGEST)
    with open(path, encoding='utf-8-sig', newline='') as file:
        lines = csv.reader(file, delimiter='\t' if path.endswith('.tsv') else ',')
        try:
            names = next(lines, [])
            if double := sorted({name for name in names if names.count(name) > 1}):
                raise BadInput('data file', path, f'has the column {double[0]!r} more than once; rename one of them')
            for cells in lines:
                where = f'{path}, line {lines.line_num}'
                row: Any = dict(zip(names, cells, strict=False))
                if len(cells) != len(names):
                    row = BadInput(where, shorten(cells), f'has {len(cells)} cells, not {len(names)}; mend the row')
                yield where, row
        except (csv.Error, UnicodeDecodeError) as error:
            remedy = f'is damaged after line {lines.line_num} ({shorten(error)}); save it as CSV in UTF-8'
            raise BadInput('data file', path, remedy) from None


def read_prepared(folder: str, split: str) -> Iterator[tuple[str, Any]]:
    """Yields (where, row) as read_parquet does, for a split in a tensorflow-datasets folder of array_record files.

    Raises BadInput for a folder that is damaged, lacks the split, or has files of another format.
    """
    import tensorflow_datasets as tfds  # seconds to import

    for name in ('features.json', 'dataset_info.json'):
        if os.path.isfile(os.path.join(folder, name)):
            json_file.read_object(os.path.join(folder, name), 'prepare the data set again')
    try:
        builder: Any = tfds.builder_from_directory(folder)
        info = builder.info
    except Exception as error:  # a different type for each way of being damaged
        raise _damage_error(folder, error) from None
    if split not in info.splits:
        raise BadInput('data.options.folder', folder, f'has no split {split}, only {sorted(info.splits)}; prepare it')
    if info.file_format != tfds.core.FileFormat.ARRAY_RECORD:
        raise BadInput(
            'data.options.folder',
            folder,
            f'holds {info.file_format.value} files, which need tensorflow; prepare it with file_format array_record',
        )
    try:
        source = builder.as_data_source(split)
        count = len(source)
    except Exception as error:
        raise _damage_error(folder, error) from None
    for index in range(count):
        where = f'{folder}, {split} row {index}'
        try:
            yield where, to_plain(source[index])
        except UnicodeDecodeError as error:
            yield where, BadInput(where, shorten(error.object), f'{error}; mend or remove the row')
        except Exception as error:
            raise _damage_error(folder, error) from None


def _damage_error(folder, error):
    """The BadInput for a folder whose data set cannot be read."""
    cause = f'{type(error).__name__}, {str(error)[:200]}'
    return BadInput('data.options.folder', folder, f'holds a damaged data set ({cause}); prepare it again')


def _read_rows(path, batches):
    """Yields (where, row) for each row of the RecordBatches of batches(); raises BadInput where `path` is damaged."""
    import pyarrow

    index = 0
    try:
        for batch in batches():
            if not index:
                _check_names(batch.schema, path)
            mend = _make_shortener(pyarrow.struct(batch.schema))
            for row in _dicts(batch):
                where = f'{path}, row {index}'
                if isinstance(row, Exception):
                    value = row.object if isinstance(row, UnicodeDecodeError) else path
                    row = BadInput(where, shorten(value), f'{row}; mend or remove the row')
                yield where, mend(row) if mend and isinstance(row, dict) else row
                index += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise BadInput('data file', path, f'is damaged at row {index} ({shorten(error)}); fetch it again') from None


def _dicts(batch):
    """Yields each row of a pyarrow.RecordBatch as a dict; in place of an unreadable row, the exception."""
    try:
        yield from batch.to_pylist()
    except (ValueError, OverflowError, ArithmeticError) as error:  # no UTF-8, a date beyond Python's, and the like
        if batch.num_rows == 1:
            yield error
            return
        for index in range(batch.num_rows):
            yield from _dicts(batch.slice(index, 1))


def _check_names(fields, path):
    """Raises BadInput where two columns, or two fields of a column, share a name: a dict would lose the first."""
    import pyarrow

    names = [field.name for field in fields]
    double = sorted({name for name in names if names.count(name) > 1})
    if double:
        raise BadInput('data file', path, f'has the column {double[0]!r} more than once; rename one of them')
    for field in fields:
        kind = field.type
        while any(is_list(kind) for is_list in _list_predicates()):
            kind = kind.value_type
        if pyarrow.types.is_struct(kind):
            _check_names(kind, path)


def _list_predicates():
    """pyarrow's functions that tell whether a type is a list."""
    import pyarrow

    types = pyarrow.types
    return types.is_list, types.is_large_list, types.is_fixed_size_list


def _make_shortener(kind) -> Callable | None:
    """A function that gives float32 values of an Arrow type their shortest decimals: .1 becomes .1, not .100000001.

    The function also converts float16, and values inside lists and structs. None for a type without such values.
    """
    import pyarrow

    if pyarrow.types.is_float32(kind) or pyarrow.types.is_float16(kind):
        dtype = np.float32 if pyarrow.types.is_float32(kind) else np.float16
        return lambda value: None if value is None else float(str(dtype(value)))
    if any(is_list(kind) for is_list in _list_predicates()):
        inner = _make_shortener(kind.value_type)
        if inner:
            return lambda values: None if values is None else [inner(value) for value in values]
    if pyarrow.types.is_struct(kind):
        fields = {field.name: mend for field in kind if (mend := _make_shortener(field.type))}
        if fields:
            return lambda row: row and row | {name: mend(row[name]) for name, mend in fields.items()}
    return None


def to_plain(value: Any) -> Any:
    """A row's value in plain types of Python: bytes and NumPy's values in it become str, int, float and list."""
    if isinstance(value, dict):
        return {name: to_plain(x) for name, x in value.items()}
    if isinstance(value, (np.ndarray, np.generic)):
        short = np.issubdtype(value.dtype, np.floating) and value.dtype.itemsize < 8
        value = (np.asarray(value).astype(str).astype(float) if short else value).tolist()
    if isinstance(value, list):
        return [to_plain(x) for x in value]
    return value.decode('utf8') if isinstance(value, bytes) else value
