"""Activations: the tensors that a forward keeps for its backward.

`tiers` runs each layer in a `layer_frame`, which sees every operation and passes outputs to the `swapper` (LoHan,
MEMO). A `swapped_tensor` represents a tensor that was swapped out. Of a compiled layer, `saved_graph` swaps what its
graph saves. `trace` records the first step for the planner. `chunked_head` computes the loss for some tokens at a time.
Until then `pending_logits` represent the logits.
"""

from hf_lohan.activations.chunked_head import ChunkedHead, ChunkedLoss, Smoothing, chunked_head_of, has_foreign_forward
from hf_lohan.activations.kernel_names import anchor_name
from hf_lohan.activations.tiers import ActivationTiers
from hf_lohan.activations.trace import LayerTrace
