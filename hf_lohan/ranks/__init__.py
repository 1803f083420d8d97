"""Several ranks that train one model together: messages between them, and what follows from a rank that fails.

One process is one rank. Each pair of ranks has a connection for each lane (`Links`), made once (`connect`). Ranks of
one box share memory (`SharedRegion`), so that their messages only say where bytes lie. No collective of a process group
is used: what is waited for, from whom and how long is known here, and an error names the rank. For slow links there are
codecs (`BlockCodec`, and without loss `StepDelta`).
"""

from hf_lohan.ranks.block_codec import GRADIENTS_INT4, GRADIENTS_INT8, WEIGHTS_INT8, BlockCodec, CodingError
from hf_lohan.ranks.coded_lane import CodedBytes, CodedLane
from hf_lohan.ranks.commit_agreement import CommitAgreement, newest_of_all
from hf_lohan.ranks.errors import RankFailedError, RanksDisagreeError, RankTimeoutError
from hf_lohan.ranks.gradient_exchange import CompleteGradient, GradientExchange
from hf_lohan.ranks.gradient_parts import GradientPart
from hf_lohan.ranks.handlers import Handler
from hf_lohan.ranks.links import Links
from hf_lohan.ranks.messages import HEAD_BYTES, Kind, Lane, PayloadReader
from hf_lohan.ranks.rank_order_sum import sum_in_rank_order_
from hf_lohan.ranks.rendezvous import connect
from hf_lohan.ranks.shared_region import SharedRegion
from hf_lohan.ranks.step_agreement import StepAgreement
from hf_lohan.ranks.step_delta import StepDelta
from hf_lohan.ranks.topology import ALONE, Ranks
from hf_lohan.ranks.turns import one_rank_at_a_time

__all__ = [
    "ALONE",
    "GRADIENTS_INT4",
    "GRADIENTS_INT8",
    "HEAD_BYTES",
    "WEIGHTS_INT8",
    "BlockCodec",
    "CodedBytes",
    "CodedLane",
    "CodingError",
    "CommitAgreement",
    "CompleteGradient",
    "GradientExchange",
    "GradientPart",
    "Handler",
    "Kind",
    "Lane",
    "Links",
    "PayloadReader",
    "RankFailedError",
    "RankTimeoutError",
    "Ranks",
    "RanksDisagreeError",
    "SharedRegion",
    "StepAgreement",
    "StepDelta",
    "connect",
    "newest_of_all",
    "one_rank_at_a_time",
    "sum_in_rank_order_",
]
