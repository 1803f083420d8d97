"""Runs the trial in a separate process: ``python -m hf_lohan.annexes.gpu_direct DEVICE FOLDER...``."""

import sys

from hf_lohan.annexes.gpu_direct.trials import try_folders

try_folders(sys.argv[1:])
