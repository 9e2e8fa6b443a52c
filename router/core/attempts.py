"""What a request moves while it is at a worker: from its dispatch to the end of this try, however that comes.

Of each there is a bill (`accounts`), a place in the worker's cache (`mirror`, `token_blocks`), its share of the
worker's load (`worker_state`), what the policy counts of it and what the bound on the service gap allows for
(`fairness`). They are moved here and nowhere else, all at once and each once: opened by `send`, moved by `start` and
`progress`, closed by `_end`, after which nothing of the try is left in any of them.

What comes back from a worker is closed as well, with all that the worker may have computed, and the next worker's bill
begins without it, so that a client pays once for a prompt and once for each token of output. What the next worker
computes anew is the router's doing and is charged to nobody.
"""

from math import inf
from typing import Final

from router.core.cache.prefix_map import PrefixMap
from router.core.clients.fairness import Fairness
from router.core.clients.ledger import Ledger
from router.core.clients.service_gap import Outstanding
from router.core.fleet.cluster import Cluster
from router.core.fleet_view import SchedulerView
from router.core.membership import Membership
from router.core.model.commands import Decision, Dispatch
from router.core.model.cost import NOTHING, Charge, LinearCost
from router.core.model.prompt_key import PromptKey
from router.core.model.request import RequestId, Usage
from router.core.policies.base import Choice, Policy
from router.core.predict.output_length import most_more
from router.core.predict.token_estimates import Estimates
from router.core.requests import RequestState, RequestStage

ESTIMATE_SECONDS: Final = 0.5
"""How long the output of whole answers goes uncharged."""


