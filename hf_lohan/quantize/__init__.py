"""Packed weights: codecs of 4 bits with the bits of bitsandbytes, in torch operations.

A `PackedForm` says how one parameter is packed. A `Packer` packs its elements as they come, and `decode_` unpacks any
range of whole blocks. Nothing here knows where the bytes lie.
"""

from hf_lohan.quantize.four_bit import PackedForm, Packer, decode_, join_scales, scale_values, unpack_, values_of

__all__ = ["PackedForm", "Packer", "decode_", "join_scales", "scale_values", "unpack_", "values_of"]
