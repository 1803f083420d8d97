"""Packs and decodes weights with torch operations.

A `PackedForm` defines how the store packs one parameter, and decodes it. `FourBitForm` is NF4 and FP4, bitwise equal to
bitsandbytes. `EncodedForm` is for the codes of other quantized checkpoints. A `Packer` packs elements in order.
No code here depends on where the bytes are stored.
"""

from hf_lohan.quantize.encoded_weights import EncodedForm, int8_form
from hf_lohan.quantize.four_bit import FourBitForm, decode_, join_scales, scale_values, values_of
from hf_lohan.quantize.packed_form import PackedForm, Packer, stored_bytes
