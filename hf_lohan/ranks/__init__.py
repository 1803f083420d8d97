"""Several processes that train one model, a rank each: what they send each other, and in which form."""

from hf_lohan.ranks.block_codec import GRADIENTS_INT4, GRADIENTS_INT8, WEIGHTS_INT8, BlockCodec, CodingError

__all__ = ["GRADIENTS_INT4", "GRADIENTS_INT8", "WEIGHTS_INT8", "BlockCodec", "CodingError"]
