"""Which tokens the next step computes. The same on every rank: it depends on nothing but the requests."""

from collections.abc import Sequence

from dcpmla.runtime.request import Request


def schedule(requests: Sequence[Request], max_num_batched_tokens: int) -> list[tuple[Request, int]]:
    """Pick requests and how many tokens of each: prompts first, in chunks; then one token of every running request.

    Returns:
        At most max_num_batched_tokens tokens of prefill, or a decode of all running requests; empty when all are finished.
    """
    running = [request for request in requests if request.finish_reason is None]
    step, budget = [], max_num_batched_tokens
    for request in running:
        if not request.token_ids and budget:
            num_tokens = min(request.num_pending_tokens, budget)
            step.append((request, num_tokens))
            budget -= num_tokens
    # A one-token piece is a decode wherever it comes from: a batch has its decodes in front.
    step.sort(key=lambda piece: piece[1] != 1)
    return step or [(request, 1) for request in running]
