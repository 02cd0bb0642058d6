"""Rows: one result of model x method x metric x image, kept as Parquet."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from dave_vit.errors import first_line, missing_extra
from dave_vit.evaluate.store import DamagedFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One result; without metric and value, what the results of one map share.

    Attributes:
        model: label in the plan.
        method: label in the plan.
        metric: label in the plan.
        image: name in the data set, or of a grid and its cell.
        unit: what is scored as one: the picture or the grid.
        pictures: what a grid shows; None where the unit is the picture itself.
        target: explained class.
        value: the score; None where there is none.
        dropped: why there is none, or why it is the worst: a map that shows nothing.
        seed: of the method.
        options: hash of all options that decide the value.
        versions: of the libraries.
        device: where it was computed.
        passes: how often the explained picture went forward for its maps; None where there is no map.
        map_seconds: what the map took.
        seconds: what the metric took.
        curve: what the value sums up.
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
    """What a model makes of an image.

    Attributes:
        index: number in the data set.
        name: in the data set.
        unit: name of the picture.
        label: as a class of the model; None where the image has none or the model does not know it.
        predicted: class; None where the image could not be read.
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


_WORDS = ("model", "method", "metric", "dropped", "options", "versions", "device")  # few different ones in a column


def pack(rows: Sequence[Row] | Sequence[ScannedImage], kind: type[Row] | type[ScannedImage] = Row) -> bytes:
    """A Parquet file."""
    arrow, parquet = _pyarrow()
    schema = _schema(arrow, kind)
    table = arrow.Table.from_pylist([asdict(row) for row in rows], schema=schema)
    buffer = io.BytesIO()
    parquet.write_table(table, buffer, compression="zstd", write_page_checksum=True)
    return buffer.getvalue()


def read(paths: Iterable[Path], columns: Sequence[str] | None = None) -> Iterable[dict[str, list[Any]]]:
    """The columns of Parquet files, one file after the other.

    Raises:
        DamagedFile: one cannot be read, or its sums are wrong.
    """
    parquet = _pyarrow()[1]
    for path in paths:
        try:
            # ParquetFile and not read_table: that one takes a folder's name for a partition
            file = parquet.ParquetFile(path, page_checksum_verification=True)
            content = file.read(columns=list(columns) if columns else None).to_pydict()
        except Exception as error:  # whatever the bytes are
            raise DamagedFile(path, first_line(error)) from error
        if columns and set(columns) - set(content):
            raise DamagedFile(path, "columns are missing")
        yield content


def read_scanned_images(paths: Iterable[Path]) -> Iterable[ScannedImage]:
    """What models make of images, from Parquet files."""
    names = [one.name for one in fields(ScannedImage)]
    for columns in read(paths, names):
        yield from (ScannedImage(*values) for values in zip(*(columns[name] for name in names), strict=True))


def _schema(arrow: Any, kind: type[Row] | type[ScannedImage]) -> Any:
    text, few = arrow.string(), arrow.dictionary(arrow.int32(), arrow.string())
    whole, real, curve = arrow.int32(), arrow.float64(), arrow.list_(arrow.float32())
    types = {"target": whole, "seed": whole, "value": real, "passes": real, "map_seconds": real, "seconds": real}
    types |= {"curve": curve, "at": curve, "index": whole, "label": whole, "predicted": whole, "confidence": real}
    types |= {"pictures": arrow.list_(text), **dict.fromkeys(_WORDS, few)}
    return arrow.schema([(one.name, types.get(one.name, text)) for one in fields(kind)])


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise missing_extra("pyarrow", "eval") from error
    return pyarrow, pyarrow.parquet