class Attempts:
    """Keeps the books of the requests that workers have."""

    def __init__(
        self,
        cluster: Cluster,
        prefixes: PrefixMap,
        view: SchedulerView,
        estimates: Estimates,
        accounts: Ledger,
        policy: Policy,
        fairness: Fairness,
        membership: Membership,
        cost: LinearCost,
    ) -> None:
        """`view`: over the same cluster and prefixes; it tells the policy of matches that change."""
        self._cluster = cluster
        self._states = cluster.states
        self._prefixes = prefixes
        self._mirror = prefixes.mirror
        self._blocks = prefixes.blocks
        self._view = view
        self._estimates = estimates
        self._accounts = accounts
        self._policy = policy
        self._fairness = fairness
        self._membership = membership
        self._cost = cost
        self._whole: dict[RequestId, RequestState] = {}
        """Those whose answers come whole, and of which nothing was seen."""
        self.next_estimate = inf
        """When the output of these is to be charged again; infinite without any."""

    def send(self, live: RequestState, choice: Choice, now: float) -> Dispatch:
        """It goes to the worker chosen, be it for the first time or after others; returns the command."""
        request, worker, why, passed = choice
        size, match = self._prefixes.size_and_match(request)
        answers, answered = self._estimates.answers, live.resumed_output
        expected = answers.expected(request)
        state = self._states[worker]
        turn = state.turn_of_next(now)
        cached = self._mirror.dispatch(request, worker, now, match.get(worker, 0), size, turn)
        live.stage, live.worker = RequestStage.IN_FLIGHT, worker
        if live.charged is None:
            charge = self._accounts.open(request, worker, size, cached)
        else:
            charge = self._accounts.open(request, worker, 0, 0)
            size += answered
            expected = max(0, expected - answered)
        live.outstanding = Outstanding(expected, charge.after.cached, charge.after.extend)
        decision = Decision(
            request.client, match, self._policy.credit(request.client, worker), state.load, state.window.limits, passed
        )
        state.add(
            request.id,
            size - cached,
            answers.likely(request, answered),
            now,
            streamed=request.streamed,
            most_output=most_more(request, answered),
            answers=request.answers,
        )
        if not request.streamed:
            self._whole[request.id] = live
            self.next_estimate = min(self.next_estimate, now + ESTIMATE_SECONDS)
        self._fairness.dispatched(request, worker, live.outstanding, now - live.waiting_since)
        self._policy.charged(charge)
        self._view.report_match_changes(self._policy)
        self._blocks.expect(request, worker)
        return Dispatch(request.id, worker, cached, why, decision)

    def start(self, live: RequestState, now: float, *, seen: bool = True) -> None:
        """Its prefill is over: what was reserved is served. `seen`: because its first token is here.

        Changes nothing of a request that has started, but that it is seen from now on, or that is at no worker.
        """
        worker = live.worker
        if worker is None:
            return
        request, state = live.request, self._states[worker]
        unseen = self._whole.pop(request.id, None) is not None if seen else False
        if live.stage is RequestStage.IN_FLIGHT or unseen:
            state.start(request.id, now, seen=seen)
            if seen:
                self._mirror.on_first_token(request.id, now)
                self._fairness.answered(request, now)
                if live.suspects:
                    self._membership.blame_suspects(live, now)
        if live.stage is not RequestStage.IN_FLIGHT:
            return
        live.stage = RequestStage.STARTED
        self._policy.started(request, worker)
        tokens = self._accounts.start(request.id)
        state.work.charge(NOTHING, tokens)
        served = self._cost(tokens)
        state.serve(request.id, served, 0)
        self._fairness.served(request, worker, served, now)

    def progress(self, live: RequestState, tokens: int, now: float) -> None:
        """Its client has so many output tokens by now, whichever workers gave them; nothing if it is at none."""
        worker = live.worker
        if worker is None:
            return
        if live.stage is RequestStage.IN_FLIGHT:
            self.start(live, now)
        request = live.request.id
        self._states[worker].heard(now)
        self._serve(live, self._accounts.progress(request, tokens - live.charged_output), now)
        self._mirror.set_output(request, tokens)
        self._view.report_match_changes(self._policy)

    def charge_estimates(self, now: float) -> None:
        """Charge whole answers for the output that they should have by now, by the pace of their workers.

        Nothing of such an answer is seen before all of it, and its client may let go of it just before. So it is
        charged as if it streamed: each answer gains a token whenever one that is seen beside it does (`Pace`), up to
        its limit. What the engine says at its end replaces the estimate; where it does not get to say it, the estimate
        stays. It is void where the worker broke off, which may have computed nothing for long, and where the answer is
        here and tells no usage: not all that engines answer is made of tokens.
        """
        for live in self._whole.values():
            self._estimate(live, now)
        self.next_estimate = now + ESTIMATE_SECONDS if self._whole else inf

    def _estimate(self, live: RequestState, now: float) -> None:
        request, worker = live.request, live.worker
        assert worker is not None, "it is at a worker until it ends"
        tokens = self._states[worker].output_by_pace(request.id, now)
        if request.output_limit is not None:
            tokens = min(tokens, request.output_limit)
        tokens -= live.charged_output
        if tokens > self._accounts.bills[request.id].tokens.output:
            if live.stage is RequestStage.IN_FLIGHT:
                self.start(live, now, seen=False)
                self._fairness.answered(request, now)
            self._serve(live, self._accounts.progress(request.id, tokens), now)

    def _given_up(self, live: RequestState, now: float) -> int:
        """The output that is owed for a whole answer whose end nobody will see, by the pace and the engine's count."""
        self._estimate(live, now)
        request, worker, bills = live.request, live.worker, self._accounts.bills
        assert worker is not None, "it is at a worker until it ends"
        estimated = bills[request.id].tokens.output
        beside = sum(bills[each].tokens.output for each, other in self._whole.items() if other.worker == worker)
        owed = estimated + self._states[worker].work.claim_output(estimated, beside)
        if request.output_limit is not None:
            owed = min(owed, request.output_limit - live.charged_output)
        self._mirror.set_output(request.id, owed)
        return owed

    def finish(self, live: RequestState, usage: Usage | None, answers: tuple[PromptKey, ...], now: float) -> bool:
        """It is answered in full; False, and nothing changes, if it is at no worker."""
        worker = live.worker
        if worker is None:
            return False
        if usage is not None:
            self._estimates.learn(live.request, usage, answers)
            self._states[worker].answered(live.request.id, usage.output_tokens, now)
        self._states[worker].succeeded(live.request.id, now)
        self._fairness.answered(live.request, now)
        if live.suspects:
            self._membership.blame_suspects(live, now)
        self._settle(live, usage, now, answers, keeps_estimate=False)
        return True

    def break_off(self, live: RequestState, usage: Usage | None, now: float, *, broken: bool = False) -> None:
        """End one that was computed, at least in part, and not to its end: what the engine did is paid.

        Its client left, or its worker failed. If the engine has not said how much of the input it found in its cache,
        the prediction is not taken at its word, or a client could leave each time before it is refuted. What was
        computed lies between the predicted extend and the whole input; the time of the first token says where:

            extend charged = max(predicted extend, min(whole input, computed by the pace until the first token))

        Of that time is left out all in which the engine did something else, or may have; so nobody pays for waiting.
        See `WorkerState.least_computed`. Where no first token was seen, the prediction holds.

        `broken`: the worker broke off, or hung.
        """
        least_extend = 0
        if live.charged is None and (usage is None or usage.cached_tokens is None):
            bill = self._accounts.bills[live.request.id]
            size = bill.tokens.extend + bill.tokens.cached
            least_extend = self._states[bill.worker].least_computed(live.request.id, size)
        self._settle(live, usage, now, (), least_extend, keeps_estimate=not broken)

    def _settle(
        self,
        live: RequestState,
        usage: Usage | None,
        now: float,
        answers: tuple[PromptKey, ...],
        least_extend: int = 0,
        *,
        keeps_estimate: bool,
    ) -> None:
        """`keeps_estimate`: whether the output estimated of a whole answer is owed where no usage tells."""
        request, paid = live.request.id, live.charged
        unseen = usage is None and request in self._whole
        output = None
        if unseen:
            output = self._given_up(live, now) if keeps_estimate else 0
        if live.stage is RequestStage.IN_FLIGHT:
            self.start(live, now, seen=False)
        if paid is not None and usage is not None:
            usage = Usage(0, max(0, usage.output_tokens - paid.output), 0)
        elif usage is not None:
            usage = self._found_by_first(live, usage)
        self._mirror.end(request, usage if paid is None else None, answers, now, computed=True)
        charge = self._accounts.settle(request, usage, least_extend, output=output)
        if paid is None and usage is not None and usage.cached_tokens is not None:
            self._states[charge.worker].told_computed(request, charge.after.extend)
        live.charged = charge.after if paid is None else charge.after.plus(paid)
        self._end(live, charge, now, computed=True)

    def _found_by_first(self, live: RequestState, usage: Usage) -> Usage:
        """What an engine says that a call used, with no more found in the cache than its first prefill was to find.

        Where a prompt is to have several answers, both engines compute it once, and each of the other answers finds it
        in the cache then. What the usage tells was found is what one of the answers found, any of them; so it bounds
        what was there before the call, and the prediction does, too.
        """
        request, cached = live.request, usage.cached_tokens
        if cached is None or request.answers == len(request.prompts):
            return usage
        predicted = self._accounts.bills[request.id].tokens.cached
        return Usage(usage.input_tokens, usage.output_tokens, min(cached, predicted))

    def refund(self, live: RequestState, now: float) -> None:
        """End one that its worker refused before it accepted it: nothing was computed, and nothing is owed."""
        self._mirror.end(live.request.id, None, (), now, computed=False)
        self._end(live, self._accounts.refund(live.request.id), now, computed=False)

    def _end(self, live: RequestState, charge: Charge, now: float, *, computed: bool) -> None:
        """Close what is still open: after this, nothing of the try is left in any count.

        `computed`: at least in part, and not turned away.
        """
        request, worker = live.request, charge.worker
        self._whole.pop(request.id, None)
        if live.stage is RequestStage.STARTED:
            self._serve(live, charge, now)
        else:
            self._policy.charged(charge)
        self._policy.ended(request, worker)
        self._blocks.end_request(request.id, stored=computed)
        self._fairness.ended(request, worker, live.outstanding)
        self._cluster.remove(request.id, worker, now, computed=computed)
        self._membership.forget_if_gone(worker)
        self._view.report_match_changes(self._policy)

    def _serve(self, live: RequestState, charge: Charge, now: float) -> None:
        """A started one's bill changed by what its worker did."""
        self._policy.charged(charge)
        cost = charge.at(self._cost)
        state = self._states[charge.worker]
        state.work.charge(charge.before, charge.after)
        state.serve(live.request.id, cost, charge.after.output - charge.before.output)
        self._fairness.served(live.request, charge.worker, cost, now)
        self._fairness.came_to(charge.worker, live.outstanding, charge.after)
