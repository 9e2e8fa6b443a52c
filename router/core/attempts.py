"""The books of a request while a worker has it: everything that one attempt counts, from its dispatch to its end.

An `Attempt` has a bill (`Ledger`), a place in the worker's cache (`CacheMirror`, `TokenBlocks`), a share of its load
(`WorkerState`), a share of what the policy counts, and an allowance in the bound on the service gap (`Fairness`).
These change only here, all together and once each: `send` makes the attempt and opens them, `start` and `progress`
change them, and `_close` closes them and takes the attempt off its request, after which nothing of it is left in any of
them.

An attempt that its worker returns is closed in the same way, with all that the worker may have computed. The bill of
the next attempt leaves that out, so a client is charged once for a prompt and once for each output token. What the next
worker computes again is the router's doing, and nobody is charged for it. In the same way, the attempt that decodes a
prefilled request is charged for output only, and a second prefill is free. That also holds where both attempts are open
at once: that of the prompt is closed first.
"""

from math import inf
from typing import Final

from router.core.books import Books
from router.core.cache.cache_model import PinnedRun
from router.core.clients.fairness import Fairness, Outstanding
from router.core.fleet.in_flight import InFlight
from router.core.fleet.worker_state import WorkerState
from router.core.handoffs import PrefillGate, pooled_outstanding
from router.core.membership import Membership
from router.core.model.commands import Decision, Deficit, Dispatch
from router.core.model.cost import NOTHING, Charge, Tokens
from router.core.model.events import ChargedRequest, Failed, Fault, Resumed, Returned
from router.core.model.prompt_key import PromptKey
from router.core.model.request import Leg, Request, Role, Usage, WorkerId
from router.core.policies.base import Choice, Policy
from router.core.requests import Attempt, Handoff, RequestState, Stage

ESTIMATE_SECONDS: Final = 0.5
"""How often the output of unstreamed answers is estimated and charged, in seconds."""


