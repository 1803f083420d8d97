"""Packed weights, in torch operations.

A `PackedForm` says how the store has one parameter, and decodes it: `FourBitForm` is NF4 and FP4 with the bits of
bitsandbytes, `EncodedForm` what other quantized checkpoints have. A `Packer` packs elements as they come. Nothing here
knows where the bytes lie.
"""

from hf_lohan.quantize.encoded_weights import EncodedForm, int8_form
from hf_lohan.quantize.four_bit import FourBitForm, Packer, decode_, join_scales, scale_values, values_of
from hf_lohan.quantize.packed_form import PackedForm, WeightPacker
