"""A service under faults for minutes, and its checks."""
