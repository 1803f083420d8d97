"""Weights on and off the device, a block at a time.

Follow one block: the `schedule` says when it is its turn; a `block_loader` has the `source` bring it ahead of use into
a slot of the `slot_ring`, where its parameters become views; `blocks_in_use` keeps it there while a forward or a
backward needs it. Knows no hooks and no gradients: whoever runs the model says what is needed, and `updates` says
what has become new.
"""

from hf_lohan.weights.block_loader import BlockLoader, LayerLoader, Loads, LocalLoader, WeightSource
from hf_lohan.weights.blocks_in_use import BlocksInUse
from hf_lohan.weights.load_order import NextLoad, SlotLoad
from hf_lohan.weights.lockstep_loader import JointSource, LockstepLoader
from hf_lohan.weights.node_shards import NodeShards
from hf_lohan.weights.peer_weights import PeerWeightCache, RamPeerWeights, SsdPeerWeights
from hf_lohan.weights.schedule import LoadSchedule
from hf_lohan.weights.shared_source import SharedWeights
from hf_lohan.weights.slot_ring import Slot, SlotRing
from hf_lohan.weights.source import Decoder, LocalWeights, RecordReader

__all__ = [
    "BlockLoader",
    "BlocksInUse",
    "Decoder",
    "JointSource",
    "LayerLoader",
    "LoadSchedule",
    "Loads",
    "LocalLoader",
    "LocalWeights",
    "LockstepLoader",
    "NextLoad",
    "NodeShards",
    "PeerWeightCache",
    "RamPeerWeights",
    "RecordReader",
    "SharedWeights",
    "Slot",
    "SlotLoad",
    "SlotRing",
    "SsdPeerWeights",
    "WeightSource",
]
