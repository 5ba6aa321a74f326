"""Benchmarks: programs that measure this system against its rivals in the same run.

They are never timed tests. `prorl bench NAME` loads `prorl.bench.NAME` and awaits its `run(quick)`,
which returns a `prorl.bench.report.Report`. Row names (`what`) are stable. Losing rows are printed
like the others.
"""
