"""Loads weights to the device one block at a time, and releases them.

The path of one block: `schedule` decides when to load it. A `block_loader` asks the `source` to load it into a slot of
the `slot_ring` ahead of its use, and its parameters become views of the slot. `blocks_in_use` keeps it there while a
forward or a backward needs it. This package has no hooks and no gradients. `engine` reports which blocks are needed,
and `updates` reports which blocks have changed.
"""

from hf_lohan.weights.block_loader import BlockLoader, LayerLoader, RankLoader, WeightSource
from hf_lohan.weights.blocks_in_use import BlocksInUse
from hf_lohan.weights.load_order import NextLoad, SlotLoad
from hf_lohan.weights.node_shards import NodeShards
from hf_lohan.weights.peer_weights import PeerWeightCache, RamPeerWeights, SsdPeerWeights
from hf_lohan.weights.schedule import LoadSchedule
from hf_lohan.weights.shared_source import SharedWeights
from hf_lohan.weights.slot_ring import Slot, SlotRing
from hf_lohan.weights.source import Decoder, LocalWeights, RecordReader, RowLoads
