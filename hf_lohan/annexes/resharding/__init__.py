"""Copies the last step of a run to new stores, for another number of ranks or with other owners of experts.

`lohan reshard` copies in one process. A run that continues with another number of ranks copies with all ranks when it
starts. All records are copied, so the drives must have room for the old and the new stores at the same time.
"""

from hf_lohan.annexes.resharding.at_start import reshard_for_these_ranks
from hf_lohan.annexes.resharding.command import reshard_stores
