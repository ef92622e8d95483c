"""Tables: what users have, and what models read."""

from deepwishart.data.encoding import Column, TableEncoder, TableError
from deepwishart.data.rows import Scaler, merge_rows
from deepwishart.data.tables import read_table, write_table

__all__ = ["Column", "Scaler", "TableEncoder", "TableError", "merge_rows", "read_table", "write_table"]
