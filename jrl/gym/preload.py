"""Process settings for the fork server and its workers: one numpy thread each, no fork warnings.

Multiprocessing's fork server imports this module before numpy. The process of a run never imports it.
"""

import os
import warnings

# one process per environment already uses all cores
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
os.environ.update(THREADS | os.environ)
# workers do not use jax, which warns about forks; Python 3.12 warns about threads, but they hold no lock here
warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
