"""One thread for each test process.

The tests' matrices are small, and idle OpenMP threads spin: on two cores, two processes with two
threads each take seven times as long as two processes with one.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
