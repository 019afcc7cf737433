"""Where the readers of an import put rows: Parquet files in a staging folder, with bounded memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from alphamoe_profiler.bundle_files import encode_json
from alphamoe_profiler.import_records import PART_SHIFT, SYMBOL_SHIFT, ImportedStep
from alphamoe_tracers.columns import column
from alphamoe_tracers.records import TABLES
from alphamoe_tracers.steps import StepAnnotation, parse_step
from alphamoe_tracers.trace_files import SymbolTable

ROW_GROUP_ROWS = 1 << 17
_DELTA_COLUMNS = ("start_ns", "end_ns", "created_ns", "correlation_id", "graph_node_id", "original_node_id")


class TableWriter:
    """Appends rows of one table to one Parquet file, a row group at a time."""

    def __init__(self, path: Path, name: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._schema = TABLES[name]
        deltas = {field: "DELTA_BINARY_PACKED" for field in self._schema.names if field in _DELTA_COLUMNS}
        self._writer = pq.ParquetWriter(
            path,
            self._schema,
            compression="zstd",
            compression_level=1,
            use_dictionary=[field for field in self._schema.names if field not in deltas],  # type: ignore[arg-type]
            column_encoding=deltas,
            write_statistics=["start_ns"] if "start_ns" in self._schema.names else False,
        )
        self._staged: list[pa.Table] = []
        self._rows = 0

    def add(self, rows: pa.Table) -> None:
        """Append rows that follow the table's schema."""
        self._staged.append(rows.cast(self._schema))
        self._rows += rows.num_rows
        if self._rows >= ROW_GROUP_ROWS:
            self._flush()

    def close(self) -> None:
        """Write what is staged and end the file."""
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._staged:
            self._writer.write_table(pa.concat_tables(self._staged).unify_dictionaries().combine_chunks())
            self._staged, self._rows = [], 0


class StagingSink:
    """Takes the rows of one file (it is the readers' sink) and notes its step annotations on the way."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._keys: dict[str, int] = {}
        self._writers: dict[tuple[str, str], TableWriter] = {}
        self._symbols: dict[str, SymbolTable] = {}
        self._steps: dict[str, list[ImportedStep]] = {}

    def folder_of(self, rank_key: str) -> Path:
        """Return the folder of one key. Keys come from a file and are no names of folders."""
        return self._folder / str(self._keys.setdefault(rank_key, len(self._keys)))

    def put(self, rank_key: str, table: str, rows: pa.Table) -> None:
        """Write rows of one table."""
        if not rows.num_rows:
            return
        if table == "ranges":
            self._note_steps(rank_key, rows)
        writer = self._writers.get((rank_key, table))
        if writer is None:
            path = self.folder_of(rank_key) / table / "part-00000.parquet"
            writer = self._writers[rank_key, table] = TableWriter(path, table)
        writer.add(rows)

    def symbols(self, rank_key: str) -> SymbolTable:
        """Return the symbol table of one key."""
        return self._symbols.setdefault(rank_key, SymbolTable())

    def close(self) -> None:
        """End every file; the symbols and the steps are written now."""
        for key, symbols in self._symbols.items():
            if len(symbols):
                self.put(key, "symbols", symbols.rows())
        for writer in self._writers.values():
            writer.close()
        for key, steps in self._steps.items():
            ordered = sorted(steps, key=lambda item: (item.start_ns, item.process, item.thread))
            write_steps(self.folder_of(key) / "steps.jsonl", ordered)

    def _note_steps(self, rank_key: str, rows: pa.Table) -> None:
        names: Any = rows.column("name").unify_dictionaries().combine_chunks()
        if isinstance(names, pa.ChunkedArray):
            names = names.chunk(0)
        parsed: dict[int, tuple[str, StepAnnotation]] = {}
        for code, name in enumerate(names.dictionary.to_pylist()):
            annotation = parse_step(name) if name is not None else None
            if annotation is not None:
                parsed[code] = (name, annotation)
        if not parsed:
            return
        codes = np.asarray(names.indices)
        at = np.flatnonzero(np.isin(codes, list(parsed)))
        for row, code in zip(rows.take(pa.array(at, pa.int64())).to_pylist(), codes[at].tolist(), strict=True):
            name, said = parsed[code]
            self._steps.setdefault(rank_key, []).append(
                ImportedStep(
                    step=0,
                    name=name,
                    engine=said.engine,
                    forward_mode=said.forward_mode,
                    real_tokens=said.real_tokens,
                    padded=said.padded,
                    batch_size=said.batch_size,
                    capture=said.capture,
                    process=row["process"],
                    thread=row["thread"],
                    start_ns=row["start_ns"],
                    end_ns=row["end_ns"],
                )
            )


def write_steps(path: Path, steps: list[ImportedStep]) -> None:
    """Write step annotations, one a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(encode_json(item, item.name) for item in steps))


def append_part(source: Path, target: Path, name: str, part: int) -> None:
    """Copy a table of another file of the same rank, its ids moved apart, row group by row group.

    Args:
        source: the Parquet file that was staged.
        target: where it goes.
        name: of the table.
        part: its number among the files of its rank, not 0.
    """
    writer = TableWriter(target, name)
    with pq.ParquetFile(source) as file:
        for group in range(file.num_row_groups):
            rows = file.read_row_group(group).cast(TABLES[name])
            for field, shift in (("process", PART_SHIFT), ("symbol_id", SYMBOL_SHIFT)):
                if field in rows.column_names:
                    at = rows.schema.get_field_index(field)
                    moved = column(rows, field).astype(np.int64) + (part << shift)
                    rows = rows.set_column(
                        at, TABLES[name].field(field), pa.array(moved, TABLES[name].field(field).type)
                    )
            writer.add(rows)
    writer.close()
