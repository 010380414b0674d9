# SPDX-License-Identifier: Apache-2.0
"""SGLang's EAGLE worker with a choice per decode step: draft, or decode plainly.

`Switching` overrides what a step does and leaves construction, prefill and weights to SGLang. See
`modes` for the two kinds of step, `draft_stage` for how drafts are made, `ring` for what an off
step leaves behind, `catch_up` for how drafting resumes, `commit` for how every step ends, `extend`
for the draft model after it.
"""

from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
from sglang.srt.speculative.standalone_worker_v2 import StandaloneWorkerV2

from specfused.policy import Mode
from specfused.sglang import compat, draft_stage, features, limits, release, ring
from specfused.sglang.candidates import Chooser
from specfused.sglang.catch_up import CatchUp
from specfused.sglang.commit import Verifier
from specfused.sglang.extend import DraftExtend
from specfused.sglang.modes import Modes, OneNodeTrees, ours
from specfused.sglang.report import Report
from specfused.sglang.switch import Switch


class Switching:
    """Mixin before one of SGLang's workers."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.switches = limits.may_switch(self)
        self.switch = Switch.from_environment(self.device)
        self._step = 0  # decode steps launched
        self._processed = 0  # and of these, those whose result the scheduler has processed
        self._drafted = True  # whether the last decode step drafted

    def init_cuda_graphs(self):
        if self.switches:
            choose = Chooser(self.topk, self.req_to_token_pool.req_to_token.shape[0])
            self.draft_stage = draft_stage.install(self, choose) or self.draft_worker
        super().init_cuda_graphs()
        if not self.switches:
            return
        runner = self.target_worker.model_runner
        draft_worker = self.draft_worker
        table_shape = self.req_to_token_pool.req_to_token.shape
        self.ring = ring.PendingRing(
            table_shape,
            ring.configured_size(),
            compat.hidden_size_of_draft_input(draft_worker.draft_runner),
            runner.dtype,
            runner.device,
        )
        width = self.speculative_num_draft_tokens
        attn = draft_worker.draft_extend_attn_backend or draft_worker.draft_runner.attn_backend
        self.catch_up = CatchUp(draft_worker, self.ring, width, ours(attn), choose)
        self.draft_extend = DraftExtend(draft_worker, width, table_shape[0], ours(attn), choose)
        if self.topk > 1:
            features.check_pool(runner)
        self.modes = Modes(runner)
        self.modes.capture_off()
        self.verifier = Verifier(
            self.target_worker,
            features.kv_buffers(runner),
            self.topk,
            self.modes.ours,
            getattr(draft_worker.cuda_graph_runner_for_draft_extend, "select_rows", None),
        )
        self.trees = OneNodeTrees(self.modes, table_shape[0], self.topk, runner.device)
        release.worker = self
        self.switch.calibrate(self)
        self._leave_decode()
        settings = compat.settings()
        interval = settings["decode_log_interval"] if compat.tp_rank() == 0 else 0
        self.report = Report(self.switch.policy, interval, settings.get("enable_metrics", False))
        limits.report(self)

    # -- a step

    def forward_batch_generation(self, batch, on_publish=None, grammar_barrier=None, **kwargs):
        """One forward of the scheduler's: prefill as SGLang does it, decode in the mode chosen."""
        kwargs |= {"on_publish": on_publish, "grammar_barrier": grammar_barrier}
        if not self.switches:
            return super().forward_batch_generation(batch, **kwargs)
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            ring.clear(batch.reqs)  # prefill writes the draft's KV of all it prefills
            self.switch.prefill()
            self._leave_decode()
            return super().forward_batch_generation(batch, **kwargs)
        self._step += 1
        mode = self.switch.choose(batch.reqs)
        result = self.run_step(mode, batch, on_publish, grammar_barrier)
        self.switch.launched()
        self.report.step(mode, self.catch_up.tokens)
        return result

    def _leave_decode(self):
        """SGLang finds all as it would have left it itself."""
        self.modes.enter(True)
        self._drafted = True  # the last to read what the scheduler writes is the draft model
        self._forget_reads_done()

    def _forget_reads_done(self):
        for runner in (self.target_worker.model_runner, self.draft_worker.draft_runner):
            compat.forget_reads_done(runner)

    def run_step(self, mode, batch, on_publish=None, grammar_barrier=None):
        """One decode step in a given mode."""
        self._drafted = mode is Mode.ON
        self.modes.enter(self._drafted)
        self._forget_reads_done()
        step = self._step_on if self._drafted else self._step_off
        return step(batch, on_publish, grammar_barrier)

    def _step_on(self, batch, on_publish, grammar_barrier):
        with compat.draft_contexts(self.draft_worker):
            self.catch_up.run(batch, resume=True)
            batch.spec_info = self.draft_stage.draft(batch)
        verify_input = batch.spec_info
        result, committed = self._verify(batch, grammar_barrier)
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        with compat.draft_contexts(self.draft_worker):
            self.draft_extend.run(batch, verify_input, result, committed)
        return result

    def _step_off(self, batch, on_publish, grammar_barrier):
        keeps_draft = not self.switch.never_drafts
        if keeps_draft and max(map(ring.pending, batch.reqs), default=0) >= self.ring.size:
            with compat.draft_contexts(self.draft_worker):
                self.catch_up.run(batch, resume=False)
        drafted = batch.spec_info
        rows, seq_lens = batch.req_pool_indices, batch.seq_lens
        batch.spec_info = self.trees.build(batch)
        result, _ = self._verify(batch, grammar_barrier)
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        if keeps_draft:
            hidden_states = result.logits_output.hidden_states
            self.ring.push(rows, seq_lens, result.next_token_ids, hidden_states)
            ring.note_off_step(batch.reqs, self._step)
        # SGLang relays these by request in every step. No step reads them before a catch-up has
        # replaced them.
        following = result.next_draft_input
        following.topk_p = drafted.topk_p
        following.topk_index = drafted.topk_index
        following.hidden_states = drafted.hidden_states
        return result

    def _verify(self, batch, grammar_barrier):
        """Verifies and commits batch.spec_info at whatever width it has."""
        publish = None if self._drafted else self._publish_off
        return self.verifier.run(
            batch,
            self.req_to_token_pool,
            grammar_barrier=grammar_barrier,
            publish_reads_done=publish,
        )

    # -- scheduling

    def _publish_off(self):
        compat.publish_reads_done(self.draft_worker.draft_runner)

    @property
    def last_shared_read_runner(self):
        """0.5.23: whose event says that the step has read all it shares with the scheduler."""
        if self._drafted:
            return super().last_shared_read_runner
        return self.target_worker.model_runner

    def on_verify_complete_cpu(self, num_correct_drafts_per_req, batch_size=0):
        """The oldest launched decode step's result is on the host, about to be processed."""
        super().on_verify_complete_cpu(num_correct_drafts_per_req, batch_size=batch_size)
        if not self.switches:
            return
        self._processed += 1
        self.switch.finished([n + 1 for n in num_correct_drafts_per_req])

    def missing_draft_kv(self, req) -> int:
        """Committed positions of `req` whose draft KV is still in the ring."""
        return ring.missing_draft_kv(req, self._processed)


class SpecFusedWorker(Switching, EAGLEWorkerV2):
    """EAGLE and EAGLE3."""


class SpecFusedStandaloneWorker(Switching, StandaloneWorkerV2):
    """STANDALONE: the draft is a language model of its own and takes tokens only."""


WORKERS = {EAGLEWorkerV2: SpecFusedWorker, StandaloneWorkerV2: SpecFusedStandaloneWorker}
