"""Settings of a process that forks or is a worker: one thread each for numpy, no warnings of forks.

Multiprocessing's fork server imports this module before numpy. The process of a run never imports it.
"""

import os
import warnings

# there is a process per environment
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
os.environ.update(THREADS | os.environ)
# jax warns of forks, but computes nothing in a worker; Python 3.12 warns of threads, which hold no lock here
warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
