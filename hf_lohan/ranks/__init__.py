"""Lets several ranks train one model together, with lanes, collectives and the handling of failed ranks.

One process is one rank. Ranks communicate in lanes (`RankLane`), which are groups of gloo that `Links` opens. One
thread of each rank uses a lane, so its collectives have one order. Ranks of one node share memory (`SharedRegion`).
Every wait asks `Watch`, so that errors name the rank that has died, failed or hangs. For slow links between nodes this
package has codecs (`BlockCodec`, and `StepDelta` without loss).
"""

from hf_lohan.ranks.collectives.block_codec import (
    GRADIENTS_INT4,
    GRADIENTS_INT8,
    GRADIENTS_WITHIN,
    WEIGHTS_INT8,
    BlockCodec,
)
from hf_lohan.ranks.collectives.coded_lane import CodedTraffic, MeasuredCodec
from hf_lohan.ranks.collectives.gradient_exchange import CompleteGradient, GradientExchange
from hf_lohan.ranks.collectives.node_sums import TableRows
from hf_lohan.ranks.collectives.rank_order_sum import SUM_TILE_NUMEL, CodedValues, DeviceSums, sum_in_rank_order_
from hf_lohan.ranks.collectives.row_exchange import IS_OF_TOKEN, CallOfRank, ChosenRows, ExpertCall, RowExchange
from hf_lohan.ranks.collectives.row_links import RowLinks
from hf_lohan.ranks.collectives.step_delta import StepDelta
from hf_lohan.ranks.equal_values import check_equal
from hf_lohan.ranks.transport.agreements import CommitAgreement, StepAgreement
from hf_lohan.ranks.transport.device_lane import DeviceLane, DeviceLanes
from hf_lohan.ranks.transport.failures import RankFailedError, RanksDisagreeError, RankTimeoutError
from hf_lohan.ranks.transport.lanes import BegunWork, LaneClosedError, RankLane, bytes_of
from hf_lohan.ranks.transport.links import Links, connect, one_rank_at_a_time
from hf_lohan.ranks.transport.rounds import Rounds
from hf_lohan.ranks.transport.shared_region import SharedRegion
from hf_lohan.ranks.transport.topology import SINGLE_RANK, Ranks
