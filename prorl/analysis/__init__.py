"""Notebook tools over run directories: reports, exports, selections, made-up runs."""
