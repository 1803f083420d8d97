"""The engine: connects a model's hooks to the parts that train it. `huggingface/` trains through this object."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hf_lohan.absent import AbsentParameter
from hf_lohan.config import ResolvedConfig
from hf_lohan.device import Device
from hf_lohan.engine.build import (
    build_embedding_rows,
    build_loaders,
    build_pass_parts,
    build_plan,
    build_streamed_experts,
    build_updates,
)
from hf_lohan.engine.events import EngineEvents
from hf_lohan.engine.lifetime import Lifetime
from hf_lohan.engine.model_hooks import ModelHooks
from hf_lohan.engine.model_pass import ModelPass, PassPhase
from hf_lohan.engine.parameter_access import ParameterAccess, Zeros
from hf_lohan.engine.ranks import RankBatches, all_agree, check_equal_groups
from hf_lohan.engine.tiers import Tiers
from hf_lohan.engine.weight_reads import WeightReads
from hf_lohan.experts import BalancedRows, ComputeExpert
from hf_lohan.micro_batches import JointParts, MicroBatchRun
from hf_lohan.model import ParamSlice
from hf_lohan.optim import OffloadOptimizer
from hf_lohan.planning import OffloadLayout, StepShape
from hf_lohan.ranks import Links, StepAgreement
from hf_lohan.store import Commit
from hf_lohan.timeline import COMPUTE_WAITS
from hf_lohan.updates import ClipWay, SkippedSteps, StepResult, WeightChange
from hf_lohan.weights import SlotRing

logger = logging.getLogger(__name__)


class OffloadEngine:
    """Trains a model whose parameters and optimizer states are in a store.

    `drain_model` or the streamed load must have written the parameters to the store before.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: OffloadLayout,
        tiers: Tiers,
        config: ResolvedConfig,
        events: EngineEvents | None = None,
        compute_expert: ComputeExpert | None = None,
    ) -> None:
        """``compute_expert`` is needed if experts stream one by one."""
        self.model = model
        self.tiers = tiers
        self.config = config
        self.device: Device = tiers.device
        self.timeline = self.device.timeline
        self.agreement = StepAgreement(tiers.links)
        """The values that ranks exchange in each step, and their decisions."""
        events = events or EngineEvents()
        self._lifetime = Lifetime()
        self._ring = SlotRing(self.device, layout.plan, layout.kept_layers)
        updates = build_updates(model, layout, tiers, config, self._ring, self.agreement)
        self.records, self.step_counts, self.commits = updates.records, updates.step_counts, updates.commits
        self._groups, self._pipeline, self._step = updates.groups, updates.pipeline, updates.step
        self._block_of, self.clip_history = updates.block_of, updates.clip_history
        self.skipped_steps = SkippedSteps(config.max_skipped_steps)
        self.optimizer: OffloadOptimizer | None = None
        """The optimizer whose hyperparameters the updates use."""
        self._parameters = ParameterAccess(self.records, layout.blocks, tiers.states, tiers.links)
        self.embedding_rows = build_embedding_rows(layout, tiers, self._ring, updates)
        loaders = build_loaders(layout, tiers, config, self._ring, updates)
        self.expert_loader, self._prefetcher = loaders.experts, loaders.layers
        self._expert_places = loaders.expert_places
        self.batches = RankBatches(model, tiers.links)
        self._plan, self.activations = build_plan(model, layout, tiers, config, events, updates, loaders, self.batches)
        self.planned_memory = self._plan.memory
        parts = build_pass_parts(
            tiers, self._ring, events, updates, loaders, self._plan, self.activations, self._lifetime
        )
        self._pass = ModelPass(parts)
        self.clock = self._pass.clock
        self._hooks = ModelHooks(model, layout.model_blocks, self._pass, parts)
        self.experts = build_streamed_experts(
            model, self._ring, loaders, layout, compute_expert, self._hooks.current_forward_pass
        )
        self._reads = WeightReads(
            layout.blocks,
            parts,
            self._pass,
            self._parameters,
            wait_for_updates=self._pipeline.wait_for_updates,
            forward_pass=self._hooks.current_forward_pass,
            saving=self._hooks.saving,
            rows=self.embedding_rows,
            links=tiers.links,
        )
        for parameter in dict.fromkeys(part.parameter for part in self._block_of):
            AbsentParameter.set_provider(parameter, self._reads)
        self._micro_batches = MicroBatchRun(
            JointParts(
                model=model,
                num_layers=len(layout.model_blocks.layers),
                device=self.device,
                ring=self._ring,
                model_pass=self._pass,
                holds_gradients=layout.holds_gradients,
                using_forward_pass=self._hooks.using_forward_pass,
            )
        )
        self._lifetime.close_at_exit(self)

    @property
    def layout(self) -> OffloadLayout:
        """The layout of the model and the memory."""
        return self.planned_memory.layout

    @property
    def links(self) -> Links:
        """The links to the other ranks."""
        return self.tiers.links

    # Several micro-batches at once.

    def choose_order(self, shape: StepShape) -> bool:
        """Plan steps with micro-batches of this shape, before the first step. Returns whether `run_micro_batches` is
        faster than running the micro-batches one after the other."""
        self._lifetime.check()
        is_faster = self._plan.choose_order(shape)
        return all_agree(self.links, "whether micro-batches run together", is_faster)

    def plan_again(self) -> None:
        """Plan the next training forward, because the run continues from a commit with another plan."""
        self._plan.ask_again()

    def run_micro_batches(self, micro_batches: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run all micro-batches of a step through each block before the next block, so that weights move once. Each
        function runs a forward and passes its loss to `defer_backward`. Returns the functions' results. Gradients are
        bitwise equal to the gradients of micro-batches that run one after another.

        The functions run in threads, one at a time. After all have ended, this raises their first error, or
        RuntimeError if there is no loss.
        """
        self._pass.recover()
        if self.layout.keeps_gradient_dtypes and len(micro_batches) > 1 and self._pipeline.has_gradients:
            raise RuntimeError(
                "run_micro_batches was called in a step that already has gradients, but memory is allocated for one "
                "backward per step; set gradient_accumulation_steps before the model is offloaded"
            )
        self._plan.run_together(len(micro_batches))
        together = self.expert_loader.together(len(micro_batches)) if self.expert_loader else nullcontext()
        with together, self.planned_memory.out_of_memory.added_to_errors():
            return self._micro_batches(micro_batches)

    @property
    def defers_backwards(self) -> bool:
        """Whether the caller runs in `run_micro_batches` and must pass its loss to `defer_backward`."""
        return self._micro_batches.is_running

    def defer_backward(self, loss: Tensor) -> bool:
        """In `run_micro_batches`, register ``loss`` for a backward after all forwards and return True. Elsewhere return
        False, so that the caller runs the backward."""
        return self._micro_batches.defer_backward(loss)

    # Steps.

    def bind_optimizer(self, optimizer: OffloadOptimizer) -> None:
        """Use the hyperparameters of ``optimizer``, which starts with zero moments. Raises ValueError if its groups do
        not fit the store."""
        if self.optimizer is not None:
            self.wait_for_updates()  # running updates belong to the earlier optimizer and count as its steps
        self._groups.bind_optimizer(optimizer)
        check_equal_groups(self._groups, self.links)
        if self.optimizer is not None:
            for part in [part for part, count in self.step_counts.items() if count]:
                self.step_counts[part] = 0
                for kind in self._block_of[part].master.moment_kinds:
                    self._parameters.write_state(part.name, kind, Zeros())
        self.optimizer = optimizer

    def rounding_seed(self) -> int | None:
        """Return the seed with which updates round weights: the seed of rank 0's generator. Returns None if no update
        rounds weights. All ranks call this together."""
        if not any(block.master.rounds_weights for block in self.layout.blocks):
            return None
        seeds = self.links.all_gather("the seeds of the ranks", str(torch.initial_seed()).encode())
        return int(seeds[0]) % (1 << 32)

    def check_groups(self) -> None:
        """Raise ValueError if the optimizer's groups have changed and do not fit the store."""
        self._groups.follow_optimizer(may_be_without_group=True)

    def announce_backward(self, *, is_final: bool) -> bool:
        """Set whether later backwards are the last of their step, in a loop without an `Accelerator`. Returns what was
        set before."""
        return self._pass.announce_backward(is_final=is_final)

    def step(self) -> None:
        """Finish the step. Updates that needed the norm may still run during the next forward, which waits for each
        block's update before it reads the block. `wait_for_updates` waits for all. A step whose gradients are not
        finite is skipped. Raises NonFiniteGradientError after too many skipped steps in a row.
        """
        self._micro_batches.refuse_within("step()")
        self._pass.recover_before_step()
        group_of = self._groups.at_step(has_updates=self._pipeline.has_begun_updates)
        with self.timeline.task(COMPUTE_WAITS, "the norm"), self.planned_memory.out_of_memory.added_to_errors():
            self.commits.keep_what_was_loaded()
            result = self._step.finish_step(group_of)
        self._prefetcher.foresee_pass(is_training=True)
        self.clock.end_step()
        self.commits.end_step()
        self.tiers.codecs.end_step()
        self._plan.end_step()
        self.skipped_steps.note_step(result)

    @property
    def last_step(self) -> StepResult | None:
        """The result of the last step."""
        return self._step.last

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step changed nothing because a gradient was not finite."""
        return self.last_step is not None and self.last_step.not_finite is not None

    def clip_by(self, way: ClipWay) -> None:
        """Set how steps clip. This applies from the next step on, or now if the current step has had no backward."""
        self._step.clip_by(way)

    def go_back_to_commit(self) -> Commit:
        """Drop everything that is not committed, including loaded weights. Returns the last commit. Raises ValueError
        if nothing is committed."""
        self.drop_gradients()
        self.wait_for_updates()
        commit = self.commits.go_back()
        if commit.ties is None:
            self._round_anew()
        self.forget_weights()
        return commit

    def _round_anew(self) -> None:
        num_changed = self._parameters.round_anew(self.layout.blocks)
        if num_changed:
            logger.warning(
                "the last step was written by an older version of hf_lohan, which rounded bfloat16 weights half up; %d "
                "of them are now rounded half to even, as torch rounds, and their float32 masters stay as they are",
                num_changed,
            )

    @property
    def undone_update_s(self) -> float:
        """Seconds of updates that were undone, because a guess was wrong or a step was dropped."""
        return self._pipeline.undone_s

    def wait_for_updates(self) -> None:
        """Wait until the store has every update of the steps so far."""
        self._lifetime.check()
        self._pipeline.wait_for_updates()

    @property
    def parameters(self) -> ParameterAccess:
        """Parameters and their states in the store after the last step."""
        self.wait_for_updates()
        return self._parameters

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the step's gradients (`StepTransaction.clip_gradients`)."""
        self._micro_batches.refuse_within("clip_grad_norm")
        self._pass.recover_before_step()
        with self.timeline.task(COMPUTE_WAITS, "the norm"), self.planned_memory.out_of_memory.added_to_errors():
            self.commits.keep_what_was_loaded()
            return self._step.clip_gradients(max_norm, norm_type)

    def drop_gradients(self, *, to_none: bool = True) -> None:
        """Forget gradients that have not been applied. ``to_none``: as `set_to_none` of torch's `zero_grad`."""
        self._micro_batches.refuse_within("zero_grad()")
        self._pass.recover()
        self._step.abandon_gradients(to_none=to_none)
        self._ring.moved_gradients.clear()

    @property
    def parameter_slices(self) -> list[ParamSlice]:
        return list(self._block_of)

    def rows_by_rank(self) -> BalancedRows | None:
        """Return the rows of experts by rank (`ExpertPlaces.rows_by_rank`)."""
        return self._expert_places.rows_by_rank()

    @property
    def peak_gpu_pool_bytes(self) -> int:
        """Largest number of bytes of the device slots that were in use at once."""
        return self._ring.high_water_bytes

    def forget_weights(self) -> None:
        """Forget loaded weights, because a checkpoint's parameters replaced the store's parameters."""
        self._ring.end_step(self.layout.blocks, WeightChange.WRITE)

    @property
    def store_folders(self) -> set[str]:
        """Real paths of the store's folders."""
        return {os.path.realpath(path.path) for path in self.tiers.store.paths}

    @property
    def is_closed(self) -> bool:
        """Whether the engine is closed or is being closed."""
        return self._lifetime.is_over

    def __del__(self) -> None:
        if hasattr(self, "_lifetime"):
            self._lifetime.end_unowned(self)

    def close(self) -> None:
        """Stop the threads, close the store and remove the hooks. The model's parameters stay placeholders."""
        if not self._lifetime.end_life():
            return
        self._hooks.remove()
        self.model.register_forward_pre_hook(_refuse_closed)
        self._prefetcher.close()
        self._expert_places.close()
        if self.embedding_rows is not None:
            self.embedding_rows.close()
        self.activations.close()
        if self._leaves_whole_steps:
            self.commits.request(even_in_place=True)
        self._pipeline.close()
        self.tiers.close()

    @property
    def _leaves_whole_steps(self) -> bool:
        """Whether `close` must commit, because complete steps have ended that no journal will commit."""
        return (
            (self.commits.has_more or not self.commits.are_kept)
            and self.commits.each_step
            and self._pipeline.failure is None
            and self._pass.phase is PassPhase.IDLE
            and not self._step.is_half_applied
        )


def _refuse_closed(_module: nn.Module, _args: Any) -> None:
    raise RuntimeError("the engine of this model is closed and cannot load its weights; load the model again")
