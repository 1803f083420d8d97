"""Optimizers: torch's update rules over flat chunks, exact codecs for masters, rounding codecs for AdamW's moments, and
the `Optimizer` that users see. All update host tensors in place.
"""

from hf_lohan.optim.adamw import AdamWGroup, Segment, within
from hf_lohan.optim.moments import SCALE_BLOCK_NUMEL, STOCHASTIC, MomentDtype
from hf_lohan.optim.optimizer import JointOptimizer, OffloadAdamW, OffloadOptimizer
from hf_lohan.optim.precision import TIE_CODES, TIE_RUN_NUMEL, MasterFormat, master_format, widen_in_place
from hf_lohan.optim.rules import ADAMW, MUON, OPTIMIZERS, RULE_KEY, Aside, UpdateRule, here, rule_for
from hf_lohan.optim.update import Steps, join_master_, replay_, split_master_, update_records_
