"""`prorl demo`: the command, its recipe, its display and its report."""