class Attempts:
    """Keeps the books of all requests that workers have."""

    def __init__(
        self,
        books: Books,
        policy: Policy,
        fairness: Fairness,
        membership: Membership,
        gate: PrefillGate,
    ) -> None:
        self._fleet = books.fleet
        self._workers = books.fleet.states
        self._prefixes = books.prefixes
        self._mirror = books.prefixes.mirror
        self._blocks = books.prefixes.blocks
        self._estimates = books.estimates
        self._ledger = books.ledger
        self._policy = policy
        self._fairness = fairness
        self._turns = fairness.turns
        self._membership = membership
        self._gate = gate
        self._unstreamed: dict[RequestState, None] = {}
        """Requests whose answers are not streamed and of which nothing has been seen yet."""
        self.next_estimate = inf
        """When the output of unstreamed answers is to be charged next, in seconds; infinite if there are none."""

    def send(self, state: RequestState, choice: Choice, now: float) -> Dispatch:
        """Open the books of an attempt, the first one or a retry, and return the command that dispatches it."""
        leg = _leg_at(state, self._workers[choice.worker])
        state.attempt, dispatch = self._send(state, state.request, choice, leg, None, now)
        return dispatch

    def send_both(self, state: RequestState, prefill: Choice, decode: Choice, now: float) -> tuple[Dispatch, Dispatch]:
        """Open the books of two attempts at once: at a prefill worker, and at the decode worker that waits for it."""
        state.prefill, first = self._send(state, state.request, prefill, Leg.PREFILL, decode.worker, now)
        state.attempt, second = self._send(state, decode.request, decode, Leg.DECODE, prefill.worker, now)
        return first, second

    def _send(
        self, state: RequestState, part: Request, choice: Choice, leg: Leg, partner: WorkerId | None, now: float
    ) -> tuple[Attempt, Dispatch]:
        """`part`: as in `Attempt`."""
        request, worker_id, why, passed = choice
        worker = self._workers[worker_id]
        load, limits = worker.load, worker.window.limits
        attempt, deficit = self._open(state, part, worker, leg, partner, now, sent=request)
        # The lookup is of the moment of the dispatch: `_predict` has brought it up to date before anything changed.
        decision = Decision(request.client, state.lookup.match, deficit, load, limits, passed)
        cached = attempt.run.predicted_tokens
        return attempt, Dispatch(state.request.id, worker_id, cached, why, decision, leg, partner)

    def resume(
        self, state: RequestState, part: Request, event: Resumed, carried: ChargedRequest | None, now: float
    ) -> None:
        """Open the books of an attempt that an earlier run has sent to its worker.

        `part`: as in `Attempt`; `carried`: what the restored counters and accounts hold for the attempt. That is taken
        back, as the new bill charges it again.
        """
        if carried is not None and carried.started:
            self._ledger.take_back(carried, state.request.model)
        charged = NOTHING if carried is None else carried.charged
        worker = self._workers[event.worker]
        attempt, _ = self._open(state, part, worker, event.leg, event.partner, now, event.cached_tokens, charged)
        if event.leg is Leg.PREFILL and event.partner is not None:
            state.prefill = attempt
        else:
            state.attempt = attempt

    def _open(
        self,
        state: RequestState,
        part: Request,
        worker: WorkerState,
        leg: Leg,
        partner: WorkerId | None,
        now: float,
        predicted: int | None = None,
        charged: Tokens = NOTHING,
        sent: Request | None = None,
    ) -> tuple[Attempt, Deficit]:
        """Open the books of an attempt. Returns it, and the client's deficits before it, if it is sent now.

        `part`: as in `Attempt`; `partner`: as in `Dispatch`. `predicted`: input tokens predicted to be cached; None to
        predict them now. `charged`: what the policy's counters hold for the attempt already. `sent`: the request as the
        policy chose it; None if an earlier run has sent it.
        """
        request, worker_id, resumed = state.request, worker.worker.id, state.resumed_output
        run, reserved, likely = self._predict(state, worker, now)
        size = state.lookup.size
        cached = run.predicted_tokens if predicted is None else min(predicted, size)
        # Only the first attempt that is charged pays for the prompt, and none that decodes.
        pays_prompt = state.charged is None and leg is not Leg.DECODE
        bill = self._ledger.open(part, worker_id, size, cached, pays_prompt=pays_prompt)
        charge = self._ledger.charge_since(bill, charged)
        if leg is Leg.PREFILL and partner is not None:
            reserved = 0
        outstanding = Outstanding(reserved, bill.tokens.cached, bill.tokens.extend)
        flight = self._add_flight(state, worker, leg, cached, likely, now)
        if run.prefilling is not None:
            run.prefilling.flight = flight
        if leg is Leg.DECODE and partner is not None:  # it has had its turn, together with its prefill
            self._fairness.request_pooled(request, worker_id, outstanding)
        else:
            since = state.waiting_since if state.handoff is None else state.handoff.since
            self._fairness.request_dispatched(request, worker_id, outstanding, now - since, now)
        if sent is None:
            self._policy.request_charged(charge)
            deficit = Deficit()
        else:
            output = self._estimates.outputs.lengths.remaining(request) if resumed else likely
            missing = 0 if leg is Leg.DECODE else size - state.lookup.match.get(worker_id, 0)
            deficit = self._policy.request_sent(sent, charge, missing, output)
        if self._prefixes.changed:
            self.report_match_changes()
        blocks = self._blocks.expect(request, worker_id) if request.blocks else None
        return Attempt(worker, bill, run, flight, outstanding, blocks, part, leg=leg), deficit

    def _add_flight(
        self, state: RequestState, worker: WorkerState, leg: Leg, cached: int, output: float, now: float
    ) -> InFlight:
        """Add an attempt to its worker's load. `cached`: input tokens that the worker need not compute; `output`: the
        output tokens that the whole request is expected to have.
        """
        request, resumed, prefills = state.request, state.resumed_output, leg is Leg.PREFILL
        uncached = state.lookup.size + resumed - cached
        most = inf if request.output_limit is None else max(0, request.output_limit - resumed)
        # A prefill is answered as soon as its token is there.
        if not (streamed := request.streamed or prefills):
            self._unstreamed[state] = None
            self.next_estimate = min(self.next_estimate, now + ESTIMATE_SECONDS)
        fetched = max(0, uncached - 1) if leg is Leg.DECODE else 0  # it computes the last token of the prompt
        return worker.add(
            uncached - fetched,
            1.0 if prefills else output,
            now,
            streamed=streamed,
            most_output=1 if prefills else most,
            answers=request.answers,
            cached_tokens=cached,
            fetched_tokens=fetched,
        )

    def _predict(self, state: RequestState, worker: WorkerState, now: float) -> tuple[PinnedRun, int, float]:
        """Pin the prompt in the worker's cache. Returns that, and the output tokens to be reserved and to be expected.

        Output is predicted at each dispatch and not once on arrival: while a request waits, the predictors learn from
        the answers that end, and the more so the longer it waits. The prediction is O(1), so it costs little.
        """
        request, worker_id, outputs = state.request, worker.worker.id, self._estimates.outputs
        lookup = self._prefixes.up_to_date(state.lookup)
        matched = lookup.match.get(worker_id, 0)
        run = self._mirror.dispatch(request, worker_id, now, matched, lookup.size, worker.expected_prefill_start)
        reserved = round(outputs.reserved.remaining(request, state.resumed_output))
        return run, reserved, outputs.lengths.remaining(request, state.resumed_output)

    def start(self, state: RequestState, now: float, *, seen: bool = True) -> None:
        """Note that the prefill is over, and charge what was reserved for it.

        `seen`: whether the first token has been seen. A request that has started already changes only in being seen
        from now on; a request at no worker does not change.
        """
        if state.attempt is not None:
            self._start(state, state.attempt, now, seen=seen)

    def _start(self, state: RequestState, attempt: Attempt, now: float, *, seen: bool) -> None:
        request, worker = state.request, attempt.worker
        sent, unseen = attempt.stage is Stage.SENT, False
        if seen and state in self._unstreamed and attempt is state.attempt:
            del self._unstreamed[state]
            unseen = True
        if sent or unseen:
            if seen and attempt.leg is not Leg.PREFILL:
                self._note_answered(state, now)
            if self._fleet.held:
                worker.resume_start(attempt.flight, now, seen=seen)
            else:
                worker.start(attempt.flight, now, seen=seen)
            if seen:
                if attempt.run.cache.rules.found_when_computed:
                    self._mirror.on_first_token(attempt.run, now)
                if state.suspects:
                    self._membership.blame_suspects(state, now)
        if not sent:
            return
        attempt.stage = Stage.STARTED
        self._policy.request_started(attempt.part, worker.worker.id)
        tokens = self._ledger.start(attempt.bill)
        served = attempt.bill.cost
        if not self._fleet.held:
            worker.serve(attempt.flight, NOTHING, tokens, served)
        self._fairness.add_service(request, worker.worker.id, served, now)

    def progress(self, state: RequestState, tokens: int, now: float) -> None:
        """Charge new output: `tokens` is all output that the client has by now, whichever workers computed it.

        A request at no worker does not change.
        """
        if (attempt := state.attempt) is None:
            return
        if attempt.stage is Stage.SENT:
            self.start(state, now)
        attempt.worker.mark_alive(now)
        self._apply_charge(state, attempt, self._ledger.progress(attempt.bill, tokens - state.charged_output), now)
        self._mirror.set_output(attempt.run, tokens)
        if self._prefixes.changed:
            self.report_match_changes()

    def charge_estimates(self, now: float) -> None:
        """Charge unstreamed answers for the output that they should have by now, at their workers' decode rate.

        Nothing of such an answer is seen before all of it is, and its client may disconnect just before. So the answer
        is charged as if it were streamed: it gains a token whenever a streamed answer beside it does (`ServiceRate`),
        up to its limit. The usage in the engine's answer replaces the estimate; where there is none because the client
        left, the estimate stays. It is void if the worker broke off, since it may have computed nothing for long, and
        if the answer is complete without a usage, since not every answer consists of tokens.
        """
        for state in self._unstreamed:
            self._estimate(state, now)
        self.next_estimate = now + ESTIMATE_SECONDS if self._unstreamed else inf

    def _estimate(self, state: RequestState, now: float) -> None:
        request, attempt = state.request, state.attempt
        assert attempt is not None, "an unstreamed answer comes from a worker"
        if state.prefill is not None:
            return  # it waits for its prompt
        tokens = attempt.worker.estimated_output(attempt.flight, now)
        if request.output_limit is not None:
            tokens = min(tokens, request.output_limit)
        tokens -= state.charged_output
        if tokens > attempt.bill.tokens.output:
            if attempt.stage is Stage.SENT:
                self.start(state, now, seen=False)
                self._note_answered(state, now)
            self._apply_charge(state, attempt, self._ledger.progress(attempt.bill, tokens), now)

    def _unseen_output(self, state: RequestState, attempt: Attempt, now: float) -> int:
        """Return the output tokens to charge for an unstreamed answer whose end nobody will see.

        They follow from the worker's decode rate and from the engine's own counter of output tokens.
        """
        self._estimate(state, now)
        unstreamed = [other.attempt for other in self._unstreamed if other.attempt is not None]
        estimated_of_all = sum(each.bill.tokens.output for each in unstreamed if each.worker is attempt.worker)
        estimated = attempt.bill.tokens.output
        output = estimated + attempt.worker.work.claim_output(estimated, estimated_of_all)
        if state.request.output_limit is not None:
            output = min(output, max(0, state.request.output_limit - state.charged_output))
        self._mirror.set_output(attempt.run, output)
        return output

    def set_aside(self, state: RequestState, now: float) -> None:
        """Leave the attempts of a request out of its workers' loads, as nobody reports on them."""
        for attempt in (state.prefill, state.attempt):
            if attempt is not None:
                attempt.worker.set_aside(attempt.flight, now)

    def bring_back(self, state: RequestState, now: float) -> None:
        """Count the attempts of a request again that were set aside."""
        for attempt in (state.prefill, state.attempt):
            if attempt is not None:
                attempt.worker.bring_back(attempt.flight, now)

    def finish(self, state: RequestState, usage: Usage | None, answers: tuple[PromptKey, ...], now: float) -> bool:
        """End an attempt whose answer is complete. Returns False, and changes nothing, if no worker has the request."""
        if (attempt := state.attempt) is None:
            return False
        if state.prefill is not None:
            self.end_prefill(state, state.prefill, usage, now, seen=False)
        if usage is not None:
            self._estimates.learn(state.request, usage, answers)
        output_tokens, just_now = None if usage is None else usage.output_tokens, not self._fleet.held
        attempt.worker.on_complete_answer(attempt.flight, output_tokens, now, just_now=just_now)
        self._note_answered(state, now)
        if state.suspects:
            self._membership.blame_suspects(state, now)
        self._settle(state, attempt, usage, now, answers, charge_estimate=False)
        return True

    def hand_off(self, state: RequestState, usage: Usage | None, now: float) -> Handoff | None:
        """End an attempt that has computed the prompt only. Returns what its worker keeps of the request; None, without
        any change, if no prefill worker has it.
        """
        attempt = state.attempt
        if attempt is None or attempt.leg is not Leg.PREFILL:
            return None
        self.end_prefill(state, attempt, usage, now)
        worker, rest = attempt.worker.worker.id, pooled_outstanding(attempt.outstanding)
        self._fairness.request_pooled(state.request, worker, rest)
        return Handoff(worker, now, rest)

    def end_prefill(
        self, state: RequestState, attempt: Attempt, usage: Usage | None, now: float, *, seen: bool = True
    ) -> None:
        """End an attempt that has computed the prompt only.

        `usage`: of the prefill, or of the whole request; `seen`: whether the prefill worker has just answered.
        """
        self._start(state, attempt, now, seen=seen)
        # The engine counts the one token of a prefill, which nobody is charged for.
        attempt.worker.serve(attempt.flight, NOTHING, Tokens(output=1), 0.0)
        self._settle(state, attempt, _of_prompt(usage), now, (), charge_estimate=False)
        if (decode := state.attempt) is not None and not decode.flight.streamed:
            decode.flight.decoding_since = now

    def cancel(self, state: RequestState, attempt: Attempt, usage: Usage | None, now: float) -> None:
        """End the attempts of a request whose client left."""
        prefilled = state.prefill is None
        if state.prefill is not None:
            self.break_off(state, state.prefill, _of_prompt(usage), now)
        self.break_off(state, attempt, usage, now, decoded=prefilled)

    def fail(self, state: RequestState, attempt: Attempt, event: Failed | Returned, now: float) -> Attempt:
        """End the attempts of a request that failed at a worker, and return the one that failed."""
        broken, prefill = event.fault is Fault.BROKEN, state.prefill
        if prefill is None:
            if event.accepted:
                self.break_off(state, attempt, event.usage, now, broken=broken)
            else:
                self.refund(state, attempt, now)
            return attempt
        of_prompt = event.leg is Leg.PREFILL
        begun = attempt.stage is Stage.STARTED
        if of_prompt and not (event.accepted or begun):
            self.refund(state, prefill, now)
        else:
            self.break_off(state, prefill, _of_prompt(event.usage), now, broken=of_prompt and broken)
        if begun or (event.accepted and not of_prompt):
            self.break_off(state, attempt, event.usage, now, broken=broken and not of_prompt, decoded=begun)
        else:
            self.refund(state, attempt, now)
        return prefill if of_prompt else attempt

    def break_off(
        self,
        state: RequestState,
        attempt: Attempt,
        usage: Usage | None,
        now: float,
        *,
        broken: bool = False,
        decoded: bool = True,
    ) -> None:
        """End an attempt that was computed at least in part but not to its end, and charge what the engine did.

        Its client left, or its worker failed. The predicted cache hit is not enough if the engine has not reported how
        much of the input it found in its cache, or a client could gain by leaving each time before the prediction is
        refuted. The tokens computed lie between the predicted extend and the whole input, and the time to the first
        token narrows that down:

            extend charged = max(predicted extend, min(whole input, computed at the prefill rate until the first token))

        All time in which the engine did something else, or may have done so, is left out, so nobody pays for waiting
        (see `WorkerState.min_computed_tokens`). If no first token was seen, the prediction holds.

        `broken`: whether the worker broke off or hung; `decoded`: whether it had the prompt, so that it may have
        computed output that nobody saw.
        """
        min_extend = 0
        if attempt.bill.pays_prompt and (usage is None or usage.cached_tokens is None):
            size = attempt.bill.tokens.extend + attempt.bill.tokens.cached
            min_extend = attempt.worker.min_computed_tokens(attempt.flight, size)
        self._settle(state, attempt, usage, now, (), min_extend, charge_estimate=decoded and not broken)

    def _settle(
        self,
        state: RequestState,
        attempt: Attempt,
        usage: Usage | None,
        now: float,
        answers: tuple[PromptKey, ...],
        min_extend: int = 0,
        *,
        charge_estimate: bool,
    ) -> None:
        """Charge what an attempt cost and close it.

        `charge_estimate`: whether the estimated output of an unstreamed answer is charged if there is no usage.
        """
        output = None
        if usage is None and state in self._unstreamed and attempt is state.attempt:
            output = self._unseen_output(state, attempt, now) if charge_estimate else 0
        if attempt.stage is Stage.SENT:
            self._start(state, attempt, now, seen=False)
        pays_prompt = attempt.bill.pays_prompt
        said = usage
        if usage is not None and pays_prompt:
            usage = _cap_cached(state.request, attempt, usage)
        elif usage is not None:
            usage = Usage(0, max(0, usage.output_tokens - state.charged_output), 0)
        resent = 0
        if state.request.beam_search:
            resent = self._resent_tokens(state, attempt, said, output if usage is None else usage.output_tokens)
        self._mirror.end(attempt.run, usage if pays_prompt else None, answers, now, computed=True)
        charge = self._ledger.settle(
            attempt.bill,
            usage,
            min_extend,
            output=output,
            cached_is_estimate=pays_prompt and usage is not said and usage != said,
            resent=resent,
        )
        reports = pays_prompt and usage is not None and usage.cached_tokens is not None
        input_tokens = charge.after.extend - resent if reports else None
        self._close(state, attempt, charge, now, computed=True, input_tokens=input_tokens)
        state.add_charged(charge.after)

    def _resent_tokens(self, state: RequestState, attempt: Attempt, said: Usage | None, output: int | None) -> int:
        """Return the input tokens that a search for beams computed beyond its prompts, for the output that an attempt
        is charged. `said`: what the engine reports; `output`: the tokens charged, None for those charged so far.
        """
        paid = attempt.bill.tokens if state.charged is None else state.charged
        prompt = paid.extend + paid.cached if said is None else said.input_tokens
        output = attempt.bill.tokens.output if output is None else output
        return self._mirror.resent_tokens(state.request, attempt.run, prompt, output)

    def refund(self, state: RequestState, attempt: Attempt, now: float) -> None:
        """End an attempt that its worker refused before accepting it: nothing was computed and nothing is charged."""
        self._mirror.end(attempt.run, None, (), now, computed=False)
        self._close(state, attempt, self._ledger.refund(attempt.bill), now, computed=False)

    def _close(
        self,
        state: RequestState,
        attempt: Attempt,
        charge: Charge,
        now: float,
        *,
        computed: bool,
        input_tokens: int | None = None,
    ) -> None:
        """Close what is still open: after this, nothing of the attempt is left in any count.

        `computed`: whether the worker computed at least a part, instead of refusing the request; `input_tokens`: how
        much of the input, by the engine's usage.
        """
        request, worker = state.request, attempt.worker
        if attempt is state.attempt:
            self._unstreamed.pop(state, None)
        if attempt.stage is Stage.STARTED:
            self._apply_charge(state, attempt, charge, now)
        else:
            self._policy.request_charged(charge)
        self._estimates.outputs.attempt_ended(charge)
        self._policy.request_ended(attempt.part, worker.worker.id)
        if attempt.blocks is not None:
            self._blocks.end(attempt.blocks, stored=computed)
        self._fairness.attempt_ended(request, worker.worker.id, attempt.outstanding)
        worker.remove(attempt.flight, now, computed=computed, input_tokens=input_tokens)
        if computed and attempt.leg is Leg.DECODE:
            self._gate.decode_ended(worker, now)
        if worker.left:
            self._membership.forget_if_gone(worker)
        if attempt is state.prefill:
            state.prefill = None
        else:
            state.attempt = None
        if self._prefixes.changed:
            self.report_match_changes()

    def _note_answered(self, state: RequestState, now: float) -> None:
        """Note that a request's first token arrived or is believed to be computed."""
        if not state.answered:
            state.answered = True
            self._turns.request_answered(state.request.client, state.request.id, now)

    def report_match_changes(self) -> None:
        """Report to the policy the changed matches that it asked to `watch`.

        Queued requests need current matches at any time, since an order by longest match is wrong with outdated ones.
        """
        for worker, requests in self._prefixes.take_changes().items():
            self._policy.match_changed(worker, requests)

    def _apply_charge(self, state: RequestState, attempt: Attempt, charge: Charge, now: float) -> None:
        """Apply the charge for what the worker of a started request did to all counts of service."""
        self._policy.request_charged(charge)
        cost, worker = charge.cost, attempt.worker
        if self._fleet.held:  # an earlier run has seen it
            worker.resume_output(attempt.flight, charge.after.output - charge.before.output)
        else:
            worker.serve(attempt.flight, charge.before, charge.after, cost)
        self._fairness.add_service(
            state.request, charge.worker, cost, now, outstanding=attempt.outstanding, charge=charge
        )


def _leg_at(state: RequestState, worker: WorkerState) -> Leg:
    """Return what a worker computes of a request that is sent there now."""
    if state.handoff is not None:
        return Leg.DECODE
    return Leg.PREFILL if worker.worker.role is Role.PREFILL and not state.request.whole else Leg.WHOLE


def _of_prompt(usage: Usage | None) -> Usage | None:
    """Return what a usage says of the prompt."""
    return None if usage is None else Usage(usage.input_tokens, 0, usage.cached_tokens)


def _cap_cached(request: Request, attempt: Attempt, usage: Usage) -> Usage:
    """Return the usage with its cached tokens capped at those that the first prefill was predicted to find.

    If a prompt is to have several answers, both engines compute it once, and each further answer then finds it in the
    cache. The usage reports what an unspecified one of the answers found. That is an upper bound on what was cached
    before the call, and so is the prediction.
    """
    cached = usage.cached_tokens
    if cached is None or request.answers == len(request.prompts):
        return usage
    return Usage(usage.input_tokens, usage.output_tokens, min(cached, attempt.bill.tokens.cached))
