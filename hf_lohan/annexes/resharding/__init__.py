"""Another number of ranks: copies the last step of a run to stores for other ranks, or with other owners of experts.

`lohan reshard` does it in one process, and a run that continues one of another number of ranks does it with all ranks
when it starts. It costs a copy of all records, for which both generations of stores need room at once.
"""

from hf_lohan.annexes.resharding.at_start import reshard_for_these_ranks
from hf_lohan.annexes.resharding.command import reshard_stores
