"""Rows: one result of model x method x metric x image, kept as Parquet."""

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from dave_vit.errors import import_optional
from dave_vit.evaluate.store import DamagedFile, reading


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One result. Without metric and value: the part that all results of one map share.

    Attributes:
        model: label in the plan.
        method: label in the plan.
        metric: label in the plan.
        image: name in the data set, or of a grid and its cell.
        unit: the picture or the grid; scores of one unit are resampled together.
        pictures: pictures of a grid; None if the unit is the picture itself.
        target: explained class.
        value: the score, or None.
        dropped: why there is no score, or why it is the worst one (an empty map).
        seed: seed of the method.
        options: hash of all options that decide the value.
        versions: versions of the libraries.
        device: where it was computed.
        passes: forward passes of the explained picture for its map; None if there is no map.
        map_seconds: time to compute the map.
        seconds: time to compute the score.
        curve: the curve that the value summarises.
        at: horizontal axis of the curve.
    """

    model: str
    method: str
    metric: str = ""
    image: str
    unit: str
    pictures: Sequence[str] | None = None
    target: int
    value: float | None = None
    dropped: str | None = None
    seed: int
    options: str = ""
    versions: str
    device: str
    passes: float | None = None
    map_seconds: float = 0.0
    seconds: float = 0.0
    curve: Sequence[float] | None = None
    at: Sequence[float] | None = None


@dataclass(frozen=True, slots=True)
class ScannedImage:
    """An image and the model's prediction for it.

    Attributes:
        index: index in the data set.
        name: name in the data set.
        unit: name of the picture.
        label: label as a class of the model; None if the image has none or the model does not have the class.
        predicted: predicted class; None if the image could not be read.
        confidence: softmax probability of the predicted class.
        dropped: why the image cannot be scored, or None.
    """

    index: int
    name: str
    unit: str
    label: int | None
    predicted: int | None
    confidence: float | None
    dropped: str | None


_FEW_VALUES = ("model", "method", "metric", "dropped", "options", "versions", "device")  # encoded as dictionaries


def pack_rows(rows: Sequence[Row] | Sequence[ScannedImage], kind: type[Row] | type[ScannedImage] = Row) -> bytes:
    """Return the content of a Parquet file."""
    arrow = import_pyarrow()
    table = arrow.Table.from_pylist([asdict(row) for row in rows], schema=arrow_schema(kind))
    buffer = io.BytesIO()
    arrow.parquet.write_table(table, buffer, compression="zstd", write_page_checksum=True)
    return buffer.getvalue()


def read_tables(paths: Iterable[Path], columns: Sequence[str] | None = None) -> Iterator[Any]:
    """Yield the content of Parquet files as Arrow tables, one file after the other.

    Raises:
        DamagedFile: a file cannot be read, or its checksums are wrong.
    """
    parquet = import_pyarrow().parquet
    for path in paths:
        with reading(path):
            # ParquetFile and not read_table: that one takes a folder's name for a partition
            table = parquet.ParquetFile(path, page_checksum_verification=True).read(columns=columns and list(columns))
        if columns and set(columns) - set(table.column_names):
            raise DamagedFile(path, "columns are missing")
        yield table


def read_scanned_images(paths: Iterable[Path]) -> Iterator[ScannedImage]:
    """Yield the predictions for images from Parquet files."""
    for table in read_tables(paths, [one.name for one in fields(ScannedImage)]):
        yield from (ScannedImage(**row) for row in table.to_pylist())


def arrow_schema(kind: type[Row] | type[ScannedImage]) -> Any:
    """Return the columns of a table of such rows."""
    arrow = import_pyarrow()
    types: dict[Any, Any] = {str: arrow.string(), int: arrow.int32(), float: arrow.float64()}
    types |= {Sequence[str]: arrow.list_(arrow.string()), Sequence[float]: arrow.list_(arrow.float32())}
    types |= {one | None: column for one, column in types.items()}
    columns = {one.name: types[one.type] for one in fields(kind)}
    few = dict.fromkeys(columns.keys() & _FEW_VALUES, arrow.dictionary(arrow.int32(), arrow.string()))
    return arrow.schema(list((columns | few).items()))


def import_pyarrow() -> Any:
    """Import pyarrow with the parts that are used here, or name the extra that has it."""
    for part in ("pyarrow.compute", "pyarrow.parquet"):
        import_optional(part, extra="eval")
    return import_optional("pyarrow", extra="eval")
