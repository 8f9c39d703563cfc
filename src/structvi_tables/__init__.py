"""Own data without code: a table becomes columns, folds, fitted candidates, a posterior in a folder and a page."""

from .fitting import TableFit, fit_table
from .model import TableModel
from .reading import TableError, read_table

__all__ = ["TableError", "TableFit", "TableModel", "fit_table", "read_table"]
