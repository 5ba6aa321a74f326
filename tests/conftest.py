"""One BLAS thread for every test: two collapse on busy cores (measured: ten times slower). Must come before numpy is loaded."""

import os

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")
