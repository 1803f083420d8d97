"""Packed weights: codecs of 4 bits with the bits of bitsandbytes, in torch operations.

A `PackedForm` says how one parameter is packed. A `Packer` packs its elements as they come, and `decode_` unpacks any
range of whole blocks. Nothing here knows where the bytes lie.
"""

from hf_lohan.quantize.four_bit import Packer, decode_, encode

__all__ = ["Packer", "decode_", "encode"]
