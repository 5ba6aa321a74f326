"""Notebook tools over run directories: reports, exports, imports, selections."""
